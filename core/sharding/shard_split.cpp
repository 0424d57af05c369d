// Lookups, fills and sums of an embedding worker; see shard_split.hpp.
#include "sharding/shard_split.hpp"

#include "base/errors.hpp"
#include "base/float_mode.hpp"

namespace satrap {

Split::Split(const std::vector<TableConfig>& tables, std::vector<BagFeature> features, unsigned num_threads,
             const std::string& simd)
    : identity_(next_identity()), kernels_(&kernels_named(simd)), dims_(dims_of(tables)),
      bags_(std::make_shared<Bags>(std::move(features), tables.size(), identity_)), scheduler_(num_threads),
      codec_(dims_, *kernels_, scheduler_.pool()) {
    own_summations_.reserve(tables.size()); // so that pointers to them stay valid
    for (const TableConfig& table : tables) {
        map_.add_table(table.bucket_bits(), table.num_rows, table.name);
        own_summations_.emplace_back(table, *kernels_);
        summations_.push_back(&own_summations_.back());
    }
}

std::shared_ptr<Split> Split::owned(std::unique_ptr<Split> split) {
    return {split.release(), [](Split* last) {
                if (last->fork_guard_.is_same_process()) delete last;
            }};
}

std::shared_ptr<const ShardLayout> Split::make_layout(std::vector<std::uint32_t> owners, std::uint32_t num_servers,
                                                      const std::vector<std::uint32_t>& counts) const {
    return std::make_shared<const ShardLayout>(map_, dims_, std::move(owners), num_servers, counts);
}

std::unique_ptr<SplitTicket> Split::lookup(const BagInputs& inputs, std::vector<std::uint32_t> owners,
                                           std::uint32_t num_servers, bool with_indexes,
                                           const std::shared_ptr<const Bags>& others) {
    fork_guard_.require_same_process();
    const std::shared_ptr<const Bags>& bags = others == nullptr ? bags_ : others;
    SATRAP_ASSERT(bags->engine == identity_);
    std::unique_ptr<BagPlan> plan = plans_.take();
    plan->make(*bags, inputs, *kernels_, scheduler_.pool());
    std::unique_ptr<Batch> batch = batches_.take();
    plan->group(*batch, map_, scheduler_.pool(), with_indexes);
    plan->keep_inputs();
    BucketScheduler::ScratchLease lease(scheduler_, batch->size());
    scheduler_.for_each_occupied(map_, lease, *batch, [&](std::size_t, std::uint32_t b, Scratch& scratch) {
        batch->deduplicate(b, scratch.dedupe);
    });
    plan->count_cut();
    const std::size_t num_floats = inputs.batch_size * bags->total_dim;
    std::unique_ptr<SplitTicket> ticket(
        new SplitTicket{ticket_of(std::move(batch), identity_, num_floats, bags, inputs.batch_size, plan->sequences()),
                        std::move(plan), nullptr, nullptr});
    lay_out(*ticket, std::move(owners), num_servers, lease);
    return ticket;
}

void Split::reshard(SplitTicket& given, std::vector<std::uint32_t> owners, std::uint32_t num_servers) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&given.ticket};
    const Claim claim(tickets, identity_); // for the duration of the call
    BucketScheduler::ScratchLease lease(scheduler_, given.ticket.batch->size());
    lay_out(given, std::move(owners), num_servers, lease);
}

void Split::lay_out(SplitTicket& ticket, std::vector<std::uint32_t> owners, std::uint32_t num_servers,
                    BucketScheduler::ScratchLease& lease) {
    const Batch& batch = *ticket.ticket.batch;
    std::shared_ptr<const ShardLayout> layout = make_layout(std::move(owners), num_servers, batch.num_unique);
    std::shared_ptr<const PooledBlock> ids = take_block(layout->first_id.back() * sizeof(std::uint64_t));
    scheduler_.for_each_occupied(map_, lease, batch, [&](std::size_t, std::uint32_t b, Scratch&) {
        std::copy_n(batch.unique.data() + batch.begin[b], batch.num_unique[b],
                    ids->as<std::uint64_t>() + layout->id_begin[b]);
    });
    ticket.layout = std::move(layout);
    ticket.ids = std::move(ids);
}

void Split::fill(SplitTicket& given, std::span<const float* const> rows, float* block, float* const* sequences) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&given.ticket};
    const Claim claim(tickets, identity_); // for the duration of the call
    if (given.plan == nullptr) throw TicketError("this ticket was already filled; look its batch up again");
    const Batch& batch = *given.ticket.batch;
    const ShardLayout& layout = *given.layout;
    SATRAP_ASSERT(rows.size() == layout.num_servers());
    const BagRows to(*given.ticket.bags, *given.plan, batch, block, sequences, blocks_);
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    scheduler_.for_each_occupied(map_, lease, batch, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const std::uint32_t begin = batch.begin[b], server = layout.owners[b], n = batch.num_unique[b];
        const float* first = rows[server] + (layout.float_begin[b] - layout.first_float[server]);
        const std::byte** from = scratch.rows.reserve(n);
        for (std::size_t i = 0; i < n; ++i) from[i] = reinterpret_cast<const std::byte*>(first + i * dims_[t]);
        kernels_->gather(from, batch.local.data() + begin, to.to(t, b, scratch), batch.begin[b + 1] - begin, dims_[t],
                         Dtype::float32);
    });
    to.finish(*kernels_, scheduler_.pool());
    plans_.give(std::move(given.plan));
}

