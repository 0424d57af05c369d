// The life of a row; see table.hpp.
#include "table/table.hpp"

#include "base/atomic_max.hpp"
#include "base/errors.hpp"
#include "base/float_mode.hpp"
#include "base/prefetch.hpp"

namespace satrap {

Table::Table(TableConfig config, std::uint32_t number, std::uint64_t seed, const Kernels& kernels, Arena& arena,
             RowPlaces* places)
    : config_(std::move(config)), summation_(config_, kernels), key_(table_key(seed, config_.name)), number_(number),
      kernels_(&kernels), arena_(&arena), ledger_(&arena.ledger(number)),
      buckets_(std::make_unique<Bucket[]>(config_.num_buckets)) {
    SATRAP_ASSERT(std::has_single_bit(config_.num_buckets) && config_.dim != 0);
    SATRAP_ASSERT((places != nullptr) == config_.frame_pool.has_value());
    const FloatMode mode;
    initial_ = InitialScalars::of(config_, key_);
    if (ledger_->version.load() == 0) { // new, not attached
        set_lr(config_.optimizer
                   .lr); // first: if the process is killed in between, the version shows that the table is still new
        ledger_->version.store(1);
    }
    for (std::uint32_t b = 0; b < config_.num_buckets; ++b) {
        std::optional<DirectSlots> direct; // rows on a device are found by their hashes
        if (config_.is_direct() && places == nullptr)
            direct = DirectSlots::of(config_.num_rows, config_.bucket_bits(), b);
        buckets_[b].rows.init(&arena, {ChunkKind::rows, number, b, 0}, config_.payload_bytes(), row_share(b), direct);
        buckets_[b].places = places;
        buckets_[b].sightings.init(&arena, {ChunkKind::sightings, number, b, 0}, 0, window_share(b));
    }
}

std::uint32_t Table::begin_version() {
    std::uint32_t now = ledger_->version.load();
    do {
        if (now >= kLastVersion)
            throw InputError("table '" + config_.name + "': all " + std::to_string(kLastVersion) +
                             " versions are used");
    } while (!ledger_->version.compare_exchange_weak(now, now + 1));
    return now + 1;
}

void Table::reach(std::uint32_t version, std::uint32_t expire_before) {
    raise_to(ledger_->version, version);
    raise_to(ledger_->expire_before, expire_before);
}

void Table::open_step(const LookupStep& at) {
    SATRAP_ASSERT(at.train && at.step != 0 && at.step <= kLastStep);
    raise_to(arena_->latest_step(), at.step);
    if (config_.expire_after == 0 || at.step <= config_.expire_after) return;
    raise_to(ledger_->expire_before, std::min(at.step - config_.expire_after, at.oldest_open));
}

// asks_last: see Rows::ends_apart.
SATRAP_ALWAYS_INLINE static void prefetch(const std::byte* row, std::size_t bytes, bool asks_last) {
    for (std::size_t at = 0; at < bytes; at += 64) prefetch_early(row + at);
    if (asks_last) prefetch_early(row + bytes - 1);
}

// Finds the slot of every unique id (kNoSlot: no row) in passes, so that the cache misses of a bucket overlap.
void Table::locate(Bucket& bucket, const BucketVisit& visit, bool hinted, Scratch& scratch) {
    SATRAP_ASSERT(bucket.mutex.is_held());
    Rows& rows = bucket.rows;
    const std::uint32_t n = visit.num_unique;
    std::uint32_t* slots = scratch.slots.reserve(n);
    const std::size_t payload =
        hinted ? config_.payload_bytes() : std::min(config_.payload_bytes(), config_.value_bytes());
    const std::size_t bytes = rows.id_bytes() + sizeof(Head) + payload;
    const bool asks_last = rows.ends_apart(bytes);
    if (rows.is_direct()) return locate_direct(rows, visit, bytes, asks_last, slots);
    if (hinted) {
        for (std::uint32_t i = 0; i < n; ++i) slots[i] = visit.hints[i];
    } else {
        std::uint64_t* hashes = scratch.hashes.reserve(n);
        for (std::uint32_t i = 0; i < n; ++i) {
            hashes[i] = mix64(visit.unique[i]);
            rows.index().prefetch(hashes[i]);
        }
        for (std::uint32_t i = 0; i < n; ++i) slots[i] = rows.index().candidate(hashes[i]);
    }
    for (std::uint32_t i = 0; i < n; ++i)
        if (slots[i] < rows.used()) prefetch(rows.line(slots[i]), bytes, asks_last);
    for (std::uint32_t i = 0; i < n; ++i)
        if (!rows.holds(slots[i], visit.unique[i])) slots[i] = rows.find(visit.unique[i], mix64(visit.unique[i]));
}

void Table::locate_direct(const Rows& rows, const BucketVisit& visit, std::size_t bytes, bool asks_last,
                          std::uint32_t* slots) {
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        slots[i] = rows.direct_slot(visit.unique[i]);
        if (slots[i] != kNoSlot) prefetch(rows.line(slots[i]), bytes, asks_last);
    }
    for (std::uint32_t i = 0; i < visit.num_unique; ++i)
        if (slots[i] != kNoSlot && !rows.live(slots[i])) slots[i] = kNoSlot;
}

