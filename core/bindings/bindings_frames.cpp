// The Python binding of rows on a device: satrap.device.device_rows drives it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings_frames.hpp"

namespace satrap {

namespace {

using FramesOut = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PlacesIn = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::size_t checked_pool(const Engine& engine, std::size_t p) {
    if (p >= engine.directory().num_pools())
        refuse("frame pool " + std::to_string(p) + " of " + std::to_string(engine.directory().num_pools()));
    return p;
}

std::size_t checked_device_table(Engine& engine, std::size_t t) {
    if (t >= engine.num_tables() || !engine.table(t).config().frame_pool)
        refuse("table " + std::to_string(t) + " has no rows on a device");
    return t;
}

nb::dict absent_of(const FrameLookup& result) {
    nb::dict out;
    out["absent_ids"] = column<std::uint64_t>(result.absent, &AbsentRow::id);
    out["absent_tables"] = column<std::uint32_t>(result.absent, &AbsentRow::table);
    out["absent_places"] = column<std::int32_t>(result.absent, &AbsentRow::place);
    return out;
}

nb::dict lookup_frames(Engine& engine, const std::shared_ptr<Bags>& bags, const Ids& values,
                       const std::optional<Offsets>& offsets, const std::optional<FloatsIn>& weights,
                       std::size_t batch_size, std::uint64_t step, std::uint64_t oldest_open, bool train,
                       const FramesOut& frames, bool first_epoch) {
    const auto [inputs, when] =
        checked_lookup(engine, *bags, values, offsets, weights, batch_size, step, oldest_open, train, first_epoch);
    require_size("frames", frames.size(), values.size());
    for (std::size_t t = 0; t < engine.num_tables(); ++t) checked_device_table(engine, t);
    std::int32_t* memory = frames.data();
    FrameLookup result = without_gil(
        [&, &inputs = inputs, &when = when] { return engine.lookup_frames(bags, inputs, when, memory, train); });
    nb::dict out = absent_of(result);
    out["ticket"] = std::move(result.ticket);
    out["num_ids"] = result.num_ids;
    out["offsets"] = moved_or_none<std::int64_t>(std::move(result.offsets));
    out["weights"] = moved_or_none<float>(std::move(result.weights));
    return out;
}

nb::dict lookup_id_frames(Engine& engine, const Ids& ids, const Offsets& offsets, std::uint64_t step,
                          std::uint64_t oldest_open, bool train, const FramesOut& frames, bool first_epoch,
                          bool want_ticket) {
    const std::vector<std::int64_t> of_tables = checked_offsets(offsets, engine.num_tables(), ids.size());
    const LookupStep when = checked_step(step, oldest_open, train, false, first_epoch);
    require_size("frames", frames.size(), ids.size());
    std::int32_t* memory = frames.data();
    FrameLookup result =
        without_gil([&] { return engine.lookup_id_frames(ids.data(), of_tables, when, memory, train && want_ticket); });
    nb::dict out = absent_of(result);
    out["ticket"] = std::move(result.ticket);
    return out;
}

nb::dict update_id_frames(Engine& engine, const Ids& ids, const Offsets& offsets, const PlacesIn& places,
                          std::uint64_t step, bool filter) {
    require_step("step", step);
    const std::vector<std::int64_t> of_tables = checked_offsets(offsets, engine.num_tables(), ids.size());
    require_size("places", places.size(), ids.size());
    return dict_of(without_gil([&] {
        return engine.update_id_frames(ids.data(), of_tables, places.data(), static_cast<std::uint32_t>(step), filter);
    }));
}

bool check_id_gradients(Engine& engine, const Ids& ids, const Offsets& offsets, const FloatsIn& gradients) {
    const std::vector<std::int64_t> of_tables = checked_offsets(offsets, engine.num_tables(), ids.size());
    require_size("gradients", gradients.size(), engine.out_size(of_tables));
    return engine.check_id_gradients(ids.data(), of_tables, gradients.data());
}

nb::dict take_inserted(Engine& engine) {
    const std::vector<InsertedRow> rows = engine.directory().take_inserted();
    nb::dict out;
    out["ids"] = column<std::uint64_t>(rows, &InsertedRow::id);
    out["tables"] = column<std::uint32_t>(rows, &InsertedRow::table);
    out["frames"] = column<std::int32_t>(rows, &InsertedRow::place);
    return out;
}

nb::dict take_moves(Engine& engine) {
    const std::vector<Move> moves = engine.directory().take_moves();
    nb::dict out;
    out["pools"] = column<std::uint32_t>(moves, &Move::pool);
    out["frames"] = column<std::int32_t>(moves, &Move::frame);
    out["slots"] = column<std::int32_t>(moves, &Move::slot);
    out["directions"] = column<std::int32_t>(moves, &Move::directions);
    return out;
}

nb::dict update_frames(Engine& engine, const std::vector<Ticket*>& tickets, const std::vector<GivenFlags>& given,
                       std::uint64_t step, bool filter) {
    require_step("step", step);
    const std::vector<GivenParts> parts =
        checked_parts(tickets, given, [](const Ticket& ticket) { return ticket.bags.get(); });
    return dict_of(
        without_gil([&] { return engine.update_frames(tickets, parts, static_cast<std::uint32_t>(step), filter); }));
}

nb::dict order_frames(Engine& engine, Ticket& ticket) {
    if (ticket.bags == nullptr) refuse("the ticket is not one of a batch");
    return dict_of(without_gil([&] { return engine.order_frames(ticket); }));
}

nb::dict order_id_frames(Engine& engine, Ticket& ticket, const PlacesIn& places) {
    if (ticket.bags != nullptr) refuse("the ticket is one of a batch");
    require_size("places", places.size(), ticket.size);
    return dict_of(without_gil([&] { return engine.order_id_frames(ticket, places.data()); }));
}

nb::object update_ordered_frames(Engine& engine, Ticket& ticket, std::uint64_t step, bool filter) {
    require_step("step", step);
    if (ticket.looked_up == nullptr || ticket.looked_up->updated.empty())
        refuse("the ticket is not ordered: call order_frames");
    std::optional<FrameRuns> runs =
        without_gil([&] { return engine.update_ordered_frames(ticket, static_cast<std::uint32_t>(step), filter); });
    return runs ? nb::object(dict_of(std::move(*runs))) : nb::none();
}

void settle_frames(Engine& engine, std::size_t t, const Ids& ids, std::uint64_t skipped, std::uint64_t step) {
    require_step("step", step);
    engine.settle_frames(checked_device_table(engine, t), {ids.data(), ids.size()}, skipped,
                         static_cast<std::uint32_t>(step));
}

bool check_gradients(Engine& engine, const std::vector<Ticket*>& tickets, const std::vector<GivenGradients>& gradients,
                     double scale) {
    const float scale_of_all = checked_scale(scale);
    const std::vector<BagGradients> checked = checked_gradients_of(engine, tickets, gradients);
    return engine.check_gradients(tickets, checked, scale_of_all);
}

void initial_rows(Engine& engine, std::size_t t, const Ids& ids, const BytesOut& values, const FloatsOut& state) {
    const TableConfig& config = engine.table(checked_device_table(engine, t)).config();
    require_size("values", values.size(), ids.size() * config.dim);
    require_size("the bytes of values", values.nbytes(), ids.size() * config.dim * config.element_bytes());
    require_size("state", state.size(), ids.size() * config.state_dim());
    const std::span<const std::uint64_t> of_rows(ids.data(), ids.size());
    auto* bytes = static_cast<std::byte*>(values.data());
    engine.initial_rows(t, of_rows, bytes, state.data());
}

nb::object read_frames(Engine& engine, std::size_t t, const Ids& ids) {
    Table& table = engine.table(checked_device_table(engine, t));
    std::vector<std::uint32_t> frames;
    for (std::size_t i = 0; i < ids.size(); ++i) frames.push_back(table.place_of(ids.data()[i]));
    return moved<std::int32_t>(std::move(frames));
}

nb::object import_frames(Engine& engine, std::size_t t, const Ids& ids, const Words& steps) {
    checked_device_table(engine, t);
    require_size("step", steps.size(), ids.size());
    return moved<std::int32_t>(engine.import_frames(t, {ids.data(), ids.size()}, steps.data()));
}

void bind_places(nb::class_<Engine>& engine) {
    engine
        .def("take_moves", &take_moves, nb::sig("def take_moves(self) -> dict[str, NDArray[typing.Any]]"),
             "Returns the copies between frames and slots at home that the rows' places require.")
        .def(
            "set_device_frames",
            [](Engine& e, std::size_t p, std::uint32_t frames) {
                e.directory().set_device_frames(checked_pool(e, p), frames);
            },
            "pool"_a, "frames"_a, "Limits the frames of a pool; the other rows are at home.")
        .def(
            "home_used", [](Engine& e, std::size_t p) { return e.directory().pool(checked_pool(e, p)).home.used(); },
            "pool"_a, "How many slots the memory at home must have.")
        .def(
            "home_free",
            [](Engine& e, std::size_t p) { return e.directory().pool(checked_pool(e, p)).home.num_free(); }, "pool"_a)
        .def(
            "frames_used",
            [](Engine& e, std::size_t p) { return e.directory().pool(checked_pool(e, p)).device.used(); }, "pool"_a,
            "How many frames the device's memory must have.")
        .def(
            "frames_free",
            [](Engine& e, std::size_t p) { return e.directory().pool(checked_pool(e, p)).device.num_free(); }, "pool"_a)
        .def(
            "set_frame_limit",
            [](Engine& e, std::size_t p, std::uint32_t limit) {
                if (e.directory().pool(checked_pool(e, p)).is_tiered()) refuse("set_device_frames has set the limit");
                e.directory().pool(p).device.set_limit(limit);
            },
            "pool"_a, "limit"_a);
}

void bind_id_frames(nb::class_<Engine>& engine) {
    engine
        .def(
            "share_buckets", [](Engine& e, std::size_t t) { e.ownership().share(checked_table(e, t)); }, "table"_a,
            "Lets this engine look up and update the rows of all buckets of a table.")
        .def(
            "shares_buckets", [](const Engine& e, std::size_t t) { return e.ownership().shares(checked_table(e, t)); },
            "table"_a)
        .def("lookup_id_frames", &lookup_id_frames, "ids"_a, "offsets"_a, "step"_a, "oldest_open"_a, "train"_a,
             "frames"_a, "first_epoch"_a = true, "want_ticket"_a = false,
             nb::sig("def lookup_id_frames(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], step: int, "
                     "oldest_open: int, train: bool, frames: NDArray[numpy.int32], first_epoch: bool = True, "
                     "want_ticket: bool = False) -> dict[str, typing.Any]"),
             "Finds the frames of ids in flat arrays, table by table.")
        .def(
            "order_id_frames", &order_id_frames, "ticket"_a, "places"_a,
            nb::sig("def order_id_frames(self, ticket: Ticket, places: NDArray[numpy.int32]) -> dict[str, typing.Any]"),
            "Returns what update_id_frames would, ahead of it.")
        .def("update_id_frames", &update_id_frames, "ids"_a, "offsets"_a, "places"_a, "step"_a, "filter"_a,
             nb::sig("def update_id_frames(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], places: "
                     "NDArray[numpy.int32], step: int, filter: bool) -> dict[str, typing.Any]"),
             "Does all of an update of ids in flat arrays but the optimizer.")
        .def("check_id_gradients", &check_id_gradients, "ids"_a, "offsets"_a, "gradients"_a, WithoutGil(),
             nb::sig("def check_id_gradients(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], "
                     "gradients: NDArray[numpy.float32]) -> bool"),
             "Raises NonFiniteError as an update would. Returns whether gradients may have to be skipped.");
}

} // namespace

void bind_frames(nb::class_<Engine>& engine) {
    bind_places(engine);
    bind_id_frames(engine);
    engine
        .def("lookup_frames", &lookup_frames, "bags"_a, "values"_a, "offsets"_a.none(), "weights"_a.none(),
             "batch_size"_a, "step"_a, "oldest_open"_a, "train"_a, "frames"_a, "first_epoch"_a = true,
             nb::sig("def lookup_frames(self, bags: Bags, values: NDArray[numpy.uint64], offsets: "
                     "NDArray[numpy.int64] | None, weights: NDArray[numpy.float32] | None, batch_size: int, step: int, "
                     "oldest_open: int, train: bool, frames: NDArray[numpy.int32], first_epoch: bool = True) -> "
                     "dict[str, typing.Any]"))
        .def("take_inserted", &take_inserted, nb::sig("def take_inserted(self) -> dict[str, NDArray[typing.Any]]"),
             "Returns the rows whose frames have no values yet.")
        .def("update_frames", &update_frames, "tickets"_a, "given"_a, "step"_a, "filter"_a,
             nb::sig("def update_frames(self, tickets: collections.abc.Sequence[Ticket], given: "
                     "collections.abc.Sequence[tuple[bool, collections.abc.Sequence[bool]]], step: int, filter: bool) "
                     "-> dict[str, typing.Any]"))
        .def("order_frames", &order_frames, "ticket"_a,
             nb::sig("def order_frames(self, ticket: Ticket) -> dict[str, typing.Any]"),
             "Returns the runs of an update of a whole batch, ahead of it.")
        .def("update_ordered_frames", &update_ordered_frames, "ticket"_a, "step"_a, "filter"_a,
             nb::sig("def update_ordered_frames(self, ticket: Ticket, step: int, filter: bool) -> "
                     "dict[str, typing.Any] | None"),
             "Returns the frames of an update that was ordered ahead; None: those that were found then.")
        .def(
            "sum_bound",
            [](const Engine& e, const std::vector<Ticket*>& tickets) {
                for (const Ticket* ticket : tickets)
                    if (ticket == nullptr) refuse("a ticket is None");
                return e.sum_bound(tickets);
            },
            "tickets"_a, nb::sig("def sum_bound(self, tickets: collections.abc.Sequence[Ticket]) -> float"),
            "Returns how many times the largest gradient a sum can be at most.")
        .def("settle_frames", &settle_frames, "table"_a, "ids"_a, "skipped"_a, "step"_a, WithoutGil(),
             "Stamps and counts the rows of a table whose gradients were not all skipped.")
        .def("check_gradients", &check_gradients, "tickets"_a, "gradients"_a, "scale"_a, WithoutGil(),
             "Raises NonFiniteError as update_bags would. Returns whether gradients may have to be skipped.")
        .def("initial_rows", &initial_rows, "table"_a, "ids"_a, "values"_a, "state"_a, WithoutGil(),
             nb::sig("def initial_rows(self, table: int, ids: NDArray[numpy.uint64], values: NDArray[typing.Any], "
                     "state: NDArray[numpy.float32]) -> None"))
        .def("read_frames", &read_frames, "table"_a, "ids"_a,
             nb::sig("def read_frames(self, table: int, ids: NDArray[numpy.uint64]) -> NDArray[numpy.int32]"),
             "Returns the frame of each id's row; -1: it has none; below: it is at home.")
        .def("import_frames", &import_frames, "table"_a, "ids"_a, "steps"_a,
             nb::sig("def import_frames(self, table: int, ids: NDArray[numpy.uint64], steps: NDArray[numpy.uint32]) -> "
                     "NDArray[numpy.int32]"),
             "Inserts or replaces rows of a snapshot; returns their frames. If one has no room, inserts none.")
        .def(
            "check_frames", [](Engine& e) { e.directory().check(); },
            "Raises AssertionError unless each frame is free or of one row.");
}

} // namespace satrap
