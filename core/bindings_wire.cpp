// What Python sees of rows on the wire without an engine or a split: one table's, decoded in the caller's thread.
#include "bindings_wire.hpp"

void bind_wire(nb::module_& m) {
    m.def(
        "decode_rows",
        [](std::size_t num_rows, std::uint32_t dim, const Message& message) {
            require_few(num_rows);
            ThreadPool alone(1);
            const Wire wire({dim}, kernels_named("auto"), alone);
            return wire_rows(wire, std::make_shared<BlockPool>(), {0, static_cast<std::int64_t>(num_rows)}, message);
        },
        "num_rows"_a, "dim"_a, "message"_a, "As Engine.decode_rows, of rows of one table.");
}
