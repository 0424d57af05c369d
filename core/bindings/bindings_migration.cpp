// The Python binding of migration between engines: the buckets' owners, and their data besides rows and sightings.
// Buckets are numbered over all tables, one after the other.
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"

namespace satrap {

namespace {

// Returns a copy, so that the checked values are the ones used.
std::vector<std::uint32_t> checked_buckets(const Engine& engine, const Words& buckets) {
    std::vector<std::uint32_t> copy(buckets.data(), buckets.data() + buckets.size());
    for (std::uint32_t b : copy)
        if (b >= engine.map().total())
            refuse("bucket " + std::to_string(b) + " of " + std::to_string(engine.map().total()));
    return copy;
}

void set_owners(Engine& engine, const Words& owners, std::uint32_t self) {
    require_size("owners", owners.size(), engine.map().total());
    engine.ownership().set({owners.data(), owners.size()}, self);
}

nb::tuple export_windows(Engine& engine, const Words& buckets) {
    std::vector<std::uint32_t> trainers;
    const std::vector<std::uint64_t> words =
        engine.ownership().export_windows(checked_buckets(engine, buckets), trainers);
    return nb::make_tuple(std::move(trainers), as_array(engine, words));
}

void import_windows(Engine& engine, const Words& buckets, const std::vector<std::uint32_t>& trainers,
                    const Ids& words) {
    require_size("words", words.size(), trainers.size() * buckets.size());
    for (std::uint32_t trainer : trainers)
        if (trainer >= kMostTrainers) refuse("trainer=" + std::to_string(trainer));
    engine.ownership().import_windows(checked_buckets(engine, buckets), trainers, {words.data(), words.size()});
}

void import_counters(Engine& engine, const Words& buckets, const Ids& counters) {
    require_size("counters", counters.size(), buckets.size() * Counters::kCount);
    engine.ownership().import_counters(checked_buckets(engine, buckets), {counters.data(), counters.size()});
}

} // namespace

void bind_migration(nb::class_<Engine>& engine) {
    engine
        .def("set_owners", &set_owners, "owners"_a, "number"_a,
             "Sets the owner of every bucket; this engine is server `number`. Lookups and updates of other servers' "
             "buckets are "
             "refused then.")
        .def(
            "freeze",
            [](Engine& e, const Words& buckets, bool frozen) {
                e.ownership().freeze(checked_buckets(e, buckets), frozen);
            },
            "buckets"_a, "frozen"_a, "Sets whether calls that would change these are refused.")
        .def("export_windows", &export_windows, "buckets"_a,
             nb::sig("def export_windows(self, buckets: NDArray[numpy.uint32]) -> tuple[list[int], "
                     "NDArray[numpy.uint64]]"),
             "Returns the trainers, and each one's windows of the buckets.")
        .def("import_windows", &import_windows, "buckets"_a, "trainers"_a, "words"_a)
        .def(
            "export_counters",
            [](Engine& e, const Words& buckets) {
                return as_array(e, e.ownership().export_counters(checked_buckets(e, buckets)));
            },
            "buckets"_a)
        .def("import_counters", &import_counters, "buckets"_a, "counters"_a)
        .def(
            "hand_over",
            [](Engine& e, const Words& buckets) { e.ownership().steps().hand_over(checked_buckets(e, buckets)); },
            "buckets"_a, "Called before they leave: records what is finished here at each. No update may run.")
        .def(
            "take_over",
            [](Engine& e, const Words& buckets, bool first) {
                e.ownership().steps().take_over(checked_buckets(e, buckets), first);
            },
            "buckets"_a, "first"_a, "Called after they arrived: adopts what is finished at each. No update may run.")
        .def(
            "forget", [](Engine& e, const Words& buckets) { e.ownership().forget(checked_buckets(e, buckets)); },
            "buckets"_a, WithoutGil(), "Empties the buckets.")
        .def(
            "reach_step", [](Engine& e, std::uint32_t step) { e.reach_step(step); }, "step"_a,
            "Raises the latest step to at least this one.")
        .def(
            "reach_table",
            [](Engine& e, std::size_t t, std::uint32_t version, std::uint32_t expire_before) {
                e.table(checked_table(e, t)).reach(version, expire_before);
            },
            "table"_a, "version"_a, "expire_before"_a,
            "Raises the table's version and expire_before to at least these.")
        .def(
            "note",
            [](Engine& e) {
                const std::string note = e.arena().note();
                return nb::bytes(note.data(), note.size());
            },
            "The last note of set_note, maybe by an earlier process; empty before the first.")
        .def(
            "set_note", [](Engine& e, const nb::bytes& note) { e.arena().set_note({note.c_str(), note.size()}); },
            "note"_a,
            "Stores a note that lives as long as the rows; replaced as a whole, even if the process is killed.");
}

} // namespace satrap
