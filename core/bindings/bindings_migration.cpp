// The Python binding of migration between engines: the buckets' owners, and their data besides rows and sightings.
// Buckets are numbered over all tables, one after the other.
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"

namespace {

using Words32 = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns a copy, so that the checked values are the ones used.
std::vector<std::uint32_t> checked_buckets(const Engine& engine, const Words32& buckets) {
    std::vector<std::uint32_t> copy(buckets.data(), buckets.data() + buckets.size());
    for (std::uint32_t b : copy)
        if (b >= engine.map().total())
            refuse("bucket " + std::to_string(b) + " of " + std::to_string(engine.map().total()));
    return copy;
}

Array<std::uint64_t> words_of(Engine& engine, const std::vector<std::uint64_t>& words) {
    BlockPool::Block block = engine.blocks()->take(words.size() * 8);
    if (!words.empty()) std::memcpy(block.memory, words.data(), words.size() * 8);
    return as_array<std::uint64_t>(engine.blocks(), block, {words.size()});
}

void set_owners(Engine& engine, const Words32& owners, std::uint32_t self) {
    require_size("owners", owners.size(), engine.map().total());
    engine.set_owners({owners.data(), owners.size()}, self);
}

nb::tuple export_windows(Engine& engine, const Words32& buckets) {
    std::vector<std::uint32_t> trainers;
    const std::vector<std::uint64_t> words = engine.export_windows(checked_buckets(engine, buckets), trainers);
    return nb::make_tuple(std::move(trainers), words_of(engine, words));
}

void import_windows(Engine& engine, const Words32& buckets, const std::vector<std::uint32_t>& trainers,
                    const Ids& words) {
    require_size("words", words.size(), trainers.size() * buckets.size());
    for (std::uint32_t trainer : trainers)
        if (trainer >= kMostTrainers) refuse("trainer=" + std::to_string(trainer));
    engine.import_windows(checked_buckets(engine, buckets), trainers, {words.data(), words.size()});
}

void import_counters(Engine& engine, const Words32& buckets, const Ids& counters) {
    require_size("counters", counters.size(), buckets.size() * Counters::kCount);
    engine.import_counters(checked_buckets(engine, buckets), {counters.data(), counters.size()});
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
            [](Engine& e, const Words32& buckets, bool frozen) { e.freeze(checked_buckets(e, buckets), frozen); },
            "buckets"_a, "frozen"_a, "Sets whether calls that would change these are refused.")
        .def("export_windows", &export_windows, "buckets"_a,
             nb::sig("def export_windows(self, buckets: NDArray[numpy.uint32]) -> tuple[list[int], "
                     "NDArray[numpy.uint64]]"),
             "Returns the trainers, and each one's windows of the buckets.")
        .def("import_windows", &import_windows, "buckets"_a, "trainers"_a, "words"_a)
        .def(
            "export_counters",
            [](Engine& e, const Words32& buckets) {
                return words_of(e, e.export_counters(checked_buckets(e, buckets)));
            },
            "buckets"_a)
        .def("import_counters", &import_counters, "buckets"_a, "counters"_a)
        .def(
            "hand_over", [](Engine& e, const Words32& buckets) { e.hand_over(checked_buckets(e, buckets)); },
            "buckets"_a, "Called before they leave: records what is finished here at each. No update may run.")
        .def(
            "take_over",
            [](Engine& e, const Words32& buckets, bool first) { e.take_over(checked_buckets(e, buckets), first); },
            "buckets"_a, "first"_a, "Called after they arrived: adopts what is finished at each. No update may run.")
        .def(
            "forget",
            [](Engine& e, const Words32& buckets) {
                const std::vector<std::uint32_t> copy = checked_buckets(e, buckets);
                nb::gil_scoped_release release;
                e.forget(copy);
            },
            "buckets"_a, "Empties the buckets.")
        .def(
            "reach_step", [](Engine& e, std::uint32_t step) { e.reach_step(step); }, "step"_a,
            "Raises the latest step to at least this one.")
        .def(
            "reach_table",
            [](Engine& e, std::size_t t, std::uint32_t version, std::uint32_t expire_before) {
                if (t >= e.num_tables()) refuse("table " + std::to_string(t) + " of " + std::to_string(e.num_tables()));
                e.reach_table(t, version, expire_before);
            },
            "table"_a, "version"_a, "expire_before"_a,
            "Raises the table's version and expire_before to at least these.")
        .def(
            "note",
            [](Engine& e) {
                const std::string note = e.note();
                return nb::bytes(note.data(), note.size());
            },
            "The last note of set_note, maybe by an earlier process; empty before the first.")
        .def(
            "set_note", [](Engine& e, const nb::bytes& note) { e.set_note({note.c_str(), note.size()}); }, "note"_a,
            "Stores a note that lives as long as the rows; replaced as a whole, even if the process is killed.");
}
