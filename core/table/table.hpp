// One embedding table: buckets of rows and what happens to them. Engine calls it once per bucket of a batch; each call
// takes that bucket's lock once, resolves the ids with grouped prefetches, and runs one kernel over the rows.
//
// The life of a row: refused or admitted at a lookup -> inserted with its initial values -> updated, stamped ->
// evicted (bucket full, smallest (stamp, id) first) or expired (stamp < expire_before: absent at once for every reader,
// removed later). Rows stamped at or after the oldest open step are pinned: never evicted, never expired. A row is
// stamped with the step that used it, but a new one never below expire_before, so the row of a very late step lives
// too. A gradient whose id has no row is counted and changes nothing.
#pragma once

#include <span>

#include "ids/gradient_sum.hpp"
#include "kernels/kernels.hpp"
#include "table/bucket.hpp"
#include "table/undo_log.hpp"

namespace satrap {

inline constexpr std::uint32_t kLastStep = 0xfffffffeU;    // steps are 1..kLastStep
inline constexpr std::uint32_t kLastVersion = 0xfffffffeU; // so that the version after the last is still a number

struct LookupStep {
    bool train;
    std::uint32_t step;
    std::uint32_t oldest_open;
    bool first_epoch = true; // whether the batch's source is in it
};

// A row without values on the device yet.
struct InsertedRow {
    std::uint64_t id;
    std::uint32_t table;
    std::uint32_t place;
};

class Table {
  public:
    // places: of the rows, if they are on a device.
    Table(TableConfig config, std::uint32_t number, std::uint64_t seed, const Kernels& kernels, Arena& arena,
          RowPlaces* places = nullptr);

    const TableConfig& config() const { return config_; }
    const GradientSum& summation() const { return summation_; }
    Bucket& bucket(std::uint32_t b) {
        SATRAP_ASSERT(b < config_.num_buckets);
        return buckets_[b];
    }
    TableLedger& ledger() { return *ledger_; }
    double lr() const { return std::bit_cast<double>(ledger_->lr_bits.load()); }
    // Starts the next version, at which later changes count as changed.
    std::uint32_t begin_version();
    // Raises the version and expire_before to at least these.
    void reach(std::uint32_t version, std::uint32_t expire_before);
    void set_lr(double lr) { ledger_->lr_bits.store(std::bit_cast<std::uint64_t>(lr)); }
    std::uint32_t bucket_number(std::uint64_t id) const {
        return bucket_of(order_hash(id, config_.is_direct()), config_.bucket_bits());
    }
    std::uint64_t row_share(std::uint32_t b) const {
        return config_.bounded() ? config_.share(config_.capacity, b) : 0;
    }
    std::uint64_t window_share(std::uint32_t b) const {
        return std::max<std::uint64_t>(1, config_.share(config_.window, b));
    }

    // Called before the buckets of a training lookup: advances the latest step, and expire_before.
    void open_step(const LookupStep& at);

    // Copies the row of entry e of the visit to to[e]. Of rows in this memory.
    void lookup(const BucketVisit& visit, const LookupStep& at, float* const* to, Scratch& scratch);
    // `filter`: some gradient or sum may be not finite; it is left out and counted. `mark`: one whose window says that
    // this step was applied is counted and changes nothing.
    void update(const BucketVisit& visit, const Gradients& gradients, const StepScalars& scalars, bool hinted,
                bool filter, const UpdateMark& mark, Scratch& scratch);
    // For rows on a device: writes the place of unique id i to places[i], or kNoFrame if it has no row. Rows that this
    // inserts are added to `inserted` in the order of the ids, also if it throws; their places have no values yet.
    void lookup_places(const BucketVisit& visit, const LookupStep& at, std::uint32_t* places,
                       std::vector<InsertedRow>& inserted, Scratch& scratch);
    // How many of the unique ids have a row in a frame that was used at `since` or later. Changes nothing.
    std::size_t count_in_frames(const BucketVisit& visit, std::uint32_t since);
    // Does all of an update but the optimizer: stamps, marks and counts the rows of the unique ids with `started`,
    // unless these are not settled yet, and writes their places, or kNoFrame for an id without a row or not started.
    void update_places(const BucketVisit& visit, const std::uint8_t* started, std::uint32_t step, bool hinted,
                       bool settled, std::uint32_t* places, Scratch& scratch);
    // Stamps, marks and counts the row of an id that turned out to have a gradient.
    void settle_row(std::uint64_t id, std::uint32_t step);
    // Writes the values that a new row of the id gets, and its state.
    void initial_row(std::uint64_t id, std::byte* row, float* scratch) const {
        kernels_->initialise(initial_, id, row, scratch);
    }
    std::uint64_t row_key_of(std::uint64_t id) const { return row_key(key_, id); }
    StepScalars step_scalars(std::uint32_t step, double lr) const { return StepScalars::of(config_, key_, step, lr); }

