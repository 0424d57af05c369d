// A ticket brings a batch back for its update: its grouping and the slots that the lookup found. It is used once, by
// the call that claims it: a Claim marks all tickets of a call used or none, and reverts that if the call fails.
// Invariants: used = it is claimed or used up; batch = nullptr <=> it is used up; size = batch->size() before.
#pragma once

#include <memory>
#include <span>

#include "ids/id_batch.hpp"

namespace satrap {

// Returns a number for an object that issues tickets. It only tells a foreign ticket from its own.
inline std::uint64_t next_identity() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

// What a training lookup of rows on a device found, for an update that is ordered ahead (Engine::order_frames).
struct FoundRows {
    std::uint32_t step;                   // the lookup's, with which it has stamped the rows
    std::vector<std::uint32_t> versions;  // the tables', before the lookup
    std::vector<std::uint64_t> updated{}; // runs with a gradient, by table; empty: they are not ordered
    bool all_found = false;               // each of these runs has a row
};

struct Ticket {
    std::unique_ptr<Batch> batch;     // touched only by the one call that set `used`
    std::uint64_t maker;              // the identity of the engine or split that issued it
    std::size_t size;                 // ids
    std::size_t num_floats;           // in its rows, and so in its gradients; for bags: in the block
    std::shared_ptr<const Bags> bags; // nullptr: of a flat lookup
    std::size_t batch_size;           // for bags
    SequencePlaces sequences;         // for bags
    std::size_t table;                // the table of all ids; the number of tables if there are several
    std::atomic<bool> used{false};
    std::unique_ptr<FoundRows> looked_up{}; // nullptr: of another lookup
};

using Tickets = std::span<Ticket* const>;

inline bool occupied(const Batch& batch, std::uint32_t b) {
    SATRAP_ASSERT(b + std::size_t{1} < batch.begin.size());
    return batch.begin[b] != batch.begin[b + 1];
}

inline bool occupied(Tickets tickets, std::uint32_t b) {
    for (const Ticket* ticket : tickets)
        if (occupied(*ticket->batch, b)) return true;
    return false;
}

inline std::size_t size_of(Tickets tickets) {
    std::size_t size = 0;
    for (const Ticket* ticket : tickets) size += ticket->size;
    return size;
}

// The ticket of a lookup, after its batch was grouped and its ids made unique.
inline Ticket ticket_of(std::unique_ptr<Batch> batch, std::uint64_t maker, std::size_t num_floats,
                        std::shared_ptr<const Bags> bags = nullptr, std::size_t batch_size = 0,
                        SequencePlaces sequences = {}) {
    SATRAP_ASSERT(batch != nullptr && (bags != nullptr || batch_size == 0));
    SATRAP_ASSERT(sequences.size() == (bags == nullptr ? 0 : bags->sequences.size() + 1));
    const std::size_t size = batch->size(), num_tables = batch->offsets.size() - 1;
    std::size_t table = 0;
    while (table < num_tables && static_cast<std::size_t>(batch->offsets[table + 1] - batch->offsets[table]) != size)
        ++table;
    return {std::move(batch), maker, size, num_floats, std::move(bags), batch_size, std::move(sequences), table};
}

// A call's claim to its tickets; keep() uses them up.
class Claim {
  public:
    Claim(Tickets tickets, std::uint64_t maker) : tickets_(tickets) {
        for (const Ticket* ticket : tickets) {
            SATRAP_ASSERT(ticket != nullptr);
            if (ticket->maker != maker)
                throw TicketError("this ticket came from another store; pass it to the store that created it");
        }
        for (std::size_t i = 0; i < tickets.size(); ++i) {
            if (!tickets[i]->used.exchange(true)) continue;
            for (std::size_t k = 0; k < i; ++k) tickets[k]->used.store(false);
            throw TicketError(
                "this ticket was used already; a batch is updated once: look it up again for another step");
        }
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    ~Claim() {
        for (Ticket* ticket : tickets_) {
            SATRAP_ASSERT(ticket->used.load() && ticket->batch != nullptr);
            ticket->used.store(false);
        }
    }
    void keep() { tickets_ = {}; }

  private:
    Tickets tickets_;
};

} // namespace satrap
