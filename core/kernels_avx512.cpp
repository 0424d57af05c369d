// The kernels compiled for avx512; see kernels.hpp.
#include <immintrin.h>

#include "hash.hpp"
#include "kernels.hpp"

namespace satrap {
namespace {

#include "kernels_prefetch.hpp"

// Whole cache lines written past the cache: the output of a lookup is larger than the caches and read once, later.
inline bool copy_streaming(const std::byte* const* rows, const std::uint32_t* local, const std::uint32_t* positions,
                           std::size_t count, std::uint32_t dim, float* out) {
    if (dim % 16 != 0 || reinterpret_cast<std::uintptr_t>(out) % 64 != 0) return false;
    for (std::size_t e = 0; e < count; ++e) {
        prefetch_values(rows, local, e, count, dim);
        const float* from = reinterpret_cast<const float*>(rows[local[e]]);
        float* to = out + static_cast<std::size_t>(positions[e]) * dim;
        for (std::uint32_t i = 0; i < dim; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
    }
    _mm_sfence();
    return true;
}

// Sixteen partial sums in a register; the tree is the one of kernels_portable.cpp.
static inline float total_of(__m256 eight) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

struct Lanes {
    __m512 sums = _mm512_setzero_ps();
    void add_squares(float weight_decay, const float* values, const float* gradients) {
        const __m512 g =
            _mm512_fmadd_ps(_mm512_set1_ps(weight_decay), _mm512_loadu_ps(values), _mm512_loadu_ps(gradients));
        sums = _mm512_fmadd_ps(g, g, sums);
    }
    float total() const {
        alignas(64) float stored[16]; // by memory: GCC 12 warns of its own header where a half is extracted
        _mm512_store_ps(stored, sums);
        return total_of(_mm256_add_ps(_mm256_load_ps(stored), _mm256_load_ps(stored + 8)));
    }
};

#include "kernels_body.hpp"
} // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels{"avx512", gather, sum, step, largest, initialise};
    return kernels;
}

} // namespace satrap
