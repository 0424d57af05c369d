// Splits lookups and updates, of flat ids and of bags, over buckets and threads; see engine.hpp.
#include "engine/engine.hpp"

#include "bags/bag_gradients.hpp"
#include "bags/bag_output.hpp"
#include "base/errors.hpp"
#include "base/float_mode.hpp"

namespace satrap {

// Refuses tables some of whose rows are on a device and some in this memory, or in a file that another process
// attaches.
static void require_alike(std::span<const TableConfig> configs, bool survives_process) {
    for (const TableConfig& config : configs) {
        const std::string where = "table '" + config.name + "': ";
        if (config.frame_pool.has_value() != configs[0].frame_pool.has_value())
            throw InputError(where + (config.frame_pool ? "its rows are" : "its rows are not") +
                             " on a device, unlike those of table '" + configs[0].name +
                             "': an engine has the rows of all its tables in one place");
        if (!config.frame_pool) continue;
        if (survives_process)
            throw InputError(where + "its rows are on a device, whose memory ends with the process: they cannot be in "
                                     "a shared-memory file");
        if (*config.frame_pool >= configs.size())
            throw InputError(where + "frame pool " + std::to_string(*config.frame_pool) + "; expected one below " +
                             std::to_string(configs.size()) + ", the number of tables");
    }
}

Engine::Engine(std::vector<TableConfig> configs, const Options& options, std::unique_ptr<Arena> arena)
    : identity_(next_identity()), kernels_(&kernels_named(options.simd)), arena_(std::move(arena)),
      directory_(tables_, scheduler_), ownership_(tables_), scheduler_(options.num_threads),
      codec_(dims_of(configs), *kernels_, scheduler_.pool()) {
    require_alike(configs, arena_->survives_process());
    for (TableConfig& config : configs) {
        RowPlaces* places = directory_.add_table(config);
        tables_.add(std::make_unique<Table>(std::move(config), static_cast<std::uint32_t>(tables_.size()), options.seed,
                                            *kernels_, *arena_, places));
    }
    ownership_.init(*arena_);
}

std::unique_ptr<Engine> Engine::attach(std::vector<TableConfig> configs, const Options& options,
                                       std::unique_ptr<SharedArena> arena) {
    SharedArena& file = *arena;
    auto engine = std::make_unique<Engine>(std::move(configs), options, std::move(arena));
    try {
        engine->adopt(file);
    } catch (const InvariantError& error) {
        file.fail(std::string("is damaged: ") + error.what());
    }
    return engine;
}

void Engine::adopt(SharedArena& file) {
    std::vector<UndoSlot> undo;
    file.for_each([&](const ChunkTag& tag, std::byte* memory, std::size_t bytes) {
        if (tag.table >= tables_.size() || tag.bucket >= tables_[tag.table].config().num_buckets)
            throw InvariantError("a chunk of table " + std::to_string(tag.table) + ", bucket " +
                                 std::to_string(tag.bucket));
        Bucket& bucket = tables_[tag.table].bucket(tag.bucket);
        switch (tag.kind) {
        case ChunkKind::rows: bucket.rows.adopt_chunk(tag.sequence, memory, bytes); break;
        case ChunkKind::sightings: bucket.sightings.adopt_chunk(tag.sequence, memory, bytes); break;
        case ChunkKind::undo: undo.emplace_back(memory, bytes); break;
        case ChunkKind::windows: ownership_.steps().adopt(tag.sequence, memory, bytes); break;
        case ChunkKind::note: break;
        default: throw InvariantError("a chunk of unknown kind");
        }
    });
    for (UndoSlot& slot : undo) {
        auto rows_of = [&](std::uint32_t t, std::uint32_t b) -> Rows& {
            if (t >= tables_.size() || b >= tables_[t].config().num_buckets)
                throw InvariantError("an undo slot of a bucket that does not exist");
            return tables_[t].bucket(b).rows;
        };
        slot.recover(rows_of, [&](std::uint32_t trainer, std::uint32_t t, std::uint32_t b) -> StepWindow& {
            if (trainer >= kMostTrainers) throw InvariantError("an undo slot of trainer " + std::to_string(trainer));
            return ownership_.steps().of(trainer)[map().first[t] + b];
        });
        undo_.give(std::make_unique<UndoSlot>(slot));
    }
    for (std::uint32_t b = 0; b < map().total(); ++b) {
        Bucket& bucket = tables_.bucket(b);
        bucket.rows.rebuild();
        bucket.sightings.rebuild();
        bucket.drop_stale_sightings();
        bucket.log_start = tables_[tables_.table_of(b)].ledger().version.load() + 1; // earlier removals are not known
    }
}

std::shared_ptr<Engine> Engine::owned(std::unique_ptr<Engine> engine) {
    return {engine.release(), [](Engine* last) {
                if (last->fork_guard_.is_same_process())
                    delete last;
                else
                    last->arena_->leave();
            }};
}

std::uint32_t Engine::next_step() {
    std::atomic<std::uint32_t>& latest = arena().latest_step();
    std::uint32_t now = latest.load();
    do {
        if (now >= kLastStep) throw InputError("all " + std::to_string(kLastStep) + " steps are used");
    } while (!latest.compare_exchange_weak(now, now + 1));
    return now + 1;
}

void Engine::take_step(LookupStep& at) {
    if (at.train && at.step == 0) at.step = next_step();
    if (at.train && at.oldest_open == 0) at.oldest_open = at.step;
}

void Engine::begin_attempt(std::uint32_t attempt) {
    ownership().steps().clear(); // first: if the process dies in between, the attempt has not started
    arena_->attempt().store(attempt);
}

std::unique_ptr<Batch> Engine::group(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                     bool with_indexes) {
    SATRAP_ASSERT(offsets.size() == tables_.size() + 1);
    std::unique_ptr<Batch> batch = batches_.take();
    batch->offsets.assign(offsets.begin(), offsets.end());
    if (with_indexes)
        batch->group_with_indexes(ids, map(), scheduler_.pool());
    else
        batch->group(ids, map(), scheduler_.pool());
    return batch;
}

// Finds the floats of bucket b's positions, if those of position 0 begin at `base`.
template <typename T>
static T** floats_at(const Batch& batch, std::uint32_t b, T* base, std::size_t dim, Buffer<T*>& room) {
    const std::uint32_t first = batch.begin[b], count = batch.begin[b + 1] - first;
    T** out = room.reserve(count);
    for (std::uint32_t e = 0; e < count; ++e) out[e] = base + batch.positions[first + e] * dim;
    return out;
}

namespace {

// Contiguous gradients, in the order of the ticket's ids.
class FlatSource final : public GradientSource {
  public:
    FlatSource(const Engine& engine, const Ticket& ticket, const float* gradients)
        : engine_(engine), ticket_(ticket), gradients_(gradients) {}

