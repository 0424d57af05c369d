// The loops where memory bandwidth decides, compiled three times (AVX-512, AVX2, portable) from kernels_body.hpp and
// chosen at run time. All paths give the same bits: element-wise IEEE operations, explicit fma, and one fixed 16-lane
// tree for the only reduction. Kernels work on the rows of one bucket at a time, under its lock, and never allocate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config.hpp"

namespace satrap {

// What an optimizer step needs, as floats already folded from the config, the learning rate and the step.
struct StepScalars {
    OptimizerKind kind;
    Dtype dtype;
    bool nesterov;
    std::uint32_t dim;
    std::uint32_t value_bytes;
    std::uint32_t row_bytes;
    std::uint32_t step;
    std::uint64_t table_key;
    double lr, beta1, beta2; // Adam's bias corrections are computed in double, as torch does
    float momentum, weight_decay, eps;
    float ftrl_beta, l1, l2;
};

struct RowStep {
    std::byte* row;
    const float* gradient;
    std::uint64_t id;
};

struct InitialScalars {
    InitialKind kind;
    Dtype dtype;
    OptimizerKind optimizer;
    std::uint32_t dim;
    std::uint32_t value_bytes;
    std::uint32_t state_dim;
    std::uint64_t table_key;
    double a, b;
    float initial_accumulator_value;
    float ftrl_decay; // beta / lr + l2
    float ftrl_l1;
};

struct Kernels {
    const char* name;
    // out[positions[e]] = values of rows[local[e]], for e < count
    void (*gather)(const std::byte* const* rows, const std::uint32_t* local, const std::uint32_t* positions,
                   std::size_t count, std::uint32_t dim, Dtype dtype, float* out);
    // sums[local[e]] += gradients[positions[e]], in order; started[] (zeroed by the caller) marks ids that got one
    void (*sum)(const float* gradients, const std::uint32_t* local, const std::uint32_t* positions, std::size_t count,
                std::uint32_t dim, float* sums, std::uint8_t* started);
    // one optimizer step on each row; scratch holds dim floats
    void (*step)(const StepScalars& scalars, const RowStep* steps, std::size_t count, float* scratch);
    // the bits of the largest magnitude; from 0x7f800000 (infinity) on, something is not finite
    std::uint32_t (*largest)(const float* values, std::size_t count);
    // values and state of a new row; scratch holds dim floats
    void (*initialise)(const InitialScalars& scalars, std::uint64_t id, std::byte* row, float* scratch);
};

const Kernels& portable_kernels();
#ifdef SATRAP_HAVE_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// The paths that this machine can run, best first.
inline std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> paths;
#ifdef SATRAP_HAVE_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        paths.push_back(&avx512_kernels());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        paths.push_back(&avx2_kernels());
#endif
    paths.push_back(&portable_kernels());
    return paths;
}

} // namespace satrap
