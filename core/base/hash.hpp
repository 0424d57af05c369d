// Hashing and random draws: every pseudo-random decision of a table is a pure function defined here.
// Nothing in this file has state; all is static, because kernels_*.cpp compile it with other machine flags. Ids come
// from config and batches; the results decide buckets, tags, initial values, admission and rounding. Only integer and
// IEEE operations are used, so all machines give the same bits.
#pragma once

#include <cstdint>
#include <string_view>

namespace satrap {

// A bijection of the 64-bit integers (splitmix64's finaliser): distinct ids never share a hash.
static inline std::uint64_t mix64(std::uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static inline std::uint64_t hash_name(std::string_view name) {
    std::uint64_t h = 0xcbf29ce484222325ULL; // FNV-1a
    for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ULL;
    return mix64(h);
}

// The top `bits` bits of a hash name the bucket. Two shifts, because bits == 0 must give 0.
static inline std::uint32_t bucket_of(std::uint64_t hash, unsigned bits) {
    return static_cast<std::uint32_t>((hash >> 1) >> (63 - bits));
}

// Reverses the 64 bits: the hash of an id of a direct table, whose ids are 0 .. N-1. Its top bits name the bucket, so
// bucket b has the ids that are equal modulo the number of buckets, and neighbours are in distant buckets.
static inline std::uint64_t reverse_bits(std::uint64_t x) {
    x = __builtin_bswap64(x);
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0fULL) | (x & 0x0f0f0f0f0f0f0f0fULL) << 4;
    x = (x >> 2 & 0x3333333333333333ULL) | (x & 0x3333333333333333ULL) << 2;
    return (x >> 1 & 0x5555555555555555ULL) | (x & 0x5555555555555555ULL) << 1;
}

// The hash by which a table orders its ids: in buckets, and in files.
static inline std::uint64_t order_hash(std::uint64_t id, bool direct) { return direct ? reverse_bits(id) : mix64(id); }

// Keys chain: table_key(seed, name) -> row_key(table, id) -> step_key(row, step); either key -> draw_element(key,
// element).
static inline std::uint64_t table_key(std::uint64_t seed, std::string_view name) {
    return mix64(mix64(seed) ^ hash_name(name));
}
static inline std::uint64_t row_key(std::uint64_t table, std::uint64_t id) {
    return mix64(table ^ mix64(id ^ 0x9e3779b97f4a7c15ULL));
}
static inline std::uint64_t step_key(std::uint64_t row, std::uint32_t step) {
    return mix64(row + 0x9e3779b97f4a7c15ULL * (step + 1ULL));
}

// 32 random bits for one element of a row: 32-bit operations only, so a loop over elements becomes SIMD.
static inline std::uint32_t draw_element(std::uint64_t key, std::uint32_t element) {
    std::uint32_t x = static_cast<std::uint32_t>(key) + element * 0x9e3779b9U;
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= (x >> 15) ^ static_cast<std::uint32_t>(key >> 32);
    x *= 0x846ca68bU;
    return x ^ (x >> 16);
}

// Returns a draw from [0, 1) with 53 bits.
static inline double unit_interval(std::uint64_t key) { return static_cast<double>(key >> 11) * 0x1p-53; }

// Natural logarithm of a positive normal double by IEEE operations alone (libm's differs between systems).
static inline double portable_log(double x) {
    std::uint64_t bits = __builtin_bit_cast(std::uint64_t, x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = __builtin_bit_cast(double, (bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    double s = (m - 1.0) / (m + 1.0);
    double s2 = s * s;
    double series = 0.0;
    for (int k = 21; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
    return exponent * 0.6931471805599453 + 2.0 * s * series;
}

} // namespace satrap
