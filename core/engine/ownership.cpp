// Migrates buckets from one engine to another; see ownership.hpp.
#include "engine/ownership.hpp"

namespace satrap {

void Ownership::set(std::span<const std::uint32_t> owners, std::uint32_t self) {
    SATRAP_ASSERT(owners.size() == owners_.size());
    self_.store(self);
    for (std::uint32_t b = 0; b < owners.size(); ++b) owners_[b].store(owners[b]);
}

void Ownership::share(std::size_t t) {
    tables_.require_rows_on_device();
    std::fill_n(is_shared_.begin() + tables_.map().first[t], tables_[t].config().num_buckets, std::uint8_t{1});
}

void Ownership::freeze(std::span<const std::uint32_t> buckets, bool frozen) {
    tables_.require_rows_here();
    for (std::uint32_t b : buckets) {
        SATRAP_ASSERT(b < owners_.size());
        if (frozen)
            owners_[b].fetch_or(kFrozen);
        else
            owners_[b].fetch_and(~kFrozen);
    }
}

void Ownership::refuse_moved(std::uint32_t b, std::uint32_t owner, std::uint32_t self) const {
    const std::size_t t = tables_.table_of(b);
    const std::string where =
        "table '" + tables_[t].config().name + "': bucket " + std::to_string(b - tables_.map().first[t]) + " ";
    if ((owner & ~kFrozen) == self) throw MovedError(where + "is migrating: retry the call");
    throw MovedError(where + "belongs to server " + std::to_string(owner) + " and this is server " +
                     std::to_string(self) + ": fetch the newest bucket map, then call that server");
}

std::vector<std::uint64_t> Ownership::export_windows(std::span<const std::uint32_t> buckets,
                                                     std::vector<std::uint32_t>& trainers) {
    tables_.require_rows_here();
    trainers = steps_.trainers();
    std::vector<std::uint64_t> words;
    words.reserve(trainers.size() * buckets.size());
    for (std::uint32_t trainer : trainers) {
        const StepWindow* windows = steps_.of(trainer);
        for (std::uint32_t b : buckets) words.push_back(windows[b].as_word());
    }
    return words;
}

void Ownership::import_windows(std::span<const std::uint32_t> buckets, std::span<const std::uint32_t> trainers,
                               std::span<const std::uint64_t> words) {
    tables_.require_rows_here();
    SATRAP_ASSERT(words.size() == trainers.size() * buckets.size());
    for (std::uint32_t trainer : steps_.trainers()) {
        StepWindow* windows = steps_.of(trainer);
        for (std::uint32_t b : buckets) windows[b].clear();
    }
    for (std::size_t i = 0; i < trainers.size(); ++i) {
        StepWindow* windows = steps_.of(trainers[i]);
        for (std::size_t b = 0; b < buckets.size(); ++b) windows[buckets[b]].take(words[i * buckets.size() + b]);
    }
}

std::vector<std::uint64_t> Ownership::export_counters(std::span<const std::uint32_t> buckets) {
    tables_.require_rows_here();
    std::vector<std::uint64_t> counters;
    for (std::uint32_t b : buckets) {
        Bucket& bucket = tables_.bucket(b);
        std::lock_guard lock(bucket.mutex);
        for (const Counters::Field& field : Counters::kFields) counters.push_back(bucket.counters.*field.number);
    }
    return counters;
}

void Ownership::import_counters(std::span<const std::uint32_t> buckets, std::span<const std::uint64_t> counters) {
    tables_.require_rows_here();
    SATRAP_ASSERT(counters.size() == buckets.size() * Counters::kCount);
    const std::uint64_t* from = counters.data();
    for (std::uint32_t b : buckets) {
        Bucket& bucket = tables_.bucket(b);
        std::lock_guard lock(bucket.mutex);
        for (const Counters::Field& field : Counters::kFields) bucket.counters.*field.number = *from++;
    }
}

void Ownership::forget(std::span<const std::uint32_t> buckets) {
    tables_.require_rows_here();
    for (std::uint32_t b : buckets) {
        Bucket& bucket = tables_.bucket(b);
        std::lock_guard lock(bucket.mutex);
        bucket.rows.clear();
        bucket.sightings.clear();
        bucket.counters = {};
        bucket.removed = {};
        bucket.swept_before = 0;
        bucket.log_start = tables_[tables_.table_of(b)].ledger().version.load() + 1; // earlier removals are not known
    }
    import_windows(buckets, {}, {});
}

} // namespace satrap
