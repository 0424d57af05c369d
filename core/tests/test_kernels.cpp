// The kernels: every path of this machine gives the same bits, and those bits are the plain loops' or near the formulas
// in double. Sixteen-bit numbers have a test of their own (test_sixteen_bits.cpp).
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

constexpr std::uint32_t kMostDim = 70;
constexpr std::byte kGuard{0xa5};
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};

std::vector<float> draw_floats(Random& random, std::size_t n, float most = 2.0f) {
    std::vector<float> values(n);
    for (float& value : values) value = random.chance(0.05) ? 0.0f : random.real(-most, most);
    return values;
}

TableConfig draw_config(Random& random, OptimizerKind kind, Dtype dtype, std::uint32_t dim) {
    TableConfig config;
    config.dim = dim;
    config.dtype = dtype;
    OptimizerConfig& o = config.optimizer;
    o.kind = kind;
    o.lr = random.real(0.001f, 0.5f);
    if (random.chance(0.5)) o.weight_decay = random.real(0.0f, 0.1f);
    if (random.chance(0.6)) o.momentum = random.real(0.1f, 0.9f), o.nesterov = random.chance(0.5);
    o.initial_accumulator_value = random.chance(0.5) ? 0.0 : random.real(0.0f, 1.0f);
    o.eps = random.chance(0.5) ? 1e-8 : 1e-3;
    o.betas[0] = random.real(0.5f, 0.95f);
    o.betas[1] = random.real(0.9f, 0.9999f);
    o.l1 = random.chance(0.5) ? 0.0 : random.real(0.0f, 0.5f);
    o.l2 = random.chance(0.5) ? 0.0 : random.real(0.0f, 0.5f);
    config.initial = std::vector{InitialKind::uniform, InitialKind::normal, InitialKind::constant}[random.below(3)];
    config.initial_a = random.real(-0.5f, 0.1f);
    config.initial_b = config.initial_a + 0.7;
    return config;
}

constexpr std::uint64_t kKey = 77;

StepScalars step_scalars(const TableConfig& config, std::uint32_t step) {
    return StepScalars::of(config, kKey, step, config.optimizer.lr);
}

InitialScalars initial_scalars(const TableConfig& config) { return InitialScalars::of(config, kKey); }

// Rows at a stride that is a multiple of 4 only, as in a bucket, with guard bytes between them.
struct RowBlock {
    std::size_t stride;
    std::vector<std::uint32_t> words;
    RowBlock(const TableConfig& config, std::size_t rows)
        : stride(config.row_bytes() + 20), words((rows + 1) * stride / 4) {
        std::memset(words.data(), static_cast<int>(kGuard), words.size() * 4);
    }
    std::byte* row(std::size_t r) { return reinterpret_cast<std::byte*>(words.data()) + 4 + r * stride; }
    bool operator==(const RowBlock&) const = default;
};

// Initial rows and some steps on each path; returns what they all hold.
RowBlock run_steps(Random& random, const TableConfig& config, std::size_t rows, std::uint32_t steps) {
    const std::vector<const Kernels*> paths = available_kernels();
    std::vector<RowBlock> blocks(paths.size(), RowBlock(config, rows));
    std::vector<float> scratch(config.dim);
    for (std::size_t k = 0; k < paths.size(); ++k)
        for (std::size_t r = 0; r < rows; ++r)
            paths[k]->initialise(initial_scalars(config), r * 1000, blocks[k].row(r), scratch.data());
    for (std::uint32_t step = 1; step <= steps; ++step) {
        const std::vector<float> gradients = draw_floats(random, rows * config.dim);
        for (std::size_t k = 0; k < paths.size(); ++k) {
            std::vector<RowStep> each;
            for (std::size_t r = 0; r < rows; ++r)
                each.push_back({blocks[k].row(r), gradients.data() + r * config.dim, r * 1000});
            paths[k]->step(step_scalars(config, step), each.data(), rows, scratch.data());
        }
    }
    for (std::size_t k = 1; k < paths.size(); ++k)
        if (!(blocks[k] == blocks[0]))
            testing::fail(__FILE__, __LINE__,
                          std::string(paths[k]->name) + " differs from " + paths[0]->name + ": optimizer " +
                              std::to_string(static_cast<int>(config.optimizer.kind)) + ", dtype " +
                              std::to_string(static_cast<int>(config.dtype)) + ", dim " + std::to_string(config.dim));
    for (std::size_t r = 0; r + 1 < rows; ++r)
        CHECK(std::count(blocks[0].row(r) + config.row_bytes(), blocks[0].row(r + 1), kGuard) ==
              20); // nothing beyond a row
    return blocks[0];
}