void Table::lookup(const BucketVisit& visit, const LookupStep& at, float* const* to, Scratch& scratch) {
    Bucket& bucket = this->bucket(visit.bucket);
    SATRAP_ASSERT(bucket.places == nullptr);
    std::lock_guard lock(bucket.mutex);
    find_rows(bucket, visit, at, nullptr, scratch);
    point_rows(bucket, visit, scratch);
    kernels_->gather(scratch.rows.data(), visit.local, to, visit.count, config_.dim, config_.dtype);
}

// Finds the rows of a lookup: scratch.slots.
void Table::find_rows(Bucket& bucket, const BucketVisit& visit, const LookupStep& at,
                      std::vector<InsertedRow>* inserted, Scratch& scratch) {
    locate(bucket, visit, false, scratch);
    if (!at.train) return;
    std::uint32_t* slots = scratch.slots.data();
    const std::uint32_t version = ledger_->version.load(); // under the lock: see begin_version
    // One line of expiry for the whole visit: a later step of another call may raise it meanwhile, and a row that was
    // found or inserted here must not leave its slot to another id of the visit.
    const std::uint32_t line = expire_before();
    touch_hits(bucket, visit, at.step, line, version, slots);
    insert_misses(bucket, visit, at, line, version, inserted, scratch);
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) visit.hints[i] = slots[i];
}

// Stamps hits before it inserts any miss, so that no id of a batch evicts another.
void Table::touch_hits(Bucket& bucket, const BucketVisit& visit, std::uint32_t step, std::uint32_t line,
                       std::uint32_t version, std::uint32_t* slots) {
    SATRAP_ASSERT(bucket.mutex.is_held() && version <= kLastVersion);
    std::uint64_t hits = 0;
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        if (slots[i] == kNoSlot) continue;
        Head& head = bucket.rows.head(slots[i]);
        if (head.stamp < line) {
            bucket.remove(slots[i], version);
            ++bucket.counters.expired;
            slots[i] = kNoSlot;
            continue;
        }
        bucket.rows.keep(slots[i]);
        bucket.rows.touch(slots[i], step);
        if (bucket.places != nullptr) bucket.note_use(slots[i]);
        head.changed = version;
        ++hits;
    }
    bucket.counters.lookups += visit.num_unique;
    bucket.counters.hits += hits;
}