    void open() override { begin_ = engine_.float_offsets(ticket_.batch->offsets); }
    std::vector<std::span<const float>> memory() const override { return {{gradients_, ticket_.num_floats}}; }
    double largest_factor() const override { return 1.0; }
    BucketGradients part(std::size_t t, std::uint32_t b, Scratch& scratch) const override {
        Batch& batch = *ticket_.batch;
        const float* const* from =
            floats_at(batch, b, gradients_ + begin_[t], engine_.table(t).config().dim, scratch.from);
        return {visit_of(batch, engine_.map().first[t], b), {from, nullptr, 1.0f}};
    }
    std::vector<std::uint64_t> order(std::size_t, std::uint32_t b) const override {
        const Batch& batch = *ticket_.batch;
        return {batch.positions.data() + batch.begin[b], batch.positions.data() + batch.begin[b + 1]};
    }
    std::string where(std::uint64_t order) const override { return "at position " + std::to_string(order); }

  private:
    const Engine& engine_;
    const Ticket& ticket_;
    const float* gradients_;
    std::vector<std::size_t> begin_; // where each table's gradients begin
};

} // namespace

// A row of a direct table is found in fewer instructions than its id is made unique.
void Engine::lookup_buckets(Batch& batch, const LookupStep& at, bool want_ticket, const Destinations& destinations) {
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    tables_.open_step(at);
    scheduler_.for_each_occupied(map(), lease, batch, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        if (at.train || want_ticket || !tables_[t].config().is_direct())
            batch.deduplicate(b, scratch.dedupe);
        else
            batch.keep_repeats(b);
        tables_[t].lookup(visit_of(batch, map().first[t], b), at, destinations(t, b, scratch), scratch);
    });
    batch.hinted = true;
}

std::unique_ptr<Ticket> Engine::lookup(const std::uint64_t* ids, std::span<const std::int64_t> offsets, LookupStep at,
                                       float* out, bool want_ticket) {
    require_rows_here();
    std::unique_ptr<Batch> batch = group(ids, offsets);
    const std::vector<std::size_t> begin = float_offsets(offsets);
    ownership_.require([&](std::uint32_t b) { return occupied(*batch, b); }, at.train);
    take_step(at);
    if (at.train) wait_for_cut_room();
    lookup_buckets(*batch, at, want_ticket, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        return floats_at(*batch, b, out + begin[t], tables_[t].config().dim, scratch.to);
    });
    if (want_ticket) return std::unique_ptr<Ticket>(new Ticket(ticket_of(std::move(batch), identity_, begin.back())));
    batches_.give(std::move(batch));
    return nullptr;
}

