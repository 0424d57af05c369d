// DLRM's interaction: every path against sums in double, whatever the sizes; one result for any number of threads.
#include <cmath>

#include "models/dlrm_interaction.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

std::vector<float> draw(Random& random, std::size_t n) {
    std::vector<float> values(n);
    for (float& each : values) each = random.real(-1.0f, 1.0f);
    return values;
}

struct Batch {
    Batch(Random& random, std::size_t size, std::uint32_t num_block, std::uint32_t dim, bool has_first)
        : size(size), num_block(num_block), dim(dim), head(has_first ? dim : 0), num(num_block + (has_first ? 1U : 0U)),
          out_dim(head + num * (num - 1) / 2), first(draw(random, size * head)),
          block(draw(random, size * num_block * dim)), gradient(draw(random, size * out_dim)), out(size * out_dim),
          of_first(first.size()), of_block(block.size()) {}

    void run(DlrmInteraction& dots) {
        const float* begin = head == 0 ? nullptr : first.data();
        dots.forward(size, num_block, dim, begin, block.data(), out.data());
        dots.backward(size, num_block, dim, begin, block.data(), gradient.data(), of_first.data(), of_block.data());
    }

    const float* vector(std::size_t s, std::size_t i) const {
        if (head != 0) return i == 0 ? &first[s * dim] : &block[(s * num_block + i - 1) * dim];
        return &block[(s * num_block + i) * dim];
    }
    float of_vector(std::size_t s, std::size_t i, std::size_t d) const {
        if (head != 0) return i == 0 ? of_first[s * dim + d] : of_block[(s * num_block + i - 1) * dim + d];
        return of_block[(s * num_block + i) * dim + d];
    }

    void check() const {
        const double close = 1e-6 * (dim + num);
        for (std::size_t s = 0; s < size; ++s) {
            std::vector<double> expected(std::size_t{num} * dim);
            const float* found = out.data() + s * out_dim;
            const float* weight = gradient.data() + s * out_dim;
            for (std::uint32_t d = 0; d < head; ++d) {
                CHECK_EQ(*found++, vector(s, 0)[d]);
                expected[d] += double{*weight++};
            }
            for (std::uint32_t i = 1; i < num; ++i)
                for (std::uint32_t j = 0; j < i; ++j, ++weight) {
                    double product = 0;
                    for (std::uint32_t d = 0; d < dim; ++d) {
                        const double x = vector(s, i)[d], y = vector(s, j)[d];
                        product += x * y;
                        expected[std::size_t{i} * dim + d] += y * double{*weight};
                        expected[std::size_t{j} * dim + d] += x * double{*weight};
                    }
                    CHECK(std::abs(double{*found++} - product) <= close);
                }
            for (std::uint32_t i = 0; i < num; ++i)
                for (std::uint32_t d = 0; d < dim; ++d)
                    CHECK(std::abs(double{of_vector(s, i, d)} - expected[std::size_t{i} * dim + d]) <= close);
        }
    }

    std::size_t size;
    std::uint32_t num_block, dim, head, num;
    std::size_t out_dim;
    std::vector<float> first, block, gradient, out, of_first, of_block;
};

CASE(every_path_is_right, 8) {
    for (const Kernels* kernels : available_kernels()) {
        DlrmInteraction dots(*kernels, 1);
        for (int shape = 0; shape < 40; ++shape) {
            const bool has_first = random.below(2) == 0;
            const auto num_block = static_cast<std::uint32_t>(1 + random.below(50));
            Batch batch(random, random.below(4), num_block, static_cast<std::uint32_t>(1 + random.below(70)),
                        has_first);
            batch.run(dots);
            batch.check();
        }
    }
}

CASE(threads_do_not_matter, 8) {
    const Kernels& kernels = *available_kernels().front();
    Batch batch(random, 64 + random.below(200), 26, 16, true);
    DlrmInteraction alone(kernels, 1);
    batch.run(alone);
    batch.check();
    const std::vector<float> out = batch.out, of_first = batch.of_first, of_block = batch.of_block;
    for (unsigned threads = 2; threads < 6; ++threads) {
        DlrmInteraction dots(kernels, threads);
        batch.run(dots);
        CHECK(batch.out == out && batch.of_first == of_first && batch.of_block == of_block);
    }
}

} // namespace
