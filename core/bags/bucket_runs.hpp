// Orders the entries of each bucket by unique id, for updates on a device: a run is the gradients of one id, in order
// of appearance. The device sums them.
#pragma once

#include <cstring>

#include "bags/bag_gradients.hpp"

namespace satrap {

// Which parts of a ticket have a gradient.
struct GivenParts {
    bool block;
    std::vector<bool> sequences;

    // Returns the parts of a ticket whose block and sequences all have a gradient.
    static GivenParts all(const Ticket& ticket) {
        SATRAP_ASSERT(!ticket.sequences.empty());
        return {true, std::vector<bool>(ticket.sequences.size() - 1, true)};
    }
};

inline constexpr std::uint32_t kNoRow = 0xffffffffU; // kNoFrame of a table

// An update of rows on a device. Run r takes the sum of the gradients at places[begin[r]] .. places[end[r] - 1], in
// this order, to the row in frames[r], or in the slot at home that it names; a run without a row or an entry has
// kNoRow. A place counts floats through the given gradients of all tickets.
struct FrameRuns {
    std::vector<std::uint32_t> first_run_of_table;     // [tables + 1]
    std::vector<std::uint32_t> first_run, first_entry; // for each bucket
    std::vector<std::uint32_t> frames, begin, end;     // [runs]
    std::vector<std::uint64_t> keys;                   // [runs] row_key of the id; empty unless values have 16 bits
    std::vector<std::uint32_t> places;                 // [entries]
    std::vector<Factor> factors;                       // [entries]; empty: all are 1
    std::vector<std::uint64_t> ids;                    // [runs]; empty unless gradients may have to be skipped
};

// Where the gradients of a ticket's places are among the floats of all gradients: tickets and their parts that have a
// gradient, one after another.
class GivenPlaces {
  public:
    GivenPlaces(const Ticket& ticket, const GivenParts& given, std::uint64_t begin) : end_(begin) {
        const SequencePlaces& begins = ticket.sequences;
        add(begins[0], given.block);
        for (std::size_t q = 0; q + 1 < begins.size(); ++q) add(begins[q + 1] - begins[q], given.sequences[q]);
    }

    std::uint64_t end() const { return end_; }
    bool has(std::uint32_t place) const { return of(place).given; }
    std::uint32_t at(std::uint32_t place) const { return static_cast<std::uint32_t>(of(place).begin + place); }

  private:
    struct Part {
        std::uint64_t last;  // the place after it
        std::uint64_t begin; // where its gradient begins, less its first place: the sum wraps around
        bool given;
    };

    void add(std::uint64_t floats, bool given) {
        const std::uint64_t first = parts_.empty() ? 0 : parts_.back().last;
        parts_.push_back({first + floats, end_ - first, given});
        if (given) end_ += floats;
    }
    const Part& of(std::uint32_t place) const {
        SATRAP_ASSERT(place < parts_.back().last);
        const Part* part = parts_.data();
        while (place >= part->last) ++part;
        return *part;
    }

    std::vector<Part> parts_;
    std::uint64_t end_;
};

constexpr std::uint64_t kMostPlaces = 0x7fffffffU; // the device counts them in int32

// Throws InputError if the gradients hold too many floats.
inline std::vector<GivenPlaces> given_places(Tickets tickets, std::span<const GivenParts> given) {
    SATRAP_ASSERT(!tickets.empty() && given.size() == tickets.size());
    std::vector<GivenPlaces> places;
    for (std::size_t k = 0; k < tickets.size(); ++k)
        places.emplace_back(*tickets[k], given[k], places.empty() ? 0 : places.back().end());
    if (places.back().end() > kMostPlaces)
        throw InputError("the gradients of one step hold " + std::to_string(places.back().end()) +
                         " floats; at most 2^31-1 fit on a device: make smaller batches");
    return places;
}

// Where the gradient of each entry of a ticket begins in one table: of bags by the parts that have a gradient, of a
// flat batch by a list.
class EntryPlaces {
  public:
    explicit EntryPlaces(const GivenPlaces& given) : given_(&given) {}
    explicit EntryPlaces(const std::int32_t* flat) : flat_(flat) {}

    bool has(std::uint32_t place) const { return given_ == nullptr || given_->has(place); }
    std::uint32_t at(std::uint32_t place) const {
        return given_ == nullptr ? static_cast<std::uint32_t>(flat_[place]) : given_->at(place);
    }

