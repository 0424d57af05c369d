// The Python binding of the sources: decoded samples, the gathering of a batch from them, and the parser of
// delimited text with its format. Validates and releases the GIL; returned arrays own their memory.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "bindings/bindings.hpp"
#include "data/delimited.hpp"
#include "data/samples.hpp"

namespace satrap {

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bag = std::tuple<Ids, std::optional<Offsets>, std::optional<Floats>>;

void require_count(const std::string& what, std::size_t found, std::size_t expected) {
    if (found != expected) refuse(what + " are " + std::to_string(found) + ", expected " + std::to_string(expected));
}

void check_sizes(std::size_t f, const Bag& bag, std::size_t n) {
    const auto& [values, offsets, weights] = bag;
    const std::string feature = "feature " + std::to_string(f);
    if (offsets)
        require_count(feature + ": offsets", offsets->size(), n + 1);
    else
        require_count(feature + " has no offsets and its ids", values.size(), n);
    if (weights) require_count(feature + ": weights", weights->size(), values.size());
}

std::shared_ptr<Samples> make_samples(std::size_t n, const std::vector<Bag>& ids, const std::optional<Matrix>& dense,
                                      const std::optional<Matrix>& label) {
    for (std::size_t f = 0; f < ids.size(); ++f) check_sizes(f, ids[f], n);
    if (dense) require_count("rows of dense", dense->shape(0), n);
    if (label) require_count("rows of label", label->shape(0), n);
    std::size_t wrong = ids.size();
    std::shared_ptr<Samples> samples;
    {
        nb::gil_scoped_release release;
        SamplesBuilder builder(n, ids.size());
        for (std::size_t f = 0; f < ids.size(); ++f) {
            const auto& [values, offsets, weights] = ids[f];
            const float* beside = weights ? weights->data() : nullptr;
            if (!offsets)
                builder.single(f, values.data(), beside);
            else if (!builder.bags(f, values.data(), values.size(), offsets->data(), beside))
                wrong = std::min(wrong, f);
        }
        if (dense) builder.dense(dense->data(), dense->shape(1));
        if (label) builder.label(label->data(), label->shape(1));
        samples = builder.done();
    }
    if (wrong < ids.size())
        refuse("feature " + std::to_string(wrong) + ": offsets must rise within its " +
               std::to_string(std::get<0>(ids[wrong]).size()) + " ids");
    return samples;
}

Array<std::int64_t> count_ids_of(const Samples& samples, std::size_t feature, std::optional<std::uint64_t> padding) {
    if (feature >= samples.ids.size())
        refuse("feature " + std::to_string(feature) + " of " + std::to_string(samples.ids.size()));
    auto counts = uncleared<std::int64_t>(samples.n);
    {
        nb::gil_scoped_release release;
        count_ids(samples, feature, padding, counts.get());
    }
    return as_array<std::int64_t>(std::move(counts), {samples.n});
}

using GivenPart = std::tuple<std::shared_ptr<Samples>, std::size_t, std::size_t>;

std::vector<BlockRange> checked_ranges(const std::vector<GivenPart>& given, const std::vector<std::int64_t>& order) {
    if (given.empty()) refuse("no parts were given; expected at least one");
    std::vector<BlockRange> parts;
    std::size_t total = 0;
    for (const auto& [samples, begin, end] : given) {
        if (begin > end || end > samples->n)
            refuse("samples " + std::to_string(begin) + ".." + std::to_string(end) + " of " +
                   std::to_string(samples->n));
        if (!samples->same_shape(*std::get<0>(given[0]))) refuse("the parts have different columns");
        parts.push_back({samples.get(), begin, end});
        total += end - begin;
    }
    for (std::int64_t k : order)
        if (k < 0 || static_cast<std::size_t>(k) >= total)
            refuse("order holds " + std::to_string(k) + " of " + std::to_string(total) + " samples");
    return parts;
}

nb::tuple gather_batch(const std::vector<GivenPart>& given, const Offsets& given_order) {
    const std::vector<std::int64_t> order(given_order.data(), given_order.data() + given_order.size());
    const std::vector<BlockRange> parts = checked_ranges(given, order);
    const Samples& shape = *parts[0].samples;
    const std::size_t n = order.size(), num_dense = shape.num_dense, num_labels = shape.num_labels;
    std::unique_ptr<std::uint64_t[]> values;
    std::unique_ptr<std::int64_t[]> offsets;
    std::unique_ptr<float[]> weights, dense, label;
    std::size_t num_values = 0, num_offsets = 0;
    {
        nb::gil_scoped_release release;
        const Gather gather(parts, order);
        num_values = gather.num_values();
        gather.values((values = uncleared<std::uint64_t>(num_values)).get());
        if (!gather.one_each()) {
            num_offsets = gather.num_features() * n + 1;
            gather.offsets((offsets = uncleared<std::int64_t>(num_offsets)).get());
        }
        if (gather.weighted()) gather.weights((weights = uncleared<float>(num_values)).get());
        if (num_dense != 0) gather.dense((dense = uncleared<float>(n * num_dense)).get());
        if (num_labels != 0) gather.label((label = uncleared<float>(n * num_labels)).get());
    }
    auto rows = [&](std::unique_ptr<float[]>& memory, std::size_t width) {
        return memory == nullptr ? nb::none() : nb::cast(as_array<float, 2>(std::move(memory), {n, width}));
    };
    return nb::make_tuple(as_array<std::uint64_t>(std::move(values), {num_values}),
                          offsets == nullptr ? nb::none()
                                             : nb::cast(as_array<std::int64_t>(std::move(offsets), {num_offsets})),
                          weights == nullptr ? nb::none() : nb::cast(as_array<float>(std::move(weights), {num_values})),
                          rows(dense, num_dense), rows(label, num_labels));
}

// -- delimited text --------------------------------------------------------------------------------------------------

void check_format(const TextFormat& format) {
    if (format.delimiter.empty() || format.delimiter.size() > 8)
        refuse("a delimiter of " + std::to_string(format.delimiter.size()) + " bytes, expected 1 to 8");
    if (format.quote < -1 || format.quote > 255) refuse("quote=" + std::to_string(format.quote) + ", expected a byte");
    if (format.columns.size() <= format.constants.size()) refuse("no columns were given; expected at least one");
    std::vector<int> features(format.num_features);
    for (const auto& uses : format.columns) {
        for (const FieldUse& use : uses) {
            const std::size_t limits[] = {format.num_dense, format.num_labels, format.num_features, format.num_features,
                                          format.num_texts};
            const std::size_t limit = limits[static_cast<std::size_t>(use.kind)];
            if (use.index >= limit) refuse("use " + std::to_string(use.index) + " of " + std::to_string(limit));
            if (use.kind == UseKind::ids) ++features[use.index];
        }
    }
    for (std::size_t f = 0; f < features.size(); ++f)
        if (features[f] != 1)
            refuse("feature " + std::to_string(f) + " has " + std::to_string(features[f]) + " columns, expected 1");
}

std::string_view as_text(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

nb::tuple parse_text(const TextFormat& format, const Bytes& text, std::size_t most_bad) {
    check_format(format);
    ParsedText parsed;
    {
        const std::string_view whole = as_text(text);
        nb::gil_scoped_release release;
        parsed = DelimitedParser(format).parse(whole, most_bad);
    }
    nb::list texts, bad;
    const std::size_t n = parsed.samples->n;
    for (const TextColumn& column : parsed.texts) {
        const auto size = static_cast<std::size_t>(column.offsets.data()[n]);
        texts.append(nb::make_tuple(array_over(column.offsets.data(), {n + 1}, column.offsets.shared()),
                                    array_over(column.data.data(), {size}, column.data.shared()),
                                    array_over(column.present.data(), {n}, column.present.shared())));
    }
    for (const BadRow& row : parsed.bad)
        bad.append(nb::make_tuple(row.at, fault_name(row.fault), row.column, row.field_begin, row.field_end, row.found,
                                  row.expected));
    return nb::make_tuple(parsed.samples, texts, bad, parsed.dropped);
}

FieldUse make_use(const std::string& kind, std::size_t index) {
    constexpr const char* kinds[] = {"dense", "label", "ids", "weights", "text"};
    for (std::size_t i = 0; i < std::size(kinds); ++i)
        if (kind == kinds[i]) {
            FieldUse use;
            use.kind = static_cast<UseKind>(i);
            use.index = index;
            return use;
        }
    refuse("kind is '" + kind + "', expected dense, label, ids, weights or text");
}

void bind_format(nb::module_& m) {
    nb::class_<FieldUse>(m, "FieldUse", "One use of a text file's column.")
        .def(
            "__init__",
            [](FieldUse* self, const std::string& kind, std::size_t index) {
                new (self) FieldUse(make_use(kind, index));
            },
            "kind"_a, "index"_a)
        .def_prop_rw(
            "absent", [](const FieldUse& u) { return static_cast<int>(u.absent); },
            [](FieldUse& u, int absent) {
                if (absent < 0 || absent > 2) refuse("absent=" + std::to_string(absent) + ", expected 0, 1 or 2");
                u.absent = static_cast<MissingLabel>(absent);
            },
            "A missing field: 0 reads as `missing`, 1 is refused, 2 drops its row.")
        .def_rw("missing", &FieldUse::missing)
        .def_rw("log1p", &FieldUse::log1p)
        .def_prop_rw(
            "label_kind", [](const FieldUse& u) { return static_cast<int>(u.label_kind); },
            [](FieldUse& u, int kind) {
                if (kind < 0 || kind > 2) refuse("label_kind=" + std::to_string(kind) + ", expected 0, 1 or 2");
                u.label_kind = static_cast<LabelKind>(kind);
            },
            "Which numbers a label may be: 0 any, 1 binary (0 or 1), 2 a count.")
        .def_rw("above", &FieldUse::above, nb::arg().none())
        .def_rw("texts", &FieldUse::texts)
        .def_rw("other", &FieldUse::other, nb::arg().none())
        .def_prop_rw(
            "separator", [](const FieldUse& u) { return static_cast<int>(static_cast<unsigned char>(u.separator)); },
            [](FieldUse& u, int separator) { u.separator = static_cast<char>(separator); })
        .def_rw("integer", &FieldUse::integer)
        .def_rw("hash", &FieldUse::hash)
        .def_rw("missing_id", &FieldUse::missing_id, nb::arg().none());
    nb::class_<TextFormat>(m, "TextFormat", "The meaning of the fields of a delimited text file.")
        .def(nb::init<>())
        .def_rw("delimiter", &TextFormat::delimiter)
        .def_rw("quote", &TextFormat::quote)
        .def_rw("strip", &TextFormat::strip)
        .def_rw("quoted_newlines", &TextFormat::quoted_newlines)
        .def_rw("missing", &TextFormat::missing)
        .def_rw("columns", &TextFormat::columns)
        .def_rw("constants", &TextFormat::constants)
        .def_rw("num_dense", &TextFormat::num_dense)
        .def_rw("num_labels", &TextFormat::num_labels)
        .def_rw("num_features", &TextFormat::num_features)
        .def_rw("num_texts", &TextFormat::num_texts);
}

Array<float> log1p_each(const Floats& values) {
    auto out = uncleared<float>(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) out[i] = log1p_of(values.data()[i]);
    return as_array<float>(std::move(out), {values.size()});
}

template <typename Offset>
nb::tuple parse_numbers(const nb::ndarray<const Offset, nb::ndim<1>, nb::c_contig, nb::device::cpu>& offsets,
                        const Bytes& data) {
    if (offsets.size() == 0) refuse("offsets are empty, expected one more than there are texts");
    const std::size_t n = offsets.size() - 1, size = data.size();
    const Offset* at = offsets.data();
    auto numbers = uncleared<float>(n);
    auto malformed = uncleared<bool>(n);
    bool rising = at[0] >= 0;
    {
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < n && rising; ++i) {
            rising = at[i] <= at[i + 1] && static_cast<std::size_t>(at[i + 1]) <= size;
            if (!rising) break;
            const std::string_view text{reinterpret_cast<const char*>(data.data()) + at[i],
                                        static_cast<std::size_t>(at[i + 1] - at[i])};
            const std::optional<double> number = parse_number(text);
            numbers[i] = static_cast<float>(number.value_or(std::numeric_limits<double>::quiet_NaN()));
            malformed[i] = !number && !text.empty();
        }
    }
    if (!rising) refuse("offsets must rise within the " + std::to_string(size) + " bytes of the texts");
    return nb::make_tuple(as_array<float>(std::move(numbers), {n}), as_array<bool>(std::move(malformed), {n}));
}

void bind_text(nb::module_& m) {
    m.def("parse_text", &parse_text, "format"_a, "text"_a, "most_bad"_a,
          nb::sig("def parse_text(format: TextFormat, text: NDArray[numpy.uint8], most_bad: int) -> tuple[Samples, "
                  "list[tuple[NDArray[numpy.int64], NDArray[numpy.uint8], NDArray[numpy.uint8]]], "
                  "list[tuple[int, str, int, int, int, int, int]], int]"),
          "Parses whole rows of text to (samples, text columns, bad rows, number of dropped rows).");
    m.def(
        "count_lines", [](const Bytes& text) { return count_lines(as_text(text)); }, "text"_a, WithoutGil(),
        "Returns the number of newlines.");
    m.def(
        "last_row_end", [](const Bytes& text, int quote) { return last_row_end(as_text(text), quote); }, "text"_a,
        "quote"_a, WithoutGil(), "Returns where the last whole row of the text ends; 0 if none does.");
    m.def(
        "count_rows", [](const Bytes& text, int quote) { return count_rows(as_text(text), quote); }, "text"_a,
        "quote"_a, WithoutGil(), "Returns the number of rows.");
    m.def(
        "rows_within",
        [](const Bytes& text, int quote, std::size_t begin, std::size_t end) {
            const std::size_t low = row_begin(as_text(text), quote, 0, begin);
            return std::pair{low, row_begin(as_text(text), quote, low, end - begin)};
        },
        "text"_a, "quote"_a, "begin"_a, "end"_a, WithoutGil(),
        "Returns where the rows from `begin` to `end` begin and end.");
    constexpr const char* numbers = "Parses each text data[offsets[i]:offsets[i + 1]] as a number: (numbers, NaN where "
                                    "empty or malformed; which are malformed).";
    m.def("parse_numbers", &parse_numbers<std::int32_t>, "offsets"_a, "data"_a,
          nb::sig("def parse_numbers(offsets: NDArray[numpy.int32], data: NDArray[numpy.uint8]) -> "
                  "tuple[NDArray[numpy.float32], NDArray[numpy.bool_]]"),
          numbers);
    m.def("parse_numbers", &parse_numbers<std::int64_t>, "offsets"_a, "data"_a,
          nb::sig("def parse_numbers(offsets: NDArray[numpy.int64], data: NDArray[numpy.uint8]) -> "
                  "tuple[NDArray[numpy.float32], NDArray[numpy.bool_]]"),
          numbers);
}

} // namespace

void bind_samples(nb::module_& m) {
    nb::class_<Samples>(m, "Samples", "Decoded samples of one block of a source.")
        .def(nb::new_(&make_samples), "n"_a, "ids"_a, "dense"_a.none(), "label"_a.none())
        .def("__len__", [](const Samples& samples) { return samples.n; })
        .def("count_ids", &count_ids_of, "feature"_a, "padding"_a.none(),
             "How many ids of the feature with this number each sample has, without those that are `padding`.");
    m.def("gather", &gather_batch, "parts"_a, "order"_a,
          nb::sig("def gather(parts: collections.abc.Sequence[tuple[Samples, int, int]], order: NDArray[numpy.int64]) "
                  "-> tuple[NDArray[numpy.uint64], NDArray[numpy.int64] | None, NDArray[numpy.float32] | None, "
                  "NDArray[numpy.float32] | None, NDArray[numpy.float32] | None]"),
          "One batch: (values, offsets, weights, dense, label) of the samples `order` of the parts (samples, begin, "
          "end), which are numbered through.");
    bind_format(m);
    bind_text(m);
    m.def("log1p", &log1p_each, "values"_a, "ln(1 + max(x, 0)) of each, the same bits on every machine.");
}

} // namespace satrap