CASE(there_is_a_portable_path, 1) {
    for (const Kernels* kernels : available_kernels()) std::printf("path: %s\n", kernels->name);
    CHECK(available_kernels().back() == &portable_kernels());
}

CASE(paths_agree_on_rows, testing::scaled(12)) {
    for (std::uint32_t dim = 1; dim <= kMostDim; ++dim)
        for (int kind = 0; kind <= static_cast<int>(OptimizerKind::ftrl); ++kind)
            for (Dtype dtype : kDtypes)
                run_steps(random, draw_config(random, static_cast<OptimizerKind>(kind), dtype, dim), 9, 4);
}

// One optimizer step in double, straight from its paper's or torch's text.
void step_in_double(const OptimizerConfig& o, std::uint32_t dim, std::vector<double>& p, std::vector<double>& s,
                    const float* gradient) {
    double mean_square = 0;
    for (std::uint32_t i = 0; i < dim; ++i) mean_square += std::pow(gradient[i] + o.weight_decay * p[i], 2) / dim;
    if (o.kind == OptimizerKind::rowwise_adagrad) s[0] += mean_square;
    const bool is_adam = o.kind == OptimizerKind::adam || o.kind == OptimizerKind::adamw;
    const double t = is_adam ? ++s[2 * dim] : 0;
    for (std::uint32_t i = 0; i < dim; ++i) {
        double g =
            gradient[i] + (o.kind == OptimizerKind::adamw || o.kind == OptimizerKind::ftrl ? 0 : o.weight_decay * p[i]);
        switch (o.kind) {
        case OptimizerKind::sgd:
            if (o.momentum != 0) {
                s[i] = s[i] * o.momentum + g;
                g = o.nesterov ? g + o.momentum * s[i] : s[i];
            }
            p[i] -= o.lr * g;
            break;
        case OptimizerKind::adagrad:
            s[i] += g * g;
            p[i] -= o.lr * g / (std::sqrt(s[i]) + o.eps);
            break;
        case OptimizerKind::rowwise_adagrad: p[i] -= o.lr / (std::sqrt(s[0]) + o.eps) * g; break;
        case OptimizerKind::adam:
        case OptimizerKind::adamw:
            if (o.kind == OptimizerKind::adamw) p[i] *= 1 - o.lr * o.weight_decay;
            s[i] = o.betas[0] * s[i] + (1 - o.betas[0]) * g;
            s[dim + i] = o.betas[1] * s[dim + i] + (1 - o.betas[1]) * g * g;
            p[i] -= o.lr * (s[i] / (1 - std::pow(o.betas[0], t))) /
                    (std::sqrt(s[dim + i] / (1 - std::pow(o.betas[1], t))) + o.eps);
            break;
        case OptimizerKind::ftrl: {
            const double n = s[dim + i] + g * g;
            s[i] += g - (std::sqrt(n) - std::sqrt(s[dim + i])) / o.lr * p[i];
            s[dim + i] = n;
            p[i] = std::fabs(s[i]) <= o.l1
                       ? 0
                       : -(s[i] - std::copysign(o.l1, s[i])) / ((o.beta + std::sqrt(n)) / o.lr + o.l2);
            break;
        }
        }
    }
}

