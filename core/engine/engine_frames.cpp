// Lookups and updates of bags whose rows are on a device. The core finds the frame of each id, and for an update the
// places of each frame's gradients in order of appearance. The device pools, sums and steps.
#include "bags/bucket_runs.hpp"
#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

static_assert(kNoRow == kNoFrame);

FrameLookup Engine::lookup_frames(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs, LookupStep at,
                                  std::int32_t* frames, bool want_ticket) {
    require_rows_on_device();
    PlannedBags planned = plan_bags(*bags, inputs, at, true);
    FrameLookup result;
    result.num_ids = planned.plan->num_ids();
    const BagInputs& kept = planned.plan->inputs();
    if (kept.offsets != nullptr) result.offsets.assign(kept.offsets, kept.offsets + kept.num_bags + 1);
    if (kept.weights != nullptr) result.weights.assign(kept.weights, kept.weights + result.num_ids);
    std::unique_ptr<FoundRows> rows = begin_found(at);
    directory_.find(*planned.batch, at, frames, result.absent);
    result.ticket = end_lookup(std::move(planned), bags, want_ticket);
    if (want_ticket) result.ticket->looked_up = std::move(rows);
    return result;
}

std::unique_ptr<FoundRows> Engine::begin_found(const LookupStep& at) const {
    auto rows = std::make_unique<FoundRows>(FoundRows{.step = at.step, .versions = {}});
    for (std::size_t t = 0; t < tables_.size(); ++t) rows->versions.push_back(tables_[t].ledger().version.load());
    return rows;
}

// Returns whether an update in this step would find the rows in the same places, with all of its stamps and marks: no
// row has left its place since the lookup, and no save has begun a version.
bool Engine::stands(const FoundRows& rows, std::uint32_t step) const {
    if (!rows.all_found || rows.step != step) return false;
    for (std::size_t t = 0; t < tables_.size(); ++t)
        if (tables_[t].ledger().version.load() != rows.versions[t] || tables_[t].expire_before() > step ||
            !directory_.pool_of(tables_[t]).kept_since(step))
            return false;
    return true;
}

FrameRuns Engine::order_frames(Ticket& ticket) {
    require_rows_on_device();
    Ticket* const tickets[] = {&ticket};
    Claim claim(tickets, identity_); // for the duration of the call
    const GivenParts all[] = {GivenParts::all(ticket)};
    const std::vector<GivenPlaces> places = given_places(tickets, all);
    const std::vector<EntryPlaces> entries(places.begin(), places.end());
    return order(claim, ticket, [&](std::size_t) { return entries; });
}

FrameRuns Engine::order_id_frames(Ticket& ticket, const std::int32_t* places) {
    require_rows_on_device();
    Ticket* const tickets[] = {&ticket};
    Claim claim(tickets, identity_); // for the duration of the call
    const std::vector<std::int64_t>& offsets = ticket.batch->offsets;
    return order(claim, ticket, [&](std::size_t t) { return std::vector{EntryPlaces(places + offsets[t])}; });
}

FrameRuns Engine::order(Claim& claim, Ticket& ticket, const GivenOf& given_of) {
    Ticket* const tickets[] = {&ticket};
    FrameRuns runs = take_runs(claim, tickets, given_of, 0, false);
    if (ticket.looked_up == nullptr)
        ticket.looked_up = begin_found({}); // its rows were not stamped: an update finds them again
    FoundRows& rows = *ticket.looked_up;
    rows.updated.assign(tables_.size(), 0);
    rows.all_found = true;
    for (std::size_t t = 0; t < tables_.size(); ++t)
        for (std::uint32_t r = runs.first_run_of_table[t]; r < runs.first_run_of_table[t + 1]; ++r) {
            if (runs.begin[r] == runs.end[r]) continue;
            ++rows.updated[t];
            rows.all_found &= runs.frames[r] != kNoRow;
        }
    return runs;
}

