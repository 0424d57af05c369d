// The loops where memory bandwidth decides, compiled three times (AVX-512, AVX2, portable) from kernels_body.hpp and
// chosen at run time. All paths give the same bits, but for the two of the dense network (dots): element-wise IEEE
// operations, explicit fma, and one fixed 16-lane tree for the only reduction. Kernels never allocate or lock: who
// gives them rows holds the lock of their bucket. Who calls one that rounds, which all but `largest` do, holds a
// FloatMode (float_mode.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/table_config.hpp"

namespace satrap {

// The factor and divisor of an entry's gradient between a pooled row and the id's row: the weight
// of the id, and what the pooling divided the bag by. 1 changes no bit.
struct Factor {
    float weight = 1.0f;
    float divisor = 1.0f;
};

// Gradients of some entries, in order of appearance: each (*from * scale * weight) / divisor, rounded after each.
struct Gradients {
    const float* const* from; // where each entry's begins
    const Factor* factors;    // one for each entry; nullptr: all are 1
    float scale;
};

// The scalars of an optimizer step, folded from the config, the learning rate and the step.
struct StepScalars {
    static StepScalars of(const TableConfig& config, std::uint64_t table_key, std::uint32_t step, double lr) {
        const OptimizerConfig& o = config.optimizer;
        return {.kind = o.kind,
                .dtype = config.dtype,
                .nesterov = o.nesterov,
                .dim = config.dim,
                .value_bytes = static_cast<std::uint32_t>(config.value_bytes()),
                .row_bytes = static_cast<std::uint32_t>(config.row_bytes()),
                .step = step,
                .table_key = table_key,
                .lr = lr,
                .beta1 = o.betas[0],
                .beta2 = o.betas[1],
                .momentum = static_cast<float>(o.momentum),
                .weight_decay = static_cast<float>(o.weight_decay),
                .eps = static_cast<float>(o.eps),
                .ftrl_beta = static_cast<float>(o.beta),
                .l1 = static_cast<float>(o.l1),
                .l2 = static_cast<float>(o.l2)};
    }

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
    static InitialScalars of(const TableConfig& config, std::uint64_t table_key) {
        const OptimizerConfig& o = config.optimizer;
        return {.kind = config.initial,
                .dtype = config.dtype,
                .optimizer = o.kind,
                .dim = config.dim,
                .value_bytes = static_cast<std::uint32_t>(config.value_bytes()),
                .state_dim = config.state_dim(),
                .table_key = table_key,
                .a = config.initial_a,
                .b = config.initial_b,
                .initial_accumulator_value = static_cast<float>(o.initial_accumulator_value),
                .ftrl_decay = static_cast<float>(o.beta / o.lr + o.l2),
                .ftrl_l1 = static_cast<float>(o.l1)};
    }
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

// The shape of one sample's dot products of all pairs: the number of vectors, and their length.
struct DotShape {
    std::uint32_t num;
    std::uint32_t dim;
    std::size_t pairs() const { return std::size_t{num} * (num - 1) / 2; }
    std::uint32_t rows() const { return (num + 15) / 16 * 16; } // a multiple of what is in a register, as width is
    std::uint32_t width() const { return (dim + 15) / 16 * 16; }
    std::size_t scratch_floats() const { return std::size_t{rows()} * (2 * width() + rows()) + pairs() + 16; }
};

// The exponents of an encoded row. The least leaves subnormal floats unchanged; the most is that of 2^127.
constexpr std::int32_t kLeastWireExponent = -126, kMostWireExponent = 113;

struct Kernels {
    const char* name;
    // to[e][0 .. dim-1] = values of rows[local[e]], for e < count
    void (*gather)(const std::byte* const* rows, const std::uint32_t* local, float* const* to, std::size_t count,
                   std::uint32_t dim, Dtype dtype);
    // sums[local[e]] += gradient e, in order; started[] (zeroed by the caller) marks ids that got one
    void (*sum)(const Gradients& gradients, const std::uint32_t* local, std::size_t count, std::uint32_t dim,
                float* sums, std::uint8_t* started);
    // out = (rows[0] + rows[1] + ...) / divisor, in order, of `count` rows side by side; 0 if there are none.
    // With weights: weights[0] * rows[0], then fma(weights[k], rows[k], sum).
    void (*pool)(const float* rows, const float* weights, std::size_t count, std::uint32_t dim, float divisor,
                 float* out);
    // one optimizer step on each row; scratch holds dim floats
    void (*step)(const StepScalars& scalars, const RowStep* steps, std::size_t count, float* scratch);
    // the bits of the largest magnitude; from 0x7f800000 (infinity) on, something is not finite
    std::uint32_t (*largest)(const float* values, std::size_t count);
    // values and state of a new row; scratch holds dim floats
    void (*initialise)(const InitialScalars& scalars, std::uint64_t id, std::byte* row, float* scratch);
    // out = the dot product of each pair of vectors; scratch holds scratch_floats(), all 0 before its first use
    void (*dots)(const DotShape& shape, const float* const* vectors, float* out, float* scratch);
    // gradients of the vectors, given those of the pairs
    void (*dots_back)(const DotShape& shape, const float* const* vectors, const float* pairs, float* const* gradients,
                      float* scratch);
    // `count` rows side by side to exponents and halves, and back; see fp16_codec.hpp
    void (*to_wire)(const float* rows, std::size_t count, std::uint32_t dim, std::int8_t* exponents, std::byte* halves);
    void (*from_wire)(const std::int8_t* exponents, const std::byte* halves, std::size_t count, std::uint32_t dim,
                      float* rows);
};

const Kernels& portable_kernels();
#ifdef SATRAP_HAVE_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// Returns the paths that this machine can run, best first.
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

inline const Kernels& kernels_named(const std::string& simd) {
    for (const Kernels* kernels : available_kernels())
        if (simd == "auto" || simd == kernels->name) return *kernels;
    throw InputError("simd='" + simd +
                     "' is not available on this machine; use 'auto' or one of satrap._core.simd_paths()");
}

} // namespace satrap
