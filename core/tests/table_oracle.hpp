// A model of one table with dim 1, SGD and a constant initial value, as simple as possible: the oracle of
// test_table.cpp and frame_calls.hpp. Maps instead of a bucket's memory, a search for the oldest at every eviction,
// rows that expire gone at once instead of when a reader finds out.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "table/bucket.hpp"

namespace testing {

class Oracle {
  public:
    struct Row {
        std::uint32_t stamp;
        float value;
    };
    struct Sighting { std::uint32_t stamp, count; };
    struct Full {};

    explicit Oracle(const TableConfig& config)
        : config_(config), rows_(config.num_buckets), sightings_(config.num_buckets) {}

    // What a training lookup does to every table before any of them is searched.
    void open_step(const LookupStep& at) {
        if (config_.expire_after != 0 && at.step > config_.expire_after)
            expire_before_ = std::max(expire_before_, std::min(at.step - config_.expire_after, at.oldest_open));
        expire();
    }

    // What the lookup reads; throws Full where the table must raise.
    std::vector<float> lookup(const Ids& ids, const LookupStep& at) {
        open_step(at);
        for (std::uint32_t b = 0; b < config_.num_buckets; ++b) {
            Ids misses;
            for (std::uint64_t id : unique_of(ids, b)) {
                ++counters.lookups;
                if (auto row = rows_[b].find(id); row != rows_[b].end()) {
                    ++counters.hits;
                    row->second.stamp = std::max(row->second.stamp, at.step);
                } else
                    misses.push_back(id);
            }
            for (std::uint64_t id : misses) insert(b, id, at);
        }
        return read(ids);
    }

    std::vector<float> read(const Ids& ids) const {
        std::vector<float> values;
        for (std::uint64_t id : ids) {
            const auto& rows = rows_[bucket(id)];
            const auto row = rows.find(id);
            values.push_back(row != rows.end()                         ? row->second.value
                             : config_.absent == satrap::Absent::zeros ? 0.0f
                                                                       : static_cast<float>(config_.initial_a));
        }
        return values;
    }

    void update(const Ids& ids, const std::vector<float>& gradients, std::uint32_t step) {
        for (std::uint32_t b = 0; b < config_.num_buckets; ++b)
            for (std::uint64_t id : unique_of(ids, b)) {
                if (config_.frozen.has(id)) continue;
                float sum = 0;
                bool any = false;
                for (std::size_t i = 0; i < ids.size(); ++i) {
                    if (ids[i] != id) continue;
                    if (!std::isfinite(gradients[i])) {
                        ++counters.skipped;
                        continue;
                    }
                    sum = any ? sum + gradients[i] : gradients[i];
                    any = true;
                }
                if (!any) continue;
                const auto row = rows_[b].find(id);
                if (row == rows_[b].end()) {
                    ++counters.not_applied_absent;
                    continue;
                }
                ++counters.updated;
                row->second.stamp = std::max(row->second.stamp, step);
                row->second.value = std::fma(-static_cast<float>(config_.optimizer.lr), sum, row->second.value);
            }
    }

    std::map<std::uint64_t, Row> rows() const { return joined(rows_); }
    std::map<std::uint64_t, Sighting> sightings() const { return joined(sightings_); }
    satrap::Counters counters;

  private:
    std::uint32_t bucket(std::uint64_t id) const {
        return satrap::bucket_of(satrap::order_hash(id, config_.is_direct()), config_.bucket_bits());
    }

    template <typename T>
    static std::map<std::uint64_t, T> joined(const std::vector<std::map<std::uint64_t, T>>& parts) {
        std::map<std::uint64_t, T> all;
        for (const auto& part : parts) all.insert(part.begin(), part.end());
        return all;
    }

    Ids unique_of(const Ids& ids, std::uint32_t b) const {
        Ids unique;
        for (std::uint64_t id : ids)
            if (bucket(id) == b && std::find(unique.begin(), unique.end(), id) == unique.end()) unique.push_back(id);
        return unique;
    }

