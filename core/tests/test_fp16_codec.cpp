// Rows on the wire: each path and any number of threads give the same bits, and those are the format's, computed in
// double from the text of fp16_codec.hpp; the bound that it states holds, and what it says is exact is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/fp16_codec.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

struct Coded {
    std::int32_t exponent;
    std::vector<std::uint16_t> halves;
    bool operator==(const Coded&) const = default;
};

bool same_bits(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

// The row by the format's text, in double, where nothing rounds but what it says.
Coded by_the_text(const std::vector<float>& row) {
    double most = 0;
    for (float value : row)
        if (std::isfinite(value)) most = std::max(most, std::fabs(double{value}));
    Coded coded{most == 0 ? -126 : std::max(std::ilogb(most) - 14, -126), {}};
    for (float value : row) {
        const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        const auto payload = static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) >> 13) & 0x3ff);
        auto half = static_cast<std::uint16_t>(std::isnan(value) ? 0x7e00 | payload : 0x7c00);
        if (std::isfinite(value)) {
            const double scaled = std::ldexp(std::fabs(double{value}), -coded.exponent);
            const int last = scaled < 0x1p-14 ? -24 : std::ilogb(scaled) - 10; // where its last bit is
            const double rounded = std::ldexp(std::nearbyint(std::ldexp(scaled, -last)), last);
            const double kept = std::ldexp(rounded, coded.exponent) < 0x1p128 ? rounded : 0x1p15 - 0x1p4;
            const int top = kept < 0x1p-14 ? -14 : std::ilogb(kept);
            half = static_cast<std::uint16_t>(std::ldexp(kept, 10 - top) + (top + 14) * 1024);
        }
        coded.halves.push_back(static_cast<std::uint16_t>(half | sign));
    }
    return coded;
}

// Guarded on both sides, and away from any alignment by `shift`.
Coded encoded(const Kernels& kernels, const std::vector<float>& row, std::size_t shift = 0) {
    const std::size_t dim = row.size();
    std::vector<std::byte> memory(2 * dim + 2 + shift, std::byte{0xa5});
    std::int8_t exponents[3] = {77, 77, 77};
    kernels.to_wire(row.data(), 1, static_cast<std::uint32_t>(dim), exponents + 1, memory.data() + shift);
    CHECK(exponents[0] == 77 && exponents[2] == 77);
    CHECK_EQ(std::count(memory.end() - 2, memory.end(), std::byte{0xa5}), 2);
    Coded coded{exponents[1], std::vector<std::uint16_t>(dim)};
    std::memcpy(coded.halves.data(), memory.data() + shift, 2 * dim);
    return coded;
}

std::vector<float> decoded(const Kernels& kernels, const Coded& coded, std::size_t shift = 0) {
    const std::size_t dim = coded.halves.size();
    std::vector<std::byte> memory(2 * dim + shift);
    std::memcpy(memory.data() + shift, coded.halves.data(), 2 * dim);
    const auto exponent = static_cast<std::int8_t>(coded.exponent);
    std::vector<float> row(dim + 1, 7.0f);
    kernels.from_wire(&exponent, memory.data() + shift, 1, static_cast<std::uint32_t>(dim), row.data());
    CHECK_EQ(row.back(), 7.0f);
    row.pop_back();
    return row;
}

// Everything that is claimed of one row, on every path.
void check_row(Random& random, const std::vector<float>& row) {
    const Coded expected = by_the_text(row);
    double most = 0;
    for (float value : row)
        if (std::isfinite(value)) most = std::max(most, std::fabs(double{value}));
    for (const Kernels* kernels : available_kernels()) {
        CHECK(encoded(*kernels, row, random.below(4)) == expected);
        const std::vector<float> found = decoded(*kernels, expected, random.below(4));
        for (std::size_t i = 0; i < row.size(); ++i) {
            const double given = row[i], got = found[i];
            CHECK(std::signbit(got) == std::signbit(given));
            if (!std::isfinite(given)) {
                CHECK(std::isnan(given) ? std::isnan(got) : got == given);
                continue;
            }
            CHECK(std::isfinite(got));
            CHECK(std::fabs(got - given) <= std::max(0x1p-11 * std::fabs(given), 0x1p-39 * most));
        }
    }
}

