// Many tables in one memory: the object that bindings.cpp exports to Python. A call passes the ids of all tables at
// once; its cost grows with ids and touched buckets, not with features. Engine joins what it consists of: arena,
// tables, threads and spare scratch; Ownership, which knows the buckets that are served here; DeviceDirectory, which
// knows where rows on a device are. It splits a call over threads by bucket, so results cannot depend on how many there
// are.
//
// The path of a lookup: Batch.group (by bucket) -> per bucket: deduplicate, Table.lookup. An update's: finite check
// over all gradients (so that a refused call changes nothing) -> per bucket: Table.update. Ids come table by table,
// flat, or in bags, which differ in where rows go and where gradients are, and in nothing else.
// Invariants: a ticket's batch is grouped by tables_.map(); all tables, the arena and the applied steps number buckets
//   and tables alike; one thread at a time works on a bucket of a call.
// Locks: none on the hot path but the bucket locks inside Table; ThreadPool serves one call at a time.
// Processes: in a fork every call that works on rows is refused, before it takes any lock; see owned() for its end.
#pragma once

#include <functional>
#include <span>

#include "bags/bag_plan.hpp"
#include "bags/bucket_runs.hpp"
#include "base/atomic_max.hpp"
#include "base/fork_guard.hpp"
#include "engine/device_directory.hpp"
#include "engine/ownership.hpp"
#include "engine/row_export.hpp"
#include "kernels/fp16_codec.hpp"
#include "storage/shared_arena.hpp"

namespace satrap {

// The rows of a bucket range as they were at a cut, and what a save of changes needs besides: the ids that had been
// removed. `alive`: how many rows there were, also those that a save of changes leaves out.
struct CutRows {
    RowColumns columns;
    std::vector<std::uint64_t> removed;
    std::size_t alive = 0;
};

// The figures of one table at a cut.
struct TableCut {
    std::uint32_t version = 0;
    std::uint32_t expire_before = 0;
    double lr = 0.0;
    std::size_t rows = 0; // those that had expired and were not removed yet, too
};

// The size of a table and its counters.
struct TableStats {
    Counters counters;
    std::size_t rows = 0;
    std::size_t sightings = 0;
    std::size_t bytes = 0;
    // For a table on a device: the rows in frames now, and how many rows moved between frames and home.
    std::size_t in_frames = 0, moved_in = 0, moved_out = 0;
};

// A lookup of rows on a device: the ids that were looked up, without what was cut, and those without a frame.
struct FrameLookup {
    std::unique_ptr<Ticket> ticket; // for a training lookup
    std::size_t num_ids = 0;
    std::vector<std::int64_t> offsets; // empty: each bag holds one id
    std::vector<float> weights;        // empty: nothing is weighted
    std::vector<AbsentRow> absent;
};

struct Options {
    std::uint64_t seed = 0;
    unsigned num_threads = 1;
    std::string simd = "auto";
};

class Engine {
  public:
    Engine(std::vector<TableConfig> configs, const Options& options, std::unique_ptr<Arena> arena);
    // Continues where a process died: takes rows from the file's chunks and rolls back armed undo slots.
    static std::unique_ptr<Engine> attach(std::vector<TableConfig> configs, const Options& options,
                                          std::unique_ptr<SharedArena> arena);

    // For owners that a fork may copy. In the creating process the last one destroys the engine. In a fork its threads
    // cannot be joined, and its locks may be held by threads that do not exist there: only the file is closed.
    static std::shared_ptr<Engine> owned(std::unique_ptr<Engine> engine);

