// The gradients of a bucket's entries, summed by id in order of appearance: what an update of the bucket begins with.
// One for each table; it knows the table's dim and what becomes of gradients that are not finite, and no rows.
//
// `filter` says that some gradient or sum of the call may be not finite. Such a gradient is left out; a sum that
// overflows is, too, with all its gradients.
#pragma once

#include <string>
#include <vector>

#include "ids/bucket_visit.hpp"

namespace satrap {

// An entry whose gradient cannot be applied.
struct NonFinite {
    std::uint32_t entry; // of the visit
    std::uint64_t id;
    float value;
    bool of_sum; // each gradient of the id is finite, their sum is not
};

class GradientSum {
  public:
    GradientSum(std::string table, std::uint32_t dim, OnNonfinite on_nonfinite, const Kernels& kernels)
        : table_(std::move(table)), dim_(dim), on_nonfinite_(on_nonfinite), kernels_(&kernels) {}

    std::uint32_t dim() const { return dim_; }
    bool refuses_nonfinite() const { return on_nonfinite_ == OnNonfinite::raise; }

    // The entries of a visit that are to be summed.
    struct Entries {
        const std::uint32_t* local;
        Gradients gradients;
        std::size_t count;
    };
    // The arrays live in the scratch, or are the given ones.
    Entries begin(const BucketVisit& visit, const Gradients& gradients, bool filter, Scratch& scratch) const;
    // sums[local] of each id; scratch.started has which ids got one. Returns how many entries are in them.
    std::size_t add(const BucketVisit& visit, const Entries& entries, bool filter, float* sums, Scratch& scratch) const;

    std::vector<NonFinite> find_nonfinite(const BucketVisit& visit, const Gradients& gradients, Scratch& scratch) const;
    // `where` says where the gradient was given: "at position 3".
    [[noreturn]] void refuse_nonfinite(const NonFinite& first, const std::string& where) const;

  private:
    bool finite(const float* values, std::size_t count) const { return kernels_->largest(values, count) < 0x7f800000U; }
    const float* applied(const Gradients& gradients, std::uint32_t e, float* room) const;
    std::size_t drop_overflowed(const BucketVisit& visit, const Entries& entries, const float* sums,
                                Scratch& scratch) const;

    std::string table_; // its name, for messages
    std::uint32_t dim_;
    OnNonfinite on_nonfinite_;
    const Kernels* kernels_;
};

} // namespace satrap
