// The Python binding of dlrm_interaction.hpp: one object for each number of threads. Validates sizes and releases the
// GIL.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/bindings.hpp"
#include "models/dlrm_interaction.hpp"

namespace satrap {

namespace {

using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Array>
void require_shape(const char* what, const Array& found, std::size_t rows, std::size_t columns) {
    if (found.shape(0) != rows || found.shape(1) != columns)
        refuse(std::string(what) + " is " + std::to_string(found.shape(0)) + " x " + std::to_string(found.shape(1)) +
               ", expected " + std::to_string(rows) + " x " + std::to_string(columns));
}

struct Sizes {
    Sizes(std::uint32_t dim, const std::optional<Matrix>& first, const Matrix& block)
        : batch(block.shape(0)), num_block(static_cast<std::uint32_t>(dim == 0 ? 0 : block.shape(1) / dim)) {
        if (dim == 0 || dim > 1U << 20 || block.shape(1) > 1U << 24)
            refuse("dim=" + std::to_string(dim) + ", expected 1 to 2^20, and a block of 2^24 columns at most");
        require_shape("block", block, batch, std::size_t{num_block} * dim);
        if (first) require_shape("first", *first, batch, dim);
        const DotShape shape{num_block + (first ? 1U : 0U), dim};
        if (shape.num == 0 || shape.num > 1U << 12) refuse(std::to_string(shape.num) + " vectors, expected 1 to 4096");
        out_dim = shape.pairs() + (first ? dim : 0);
    }
    std::size_t batch;
    std::uint32_t num_block;
    std::size_t out_dim;
};

} // namespace

void bind_interaction(nb::module_& m) {
    nb::class_<DlrmInteraction>(m, "Dots",
                                "DLRM's interaction of a batch, on the CPU: the dot products of all pairs of vectors.")
        .def(
            "__init__",
            [](DlrmInteraction* self, unsigned num_threads, const std::string& simd) {
                if (num_threads < 1 || num_threads > 4096)
                    refuse("num_threads=" + std::to_string(num_threads) + ", expected 1..4096");
                new (self) DlrmInteraction(kernels_named(simd), num_threads);
            },
            "num_threads"_a, "simd"_a = "auto")
        .def(
            "forward",
            [](DlrmInteraction& self, std::uint32_t dim, const std::optional<Matrix>& first, const Matrix& block,
               const MatrixOut& out) {
                const Sizes sizes(dim, first, block);
                require_shape("out", out, sizes.batch, sizes.out_dim);
                const float* head = first ? first->data() : nullptr;
                self.forward(sizes.batch, sizes.num_block, dim, head, block.data(), out.data());
            },
            "dim"_a, "first"_a.none(), "block"_a, "out"_a, WithoutGil(),
            "Fills out: each sample's first vector, then the products of all pairs, row by row of the triangle.")
        .def(
            "backward",
            [](DlrmInteraction& self, std::uint32_t dim, const std::optional<Matrix>& first, const Matrix& block,
               const Matrix& gradient, const std::optional<MatrixOut>& of_first, const MatrixOut& of_block) {
                const Sizes sizes(dim, first, block);
                require_shape("gradient", gradient, sizes.batch, sizes.out_dim);
                require_shape("of_block", of_block, sizes.batch, block.shape(1));
                if (first.has_value() != of_first.has_value())
                    refuse("one of first and of_first, expected both or none");
                if (of_first) require_shape("of_first", *of_first, sizes.batch, dim);
                const float* head = first ? first->data() : nullptr;
                float* of_head = of_first ? of_first->data() : nullptr;
                self.backward(sizes.batch, sizes.num_block, dim, head, block.data(), gradient.data(), of_head,
                              of_block.data());
            },
            "dim"_a, "first"_a.none(), "block"_a, "gradient"_a, "of_first"_a.none(), "of_block"_a, WithoutGil(),
            "Fills of_first and of_block with the gradients of first and block, given that of out.");
}

} // namespace satrap