    std::uint64_t identity() const { return identity_; }
    std::size_t num_tables() const { return tables_.size(); }
    Table& table(std::size_t t) {
        fork_guard_.require_same_process();
        return tables_[t];
    }
    const Table& table(std::size_t t) const { return tables_[t]; }
    const BucketNumbering& map() const { return tables_.map(); }
    Ownership& ownership() {
        fork_guard_.require_same_process();
        return ownership_;
    }
    const Ownership& ownership() const { return ownership_; }
    DeviceDirectory& directory() {
        fork_guard_.require_same_process();
        return directory_;
    }
    const DeviceDirectory& directory() const { return directory_; }
    const std::shared_ptr<BlockPool>& blocks() {
        fork_guard_.require_same_process();
        return blocks_;
    }
    const Fp16Codec& codec() const { return codec_; }
    const char* simd() const { return kernels_->name; }
    unsigned num_threads() const { return scheduler_.num_threads(); }
    Arena& arena() {
        fork_guard_.require_same_process();
        return *arena_;
    }
    std::uint32_t latest_step() { return arena().latest_step().load(); }
    std::uint32_t next_step();
    void reach_step(std::uint32_t step) { raise_to(arena().latest_step(), step); }
    // Returns where each table's part of a lookup's result begins, in floats, and last where it ends.
    std::vector<std::size_t> float_offsets(std::span<const std::int64_t> offsets) const {
        return codec_.float_offsets(offsets);
    }
    std::size_t out_size(std::span<const std::int64_t> offsets) const { return float_offsets(offsets).back(); }

    // A lookup that trains at step 0 takes the next step once its inputs were checked; oldest_open 0 is the step.
    std::unique_ptr<Ticket> lookup(const std::uint64_t* ids, std::span<const std::int64_t> offsets, LookupStep at,
                                   float* out, bool want_ticket);
    std::unique_ptr<Ticket> prepare(const std::uint64_t* ids, std::span<const std::int64_t> offsets);
    bool owns(const Ticket& ticket) const { return ticket.maker == identity_; }
    // trainer: buckets that have applied this step of it, in this attempt, are skipped.
    void update(Ticket& ticket, const float* gradients, std::uint32_t step, std::span<const double> lrs,
                std::uint32_t trainer = kNoTrainer);
    // Releases the batch of a ticket that will not be updated.
    void drop(Ticket& ticket);

    // Writes pooled rows to the whole block, and sequences, padded with zeros; see bag_plan.hpp.
    std::unique_ptr<Ticket> lookup_bags(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs, LookupStep at,
                                        float* block, float* const* sequences, bool want_ticket);
    // Returns a ticket for bags whose rows other calls have found. The inputs have no padding and nothing to cut.
    std::unique_ptr<Ticket> bag_ticket(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs);
    // Applies one optimizer step to all ids of the tickets: sums an id's gradients ticket after ticket, feature after
    // feature, sample after sample.
    void update_bags(Tickets tickets, std::span<const BagGradients> gradients, float scale, std::uint32_t step,
                     std::span<const double> lrs);

    // The same for rows on a device (engine_frames.cpp), for which the calls above, migration and shared memory are
    // refused; frames: see DeviceDirectory::find.
    FrameLookup lookup_frames(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs, LookupStep at,
                              std::int32_t* frames, bool want_ticket);
    // Does all of an update but the optimizer. `filter`: gradients may have to be skipped; then rows of tables that
    // skip are neither stamped nor counted before settle_frames.
    FrameRuns update_frames(Tickets tickets, std::span<const GivenParts> given, std::uint32_t step,
                            bool filter = false);
    // Finds all of what update_frames would return for a ticket whose ids will all have a gradient, ahead of the
    // update.
    FrameRuns order_frames(Ticket& ticket);
    // The update of such a ticket. Returns frames, and ids if `filter` is set, or nothing: they are those that were
    // found ahead, since the rows still have them and the lookup's stamps. Then no id is visited.
    std::optional<FrameRuns> update_ordered_frames(Ticket& ticket, std::uint32_t step, bool filter = false);
    // Called with the ids that had a gradient to apply, after some were skipped.
    void settle_frames(std::size_t t, std::span<const std::uint64_t> ids, std::uint64_t skipped, std::uint32_t step);
    // A sum of these tickets' gradients is at most this many times the largest gradient times the scale.
    double sum_bound(Tickets tickets) const;
    // Throws NonFiniteError as update_bags would. Returns whether gradients may have to be skipped.
    bool check_gradients(Tickets tickets, std::span<const BagGradients> gradients, float scale);
    // The same for ids in flat arrays, table by table: those that other processes look up and update here. places[i]:
    // where the gradient of id i begins.
    FrameLookup lookup_id_frames(const std::uint64_t* ids, std::span<const std::int64_t> offsets, LookupStep at,
                                 std::int32_t* frames, bool want_ticket = false);
    FrameRuns order_id_frames(Ticket& ticket, const std::int32_t* places);
    FrameRuns update_id_frames(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                               const std::int32_t* places, std::uint32_t step, bool filter);
    // gradients: in the order of the ids. Returns whether some may have to be skipped.
    bool check_id_gradients(const std::uint64_t* ids, std::span<const std::int64_t> offsets, const float* gradients);
    void initial_rows(std::size_t t, std::span<const std::uint64_t> ids, std::byte* values, float* state);

