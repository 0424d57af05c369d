// Migrates buckets from one engine to another: their ownership, and their data besides rows and sightings, which are
// exported and imported as for a snapshot (engine_snapshot.cpp). The coordinator ensures that no call runs where
// engine.hpp forbids it.
#include <array>
#include <bit>

#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

static_assert(sizeof(Counters) == Counters::kCount * sizeof(std::uint64_t));

void Engine::set_owners(std::span<const std::uint32_t> owners, std::uint32_t self) {
    fork_guard_.require_same_process();
    self_.store(self);
    for (std::uint32_t b = 0; b < map_.total(); ++b) owners_[b].store(owners[b]);
}

void Engine::share_buckets(std::size_t t) {
    fork_guard_.require_same_process();
    require_rows_on_device();
    std::fill_n(is_shared_.begin() + map_.first[t], tables_[t]->config().num_buckets, std::uint8_t{1});
}

void Engine::freeze(std::span<const std::uint32_t> buckets, bool frozen) {
    fork_guard_.require_same_process();
    require_rows_here();
    for (std::uint32_t b : buckets) {
        if (frozen)
            owners_[b].fetch_or(kFrozen);
        else
            owners_[b].fetch_and(~kFrozen);
    }
}

void Engine::refuse_moved(std::uint32_t b, std::uint32_t owner, std::uint32_t self) const {
    const std::size_t t = table_of(b);
    const std::string where =
        "table '" + tables_[t]->config().name + "': bucket " + std::to_string(b - map_.first[t]) + " ";
    if ((owner & ~kFrozen) == self) throw MovedError(where + "is migrating: retry the call");
    throw MovedError(where + "belongs to server " + std::to_string(owner) + " and this is server " +
                     std::to_string(self) + ": fetch the newest bucket map, then call that server");
}

std::vector<std::uint64_t> Engine::export_windows(std::span<const std::uint32_t> buckets,
                                                  std::vector<std::uint32_t>& trainers) {
    fork_guard_.require_same_process();
    require_rows_here();
    trainers = applied_steps_.trainers();
    std::vector<std::uint64_t> words;
    words.reserve(trainers.size() * buckets.size());
    for (std::uint32_t trainer : trainers) {
        const StepWindow* windows = applied_steps_.of(trainer);
        for (std::uint32_t b : buckets) words.push_back(windows[b].as_word());
    }
    return words;
}

void Engine::import_windows(std::span<const std::uint32_t> buckets, std::span<const std::uint32_t> trainers,
                            std::span<const std::uint64_t> words) {
    fork_guard_.require_same_process();
    require_rows_here();
    for (std::uint32_t trainer : applied_steps_.trainers()) {
        StepWindow* windows = applied_steps_.of(trainer);
        for (std::uint32_t b : buckets) windows[b].clear();
    }
    for (std::size_t i = 0; i < trainers.size(); ++i) {
        StepWindow* windows = applied_steps_.of(trainers[i]);
        for (std::size_t b = 0; b < buckets.size(); ++b) windows[buckets[b]].take(words[i * buckets.size() + b]);
    }
}

std::vector<std::uint64_t> Engine::export_counters(std::span<const std::uint32_t> buckets) {
    fork_guard_.require_same_process();
    require_rows_here();
    std::vector<std::uint64_t> counters(buckets.size() * Counters::kCount);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        Bucket& bucket = bucket_at(buckets[i]);
        std::lock_guard lock(bucket.mutex);
        std::memcpy(counters.data() + i * Counters::kCount, &bucket.counters, sizeof(Counters));
    }
    return counters;
}

void Engine::import_counters(std::span<const std::uint32_t> buckets, std::span<const std::uint64_t> counters) {
    fork_guard_.require_same_process();
    require_rows_here();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        Bucket& bucket = bucket_at(buckets[i]);
        std::lock_guard lock(bucket.mutex);
        std::array<std::uint64_t, Counters::kCount> words;
        std::copy_n(counters.data() + i * words.size(), words.size(), words.begin());
        bucket.counters = std::bit_cast<Counters>(words);
    }
}

void Engine::forget(std::span<const std::uint32_t> buckets) {
    fork_guard_.require_same_process();
    require_rows_here();
    for (std::uint32_t b : buckets) {
        Bucket& bucket = bucket_at(b);
        std::lock_guard lock(bucket.mutex);
        bucket.rows.clear();
        bucket.sightings.clear();
        bucket.counters = {};
        bucket.removed = {};
        bucket.swept_before = 0;
        bucket.log_start = tables_[table_of(b)]->ledger().version.load() + 1; // earlier removals are not known here
    }
    import_windows(buckets, {}, {});
}

void Engine::reach_table(std::size_t t, std::uint32_t version, std::uint32_t expire_before) {
    TableLedger& ledger = table(t).ledger();
    raise_to(ledger.version, version);
    raise_to(ledger.expire_before, expire_before);
}

} // namespace satrap
