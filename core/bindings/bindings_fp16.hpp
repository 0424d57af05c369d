// The Python binding of encoded rows that an engine and a split share, with its checks.
#pragma once

#include <vector>

#include "bindings/bindings.hpp"
#include "kernels/fp16_codec.hpp"

namespace satrap {

inline std::vector<std::int64_t> checked_rows(const Fp16Codec& wire, const Offsets& offsets) {
    const std::size_t last = offsets.size() == 0 ? 0 : static_cast<std::size_t>(offsets.data()[offsets.size() - 1]);
    return checked_offsets(offsets, wire.dims().size(), last);
}

inline Array<std::uint8_t> wire_message(const Fp16Codec& wire, const std::shared_ptr<BlockPool>& blocks,
                                        const std::vector<std::int64_t>& at, const FloatsIn& rows) {
    require_size("rows", rows.size(), wire.num_floats(at));
    const std::size_t bytes = wire.num_bytes(at);
    Array<std::uint8_t> message = as_array<std::uint8_t>(blocks, blocks->take(bytes), {bytes});
    auto* to = reinterpret_cast<std::byte*>(message.data());
    const float* from = rows.data();
    nb::gil_scoped_release release;
    wire.encode(at, from, to);
    return message;
}

inline Array<float> wire_rows(const Fp16Codec& wire, const std::shared_ptr<BlockPool>& blocks,
                              const std::vector<std::int64_t>& at, const Bytes& message) {
    require_size("message", message.size(), wire.num_bytes(at));
    const std::size_t floats = wire.num_floats(at);
    Array<float> rows = as_array<float>(blocks, blocks->take(floats * sizeof(float)), {floats});
    const auto* from = reinterpret_cast<const std::byte*>(message.data());
    float* to = rows.data();
    nb::gil_scoped_release release;
    wire.decode(at, from, to);
    return rows;
}

// The methods that Engine and Split share.
template <typename Class> void bind_fp16(nb::class_<Class>& bound) {
    bound
        .def(
            "encode_rows",
            [](Class& own, const Offsets& offsets, const FloatsIn& rows) {
                const auto& blocks = own.blocks(); // not in a fork
                return wire_message(own.codec(), blocks, checked_rows(own.codec(), offsets), rows);
            },
            "offsets"_a, "rows"_a,
            "Encodes rows, table by table, as scaled fp16: a message of 2 bytes for each value and 1 for each row.")
        .def(
            "decode_rows",
            [](Class& own, const Offsets& offsets, const Bytes& message) {
                const auto& blocks = own.blocks();
                return wire_rows(own.codec(), blocks, checked_rows(own.codec(), offsets), message);
            },
            "offsets"_a, "message"_a, "Decodes a message of encode_rows.");
}

} // namespace satrap
