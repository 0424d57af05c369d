// Finds rows on a device, and moves them between its frames and home; see device_directory.hpp.
#include <numeric>

#include "engine/device_directory.hpp"

namespace satrap {

// What a lookup finds before it moves rows.
struct DeviceDirectory::FoundPlaces {
    struct AtHome {
        std::uint64_t id;
        std::uint32_t row;    // its slot in its bucket
        std::size_t at;       // its index in `places`
        std::size_t inserted; // its index in `inserted`, or kOld
        std::uint32_t table;
        bool is_new() const { return inserted != kOld; }
    };
    static constexpr std::size_t kOld = ~std::size_t{0};

    std::vector<std::uint32_t> places; // [entries]: that of unique id i of bucket b is places[begin[b] + i]
    std::mutex mutex;
    std::vector<InsertedRow> inserted;
    std::vector<std::vector<AtHome>> at_home; // by pool: the rows that need a frame
};

RowPlaces* DeviceDirectory::add_table(const TableConfig& config) {
    if (!config.frame_pool) return nullptr;
    while (*config.frame_pool >= pools_.size()) pools_.push_back(std::make_unique<RowPlaces>());
    return pools_[*config.frame_pool].get();
}

void DeviceDirectory::set_device_frames(std::size_t p, std::uint32_t frames) {
    RowPlaces& places = pool(p);
    if (places.device.used() != 0 || places.home.used() != 0)
        throw InputError("frame pool " + std::to_string(p) + " has rows already: limit its frames before the first");
    places.set_device_frames(std::min(frames, kMostFrames));
    is_tiered_ = true;
}

void DeviceDirectory::keep_inserted(std::span<const InsertedRow> rows) {
    std::lock_guard lock(inserted_mutex_);
    inserted_.insert(inserted_.end(), rows.begin(), rows.end());
}

std::vector<InsertedRow> DeviceDirectory::take_inserted() {
    std::lock_guard lock(inserted_mutex_);
    return std::exchange(inserted_, {});
}

std::vector<Move> DeviceDirectory::take_moves() {
    std::lock_guard lock(inserted_mutex_);
    return std::exchange(moves_, {});
}

// Writes the frame of each id. An id without one reads what is added to `absent`, or zeros.
void DeviceDirectory::find(Batch& batch, const LookupStep& at, std::int32_t* frames, std::vector<AbsentRow>& absent) {
    const auto places_lock = lock();
    if (places_lock.owns_lock() && at.train) return find_tiered(batch, at, frames, absent);
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    tables_.open_step(at);
    scheduler_.for_each_occupied(tables_.map(), lease, batch, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        batch.deduplicate(b, scratch.dedupe);
        const BucketVisit visit = visit_of(batch, tables_.map().first[t], b);
        std::uint32_t* unique = scratch.frames.reserve(visit.num_unique);
        std::vector<InsertedRow> inserted;
        try {
            tables_[t].lookup_places(visit, at, unique, inserted, scratch);
        } catch (...) {
            keep_inserted(inserted);
            throw;
        }
        keep_inserted(inserted);
        write(batch, t, b, unique, frames, absent);
    });
    batch.hinted = true;
}

// Writes the frames of a bucket's entries. unique: the places of its unique ids; on return their frames, in the form
// that find() has.
void DeviceDirectory::write(const Batch& batch, std::size_t t, std::uint32_t b, std::uint32_t* unique,
                            std::int32_t* frames, std::vector<AbsentRow>& absent) {
    const std::uint32_t first = batch.begin[b];
    const bool zeros = tables_[t].config().absent == Absent::zeros;
    for (std::uint32_t i = 0; i < batch.num_unique[b]; ++i) {
        if (is_frame(unique[i]) || (unique[i] == kNoFrame && zeros)) continue;
        std::lock_guard lock(absent_mutex_);
        absent.push_back({batch.unique[first + i], static_cast<std::uint32_t>(t), unique[i]});
        unique[i] = kNoFrame - static_cast<std::uint32_t>(absent.size()); // -2 reads absent[0], and so on
    }
    for (std::uint32_t e = first; e < batch.begin[b + 1]; ++e)
        frames[batch.indexes[e]] = static_cast<std::int32_t>(unique[batch.local[e]]);
}

