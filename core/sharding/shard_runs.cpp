// What a device needs of a split: the row of each id of a batch, and which gradients each sum consists of.
#include <numeric>

#include "base/errors.hpp"
#include "sharding/shard_split.hpp"

namespace satrap {

// Returns the line of each bucket's first id in the group of its table.
std::vector<std::uint32_t> Split::first_lines(const ShardLayout& layout, std::span<const std::uint32_t> groups) const {
    const std::size_t num_tables = map_.num_tables();
    SATRAP_ASSERT(groups.size() == num_tables && layout.num_tables == num_tables);
    SATRAP_ASSERT(std::all_of(groups.begin(), groups.end(), [&](std::uint32_t g) { return g < num_tables; }));
    std::vector<std::uint64_t> next(num_tables), shift(layout.num_servers() * num_tables); // there are fewer groups
    for (std::size_t s = 0; s < layout.num_servers(); ++s)
        for (std::size_t t = 0; t < num_tables; ++t) {
            const std::int64_t* offsets = layout.offsets(s) + t;
            shift[s * num_tables + t] = next[groups[t]] - layout.first_id[s] - static_cast<std::uint64_t>(offsets[0]);
            next[groups[t]] += static_cast<std::uint64_t>(offsets[1] - offsets[0]);
        }
    std::vector<std::uint32_t> first(map_.total());
    for (std::size_t t = 0; t < num_tables; ++t)
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b)
            first[b] = static_cast<std::uint32_t>(layout.id_begin[b] + shift[layout.owners[b] * num_tables + t]);
    return first;
}

SplitLines Split::lines(SplitTicket& given, std::span<const std::uint32_t> groups) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&given.ticket};
    const Claim claim(tickets, identity_); // for the duration of the call
    if (given.plan == nullptr) throw TicketError("this ticket was already filled; look its batch up again");
    const Batch& batch = *given.ticket.batch;
    const BagInputs& kept = given.plan->inputs();
    const std::vector<std::uint32_t> first = first_lines(*given.layout, groups);
    SplitLines result;
    result.lines.resize(given.plan->num_ids());
    if (kept.offsets != nullptr) result.offsets.assign(kept.offsets, kept.offsets + kept.num_bags + 1);
    if (kept.weights != nullptr) result.weights.assign(kept.weights, kept.weights + result.lines.size());
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    scheduler_.for_each_occupied(map_, lease, batch, [&](std::size_t, std::uint32_t b, Scratch&) {
        for (std::uint32_t e = batch.begin[b]; e < batch.begin[b + 1]; ++e)
            result.lines[batch.indexes[e]] = static_cast<std::int32_t>(first[b] + batch.local[e]);
    });
    plans_.give(std::move(given.plan));
    return result;
}

FrameRuns Split::order(SplitTicket& given, std::span<const std::uint32_t> groups) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&given.ticket};
    const Claim claim(tickets, identity_); // for the duration of the call
    const GivenParts all[] = {GivenParts::all(given.ticket)};
    const std::vector<GivenPlaces> places = given_places(tickets, all);
    const std::vector<EntryPlaces> entry_places(places.begin(), places.end());
    const std::vector<std::uint32_t> first = first_lines(*given.layout, groups);
    FrameRuns runs = reserve_runs(map_, tickets, false);
    BucketScheduler::ScratchLease lease(scheduler_, size_of(tickets));
    scheduler_.for_each_occupied(map_, lease, tickets, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const std::uint32_t n = join_ids(tickets, b, scratch);
        BucketRuns(tickets, entry_places, summations_[t]->frozen(), b, n, scratch).write(t, runs);
        std::iota(runs.frames.begin() + runs.first_run[b], runs.frames.begin() + runs.first_run[b] + n, first[b]);
    });
    return runs;
}

SumRuns Split::runs(std::span<SplitTicket* const> given_tickets, std::span<const GivenParts> given,
                    std::vector<std::uint32_t> owners, std::uint32_t num_servers,
                    std::span<const std::uint32_t> groups) {
    fork_guard_.require_same_process();
    std::vector<Ticket*> all;
    for (SplitTicket* each : given_tickets) all.push_back(&each->ticket);
    const Tickets tickets(all);
    Claim claim(tickets, identity_);
    const std::vector<GivenPlaces> places = given_places(tickets, given);
    const std::vector<EntryPlaces> entry_places(places.begin(), places.end());
    SumRuns sums{nullptr, nullptr, reserve_runs(map_, tickets, false)};
    FrameRuns& runs = sums.runs;
    std::vector<std::uint64_t> ids(runs.frames.size());
    std::vector<std::uint32_t> counts(map_.total()); // ids with a gradient
    BucketScheduler::ScratchLease lease(scheduler_, size_of(tickets));
    scheduler_.for_each_occupied(map_, lease, tickets, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const std::uint32_t n = join_ids(tickets, b, scratch);
        BucketRuns(tickets, entry_places, summations_[t]->frozen(), b, n, scratch).write(t, runs);
        const std::uint32_t run = runs.first_run[b];
        for (std::uint32_t i = run; i < run + n; ++i) {
            if (runs.begin[i] == runs.end[i]) continue;
            ids[run + counts[b]] = scratch.joined_ids[i - run];
            runs.frames[i] = counts[b]++; // until the layout is known
        }
    });
    sums.layout = make_layout(std::move(owners), num_servers, counts);
    const std::vector<std::uint32_t> first = first_lines(*sums.layout, groups);
    const std::shared_ptr<const PooledBlock> memory = take_block(sums.layout->first_id.back() * sizeof(std::uint64_t));
    scheduler_.for_each_bucket(
        map_, lease, [&](std::uint32_t b) { return counts[b] != 0; },
        [&](std::size_t, std::uint32_t b, Scratch&) {
            const std::uint32_t run = runs.first_run[b];
            const std::uint32_t end = b + 1 < map_.total() ? runs.first_run[b + 1] : runs.first_run_of_table.back();
            for (std::uint32_t i = run; i < end; ++i)
                if (runs.frames[i] != kNoRow) runs.frames[i] += first[b];
            std::copy_n(ids.data() + run, counts[b], memory->as<std::uint64_t>() + sums.layout->id_begin[b]);
        });
    sums.ids = memory;
    claim.keep();
    for (SplitTicket* each : given_tickets) {
        batches_.give(std::move(each->ticket.batch));
        if (each->plan != nullptr) plans_.give(std::move(each->plan));
    }
    return sums;
}

} // namespace satrap
