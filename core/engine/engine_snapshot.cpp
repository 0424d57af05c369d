// Exports rows as columns and imports them: satrap.table.snapshot writes and reads the files. Bucket by bucket under
// each bucket's lock, so a row is never read half-written; the caller arranges a cut over all buckets. Exports are in
// the order of the ids' hashes, whose top bits are the bucket: a saved file is searched by interpolation.
#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

RowColumns Engine::export_rows(std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since,
                               bool others) {
    Table& table = this->table(t);
    const auto places_lock = directory_.lock();
    RowExport out(*blocks_, table.config());
    HashOrder order(table.config().is_direct());
    std::size_t expected = 0; // a first guess, so that columns are rarely copied
    if (since == 0) each_bucket(t, first, last, others, [&](Bucket& bucket) { expected += bucket.rows.size(); });
    each_bucket(t, first, last, others, [&](Bucket& bucket) {
        bucket.sweep(table.expire_before(), table.ledger().version.load());
        order.clear();
        bucket.rows.for_each([&](std::uint32_t slot, const Head& head) {
            if (head.changed >= since) order.add(bucket.rows.id(slot), slot);
        });
        out.reserve(std::max(expected, out.rows() + order.size()));
        std::size_t line = out.add(order.size());
        for (const HashOrder::Entry& entry : order.sorted(table.config().bucket_bits()))
            out.put(line++, bucket.rows.id(entry.slot), bucket.rows.head(entry.slot), bucket.rows.row(entry.slot));
    });
    return out.done();
}

// Exports id, step, and the count in `values`.
RowColumns Engine::export_sightings(std::size_t t, std::uint32_t first, std::uint32_t last, bool others) {
    Table& table = this->table(t);
    RowExport out(*blocks_, sizeof(Head::changed), 0, 0);
    HashOrder order(table.config().is_direct());
    each_bucket(t, first, last, others, [&](Bucket& bucket) {
        order.clear();
        bucket.sightings.for_each([&](std::uint32_t slot, const Head&) { order.add(bucket.sightings.id(slot), slot); });
        out.reserve(out.rows() + order.size());
        std::size_t line = out.add(order.size());
        for (const HashOrder::Entry& entry : order.sorted(table.config().bucket_bits())) {
            const Head& head = bucket.sightings.head(entry.slot);
            out.put(line++, bucket.sightings.id(entry.slot), head, reinterpret_cast<const std::byte*>(&head.changed));
        }
    });
    return out.done();
}

std::vector<std::uint64_t> Engine::export_removed(std::size_t t, std::uint32_t first, std::uint32_t last,
                                                  std::uint32_t since) {
    std::vector<std::uint64_t> ids;
    each_bucket(t, first, last, false, [&](Bucket& bucket) {
        const std::size_t begin = ids.size();
        for (const Removed& removal : bucket.removed)
            if (removal.version >= since) ids.push_back(removal.id);
        sort_hashed(ids, begin, table(t).config().is_direct());
    });
    return ids;
}

std::uint32_t Engine::removed_since(std::size_t t) {
    std::uint32_t oldest = 0;
    each_bucket(t, [&](Bucket& bucket) { oldest = std::max(oldest, bucket.log_start); });
    return oldest;
}

std::vector<std::uint64_t> Engine::rows_with(std::size_t t, std::span<const std::uint64_t> ids) {
    Table& table = this->table(t);
    const auto places_lock = directory_.lock();
    std::vector<std::uint64_t> counts(table.config().num_buckets);
    for (std::uint32_t b = 0; b < counts.size(); ++b) {
        if (!ownership_.owns(t, b)) continue;
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        bucket.sweep(table.expire_before(), table.ledger().version.load());
        counts[b] = bucket.rows.size();
    }
    for (std::uint64_t id : ids) {
        const std::uint32_t b = table.bucket_number(id);
        std::lock_guard lock(table.bucket(b).mutex);
        counts[b] += table.bucket(b).rows.find(id, mix64(id)) == kNoSlot;
    }
    return counts;
}

