// The gradients of one update, wherever they lie, and the look at all of them before anything changes: a call that is
// refused has changed nothing. Who applies them, and to what, is engine.cpp's and shard_split.cpp's to say.
#pragma once

#include "ids/gradient_sum.hpp"
#include "ids/ticket.hpp"

namespace satrap {

// One bucket's part of an update.
struct BucketGradients {
    BucketVisit visit;
    Gradients gradients; // of the visit's entries
};

// Asked for its gradients bucket by bucket, from many threads.
class GradientSource {
  public:
    virtual ~GradientSource() = default;
    // Called first, and once the tickets are this call's own: before, their batches may be another's.
    virtual void open() = 0;
    // All memory that gradients are in.
    virtual std::vector<std::span<const float>> memory() const = 0;
    // No gradient is multiplied by more than this.
    virtual double largest_factor() const = 0;
    // Bucket b of table t; the arrays live until the next call with the same scratch.
    virtual BucketGradients part(std::size_t t, std::uint32_t b, Scratch& scratch) const = 0;
    // For messages: the order of the part's entries within their table, and what to say of one of that order.
    virtual std::vector<std::uint64_t> order(std::size_t t, std::uint32_t b) const = 0;
    virtual std::string where(std::uint64_t order) const = 0;
};

// Whether all gradients are finite, and so small that no sum of `num_entries` of them can overflow: one pass over them.
bool all_sums_finite(const GradientSource& source, std::size_t num_entries, const Kernels& kernels, ThreadPool& pool);

// Throws for the first id, in the source's order, whose gradients or their sum are not finite, of a table that wants
// to know. A sum is blamed only if every gradient is finite.
void refuse_nonfinite(const GradientSource& source, Tickets tickets, const BucketNumbering& map,
                      std::span<const GradientSum* const> tables);

} // namespace satrap
