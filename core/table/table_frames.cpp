// The calls of a table whose rows are on a device: they find frames where the others copy and change values.
#include "base/errors.hpp"
#include "table/table.hpp"

namespace satrap {

std::uint32_t Table::take_frame(FramePool& frames) const {
    std::uint32_t frame;
    if (frames.take({&frame, 1}) == 0)
        throw CapacityError("table '" + config_.name + "': all " + std::to_string(frames.limit()) +
                            " frames of the device's memory are in use");
    return frame;
}

// Inserts a row and gives it a frame; if that fails, the frame is free again.
std::uint32_t Table::insert_frame(Bucket& bucket, std::uint64_t id, std::uint64_t hash) const {
    const std::uint32_t frame = take_frame(*bucket.frames);
    try {
        const std::uint32_t slot = bucket.rows.insert(id, hash);
        bucket.set_frame(slot, frame);
        return slot;
    } catch (...) {
        bucket.frames->give({&frame, 1});
        throw;
    }
}

void Table::lookup_frames(const BucketVisit& visit, const LookupStep& at, std::uint32_t* frames,
                          std::vector<InsertedRow>& inserted, Scratch& scratch) {
    Bucket& bucket = buckets_[visit.bucket];
    std::lock_guard lock(bucket.mutex);
    find_rows(bucket, visit, at, &inserted, scratch);
    const std::uint32_t* slots = scratch.slots.data();
    for (std::uint32_t i = 0; i < visit.num_unique; ++i)
        frames[i] = is_live(bucket, slots[i]) ? bucket.frame_of(slots[i]) : kNoFrame;
}

// Stamps, marks and counts a row that is updated, under the bucket's lock; returns false if there is no row.
bool Table::stamp_updated(Bucket& bucket, std::uint32_t slot, std::uint32_t step) {
    if (!is_live(bucket, slot)) {
        ++bucket.counters.not_applied_absent;
        return false;
    }
    bucket.rows.touch(slot, step);
    bucket.rows.head(slot).changed = ledger_->version.load();
    ++bucket.counters.updated;
    return true;
}

void Table::update_frames(const BucketVisit& visit, const std::uint8_t* started, std::uint32_t step, bool hinted,
                          bool settled, std::uint32_t* frames, Scratch& scratch) {
    Bucket& bucket = buckets_[visit.bucket];
    std::lock_guard lock(bucket.mutex);
    locate(bucket, visit, hinted, scratch);
    const std::uint32_t* slots = scratch.slots.data();
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        const bool found = started[i] && (settled ? stamp_updated(bucket, slots[i], step) : is_live(bucket, slots[i]));
        frames[i] = found ? bucket.frame_of(slots[i]) : kNoFrame;
    }
}

void Table::settle_frame(std::uint64_t id, std::uint32_t step) {
    Bucket& bucket = buckets_[hash_bucket(id)];
    std::lock_guard lock(bucket.mutex);
    stamp_updated(bucket, bucket.rows.find(id, mix64(id)), step);
}

std::uint32_t Table::frame_of(std::uint64_t id) {
    Bucket& bucket = buckets_[hash_bucket(id)];
    std::lock_guard lock(bucket.mutex);
    const std::uint32_t slot = bucket.rows.find(id, mix64(id));
    return is_live(bucket, slot) ? bucket.frame_of(slot) : kNoFrame;
}

std::uint32_t Table::import_frame(std::uint64_t id, std::uint32_t step) {
    const std::uint32_t b = hash_bucket(id);
    Bucket& bucket = buckets_[b];
    std::lock_guard lock(bucket.mutex);
    std::uint32_t slot = bucket.rows.find(id, mix64(id));
    if (slot == kNoSlot) {
        require_room(bucket, b, id);
        slot = insert_frame(bucket, id, mix64(id));
    }
    bucket.rows.publish(slot, step, ledger_->version.load());
    bucket.swept_before = std::min(bucket.swept_before, step);
    return bucket.frame_of(slot);
}

} // namespace satrap
