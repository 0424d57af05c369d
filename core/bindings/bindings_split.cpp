// The Python binding of a split: the calls of an embedding worker, and arrays over the data for the servers. An array
// keeps the memory that it shows alive, not the ticket or the sums that it came from.
#include "sharding/shard_split.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings_fp16.hpp"
#include "bindings/bindings_frames.hpp"

namespace satrap {

namespace {

std::shared_ptr<Split> make_split(const std::vector<TableConfig>& tables, const std::vector<NamedFeature>& features,
                                  unsigned num_threads, const std::string& simd) {
    require_tables(tables.size());
    return Split::owned(std::make_unique<Split>(tables, checked_features(dims_of(tables), features),
                                                checked_threads(num_threads), simd));
}

// The server of each bucket: a copy, so that the checked values are the ones used.
std::vector<std::uint32_t> checked_owners(const Split& split, const Words& owners, std::uint32_t num_servers) {
    if (num_servers < 1 || num_servers > 65535)
        refuse("num_servers=" + std::to_string(num_servers) + ", expected 1..65535");
    require_size("owners", owners.size(), split.map().total());
    std::vector<std::uint32_t> of_buckets(owners.data(), owners.data() + owners.size());
    for (std::size_t b = 0; b < of_buckets.size(); ++b)
        if (of_buckets[b] >= num_servers)
            refuse("bucket " + std::to_string(b) + " is owned by server " + std::to_string(of_buckets[b]) + " of " +
                   std::to_string(num_servers));
    return of_buckets;
}

std::unique_ptr<SplitTicket> lookup_batch(Split& split, const Ids& values, const std::optional<Offsets>& offsets,
                                          const std::optional<FloatsIn>& weights, std::size_t batch_size,
                                          const Words& owners, std::uint32_t num_servers, bool with_indexes,
                                          const std::shared_ptr<Bags>& others) {
    const Bags& bags = others == nullptr ? split.bags() : *others;
    if (bags.engine != split.bags().engine) refuse("these bags describe the tables of another split");
    const BagInputs inputs = checked_inputs(bags, values, offsets, weights, batch_size);
    return split.lookup(inputs, checked_owners(split, owners, num_servers), num_servers, with_indexes, others);
}

std::vector<std::uint32_t> checked_groups(const Split& split, const Words& groups) {
    require_size("groups", groups.size(), split.map().num_tables());
    std::vector<std::uint32_t> of_tables(groups.data(), groups.data() + groups.size());
    for (const std::uint32_t group : of_tables)
        if (group >= of_tables.size()) refuse("group " + std::to_string(group) + "; expected less than the tables");
    return of_tables;
}

nb::dict lines(Split& split, SplitTicket& ticket, const Words& groups) {
    const std::vector<std::uint32_t> of_tables = checked_groups(split, groups);
    SplitLines result = without_gil([&] { return split.lines(ticket, of_tables); });
    nb::dict out;
    out["lines"] = moved<std::int32_t>(std::move(result.lines));
    out["offsets"] = moved_or_none<std::int64_t>(std::move(result.offsets));
    out["weights"] = moved_or_none<float>(std::move(result.weights));
    return out;
}

nb::dict order(Split& split, SplitTicket& ticket, const Words& groups) {
    const std::vector<std::uint32_t> of_tables = checked_groups(split, groups);
    return dict_of(without_gil([&] { return split.order(ticket, of_tables); }));
}

nb::tuple runs(Split& split, const std::vector<SplitTicket*>& tickets, const std::vector<GivenFlags>& given,
               const Words& owners, std::uint32_t num_servers, const Words& groups) {
    const std::vector<GivenParts> parts =
        checked_parts(tickets, given, [](const SplitTicket& ticket) { return ticket.ticket.bags.get(); });
    const std::vector<std::uint32_t> of_tables = checked_groups(split, groups);
    std::vector<std::uint32_t> of_buckets = checked_owners(split, owners, num_servers);
    auto sums = std::make_unique<SumRuns>(
        without_gil([&] { return split.runs(tickets, parts, std::move(of_buckets), num_servers, of_tables); }));
    nb::dict of_runs = dict_of(std::move(sums->runs));
    return nb::make_tuple(std::move(sums), std::move(of_runs));
}

void fill(Split& split, SplitTicket& ticket, const std::vector<FloatsIn>& rows, const FloatsOut& block,
          const std::vector<FloatsOut>& sequences) {
    std::vector<const float*> of_servers;
    std::vector<float*> memory;
    if (split.owns(ticket)) { // the split refuses another's
        const ShardLayout& layout = *ticket.layout;
        require_size("rows", rows.size(), layout.num_servers());
        for (std::size_t s = 0; s < rows.size(); ++s) {
            const std::string what = "the rows of server " + std::to_string(s);
            require_size(what.c_str(), rows[s].size(), layout.num_floats[s]);
            of_servers.push_back(rows[s].data());
        }
        require_size("block", block.size(), ticket.ticket.num_floats);
        require_size("sequences", sequences.size(), ticket.ticket.bags->sequences.size());
        for (std::size_t q = 0; q < sequences.size(); ++q) {
            require_size("a sequence", sequences[q].size(), sequence_size(ticket.ticket, q));
            memory.push_back(sequences[q].data());
        }
    }
    split.fill(ticket, of_servers, block.data(), memory.data());
}

std::unique_ptr<Sums> sums(Split& split, const std::vector<SplitTicket*>& tickets,
                           const std::vector<GivenGradients>& gradients, double scale, const Words& owners,
                           std::uint32_t num_servers) {
    if (tickets.empty()) refuse("no ticket was given; expected at least one");
    require_size("gradients", gradients.size(), tickets.size());
    const float scale_of_all = checked_scale(scale);
    std::vector<std::uint32_t> of_buckets = checked_owners(split, owners, num_servers);
    std::vector<BagGradients> checked;
    for (std::size_t k = 0; k < tickets.size(); ++k) {
        if (tickets[k] == nullptr) refuse("a ticket is None");
        checked.push_back(split.owns(*tickets[k]) ? checked_gradients(tickets[k]->ticket, gradients[k])
                                                  : BagGradients{nullptr, {}}); // refused by the split
    }
    return std::make_unique<Sums>(split.sums(tickets, checked, scale_of_all, std::move(of_buckets), num_servers));
}

const ShardLayout& layout_of(const std::shared_ptr<const ShardLayout>& layout, std::size_t server) {
    if (server >= layout->num_servers())
        refuse("server " + std::to_string(server) + " of " + std::to_string(layout->num_servers()));
    return *layout;
}

// The attributes that SplitTicket and Sums share.
template <typename Class> void bind_layout(nb::class_<Class>& bound) {
    bound
        .def(
            "ids",
            [](const Class& own, std::size_t server) {
                const ShardLayout& layout = layout_of(own.layout, server);
                const std::uint64_t* memory = own.ids->template as<std::uint64_t>() + layout.first_id[server];
                return array_over(memory, {layout.num_ids(server)}, own.ids);
            },
            "server"_a, "Ids of the server, table by table, and within a table bucket by bucket.")
        .def(
            "offsets",
            [](const Class& own, std::size_t server) {
                const ShardLayout& layout = layout_of(own.layout, server);
                return array_over(layout.offsets(server), {layout.num_tables + 1}, own.layout);
            },
            "server"_a, "Where each table's ids begin in ids(server), and where the last one's end.")
        .def(
            "num_floats",
            [](const Class& own, std::size_t server) { return layout_of(own.layout, server).num_floats[server]; },
            "server"_a, "Number of floats of the rows, or gradients, of ids(server).")
        .def_prop_ro("num_servers", [](const Class& own) { return own.layout->num_servers(); });
}

void bind_lookup(nb::class_<Split>& split) {
    split
        .def("lookup", &lookup_batch, "values"_a, "offsets"_a.none(), "weights"_a.none(), "batch_size"_a, "owners"_a,
             "num_servers"_a, "with_indexes"_a = false, "bags"_a.none() = nb::none(), WithoutGil())
        .def(
            "bags",
            [](Split& s, const std::vector<NamedFeature>& named) {
                return s.other_bags(checked_features(s.dims(), named));
            },
            "features"_a,
            "Returns other features of the same tables, for lookups whose tickets an update may have beside others.");
}

void bind_again(nb::class_<Split>& split) {
    split
        .def(
            "reshard",
            [](Split& split, SplitTicket& ticket, const Words& owners, std::uint32_t num_servers) {
                split.reshard(ticket, checked_owners(split, owners, num_servers), num_servers);
            },
            "ticket"_a, "owners"_a, "num_servers"_a, WithoutGil(), "Lays the ticket's ids out for other owners.")
        .def(
            "reshard_sums",
            [](Split& split, const Sums& own, const Words& owners, std::uint32_t num_servers) {
                require_size("the sums' buckets", own.layout->owners.size(), split.map().total());
                return std::make_unique<Sums>(
                    split.reshard_sums(own, checked_owners(split, owners, num_servers), num_servers));
            },
            "sums"_a, "owners"_a, "num_servers"_a, WithoutGil(), "Returns the same sums for other owners.");
}

// Rows that are not those of the tables: runs of rows with one dim each.
Fp16Codec codec_of(const Split& split, const Words& dims) {
    std::vector<std::uint32_t> checked(dims.data(), dims.data() + dims.size());
    for (const std::uint32_t dim : checked)
        if (dim == 0 || dim > 65536) refuse("dims has " + std::to_string(dim) + "; expected 1 to 65536");
    return split.codec().with_dims(std::move(checked));
}

void bind_runs(nb::class_<Split>& split) {
    split
        .def(
            "encode_runs",
            [](Split& split, const Words& dims, const Offsets& offsets, const FloatsIn& rows) {
                const auto& blocks = split.blocks(); // not in a fork
                const Fp16Codec codec = codec_of(split, dims);
                return wire_message(codec, blocks, checked_rows(codec, offsets), rows);
            },
            "dims"_a, "offsets"_a, "rows"_a,
            "Encodes rows as encode_rows does: run r has the rows offsets[r] to offsets[r + 1], of dim dims[r].")
        .def(
            "decode_runs",
            [](Split& split, const Words& dims, const Offsets& offsets, const Bytes& message) {
                const auto& blocks = split.blocks();
                const Fp16Codec codec = codec_of(split, dims);
                return wire_rows(codec, blocks, checked_rows(codec, offsets), message);
            },
            "dims"_a, "offsets"_a, "message"_a, "Decodes a message of encode_runs.");
}

} // namespace

void bind_split(nb::module_& m) {
    nb::class_<SplitTicket> ticket(m, "SplitTicket", "A batch whose unique ids are laid out for the servers.");
    ticket.def_prop_ro("batch_size", [](const SplitTicket& t) { return t.ticket.batch_size; })
        .def_prop_ro("sequence_floats", [](const SplitTicket& t) { return sequence_sizes(t.ticket); })
        .def_prop_ro("used", [](const SplitTicket& t) { return t.ticket.used.load(); });
    bind_layout(ticket);
    nb::class_<Sums> sums_class(m, "Sums", "What an update sends to each server: one gradient for each id.");
    sums_class
        .def(
            "gradients",
            [](const Sums& own, std::size_t server) {
                const ShardLayout& layout = layout_of(own.layout, server);
                const float* memory = own.gradients->as<float>() + layout.first_float[server];
                return array_over(memory, {layout.num_floats[server]}, own.gradients);
            },
            "server"_a, "The gradients of ids(server), in their order.")
        .def_ro("same_ids", &Sums::same_ids, "Whether ids and servers are those of the one ticket's lookup.")
        .def_ro("skipped", &Sums::skipped,
                "For each table the number of ids in bags whose gradients were not finite and left out.");
    bind_layout(sums_class);
    nb::class_<SumRuns> runs_class(m, "SumRuns", "The ids that an update sends to each server; a device has the sums.");
    bind_layout(runs_class);
    nb::class_<Split> split(m, "Split",
                            "Lookups and updates whose rows lie on servers: what Engine does with bags, less rows.");
    split.def(nb::new_(&make_split), "tables"_a, "features"_a, "num_threads"_a, "simd"_a = "auto")
        .def_prop_ro("num_threads", &Split::num_threads)
        .def_prop_ro("simd", &Split::simd)
        .def_prop_ro(
            "truncated", [](const Split& s) { return truncated(s.bags()); },
            "For each sequence the number of ids beyond its max_length, which were not looked up.")
        .def(
            "empty", [](Split& s, std::size_t rows, std::size_t dim) { return empty_block(s.blocks(), rows, dim); },
            "rows"_a, "dim"_a, "Returns an uninitialised block, like Engine.empty.")
        .def("lines", &lines, "ticket"_a, "groups"_a,
             nb::sig("def lines(self, ticket: SplitTicket, groups: NDArray[numpy.uint32]) -> dict[str, typing.Any]"),
             "Returns the row of each id of a batch that a device pools, among the rows of its group of tables.")
        .def("order", &order, "ticket"_a, "groups"_a,
             nb::sig("def order(self, ticket: SplitTicket, groups: NDArray[numpy.uint32]) -> dict[str, typing.Any]"),
             "Returns which gradients the sum of each id of the lookup consists of, ahead of the update.")
        .def("runs", &runs, "tickets"_a, "given"_a, "owners"_a, "num_servers"_a, "groups"_a,
             nb::sig("def runs(self, tickets: collections.abc.Sequence[SplitTicket], given: "
                     "collections.abc.Sequence[tuple[bool, collections.abc.Sequence[bool]]], owners: "
                     "NDArray[numpy.uint32], num_servers: int, groups: NDArray[numpy.uint32]) -> tuple[SumRuns, "
                     "dict[str, typing.Any]]"),
             "Returns which gradients each sum of `sums` consists of, for a device that computes them.")
        .def("fill", &fill, "ticket"_a, "rows"_a, "block"_a, "sequences"_a, WithoutGil(),
             "Writes what Engine.lookup_bags writes, from rows as each server's flat lookup returns them.")
        .def("sums", &sums, "tickets"_a, "gradients"_a, "scale"_a, "owners"_a, "num_servers"_a, WithoutGil(),
             "Returns the sums that Engine.update_bags would apply to each id.")
        .def("drop", &Split::drop, "ticket"_a, "Releases a ticket that will not be updated.");
    bind_lookup(split);
    bind_again(split);
    bind_fp16(split);
    bind_runs(split);
}

} // namespace satrap
