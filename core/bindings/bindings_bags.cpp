// The Python binding of bags: their description, and the lookups and updates of satrap.worker.worker.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings_bags.hpp"

namespace satrap {

namespace {

std::shared_ptr<Bags> make_bags(const Engine& engine, const std::vector<NamedFeature>& named) {
    return std::make_shared<Bags>(checked_features(engine.codec().dims(), named), engine.num_tables(),
                                  engine.identity());
}

std::unique_ptr<Ticket> lookup_bags(Engine& engine, const std::shared_ptr<Bags>& bags, const Ids& values,
                                    const std::optional<Offsets>& offsets, const std::optional<FloatsIn>& weights,
                                    std::size_t batch_size, std::uint64_t step, std::uint64_t oldest_open, bool train,
                                    const FloatsOut& block, const std::vector<FloatsOut>& sequences, bool first_epoch) {
    auto [inputs, when] =
        checked_lookup(engine, *bags, values, offsets, weights, batch_size, step, oldest_open, train, first_epoch);
    require_size("block", block.size(), batch_size * bags->total_dim);
    require_size("sequences", sequences.size(), bags->sequences.size());
    std::vector<float*> memory;
    std::vector<std::size_t> room;
    for (const FloatsOut& sequence : sequences) {
        memory.push_back(sequence.data());
        room.push_back(sequence.size());
    }
    inputs.room = room;
    return engine.lookup_bags(bags, inputs, when, block.data(), memory.data(), train);
}

std::unique_ptr<Ticket> bag_ticket(Engine& engine, const std::shared_ptr<Bags>& bags, const Ids& values,
                                   const std::optional<Offsets>& offsets, const std::optional<FloatsIn>& weights,
                                   std::size_t batch_size) {
    const BagInputs inputs =
        checked_lookup(engine, *bags, values, offsets, weights, batch_size, 0, 0, true, true).first;
    nb::gil_scoped_release release;
    return engine.bag_ticket(bags, inputs);
}

void update_bags(Engine& engine, const std::vector<Ticket*>& tickets, const std::vector<GivenGradients>& gradients,
                 std::uint64_t step, const std::vector<std::pair<std::size_t, double>>& lrs, double scale) {
    require_step("step", step);
    const float scale_of_all = checked_scale(scale);
    std::vector<double> of_table;
    for (std::size_t t = 0; t < engine.num_tables(); ++t) of_table.push_back(engine.table(t).lr());
    for (const auto& [t, lr] : lrs) {
        if (t >= engine.num_tables()) refuse("an lr of table " + std::to_string(t));
        require_lr(engine, t, lr);
        of_table[t] = lr;
    }
    const std::vector<BagGradients> checked = checked_gradients_of(engine, tickets, gradients);
    engine.update_bags(tickets, checked, scale_of_all, static_cast<std::uint32_t>(step), of_table);
}

} // namespace

void bind_bags(nb::module_& m, nb::class_<Engine>& engine) {
    nb::class_<Bags>(m, "Bags", "The features of an engine's tables, as satrap.config.features.Features declares them.")
        .def(nb::new_(&make_bags), "engine"_a, "features"_a)
        .def(
            "made", [](const Bags& bags, const Ticket& ticket) { return ticket.bags.get() == &bags; }, "ticket"_a,
            "Returns whether the ticket is from a lookup of these bags.")
        .def_prop_ro("truncated", &truncated,
                     "For each sequence the number of ids beyond its max_length, which were not looked up.");
    engine
        .def("lookup_bags", &lookup_bags, "bags"_a, "values"_a, "offsets"_a.none(), "weights"_a.none(), "batch_size"_a,
             "step"_a, "oldest_open"_a, "train"_a, "block"_a, "sequences"_a, "first_epoch"_a = true, WithoutGil())
        .def("bag_ticket", &bag_ticket, "bags"_a, "values"_a, "offsets"_a.none(), "weights"_a.none(), "batch_size"_a,
             nb::sig("def bag_ticket(self, bags: Bags, values: NDArray[numpy.uint64], offsets: NDArray[numpy.int64] | "
                     "None, weights: NDArray[numpy.float32] | None, batch_size: int) -> Ticket"),
             "Returns a ticket for a batch whose rows other calls have found.")
        .def("update_bags", &update_bags, "tickets"_a, "gradients"_a, "step"_a, "lrs"_a, "scale"_a, WithoutGil())
        .def(
            "drop", [](Engine& e, Ticket& ticket) { e.drop(ticket); }, "ticket"_a,
            "Releases a ticket that will not be updated.");
}

} // namespace satrap