    std::size_t num_rows(std::size_t t) { return stats(t).rows; }
    TableStats stats(std::size_t t);
    // Starts an attempt in which no update counts as applied. No update may run.
    void begin_attempt(std::uint32_t attempt);

    // Exports are in the order of the ids' hashes (order_hash), and so of the buckets.
    // others: include buckets that this engine does not own, which may be migrating to it or from it.
    RowColumns export_rows(std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since,
                           bool others = false);
    RowColumns export_sightings(std::size_t t, std::uint32_t first, std::uint32_t last, bool others = false);
    std::vector<std::uint64_t> export_removed(std::size_t t, std::uint32_t first, std::uint32_t last,
                                              std::uint32_t since);
    std::uint32_t removed_since(std::size_t t);

    // A cut (engine_cut.cpp): begin_cut notes how the tables are now, at one version for each; until end_cut, the
    // exports of the cut return that, once for each bucket, whatever is looked up and updated meanwhile. Without the
    // caller's care that no call runs during begin_cut, each bucket is as it is when begin_cut reaches it. Rows on a
    // device are those of the moment of the export. limit: of bytes of old rows; calls that change rows wait beyond it,
    // and end the cut of all tables if nothing was exported for the time of `patience`.
    std::vector<TableCut> begin_cut(std::span<const std::size_t> tables, std::size_t limit,
                                    std::chrono::nanoseconds patience);
    CutRows export_cut(std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since);
    RowColumns export_cut_sightings(std::size_t t, std::uint32_t first, std::uint32_t last);
    void end_cut(std::size_t t);
    CutFigures cut_figures() { return cut_memory_.figures(); }

    // Returns how many rows each bucket that this engine owns would have with rows of these ids, each given once.
    std::vector<std::uint64_t> rows_with(std::size_t t, std::span<const std::uint64_t> ids);
    void import_rows(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                     const std::byte* values, const float* state);
    // The same for rows on a device: returns their places, whose values the caller writes. If one has no room, nothing
    // is changed.
    std::vector<std::uint32_t> import_frames(std::size_t t, std::span<const std::uint64_t> ids,
                                             const std::uint32_t* steps);
    void import_removed(std::size_t t, std::span<const std::uint64_t> ids);
    void import_sightings(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                          const std::uint32_t* counts, bool clear);
    // Called after the imports: sets the table's version, and raises the engine's step to at least that one.
    void restore(std::size_t t, std::uint32_t version, std::uint32_t latest_step, std::uint32_t expire_before,
                 double lr);

