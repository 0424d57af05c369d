// CRC-32C (Castagnoli), the checksum of saved files: computed with the processor's instruction where it has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace satrap {

inline std::uint32_t crc32c_portable(const std::uint8_t* data, std::size_t n, std::uint32_t crc) {
    static const auto table = [] {
        std::array<std::uint32_t, 256> t{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t c = i;
            for (int k = 0; k < 8; ++k) c = (c & 1U) ? 0x82f63b78U ^ (c >> 1) : c >> 1;
            t[i] = c;
        }
        return t;
    }();
    crc = ~crc;
    for (std::size_t i = 0; i < n; ++i) crc = table[(crc ^ data[i]) & 0xffU] ^ (crc >> 8);
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline std::uint32_t crc32c_native(const std::uint8_t* data, std::size_t n,
                                                                     std::uint32_t crc) {
    std::uint64_t c = ~crc;
    for (; n >= 8; n -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        c = _mm_crc32_u64(c, word);
    }
    auto tail = static_cast<std::uint32_t>(c);
    for (; n != 0; --n) tail = _mm_crc32_u8(tail, *data++);
    return ~tail;
}
#endif

inline std::uint32_t crc32c(const std::uint8_t* data, std::size_t n, std::uint32_t crc) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return crc32c_native(data, n, crc);
#endif
    return crc32c_portable(data, n, crc);
}

} // namespace satrap