void DeviceDirectory::find_tiered(Batch& batch, const LookupStep& at, std::int32_t* frames,
                                  std::vector<AbsentRow>& absent) {
    SATRAP_ASSERT(places_mutex_.is_held());
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    scheduler_.deduplicate(tables_.map(), lease, batch);
    const std::vector<std::uint64_t> rows = require_frames(batch);
    require_room(batch, at, rows, lease);
    tables_.open_step(at);
    open_lookups_.emplace_back(at.step, rows);
    FoundPlaces lookup;
    lookup.places.resize(batch.size());
    lookup.at_home.resize(pools_.size());
    try {
        find_places(batch, at, lookup, lease);
        bring_rows(lookup, at);
    } catch (...) {
        keep_inserted(lookup.inserted);
        throw;
    }
    keep_inserted(lookup.inserted);
    scheduler_.for_each_occupied(tables_.map(), lease, batch, [&](std::size_t t, std::uint32_t b, Scratch&) {
        write(batch, t, b, lookup.places.data() + batch.begin[b], frames, absent);
    });
    batch.hinted = true;
}

// Refuses a batch that has more rows than frames, before anything is changed. Returns how many rows each pool has of
// the batch, without ids that may be refused.
std::vector<std::uint64_t> DeviceDirectory::require_frames(const Batch& batch) {
    std::vector<std::uint64_t> rows(pools_.size());
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        const TableConfig& config = tables_[t].config();
        const std::uint64_t limit = pool_of(tables_[t]).device.limit();
        if (config.admission != AdmissionKind::always || limit == 0) continue;
        const std::uint64_t here =
            std::accumulate(batch.num_unique.begin() + tables_.map().first[t],
                            batch.num_unique.begin() + tables_.map().first[t + 1], std::uint64_t{0});
        std::uint64_t& of_pool = rows[*config.frame_pool];
        of_pool += here;
        if (of_pool <= limit) continue;
        const std::size_t bytes = config.device_bytes();
        throw CapacityError("table '" + config.name + "': the batch has " + std::to_string(here) + " unique ids" +
                            (of_pool != here
                                 ? ", and with the tables before it that share its memory " + std::to_string(of_pool)
                                 : "") +
                            "; expected at most " + std::to_string(limit) + ", the rows in " +
                            std::to_string(limit * bytes) + " bytes of the device: give the tables at least " +
                            std::to_string(of_pool * bytes) + " bytes of device_memory, or use a smaller batch");
    }
    return rows;
}

// Refuses a batch whose rows do not fit beside those of open steps, before anything is changed. A sum over the lookups
// of these steps decides most cases; if it is too large, the frames are counted, which are fewer than that.
void DeviceDirectory::require_room(Batch& batch, const LookupStep& at, const std::vector<std::uint64_t>& rows,
                                   BucketScheduler::ScratchLease& lease) {
    SATRAP_ASSERT(places_mutex_.is_held() && rows.size() == pools_.size());
    const std::uint32_t before = std::min(at.oldest_open, at.step);
    std::erase_if(open_lookups_, [&](const auto& lookup) { return lookup.first < before; });
    for (std::size_t p = 0; p < pools_.size(); ++p) {
        const std::uint64_t limit = pools_[p]->device.limit();
        if (!pools_[p]->is_tiered() || rows[p] == 0) continue;
        std::uint64_t most = rows[p];
        for (const auto& lookup : open_lookups_) most += lookup.second[p];
        if (most <= limit) continue;
        std::atomic<std::uint64_t> shared{0}; // rows of the batch that open steps use, too
        scheduler_.for_each_occupied(tables_.map(), lease, batch, [&](std::size_t t, std::uint32_t b, Scratch&) {
            if (*tables_[t].config().frame_pool == p && tables_[t].config().admission == AdmissionKind::always)
                shared += tables_[t].count_in_frames(visit_of(batch, tables_.map().first[t], b), before);
        });
        const std::uint64_t others = pools_[p]->order().used_since(before) - shared;
        if (rows[p] + others <= limit) continue;
        std::size_t first = 0;
        while (*tables_[first].config().frame_pool != p) ++first;
        const TableConfig& config = tables_[first].config();
        const std::size_t bytes = config.device_bytes();
        throw CapacityError("table '" + config.name + "': at step " + std::to_string(at.step) + " the batch has " +
                            std::to_string(rows[p]) + " unique ids of the tables that share its " + "memory, and " +
                            std::to_string(others) + " other rows are in use by open steps (" + std::to_string(before) +
                            " and later); expected at most " + std::to_string(limit) + " together, the rows in " +
                            std::to_string(limit * bytes) + " bytes of the device: give the tables at least " +
                            std::to_string((rows[p] + others) * bytes) +
                            " bytes of device_memory, or use a smaller batch or less staleness");
    }
}