std::optional<FrameRuns> Engine::update_ordered_frames(Ticket& ticket, std::uint32_t step, bool filter) {
    require_rows_on_device();
    Ticket* const tickets[] = {&ticket};
    Claim claim(tickets, identity_);
    SATRAP_ASSERT(ticket.looked_up != nullptr && ticket.looked_up->updated.size() == tables_.size());
    if (filter || !stands(*ticket.looked_up, step)) return take_runs(claim, tickets, nullptr, step, filter);
    claim.keep();
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        Bucket& bucket = tables_[t].bucket(0); // the table's count is the sum over buckets
        std::lock_guard lock(bucket.mutex);
        bucket.counters.updated += ticket.looked_up->updated[t];
    }
    batches_.give(std::move(ticket.batch));
    return std::nullopt;
}

FrameRuns Engine::update_frames(Tickets tickets, std::span<const GivenParts> given, std::uint32_t step, bool filter) {
    require_rows_on_device();
    Claim claim(tickets, identity_);
    const std::vector<GivenPlaces> places = given_places(tickets, given);
    const std::vector<EntryPlaces> entries(places.begin(), places.end());
    return take_runs(claim, tickets, [&](std::size_t) { return entries; }, step, filter);
}

FrameRuns Engine::runs_for(Tickets tickets, bool ordered) const {
    bool rounded = false;
    for (std::size_t t = 0; t < tables_.size(); ++t) rounded |= tables_[t].config().dtype != Dtype::float32;
    return reserve_runs(map(), tickets, rounded, ordered);
}

// Orders the gradients of a bucket by unique id. Its n joined ids are in the scratch.
void Engine::order_bucket(Tickets tickets, std::span<const EntryPlaces> given, std::size_t t, std::uint32_t b,
                          std::uint32_t n, FrameRuns& runs, Scratch& scratch) const {
    BucketRuns(tickets, given, tables_[t].config().frozen, b, n, scratch).write(t, runs);
    for (std::uint32_t i = 0; i < n && !runs.keys.empty(); ++i)
        runs.keys[runs.first_run[b] + i] = tables_[t].row_key_of(scratch.joined_ids[i]);
}

// Finds the frames of the rows, and orders their gradients, unless given_of is empty: then they are ordered. Stamps the
// rows and uses the tickets up, unless the step is 0.
FrameRuns Engine::take_runs(Claim& claim, Tickets tickets, const GivenOf& given_of, std::uint32_t step, bool filter) {
    const bool ordered = given_of == nullptr, ahead = step == 0;
    FrameRuns runs = runs_for(tickets, ordered);
    if (filter) runs.ids.resize(runs.frames.size());
    bool hinted = true;
    for (const Ticket* ticket : tickets) hinted &= ticket->batch->hinted;
    std::vector<std::vector<EntryPlaces>> places;
    for (std::size_t t = 0; t < tables_.size(); ++t)
        places.push_back(ordered ? std::vector<EntryPlaces>{} : given_of(t));
    BucketScheduler::ScratchLease lease(scheduler_, size_of(tickets));
    if (!ahead) claim.keep();
    const auto places_lock = directory_.lock();
    reach_step(step);
    scheduler_.for_each_occupied(map(), lease, tickets, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const std::uint32_t n = join_ids(tickets, b, scratch);
        std::uint8_t* started = scratch.started.reserve(n);
        const std::uint32_t run = runs.first_run[b];
        if (ordered) {
            tables_[t].config().frozen.mark(scratch.joined_ids.data(), n, started);
            for (std::uint32_t i = 0; i < n; ++i) started[i] ^= 1;
        } else {
            order_bucket(tickets, places[t], t, b, n, runs, scratch);
            for (std::uint32_t i = 0; i < n; ++i) started[i] = runs.begin[run + i] != runs.end[run + i];
        }
        const BucketVisit visit{.bucket = b - map().first[t],
                                .unique = scratch.joined_ids.data(),
                                .num_unique = n,
                                .local = nullptr,
                                .count = 0,
                                .hints = scratch.joined_hints.data()};
        const bool settled = !ahead && (!filter || tables_[t].config().on_nonfinite != OnNonfinite::skip);
        tables_[t].update_places(visit, started, step, hinted, settled, runs.frames.data() + run, scratch);
        if (filter) std::copy_n(scratch.joined_ids.data(), n, runs.ids.data() + run);
    });
    for (Ticket* ticket : tickets)
        if (!ahead) batches_.give(std::move(ticket->batch));
    return runs;
}

