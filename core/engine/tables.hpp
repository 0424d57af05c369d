// The tables of an engine, in their order, and the numbering of all their buckets. Their rows are in one place: all in
// this memory, or all on a device.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/errors.hpp"
#include "table/table.hpp"

namespace satrap {

class Tables {
  public:
    void add(std::unique_ptr<Table> table) {
        map_.add_table(table->config().bucket_bits(), table->config().num_rows, table->config().name);
        summations_.push_back(&table->summation());
        tables_.push_back(std::move(table));
    }

    std::size_t size() const { return tables_.size(); }
    Table& operator[](std::size_t t) const {
        SATRAP_ASSERT(t < tables_.size());
        return *tables_[t];
    }
    const BucketNumbering& map() const { return map_; }
    const std::vector<const GradientSum*>& summations() const { return summations_; }

    // Returns the table that has bucket b of all tables' buckets.
    std::size_t table_of(std::uint32_t b) const {
        SATRAP_ASSERT(b < map_.total());
        const auto after = std::upper_bound(map_.first.begin(), map_.first.end(), b);
        return static_cast<std::size_t>(after - map_.first.begin()) - 1;
    }
    Bucket& bucket(std::uint32_t b) const {
        const std::size_t t = table_of(b);
        return tables_[t]->bucket(b - map_.first[t]);
    }

    // Called before the buckets of a lookup.
    void open_step(const LookupStep& at) const {
        for (std::size_t t = 0; at.train && t < tables_.size(); ++t) tables_[t]->open_step(at);
    }
    // Both throw InputError, unless the rows are in this memory, or on a device.
    void require_rows_here() const { tables_[0]->require_rows_here(); }
    void require_rows_on_device() const {
        if (!tables_[0]->config().frame_pool)
            throw InputError("table '" + tables_[0]->config().name + "': its rows are not on a device");
    }

  private:
    std::vector<std::unique_ptr<Table>> tables_;
    std::vector<const GradientSum*> summations_; // one for each table
    BucketNumbering map_;
};

} // namespace satrap