std::unique_ptr<Ticket> Engine::prepare(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    require_rows_here();
    return ticket_for(ids, offsets);
}

std::unique_ptr<Ticket> Engine::ticket_for(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    std::unique_ptr<Batch> batch = group(ids, offsets);
    deduplicate(*batch);
    return std::unique_ptr<Ticket>(new Ticket(ticket_of(std::move(batch), identity_, out_size(offsets))));
}

void Engine::deduplicate(Batch& batch) {
    BucketScheduler::ScratchLease lease(scheduler_, batch.size());
    scheduler_.deduplicate(map(), lease, batch);
}

// Returns the bytes that the largest bucket of an update needs in an undo slot; 0 if rows do not survive the process.
std::size_t Engine::undo_bytes(Tickets tickets) const {
    std::size_t most = 0;
    for (std::size_t t = 0; arena_->survives_process() && t < tables_.size(); ++t)
        for (std::uint32_t b = map().first[t]; b < map().first[t + 1]; ++b) {
            std::size_t unique = 0;
            for (const Ticket* ticket : tickets) unique += ticket->batch->num_unique[b];
            most = std::max(most, UndoSlot::bytes_for(unique, tables_[t].config().row_bytes()));
        }
    return most;
}

// See Scratch::reserve_update.
void Engine::reserve_update(BucketScheduler::ScratchLease& lease, Tickets tickets, bool filter) const {
    std::size_t entries = 0, unique = 0, sums = 0, dim = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        const std::size_t of_table = tables_[t].config().dim;
        dim = std::max(dim, of_table);
        filter = tables_[t].summation().leaves_out(filter);
        for (std::uint32_t b = map().first[t]; b < map().first[t + 1]; ++b) {
            std::size_t here = 0, ids = 0;
            for (const Ticket* ticket : tickets) {
                here += ticket->batch->begin[b + 1] - ticket->batch->begin[b];
                ids += ticket->batch->num_unique[b];
            }
            entries = std::max(entries, here);
            unique = std::max(unique, ids);
            sums = std::max(sums, ids * of_table);
        }
    }
    for (unsigned thread = 0; thread < lease.size(); ++thread)
        lease[thread].reserve_update(entries, unique, sums, dim, filter, tickets[0]->bags != nullptr);
}

void Engine::apply(GradientSource&& source, Tickets tickets, std::uint32_t step, std::span<const double> lrs,
                   std::uint32_t trainer) {
    require_rows_here();
    Claim claim(tickets, identity_);
    ownership_.require([&](std::uint32_t b) { return occupied(tickets, b); }, true);
    wait_for_cut_room();
    const FloatMode mode;
    source.open();
    SATRAP_ASSERT(lrs.size() == tables_.size());
    std::vector<StepScalars> scalars(tables_.size());
    UndoSet undo(undo_, *arena_);
    BucketScheduler::ScratchLease lease(scheduler_, size_of(tickets));
    const bool filter = must_filter(source, tickets, map(), tables_.summations(), *kernels_, scheduler_.pool());
    reserve_update(lease, tickets, filter);
    if (const std::size_t bytes = undo_bytes(tickets); bytes != 0) undo.fill(scheduler_.num_threads(), bytes);
    for (unsigned thread = 0; thread < lease.size(); ++thread) lease[thread].undo = undo.slot(thread);
    StepWindow* windows = trainer == kNoTrainer ? nullptr : ownership_.steps().of(trainer);
    for (std::uint32_t b = 0; windows != nullptr && b < map().total(); ++b)
        if (occupied(tickets, b) && windows[b].forgot(step))
            throw InputError("step " + std::to_string(step) + " of trainer " + std::to_string(trainer) +
                             " is too far behind its step " + std::to_string(windows[b].newest()) + ": at most " +
                             std::to_string(StepWindow::kSteps) + " may be in flight; nothing was applied");
    claim.keep(); // updates may be applied from here on
    bool hinted = true;
    for (std::size_t t = 0; t < tables_.size(); ++t) scalars[t] = tables_[t].step_scalars(step, lrs[t]);
    for (const Ticket* ticket : tickets) hinted &= ticket->batch->hinted;
    reach_step(step);
    scheduler_.for_each_occupied(map(), lease, tickets, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const BucketGradients part = source.part(t, b, scratch);
        const UpdateMark mark{trainer, windows == nullptr ? nullptr : windows + b};
        tables_[t].update(part.visit, part.gradients, scalars[t], hinted, filter, mark, scratch);
    });
    for (Ticket* ticket : tickets) batches_.give(std::move(ticket->batch));
}