  private:
    // Refuses the call in a fork, and of rows that are on a device.
    void require_rows_here() const {
        fork_guard_.require_same_process();
        tables_.require_rows_here();
    }
    void require_rows_on_device() const {
        fork_guard_.require_same_process();
        tables_.require_rows_on_device();
    }
    // Calls visit(bucket) for the buckets first .. last-1 of a table that this engine owns, or for all of them, each
    // under its lock.
    template <typename Visit>
    void each_bucket(std::size_t t, std::uint32_t first, std::uint32_t last, bool others, Visit visit) {
        Table& table = this->table(t);
        SATRAP_ASSERT(first <= last && last <= table.config().num_buckets);
        for (std::uint32_t b = first; b < last; ++b) {
            if (!others && !ownership_.owns(t, b)) continue;
            std::lock_guard lock(table.bucket(b).mutex);
            visit(table.bucket(b));
        }
    }
    template <typename Visit> void each_bucket(std::size_t t, Visit visit) {
        each_bucket(t, 0, table(t).config().num_buckets, true, visit);
    }
    void export_bucket_cut(Table& table, Bucket& bucket, std::uint32_t since, RowExport& out, CutRows& cut);
    void require_cut(const Table& table) const;
    void wait_for_cut_room();
    // Returns where each ticket's gradients of table t begin.
    using GivenOf = std::function<std::vector<EntryPlaces>(std::size_t t)>;
    FrameRuns take_runs(Claim& claim, Tickets tickets, const GivenOf& given_of, std::uint32_t step, bool filter);
    FrameRuns order(Claim& claim, Ticket& ticket, const GivenOf& given_of);
    std::unique_ptr<FoundRows> begin_found(const LookupStep& at) const;
    bool stands(const FoundRows& rows, std::uint32_t step) const;
    FrameRuns runs_for(Tickets tickets, bool ordered) const;
    void order_bucket(Tickets tickets, std::span<const EntryPlaces> given, std::size_t t, std::uint32_t b,
                      std::uint32_t n, FrameRuns& runs, Scratch& scratch) const;
    void reserve_update(BucketScheduler::ScratchLease& lease, Tickets tickets, bool filter) const;
    std::size_t undo_bytes(Tickets tickets) const;
    void adopt(SharedArena& arena);
    // A lookup of bags whose inputs were checked and whose ids are grouped by bucket.
    struct PlannedBags {
        std::unique_ptr<BagPlan> plan;
        std::unique_ptr<Batch> batch;
    };
    void take_step(LookupStep& at);
    PlannedBags plan_bags(const Bags& bags, const BagInputs& inputs, LookupStep& at, bool with_indexes);
    std::unique_ptr<Ticket> end_lookup(PlannedBags planned, const std::shared_ptr<const Bags>& bags, bool want_ticket);
    std::unique_ptr<Batch> group(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                 bool with_indexes = false);
    std::unique_ptr<Ticket> ticket_for(const std::uint64_t* ids, std::span<const std::int64_t> offsets);
    void deduplicate(Batch& batch);
    // Returns the destinations of bucket b of table t, one for each entry; the array lives in the scratch.
    using Destinations = std::function<float* const*(std::size_t t, std::uint32_t b, Scratch& scratch)>;
    void lookup_buckets(Batch& batch, const LookupStep& at, bool want_ticket, const Destinations& destinations);
    void apply(GradientSource&& source, Tickets tickets, std::uint32_t step, std::span<const double> lrs,
               std::uint32_t trainer);

    ForkGuard fork_guard_;
    std::uint64_t identity_;
    std::shared_ptr<BlockPool> blocks_ = std::make_shared<BlockPool>();
    const Kernels* kernels_;
    std::unique_ptr<Arena> arena_;
    DeviceDirectory directory_; // outlives the tables
    CutMemory cut_memory_;      // outlives the tables, too
    Tables tables_;
    Ownership ownership_;
    static constexpr std::size_t kMostSpare = 16; // number of calls whose memory is kept
    Recycler<Batch> batches_{kMostSpare};
    Recycler<BagPlan> plans_{kMostSpare};
    Recycler<UndoSlot> undo_;
    BucketScheduler scheduler_;
    Fp16Codec codec_;
};

} // namespace satrap
