// The kernels compiled for avx2; see kernels.hpp.
#include <immintrin.h>

#include "hash.hpp"
#include "kernels.hpp"

namespace satrap {
namespace {

#include "kernels_prefetch.hpp"

// Half cache lines written past the cache, as in kernels_avx512.cpp.
inline bool copy_streaming(const std::byte* const* rows, const std::uint32_t* local, const std::uint32_t* positions,
                           std::size_t count, std::uint32_t dim, float* out) {
    if (dim % 8 != 0 || reinterpret_cast<std::uintptr_t>(out) % 32 != 0) return false;
    for (std::size_t e = 0; e < count; ++e) {
        prefetch_values(rows, local, e, count, dim);
        const float* from = reinterpret_cast<const float*>(rows[local[e]]);
        float* to = out + static_cast<std::size_t>(positions[e]) * dim;
        for (std::uint32_t i = 0; i < dim; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    }
    _mm_sfence();
    return true;
}

// Sixteen partial sums in two registers; the tree is the one of kernels_portable.cpp.
static inline float total_of(__m256 eight) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

struct Lanes {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    static __m256 square(__m256 decay, const float* values, const float* gradients, __m256 sum) {
        const __m256 g = _mm256_fmadd_ps(decay, _mm256_loadu_ps(values), _mm256_loadu_ps(gradients));
        return _mm256_fmadd_ps(g, g, sum);
    }
    void add_squares(float weight_decay, const float* values, const float* gradients) {
        const __m256 decay = _mm256_set1_ps(weight_decay);
        low = square(decay, values, gradients, low);
        high = square(decay, values + 8, gradients + 8, high);
    }
    float total() const { return total_of(_mm256_add_ps(low, high)); }
};

#include "kernels_body.hpp"
} // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels{"avx2", gather, sum, step, largest, initialise};
    return kernels;
}

} // namespace satrap
