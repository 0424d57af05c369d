// The calls of a table whose rows are on a device: they find frames where the others copy and change values.
#include "base/errors.hpp"
#include "table/table.hpp"

namespace satrap {

// Inserts a row and gives it a place; if that fails, the place is free again.
std::uint32_t Table::insert_place(Bucket& bucket, std::uint64_t id, std::uint64_t hash) const {
    SATRAP_ASSERT(bucket.places != nullptr && bucket.mutex.is_held());
    const std::uint32_t place = bucket.places->take();
    if (place == kNoFrame)
        throw CapacityError("table '" + config_.name + "': all " + std::to_string(bucket.places->device.limit()) +
                            " frames of the device's memory are in use");
    try {
        const std::uint32_t slot = bucket.rows.insert(id, hash);
        bucket.set_place(slot, place);
        bucket.in_frames += is_frame(place);
        return slot;
    } catch (...) {
        bucket.places->give(place);
        throw;
    }
}

// Orders a row that is new in its frame, or whose stamp may have fallen.
void Table::order_frame(const Bucket& bucket, std::uint32_t slot) const {
    SATRAP_ASSERT(bucket.rows.live(slot));
    const Head& head = bucket.rows.head(slot);
    if (const std::uint32_t place = bucket.place_of(slot); bucket.places->is_tiered() && is_frame(place))
        bucket.places->order().put({head.stamp, number_, bucket.rows.id(slot), place, slot});
}

void Table::lookup_places(const BucketVisit& visit, const LookupStep& at, std::uint32_t* places,
                          std::vector<InsertedRow>& inserted, Scratch& scratch) {
    Bucket& bucket = this->bucket(visit.bucket);
    std::lock_guard lock(bucket.mutex);
    find_rows(bucket, visit, at, &inserted, scratch);
    const std::uint32_t* slots = scratch.slots.data();
    for (std::uint32_t i = 0; i < visit.num_unique; ++i)
        places[i] = is_live(bucket, slots[i]) ? bucket.place_of(slots[i]) : kNoFrame;
}

std::size_t Table::count_in_frames(const BucketVisit& visit, std::uint32_t since) {
    Bucket& bucket = this->bucket(visit.bucket);
    std::lock_guard lock(bucket.mutex);
    std::size_t count = 0;
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        const std::uint32_t slot = bucket.rows.find(visit.unique[i], mix64(visit.unique[i]));
        count += slot != kNoSlot && is_frame(bucket.place_of(slot)) && bucket.rows.head(slot).stamp >= since;
    }
    return count;
}

// Stamps, marks and counts a row that is updated, under the bucket's lock; returns false if there is no row.
bool Table::stamp_updated(Bucket& bucket, std::uint32_t slot, std::uint32_t step) {
    if (!is_live(bucket, slot)) {
        ++bucket.counters.not_applied_absent;
        return false;
    }
    bucket.rows.touch(slot, step);
    bucket.note_use(slot);
    bucket.rows.head(slot).changed = ledger_->version.load();
    ++bucket.counters.updated;
    return true;
}

void Table::update_places(const BucketVisit& visit, const std::uint8_t* started, std::uint32_t step, bool hinted,
                          bool settled, std::uint32_t* places, Scratch& scratch) {
    SATRAP_ASSERT((step != 0 || !settled) && step <= kLastStep);
    Bucket& bucket = this->bucket(visit.bucket);
    std::lock_guard lock(bucket.mutex);
    locate(bucket, visit, hinted, scratch);
    const std::uint32_t* slots = scratch.slots.data();
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        const bool has_row =
            started[i] && (settled ? stamp_updated(bucket, slots[i], step) : is_live(bucket, slots[i]));
        places[i] = has_row ? bucket.place_of(slots[i]) : kNoFrame;
    }
}