  private:
    const GivenPlaces* given_ = nullptr;
    const std::int32_t* flat_ = nullptr;
};

// The entries of one bucket over all tickets that have a gradient, ordered by unique id: a stable counting sort. Those
// of frozen ids are left out.
class BucketRuns {
  public:
    // The joined ids of the bucket are in the scratch.
    BucketRuns(Tickets tickets, std::span<const EntryPlaces> given, const FrozenIds& frozen, std::uint32_t b,
               std::uint32_t num_unique, Scratch& scratch)
        : tickets_(tickets), given_(given), b_(b), numbers_(scratch.joined_numbers.data()), num_unique_(num_unique) {
        SATRAP_ASSERT(given.size() == tickets.size());
        std::uint8_t* marks = scratch.frozen.reserve(num_unique);
        if (frozen.any() && frozen.mark(scratch.joined_ids.data(), num_unique, marks)) frozen_ = marks;
        begin_ = scratch.run_begin.reserve(num_unique + 1);
        std::memset(begin_, 0, (num_unique + 1) * sizeof(std::uint32_t));
        for_each([&](std::uint32_t number, const Batch&, std::uint32_t, std::uint32_t) { ++begin_[number + 1]; });
        for (std::uint32_t i = 0; i < num_unique; ++i) begin_[i + 1] += begin_[i];
    }

    // Writes all of the bucket's runs but frames and keys, once.
    void write(std::size_t t, FrameRuns& runs) {
        const std::uint32_t run = runs.first_run[b_], entry = runs.first_entry[b_];
        for (std::uint32_t i = 0; i < num_unique_; ++i) {
            runs.begin[run + i] = entry + begin_[i];
            runs.end[run + i] = entry + begin_[i + 1];
        }
        std::uint32_t* places = runs.places.data() + entry;
        Factor* factors = runs.factors.empty() ? nullptr : runs.factors.data() + entry;
        for_each([&](std::uint32_t number, const Batch& batch, std::uint32_t e, std::uint32_t place) {
            const std::uint32_t at = begin_[number]++;
            places[at] = place;
            if (factors != nullptr) factors[at] = batch.bags.scaled[t] != 0 ? batch.bags.factors[e] : Factor{};
        });
    }

  private:
    template <typename Visit> void for_each(Visit visit) const {
        const std::uint32_t* numbers = numbers_;
        for (std::size_t k = 0; k < tickets_.size(); ++k) {
            const Batch& batch = *tickets_[k]->batch;
            for (std::uint32_t e = batch.begin[b_]; e < batch.begin[b_ + 1]; ++e) {
                const std::uint32_t place = batch.positions[e], number = numbers[batch.local[e]];
                if (given_[k].has(place) && (frozen_ == nullptr || frozen_[number] == 0))
                    visit(number, batch, e, given_[k].at(place));
            }
            numbers += batch.num_unique[b_];
        }
    }

    Tickets tickets_;
    std::span<const EntryPlaces> given_;
    const std::uint8_t* frozen_ = nullptr; // by unique id; null: none is
    std::uint32_t b_;
    const std::uint32_t* numbers_;
    std::uint32_t num_unique_;
    std::uint32_t* begin_;
};

// Reserves the runs of each bucket: one for each id of each ticket, those that tickets share too. with_keys: values
// have 16 bits. ordered: only their frames.
inline FrameRuns reserve_runs(const BucketNumbering& map, Tickets tickets, bool with_keys, bool ordered = false) {
    FrameRuns runs;
    bool scaled = false;
    std::uint32_t num_runs = 0, num_entries = 0;
    for (std::size_t t = 0; t < map.num_tables(); ++t) {
        runs.first_run_of_table.push_back(num_runs);
        for (const Ticket* ticket : tickets) scaled |= ticket->bags != nullptr && ticket->batch->bags.scaled[t] != 0;
        for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
            runs.first_run.push_back(num_runs);
            runs.first_entry.push_back(num_entries);
            for (const Ticket* ticket : tickets) {
                num_runs += ticket->batch->num_unique[b];
                num_entries += ticket->batch->begin[b + 1] - ticket->batch->begin[b];
            }
        }
    }
    runs.first_run_of_table.push_back(num_runs);
    runs.frames.assign(num_runs, kNoRow);
    if (ordered) return runs;
    runs.begin.assign(num_runs, 0);
    runs.end.assign(num_runs, 0);
    runs.places.resize(num_entries);
    if (scaled) runs.factors.resize(num_entries);
    if (with_keys) runs.keys.resize(num_runs);
    return runs;
}

} // namespace satrap
