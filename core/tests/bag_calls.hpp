// Bags driven by vectors, and what they must come to: a twin engine that only ever sees flat ids. The twin's rows are
// pooled here by plain loops, and gradients are taken apart by plain loops into one for each id.
#pragma once

#include <cmath>

#include "calls.hpp"

namespace testing {

using satrap::BagFeature, satrap::BagGradients, satrap::BagInputs, satrap::Bags, satrap::Pooling;

struct BagCall {
    std::size_t samples = 0;
    std::vector<std::vector<Ids>> bags;                   // [features][samples]
    std::vector<std::vector<std::vector<float>>> weights; // like bags
    bool no_offsets = false;

    Ids ids;
    std::vector<std::int64_t> offsets{0};
    std::vector<float> flat_weights;
    void flatten() {
        for (std::size_t f = 0; f < bags.size(); ++f)
            for (std::size_t s = 0; s < samples; ++s) {
                ids.insert(ids.end(), bags[f][s].begin(), bags[f][s].end());
                flat_weights.insert(flat_weights.end(), weights[f][s].begin(), weights[f][s].end());
                offsets.push_back(static_cast<std::int64_t>(ids.size()));
            }
    }
    BagInputs inputs(const Bags& described) const {
        return {ids.data(), no_offsets ? nullptr : offsets.data(),
                described.any_weighted ? flat_weights.data() : nullptr, samples, offsets.size() - 1};
    }
};

// A block and sequences: rows of a lookup, or gradients of an update.
struct Floats {
    std::vector<float> block;
    std::vector<std::vector<float>> sequences;
    bool operator==(const Floats&) const = default;

