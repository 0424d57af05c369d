// One embedding table: buckets of rows and what happens to them. Engine calls it once per bucket of a batch; each call
// takes that bucket's lock once, resolves the ids with grouped prefetches, and runs one kernel over the rows.
//
// The life of a row: refused or admitted at a lookup -> inserted with its initial values -> updated, stamped ->
// evicted (bucket full, smallest (stamp, id) first) or expired (stamp < expire_before: gone at once for every reader,
// swept away later). Rows stamped at or after the oldest open step are pinned: never evicted, never expired. A row is
// stamped with the step that used it, but a new one never below expire_before: the row of a very late step lives, too.
// A gradient whose id has no row is counted and touches nothing.
#pragma once

#include <string>

#include "batch.hpp"
#include "bucket.hpp"
#include "kernels.hpp"
#include "undo.hpp"

namespace satrap {

// One bucket's part of a batch; see Batch for the arrays.
struct Visit {
    std::uint32_t bucket; // of the table
    const std::uint64_t* unique;
    std::uint32_t num_unique;
    const std::uint32_t* local;
    std::uint32_t count;
    std::uint32_t* hints;
};

// An entry whose gradient cannot be applied.
struct NonFinite {
    std::uint32_t entry; // of the visit
    std::uint64_t id;
    float value;
    bool of_sum; // each gradient of the id is finite, their sum is not
};

inline constexpr std::uint32_t kLastStep = 0xfffffffeU;    // steps are 1..kLastStep
inline constexpr std::uint32_t kLastVersion = 0xfffffffeU; // versions, too: one after the last is still a number

struct LookupStep {
    bool train;
    std::uint32_t step;
    std::uint32_t oldest_open;
};

// What one thread needs while it works through buckets; kept from call to call.
struct Scratch {
    Buffer<std::uint32_t> dedupe;
    Buffer<std::uint64_t> hashes;
    Buffer<std::uint32_t> slots;
    Buffer<std::uint32_t> misses;
    Buffer<const std::byte*> rows;
    Buffer<std::byte> absent;
    Buffer<float> values;
    Buffer<float> sums;
    Buffer<std::uint8_t> started;
    Buffer<RowStep> steps;
    Buffer<float*> to;         // where the rows of a bucket's entries go
    Buffer<const float*> from; // where their gradients are
    Buffer<std::uint32_t> kept_local;
    Buffer<const float*> kept_from;
    Buffer<Factor> kept_factors;
    Buffer<std::uint64_t> joined_ids; // of several tickets
    Buffer<std::uint32_t> joined_numbers, joined_hints, joined_local;
    Buffer<Factor> joined_factors;
    UndoSlot* undo = nullptr; // of the thread, for the time of an update

    // All that the update of a bucket may ask for, so that no bucket fails when others are updated already.
    void reserve_update(std::size_t entries, std::size_t unique, std::size_t sums, std::size_t dim, bool filter,
                        bool joined) {
        dedupe.reserve(std::bit_ceil(2 * unique + 1));
        hashes.reserve(unique);
        slots.reserve(unique);
        values.reserve(dim);
        this->sums.reserve(sums);
        started.reserve(unique);
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

class Table {
  public:
    Table(TableConfig config, std::uint32_t number, std::uint64_t seed, const Kernels& kernels, Arena& arena);

    const TableConfig& config() const { return config_; }
    Bucket& bucket(std::uint32_t b) { return buckets_[b]; }
    TableLedger& ledger() { return *ledger_; }
    double lr() const { return std::bit_cast<double>(ledger_->lr_bits.load()); }
    void set_lr(double lr) { ledger_->lr_bits.store(std::bit_cast<std::uint64_t>(lr)); }
    std::uint32_t hash_bucket(std::uint64_t id) const { return bucket_of(mix64(id), config_.bucket_bits()); }
    std::uint64_t row_share(std::uint32_t b) const {
        return config_.bounded() ? config_.share(config_.capacity, b) : 0;
    }
    std::uint64_t window_share(std::uint32_t b) const {
        return std::max<std::uint64_t>(1, config_.share(config_.window, b));
    }

    // Before the buckets of a training lookup: moves the line that rows expire behind.
    void open_step(const LookupStep& at);

    // The row of entry e of the visit goes to to[e].
    void lookup(const Visit& visit, const LookupStep& at, float* const* to, Scratch& scratch);
    // `filter`: some gradient or sum may be not finite; it is left out and counted.
    void update(const Visit& visit, Gradients gradients, const StepScalars& scalars, bool hinted, bool filter,
                Scratch& scratch);
    std::vector<NonFinite> find_nonfinite(const Visit& visit, const Gradients& gradients, Scratch& scratch) const;
    // `where` says where the gradient was given: "at position 3".
    [[noreturn]] void refuse_nonfinite(const NonFinite& first, const std::string& where) const;
    StepScalars step_scalars(std::uint32_t step, double lr) const { return StepScalars::of(config_, key_, step, lr); }

    // One row as floats; false and nothing written if the id has none.
    bool read(std::uint64_t id, float* values, float* state);
    void check();
    std::uint32_t expire_before() const { return ledger_->expire_before.load(std::memory_order_relaxed); }

  private:
    void locate(Bucket& bucket, const Visit& visit, bool hinted, Scratch& scratch);
    void touch_hits(Bucket& bucket, const Visit& visit, std::uint32_t step, std::uint32_t version,
                    std::uint32_t* slots);
    void insert_misses(Bucket& bucket, const Visit& visit, const LookupStep& at, std::uint32_t version,
                       Scratch& scratch);
    bool admit(Bucket& bucket, std::uint64_t id, std::uint64_t hash, std::uint32_t step);
    void make_room(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::uint32_t version, std::size_t wanted);
    [[noreturn]] void fail_full(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::size_t wanted) const;
    void point_rows(Bucket& bucket, const Visit& visit, Scratch& scratch);
    bool finite(const float* values, std::size_t count) const { return kernels_->largest(values, count) < 0x7f800000U; }
    const float* applied(const Gradients& gradients, std::uint32_t e, float* room) const;
    std::size_t filter_nonfinite(const Visit& visit, const Gradients& gradients, Scratch& scratch) const;
    void apply(Bucket& bucket, std::uint32_t b, const StepScalars& scalars, std::size_t count, Scratch& scratch);
    void start_sums(const Visit& visit, Scratch& scratch) const;
    void drop_overflowed(const Visit& visit, std::size_t& count, Scratch& scratch) const;

    TableConfig config_;
    std::uint64_t key_;
    std::uint32_t number_;
    const Kernels* kernels_;
    Arena* arena_;
    TableLedger* ledger_;
    InitialScalars initial_;
    std::unique_ptr<Bucket[]> buckets_;
};

} // namespace satrap