void Table::insert_misses(Bucket& bucket, const BucketVisit& visit, const LookupStep& at, std::uint32_t line,
                          std::uint32_t version, std::vector<InsertedRow>* inserted, Scratch& scratch) {
    SATRAP_ASSERT(bucket.mutex.is_held());
    SATRAP_ASSERT((inserted != nullptr) == (bucket.places != nullptr));
    std::uint32_t* slots = scratch.slots.data();
    float* values = scratch.values.reserve(config_.dim);
    if (line - bucket.swept_before > config_.expire_after / 8 && line > bucket.swept_before)
        bucket.sweep(line, version); // keeps an unbounded table bounded; the result does not depend on when
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        if (slots[i] != kNoSlot) continue;
        const std::uint64_t id = visit.unique[i], hash = mix64(id);
        if (!admit(bucket, id, hash, at)) {
            ++bucket.counters.refused;
            continue;
        }
        make_room(bucket, visit.bucket, at, line, version, visit.num_unique - i);
        std::uint32_t slot;
        if (bucket.places != nullptr) {
            inserted->reserve(visit.num_unique); // nothing may throw once the id has a row
            slot = insert_place(bucket, id, hash);
            inserted->push_back({id, number_, bucket.place_of(slot)});
        } else {
            slot = bucket.rows.insert(id, hash);
            kernels_->initialise(initial_, id, bucket.rows.row(slot), values);
        }
        bucket.rows.publish(slot, std::max(at.step, line), version); // the row of a very late step would expire at once
        if (bucket.places != nullptr) order_frame(bucket, slot);
        if (config_.admission == AdmissionKind::min_count) bucket.forget(id, hash);
        ++bucket.counters.inserted;
        slots[i] = slot;
    }
}

bool Table::admit(Bucket& bucket, std::uint64_t id, std::uint64_t hash, const LookupStep& at) {
    SATRAP_ASSERT(at.train && hash == mix64(id));
    switch (config_.admission) {
    case AdmissionKind::always: return true;
    case AdmissionKind::probability: return unit_interval(step_key(row_key(~key_, id), at.step)) < config_.probability;
    case AdmissionKind::min_count:
        return (at.first_epoch || !config_.first_epoch_only) && bucket.sight(id, hash, at.step, config_.min_count);
    }
    return true;
}

// Evicts one row of a full bucket, or throws. `needed`: how many rows the call may still need here, for the message.
void Table::make_room(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::uint32_t line, std::uint32_t version,
                      std::size_t needed) {
    SATRAP_ASSERT(bucket.mutex.is_held() && needed != 0);
    if (!bucket.rows.full()) return;
    const std::uint32_t victim = bucket.rows.oldest();
    SATRAP_ASSERT(victim != kNoSlot); // a full bucket has rows
    const std::uint32_t stamp = bucket.rows.head(victim).stamp;
    if (stamp < line) {
        ++bucket.counters.expired;
    } else {
        if (config_.on_full == OnFull::raise || stamp >= at.oldest_open) fail_full(bucket, b, at, needed);
        ++bucket.counters.evicted;
    }
    bucket.remove(victim, version);
}

void Table::fail_full(Bucket& bucket, std::uint32_t b, const LookupStep& at, std::size_t needed) const {
    std::size_t kept = bucket.rows.size();
    std::string why = "on_full is 'raise'";
    if (config_.on_full == OnFull::evict) {
        kept = 0;
        bucket.rows.for_each([&](std::uint32_t, const Head& head) { kept += head.stamp >= at.oldest_open; });
        why = "all of them are in use by open steps (" + std::to_string(at.oldest_open) + " and later)";
    }
    throw CapacityError(
        "table '" + config_.name + "' is full at step " + std::to_string(at.step) + ": bucket " + std::to_string(b) +
        " of " + std::to_string(config_.num_buckets) + " has " + std::to_string(bucket.rows.size()) +
        " rows, its share of capacity=" + std::to_string(config_.capacity) + ", and " + why +
        "; the lookup needs up to " + std::to_string(needed) + " more there; set capacity to at least " +
        std::to_string((kept + needed) * config_.num_buckets) + ", or use on_full='grow'" +
        (config_.on_full == OnFull::evict ? ", a smaller batch or less staleness" : ""));
}

