// A model of one table with dim 1, SGD and a constant initial value, as simple as possible: the oracle of
// test_table.cpp. Maps instead of a bucket's memory, a search for the oldest at every eviction, rows that expire gone
// at once instead of when a reader finds out.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
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

    // What the lookup reads; throws Full where the table must raise.
    std::vector<float> lookup(const Ids& ids, const LookupStep& at) {
        if (config_.expire_after != 0 && at.step > config_.expire_after)
            expire_before_ = std::max(expire_before_, std::min(at.step - config_.expire_after, at.oldest_open));
        expire();
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
    std::uint32_t bucket(std::uint64_t id) const { return satrap::bucket_of(satrap::mix64(id), config_.bucket_bits()); }

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

} // namespace testing