    void expire() {
        for (auto& rows : rows_)
            counters.expired += std::erase_if(rows, [&](const auto& row) { return row.second.stamp < expire_before_; });
    }

    template <typename T> static auto oldest(std::map<std::uint64_t, T>& things) {
        return std::min_element(things.begin(), things.end(), [](const auto& a, const auto& b) {
            return std::pair(a.second.stamp, a.first) < std::pair(b.second.stamp, b.first);
        });
    }

    void insert(std::uint32_t b, std::uint64_t id, const LookupStep& at) {
        auto& rows = rows_[b];
        if (!admit(b, id, at)) {
            ++counters.refused;
            return;
        }
        if (config_.capacity != 0 && config_.on_full != satrap::OnFull::grow &&
            rows.size() >= config_.share(config_.capacity, b)) {
            const auto victim = oldest(rows);
            if (config_.on_full == satrap::OnFull::raise || victim->second.stamp >= at.oldest_open) throw Full{};
            ++counters.evicted;
            rows.erase(victim);
        }
        sightings_[b].erase(id);
        rows[id] = {std::max(at.step, expire_before_), static_cast<float>(config_.initial_a)};
        ++counters.inserted;
    }

    bool admit(std::uint32_t b, std::uint64_t id, const LookupStep& at) {
        const std::uint32_t step = at.step;
        if (config_.admission == satrap::AdmissionKind::probability)
            return satrap::unit_interval(satrap::step_key(satrap::row_key(~satrap::table_key(kSeed, config_.name), id),
                                                          step)) < config_.probability;
        if (config_.admission == satrap::AdmissionKind::always) return true;
        if (config_.first_epoch_only && !at.first_epoch) return false;
        if (config_.min_count == 1) return true;
        auto& sightings = sightings_[b];
        const auto seen = sightings.find(id);
        if (seen == sightings.end()) {
            if (sightings.size() >= std::max<std::uint64_t>(1, config_.share(config_.window, b)))
                sightings.erase(oldest(sightings));
            sightings[id] = {step, 1};
            return false;
        }
        Sighting& s = seen->second; // one that was enough already waits for a call that failed
        if (step > s.stamp && s.count < config_.min_count) ++s.count;
        s.stamp = std::max(s.stamp, step);
        return s.count >= config_.min_count;
    }

