// Included by each kernels_*.cpp in its own anonymous namespace, before its streaming copy; see kernels_body.hpp.

// Rows are prefetched some entries ahead of their copy; those of an id's earlier entry are in the cache
// already.
SATRAP_ALWAYS_INLINE void prefetch_values(const std::byte* const* rows, const std::uint32_t* local, std::size_t e,
                                          std::size_t count, std::uint32_t dim) {
    constexpr std::size_t kAhead = 8;
    if (e + kAhead >= count) return;
    const std::byte* row = rows[local[e + kAhead]];
    for (std::uint32_t at = 0; at < 4 * dim && at < 1024; at += 64) __builtin_prefetch(row + at);
}

// Returns whether all of these addresses are multiples of `bytes`, a power of two.
inline bool all_aligned(float* const* to, std::size_t count, std::uintptr_t bytes) {
    std::uintptr_t any = 0;
    for (std::size_t e = 0; e < count; ++e) any |= reinterpret_cast<std::uintptr_t>(to[e]);
    return any % bytes == 0;
}
