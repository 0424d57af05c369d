// The Python binding of xxh64.hpp, hash.hpp and checksum.hpp: ids from integers, and from the texts of an Arrow column;
// the buckets of ids and their order in files; the CRC of bytes. Validates and releases the GIL.
#include <bit>

#include "base/checksum.hpp"
#include "base/hash.hpp"
#include "bindings/bindings.hpp"
#include "data/xxh64.hpp"

namespace satrap {

namespace {

template <typename T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Hashes = Array<std::uint64_t>;

Hashes hash_integers(const Ids& values) {
    const std::size_t n = values.size();
    const std::uint64_t* from = values.data();
    auto out = uncleared<std::uint64_t>(n);
    {
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < n; ++i) out[i] = hash_integer(from[i]);
    }
    return as_array<std::uint64_t>(std::move(out), {n});
}

template <typename Offset> Hashes hash_column(const Column<Offset>& offsets, const Bytes& data) {
    if (offsets.size() == 0) refuse("offsets are empty, expected one more than there are texts");
    const std::size_t n = offsets.size() - 1;
    const Offset* at = offsets.data();
    const auto* text = reinterpret_cast<const char*>(data.data());
    auto out = uncleared<std::uint64_t>(n);
    bool rising;
    {
        nb::gil_scoped_release release;
        rising = hash_texts(at, n, text, data.size(), out.get());
    }
    if (!rising) refuse("offsets must rise within the " + std::to_string(data.size()) + " bytes of the texts");
    return as_array<std::uint64_t>(std::move(out), {n});
}

Array<std::uint32_t> buckets_of(const Ids& ids, std::uint32_t num_buckets, bool direct) {
    if (!std::has_single_bit(num_buckets))
        refuse("num_buckets=" + std::to_string(num_buckets) + ", expected a power of two");
    const unsigned bits = static_cast<unsigned>(std::countr_zero(num_buckets));
    const std::uint64_t* id = ids.data();
    const std::size_t n = ids.size();
    auto out = uncleared<std::uint32_t>(n);
    {
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < n; ++i) out[i] = bucket_of(order_hash(id[i], direct), bits);
    }
    return as_array<std::uint32_t>(std::move(out), {n});
}

std::size_t num_in_order(const Ids& ids, bool direct) {
    const std::uint64_t* id = ids.data();
    const std::size_t n = ids.size();
    for (std::size_t i = 1; i < n; ++i)
        if (order_hash(id[i - 1], direct) >= order_hash(id[i], direct)) return i;
    return n;
}

} // namespace

void bind_hash(nb::module_& m) {
    m.def(
        "crc32c", [](const Bytes& bytes, std::uint32_t crc) { return crc32c(bytes.data(), bytes.size(), crc); },
        "data"_a, "crc"_a = 0, WithoutGil(), "Returns the CRC-32C of a byte buffer, chained from `crc`.");
    m.def("bucket_of", &buckets_of, "ids"_a, "num_buckets"_a, "direct"_a = false,
          "Returns the bucket of each id. direct: in a table with num_rows.");
    m.def("hash_order", &num_in_order, "ids"_a, "direct"_a = false, WithoutGil(),
          "Returns how many of the first ids are in rising order of their hashes, none twice.");
    m.def("hash_integers", &hash_integers, "values"_a, "XXH64 (seed 0) of each integer's 8 bytes, the lowest first.");
    constexpr const char* texts = "XXH64 (seed 0) of each text: data[offsets[i]:offsets[i + 1]].";
    m.def("hash_texts", &hash_column<std::int32_t>, "offsets"_a, "data"_a, texts);
    m.def("hash_texts", &hash_column<std::int64_t>, "offsets"_a, "data"_a, texts);
}

} // namespace satrap