// Rows of all magnitudes: values of like or of unlike magnitudes, and values at the edges of rounding.
std::vector<float> draw_row(Random& random, std::uint32_t dim) {
    const int base = static_cast<int>(random.below(277)) - 149;
    const bool alike = random.chance(0.5), wild = random.chance(0.1);
    const std::vector<float> edges = {0.0f, -0.0f, kSmallest, -kSmallest, kLargest, -kLargest, 0x1p-126f, 3e38f};
    std::vector<float> row(dim);
    for (float& value : row) {
        const int exponent = alike ? std::min(base + static_cast<int>(random.below(30)), 127)
                                   : static_cast<int>(random.below(277)) - 149;
        const double fraction = 1.0 + static_cast<double>(random.below(1U << 13)) * 0x1p-12; // ties among them
        const double any = random.chance(0.5) ? fraction : 1.0 + random.real(0.0f, 1.0f);
        value = std::min(static_cast<float>(std::ldexp(any, exponent)), kLargest) * (random.chance(0.5) ? -1.0f : 1.0f);
        if (random.chance(0.05)) value = random.pick(edges);
        if (wild && random.chance(0.2))
            value = std::bit_cast<float>(random.pick(std::vector{0x7f800000U, 0xff800000U, 0x7fc00001U, 0xffa02000U}));
    }
    return row;
}

CASE(rows_are_what_the_text_says, testing::scaled(200)) {
    for (std::uint32_t dim = 1; dim <= 70; ++dim) check_row(random, draw_row(random, dim));
}

CASE(the_edges, 5) {
    const float inf = std::numeric_limits<float>::infinity();
    for (float value : {0.0f, kSmallest, 0x1p-126f, 0x1.fffffep-113f, 0x1p-112f, 1.0f, 65504.0f, 0x1.ffep127f,
                        0x1.ffe001p127f, 0x1.fff000p127f, 3e38f, kLargest, inf})
        for (float sign : {1.0f, -1.0f}) {
            check_row(random, {sign * value});
            check_row(random, {sign * value, 1.0f, kSmallest, 0.0f});
            check_row(random, std::vector<float>(33, sign * value));
        }
    const Kernels& kernels = portable_kernels();
    const Coded zeros = encoded(kernels, {0.0f, -0.0f});
    CHECK(zeros.halves == (std::vector<std::uint16_t>{0, 0x8000}));
    CHECK_EQ(decoded(kernels, encoded(kernels, {kLargest}))[0], 0x1.ffcp127f);
    CHECK_EQ(decoded(kernels, encoded(kernels, {kSmallest}))[0], kSmallest);
}

// Every fp16 number times a power of two, with the row's largest beside it, comes back; so does what came back.
CASE(what_fp16_holds_is_exact, testing::scaled(40)) {
    const int exponent = static_cast<int>(random.below(240)) - 126;
    std::vector<float> row;
    for (std::uint32_t magnitude = 0; magnitude < 0x7800; ++magnitude) { // below 2^15
        const double value = magnitude < 1024
                                 ? std::ldexp(magnitude, -24)
                                 : std::ldexp(1024 + magnitude % 1024, static_cast<int>(magnitude / 1024) - 25);
        const double scaled = std::ldexp(value, exponent);
        if (scaled >= double{kSmallest} && double{static_cast<float>(scaled)} == scaled)
            row.push_back(static_cast<float>(random.chance(0.5) ? scaled : -scaled));
    }
    for (const Kernels* kernels : available_kernels()) {
        const std::vector<float> found = decoded(*kernels, encoded(*kernels, row));
        CHECK(std::equal(row.begin(), row.end(), found.begin(), same_bits));
    }
    const std::vector<float> any = draw_row(random, 40);
    if (std::any_of(any.begin(), any.end(), [](float value) { return std::isnan(value); })) return;
    const std::vector<float> once = decoded(portable_kernels(), encoded(portable_kernels(), any));
    CHECK(decoded(portable_kernels(), encoded(portable_kernels(), once)) == once);
}

