// Hashing and draws: bijective, spread evenly, and the very numbers that saved files rely on.
#include <bit>
#include <cmath>
#include <set>

#include "base/hash.hpp"
#include "testing.hpp"
#include "unmix.hpp"

using namespace satrap;
using testing::Random, testing::unmix64;

namespace {

// Checks the counts of `total` throws into equal boxes: the sum of squares is within six sigma of its mean.
void check_even(const std::vector<std::uint32_t>& counts, double total) {
    const double boxes = static_cast<double>(counts.size()), mean = total / boxes;
    double chi = 0;
    for (std::uint32_t n : counts) chi += (n - mean) * (n - mean) / mean;
    CHECK(std::fabs(chi - (boxes - 1)) < 6 * std::sqrt(2 * (boxes - 1)));
}

CASE(mix_is_a_bijection, 5) {
    for (std::uint64_t x : {0ULL, 1ULL, ~0ULL, 1ULL << 63}) CHECK_EQ(unmix64(mix64(x)), x);
    for (int i = 0; i < 20000; ++i) {
        const std::uint64_t x = random.bits();
        CHECK_EQ(unmix64(mix64(x)), x);
        CHECK_EQ(mix64(unmix64(x)), x);
    }
}

// Buckets of saved files, initial values and roundings depend on these numbers: they must never change.
CASE(known_numbers, 1) {
    CHECK_EQ(mix64(0), 0);
    CHECK_EQ(mix64(0x9e3779b97f4a7c15ULL), 0xe220a8397b1dcdafULL); // splitmix64's first output from seed 0
    CHECK_EQ(mix64(2 * 0x9e3779b97f4a7c15ULL), 0x6e789e6aa1b965f4ULL);
    CHECK_EQ(hash_name(""), mix64(0xcbf29ce484222325ULL));
    CHECK_EQ(hash_name("a"), mix64(0xaf63dc4c8601ec8cULL)); // FNV-1a's published value for "a"
    CHECK_EQ(unit_interval(0), 0.0);
    CHECK_EQ(unit_interval(~0ULL), 1.0 - 0x1p-53);
}

CASE(buckets_are_the_top_bits, 5) {
    for (unsigned bits = 0; bits <= 16; ++bits) {
        for (std::uint64_t h : {std::uint64_t{0}, ~std::uint64_t{0}, random.bits(), random.bits()})
            CHECK_EQ(bucket_of(h, bits), bits == 0 ? 0 : h >> (64 - bits));
        const std::uint32_t total = 200000;
        std::vector<std::uint32_t> counts(std::size_t{1} << std::min(bits, 12U));
        const std::uint64_t first = random.bits(),
                            stride = random.chance(0.5) ? 1 : std::uint64_t{1} << random.below(40);
        for (std::uint64_t i = 0; i < total; ++i)
            ++counts[bucket_of(mix64(first + i * stride), bits) >> (bits - std::min(bits, 12U))];
        if (bits > 0) check_even(counts, total);
    }
}

CASE(keys_differ, 100) {
    std::set<std::uint64_t> keys;
    const std::uint64_t seed = random.bits(), id = random.bits();
    const std::uint64_t table = table_key(seed, "a"), row = row_key(table, id);
    for (std::uint64_t key :
         {table, table_key(seed + 1, "a"), table_key(seed, "b"), table_key(seed, "ab"), row, row_key(table, id + 1),
          row_key(~table, id), step_key(row, 1), step_key(row, 2), step_key(row, 0xffffffffU)})
        CHECK(keys.insert(key).second);
}

CASE(draws_are_uniform, testing::scaled(10)) {
    constexpr std::uint32_t kRows = 1024, kElements = 128;
    constexpr double kTotal = kRows * kElements;
    const std::uint64_t table = random.bits();
    std::vector<std::uint32_t> high(256), low(256);
    std::uint32_t ones[32] = {}, same_as_before = 0;
    double sum = 0;
    for (std::uint32_t r = 0; r < kRows; ++r) {
        const std::uint64_t key = row_key(table, r);
        sum += unit_interval(key);
        std::uint32_t before = draw_element(key, kElements);
        for (std::uint32_t e = 0; e < kElements; ++e) {
            const std::uint32_t draw = draw_element(key, e);
            ++high[draw >> 24];
            ++low[draw & 0xff];
            for (unsigned b = 0; b < 32; ++b) ones[b] += (draw >> b) & 1;
            same_as_before += static_cast<std::uint32_t>(std::popcount(draw ^ before));
            before = draw;
        }
    }
    check_even(high, kTotal);
    check_even(low, kTotal);
    for (std::uint32_t n : ones) CHECK(std::fabs(n - kTotal / 2) < 6 * std::sqrt(kTotal / 4));
    CHECK(std::fabs(same_as_before - 16 * kTotal) < 6 * std::sqrt(8 * kTotal)); // neighbours are independent
    CHECK(std::fabs(sum / kRows - 0.5) < 6 / std::sqrt(12.0 * kRows));
}

CASE(log_is_close, 5) {
    for (int i = 0; i < 20000; ++i) {
        const double x = std::ldexp(1.0 + unit_interval(random.bits()), static_cast<int>(random.below(200)) - 150);
        const double expected = std::log(x);
        CHECK(std::fabs(portable_log(x) - expected) <= 4e-15 * std::max(std::fabs(expected), 0.01));
    }
    CHECK_EQ(portable_log(1.0), 0.0);
}

} // namespace
