// The kernels compiled for avx512; see kernels.hpp.
#include <immintrin.h>

#include "base/hash.hpp"
#include "base/inlining.hpp"
#include "kernels/kernels.hpp"

namespace satrap {
namespace {

#include "kernels/kernels_prefetch.hpp"
#include "kernels/kernels_total.hpp"

// Whole cache lines written past the cache: the output of a lookup is larger than the caches and read once, later.
inline bool copy_streaming(const std::byte* const* rows, const std::uint32_t* local, float* const* to,
                           std::size_t count, std::uint32_t dim) {
    if (dim % 16 != 0 || !all_aligned(to, count, 64)) return false;
    for (std::size_t e = 0; e < count; ++e) {
        prefetch_values(rows, local, e, count, dim);
        const float* from = reinterpret_cast<const float*>(rows[local[e]]);
        float* out = to[e];
        for (std::uint32_t i = 0; i < dim; i += 16) _mm512_stream_ps(out + i, _mm512_loadu_ps(from + i));
    }
    _mm_sfence();
    return true;
}

// Sixteen partial sums in a register; the tree is the one of kernels_portable.cpp.
struct Lanes {
    __m512 sums = _mm512_setzero_ps();
    void add_squares(float weight_decay, const float* values, const float* gradients) {
        const __m512 g =
            _mm512_fmadd_ps(_mm512_set1_ps(weight_decay), _mm512_loadu_ps(values), _mm512_loadu_ps(gradients));
        sums = _mm512_fmadd_ps(g, g, sums);
    }
    float total() const {
        alignas(64) float stored[16]; // through memory: GCC 12 warns about its header where a half is extracted
        _mm512_store_ps(stored, sums);
        return total_of(_mm256_add_ps(_mm256_load_ps(stored), _mm256_load_ps(stored + 8)));
    }
};

struct Sixteen {
    __m512 v = _mm512_setzero_ps();
    static Sixteen load(const float* from) { return {_mm512_loadu_ps(from)}; }
    static Sixteen broadcast(const float* from) { return {_mm512_set1_ps(*from)}; }
    void plus_product(Sixteen a, Sixteen b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
    void store(float* to) const { _mm512_storeu_ps(to, v); }
};
constexpr std::uint32_t kBlock = 8;

// wire_half of sixteen elements at a time; returns how many are done.
inline std::uint32_t halve_blocks(const float* row, std::uint32_t dim, float scale, float most, std::byte* halves) {
    const __m512 by = _mm512_set1_ps(scale), limit = _mm512_set1_ps(most);
    const __m512 infinity = _mm512_set1_ps(__builtin_inff());
    std::uint32_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        const __m512 value = _mm512_loadu_ps(row + i), sign = _mm512_and_ps(value, _mm512_set1_ps(-0.0f));
        const __m512 given = _mm512_xor_ps(value, sign);
        const __mmask16 finite = _mm512_cmp_ps_mask(given, infinity, _CMP_LT_OQ);
        const __m512 scaled = _mm512_mask_mul_ps(given, finite, given, by);
        const __m512 whole = _mm512_or_ps(_mm512_mask_min_ps(scaled, finite, scaled, limit), sign);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + std::size_t{2} * i),
                            _mm512_maskz_cvtps_ph(0xffff, whole, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

#include "kernels/kernels_body.hpp"
#include "kernels/kernels_dots.hpp"
#include "kernels/kernels_wire.hpp"
} // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels{"avx512",   gather, sum,       pool,    step,     largest,
                                     initialise, dots,   dots_back, to_wire, from_wire};
    return kernels;
}

} // namespace satrap