// Finds where each unique id's values are read: its row, or the values of an absent row.
void Table::point_rows(Bucket& bucket, const BucketVisit& visit, Scratch& scratch) {
    SATRAP_ASSERT(bucket.mutex.is_held());
    const std::uint32_t* slots = scratch.slots.data();
    const std::uint32_t line = expire_before();
    const std::byte** rows = scratch.rows.reserve(visit.num_unique);
    std::size_t absent = 0;
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        const bool has_row = slots[i] != kNoSlot && bucket.rows.head(slots[i]).stamp >= line;
        rows[i] = has_row ? bucket.rows.row(slots[i]) : nullptr;
        absent += !has_row;
    }
    if (absent == 0) return;
    const std::size_t stride = config_.row_bytes();
    const bool zeros = config_.absent == Absent::zeros;
    std::byte* next = scratch.absent.reserve((zeros ? 1 : absent) * stride);
    if (zeros) std::memset(next, 0, stride);
    float* values = scratch.values.reserve(config_.dim);
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        if (rows[i] != nullptr) continue;
        rows[i] = next;
        if (zeros) continue;
        kernels_->initialise(initial_, visit.unique[i], next, values);
        next += stride;
    }
}

void Table::update(const BucketVisit& visit, const Gradients& gradients, const StepScalars& scalars, bool hinted,
                   bool filter, const UpdateMark& mark, Scratch& scratch) {
    SATRAP_ASSERT(scalars.step != 0 && scalars.step <= kLastStep);
    SATRAP_ASSERT((mark.window == nullptr) == (mark.trainer == kNoTrainer));
    Bucket& bucket = this->bucket(visit.bucket);
    SATRAP_ASSERT(bucket.places == nullptr);
    const std::uint32_t n = visit.num_unique;
    RowStep* steps = scratch.steps.reserve(n);
    float* sums = scratch.sums.reserve(static_cast<std::size_t>(n) * config_.dim);
    const GradientSum::Entries entries = summation_.begin(visit, gradients, filter, scratch);

    std::lock_guard lock(bucket.mutex);
    if (mark.window != nullptr && mark.window->applied(scalars.step)) {
        bucket.counters.repeated += n;
        return;
    }
    locate(bucket, visit, hinted, scratch);
    std::uint32_t* slots = scratch.slots.data();
    bucket.counters.skipped += summation_.add(visit, entries, filter, sums, scratch);
    const std::uint32_t line = expire_before();
    std::size_t ready = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
        if (!scratch.started[i]) continue;
        if (slots[i] == kNoSlot || bucket.rows.head(slots[i]).stamp < line) {
            ++bucket.counters.not_applied_absent;
            continue;
        }
        slots[ready] = slots[i]; // ready <= i
        steps[ready++] = {bucket.rows.row(slots[i]), sums + static_cast<std::size_t>(i) * config_.dim, visit.unique[i]};
    }
    apply(bucket, visit.bucket, scalars, ready, mark, scratch);
}

// Keeps the rows of these slots for the save of the last cut, all of them or, if memory is short, none.
static void keep_rows(Rows& rows, std::span<const std::uint32_t> slots) {
    SATRAP_ASSERT(rows.in_cut());
    OldRows& old = rows.old_rows();
    std::size_t count = 0;
    for (std::uint32_t slot : slots) count += !old.is_done(slot);
    old.reserve(count);
    for (std::uint32_t slot : slots) rows.keep(slot);
}

// Applies one optimizer step to the rows of scratch.slots and steps; in a shared-memory file, whole or not at all.
void Table::apply(Bucket& bucket, std::uint32_t b, const StepScalars& scalars, std::size_t count,
                  const UpdateMark& mark, Scratch& scratch) {
    SATRAP_ASSERT(bucket.mutex.is_held());
    SATRAP_ASSERT(mark.window == nullptr || !mark.window->applied(scalars.step)); // nothing is applied twice
    SATRAP_ASSERT((scratch.undo != nullptr) == arena_->survives_process());
    const std::uint32_t* slots = scratch.slots.data();
    const RowStep* steps = scratch.steps.data();
    float* room = scratch.values.reserve(config_.dim); // may throw, which it must not after the slot is armed
    if (bucket.rows.in_cut()) keep_rows(bucket.rows, {slots, count});
    if (scratch.undo != nullptr) {
        scratch.undo->open(number_, b, bucket.rows.row_bytes());
        if (mark.window != nullptr) scratch.undo->keep(mark.trainer, *mark.window);
        for (std::size_t r = 0; r < count; ++r) scratch.undo->add(slots[r], bucket.rows.head(slots[r]), steps[r].row);
        scratch.undo->arm();
    }
    const std::uint32_t version = ledger_->version.load();
    for (std::size_t r = 0; r < count; ++r) {
        bucket.rows.touch(slots[r], scalars.step);
        bucket.rows.head(slots[r]).changed = version;
    }
    kernels_->step(scalars, steps, count, room);
    if (mark.window != nullptr) mark.window->mark(scalars.step);
    if (scratch.undo != nullptr) scratch.undo->disarm();
    bucket.counters.updated += count;
}