void DeviceDirectory::find_places(Batch& batch, const LookupStep& at, FoundPlaces& lookup,
                                  BucketScheduler::ScratchLease& lease) {
    scheduler_.for_each_occupied(tables_.map(), lease, batch, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const BucketVisit visit = visit_of(batch, tables_.map().first[t], b);
        std::uint32_t* places = lookup.places.data() + batch.begin[b];
        std::vector<InsertedRow> inserted;
        try {
            tables_[t].lookup_places(visit, at, places, inserted, scratch);
        } catch (...) {
            std::lock_guard lock(lookup.mutex);
            lookup.inserted.insert(lookup.inserted.end(), inserted.begin(), inserted.end());
            throw;
        }
        std::lock_guard lock(lookup.mutex);
        const std::size_t first = lookup.inserted.size();
        lookup.inserted.insert(lookup.inserted.end(), inserted.begin(), inserted.end());
        const bool stays = pool_of(tables_[t]).device.limit() == 0;
        for (std::uint32_t i = 0, k = 0; i < visit.num_unique; ++i) {
            const bool is_new = k < inserted.size() && inserted[k].id == visit.unique[i];
            if (is_at_home(places[i]) && !stays)
                lookup.at_home[*tables_[t].config().frame_pool].push_back(
                    {visit.unique[i], visit.hints[i], batch.begin[b] + i, is_new ? first + k : FoundPlaces::kOld,
                     static_cast<std::uint32_t>(t)});
            k += is_new;
        }
    });
}

// Gives each row that was found at home a frame: a free one, or one whose row goes home in exchange.
void DeviceDirectory::bring_rows(FoundPlaces& lookup, const LookupStep& at) {
    SATRAP_ASSERT(places_mutex_.is_held());
    constexpr std::size_t kAhead = 8; // moves whose rows are being fetched
    const std::uint32_t before = std::min(at.oldest_open, at.step);
    std::vector<std::vector<std::uint32_t>> free(pools_.size());
    std::vector<std::vector<FrameOrder::Use>> victims(pools_.size());
    std::size_t num_moves = 0;
    try {
        for (std::size_t p = 0; p < pools_.size(); ++p) {
            const std::size_t needed = lookup.at_home[p].size();
            if (needed == 0) continue;
            num_moves += needed;
            std::vector<std::uint32_t> frames(needed);
            frames.resize(pools_[p]->take_frames(frames));
            free[p] = std::move(frames);
            pools_[p]->order().oldest(needed - free[p].size(), before, victims[p]);
            if (const std::size_t missing = needed - free[p].size() - victims[p].size(); missing != 0) {
                const auto first = std::min_element(lookup.at_home[p].begin(), lookup.at_home[p].end(),
                                                    [](const auto& a, const auto& b) { return a.table < b.table; });
                fail_frames(first->table, missing, at, before);
            }
        }
    } catch (...) {
        for (std::size_t p = 0; p < pools_.size(); ++p) {
            pools_[p]->device.give(free[p]);
            if (pools_[p]->is_tiered()) pools_[p]->order().retry();
        }
        throw;
    }
    std::lock_guard lock(inserted_mutex_);
    moves_.reserve(moves_.size() + num_moves); // nothing may throw once a row has another place
    for (std::size_t p = 0; p < pools_.size(); ++p)
        for (std::size_t i = 0; i < lookup.at_home[p].size(); ++i) {
            const FoundPlaces::AtHome& row = lookup.at_home[p][i];
            SATRAP_ASSERT(is_at_home(lookup.places[row.at]));
            const std::uint32_t slot = lookup.places[row.at] & ~kAtHome;
            const bool has_victim = i >= free[p].size();
            if (const std::size_t next = i + kAhead; has_victim && next < lookup.at_home[p].size()) {
                const FrameOrder::Use& later = victims[p][next - free[p].size()];
                tables_[later.table].prefetch_row(later.id, later.slot);
            }
            std::uint32_t frame;
            if (has_victim) {
                const FrameOrder::Use& victim = victims[p][i - free[p].size()];
                frame = victim.frame;
                tables_[victim.table].move_out(victim.id, victim.slot, frame, slot);
            } else {
                frame = free[p][i];
            }
            tables_[row.table].move_in(row.id, row.row, slot, frame, row.is_new());
            if (!has_victim) pools_[p]->home.give({&slot, 1});
            lookup.places[row.at] = frame;
            if (row.is_new()) lookup.inserted[row.inserted].place = frame;
            const std::uint32_t directions = (row.is_new() ? 0 : Move::kIn) | (has_victim ? Move::kOut : 0);
            if (directions != 0) moves_.push_back({static_cast<std::uint32_t>(p), frame, slot, directions});
        }
}

