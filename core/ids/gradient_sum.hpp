// Sums the gradients of a bucket's entries by id in order of appearance: the first step of an update of the bucket.
// Each table has one; it knows the table's dim, which ids are frozen and what to do with gradients that are not finite,
// and no rows. Gradients of frozen ids are left out first: no sum, no count and no error has them.
//
// `filter`: some gradient or sum of the call may be not finite. Such a gradient is left out; so is a sum that
// overflows, with all its gradients.
#pragma once

#include <string>
#include <vector>

#include "ids/bucket_visit.hpp"

namespace satrap {

// An entry whose gradient cannot be applied.
struct NonFinite {
    std::uint32_t entry; // in the visit
    std::uint64_t id;
    float value;
    bool of_sum; // each gradient of the id is finite, their sum is not
};

class GradientSum {
  public:
    GradientSum(const TableConfig& table, const Kernels& kernels)
        : table_(table.name), dim_(table.dim), on_nonfinite_(table.on_nonfinite), frozen_(table.frozen),
          kernels_(&kernels) {}

    bool refuses_nonfinite() const { return on_nonfinite_ == OnNonfinite::raise; }
    const FrozenIds& frozen() const { return frozen_; }
    // Whether begin() copies entries.
    bool leaves_out(bool filter) const { return filter || frozen_.any(); }

    // The entries of a visit that are to be summed.
    struct Entries {
        const std::uint32_t* local;
        Gradients gradients;
        std::size_t count;
        std::size_t skipped; // entries of ids that train which are not finite
    };
    // The returned arrays live in the scratch, or are those of `gradients`.
    Entries begin(const BucketVisit& visit, const Gradients& gradients, bool filter, Scratch& scratch) const;
    // Writes sums[local] of each id; scratch.started tells which ids got one. Returns how many entries were skipped.
    std::size_t add(const BucketVisit& visit, const Entries& entries, bool filter, float* sums, Scratch& scratch) const;

    std::vector<NonFinite> find_nonfinite(const BucketVisit& visit, const Gradients& gradients, Scratch& scratch) const;
    // `where`: the gradient's place in the caller's arrays, such as "at position 3".
    [[noreturn]] void refuse_nonfinite(const NonFinite& first, const std::string& where) const;

  private:
    bool finite(const float* values, std::size_t count) const { return kernels_->largest(values, count) < 0x7f800000U; }
    const float* applied(const Gradients& gradients, std::uint32_t e, float* room) const;
    std::size_t drop_overflowed(const BucketVisit& visit, const Entries& entries, const float* sums,
                                Scratch& scratch) const;

    std::string table_; // its name, for messages
    std::uint32_t dim_;
    OnNonfinite on_nonfinite_;
    FrozenIds frozen_;
    const Kernels* kernels_;
};

} // namespace satrap
