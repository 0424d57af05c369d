// Plans one lookup's bags: checks the inputs, drops padding, truncates sequences that are too long, and chooses the
// route of each feature's rows:
//   direct    bags of at most one id, nothing to multiply: the row goes directly into the block
//   pooled    the rows go into loose memory, consecutively, and from there, pooled in order, into the block
//   sequence  the rows go directly into the sequence; those of a jagged one are its ids' in order: one run
// A BagCursor walks through the ids in order and returns the place of each. Nothing here knows tables or rows.
// One thread creates a plan, with the pool's help; then many read it. The order of pooling is that of the ids, so no
// result depends on the number of threads.
#pragma once

#include <algorithm>
#include <span>

#include "base/float_mode.hpp"
#include "ids/id_batch.hpp"

namespace satrap {

struct BagInputs {
    const std::uint64_t* ids;
    const std::int64_t* offsets; // [num_bags + 1], from 0 to the number of ids; nullptr: one id in each bag
    const float* weights;        // like ids; nullptr: nothing is weighted
    std::size_t batch_size;
    std::size_t num_bags;                   // features * batch_size
    std::span<const std::size_t> room = {}; // floats that the caller has for each sequence; empty: not known yet

    std::size_t begin(std::size_t bag) const {
        SATRAP_ASSERT(bag <= num_bags);
        return offsets == nullptr ? bag : static_cast<std::size_t>(offsets[bag]);
    }
};

class BagPlan {
  public:
    enum class Route : std::uint8_t { direct, pooled, sequence };
    struct Feature {
        Route route;
        bool uniform;             // every bag holds exactly one id
        std::size_t first_id;     // among the ids after cutting
        std::uint64_t rows;       // the place of its first row, if it is pooled (a loose one) or a sequence
        std::int64_t least, most; // lengths of its bags; -1: offsets fall
        std::uint64_t num_cut;    // ids beyond max_length, without padding
    };

    // Throws InputError; `inputs` must live as long as the plan is used, or until keep_inputs().
    void make(const Bags& bags, const BagInputs& inputs, const Kernels& kernels, ThreadPool& pool);

    std::size_t batch_size() const { return inputs_.batch_size; }
    std::uint64_t loose_floats() const { return loose_floats_; }
    const SequencePlaces& sequences() const { return sequences_; }
    const BagInputs& inputs() const { return inputs_; } // without what was cut
    std::size_t num_ids() const { return inputs_.begin(inputs_.num_bags); }
    // Groups the ids by bucket, with the place of each, and if asked its index.
    void group(Batch& batch, const BucketNumbering& map, ThreadPool& pool, bool with_indexes = false) const;
    // For a plan that outlives its inputs: copies what finish() needs of them; it does not need the ids.
    void keep_inputs();
    // Called when the rows have arrived: pools the loose ones into the block, and writes zeros where there are no rows.
    void finish(float* block, float* const* sequences, const float* loose, const Kernels& kernels,
                ThreadPool& pool) const;
    void count_cut() const;

  private:
    friend class BagCursor;

    void measure(ThreadPool& pool);
    void measure_bags(std::size_t begin, std::size_t end, Feature* features) const;
    [[noreturn]] void refuse_offsets() const;
    void check_weights(const Kernels& kernels);
    bool too_long(std::size_t f) const;
    bool padded(std::size_t f) const;
    bool cut();
    void cut_feature(std::size_t f, const BagInputs& given, std::size_t& kept);
    void lay_out();
    void require_room(std::span<const std::size_t> room) const;
    void describe(Batch& batch) const;
    void finish_feature(std::size_t f, std::size_t begin, std::size_t end, float* block, float* sequence,
                        const float* loose, const Kernels& kernels) const;

    const Bags* bags_ = nullptr;
    BagInputs inputs_{};
    std::vector<Feature> features_; // one more than there are: its first_id is the number of ids
    SequencePlaces sequences_;
    std::uint64_t loose_floats_ = 0;
    float largest_weight_ = 1.0f;
    Buffer<std::uint64_t> own_ids_; // the ids after truncation, or kept ones
    Buffer<std::int64_t> own_offsets_;
    Buffer<float> own_weights_;
};

// Walks through the ids of one table from any start. It advances by runs: the rest of a bag, or of a uniform feature.
class BagCursor {
  public:
    BagCursor(const BagPlan& plan, Batch& batch, std::size_t t, std::size_t first)
        : plan_(plan), positions_(batch.positions.data()),
          to_(batch.bags.loose[t] != 0 ? batch.bags.to.data() : nullptr),
          factors_(batch.bags.scaled[t] != 0 ? batch.bags.factors.data() : nullptr), f_(plan.bags_->first[t]),
          next_(first) {}

    void put(std::uint32_t e) {
        if (left_ == 0) enter();
        SATRAP_ASSERT(left_ != 0);
        --left_;
        positions_[e] = place_;
        place_ += step_;
        if (to_ != nullptr) {
            to_[e] = to_place_;
            to_place_ += to_step_;
        }
        if (factors_ != nullptr) factors_[e] = {weights_ == nullptr ? 1.0f : *weights_++, divisor_};
    }

  private:
    static constexpr std::size_t kNoBag = ~std::size_t{0};

    void enter();
    void find_bag(std::size_t i);

    const FloatMode mode_; // divisors are rounded
    const BagPlan& plan_;
    std::uint32_t* positions_;
    std::uint32_t* to_;
    Factor* factors_;
    std::size_t f_;
    std::size_t next_; // the id after the run
    std::size_t bag_ = kNoBag;
    std::size_t left_ = 0;
    std::uint32_t place_ = 0, step_ = 0, to_place_ = 0, to_step_ = 0;
    const float* weights_ = nullptr;
    float divisor_ = 1.0f;
};

} // namespace satrap
