// Conversions and checks of bags that an engine and a split share: features, the ids of a lookup, the gradients of an
// update.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "base/float_mode.hpp"
#include "bindings/bindings.hpp"

namespace satrap {

// (name, table, pooling, weighted, max_length or 0, whether a sequence keeps its last ids, the id that is padding,
// whether a sequence is jagged)
using NamedFeature =
    std::tuple<std::string, std::size_t, std::string, bool, std::uint32_t, bool, std::optional<std::uint64_t>, bool>;

// dims: of the tables.
inline std::vector<BagFeature> checked_features(const std::vector<std::uint32_t>& dims,
                                                const std::vector<NamedFeature>& named) {
    if (named.empty()) refuse("no feature was given; expected at least one");
    std::vector<BagFeature> features;
    for (const auto& [name, table, pooling, weighted, max_length, keep_last, padding, jagged] : named) {
        const std::string where = "feature '" + name + "': ";
        if (table >= dims.size())
            refuse(where + "table " + std::to_string(table) + " of " + std::to_string(dims.size()));
        if (!features.empty() && table < features.back().table)
            refuse(where + "table " + std::to_string(table) + " comes after table " +
                   std::to_string(features.back().table) + "; expected features in the order of their tables");
        BagFeature feature;
        feature.name = name;
        feature.table = static_cast<std::uint32_t>(table);
        feature.pooling = choose<Pooling>(
            "pooling", pooling,
            {{"sum", Pooling::sum}, {"mean", Pooling::mean}, {"sqrtn", Pooling::sqrtn}, {"none", Pooling::none}});
        feature.weighted = weighted;
        feature.max_length = max_length;
        feature.keep_last = keep_last;
        feature.padding = padding;
        feature.jagged = jagged;
        feature.dim = dims[table];
        const bool fits = feature.is_sequence() ? !weighted && (jagged || max_length != 0) && max_length <= 65536
                                                : max_length == 0 && !jagged;
        if (!fits)
            refuse(where + "pooling='" + pooling + "', max_length=" + std::to_string(max_length) +
                   ", weighted=" + (weighted ? "True" : "False") + ", jagged=" + (jagged ? "True" : "False") +
                   "; 'none' needs a max_length of 1..65536, or of 0 if it is jagged, and no weights, the others "
                   "max_length 0");
        features.push_back(std::move(feature));
    }
    return features;
}

inline std::size_t sequence_size(const Ticket& ticket, std::size_t q) {
    return ticket.sequences[q + 1] - ticket.sequences[q];
}

// The number of floats of each sequence of a ticket.
inline std::vector<std::size_t> sequence_sizes(const Ticket& ticket) {
    std::vector<std::size_t> sizes;
    for (std::size_t q = 0; q + 1 < ticket.sequences.size(); ++q) sizes.push_back(sequence_size(ticket, q));
    return sizes;
}

inline BagInputs checked_inputs(const Bags& bags, const Ids& values, const std::optional<Offsets>& offsets,
                                const std::optional<FloatsIn>& weights, std::size_t batch_size) {
    require_few(values.size());
    if (batch_size >= 0x40000000U) refuse("batch_size=" + std::to_string(batch_size) + ", expected at most 2^30-1");
    const std::size_t num_bags = batch_size * bags.features.size();
    // What is used must be what is checked, here and in the plan, though another thread may write to the caller's
    // array.
    static thread_local Buffer<std::int64_t> copy;
    if (offsets) {
        require_size("offsets", offsets->size(), num_bags + 1);
        std::memcpy(copy.reserve(num_bags + 1), offsets->data(), (num_bags + 1) * sizeof(std::int64_t));
        require_ends(copy[0], copy[num_bags], values.size());
    } else if (values.size() != num_bags) {
        refuse(std::to_string(values.size()) + " ids without offsets; expected " + std::to_string(num_bags) +
               ", one for each of " + std::to_string(bags.features.size()) + " features and " +
               std::to_string(batch_size) + " samples, or offsets");
    }
    if (weights && weights->size() != values.size())
        refuse(std::to_string(weights->size()) + " weights; expected " + std::to_string(values.size()) +
               ", one for each id");
    if (weights && !bags.any_weighted)
        refuse("there are weights and no feature is weighted: declare one, table.bag(..., weighted=True), or leave the "
               "weights out");
    if (!weights && bags.any_weighted) {
        const auto weighted = std::ranges::find_if(bags.features, &BagFeature::weighted);
        refuse("feature '" + weighted->name + "' is weighted and there are no weights");
    }
    return {values.data(), offsets ? copy.data() : nullptr, weights ? weights->data() : nullptr, batch_size, num_bags};
}

// Block and sequences of one ticket, each None if the caller passed no gradient. That of a jagged sequence may be
// [n, k, dim]: k groups of n rows that are interleaved.
using GivenGradients = std::pair<std::optional<FloatsIn>, std::vector<std::optional<FloatsIn>>>;

inline BagGradients checked_gradients(const Ticket& ticket, const GivenGradients& given) {
    const Bags& bags = *ticket.bags;
    BagGradients gradients{nullptr, std::vector<const float*>(bags.sequences.size()),
                           std::vector<std::uint32_t>(bags.sequences.size(), 1)};
    if (given.first) {
        require_size("block gradients", given.first->size(), ticket.num_floats);
        gradients.block = given.first->data();
    }
    require_size("sequence gradients", given.second.size(), bags.sequences.size());
    for (std::size_t q = 0; q < given.second.size(); ++q) {
        if (!given.second[q]) continue;
        require_size("a sequence's gradients", given.second[q]->size(), sequence_size(ticket, q));
        gradients.sequences[q] = given.second[q]->data();
        const BagFeature& feature = bags.features[bags.sequences[q]];
        if (!feature.jagged || given.second[q]->ndim() != 3 || given.second[q]->size() == 0) continue;
        require_size("the last dimension of a sequence's gradients", given.second[q]->shape(2), feature.dim);
        gradients.groups[q] = static_cast<std::uint32_t>(given.second[q]->shape(1));
    }
    return gradients;
}

inline std::vector<BagGradients> checked_gradients_of(const Engine& engine, const std::vector<Ticket*>& tickets,
                                                      const std::vector<GivenGradients>& gradients) {
    if (tickets.empty()) refuse("no ticket was given; expected at least one");
    require_size("gradients", gradients.size(), tickets.size());
    std::vector<BagGradients> checked;
    for (std::size_t k = 0; k < tickets.size(); ++k) {
        if (tickets[k] == nullptr) refuse("a ticket is None");
        const bool ours = tickets[k]->bags != nullptr && engine.owns(*tickets[k]); // the engine refuses others
        checked.push_back(ours ? checked_gradients(*tickets[k], gradients[k]) : BagGradients{nullptr, {}});
    }
    return checked;
}

// The inputs and the step of a lookup of bags.
inline std::pair<BagInputs, LookupStep> checked_lookup(const Engine& engine, const Bags& bags, const Ids& values,
                                                       const std::optional<Offsets>& offsets,
                                                       const std::optional<FloatsIn>& weights, std::size_t batch_size,
                                                       std::uint64_t step, std::uint64_t oldest_open, bool train,
                                                       bool first_epoch) {
    if (bags.engine != engine.identity()) refuse("these bags describe the tables of another engine");
    const BagInputs inputs = checked_inputs(bags, values, offsets, weights, batch_size);
    return {inputs, checked_step(step, oldest_open, train, train, first_epoch)};
}

inline float checked_scale(double given) {
    const FloatMode mode;
    const volatile double scale = given; // volatile: the compiler must not round before or after the mode
    const volatile auto rounded = static_cast<float>(scale);
    const float scale_of_all = rounded;
    if (!(scale_of_all > 0.0f) || !std::isfinite(scale_of_all))
        refuse("scale=" + std::to_string(given) + ", expected a number above 0 that float32 can hold");
    return scale_of_all;
}

inline std::vector<std::uint64_t> truncated(const Bags& bags) {
    std::vector<std::uint64_t> counts;
    for (const std::size_t f : bags.sequences) counts.push_back(bags.truncated[f].load());
    return counts;
}

} // namespace satrap