    Floats() = default;
    Floats(const Bags& described, const BagCall& call, float value);
    BagGradients gradients() const {
        BagGradients pointers{block.data(), {}};
        for (const auto& sequence : sequences) pointers.sequences.push_back(sequence.data());
        return pointers;
    }
};

// Which ids of a bag are looked up.
inline std::vector<std::size_t> kept(const BagFeature& feature, const Ids& bag) {
    std::vector<std::size_t> at;
    for (std::size_t i = 0; i < bag.size(); ++i)
        if (bag[i] != feature.padding) at.push_back(i);
    if (feature.max_length == 0 || at.size() <= feature.max_length) return at;
    if (feature.keep_last) at.erase(at.begin(), at.end() - feature.max_length);
    at.resize(feature.max_length);
    return at;
}

// Where the rows of each sample of a sequence begin, in rows, and where the last ones end.
inline std::vector<std::size_t> rows_begin(const BagFeature& feature, const std::vector<Ids>& bags) {
    std::vector<std::size_t> begin{0};
    for (const Ids& bag : bags)
        begin.push_back(begin.back() + (feature.jagged ? kept(feature, bag).size() : feature.max_length));
    return begin;
}

inline Floats::Floats(const Bags& described, const BagCall& call, float value)
    : block(call.samples * described.total_dim, value) {
    for (const std::size_t f : described.sequences) {
        const BagFeature& feature = described.features[f];
        sequences.emplace_back(rows_begin(feature, call.bags[f]).back() * feature.dim, value);
    }
}

struct LookedBags {
    Floats rows;
    std::unique_ptr<Ticket> ticket;
};

inline LookedBags lookup(Engine& engine, const std::shared_ptr<const Bags>& described, const BagCall& call,
                         const LookupStep& at) {
    LookedBags looked{Floats(*described, call, std::nanf("")), nullptr}; // must be written whole
    std::vector<float*> sequences;
    for (auto& sequence : looked.rows.sequences) sequences.push_back(sequence.data());
    looked.ticket = engine.lookup_bags(described, call.inputs(*described), at, looked.rows.block.data(),
                                       sequences.data(), at.train);
    return looked;
}

inline void update(Engine& engine, const std::vector<Ticket*>& tickets, const std::vector<BagGradients>& gradients,
                   float scale, std::uint32_t step) {
    engine.update_bags(tickets, gradients, scale, step, lrs_of(engine));
}

inline float plain_divisor(const BagFeature& feature, std::size_t length) {
    switch (feature.pooling) {
    case Pooling::mean: return static_cast<float>(length);
    case Pooling::sqrtn: return std::sqrt(static_cast<float>(length));
    default: return 1.0f;
    }
}

// Calls visit(feature, sample, k, i) for every id that is looked up, in order: number k of those that are, i of its
// bag.
template <typename Visitor> void for_each_id(const Bags& described, const BagCall& call, Visitor visit) {
    for (std::size_t f = 0; f < call.bags.size(); ++f)
        for (std::size_t s = 0; s < call.samples; ++s)
            for (std::size_t k = 0; const std::size_t i : kept(described.features[f], call.bags[f][s]))
                visit(f, s, k++, i);
}

inline IdsOfTables ids_of_tables(const Bags& described, const BagCall& call) {
    IdsOfTables ids(described.first.size() - 1);
    for_each_id(described, call, [&](std::size_t f, std::size_t s, std::size_t, std::size_t i) {
        ids[described.features[f].table].push_back(call.bags[f][s][i]);
    });
    return ids;
}

// What the block and the sequences must hold, if `rows` are the flat rows of ids_of_tables().
inline Floats pooled(const Bags& described, const BagCall& call, const std::vector<float>& rows) {
    Floats expected(described, call, 0.0f);
    const float* row = rows.data();
    std::size_t q = 0;
    for (std::size_t f = 0; f < call.bags.size(); ++f) {
        const BagFeature& feature = described.features[f];
        const std::vector<std::size_t> begin = rows_begin(feature, call.bags[f]);
        for (std::size_t s = 0; s < call.samples; ++s) {
            const std::vector<std::size_t> at = kept(feature, call.bags[f][s]);
            for (std::size_t k = 0; k < at.size(); ++k, row += feature.dim)
                for (std::size_t i = 0; i < feature.dim; ++i) {
                    if (feature.is_sequence()) {
                        expected.sequences[q][(begin[s] + k) * feature.dim + i] = row[i];
                        continue;
                    }
                    float& to = expected.block[s * described.total_dim + feature.column + i];
                    if (feature.weighted)
                        to = k == 0 ? call.weights[f][s][at[0]] * row[i]
                                    : std::fma(call.weights[f][s][at[k]], row[i], to);
                    else
                        to = k == 0 ? row[i] : to + row[i];
                    if (k + 1 == at.size()) to = to / plain_divisor(feature, at.size());
                }
        }
        q += feature.is_sequence();
    }
    return expected;
}

// One gradient for each id, table by table, of all calls: what the twin's update takes.
struct TakenApart {
    IdsOfTables ids;
    std::vector<std::vector<float>> gradients; // for each table
    std::vector<float> flat() const {
        std::vector<float> all;
        for (const auto& each : gradients) all.insert(all.end(), each.begin(), each.end());
        return all;
    }
};

inline void take_apart(TakenApart& all, const Bags& described, const BagCall& call, const Floats& given, float scale) {
    all.ids.resize(described.first.size() - 1);
    all.gradients.resize(all.ids.size());
    for_each_id(described, call, [&](std::size_t f, std::size_t s, std::size_t k, std::size_t at) {
        const BagFeature& feature = described.features[f];
        const std::size_t length = kept(feature, call.bags[f][s]).size();
        const float* from = given.block.data() + s * described.total_dim + feature.column;
        for (std::size_t q = 0; q < described.sequences.size(); ++q)
            if (described.sequences[q] == f)
                from = given.sequences[q].data() + (rows_begin(feature, call.bags[f])[s] + k) * feature.dim;
        all.ids[feature.table].push_back(call.bags[f][s][at]);
        for (std::size_t i = 0; i < feature.dim; ++i) {
            float gradient = from[i] * scale;
            if (feature.weighted) gradient = gradient * call.weights[f][s][at];
            all.gradients[feature.table].push_back(gradient / plain_divisor(feature, length));
        }
    });
}

} // namespace testing
