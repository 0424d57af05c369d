// The kernels compiled for avx2; see kernels.hpp.
#include <immintrin.h>

#include "base/hash.hpp"
#include "base/inlining.hpp"
#include "kernels/kernels.hpp"

namespace satrap {
namespace {

#include "kernels/kernels_prefetch.hpp"
#include "kernels/kernels_total.hpp"

// Half cache lines written past the cache, as in kernels_avx512.cpp.
inline bool copy_streaming(const std::byte* const* rows, const std::uint32_t* local, float* const* to,
                           std::size_t count, std::uint32_t dim) {
    if (dim % 8 != 0 || !all_aligned(to, count, 32)) return false;
    for (std::size_t e = 0; e < count; ++e) {
        prefetch_values(rows, local, e, count, dim);
        const float* from = reinterpret_cast<const float*>(rows[local[e]]);
        float* out = to[e];
        for (std::uint32_t i = 0; i < dim; i += 8) _mm256_stream_ps(out + i, _mm256_loadu_ps(from + i));
    }
    _mm_sfence();
    return true;
}

// Sixteen partial sums in two registers; the tree is the one of kernels_portable.cpp.
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

struct Sixteen {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    static Sixteen load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static Sixteen broadcast(const float* from) { return {_mm256_set1_ps(*from), _mm256_set1_ps(*from)}; }
    void plus_product(Sixteen a, Sixteen b) {
        low = _mm256_fmadd_ps(a.low, b.low, low);
        high = _mm256_fmadd_ps(a.high, b.high, high);
    }
    void store(float* to) const {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
    }
};
constexpr std::uint32_t kBlock = 4;

// wire_half of eight elements at a time; returns how many are done.
inline std::uint32_t halve_blocks(const float* row, std::uint32_t dim, float scale, float most, std::byte* halves) {
    const __m256 sign = _mm256_set1_ps(-0.0f), by = _mm256_set1_ps(scale), limit = _mm256_set1_ps(most);
    const __m256 infinity = _mm256_set1_ps(__builtin_inff());
    std::uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        const __m256 value = _mm256_loadu_ps(row + i), given = _mm256_andnot_ps(sign, value);
        const __m256 finite = _mm256_min_ps(_mm256_mul_ps(given, by), limit);
        const __m256 scaled = _mm256_blendv_ps(given, finite, _mm256_cmp_ps(given, infinity, _CMP_LT_OQ));
        const __m256 whole = _mm256_or_ps(scaled, _mm256_and_ps(value, sign));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + std::size_t{2} * i),
                         _mm256_cvtps_ph(whole, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

#include "kernels/kernels_body.hpp"
#include "kernels/kernels_dots.hpp"
#include "kernels/kernels_wire.hpp"
} // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels{"avx2",     gather, sum,       pool,    step,     largest,
                                     initialise, dots,   dots_back, to_wire, from_wire};
    return kernels;
}

} // namespace satrap
