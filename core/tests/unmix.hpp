// The inverse of mix64: ids whose hashes a test chooses.
#pragma once

#include <cstdint>

namespace testing {

inline std::uint64_t inverse_of_odd(std::uint64_t a) {
    std::uint64_t x = a; // Newton: each step doubles the correct low bits, from 3
    for (int i = 0; i < 6; ++i) x *= 2 - a * x;
    return x;
}

inline std::uint64_t undo_shift(std::uint64_t x, unsigned shift) {
    std::uint64_t result = x;
    for (unsigned done = shift; done < 64; done += shift) result = x ^ (result >> shift);
    return result;
}

inline std::uint64_t unmix64(std::uint64_t x) {
    x = undo_shift(x, 31) * inverse_of_odd(0x94d049bb133111ebULL);
    x = undo_shift(x, 27) * inverse_of_odd(0xbf58476d1ce4e5b9ULL);
    return undo_shift(x, 30);
}

} // namespace testing
