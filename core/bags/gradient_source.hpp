// The gradients of one update, wherever they are stored, and the check of all of them before anything changes: a call
// that is refused has changed nothing. engine.cpp and shard_split.cpp apply them.
#pragma once

#include "ids/gradient_sum.hpp"
#include "ids/ticket.hpp"

namespace satrap {

// One bucket's part of an update.
struct BucketGradients {
    BucketVisit visit;
    Gradients gradients; // for the visit's entries
};

// Returns its gradients bucket by bucket, to many threads.
class GradientSource {
  public:
    virtual ~GradientSource() = default;
    // Called first, after this call has claimed the tickets: before, another call may use their batches.
    virtual void open() = 0;
    // Returns all memory that holds gradients.
    virtual std::vector<std::span<const float>> memory() const = 0;
    // Returns a bound of the factors of the gradients.
    virtual double largest_factor() const = 0;
    // Returns bucket b of table t; the arrays live until the next call with the same scratch.
    virtual BucketGradients part(std::size_t t, std::uint32_t b, Scratch& scratch) const = 0;
    // For messages: the order of the bucket's entries within their table, and the description of the entry of an order.
    virtual std::vector<std::uint64_t> order(std::size_t t, std::uint32_t b) const = 0;
    virtual std::string where(std::uint64_t order) const = 0;
};

// Returns whether some gradient or sum may be not finite, so that the update has to filter them. Throws for the first
// that a table refuses, in the source's order; it names a sum only if every gradient is finite.
bool must_filter(const GradientSource& source, Tickets tickets, const BucketNumbering& map,
                 std::span<const GradientSum* const> tables, const Kernels& kernels, ThreadPool& pool);

} // namespace satrap
