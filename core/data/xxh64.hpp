// The hash that turns values into ids: XXH64 (seed 0) by its public specification, of a text's UTF-8 bytes or of an
// integer's 8 bytes, the lowest first. It is saved with every model that was trained on hashed ids, so it never
// changes. Nothing here has state; decisions inside a table (buckets, draws) belong to hash.hpp.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace satrap {

struct Xxh64 {
    static constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87ULL;
    static constexpr std::uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fULL;
    static constexpr std::uint64_t kPrime3 = 0x165667b19e3779f9ULL;
    static constexpr std::uint64_t kPrime4 = 0x85ebca77c2b2ae63ULL;
    static constexpr std::uint64_t kPrime5 = 0x27d4eb2f165667c5ULL;

    // A little-endian word, on any machine.
    template <typename Word> static Word load(const unsigned char* at) {
        Word word;
        std::memcpy(&word, at, sizeof(word));
        if constexpr (std::endian::native == std::endian::big)
            word = sizeof(word) == 8 ? static_cast<Word>(__builtin_bswap64(word))
                                     : static_cast<Word>(__builtin_bswap32(static_cast<std::uint32_t>(word)));
        return word;
    }

    static std::uint64_t round(std::uint64_t lane, std::uint64_t word) {
        return std::rotl(lane + word * kPrime2, 31) * kPrime1;
    }

    static std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
        return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
    }

    static std::uint64_t avalanche(std::uint64_t hash) {
        hash ^= hash >> 33;
        hash *= kPrime2;
        hash ^= hash >> 29;
        hash *= kPrime3;
        return hash ^ (hash >> 32);
    }

    // Stripes of 32 bytes in four lanes; leaves `at` behind the last whole one.
    static std::uint64_t stripes(const unsigned char*& at, std::size_t n, std::uint64_t seed) {
        std::uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
        for (const unsigned char* const end = at + n / 32 * 32; at != end; at += 32)
            for (unsigned i = 0; i < 4; ++i) lanes[i] = round(lanes[i], load<std::uint64_t>(at + 8 * i));
        std::uint64_t hash =
            std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
        for (std::uint64_t lane : lanes) hash = merge(hash, lane);
        return hash;
    }

    static std::uint64_t hash(const void* data, std::size_t n, std::uint64_t seed) {
        const auto* at = static_cast<const unsigned char*>(data);
        const unsigned char* const end = at + n;
        std::uint64_t hash = n >= 32 ? stripes(at, n, seed) : seed + kPrime5;
        hash += n;
        for (; end - at >= 8; at += 8)
            hash = std::rotl(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
        if (end - at >= 4) {
            hash = std::rotl(hash ^ (load<std::uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
            at += 4;
        }
        for (; at != end; ++at) hash = std::rotl(hash ^ (*at * kPrime5), 11) * kPrime1;
        return avalanche(hash);
    }
};

inline std::uint64_t xxh64(const void* data, std::size_t n, std::uint64_t seed = 0) {
    return Xxh64::hash(data, n, seed);
}

inline std::uint64_t hash_text(std::string_view text) { return xxh64(text.data(), text.size()); }

// Hashes the integer's 8 bytes without storing them. Different integers never share a hash: each step is invertible.
inline std::uint64_t hash_integer(std::uint64_t value) {
    return Xxh64::avalanche(std::rotl((Xxh64::kPrime5 + 8) ^ Xxh64::round(0, value), 27) * Xxh64::kPrime1 +
                            Xxh64::kPrime4);
}

// Hashes the texts of an Arrow column: text i is data[offsets[i] .. offsets[i + 1]), of `size` bytes in all. Returns
// false if the offsets do not rise within them; each is read once, so that the checked value is the one used.
template <typename Offset>
bool hash_texts(const Offset* offsets, std::size_t n, const char* data, std::size_t size, std::uint64_t* out) {
    Offset begin = offsets[0];
    if (begin < 0) return false;
    for (std::size_t i = 0; i < n; ++i) {
        const Offset end = offsets[i + 1];
        if (end < begin || static_cast<std::size_t>(end) > size) return false;
        out[i] = xxh64(data + begin, static_cast<std::size_t>(end - begin));
        begin = end;
    }
    return true;
}

} // namespace satrap
