// fp16 and bf16 rows against an oracle that searches the sorted list of all finite numbers: every number survives a
// round trip, new rows are rounded to nearest even, updated ones to one of the two neighbours with the right odds.
// The codecs are inside the kernels, so they are reached as a table does: gather decodes, initialise and step encode.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

using Code = std::uint16_t;

// The value of a 16-bit code by its definition.
double value_of(Dtype dtype, Code code) {
    const int mantissa_bits = dtype == Dtype::float16 ? 10 : 7, bias = dtype == Dtype::float16 ? 15 : 127;
    const int exponent = (code & 0x7fff) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent == 0
                                 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                 : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return (code & 0x8000) != 0 ? -magnitude : magnitude;
}

Code infinity_of(Dtype dtype) { return dtype == Dtype::float16 ? 0x7c00 : 0x7f80; }
bool is_finite(Dtype dtype, Code code) { return (code & 0x7fff) < infinity_of(dtype); }

// The codes whose values enclose |x|: low <= |x| <= low + 1; equal if x is a 16-bit number. Magnitudes rise with codes.
Code low_of(Dtype dtype, double x) {
    Code low = 0, high = infinity_of(dtype); // value(low) <= |x| < value(high)
    while (high - low > 1) {
        const auto middle = static_cast<Code>((low + high) / 2);
        (value_of(dtype, middle) <= std::fabs(x) ? low : high) = middle;
    }
    return low;
}

Code nearest_of(Dtype dtype, double x) {
    const Code low = low_of(dtype, x), most = static_cast<Code>(infinity_of(dtype) - 1);
    if (low == most) return low; // saturates: never up to infinity
    const double below = std::fabs(x) - value_of(dtype, low),
                 above = value_of(dtype, static_cast<Code>(low + 1)) - std::fabs(x);
    return below < above || (below == above && low % 2 == 0) ? low : static_cast<Code>(low + 1);
}

// Any float: of all magnitudes, often close to where 16-bit numbers end, are subnormal, or lie half way.
float draw_float(Random& random, Dtype dtype) {
    switch (random.below(5)) {
    case 0: return std::bit_cast<float>(random.word() & 0xff7fffffU); // finite
    case 1: return random.real(-70000.0f, 70000.0f);
    case 2: return std::ldexp(random.real(-1.0f, 1.0f), -14 - static_cast<int>(random.below(14)));
    case 3: return random.real(-1.0f, 1.0f);
    default: {
        const auto low = static_cast<Code>(random.below(infinity_of(dtype) - 1U));
        const double middle = (value_of(dtype, low) + value_of(dtype, static_cast<Code>(low + 1))) / 2;
        return std::nextafter(static_cast<float>(middle), random.pick(std::vector{0.0f, static_cast<float>(middle),
                                                                                  std::numeric_limits<float>::max()}));
    }
    }
}

StepScalars plain_sgd(Dtype dtype, std::uint32_t dim, std::uint32_t step, double lr) {
    StepScalars k{};
    k.kind = OptimizerKind::sgd;
    k.dtype = dtype;
    k.dim = dim;
    k.value_bytes = k.row_bytes = 2 * dim;
    k.step = step;
    k.table_key = 5;
    k.lr = lr;
    return k;
}

// Every finite code through gather, and through a step with a gradient of zeros: the same code again.
CASE(every_number_survives, 3) {
    constexpr std::uint32_t kDim = 64, kRows = 1024;
    for (Dtype dtype : {Dtype::float16, Dtype::bfloat16})
        for (const Kernels* kernels : available_kernels()) {
            std::vector<Code> codes(kDim * kRows);
            for (std::uint32_t c = 0; c < codes.size(); ++c) codes[c] = static_cast<Code>(c);
            const std::vector<Code> before = codes;
            std::vector<const std::byte*> rows;
            std::vector<std::uint32_t> numbers;
            std::vector<float> zeros(kDim), scratch(kDim), out(codes.size());
            std::vector<RowStep> steps;
            std::vector<float*> to;
            for (std::uint32_t r = 0; r < kRows; ++r) {
                auto* row = reinterpret_cast<std::byte*>(codes.data() + std::size_t{r} * kDim);
                rows.push_back(row);
                numbers.push_back(r);
                to.push_back(out.data() + std::size_t{r} * kDim);
                steps.push_back({row, zeros.data(), r});
            }
            kernels->gather(rows.data(), numbers.data(), to.data(), kRows, kDim, dtype);
            kernels->step(plain_sgd(dtype, kDim, random.between(1, 1000), 0.5), steps.data(), kRows, scratch.data());
            for (std::size_t c = 0; c < codes.size(); ++c) {
                const auto code = static_cast<Code>(c);
                if (!is_finite(dtype, code)) {
                    const bool infinite = (code & 0x7fff) == infinity_of(dtype);
                    CHECK(infinite ? std::isinf(out[c]) : std::isnan(out[c]));
                    continue;
                }
                CHECK_EQ(double{out[c]}, value_of(dtype, code));
                CHECK_EQ(std::signbit(out[c]), (code & 0x8000) != 0);
                CHECK_EQ(codes[c], before[c]);
            }
        }
}

Code encoded(const Kernels& kernels, Dtype dtype, float value) {
    InitialScalars k{};
    k.kind = InitialKind::constant;
    k.dtype = dtype;
    k.optimizer = OptimizerKind::sgd;
    k.dim = 1;
    k.value_bytes = 4;
    k.table_key = 5;
    k.a = value;
    Code row[2] = {0x1111, 0x2222};
    float scratch = 0;
    kernels.initialise(k, 9, reinterpret_cast<std::byte*>(row), &scratch);
    CHECK_EQ(row[1], 0x2222); // the padding
    return row[0];
}