void DeviceDirectory::fail_frames(std::size_t t, std::size_t missing, const LookupStep& at, std::uint32_t before) {
    const TableConfig& config = tables_[t].config();
    const RowPlaces& places = pool_of(tables_[t]);
    const std::size_t limit = places.device.limit(), used = places.order().used_since(before),
                      bytes = config.device_bytes();
    throw CapacityError(
        "table '" + config.name + "': at step " + std::to_string(at.step) + " its memory on the " + "device, " +
        std::to_string(limit * bytes) + " bytes for " + std::to_string(limit) + " rows, has no room for " +
        std::to_string(missing) + " rows of the batch: " + std::to_string(used) +
        " are in use by this and by open steps (" + std::to_string(before) + " and later); expected at least " +
        std::to_string((limit + missing) * bytes) + " bytes of device_memory, a smaller batch or less staleness");
}

namespace {

// Which places of a tier are free or have been found.
class Census {
  public:
    explicit Census(const FramePool& pool, const char* what) : what_(what), taken_(pool.used(), false) {
        for (const std::uint32_t place : pool.free()) taken_[place] = true;
    }
    void count(const std::string& table, std::uint32_t place) {
        if (place >= taken_.size() || taken_[place])
            throw InvariantError("table '" + table + "': " + what_ + " " + std::to_string(place) +
                                 " belongs to two rows, or to none");
        taken_[place] = true;
    }
    void finish() const {
        if (std::find(taken_.begin(), taken_.end(), false) != taken_.end())
            throw InvariantError(std::string("a ") + what_ + " is neither free nor of a row");
    }

  private:
    const char* what_;
    std::vector<bool> taken_;
};

} // namespace

void DeviceDirectory::check() {
    const auto places_lock = lock();
    std::vector<Census> frames, slots;
    for (const auto& places : pools_) {
        frames.emplace_back(places->device, "frame");
        slots.emplace_back(places->home, "slot at home");
        for (const std::uint32_t frame : places->device.free())
            if (places->is_tiered() && places->order().of(frame).stamp != FrameOrder::kFree)
                throw InvariantError("frame " + std::to_string(frame) + " is free and may be a victim");
    }
    for (std::uint32_t t = 0; t < tables_.size() && !pools_.empty(); ++t) {
        const TableConfig& config = tables_[t].config();
        const RowPlaces& places = pool_of(tables_[t]);
        for (std::uint32_t b = 0; b < config.num_buckets; ++b) {
            Bucket& bucket = tables_[t].bucket(b);
            std::lock_guard lock(bucket.mutex);
            std::uint64_t in_frames = 0;
            bucket.rows.for_each([&](std::uint32_t slot, const Head& head) {
                const std::uint32_t place = bucket.place_of(slot);
                if (!is_frame(place)) return slots[*config.frame_pool].count(config.name, place & ~kAtHome);
                ++in_frames;
                frames[*config.frame_pool].count(config.name, place);
                if (!places.is_tiered()) return;
                const FrameOrder::Use use = places.order().of(place);
                if (use.stamp != head.stamp || use.table != t || use.id != bucket.rows.id(slot) || use.slot != slot)
                    throw InvariantError("table '" + config.name + "': frame " + std::to_string(place) +
                                         " is not ordered by the last use of its row");
            });
            if (in_frames != bucket.in_frames)
                throw InvariantError("table '" + config.name + "': the count of rows in frames is wrong");
        }
    }
    for (const Census& census : frames) census.finish();
    for (const Census& census : slots) census.finish();
}

} // namespace satrap
