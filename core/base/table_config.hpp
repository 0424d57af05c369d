// One table's configuration in the core: plain values, already validated by the Python package and the bindings.
// A row is [values | state]; values are `dim` numbers of `dtype`, state is `state_dim()` floats.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/frozen_ids.hpp"

namespace satrap {

enum class Dtype : std::uint8_t { float32, float16, bfloat16 };
enum class OptimizerKind : std::uint8_t { sgd, adagrad, rowwise_adagrad, adam, adamw, ftrl };
enum class InitialKind : std::uint8_t { uniform, normal, constant };
enum class AdmissionKind : std::uint8_t { always, probability, min_count };
enum class OnFull : std::uint8_t { evict, raise, grow };
enum class Absent : std::uint8_t { initial, zeros };
enum class OnNonfinite : std::uint8_t { raise, skip };

inline constexpr std::uint64_t kMostBucketRows = 0xfffffffeU; // slots have 32 bits, and kNoSlot means no slot

struct OptimizerConfig {
    OptimizerKind kind = OptimizerKind::adagrad;
    double lr = 0.01;
    double momentum = 0.0;
    bool nesterov = false;
    double weight_decay = 0.0;
    double initial_accumulator_value = 0.0;
    double eps = 1e-10;
    std::array<double, 2> betas = {0.9, 0.999}; // Adam
    double beta = 1.0;                          // Ftrl
    double l1 = 0.0;
    double l2 = 0.0;
};

struct TableConfig {
    std::string name;
    std::uint32_t dim = 0;
    Dtype dtype = Dtype::float32;
    OptimizerConfig optimizer;
    InitialKind initial = InitialKind::uniform;
    double initial_a = -0.01; // uniform: low, normal: mean, constant: the value
    double initial_b = 0.01;  // uniform: high, normal: standard deviation
    AdmissionKind admission = AdmissionKind::always;
    double probability = 1.0;
    std::uint32_t min_count = 1;
    bool first_epoch_only = false;  // sightings in later epochs do not count
    std::uint64_t window = 1 << 20; // how many ids not yet admitted are remembered
    std::uint64_t capacity = 0;     // rows; 0: no bound
    std::uint64_t num_rows = 0;     // a direct table, whose ids are 0 .. num_rows-1; 0: any id
    OnFull on_full = OnFull::evict;
    std::uint32_t expire_after = 0; // steps; 0: never
    Absent absent = Absent::initial;
    OnNonfinite on_nonfinite = OnNonfinite::raise;
    FrozenIds frozen;
    std::uint32_t num_buckets = 1;           // a power of two
    std::optional<std::uint32_t> frame_pool; // the pool of its rows' frames on a device; none: rows are in this memory

    unsigned bucket_bits() const { return static_cast<unsigned>(std::countr_zero(num_buckets)); }
    bool is_direct() const { return num_rows != 0; }
    bool bounded() const { return capacity != 0 && on_full != OnFull::grow; }
    std::uint64_t share(std::uint64_t total, std::uint32_t bucket) const {
        return total / num_buckets + (bucket < total % num_buckets ? 1 : 0);
    }

    std::uint32_t state_dim() const {
        switch (optimizer.kind) {
        case OptimizerKind::sgd: return optimizer.momentum != 0.0 ? dim : 0;
        case OptimizerKind::adagrad: return dim;
        case OptimizerKind::rowwise_adagrad: return 1;
        case OptimizerKind::adam:
        case OptimizerKind::adamw: return 2 * dim + 1;
        case OptimizerKind::ftrl: return 2 * dim;
        }
        return 0;
    }
    std::size_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; } // one value's
    // Bytes of the values part, padded to 4 so that the state is aligned.
    std::size_t value_bytes() const { return (dim * element_bytes() + 3) & ~static_cast<std::size_t>(3); }
    std::size_t row_bytes() const { return value_bytes() + 4 * static_cast<std::size_t>(state_dim()); }
    // Bytes of a row on a device, where nothing is padded.
    std::size_t device_bytes() const {
        return dim * element_bytes() + sizeof(float) * static_cast<std::size_t>(state_dim());
    }
    // Bytes of a row in this memory: the whole row, or the word for its place.
    std::size_t payload_bytes() const { return frame_pool ? sizeof(std::uint32_t) : row_bytes(); }
};

} // namespace satrap
