// A bag holds the ids of one feature in one sample. Bags describes the features and how a bag's rows are combined;
// places tell where in memory a row of a batch goes and where its gradient comes from. BagPlan walks through the ids.
//
// A place counts floats, in a batch of B samples: first the rows of the block [B][total_dim], of pooled features;
// then the sequences, feature after feature, each [B][max_length][dim], or if it is jagged [ids][dim], without padding;
// and during a lookup the loose rows, which are pooled into the block when all have arrived. All places of a batch are
// below 2^32. The sequence places of a batch, [sequences + 1], are where the rows of each begin, and where the last
// end. The gradients of a jagged sequence may be interleaved: of k groups of n rows, memory has [n][k][dim], and places
// count [k][n][dim]. Invariant: the tables of features 0, 1, ... never fall, so a table's ids are those of adjacent
// features.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/assertions.hpp"
#include "base/buffers.hpp"
#include "kernels/kernels.hpp"

namespace satrap {

enum class Pooling : std::uint8_t { sum, mean, sqrtn, none };

struct BagFeature {
    std::string name; // for messages
    std::uint32_t table = 0;
    Pooling pooling = Pooling::sum;
    bool weighted = false;
    std::uint32_t max_length = 0;         // the longest sequence, where nothing is pooled; 0: no limit, if it is jagged
    bool jagged = false;                  // the rows of a sequence follow those of the sample before it
    bool keep_last = false;               // a sequence that is too long keeps its last ids, not its first
    std::uint32_t dim = 0;                // its table's
    std::uint64_t column = 0;             // floats before this feature's in a sample of the block
    std::optional<std::uint64_t> padding; // an id that stands for no id and is left out of its bag

    bool is_sequence() const { return pooling == Pooling::none; }
    // Returns the divisor of a bag's sum. The sum of an empty bag is 0 for any divisor.
    float divisor(std::size_t length) const {
        if (length <= 1) return 1.0f;
        if (pooling == Pooling::mean) return static_cast<float>(length);
        if (pooling == Pooling::sqrtn) return static_cast<float>(std::sqrt(static_cast<double>(length)));
        return 1.0f;
    }
};

// The features of one model, in their order. Created once and read by many lookups at the same time.
struct Bags {
    Bags(std::vector<BagFeature> given, std::size_t num_tables, std::uint64_t of_engine)
        : features(std::move(given)), engine(of_engine), first(num_tables + 1), truncated(features.size()) {
        for (std::size_t f = 0; f < features.size(); ++f) {
            BagFeature& feature = features[f];
            SATRAP_ASSERT(feature.table < num_tables && (f == 0 || features[f - 1].table <= feature.table));
            SATRAP_ASSERT(feature.dim != 0 && (feature.is_sequence() || (feature.max_length == 0 && !feature.jagged)));
            SATRAP_ASSERT(!feature.is_sequence() || feature.jagged || feature.max_length != 0);
            any_weighted |= feature.weighted;
            if (feature.is_sequence()) {
                sequences.push_back(f);
            } else {
                feature.column = total_dim;
                total_dim += feature.dim;
            }
            first[feature.table + 1] = f + 1;
        }
        for (std::size_t t = 0; t < num_tables; ++t) first[t + 1] = std::max(first[t + 1], first[t]);
    }

    Bags(const Bags&) = delete;
    Bags& operator=(const Bags&) = delete;

    std::vector<BagFeature> features;
    std::uint64_t engine;               // identity of the engine whose tables they use
    std::vector<std::size_t> first;     // [tables + 1]: table t has features first[t] .. first[t+1]-1
    std::vector<std::size_t> sequences; // indexes of the sequence features
    std::uint64_t total_dim = 0;        // floats of a sample in the block
    bool any_weighted = false;
    mutable std::vector<std::atomic<std::uint64_t>> truncated; // by feature: ids beyond max_length, not looked up
};

// The data of a batch's entries that only batches of bags have; the arrays are by entry.
struct BagEntries {
    std::vector<std::uint8_t> loose;  // [tables]: has rows to be pooled, so that to[] differs from positions[]
    std::vector<std::uint8_t> scaled; // [tables]: has factors other than 1
    float largest_weight = 1.0f;      // bound of the weights' magnitudes
    Buffer<Factor> factors;           // for scaled tables
    Buffer<std::uint32_t> to;         // for loose tables: the place of the row; positions[] has that of its gradient
};

// The memory behind the places of one table's entries. T is float or const float.
template <typename T> class Places {
  public:
    void add(std::uint64_t begin, std::uint64_t end, T* memory, std::uint32_t groups = 1, std::uint32_t dim = 0) {
        SATRAP_ASSERT(begin <= end && (segments_.empty() || segments_.back().end <= begin));
        SATRAP_ASSERT(groups == 1 || (end - begin) % (std::uint64_t{groups} * dim) == 0);
        if (begin != end)
            segments_.push_back({begin, end, memory, groups, static_cast<std::uint32_t>((end - begin) / groups), dim});
    }

    // Returns nullptr if there is no memory for the place: the caller passed no gradient.
    T* at(std::uint32_t place) const {
        SATRAP_ASSERT(!segments_.empty() && place < segments_.back().end);
        const Segment* segment = segments_.data();
        while (place >= segment->end) ++segment;
        return segment->memory == nullptr ? nullptr : segment->at(place);
    }

    // Whether all entries are in one array, which has memory.
    bool simple() const { return segments_.size() == 1 && segments_[0].memory != nullptr; }

    void resolve(const std::uint32_t* places, std::size_t count, T** out) const {
        SATRAP_ASSERT(std::all_of(places, places + count, [&](std::uint32_t at) { return at < segments_.back().end; }));
        if (simple()) {
            const Segment only = segments_[0];
            for (std::size_t e = 0; e < count; ++e) out[e] = only.at(places[e]);
        } else {
            for (std::size_t e = 0; e < count; ++e) out[e] = at(places[e]);
        }
    }

  private:
    struct Segment {
        std::uint64_t begin, end;
        T* memory;
        std::uint32_t groups, group_floats; // that are interleaved, and the floats of each
        std::uint32_t dim;

        T* at(std::uint32_t place) const {
            const auto offset = static_cast<std::uint32_t>(place - begin);
            if (groups == 1) return memory + offset;
            const std::uint32_t group = offset / group_floats;
            return memory + std::size_t{group} * dim + std::size_t{offset - group * group_floats} * groups;
        }
    };
    std::vector<Segment> segments_;
};

using SequencePlaces = std::vector<std::uint64_t>;

// Returns each table's places in the block and sequences of a batch. Each sequence and the block may be nullptr.
// groups: for each sequence, how many are interleaved; empty: none are.
template <typename T>
std::vector<Places<T>> places_of(const Bags& bags, const SequencePlaces& begins, T* block, T* const* sequences,
                                 std::span<const std::uint32_t> groups = {}) {
    SATRAP_ASSERT(begins.size() == bags.sequences.size() + 1);
    std::vector<Places<T>> places(bags.first.size() - 1);
    for (Places<T>& each : places) each.add(0, begins[0], block);
    for (std::size_t q = 0; q < bags.sequences.size(); ++q) {
        const BagFeature& feature = bags.features[bags.sequences[q]];
        const std::uint32_t interleaved = groups.empty() ? 1 : groups[q];
        places[feature.table].add(begins[q], begins[q + 1], sequences[q], interleaved, feature.dim);
    }
    return places;
}

} // namespace satrap
