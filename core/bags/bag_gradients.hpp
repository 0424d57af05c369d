// The gradients of some tickets' blocks and sequences, by id: each entry's memory and factor.
// With one ticket and a gradient for every entry, the entries stay as the lookup grouped them. Otherwise they are
// joined, bucket by bucket: ids unique over all tickets, entries ticket after ticket without those that have no
// gradient.
#pragma once

#include "bags/gradient_source.hpp"

namespace satrap {

// The gradients of a batch of bags, one for each of block and sequences. nullptr: the caller passed none, and its ids
// get no update.
struct BagGradients {
    const float* block;
    std::vector<const float*> sequences;
    std::vector<std::uint32_t> groups = {}; // how many are interleaved in each sequence; empty: one
};

// Writes the unique ids of bucket b over all tickets, with a hint each, to scratch.joined_*; joined_numbers has the
// number of each ticket's first, second, ... unique id, ticket after ticket. Returns how many there are.
std::uint32_t join_ids(Tickets tickets, std::uint32_t b, Scratch& scratch);

class BagSource final : public GradientSource {
  public:
    BagSource(const BucketNumbering& map, Tickets tickets, std::span<const BagGradients> gradients, float scale)
        : map_(map), tickets_(tickets), gradients_(gradients), scale_(scale) {}

    // Returns whether there is one ticket and each of its ids has a gradient.
    bool whole() const { return tickets_.size() == 1 && complete_; }

    void open() override;
    std::vector<std::span<const float>> memory() const override;
    double largest_factor() const override;
    BucketGradients part(std::size_t t, std::uint32_t b, Scratch& scratch) const override;
    std::vector<std::uint64_t> order(std::size_t t, std::uint32_t b) const override;
    std::string where(std::uint64_t order) const override;

  private:
    BucketGradients joined(std::size_t t, std::uint32_t b, Scratch& scratch) const;

    const BucketNumbering& map_;
    Tickets tickets_;
    std::span<const BagGradients> gradients_;
    float scale_;
    std::vector<std::vector<Places<const float>>> places_; // [tickets][tables]
    bool complete_ = true;                                 // every entry has a gradient
    float largest_weight_ = 1.0f;
};

} // namespace satrap