FrameLookup Engine::lookup_id_frames(const std::uint64_t* ids, std::span<const std::int64_t> offsets, LookupStep at,
                                     std::int32_t* frames, bool want_ticket) {
    require_rows_on_device();
    std::unique_ptr<Batch> batch = group(ids, offsets, true);
    ownership_.require([&](std::uint32_t b) { return occupied(*batch, b); }, at.train);
    take_step(at);
    FrameLookup result;
    result.num_ids = batch->size();
    std::unique_ptr<FoundRows> rows = begin_found(at);
    directory_.find(*batch, at, frames, result.absent);
    if (want_ticket) {
        result.ticket.reset(new Ticket(ticket_of(std::move(batch), identity_, out_size(offsets))));
        result.ticket->looked_up = std::move(rows);
    } else {
        batches_.give(std::move(batch));
    }
    return result;
}

FrameRuns Engine::update_id_frames(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                   const std::int32_t* places, std::uint32_t step, bool filter) {
    require_rows_on_device();
    const std::unique_ptr<Ticket> ticket = ticket_for(ids, offsets);
    Ticket* const tickets[] = {ticket.get()};
    Claim claim(tickets, identity_);
    ownership_.require([&](std::uint32_t b) { return occupied(tickets, b); }, true);
    const auto given_of = [&](std::size_t t) { return std::vector{EntryPlaces(places + offsets[t])}; };
    return take_runs(claim, tickets, given_of, step, filter);
}

void Engine::settle_frames(std::size_t t, std::span<const std::uint64_t> ids, std::uint64_t skipped,
                           std::uint32_t step) {
    require_rows_on_device();
    for (const std::uint64_t id : ids) tables_[t].settle_row(id, step);
    Bucket& bucket = tables_[t].bucket(0); // the table's count is the sum over buckets
    std::lock_guard lock(bucket.mutex);
    bucket.counters.skipped += skipped;
}

double Engine::sum_bound(Tickets tickets) const {
    fork_guard_.require_same_process();
    const Claim claim(tickets, identity_);
    double entries = 0.0, weight = 1.0;
    for (const Ticket* ticket : tickets) {
        entries += static_cast<double>(ticket->batch->size());
        weight = std::max(weight, static_cast<double>(ticket->batch->bags.largest_weight));
    }
    return entries * weight;
}

bool Engine::check_gradients(Tickets tickets, std::span<const BagGradients> gradients, float scale) {
    fork_guard_.require_same_process();
    const Claim claim(tickets, identity_); // until the end of the call: another thread may use or drop a ticket
    const FloatMode mode;
    BagSource source(map(), tickets, gradients, scale);
    source.open();
    return must_filter(source, tickets, map(), tables_.summations(), *kernels_, scheduler_.pool());
}

std::vector<std::uint32_t> Engine::import_frames(std::size_t t, std::span<const std::uint64_t> ids,
                                                 const std::uint32_t* steps) {
    require_rows_on_device();
    const auto places_lock = directory_.lock();
    return tables_[t].import_places(ids, steps);
}

// Writes the values and states that new rows of the ids begin with, side by side.
void Engine::initial_rows(std::size_t t, std::span<const std::uint64_t> ids, std::byte* values, float* state) {
    const TableConfig& config = table(t).config();
    const std::size_t value_bytes = config.dim * config.element_bytes(),
                      state_bytes = config.state_dim() * sizeof(float);
    scheduler_.pool().run([&](unsigned thread, unsigned threads) {
        const FloatMode mode;
        std::vector<std::byte> row(config.row_bytes());
        std::vector<float> scratch(config.dim);
        for (std::size_t i = ids.size() * thread / threads; i < ids.size() * (thread + 1) / threads; ++i) {
            tables_[t].initial_row(ids[i], row.data(), scratch.data());
            std::memcpy(values + i * value_bytes, row.data(), value_bytes);
            if (state_bytes != 0)
                std::memcpy(state + i * config.state_dim(), row.data() + config.value_bytes(), state_bytes);
        }
    });
}

} // namespace satrap
