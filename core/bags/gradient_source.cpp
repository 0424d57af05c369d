// Checks all gradients before they are applied; see gradient_source.hpp.
#include "bags/gradient_source.hpp"

#include <limits>
#include <optional>
#include <tuple>

#include "base/atomic_max.hpp"

namespace satrap {

// Returns whether all gradients are finite, and so small that no sum of `num_entries` of them can overflow, in one
// pass.
static bool all_sums_finite(const GradientSource& source, std::size_t num_entries, const Kernels& kernels,
                            ThreadPool& pool) {
    constexpr std::size_t kBlock = 4096; // stays in the first-level cache and in one register
    std::atomic<std::uint32_t> most{0};
    for (const std::span<const float> memory : source.memory())
        pool.run([&](unsigned thread, unsigned threads) {
            const std::size_t end = memory.size() * (thread + 1) / threads;
            std::uint32_t here = 0;
            for (std::size_t at = memory.size() * thread / threads; at < end && here < 0x7f800000U; at += kBlock)
                here = std::max(here, kernels.largest(memory.data() + at, std::min(kBlock, end - at)));
            raise_to(most, here);
        });
    const auto magnitude = static_cast<double>(std::bit_cast<float>(most.load()));
    return magnitude * source.largest_factor() * static_cast<double>(num_entries) <
           static_cast<double>(std::numeric_limits<float>::max());
}

// Throws for the first id, in the source's order, whose gradients or their sum are not finite, of a table that refuses
// them. It names a sum only if every gradient is finite.
static void refuse_nonfinite(const GradientSource& source, Tickets tickets, const BucketNumbering& map,
                             std::span<const GradientSum* const> tables) {
    Scratch scratch;
    for (std::size_t t = 0; t < tables.size(); ++t) {
        if (!tables[t]->refuses_nonfinite()) continue;
        std::optional<NonFinite> first;
        std::uint64_t first_order = 0;
        for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
            if (!occupied(tickets, b)) continue;
            const BucketGradients part = source.part(t, b, scratch);
            const std::vector<NonFinite> nonfinite = tables[t]->find_nonfinite(part.visit, part.gradients, scratch);
            if (nonfinite.empty()) continue;
            const std::vector<std::uint64_t> order = source.order(t, b);
            for (const NonFinite& each : nonfinite) {
                const std::uint64_t at = order[each.entry];
                if (first && std::tuple(each.of_sum, at, each.id) >= std::tuple(first->of_sum, first_order, first->id))
                    continue;
                first = each;
                first_order = at;
            }
        }
        if (first) tables[t]->refuse_nonfinite(*first, source.where(first_order));
    }
}

bool must_filter(const GradientSource& source, Tickets tickets, const BucketNumbering& map,
                 std::span<const GradientSum* const> tables, const Kernels& kernels, ThreadPool& pool) {
    SATRAP_ASSERT(tables.size() == map.num_tables());
    if (all_sums_finite(source, size_of(tickets), kernels, pool)) return false;
    refuse_nonfinite(source, tickets, map, tables);
    return true;
}

} // namespace satrap
