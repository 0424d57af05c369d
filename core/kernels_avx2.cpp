// The kernels compiled for avx2; see kernels.hpp.
#include <immintrin.h>

#include "hash.hpp"
#include "kernels.hpp"

namespace satrap {
namespace {

#include "kernels_prefetch.hpp"
#include "kernels_total.hpp"

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

#include "kernels_body.hpp"
#include "kernels_dots.hpp"
} // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels{"avx2", gather, sum, pool, step, largest, initialise, dots, dots_back};
    return kernels;
}

} // namespace satrap