void Table::settle_row(std::uint64_t id, std::uint32_t step) {
    Bucket& bucket = buckets_[bucket_number(id)];
    std::lock_guard lock(bucket.mutex);
    stamp_updated(bucket, bucket.rows.find(id, mix64(id)), step);
}

std::uint32_t Table::place_of(std::uint64_t id) {
    Bucket& bucket = buckets_[bucket_number(id)];
    std::lock_guard lock(bucket.mutex);
    const std::uint32_t slot = bucket.rows.find(id, mix64(id));
    return is_live(bucket, slot) ? bucket.place_of(slot) : kNoFrame;
}

std::uint32_t Table::import_place(std::uint64_t id, std::uint32_t step) {
    const std::uint32_t b = bucket_number(id);
    Bucket& bucket = buckets_[b];
    std::lock_guard lock(bucket.mutex);
    std::uint32_t slot = bucket.rows.find(id, mix64(id));
    if (slot == kNoSlot) {
        require_room(bucket, b, id);
        slot = insert_place(bucket, id, mix64(id));
    } else {
        bucket.places->note_left(bucket.rows.head(slot).stamp); // it may fall, and then the row may leave its place
    }
    bucket.rows.publish(slot, step, ledger_->version.load());
    order_frame(bucket, slot);
    bucket.swept_before = std::min(bucket.swept_before, step);
    return bucket.place_of(slot);
}

std::vector<std::uint32_t> Table::import_places(std::span<const std::uint64_t> ids, const std::uint32_t* steps) {
    const auto with_row = [&](std::uint64_t id, auto call) {
        Bucket& bucket = buckets_[bucket_number(id)];
        std::lock_guard lock(bucket.mutex);
        const std::uint32_t slot = bucket.rows.find(id, mix64(id));
        if (slot != kNoSlot) call(bucket, slot);
        return slot != kNoSlot;
    };
    std::vector<std::uint32_t> places(ids.size(), kNoFrame);
    std::size_t end = 0;
    try { // the new rows first, since they may have no room
        for (; end < ids.size(); ++end)
            if (!with_row(ids[end], [](Bucket&, std::uint32_t) {})) places[end] = import_place(ids[end], steps[end]);
    } catch (...) {
        for (std::size_t i = 0; i < end; ++i)
            if (places[i] != kNoFrame) with_row(ids[i], [](Bucket& bucket, std::uint32_t slot) { bucket.erase(slot); });
        throw;
    }
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (places[i] == kNoFrame) places[i] = import_place(ids[i], steps[i]);
    return places;
}

void Table::require_at(const Bucket& bucket, std::uint32_t row, std::uint64_t id, std::uint32_t place) const {
    if (!bucket.rows.holds(row, id) || bucket.place_of(row) != place)
        throw InvariantError("table '" + config_.name + "': the row of id " + std::to_string(id) +
                             " is not where it was found");
}

void Table::move_in(std::uint64_t id, std::uint32_t row, std::uint32_t slot, std::uint32_t frame, bool is_new) {
    Bucket& bucket = buckets_[bucket_number(id)];
    std::lock_guard lock(bucket.mutex);
    require_at(bucket, row, id, slot | kAtHome);
    SATRAP_ASSERT(is_frame(frame) && is_frame(slot));
    bucket.set_place(row, frame);
    order_frame(bucket, row);
    ++bucket.in_frames;
    bucket.moved_in += !is_new;
}

void Table::move_out(std::uint64_t id, std::uint32_t row, std::uint32_t frame, std::uint32_t slot) {
    Bucket& bucket = buckets_[bucket_number(id)];
    std::lock_guard lock(bucket.mutex);
    require_at(bucket, row, id, frame);
    SATRAP_ASSERT(is_frame(slot) && bucket.in_frames != 0);
    bucket.set_place(row, slot | kAtHome);
    bucket.places->note_left(bucket.rows.head(row).stamp);
    --bucket.in_frames;
    ++bucket.moved_out;
}

} // namespace satrap
