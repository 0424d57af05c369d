// The destination of the rows of one lookup of bags: directly in block and sequences, or in
// loose memory that is held for the call and pooled into the block at its end. The caller
// supplies the rows.
#pragma once

#include "bags/bag_plan.hpp"
#include "base/pooled_block.hpp"
#include "ids/bucket_visit.hpp"

namespace satrap {

class BagRows {
  public:
    // All arguments must outlive this object; the plan has grouped the batch.
    BagRows(const Bags& bags, const BagPlan& plan, const Batch& batch, float* block, float* const* sequences,
            const std::shared_ptr<BlockPool>& pool)
        : plan_(plan), batch_(batch), block_(block), sequences_(sequences),
          loose_(pool, plan.loose_floats() * sizeof(float)),
          places_(places_of(bags, plan.sequences(), block, sequences)) {
        SATRAP_ASSERT(places_.size() + 1 == batch.offsets.size());
        const std::uint64_t begin = plan.sequences().back();
        for (std::size_t t = 0; t < places_.size(); ++t)
            if (batch.bags.loose[t] != 0) places_[t].add(begin, begin + plan.loose_floats(), loose_.as<float>());
    }

    // Returns the destinations of bucket b of table t, one for each entry; the array lives in the scratch.
    float* const* to(std::size_t t, std::uint32_t b, Scratch& scratch) const {
        const std::uint32_t first = batch_.begin[b], count = batch_.begin[b + 1] - first;
        const auto& place = batch_.bags.loose[t] != 0 ? batch_.bags.to : batch_.positions;
        float** to = scratch.to.reserve(count);
        places_[t].resolve(place.data() + first, count, to);
        return to;
    }

    // Pools the rows; called when all have arrived.
    void finish(const Kernels& kernels, ThreadPool& pool) const {
        plan_.finish(block_, sequences_, loose_.as<float>(), kernels, pool);
    }

  private:
    const BagPlan& plan_;
    const Batch& batch_;
    float* block_;
    float* const* sequences_;
    PooledBlock loose_;
    std::vector<Places<float>> places_;
};

} // namespace satrap
