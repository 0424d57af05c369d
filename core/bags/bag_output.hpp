// Where the rows of one lookup of bags go, and what becomes of them there: straight into block and sequences, or into
// loose memory that is held for the call and pooled into the block at its end. Whose rows they are, and where from, is
// the caller's.
#pragma once

#include "bags/bag_plan.hpp"
#include "base/pooled_block.hpp"
#include "ids/bucket_visit.hpp"

namespace satrap {

class BagRows {
  public:
    // Everything given must live as long; the batch was grouped by the plan.
    BagRows(const Bags& bags, const BagPlan& plan, const Batch& batch, float* block, float* const* sequences,
            const std::shared_ptr<BlockPool>& pool)
        : plan_(plan), batch_(batch), block_(block), sequences_(sequences),
          loose_(pool, plan.loose_floats() * sizeof(float)),
          places_(places_of(bags, plan.batch_size(), block, sequences)) {
        const std::uint64_t begin = bags.loose_begin(plan.batch_size());
        for (std::size_t t = 0; t < places_.size(); ++t)
            if (batch.bags.loose[t] != 0) places_[t].add(begin, begin + plan.loose_floats(), loose_.as<float>());
    }

    // Of bucket b of table t, one for each entry; the array lives in the scratch.
    float* const* to(std::size_t t, std::uint32_t b, Scratch& scratch) const {
        const std::uint32_t first = batch_.begin[b], count = batch_.begin[b + 1] - first;
        const auto& place = batch_.bags.loose[t] != 0 ? batch_.bags.to : batch_.positions;
        float** to = scratch.to.reserve(count);
        places_[t].resolve(place.data() + first, count, to);
        return to;
    }

    // Once all rows are there.
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
