// Where the rows on a device are: in which frames, and of those that do not fit there, in which slots at home. The core
// is the directory alone: the device copies rows as the recorded moves say, and gives new rows their values.
//
// Nouns: tables whose rows have the same layout share a pool (RowPlaces) of frames and of slots at home. A pool with a
// limit is tiered: a training lookup brings its rows into frames, in exchange for the rows with the smallest (stamp,
// table, id) that no open step uses; nothing else moves a row. A lookup that does not fit beside the rows of open steps
// is refused before anything is changed. Which ids a table admits is known later only: so a lookup finds all its rows,
// chooses the frames for those that are at home, and only then changes a place. If they do not fit, no row has moved.
// Invariants: a frame or slot at home is free, or one row has it; a row at home of a pool is not in a frame of it;
//   frame f of a tiered pool is ordered by the stamp, table, id and slot of the row whose place is f;
//   in_frames of a bucket = its rows whose place is a frame. check() walks them.
// Locks, in this order: lock() if a pool is tiered, so that rows which are moved are removed by no other call; a
// bucket's; inserted_mutex_ or absent_mutex_; those inside pools and orders.
#pragma once

#include <mutex>
#include <span>
#include <vector>

#include "engine/tables.hpp"
#include "ids/bucket_scheduler.hpp"

namespace satrap {

// An id that has no frame: it reads the values of its row at home, or without a row those that it would begin with.
struct AbsentRow {
    std::uint64_t id;
    std::uint32_t table;
    std::uint32_t place; // kNoFrame: it has no row
};

class DeviceDirectory {
  public:
    // Both must outlive it.
    DeviceDirectory(const Tables& tables, BucketScheduler& scheduler) : tables_(tables), scheduler_(scheduler) {}

    // Returns the places of a new table's rows, and creates its pool if it is the first; nullptr: they are not here.
    RowPlaces* add_table(const TableConfig& config);
    std::size_t num_pools() const { return pools_.size(); }
    RowPlaces& pool(std::size_t p) const {
        SATRAP_ASSERT(p < pools_.size());
        return *pools_[p];
    }
    RowPlaces& pool_of(const Table& table) const { return pool(*table.config().frame_pool); }
    // Limits the frames of a pool, before its first row; the other rows are at home. With 0 frames all rows stay there.
    void set_device_frames(std::size_t p, std::uint32_t frames);

    // Finds the rows of a grouped batch: frames[i] is that of id i, without what was cut; -1: it reads zeros; -2 - k:
    // it reads absent[k].
    void find(Batch& batch, const LookupStep& at, std::int32_t* frames, std::vector<AbsentRow>& absent);
    // The rows inserted since the last call, whose places have no values yet. Also of lookups that failed.
    std::vector<InsertedRow> take_inserted();
    // The moves that lookups have recorded since the last call, to be carried out before take_inserted() is.
    std::vector<Move> take_moves();
    // Held by calls that remove, stamp or count rows.
    std::unique_lock<Mutex> lock() { return is_tiered_ ? std::unique_lock(places_mutex_) : std::unique_lock<Mutex>(); }
    // Throws InvariantError unless the invariants hold.
    void check();

  private:
    struct FoundPlaces;
    void write(const Batch& batch, std::size_t t, std::uint32_t b, std::uint32_t* unique, std::int32_t* frames,
               std::vector<AbsentRow>& absent);
    void keep_inserted(std::span<const InsertedRow> rows);
    void find_tiered(Batch& batch, const LookupStep& at, std::int32_t* frames, std::vector<AbsentRow>& absent);
    std::vector<std::uint64_t> require_frames(const Batch& batch);
    void require_room(Batch& batch, const LookupStep& at, const std::vector<std::uint64_t>& rows,
                      BucketScheduler::ScratchLease& lease);
    void find_places(Batch& batch, const LookupStep& at, FoundPlaces& lookup, BucketScheduler::ScratchLease& lease);
    void bring_rows(FoundPlaces& lookup, const LookupStep& at);
    [[noreturn]] void fail_frames(std::size_t t, std::size_t missing, const LookupStep& at, std::uint32_t before);

    const Tables& tables_;
    BucketScheduler& scheduler_;
    std::vector<std::unique_ptr<RowPlaces>> pools_;
    std::mutex inserted_mutex_; // guards the next two
    std::vector<InsertedRow> inserted_;
    std::vector<Move> moves_;
    std::mutex absent_mutex_; // guards the lists that find() fills
    Mutex places_mutex_;
    // Under places_mutex_: of lookups at steps that may be open, the step and how many rows of each pool it has.
    std::vector<std::pair<std::uint32_t, std::vector<std::uint64_t>>> open_lookups_;
    std::atomic<bool> is_tiered_{false};
};

} // namespace satrap
