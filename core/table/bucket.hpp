// One bucket of a table: the unit of locking, capacity, eviction, saving and migration. It holds the rows whose ids
// hash here, the sightings of ids not yet admitted, counters, and the log of removed ids; Table drives it.
//
// Lock: `mutex` guards everything in the bucket. Only one bucket is locked at a time; the arena's lock is taken inside.
// Invariants: rows.size() <= share when the table is bounded; an id has a row or a sighting, never both;
//   no row is stamped before swept_before, which is at most the table's expire_before;
//   every removal at a version >= log_start that could matter to a save of changes is in `removed`;
//   while a cut has not ended, the first cut_removed entries of `removed` are those of before the cut.
#pragma once

#include <array>
#include <vector>

#include "base/mutex.hpp"
#include "base/table_config.hpp"
#include "table/row_places.hpp"
#include "table/rows.hpp"

namespace satrap {

struct Counters {
    std::uint64_t lookups = 0, hits = 0, inserted = 0, refused = 0, evicted = 0, expired = 0;
    std::uint64_t updated = 0, not_applied_absent = 0, skipped = 0, repeated = 0;

    struct Field {
        const char* name; // in Python
        std::uint64_t Counters::* number;
    };
    static constexpr std::size_t kCount = 10;
    static const std::array<Field, kCount> kFields; // in the order in which they are exported

    void add(const Counters& other) {
        for (const Field& field : kFields) this->*field.number += other.*field.number;
    }
};
inline constexpr std::array<Counters::Field, Counters::kCount> Counters::kFields{
    {{"lookups", &Counters::lookups},
     {"hits", &Counters::hits},
     {"inserted", &Counters::inserted},
     {"refused", &Counters::refused},
     {"evicted", &Counters::evicted},
     {"expired", &Counters::expired},
     {"updated", &Counters::updated},
     {"not_applied_absent", &Counters::not_applied_absent},
     {"skipped", &Counters::skipped},
     {"repeated", &Counters::repeated}}};

struct Removed {
    std::uint64_t id;
    std::uint32_t version;
};

struct Bucket {
    Mutex mutex;
    Rows rows;
    Rows sightings;
    Counters counters;
    RowPlaces* places = nullptr; // for rows on a device, whose payload is the word for their place
    std::uint64_t in_frames = 0, moved_in = 0, moved_out = 0; // rows now; rows since the start
    std::vector<Removed> removed;
    std::uint32_t log_start = 2; // the oldest version whose removals are all in the log; 2 is the first ever saved
    std::size_t cut_removed = 0;
    std::uint32_t swept_before = 0; // rows stamped before this step have been removed

    // Every change from here on keeps what the save of this moment needs, until rows and sightings end their cut.
    void begin_cut(CutMemory& memory) {
        SATRAP_ASSERT(mutex.is_held());
        rows.begin_cut(memory);
        sightings.begin_cut(memory);
        cut_removed = removed.size();
    }
    void end_cut() {
        SATRAP_ASSERT(mutex.is_held());
        rows.end_cut();
        sightings.end_cut();
    }

    // Removes a row and, if the table has been saved (version > 1), logs the id for save_changes.
    void remove(std::uint32_t slot, std::uint32_t version) {
        if (version > 1) log_removal(rows.id(slot), version);
        erase(slot);
    }

    // Removes a row without a trace.
    void erase(std::uint32_t slot) {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(rows.live(slot));
        if (places != nullptr) {
            SATRAP_ASSERT(!is_frame(place_of(slot)) || in_frames != 0);
            in_frames -= is_frame(place_of(slot));
            places->note_left(rows.head(slot).stamp);
            places->give(place_of(slot));
        }
        rows.erase(slot);
    }

    std::uint32_t place_of(std::uint32_t slot) const {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(places != nullptr && rows.row_bytes() == sizeof(std::uint32_t));
        std::uint32_t place;
        std::memcpy(&place, rows.row(slot), sizeof(place));
        return place;
    }
    void set_place(std::uint32_t slot, std::uint32_t place) {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(places != nullptr && place != kNoFrame);
        std::memcpy(rows.row(slot), &place, sizeof(place));
    }

    // Orders the row's frame by its new stamp.
    void note_use(std::uint32_t slot) {
        SATRAP_ASSERT(rows.live(slot));
        if (places->is_tiered() && is_frame(place_of(slot)))
            places->order().touch(place_of(slot), rows.head(slot).stamp);
    }

    void log_removal(std::uint64_t id, std::uint32_t version) {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(version > 1 && (!rows.in_cut() || cut_removed <= removed.size()));
        const std::size_t most = std::max<std::size_t>(4096, rows.size()); // with more, a full save is smaller
        if (removed.size() >= most && !rows.in_cut()) {
            std::size_t half = removed.size() / 2;
            log_start = removed[half - 1].version + 1;
            removed.erase(removed.begin(), removed.begin() + static_cast<std::ptrdiff_t>(half));
        }
        removed.push_back({id, version});
    }

    void sweep(std::uint32_t expire_before, std::uint32_t version) {
        SATRAP_ASSERT(mutex.is_held());
        if (expire_before <= swept_before) return;
        swept_before = expire_before;
        rows.for_each([&](std::uint32_t slot, const Head& head) {
            if (head.stamp >= expire_before) return;
            remove(slot, version);
            ++counters.expired;
        });
    }

    // Counts that an id without a row was seen at `step`; returns whether it was seen `min_count` times. The sighting
    // stays until the row exists (forget), so that a lookup that fails in between can be retried.
    bool sight(std::uint64_t id, std::uint64_t hash, std::uint32_t step, std::uint32_t min_count) {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(rows.find(id, hash) == kNoSlot);
        if (min_count <= 1) return true;
        std::uint32_t slot = sightings.find(id, hash);
        if (slot == kNoSlot) {
            add_sighting(id, hash, step, 1);
            return false;
        }
        sightings.keep(slot);
        Head& seen = sightings.head(slot);
        if (step > seen.stamp && seen.changed < min_count)
            ++seen.changed; // else it is a retry or a late step, which counts once
        sightings.touch(slot, step);
        return seen.changed >= min_count;
    }

    void add_sighting(std::uint64_t id, std::uint64_t hash, std::uint32_t step, std::uint32_t count) {
        SATRAP_ASSERT(mutex.is_held());
        SATRAP_ASSERT(rows.find(id, hash) == kNoSlot && count != 0);
        if (sightings.full()) sightings.erase(sightings.oldest());
        sightings.publish(sightings.insert(id, hash), step, count);
    }

    // After a restart: removes the sightings of admissions that were interrupted after their row was inserted.
    void drop_stale_sightings() {
        sightings.for_each([&](std::uint32_t slot, const Head&) {
            const std::uint64_t id = sightings.id(slot);
            if (rows.find(id, mix64(id)) != kNoSlot) sightings.erase(slot);
        });
    }

    void forget(std::uint64_t id, std::uint64_t hash) {
        SATRAP_ASSERT(mutex.is_held());
        std::uint32_t slot = sightings.find(id, hash);
        if (slot != kNoSlot) sightings.erase(slot);
    }
};

} // namespace satrap
