// Sums of the finite gradients; see gradient_sum.hpp.
#include "ids/gradient_sum.hpp"

#include <algorithm>

#include "base/errors.hpp"

namespace satrap {

// Returns the gradient of one entry as it is added to its id's sum.
const float* GradientSum::applied(const Gradients& gradients, std::uint32_t e, float* room) const {
    SATRAP_ASSERT(gradients.from[e] != nullptr);
    const Factor* factor = gradients.factors == nullptr ? nullptr : gradients.factors + e;
    const std::uint32_t zero = 0;
    std::uint8_t started = 0;
    kernels_->sum({gradients.from + e, factor, gradients.scale}, &zero, 1, dim_, room, &started);
    return room;
}

GradientSum::Entries GradientSum::begin(const BucketVisit& visit, const Gradients& gradients, bool filter,
                                        Scratch& scratch) const {
    SATRAP_ASSERT(visit.count == 0 || (gradients.from != nullptr && gradients.scale > 0.0f));
    std::memset(scratch.started.reserve(visit.num_unique), 0, visit.num_unique);
    std::uint8_t* frozen = scratch.frozen.reserve(visit.num_unique);
    const bool any_frozen = frozen_.any() && frozen_.mark(visit.unique, visit.num_unique, frozen);
    if (!filter && !any_frozen) return {visit.local, gradients, visit.count, 0};
    std::uint32_t* local = scratch.kept_local.reserve(visit.count);
    const float** from = scratch.kept_from.reserve(visit.count);
    Factor* factors = gradients.factors == nullptr ? nullptr : scratch.kept_factors.reserve(visit.count);
    float* room = scratch.values.reserve(dim_);
    std::size_t kept = 0, skipped = 0;
    for (std::uint32_t e = 0; e < visit.count; ++e) {
        if (any_frozen && frozen[visit.local[e]] != 0) continue;
        if (filter && !finite(applied(gradients, e, room), dim_)) {
            ++skipped;
            continue;
        }
        local[kept] = visit.local[e];
        if (factors != nullptr) factors[kept] = gradients.factors[e];
        from[kept++] = gradients.from[e];
    }
    return {local, {from, factors, gradients.scale}, kept, skipped};
}

std::size_t GradientSum::add(const BucketVisit& visit, const Entries& entries, bool filter, float* sums,
                             Scratch& scratch) const {
    SATRAP_ASSERT(leaves_out(filter) ? entries.count + entries.skipped <= visit.count : entries.count == visit.count);
    SATRAP_ASSERT(std::all_of(entries.local, entries.local + entries.count,
                              [&](std::uint32_t i) { return i < visit.num_unique; }));
    kernels_->sum(entries.gradients, entries.local, entries.count, dim_, sums, scratch.started.data());
    return filter ? entries.skipped + drop_overflowed(visit, entries, sums, scratch) : 0;
}

// Drops ids whose gradients are finite but not their sum. Returns how many entries they have.
std::size_t GradientSum::drop_overflowed(const BucketVisit& visit, const Entries& entries, const float* sums,
                                         Scratch& scratch) const {
    std::size_t dropped = 0;
    for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
        if (!scratch.started[i] || finite(sums + static_cast<std::size_t>(i) * dim_, dim_)) continue;
        scratch.started[i] = 0;
        for (std::size_t e = 0; e < entries.count; ++e) dropped += entries.local[e] == i;
    }
    return dropped;
}

std::vector<NonFinite> GradientSum::find_nonfinite(const BucketVisit& visit, const Gradients& gradients,
                                                   Scratch& scratch) const {
    SATRAP_ASSERT(refuses_nonfinite());
    std::vector<NonFinite> nonfinite;
    auto note = [&](std::uint32_t e, const float* row, bool of_sum) {
        std::uint32_t i = 0;
        while (i + 1 < dim_ && finite(row + i, 1)) ++i;
        nonfinite.push_back({e, visit.unique[visit.local[e]], row[i], of_sum});
    };
    float* room = scratch.values.reserve(dim_);
    float* sums = scratch.sums.reserve(static_cast<std::size_t>(visit.num_unique) * dim_);
    add(visit, begin(visit, gradients, false, scratch), false, sums, scratch);
    for (std::uint32_t e = 0; e < visit.count; ++e) {
        if (!scratch.started[visit.local[e]]) continue; // frozen
        const float* row = applied(gradients, e, room);
        const float* sum = sums + static_cast<std::size_t>(visit.local[e]) * dim_;
        if (!finite(row, dim_))
            note(e, row, false);
        else if (!finite(sum, dim_))
            note(e, sum, true);
    }
    return nonfinite;
}

void GradientSum::refuse_nonfinite(const NonFinite& first, const std::string& where) const {
    const std::string id = std::to_string(first.id);
    throw NonFiniteError("table '" + table_ + "': " +
                         (first.of_sum ? "the gradients of id " + id + " (first " + where + ") sum to "
                                       : "the gradient of id " + id + " " + where + " holds ") +
                         std::to_string(first.value) + "; expected finite values; nothing was applied; " +
                         "on_nonfinite='skip' ignores and counts such gradients");
}

} // namespace satrap