    // Throws InputError if the rows are on a device: only the calls of frames know them.
    void require_rows_here() const;
    // Throws InputError unless the table can have rows of these ids.
    void require_ids(std::span<const std::uint64_t> ids) const;
    // Throws CapacityError if the bucket has no room for the row of a snapshot.
    void require_room(const Bucket& bucket, std::uint32_t b, std::uint64_t id) const;
    // The place of the id's row; kNoFrame if it has no row.
    std::uint32_t place_of(std::uint64_t id);
    // Inserts the id's row, or finds it, as that of a snapshot; returns its place.
    std::uint32_t import_place(std::uint64_t id, std::uint32_t step);
    // The same for many ids, each given once. If one has no room, nothing is changed: a row that was inserted would
    // have a place without values.
    std::vector<std::uint32_t> import_places(std::span<const std::uint64_t> ids, const std::uint32_t* steps);
    // Records that a row was moved from its slot at home into a frame, or back; is_new: it had no values at home.
    // `row`: its slot in its bucket.
    void move_in(std::uint64_t id, std::uint32_t row, std::uint32_t slot, std::uint32_t frame, bool is_new);
    void move_out(std::uint64_t id, std::uint32_t row, std::uint32_t frame, std::uint32_t slot);
    SATRAP_ALWAYS_INLINE void prefetch_row(std::uint64_t id, std::uint32_t row) {
        __builtin_prefetch(&buckets_[bucket_number(id)].rows.head(row), 1);
    }

    // Reads one row as floats; returns false and writes nothing if the id has no row.
    bool read(std::uint64_t id, float* values, float* state);
    void check();
    // The version of the cut that has not ended, 0: there is none; the engine sets it.
    std::atomic<std::uint32_t>& cut_version() { return cut_version_; }
    std::uint32_t cut_version() const { return cut_version_.load(); }
    std::uint32_t& cut_expire_before() { return cut_expire_before_; }
    std::uint32_t expire_before() const { return ledger_->expire_before.load(std::memory_order_relaxed); }

  private:
    void locate(Bucket& bucket, const BucketVisit& visit, bool hinted, Scratch& scratch);
    void locate_direct(const Rows& rows, const BucketVisit& visit, std::size_t bytes, bool asks_last,
                       std::uint32_t* slots);
    void touch_hits(Bucket& bucket, const BucketVisit& visit, std::uint32_t step, std::uint32_t line,
                    std::uint32_t version, std::uint32_t* slots);
    void find_rows(Bucket& bucket, const BucketVisit& visit, const LookupStep& at, std::vector<InsertedRow>* inserted,
                   Scratch& scratch);
    void insert_misses(Bucket& bucket, const BucketVisit& visit, const LookupStep& at, std::uint32_t line,
                       std::uint32_t version, std::vector<InsertedRow>* inserted, Scratch& scratch);
    bool is_live(const Bucket& bucket, std::uint32_t slot) const { // false: there is no row, or it has expired
        SATRAP_ASSERT(bucket.mutex.is_held());
        return slot != kNoSlot && bucket.rows.head(slot).stamp >= expire_before();
    }
    bool stamp_updated(Bucket& bucket, std::uint32_t slot, std::uint32_t step);
    std::uint32_t insert_place(Bucket& bucket, std::uint64_t id, std::uint64_t hash) const;
    void order_frame(const Bucket& bucket, std::uint32_t slot) const;
    void require_at(const Bucket& bucket, std::uint32_t row, std::uint64_t id, std::uint32_t place) const;
    bool admit(Bucket& bucket, std::uint64_t id, std::uint64_t hash, const LookupStep& at);
    void make_room(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::uint32_t line, std::uint32_t version,
                   std::size_t needed);
    [[noreturn]] void fail_full(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::size_t needed) const;
    void point_rows(Bucket& bucket, const BucketVisit& visit, Scratch& scratch);
    void apply(Bucket& bucket, std::uint32_t b, const StepScalars& scalars, std::size_t count, const UpdateMark& mark,
               Scratch& scratch);

    TableConfig config_;
    GradientSum summation_;
    std::uint64_t key_;
    std::uint32_t number_;
    const Kernels* kernels_;
    Arena* arena_;
    TableLedger* ledger_;
    InitialScalars initial_;
    std::unique_ptr<Bucket[]> buckets_;
    std::atomic<std::uint32_t> cut_version_{0};
    std::uint32_t cut_expire_before_ = 0;
};

} // namespace satrap