CASE(formulas_are_right, testing::scaled(200)) {
    for (int kind = 0; kind <= static_cast<int>(OptimizerKind::ftrl); ++kind) {
        TableConfig config =
            draw_config(random, static_cast<OptimizerKind>(kind), Dtype::float32, random.between(1, kMostDim));
        config.optimizer.l1 = std::min(config.optimizer.l1, 0.01);
        Random same = random; // run_steps draws the gradients in this order
        RowBlock rows = run_steps(random, config, 1, 5);
        RowBlock initial = run_steps(random, config, 1, 0);
        const auto* start = reinterpret_cast<const float*>(initial.row(0));
        std::vector<double> p(start, start + config.dim),
            state(start + config.dim, start + config.dim + config.state_dim());
        for (unsigned step = 0; step < 5; ++step)
            step_in_double(config.optimizer, config.dim, p, state, draw_floats(same, config.dim).data());
        const auto* found = reinterpret_cast<const float*>(rows.row(0));
        for (std::uint32_t i = 0; i < config.dim; ++i)
            CHECK(std::fabs(found[i] - p[i]) < 2e-5 * std::max(1.0, std::fabs(p[i])));
        for (std::uint32_t i = 0; i < config.state_dim(); ++i)
            CHECK(std::fabs(found[config.dim + i] - state[i]) < 1e-4 * std::max(1.0, std::fabs(state[i])));
    }
}

CASE(plain_sgd_is_exact, testing::scaled(200)) {
    TableConfig config;
    config.dim = random.between(1, kMostDim);
    config.optimizer.kind = OptimizerKind::sgd;
    config.optimizer.lr = random.real(0.0f, 1.0f);
    std::vector<float> scratch(config.dim);
    for (const Kernels* kernels : available_kernels()) {
        std::vector<float> row = draw_floats(random, config.dim), expected = row;
        const std::vector<float> gradient = draw_floats(random, config.dim);
        const auto lr = static_cast<float>(config.optimizer.lr);
        for (std::uint32_t i = 0; i < config.dim; ++i) expected[i] = std::fma(-lr, gradient[i], row[i]);
        const RowStep step{reinterpret_cast<std::byte*>(row.data()), gradient.data(), 1};
        kernels->step(step_scalars(config, 1), &step, 1, scratch.data());
        CHECK(row == expected);
    }
}

