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

#include "kernels_body.hpp"
} // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels{"avx512", gather, sum, step, largest, initialise};
    return kernels;
}

} // namespace satrap