// Messages of several tables, empty ones among them: the same on every path and number of threads, row by row what
// the kernels make of it, and of the size that is stated.
CASE(messages_are_rows_one_by_one, testing::scaled(60)) {
    std::vector<std::uint32_t> dims;
    std::vector<std::int64_t> offsets{0};
    std::vector<float> rows;
    for (std::uint32_t t = 0, tables = random.between(1, 5); t < tables; ++t) {
        dims.push_back(random.between(1, 40));
        offsets.push_back(offsets.back() + random.below(random.chance(0.3) ? 1 : random.chance(0.5) ? 9 : 1500));
        for (auto n = offsets.back() - offsets[t]; n > 0; --n) {
            const std::vector<float> row = draw_row(random, dims.back());
            rows.insert(rows.end(), row.begin(), row.end());
        }
    }
    const auto n = static_cast<std::size_t>(offsets.back());
    std::vector<std::byte> first;
    for (const Kernels* kernels : available_kernels())
        for (unsigned threads : {1U, 3U}) {
            ThreadPool pool(threads);
            const Fp16Codec wire(dims, *kernels, pool);
            CHECK_EQ(wire.num_floats(offsets), rows.size());
            CHECK_EQ(wire.num_bytes(offsets), n + n % 2 + 2 * rows.size());
            std::vector<std::byte> message(wire.num_bytes(offsets), std::byte{0x5a});
            wire.encode(offsets, rows.data(), message.data());
            if (first.empty()) first = message;
            CHECK(message == first);
            std::vector<float> back(rows.size(), 7.0f);
            wire.decode(offsets, message.data(), back.data());
            std::size_t r = 0, at = 0;
            for (std::size_t t = 0; t < dims.size(); ++t)
                for (auto k = offsets[t]; k < offsets[t + 1]; ++k, ++r, at += dims[t]) {
                    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at);
                    const Coded coded = by_the_text({begin, begin + dims[t]});
                    CHECK_EQ(static_cast<std::int8_t>(message[r]), coded.exponent);
                    CHECK(std::memcmp(message.data() + (n + 1) / 2 * 2 + 2 * at, coded.halves.data(), 2 * dims[t]) ==
                          0);
                    const std::vector<float> row = decoded(*kernels, coded);
                    CHECK(std::memcmp(back.data() + at, row.data(), 4 * dims[t]) == 0);
                }
        }
}

CASE(other_exponents_are_refused, 20) {
    ThreadPool pool(2);
    const Fp16Codec wire({48, 32}, kernels_named("auto"), pool);
    const std::vector<std::int64_t> offsets{0, 700, 1001};
    std::vector<float> rows(wire.num_floats(offsets), 1.0f);
    std::vector<std::byte> message(wire.num_bytes(offsets));
    wire.encode(offsets, rows.data(), message.data());
    CHECK(message[1001] == std::byte{0});
    const std::uint32_t bad = random.below(1001);
    for (int exponent : {-128, -127, 114, 127}) {
        message[bad] = static_cast<std::byte>(exponent);
        CHECK_THROWS(InputError,
                     "row " + std::to_string(bad) + " of 1001 has the exponent " + std::to_string(exponent) +
                         ", expected -126..113",
                     wire.decode(offsets, message.data(), rows.data()));
    }
    for (int exponent : {-126, 113}) {
        message[bad] = static_cast<std::byte>(exponent);
        wire.decode(offsets, message.data(), rows.data());
    }
}

// Any bytes: no bits depend on the path.
CASE(any_halves_are_decoded_alike, testing::scaled(400)) {
    Coded coded{static_cast<int>(random.below(240)) - 126, {}};
    while (coded.halves.size() < 67) coded.halves.push_back(static_cast<std::uint16_t>(random.word()));
    const std::vector<float> expected = decoded(portable_kernels(), coded);
    for (const Kernels* kernels : available_kernels()) {
        const std::vector<float> found = decoded(*kernels, coded);
        CHECK(std::equal(expected.begin(), expected.end(), found.begin(), same_bits));
    }
}

} // namespace
