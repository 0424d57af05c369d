// One bucket's part of a batch (BucketVisit), and what a thread needs while it works through buckets (Scratch), kept
// from call to call. A BucketScheduler provides them.
#pragma once

#include <bit>

#include "base/buffers.hpp"
#include "ids/id_batch.hpp"
#include "kernels/kernels.hpp"

namespace satrap {

class UndoSlot;

// See Batch for the arrays.
struct BucketVisit {
    std::uint32_t bucket; // in the table
    const std::uint64_t* unique;
    std::uint32_t num_unique;
    const std::uint32_t* local;
    std::uint32_t count;
    std::uint32_t* hints;
};

// Returns the visit of bucket b of all tables' buckets, in the table whose first bucket is `first`.
inline BucketVisit visit_of(Batch& batch, std::uint32_t first, std::uint32_t b) {
    SATRAP_ASSERT(first <= b && b + std::size_t{1} < batch.begin.size());
    SATRAP_ASSERT(batch.num_unique[b] <= batch.begin[b + 1] - batch.begin[b]);
    const std::uint32_t at = batch.begin[b];
    return {.bucket = b - first,
            .unique = batch.unique.data() + at,
            .num_unique = batch.num_unique[b],
            .local = batch.local.data() + at,
            .count = batch.begin[b + 1] - at,
            .hints = batch.hints.data() + at};
}

struct Scratch {
    Buffer<std::uint32_t> dedupe;
    Buffer<std::uint64_t> hashes;
    Buffer<std::uint32_t> slots;
    Buffer<const std::byte*> rows;
    Buffer<std::byte> absent;
    Buffer<float> values;
    Buffer<float> sums;
    Buffer<std::uint8_t> started;
    Buffer<std::uint8_t> frozen; // by unique id
    Buffer<RowStep> steps;
    Buffer<float*> to;         // where the rows of a bucket's entries go
    Buffer<const float*> from; // where their gradients are
    Buffer<std::uint32_t> kept_local;
    Buffer<const float*> kept_from;
    Buffer<Factor> kept_factors;
    Buffer<std::uint64_t> joined_ids; // from several tickets
    Buffer<std::uint32_t> joined_numbers, joined_hints, joined_local;
    Buffer<Factor> joined_factors;
    Buffer<std::uint32_t> frames; // for the unique ids
    Buffer<std::uint32_t> run_begin;
    UndoSlot* undo = nullptr; // the thread's slot during an update

    // Reserves all memory that the update of a bucket may need, so that none fails after others were updated.
    void reserve_update(std::size_t entries, std::size_t unique, std::size_t sums, std::size_t dim, bool filter,
                        bool joined) {
        dedupe.reserve(std::bit_ceil(2 * unique + 1));
        hashes.reserve(unique);
        slots.reserve(unique);
        values.reserve(dim);
        this->sums.reserve(sums);
        started.reserve(unique);
        frozen.reserve(unique);
        steps.reserve(unique);
        from.reserve(entries);
        if (filter) {
            kept_local.reserve(entries);
            kept_from.reserve(entries);
            kept_factors.reserve(entries);
        }
        if (!joined) return;
        joined_ids.reserve(unique);
        joined_numbers.reserve(unique);
        joined_hints.reserve(unique);
        joined_local.reserve(entries);
        joined_factors.reserve(entries);
    }
};

} // namespace satrap