Sums Split::sums(std::span<SplitTicket* const> given, std::span<const BagGradients> gradients, float scale,
                 std::vector<std::uint32_t> owners, std::uint32_t num_servers) {
    fork_guard_.require_same_process();
    SATRAP_ASSERT(gradients.size() == given.size());
    std::vector<Ticket*> all;
    for (SplitTicket* each : given) all.push_back(&each->ticket);
    const Tickets tickets(all);
    Claim claim(tickets, identity_);
    const FloatMode mode;
    BagSource source(map_, tickets, gradients, scale);
    source.open();
    const bool filter = must_filter(source, tickets, map_, summations_, *kernels_, scheduler_.pool());

    const ShardLayout& sent = *given[0]->layout;
    const bool same_layout = given.size() == 1 && sent.num_servers() == num_servers && sent.owners == owners;
    std::vector<std::uint32_t> most(map_.total());
    for (const Ticket* ticket : tickets)
        for (std::uint32_t b = 0; b < map_.total(); ++b) most[b] += ticket->batch->num_unique[b];
    Sums sums;
    const bool any_left_out =
        std::any_of(summations_.begin(), summations_.end(), [&](auto* each) { return each->leaves_out(filter); });
    sums.same_ids = same_layout && source.whole() && !any_left_out; // then every id has a sum
    sums.layout = same_layout ? given[0]->layout : make_layout(std::move(owners), num_servers, most);
    sums.ids = sums.same_ids ? given[0]->ids : take_block(sums.layout->first_id.back() * sizeof(std::uint64_t));
    sums.gradients = take_block(sums.layout->first_float.back() * sizeof(float));
    std::vector<std::uint32_t> counts(map_.total());
    sum_up(source, tickets, filter, sums, counts);
    if (counts != most)
        close_gaps(sums, counts);
    else
        sums.same_ids = same_layout;
    claim.keep();
    for (SplitTicket* each : given) {
        batches_.give(std::move(each->ticket.batch));
        if (each->plan != nullptr) plans_.give(std::move(each->plan));
    }
    return sums;
}

// Into the layout' places, each bucket's from its beginning; counts[b] is how many ids of it have a sum.
void Split::sum_up(const BagSource& source, Tickets tickets, bool filter, Sums& sums,
                   std::vector<std::uint32_t>& counts) {
    std::vector<std::uint64_t> skipped(map_.total());
    BucketScheduler::ScratchLease lease(scheduler_, size_of(tickets));
    scheduler_.for_each_occupied(map_, lease, tickets, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const GradientSum& summation = *summations_[t];
        const std::size_t dim = dims_[t];
        const auto [visit, gradients] = source.part(t, b, scratch);
        float* out = sums.gradients->as<float>() + sums.layout->float_begin[b];
        const GradientSum::Entries entries = summation.begin(visit, gradients, filter, scratch);
        skipped[b] = summation.add(visit, entries, filter, out, scratch);
        SATRAP_ASSERT(visit.num_unique <= sums.layout->counts[b]);
        counts[b] = visit.num_unique;
        if (sums.same_ids) return;
        std::uint64_t* ids = sums.ids->as<std::uint64_t>() + sums.layout->id_begin[b];
        std::uint32_t n = 0;
        for (std::uint32_t i = 0; i < visit.num_unique; ++i) {
            if (!scratch.started[i]) continue;
            if (n != i) std::copy_n(out + i * dim, dim, out + n * dim);
            ids[n++] = visit.unique[i];
        }
        counts[b] = n;
    });
    sums.skipped.resize(summations_.size());
    for (std::size_t t = 0; t < summations_.size(); ++t)
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b) sums.skipped[t] += skipped[b];
}

// Compacts the sums if some buckets have fewer ids than the layout has room for.
void Split::close_gaps(Sums& sums, const std::vector<std::uint32_t>& counts) {
    const Sums wide = sums;
    sums.layout = make_layout(wide.layout->owners, wide.layout->num_servers(), counts);
    lay_out(wide, sums);
}

Sums Split::reshard_sums(const Sums& sums, std::vector<std::uint32_t> owners, std::uint32_t num_servers) {
    fork_guard_.require_same_process();
    Sums moved = sums;
    moved.same_ids = false;
    moved.layout = make_layout(std::move(owners), num_servers, sums.layout->counts);
    lay_out(sums, moved);
    return moved;
}

// Copies each bucket's sums from one layout to another.
void Split::lay_out(const Sums& wide, Sums& sums) {
    const std::vector<std::uint32_t>& counts = sums.layout->counts;
    SATRAP_ASSERT(std::equal(counts.begin(), counts.end(), wide.layout->counts.begin(), wide.layout->counts.end(),
                             std::less_equal()));
    sums.ids = take_block(sums.layout->first_id.back() * sizeof(std::uint64_t));
    sums.gradients = take_block(sums.layout->first_float.back() * sizeof(float));
    BucketScheduler::ScratchLease lease(scheduler_, sums.layout->first_id.back());
    scheduler_.for_each_bucket(
        map_, lease, [&](std::uint32_t b) { return counts[b] != 0; },
        [&](std::size_t t, std::uint32_t b, Scratch&) {
            std::copy_n(wide.ids->as<std::uint64_t>() + wide.layout->id_begin[b], counts[b],
                        sums.ids->as<std::uint64_t>() + sums.layout->id_begin[b]);
            std::copy_n(wide.gradients->as<float>() + wide.layout->float_begin[b], std::size_t{counts[b]} * dims_[t],
                        sums.gradients->as<float>() + sums.layout->float_begin[b]);
        });
}

void Split::drop(SplitTicket& given) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&given.ticket};
    Claim(tickets, identity_).keep();
    batches_.give(std::move(given.ticket.batch));
    if (given.plan != nullptr) plans_.give(std::move(given.plan));
}

} // namespace satrap