CASE(new_rows_round_to_nearest, testing::scaled(12)) {
    for (unsigned i = 0; i < 3000; ++i)
        for (Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
            const float value = draw_float(random, dtype);
            for (const Kernels* kernels : available_kernels()) {
                const Code found = encoded(*kernels, dtype, value);
                const Code expected = nearest_of(dtype, value), sign = std::signbit(value) ? 0x8000 : 0;
                if (found != (expected | sign))
                    testing::fail(__FILE__, __LINE__,
                                  std::string(kernels->name) + ": " + std::to_string(value) + " became code " +
                                      std::to_string(found) + "; expected " + std::to_string(expected | sign));
            }
        }
}

// Between each two neighbours: half way goes to the even one, a hair off to the closer one.
CASE(every_half_way_rounds_right, 1) {
    for (Dtype dtype : {Dtype::float16, Dtype::bfloat16})
        for (const Kernels* kernels : available_kernels())
            for (std::uint32_t low = testing::kSanitized ? random.below(8) : 0; low + 1 < infinity_of(dtype);
                 low += testing::kSanitized ? 8 : 1) {
                const auto code = static_cast<Code>(low), next = static_cast<Code>(low + 1);
                const auto middle = static_cast<float>((value_of(dtype, code) + value_of(dtype, next)) / 2);
                CHECK_EQ(encoded(*kernels, dtype, middle), low % 2 == 0 ? code : next);
                CHECK_EQ(encoded(*kernels, dtype, -middle), (low % 2 == 0 ? code : next) | 0x8000);
                CHECK_EQ(encoded(*kernels, dtype, std::nextafter(middle, 0.0f)), code);
                CHECK_EQ(encoded(*kernels, dtype, std::nextafter(middle, std::numeric_limits<float>::infinity())),
                         next);
            }
}

// A row of zeros after one step of lr 1 is minus the gradient, rounded: down or up to a neighbour, the same on all
// paths.
CASE(updates_round_to_a_neighbour, testing::scaled(12)) {
    constexpr std::uint32_t kDim = 64;
    for (unsigned i = 0; i < 200; ++i)
        for (Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
            std::vector<float> gradient(kDim), scratch(kDim);
            for (float& g : gradient) g = draw_float(random, dtype);
            const std::uint64_t id = random.bits();
            const std::uint32_t step = random.word();
            std::vector<Code> first;
            for (const Kernels* kernels : available_kernels()) {
                std::vector<Code> row(kDim);
                const RowStep each{reinterpret_cast<std::byte*>(row.data()), gradient.data(), id};
                kernels->step(plain_sgd(dtype, kDim, step, 1.0), &each, 1, scratch.data());
                if (first.empty()) first = row;
                CHECK(row == first);
            }
            for (std::uint32_t e = 0; e < kDim; ++e) {
                const double expected = -double{gradient[e]};
                const Code low = low_of(dtype, expected), code = first[e] & 0x7fff;
                CHECK(is_finite(dtype, first[e]));
                CHECK(code == low || (value_of(dtype, low) != std::fabs(expected) && code == low + 1));
                if (expected != 0) CHECK_EQ((first[e] & 0x8000) != 0, expected < 0);
            }
        }
}

// The mean of many roundings is the number itself: the odds are the distances.
CASE(rounding_is_unbiased, testing::scaled(20)) {
    constexpr std::uint32_t kDim = 64, kRows = 500;
    for (Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
        const float value = random.chance(0.5) ? random.real(0.5f, 2.0f)
                                               : std::ldexp(random.real(0.5f, 1.0f), -20); // subnormal in fp16
        const Code low = low_of(dtype, value);
        const double gap = value_of(dtype, static_cast<Code>(low + 1)) - value_of(dtype, low);
        const double odds = (value - value_of(dtype, low)) / gap;
        std::vector<float> gradient(kDim, -value), scratch(kDim);
        double ups = 0;
        for (std::uint32_t r = 0; r < kRows; ++r) {
            std::vector<Code> row(kDim);
            const RowStep each{reinterpret_cast<std::byte*>(row.data()), gradient.data(), r};
            portable_kernels().step(plain_sgd(dtype, kDim, 1 + r % 7, 1.0), &each, 1, scratch.data());
            for (Code code : row) ups += code == low + 1;
        }
        const double n = kDim * kRows;
        CHECK(std::fabs(ups - odds * n) < 6 * std::sqrt(n * odds * (1 - odds)) + 1e-2 * std::sqrt(n));
    }
}

CASE(beyond_the_largest, 1) {
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const Kernels* kernels : available_kernels())
        for (float sign : {1.0f, -1.0f}) {
            auto step = [&](Dtype dtype, float value) {
                Code row[2] = {};
                const float gradient = -value;
                float scratch = 0;
                const RowStep each{reinterpret_cast<std::byte*>(row), &gradient, 1};
                kernels->step(plain_sgd(dtype, 1, 1, 1.0), &each, 1, &scratch);
                return static_cast<Code>(row[0] & 0x7fff);
            };
            for (float value : {65504.0f, 65519.0f, 65520.0f, 1e30f, infinity})
                CHECK_EQ(step(Dtype::float16, sign * value), 0x7bff);
            CHECK_EQ(step(Dtype::bfloat16, sign * std::numeric_limits<float>::max()), 0x7f7f);
            CHECK(step(Dtype::float16, sign * nan) > 0x7c00);
            CHECK(step(Dtype::bfloat16, sign * nan) > 0x7f80);
        }
}

} // namespace