// Row-wise Adagrad's mean is the one sum over elements: sixteen lanes, then a tree of halves, on every path.
CASE(the_mean_is_summed_in_one_order, 10) {
    for (std::uint32_t dim = 1; dim <= kMostDim; ++dim) {
        TableConfig config;
        config.dim = dim;
        config.optimizer.kind = OptimizerKind::rowwise_adagrad;
        const std::vector<float> gradient = draw_floats(random, dim, 100.0f);
        std::vector<float> lanes(16), scratch(dim);
        for (std::uint32_t i = 0; i < dim; ++i) lanes[i % 16] = std::fma(gradient[i], gradient[i], lanes[i % 16]);
        for (std::uint32_t half = 8; half != 0; half /= 2)
            for (std::uint32_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
        for (const Kernels* kernels : available_kernels()) {
            std::vector<float> row(dim + 1);
            const RowStep step{reinterpret_cast<std::byte*>(row.data()), gradient.data(), 1};
            kernels->step(step_scalars(config, 1), &step, 1, scratch.data());
            CHECK_EQ(row[dim], lanes[0] / static_cast<float>(dim));
        }
    }
}

// The value that FTRL's closed form makes of a new row's z is the initial value, so that a zero gradient changes
// little.
CASE(ftrl_starts_at_the_initial_value, 20) {
    TableConfig config = draw_config(random, OptimizerKind::ftrl, Dtype::float32, 40);
    config.initial = InitialKind::uniform;
    RowBlock block(config, 1);
    std::vector<float> scratch(40), zeros(40);
    portable_kernels().initialise(initial_scalars(config), 5, block.row(0), scratch.data());
    auto* values = reinterpret_cast<float*>(block.row(0));
    const std::vector<float> initial(values, values + 40);
    const RowStep step{block.row(0), zeros.data(), 5};
    portable_kernels().step(step_scalars(config, 1), &step, 1, scratch.data());
    for (unsigned i = 0; i < 40; ++i) CHECK(std::fabs(values[i] - initial[i]) <= 1e-6f + 1e-5f * std::fabs(initial[i]));
}

CASE(gather_copies_exactly, testing::scaled(40)) {
    for (std::uint32_t dim = 1; dim <= kMostDim; dim += random.between(1, 3))
        for (const Kernels* kernels : available_kernels()) {
            const std::size_t rows = random.between(1, 30), count = random.between(1, 60), first = random.below(17);
            TableConfig config;
            config.dim = dim;
            RowBlock block(config, rows);
            for (std::size_t r = 0; r < rows; ++r)
                for (std::uint32_t i = 0; i < dim; ++i) { // any bits, NaNs with payloads among them
                    const std::uint32_t bits = random.chance(0.1) ? 0x7f800000U | random.word() : random.word();
                    std::memcpy(block.row(r) + 4 * i, &bits, 4);
                }
            std::vector<const std::byte*> pointers;
            for (std::size_t r = 0; r < rows; ++r) pointers.push_back(block.row(r));
            std::vector<std::uint32_t> local, positions;
            for (std::size_t e = 0; e < count; ++e)
                local.push_back(random.below(rows)), positions.push_back(static_cast<std::uint32_t>(2 * e));
            for (std::size_t e = count; e > 1; --e) std::swap(positions[e - 1], positions[random.below(e)]);
            std::vector<std::uint32_t> out(16 + first + 2 * count * dim + 16, 0x12345678U), expected = out;
            const std::size_t aligned = (64 - reinterpret_cast<std::uintptr_t>(out.data()) % 64) % 64 / 4;
            const std::size_t at = aligned + (random.chance(0.5) ? 0 : first); // streaming wants whole lines
            std::vector<float*> to;
            for (std::size_t e = 0; e < count; ++e) {
                std::memcpy(expected.data() + at + positions[e] * dim, pointers[local[e]], 4 * dim);
                to.push_back(reinterpret_cast<float*>(out.data() + at + positions[e] * dim));
            }
            kernels->gather(pointers.data(), local.data(), to.data(), count, dim, Dtype::float32);
            CHECK(out == expected);
        }
}

std::vector<Factor> draw_factors(Random& random, std::size_t n) {
    std::vector<Factor> factors(n);
    for (Factor& factor : factors) {
        if (random.chance(0.7)) factor.weight = random.real(-3.0f, 3.0f);
        if (random.chance(0.5)) factor.divisor = random.real(1.0f, 9.0f);
    }
    return factors;
}

// Gradients in any place, bare or scaled, with and without factors: always the order of the entries.
CASE(sum_adds_in_order, testing::scaled(20)) {
    for (std::uint32_t dim = 1; dim <= kMostDim; ++dim)
        for (const Kernels* kernels : available_kernels()) {
            const std::uint32_t ids = random.between(1, 10), count = random.between(1, 50);
            const std::vector<float> gradients = draw_floats(random, std::size_t{count} * dim, 1e6f);
            const std::vector<Factor> factors = draw_factors(random, count);
            const Factor* given = random.chance(0.5) ? nullptr : factors.data();
            const float scale = random.chance(0.5) ? 1.0f : random.real(0.001f, 2.0f);
            std::vector<std::uint32_t> local;
            std::vector<const float*> from;
            for (std::uint32_t e = 0; e < count; ++e) {
                local.push_back(random.below(ids));
                from.push_back(gradients.data() + std::size_t{random.below(count)} * dim);
            }
            std::vector<float> sums(std::size_t{ids} * dim, 3.0f), expected = sums;
            std::vector<std::uint8_t> started(ids), seen(ids);
            for (std::uint32_t e = 0; e < count; ++e) {
                for (std::uint32_t i = 0; i < dim; ++i) {
                    float g = from[e][i];
                    if (given != nullptr || scale != 1.0f) {
                        g = g * scale;
                        if (given != nullptr) g = g * given[e].weight;
                        if (given != nullptr) g = g / given[e].divisor;
                    }
                    float& sum = expected[local[e] * dim + i];
                    sum = seen[local[e]] ? sum + g : g;
                }
                seen[local[e]] = 1;
            }
            kernels->sum({from.data(), given, scale}, local.data(), count, dim, sums.data(), started.data());
            CHECK(sums == expected);
            CHECK(started == seen);
        }
}

CASE(pool_adds_in_order, testing::scaled(20)) {
    for (std::uint32_t dim = 1; dim <= kMostDim; ++dim)
        for (const Kernels* kernels : available_kernels()) {
            const std::uint32_t count = random.below(9);
            const std::vector<float> rows = draw_floats(random, std::size_t{count} * dim),
                                     weights = draw_floats(random, count);
            const bool weighted = random.chance(0.5);
            const float divisor = random.chance(0.5) ? 1.0f : random.real(1.0f, 9.0f);
            std::vector<float> out(dim + 1, 7.0f), expected = out;
            for (std::uint32_t i = 0; i < dim; ++i) {
                expected[i] = 0.0f;
                for (std::uint32_t k = 0; k < count; ++k) {
                    const float value = rows[std::size_t{k} * dim + i];
                    if (weighted)
                        expected[i] = k == 0 ? weights[0] * value : std::fma(weights[k], value, expected[i]);
                    else
                        expected[i] = k == 0 ? value : expected[i] + value;
                }
                expected[i] = expected[i] / divisor;
            }
            kernels->pool(rows.data(), weighted ? weights.data() : nullptr, count, dim, divisor, out.data());
            CHECK(out == expected);
        }
}

// The largest magnitude's bits, wherever it lies: a number that is not finite is larger than all that are.
CASE(largest_is_found_anywhere, testing::scaled(8)) {
    for (const Kernels* kernels : available_kernels()) {
        CHECK_EQ(kernels->largest(nullptr, 0), 0);
        std::vector<float> values(9000);
        for (float& value : values) value = random.real(-3.0f, 3.0f);
        auto try_at = [&](std::size_t begin, std::size_t count, std::size_t at) {
            const std::uint32_t bad[] = {0x7f800000U, 0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0x7f7fffffU, 0x40800000U};
            const std::uint32_t magnitude = bad[random.below(6)], sign = random.chance(0.5) ? 0x80000000U : 0;
            const float kept = values[at];
            values[at] = std::bit_cast<float>(magnitude | sign);
            std::uint32_t expected = 0;
            for (std::size_t i = begin; i < begin + count; ++i)
                expected = std::max(expected, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffU);
            CHECK_EQ(kernels->largest(values.data() + begin, count), expected);
            if (at >= begin && at < begin + count) CHECK_EQ(expected, magnitude);
            values[at] = kept;
        };
        for (std::size_t begin = 0; begin < 4; ++begin)
            for (std::size_t count = 1; count <= kMostDim; ++count)
                for (std::size_t at = 0; at < begin + count + 3; ++at) try_at(begin, count, at);
        for (std::size_t at : {0U, 4095U, 4096U, 8192U, 8999U}) try_at(0, 9000, at), try_at(3, 8000, at);
    }
}

CASE(initial_values_are_spread, testing::scaled(10)) {
    TableConfig config;
    config.dim = 64;
    config.optimizer.kind = OptimizerKind::sgd;
    config.initial_a = random.real(-1.0f, 0.0f);
    config.initial_b = random.real(0.5f, 2.0f);
    std::vector<float> row(64), scratch(64);
    for (InitialKind kind : {InitialKind::uniform, InitialKind::normal, InitialKind::constant}) {
        config.initial = kind;
        double sum = 0, squares = 0, n = 0;
        const double a = config.initial_a, b = config.initial_b;
        for (std::uint64_t id = random.bits(), i = 0; i < 2000; ++i, ++id) {
            portable_kernels().initialise(initial_scalars(config), id, reinterpret_cast<std::byte*>(row.data()),
                                          scratch.data());
            for (float value : row) {
                sum += value, squares += double{value} * value, ++n;
                if (kind == InitialKind::uniform)
                    CHECK(value >= static_cast<float>(a) && value <= static_cast<float>(b));
                if (kind == InitialKind::constant) CHECK_EQ(value, static_cast<float>(a));
            }
        }
        const double mean = sum / n, deviation = std::sqrt(std::max(0.0, squares / n - mean * mean));
        const double expected_mean = kind == InitialKind::uniform ? (a + b) / 2 : a;
        const double expected = kind == InitialKind::uniform  ? (b - a) / std::sqrt(12.0)
                                : kind == InitialKind::normal ? b
                                                              : 0;
        CHECK(std::fabs(mean - expected_mean) < 6 * expected / std::sqrt(n) + 1e-6);
        CHECK(std::fabs(deviation - expected) < 6 * expected / std::sqrt(n) + 1e-3);
    }
}

} // namespace