void Engine::update(Ticket& ticket, const float* gradients, std::uint32_t step, std::span<const double> lrs,
                    std::uint32_t trainer) {
    if (ticket.bags != nullptr) throw TicketError("this ticket came from a lookup of bags; its update is update_bags");
    Ticket* const tickets[] = {&ticket};
    apply(FlatSource(*this, ticket, gradients), tickets, step, lrs, trainer);
}

std::unique_ptr<Ticket> Engine::lookup_bags(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs,
                                            LookupStep at, float* block, float* const* sequences, bool want_ticket) {
    require_rows_here();
    PlannedBags planned = plan_bags(*bags, inputs, at, false);
    if (at.train) wait_for_cut_room();
    const BagRows rows(*bags, *planned.plan, *planned.batch, block, sequences, blocks_);
    lookup_buckets(*planned.batch, at, want_ticket,
                   [&](std::size_t t, std::uint32_t b, Scratch& scratch) { return rows.to(t, b, scratch); });
    rows.finish(*kernels_, scheduler_.pool());
    return end_lookup(std::move(planned), bags, want_ticket);
}

std::unique_ptr<Ticket> Engine::bag_ticket(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs) {
    fork_guard_.require_same_process();
    LookupStep at{false, 0, 0};
    PlannedBags planned = plan_bags(*bags, inputs, at, false);
    deduplicate(*planned.batch);
    return end_lookup(std::move(planned), bags, true);
}

Engine::PlannedBags Engine::plan_bags(const Bags& bags, const BagInputs& inputs, LookupStep& at, bool with_indexes) {
    SATRAP_ASSERT(bags.engine == identity_);
    PlannedBags planned{plans_.take(), nullptr};
    planned.plan->make(bags, inputs, *kernels_, scheduler_.pool());
    planned.batch = batches_.take();
    planned.plan->group(*planned.batch, map(), scheduler_.pool(), with_indexes);
    take_step(at);
    return planned;
}

std::unique_ptr<Ticket> Engine::end_lookup(PlannedBags planned, const std::shared_ptr<const Bags>& bags,
                                           bool want_ticket) {
    const std::size_t batch_size = planned.plan->batch_size();
    SequencePlaces sequences = planned.plan->sequences();
    planned.plan->count_cut();
    plans_.give(std::move(planned.plan));
    if (want_ticket)
        return std::unique_ptr<Ticket>(
            new Ticket(ticket_of(std::move(planned.batch), identity_, batch_size * bags->total_dim, bags, batch_size,
                                 std::move(sequences))));
    batches_.give(std::move(planned.batch));
    return nullptr;
}

void Engine::update_bags(Tickets tickets, std::span<const BagGradients> gradients, float scale, std::uint32_t step,
                         std::span<const double> lrs) {
    for (const Ticket* ticket : tickets)
        if (ticket->bags == nullptr) throw TicketError("this ticket came from a flat lookup; its update is update");
    apply(BagSource(map(), tickets, gradients, scale), tickets, step, lrs, kNoTrainer);
}

bool Engine::check_id_gradients(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                const float* gradients) {
    fork_guard_.require_same_process();
    const std::unique_ptr<Ticket> ticket = ticket_for(ids, offsets);
    Ticket* const tickets[] = {ticket.get()};
    const FloatMode mode;
    FlatSource source(*this, *ticket, gradients);
    source.open();
    return must_filter(source, tickets, map(), tables_.summations(), *kernels_, scheduler_.pool());
}

void Engine::drop(Ticket& ticket) {
    fork_guard_.require_same_process();
    Ticket* const tickets[] = {&ticket};
    Claim(tickets, identity_).keep();
    batches_.give(std::move(ticket.batch));
}

TableStats Engine::stats(std::size_t t) {
    Table& table = this->table(t);
    const auto places_lock = directory_.lock();
    TableStats stats;
    stats.bytes = sizeof(Table) + table.config().num_buckets * sizeof(Bucket);
    for (std::uint32_t b = 0; b < table.config().num_buckets; ++b) {
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        bucket.sweep(table.expire_before(), table.ledger().version.load());
        stats.bytes += bucket.rows.bytes() + bucket.sightings.bytes() + bucket.removed.capacity() * sizeof(Removed);
        if (ownership_.owns(t, b)) { // not the buckets that are migrating to this engine, which the sender still counts
            stats.rows += bucket.rows.size();
            stats.sightings += bucket.sightings.size();
        } else if (ownership_.shares(t)) {
            continue; // it happens in the engines of all trainers, and the owner counts it
        }
        stats.counters.add(bucket.counters);
        stats.in_frames += bucket.in_frames;
        stats.moved_in += bucket.moved_in;
        stats.moved_out += bucket.moved_out;
    }
    if (table.config().frame_pool && directory_.pool_of(table).is_tiered())
        stats.bytes += stats.in_frames * FrameOrder::kBytes;
    return stats;
}

} // namespace satrap