void Engine::import_rows(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                         const std::byte* values, const float* state) {
    Table& table = this->table(t);
    table.require_rows_here();
    table.require_ids({ids, n});
    const std::size_t value_bytes = table.config().dim * table.config().element_bytes();
    const std::size_t state_dim = table.config().state_dim();
    UndoSet undo(undo_, *arena_);
    if (arena_->survives_process()) undo.fill(1, UndoSlot::bytes_for(1, table.config().row_bytes()));
    UndoSlot* kept = undo.slot(0); // a replaced row is the old one or the new one, even under kill -9
    for (std::size_t i = 0; i < n;) {
        const std::uint32_t b = table.bucket_number(ids[i]);
        std::size_t end = i + 1; // files keep buckets together, so each lock is taken once
        while (end < n && table.bucket_number(ids[end]) == b) ++end;
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        const std::uint32_t version = table.ledger().version.load();
        bucket.rows.reserve(end - i);
        for (; i < end; ++i) {
            const std::uint64_t hash = mix64(ids[i]);
            std::uint32_t slot = bucket.rows.find(ids[i], hash);
            if (slot != kNoSlot) bucket.rows.keep(slot);
            if (slot == kNoSlot) {
                table.require_room(bucket, b, ids[i]);
                slot = bucket.rows.insert(ids[i], hash);
            } else if (kept != nullptr) {
                kept->open(static_cast<std::uint32_t>(t), b, bucket.rows.row_bytes());
                kept->add(slot, bucket.rows.head(slot), bucket.rows.row(slot));
                kept->arm();
            }
            std::byte* row = bucket.rows.row(slot);
            std::memcpy(row, values + i * value_bytes, value_bytes);
            if (state_dim != 0)
                std::memcpy(row + table.config().value_bytes(), state + i * state_dim, state_dim * sizeof(float));
            bucket.rows.publish(slot, steps[i], version);
            if (kept != nullptr) kept->disarm();
            bucket.swept_before = std::min(bucket.swept_before, steps[i]);
        }
    }
}

void Engine::import_removed(std::size_t t, std::span<const std::uint64_t> ids) {
    Table& table = this->table(t);
    const auto places_lock = directory_.lock();
    for (std::uint64_t id : ids) {
        Bucket& bucket = table.bucket(table.bucket_number(id));
        std::lock_guard lock(bucket.mutex);
        const std::uint32_t slot = bucket.rows.find(id, mix64(id));
        if (slot != kNoSlot) bucket.remove(slot, table.ledger().version.load());
    }
}

void Engine::import_sightings(std::size_t t, std::size_t n, const std::uint64_t* ids, const std::uint32_t* steps,
                              const std::uint32_t* counts, bool clear) {
    Table& table = this->table(t);
    if (clear)
        each_bucket(t, [](Bucket& bucket) {
            bucket.sightings.for_each([&](std::uint32_t slot, const Head&) { bucket.sightings.erase(slot); });
        });
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t b = table.bucket_number(ids[i]);
        const std::uint64_t hash = mix64(ids[i]);
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        if (counts[i] == 0 || bucket.rows.find(ids[i], hash) != kNoSlot)
            continue; // a row was inserted during the save: it counts
        bucket.forget(ids[i], hash);
        bucket.add_sighting(ids[i], hash, steps[i], std::min(counts[i], table.config().min_count));
    }
}

void Engine::restore(std::size_t t, std::uint32_t version, std::uint32_t latest_step, std::uint32_t expire_before,
                     double lr) {
    Table& table = this->table(t);
    table.ledger().version.store(version);
    table.reach(version, expire_before); // expire_before never falls
    table.set_lr(lr);
    reach_step(std::max(latest_step, expire_before)); // new rows are stamped with the larger
    each_bucket(t, [&](Bucket& bucket) {
        bucket.log_start = std::min(bucket.log_start, version); // nothing was removed since this version
        if (bucket.removed.empty()) bucket.log_start = version;
    });
}

} // namespace satrap
