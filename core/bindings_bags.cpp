// What Python sees of bags: their description, and the lookups and updates of satrap.worker.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "named_config.hpp"

namespace {

// (name, table, pooling, weighted, max_length or 0)
using NamedFeature = std::tuple<std::string, std::size_t, std::string, bool, std::uint32_t>;

std::shared_ptr<Bags> make_bags(const Engine& engine, const std::vector<NamedFeature>& named) {
    if (named.empty()) refuse("no feature was given; wanted at least one");
    std::vector<BagFeature> features;
    for (const auto& [name, table, pooling, weighted, max_length] : named) {
        const std::string where = "feature '" + name + "': ";
        if (table >= engine.num_tables())
            refuse(where + "table " + std::to_string(table) + " of " + std::to_string(engine.num_tables()));
        if (!features.empty() && table < features.back().table)
            refuse(where + "table " + std::to_string(table) + " comes after table " +
                   std::to_string(features.back().table) + "; wanted features in the order of their tables");
        BagFeature feature;
        feature.name = name;
        feature.table = static_cast<std::uint32_t>(table);
        feature.pooling = choose<Pooling>(
            "pooling", pooling,
            {{"sum", Pooling::sum}, {"mean", Pooling::mean}, {"sqrtn", Pooling::sqrtn}, {"none", Pooling::none}});
        feature.weighted = weighted;
        feature.max_length = max_length;
        feature.dim = engine.table(table).config().dim;
        if (feature.is_sequence() != (max_length != 0) || max_length > 65536 || (feature.is_sequence() && weighted))
            refuse(where + "pooling='" + pooling + "', max_length=" + std::to_string(max_length) +
                   ", weighted=" + (weighted ? "True" : "False") +
                   "; 'none' wants a max_length of 1..65536 and no weights, the others 0");
        features.push_back(std::move(feature));
    }
    return std::make_shared<Bags>(std::move(features), engine.num_tables(), engine.identity());
}

void require_own(const Engine& engine, const Bags& bags) {
    if (bags.engine != engine.identity()) refuse("these bags describe the tables of another engine");
}

std::size_t sequence_size(const Bags& bags, std::size_t q, std::size_t batch_size) {
    const BagFeature& feature = bags.features[bags.sequences[q]];
    return batch_size * feature.max_length * feature.dim;
}

BagInputs checked_inputs(const Bags& bags, const Ids& values, const std::optional<Offsets>& offsets,
                         const std::optional<FloatsIn>& weights, std::size_t batch_size) {
    require_few(values.size());
    if (batch_size >= 0x40000000U) refuse("batch_size=" + std::to_string(batch_size) + ", wanted at most 2^30-1");
    const std::size_t num_bags = batch_size * bags.features.size();
    // What is used must be what is checked, here and in the plan, though another thread may write to the caller's
    // array.
    static thread_local Buffer<std::int64_t> copy;
    if (offsets) {
        require_size("offsets", offsets->size(), num_bags + 1);
        std::memcpy(copy.reserve(num_bags + 1), offsets->data(), (num_bags + 1) * sizeof(std::int64_t));
        const std::int64_t first = copy[0], last = copy[num_bags];
        if (first != 0 || last != static_cast<std::int64_t>(values.size()))
            refuse("offsets run from " + std::to_string(first) + " to " + std::to_string(last) +
                   ", wanted 0 to the number of ids, " + std::to_string(values.size()));
    } else {
        require_size("values without offsets", values.size(), num_bags);
    }
    if (weights) require_size("weights", weights->size(), values.size());
    if (weights.has_value() != bags.any_weighted)
        refuse(weights ? "weights came and no feature is weighted" : "a feature is weighted and no weights came");
    return {values.data(), offsets ? copy.data() : nullptr, weights ? weights->data() : nullptr, batch_size, num_bags};
}

std::unique_ptr<Ticket> lookup_bags(Engine& engine, const std::shared_ptr<Bags>& bags, const Ids& values,
                                    const std::optional<Offsets>& offsets, const std::optional<FloatsIn>& weights,
                                    std::size_t batch_size, std::uint64_t step, std::uint64_t oldest_open, bool train,
                                    const FloatsOut& block, const std::vector<FloatsOut>& sequences) {
    require_own(engine, *bags);
    const BagInputs inputs = checked_inputs(*bags, values, offsets, weights, batch_size);
    LookupStep when{train, static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(oldest_open)};
    if (step != 0) when = checked_step(step, oldest_open == 0 ? step : oldest_open, train, train);
    if (oldest_open > kLastStep) require_step("oldest_open", oldest_open);
    require_size("block", block.size(), batch_size * bags->total_dim);
    require_size("sequences", sequences.size(), bags->sequences.size());
    std::vector<float*> memory;
    for (std::size_t q = 0; q < sequences.size(); ++q) {
        require_size("a sequence", sequences[q].size(), sequence_size(*bags, q, batch_size));
        memory.push_back(sequences[q].data());
    }
    float* floats = block.data();
    nb::gil_scoped_release release;
    return engine.lookup_bags(bags, inputs, when, floats, memory.data(), train);
}

// Block and sequences of one ticket, each None if nobody gave a gradient.
using GivenGradients = std::pair<std::optional<FloatsIn>, std::vector<std::optional<FloatsIn>>>;

BagGradients checked_gradients(const Engine& engine, const Ticket& ticket, const GivenGradients& given) {
    if (ticket.bags == nullptr || !engine.owns(ticket)) return {nullptr, {}}; // the engine refuses such a ticket
    const Bags& bags = *ticket.bags;
    BagGradients gradients{nullptr, std::vector<const float*>(bags.sequences.size())};
    if (given.first) {
        require_size("block gradients", given.first->size(), ticket.num_floats);
        gradients.block = given.first->data();
    }
    require_size("sequence gradients", given.second.size(), bags.sequences.size());
    for (std::size_t q = 0; q < given.second.size(); ++q) {
        if (!given.second[q]) continue;
        require_size("a sequence's gradients", given.second[q]->size(), sequence_size(bags, q, ticket.batch_size));
        gradients.sequences[q] = given.second[q]->data();
    }
    return gradients;
}

void update_bags(Engine& engine, const std::vector<Ticket*>& tickets, const std::vector<GivenGradients>& gradients,
                 std::uint64_t step, const std::vector<std::pair<std::size_t, double>>& lrs, double scale) {
    require_step("step", step);
    if (tickets.empty()) refuse("no ticket was given; wanted at least one");
    require_size("gradients", gradients.size(), tickets.size());
    const FloatMode mode;
    const auto scale_of_all = static_cast<float>(scale);
    if (!(scale_of_all > 0.0f) || !std::isfinite(scale_of_all))
        refuse("scale=" + std::to_string(scale) + ", wanted a number above 0 that float32 can hold");
    std::vector<double> of_table;
    for (std::size_t t = 0; t < engine.num_tables(); ++t) of_table.push_back(engine.table(t).lr());
    for (const auto& [t, lr] : lrs) {
        if (t >= engine.num_tables()) refuse("an lr of table " + std::to_string(t));
        require_lr(engine, t, lr);
        of_table[t] = lr;
    }
    std::vector<BagGradients> checked;
    for (std::size_t k = 0; k < tickets.size(); ++k) {
        if (tickets[k] == nullptr) refuse("a ticket is None");
        checked.push_back(checked_gradients(engine, *tickets[k], gradients[k]));
    }
    nb::gil_scoped_release release;
    engine.update_bags(tickets, checked, scale_of_all, static_cast<std::uint32_t>(step), of_table);
}

std::vector<std::uint64_t> truncated(const Bags& bags) {
    std::vector<std::uint64_t> counts;
    for (const std::size_t f : bags.sequences) counts.push_back(bags.truncated[f].load());
    return counts;
}

} // namespace

void bind_bags(nb::module_& m, nb::class_<Engine>& engine) {
    nb::class_<Bags>(m, "Bags", "The features of an engine's tables; satrap.Features is their face.")
        .def(nb::new_(&make_bags), "engine"_a, "features"_a)
        .def_prop_ro("total_dim", [](const Bags& bags) { return bags.total_dim; })
        .def(
            "made", [](const Bags& bags, const Ticket& ticket) { return ticket.bags.get() == &bags; }, "ticket"_a,
            "Whether the ticket is of a lookup of these bags.")
        .def_prop_ro("truncated", &truncated, "Of each sequence: ids beyond its max_length, which were not looked up.");
    engine
        .def("lookup_bags", &lookup_bags, "bags"_a, "values"_a, "offsets"_a.none(), "weights"_a.none(), "batch_size"_a,
             "step"_a, "oldest_open"_a, "train"_a, "block"_a, "sequences"_a)
        .def("update_bags", &update_bags, "tickets"_a, "gradients"_a, "step"_a, "lrs"_a, "scale"_a)
        .def(
            "drop", [](Engine& e, Ticket& ticket) { e.drop(ticket); }, "ticket"_a,
            "Gives up a ticket that will not be updated.");
}
