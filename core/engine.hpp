// Many tables in one memory: the object that bindings.cpp shows to Python. A call brings the ids of all tables at once;
// its cost grows with ids and touched buckets, not with features. Engine owns arena, tables, threads and spare scratch;
// it splits a call over threads by bucket, so results cannot depend on how many there are.
//
// A lookup's road: Batch.group (by bucket) -> per bucket: deduplicate, Table.lookup. An update's: finite check over all
// gradients (so that a refused call changes nothing) -> per bucket: Table.update.
// Locks: none of its own on the hot path; bucket locks inside Table; ThreadPool serves one call at a time.
#pragma once

#include <exception>
#include <span>

#include "shared_arena.hpp"
#include "table.hpp"

namespace satrap {

// How a batch comes back for its update: its grouping and the slots that the lookup found. Used once.
struct Ticket {
    std::unique_ptr<Batch> batch; // touched only by the one call that set `used`
    std::uint64_t engine;         // which engine made it
    std::size_t size;             // ids
    std::size_t num_unique;
    std::size_t num_floats; // of its rows, and so of its gradients
    std::atomic<bool> used{false};
};

// One table's rows of a bucket range as columns, for files.
struct Columns {
    BlockPool::Block id, step, values, state;
    std::size_t rows = 0;
};

struct Options {
    std::uint64_t seed = 0;
    unsigned num_threads = 1;
    std::string simd = "auto";
};

class Engine {
  public:
    Engine(std::vector<TableConfig> configs, const Options& options, std::unique_ptr<Arena> arena);
    // Continues where a dead process stopped: rows from the file's chunks, armed undo slots undone.
    static std::unique_ptr<Engine> attach(std::vector<TableConfig> configs, const Options& options,
                                          std::unique_ptr<SharedArena> arena);

    std::size_t num_tables() const { return tables_.size(); }
    Table& table(std::size_t t) { return *tables_[t]; }
    BlockPool& blocks() { return *blocks_; }
    std::shared_ptr<BlockPool> shared_blocks() { return blocks_; }
    const char* simd() const { return kernels_->name; }
    unsigned num_threads() const { return pool_.num_threads(); }
    std::uint32_t latest_step() { return arena_->latest_step().load(); }
    std::uint32_t next_step();
    void reach_step(std::uint32_t step);
    std::size_t out_size(std::span<const std::int64_t> offsets) const; // floats of a lookup's result

    std::unique_ptr<Ticket> lookup(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                   const LookupStep& at, float* out, bool want_ticket);
    std::unique_ptr<Ticket> prepare(const std::uint64_t* ids, std::span<const std::int64_t> offsets);
    bool owns(const Ticket& ticket) const { return ticket.engine == identity_; }
    void update(Ticket& ticket, const float* gradients, std::uint32_t step, std::span<const double> lrs);

    std::size_t num_rows(std::size_t t);
    Counters counters(std::size_t t, std::size_t* rows, std::size_t* sightings, std::size_t* bytes);
    std::uint32_t begin_version(std::size_t t) { return ++tables_[t]->ledger().version; }

    Columns export_rows(std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since);
    Columns export_sightings(std::size_t t, std::uint32_t first, std::uint32_t last);
    std::vector<std::uint64_t> export_removed(std::size_t t, std::uint32_t first, std::uint32_t last,
                                              std::uint32_t since);
    std::uint32_t removed_since(std::size_t t);
    void import_rows(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                     const std::byte* values, const float* state);
    void import_removed(std::size_t t, std::span<const std::uint64_t> ids);
    void import_sightings(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                          const std::uint32_t* counts, bool clear);

  private:
    struct Spares {
        Recycler<Scratch> scratch;
        Recycler<Batch> batches;
    };

    template <typename Work> void for_each_bucket(Batch& batch, Work work, UndoSet* undo = nullptr);
    std::unique_ptr<Ticket> make_ticket(std::unique_ptr<Batch> batch) const;
    std::size_t undo_bytes(const Batch& batch) const;
    void adopt(SharedArena& arena);
    std::unique_ptr<Batch> group(const std::uint64_t* ids, std::span<const std::int64_t> offsets);
    bool all_sums_finite(const Batch& batch, const float* gradients);
    void refuse_nonfinite(Batch& batch, const float* gradients);
    Visit visit(Batch& batch, std::size_t t, std::uint32_t b);

    std::uint64_t identity_;
    std::shared_ptr<BlockPool> blocks_ = std::make_shared<BlockPool>();
    const Kernels* kernels_;
    std::unique_ptr<Arena> arena_;
    std::vector<std::unique_ptr<Table>> tables_;
    BucketMap map_;
    Spares spares_;
    UndoSlots undo_;
    ThreadPool pool_;
};

} // namespace satrap