void Table::require_room(const Bucket& bucket, std::uint32_t b, std::uint64_t id) const {
    if (bucket.rows.full())
        throw CapacityError("table '" + config_.name + "': bucket " + std::to_string(b) + " has no room for id " +
                            std::to_string(id) + "; its share of the capacity is " + std::to_string(row_share(b)));
}

void Table::require_ids(std::span<const std::uint64_t> ids) const {
    for (const std::uint64_t id : ids)
        if (config_.is_direct() && id >= config_.num_rows)
            throw InputError("table '" + config_.name + "': " + id_out_of_range(id, config_.num_rows));
}

void Table::require_rows_here() const {
    if (config_.frame_pool)
        throw InputError("table '" + config_.name +
                         "': its rows are on a device and this call works on rows in the engine's memory: use "
                         "lookup_frames, update_frames and import_frames");
}

bool Table::read(std::uint64_t id, float* values, float* state) {
    require_rows_here();
    Bucket& bucket = buckets_[bucket_number(id)];
    std::lock_guard lock(bucket.mutex);
    const std::uint32_t slot = bucket.rows.find(id, mix64(id));
    if (!is_live(bucket, slot)) return false;
    const FloatMode mode;
    const std::byte* row = bucket.rows.row(slot);
    const std::uint32_t zero = 0;
    portable_kernels().gather(&row, &zero, &values, 1, config_.dim, config_.dtype);
    if (config_.state_dim() != 0) std::memcpy(state, row + config_.value_bytes(), config_.state_dim() * sizeof(float));
    return true;
}

void Table::check() {
    for (std::uint32_t b = 0; b < config_.num_buckets; ++b) {
        Bucket& bucket = buckets_[b];
        std::lock_guard lock(bucket.mutex);
        bucket.rows.check(row_share(b));
        bucket.sightings.check(config_.admission == AdmissionKind::min_count ? window_share(b) : 0);
        auto require = [&](bool holds, const char* what) {
            if (!holds) throw InvariantError("table '" + config_.name + "', bucket " + std::to_string(b) + ": " + what);
        };
        const std::uint32_t version = ledger_->version.load(), latest = arena_->latest_step().load();
        bucket.rows.for_each([&](std::uint32_t slot, const Head& head) {
            require(bucket_number(bucket.rows.id(slot)) == b, "a row's id belongs to another bucket");
            require(head.changed <= version, "a row changed at a version that has not started");
            require(head.stamp <= latest, "a row is stamped after the latest step");
            require(head.stamp >= bucket.swept_before, "a row is stamped before a step that was swept");
        });
        bucket.sightings.for_each([&](std::uint32_t slot, const Head& head) {
            const std::uint64_t id = bucket.sightings.id(slot);
            require(bucket_number(id) == b, "a sighting's id belongs to another bucket");
            require(head.changed <= config_.min_count, "a sighting counted beyond its admission");
            require(bucket.rows.find(id, mix64(id)) == kNoSlot, "an id has a row and a sighting");
        });
        for (const Removed& removal : bucket.removed) require(removal.version <= version, "a removal in the future");
        require(bucket.counters.hits <= bucket.counters.lookups, "more hits than lookups");
    }
}

} // namespace satrap
