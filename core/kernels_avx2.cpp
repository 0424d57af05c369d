// The kernels compiled for avx2; see kernels.hpp.
#include "hash.hpp"
#include "kernels.hpp"

namespace satrap {
namespace {

// Rows are asked for some entries ahead of their copy; those that an id's earlier entry brought are in the cache already.
inline void prefetch_values(const std::byte* const* rows, const std::uint32_t* local, std::size_t e, std::size_t count, std::uint32_t dim) {
    constexpr std::size_t kAhead = 8;
    if (e + kAhead >= count) return;
    const std::byte* row = rows[local[e + kAhead]];
    for (std::uint32_t at = 0; at < 4 * dim && at < 1024; at += 64) __builtin_prefetch(row + at);
}

inline bool copy_streaming(const std::byte* const*, const std::uint32_t*, const std::uint32_t*, std::size_t, std::uint32_t, float*) {
    return false;
}

#include "kernels_body.hpp"
} // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels{"avx2", gather, sum, step, first_nonfinite, initialise};
    return kernels;
}

} // namespace satrap