    TableConfig config_;
    std::uint32_t expire_before_ = 0;
    std::vector<std::map<std::uint64_t, Row>> rows_;
    std::vector<std::map<std::uint64_t, Sighting>> sightings_;
};

inline constexpr float kInitial = 0.25f;
inline constexpr std::uint64_t kApart = 0x9e3779b97f4a7c15ULL; // how far the ids of a hashed table are

// No ids, all ids, or some of those that `draw_ids` draws.
inline void draw_frozen(Random& random, TableConfig& config) {
    const std::uint64_t last = random.chance(0.3) ? ~std::uint64_t{0} : std::uint64_t{1} << 63;
    if (random.chance(0.3)) {
        config.frozen = {random.below(20), last};
    } else if (random.chance(0.4)) {
        std::set<std::uint64_t> ids; // hashed tables and direct ones have such ids
        for (std::uint32_t n = random.between(1, 100); n > 0; --n)
            for (const std::uint64_t apart : {std::uint64_t{1}, kApart}) ids.insert(random.below(300) * apart);
        config.frozen = satrap::FrozenIds::of(Ids(ids.begin(), ids.end()));
    }
}

inline TableConfig draw_config(Random& random) {
    using satrap::Absent, satrap::AdmissionKind, satrap::OnFull, satrap::OnNonfinite;
    TableConfig config = counting_table("table " + std::to_string(random.below(5)), 1, 1U << random.below(4));
    config.initial_a = kInitial;
    config.optimizer.lr = 0.5;
    config.admission =
        std::vector{AdmissionKind::always, AdmissionKind::probability, AdmissionKind::min_count}[random.below(3)];
    config.probability = random.real(0.1f, 1.0f);
    config.min_count = random.between(1, 4);
    config.first_epoch_only = random.chance(0.5);
    config.window = random.between(1, random.chance(0.5) ? 30 : 400);
    if (random.chance(0.8)) config.capacity = config.num_buckets + random.below(random.chance(0.5) ? 300 : 40);
    config.on_full = random.chance(0.8) ? OnFull::evict : random.chance(0.5) ? OnFull::raise : OnFull::grow;
    if (random.chance(0.4)) config.expire_after = random.between(1, 30);
    config.absent = random.chance(0.5) ? Absent::zeros : Absent::initial;
    config.on_nonfinite = random.chance(0.5) ? OnNonfinite::skip : OnNonfinite::raise;
    draw_frozen(random, config);
    return config;
}

// value_of: returns the value of an exported row.
template <typename ValueOf>
void check_same(Engine& engine, std::size_t t, const Oracle& oracle, const ValueOf& value_of) {
    const satrap::TableStats stats = engine.stats(t); // sweeps what expired
    const auto& [found, num_rows, num_sightings] = std::tie(stats.counters, stats.rows, stats.sightings);
    engine.table(t).check();
    const auto rows = oracle.rows();
    CHECK_EQ(num_rows, rows.size());
    const std::vector<Line> lines = rows_of(engine, t);
    CHECK_EQ(lines.size(), rows.size());
    for (const Line& line : lines) {
        CHECK(rows.contains(line.id));
        CHECK_EQ(line.step, rows.at(line.id).stamp);
        CHECK_EQ(value_of(line), rows.at(line.id).value);
    }
    const auto sightings = oracle.sightings();
    CHECK_EQ(num_sightings, sightings.size());
    for (const Line& line : sightings_of(engine, t)) {
        CHECK(sightings.contains(line.id));
        std::uint32_t count;
        std::memcpy(&count, line.values.data(), 4);
        CHECK_EQ(line.step, sightings.at(line.id).stamp);
        CHECK_EQ(count, sightings.at(line.id).count);
    }
    CHECK_EQ(found.lookups, oracle.counters.lookups);
    CHECK_EQ(found.hits, oracle.counters.hits);
    CHECK_EQ(found.inserted, oracle.counters.inserted);
    CHECK_EQ(found.refused, oracle.counters.refused);
    CHECK_EQ(found.evicted, oracle.counters.evicted);
    CHECK_EQ(found.expired, oracle.counters.expired);
    CHECK_EQ(found.updated, oracle.counters.updated);
    CHECK_EQ(found.not_applied_absent, oracle.counters.not_applied_absent);
    CHECK_EQ(found.skipped, oracle.counters.skipped);
}

inline void check_same(Engine& engine, const Oracle& oracle) {
    check_same(engine, 0, oracle, [](const Line& line) { return line.value(); });
}

inline Ids draw_ids(Random& random, std::uint32_t kinds, std::uint32_t most, bool direct = false) {
    const std::uint64_t apart = direct ? 1 : kApart;
    Ids ids;
    for (std::uint32_t n = random.below(most); n > 0; --n) ids.push_back(random.below(kinds) * apart);
    return ids;
}

inline std::vector<float> draw_gradients(Random& random, const TableConfig& config, std::size_t n) {
    std::vector<float> gradients(n);
    for (float& g : gradients) g = random.real(-1.0f, 1.0f);
    if (config.on_nonfinite == satrap::OnNonfinite::skip && random.chance(0.3))
        for (float& g : gradients)
            if (random.chance(0.2)) g = random.chance(0.5) ? std::numeric_limits<float>::infinity() : std::nanf("");
    return gradients;
}

} // namespace testing
