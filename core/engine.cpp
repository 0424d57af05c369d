// Splitting calls over buckets and threads; see engine.hpp.
#include "engine.hpp"

#include <limits>
#include <optional>
#include <tuple>

#include "errors.hpp"
#include "float_mode.hpp"

namespace satrap {

static std::uint64_t next_identity() {
    static std::atomic<std::uint64_t> last{0}; // tells a foreign ticket from ours; decides nothing else
    return ++last;
}

Engine::Engine(std::vector<TableConfig> configs, const Options& options, std::unique_ptr<Arena> arena)
    : identity_(next_identity()), kernels_(&kernels_named(options.simd)), arena_(std::move(arena)),
      pool_(options.num_threads) {
    map_.first.push_back(0);
    for (TableConfig& config : configs) {
        map_.first.push_back(map_.first.back() + config.num_buckets);
        map_.bits.push_back(static_cast<std::uint8_t>(config.bucket_bits()));
        tables_.push_back(std::make_unique<Table>(std::move(config), static_cast<std::uint32_t>(tables_.size()),
                                                  options.seed, *kernels_, *arena_));
    }
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
        if (tag.table >= tables_.size() || tag.bucket >= tables_[tag.table]->config().num_buckets)
            throw InvariantError("a chunk of table " + std::to_string(tag.table) + ", bucket " +
                                 std::to_string(tag.bucket));
        Bucket& bucket = tables_[tag.table]->bucket(tag.bucket);
        switch (tag.kind) {
        case ChunkKind::rows: bucket.rows.adopt_chunk(tag.sequence, memory, bytes); break;
        case ChunkKind::sightings: bucket.sightings.adopt_chunk(tag.sequence, memory, bytes); break;
        case ChunkKind::undo: undo.emplace_back(memory, bytes); break;
        default: throw InvariantError("a chunk of unknown kind");
        }
    });
    for (UndoSlot& slot : undo) {
        slot.recover([&](std::uint32_t t, std::uint32_t b) -> Rows& {
            if (t >= tables_.size() || b >= tables_[t]->config().num_buckets)
                throw InvariantError("an undo slot of a bucket that is not there");
            return tables_[t]->bucket(b).rows;
        });
        undo_.give(std::make_unique<UndoSlot>(slot));
    }
    for (auto& table : tables_)
        for (std::uint32_t b = 0; b < table->config().num_buckets; ++b) {
            Bucket& bucket = table->bucket(b);
            bucket.rows.rebuild();
            bucket.sightings.rebuild();
            bucket.drop_stale_sightings();
            bucket.log_start = table->ledger().version.load() + 1; // what was removed before is not known any more
        }
}

std::shared_ptr<Engine> Engine::owned(std::unique_ptr<Engine> engine) {
    return {engine.release(), [](Engine* last) {
                if (last->home_.is_here())
                    delete last;
                else
                    last->arena_->leave();
            }};
}

std::uint32_t Engine::next_step() {
    home_.require_here();
    std::uint32_t now = arena_->latest_step().load();
    do {
        if (now >= kLastStep) throw InputError("all " + std::to_string(kLastStep) + " steps are used");
    } while (!arena_->latest_step().compare_exchange_weak(now, now + 1));
    return now + 1;
}

void Engine::reach_step(std::uint32_t step) {
    home_.require_here();
    std::uint32_t now = arena_->latest_step().load();
    while (now < step && !arena_->latest_step().compare_exchange_weak(now, step)) {
    }
}

std::uint32_t Engine::begin_version(std::size_t t) {
    std::atomic<std::uint32_t>& version = table(t).ledger().version;
    std::uint32_t now = version.load();
    do {
        if (now >= kLastVersion)
            throw InputError("table '" + tables_[t]->config().name + "': all " + std::to_string(kLastVersion) +
                             " versions are used");
    } while (!version.compare_exchange_weak(now, now + 1));
    return now + 1;
}

std::vector<std::size_t> Engine::float_offsets(std::span<const std::int64_t> offsets) const {
    std::vector<std::size_t> at(tables_.size() + 1);
    for (std::size_t t = 0; t < tables_.size(); ++t)
        at[t + 1] = at[t] + static_cast<std::size_t>(offsets[t + 1] - offsets[t]) * tables_[t]->config().dim;
    return at;
}

std::unique_ptr<Batch> Engine::group(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    home_.require_here();
    std::unique_ptr<Batch> batch = batches_.take();
    batch->offsets.assign(offsets.begin(), offsets.end());
    batch->group(ids, map_, pool_);
    return batch;
}

// Where the floats of bucket b's positions lie, if those of position 0 begin at `base`.
template <typename T>
static T** floats_at(const Batch& batch, std::uint32_t b, T* base, std::size_t dim, Buffer<T*>& room) {
    const std::uint32_t first = batch.begin[b], count = batch.begin[b + 1] - first;
    T** out = room.reserve(count);
    for (std::uint32_t e = 0; e < count; ++e) out[e] = base + batch.positions[first + e] * dim;
    return out;
}

namespace {

// Gradients side by side, in the order of the ticket's ids.
class FlatSource final : public GradientSource {
  public:
    FlatSource(const Engine& engine, const Ticket& ticket, const float* gradients)
        : engine_(engine), ticket_(ticket), gradients_(gradients) {}

    void open() override { begin_ = engine_.float_offsets(ticket_.batch->offsets); }
    std::vector<std::span<const float>> memory() const override { return {{gradients_, ticket_.num_floats}}; }
    double largest_factor() const override { return 1.0; }
    Part part(std::size_t t, std::uint32_t b, Scratch& scratch) const override {
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
    std::vector<std::size_t> begin_; // of each table's gradients
};

} // namespace

static bool occupied(const Batch& batch, std::uint32_t b) { return batch.begin[b] != batch.begin[b + 1]; }

static bool occupied(std::span<Ticket* const> tickets, std::uint32_t b) {
    for (const Ticket* ticket : tickets)
        if (occupied(*ticket->batch, b)) return true;
    return false;
}

static std::size_t size_of(std::span<Ticket* const> tickets) {
    std::size_t size = 0;
    for (const Ticket* ticket : tickets) size += ticket->size;
    return size;
}

Engine::ScratchSet::ScratchSet(Recycler<Scratch>& spare, unsigned threads) : spare_(spare) {
    taken_.reserve(threads);
    while (taken_.size() < threads) taken_.push_back(spare_.take());
}

Engine::ScratchSet::~ScratchSet() {
    for (auto& scratch : taken_) spare_.give(std::move(scratch));
}

// Of a call with this many ids: for a few, waking threads costs more than it saves.
unsigned Engine::threads_for(std::size_t size) const { return size < 512 ? 1 : pool_.num_threads(); }

// Runs work(table, bucket, scratch) for every bucket that has(bucket) entries, on all threads. Of several errors the
// one of the lowest bucket is thrown, so the message does not depend on timing more than the state does.
// `undo`, if any, holds a slot for each thread.
template <typename Has, typename Work>
void Engine::for_each_bucket(ScratchSet& scratch, Has has, Work work, UndoSet* undo) {
    // So small that the last thread to finish is not late, so large that the counter is no bottleneck.
    const std::uint32_t grain = std::max(1U, map_.total() / (64 * pool_.num_threads()));
    std::atomic<std::uint32_t> next{0}, failed_bucket{0xffffffffU};
    std::mutex error_mutex;
    std::exception_ptr error;
    auto job = [&](unsigned thread, unsigned) {
        const FloatMode mode; // of this thread, which may have another one than the next
        Scratch& own = scratch[thread];
        own.undo = undo == nullptr ? nullptr : undo->slot(thread);
        std::size_t t = 0;
        for (std::uint32_t b; (b = next.fetch_add(grain)) < map_.total();) {
            for (std::uint32_t end = std::min(b + grain, map_.total()); b < end; ++b) {
                if (!has(b) || b > failed_bucket.load(std::memory_order_relaxed)) continue;
                while (b >= map_.first[t + 1]) ++t;
                try {
                    work(t, b, own);
                } catch (...) {
                    std::lock_guard lock(error_mutex);
                    if (b < failed_bucket.load()) {
                        failed_bucket.store(b);
                        error = std::current_exception();
                    }
                }
            }
        }
    };
    if (scratch.size() == 1)
        job(0, 1);
    else
        pool_.run(job);
    if (error != nullptr) std::rethrow_exception(error);
}

std::unique_ptr<Ticket> Engine::make_ticket(std::unique_ptr<Batch> batch, std::size_t num_floats) const {
    const std::size_t size = batch->size(), num_unique = batch->unique_size();
    std::size_t table = 0;
    while (table < tables_.size() &&
           static_cast<std::size_t>(batch->offsets[table + 1] - batch->offsets[table]) != size)
        ++table;
    return std::unique_ptr<Ticket>(
        new Ticket{std::move(batch), identity_, size, num_unique, num_floats, nullptr, 0, table});
}

void Engine::open_step(const LookupStep& at) {
    if (!at.train) return;
    reach_step(at.step);
    for (auto& table : tables_) table->open_step(at);
}

void Engine::lookup_buckets(Batch& batch, const LookupStep& at, const Destinations& destinations) {
    ScratchSet threads(scratch_, threads_for(batch.size()));
    open_step(at);
    for_each_bucket(
        threads, [&](std::uint32_t b) { return occupied(batch, b); },
        [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
            batch.deduplicate(b, scratch.dedupe);
            tables_[t]->lookup(visit_of(batch, map_.first[t], b), at, destinations(t, b, scratch), scratch);
        });
    batch.hinted = true;
}

std::unique_ptr<Ticket> Engine::lookup(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                       const LookupStep& at, float* out, bool want_ticket) {
    std::unique_ptr<Batch> batch = group(ids, offsets);
    const std::vector<std::size_t> begin = float_offsets(offsets);
    lookup_buckets(*batch, at, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        return floats_at(*batch, b, out + begin[t], tables_[t]->config().dim, scratch.to);
    });
    if (want_ticket) return make_ticket(std::move(batch), begin.back());
    batches_.give(std::move(batch));
    return nullptr;
}

std::unique_ptr<Ticket> Engine::prepare(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    std::unique_ptr<Batch> batch = group(ids, offsets);
    ScratchSet threads(scratch_, threads_for(batch->size()));
    for_each_bucket(
        threads, [&](std::uint32_t b) { return occupied(*batch, b); },
        [&](std::size_t, std::uint32_t b, Scratch& scratch) { batch->deduplicate(b, scratch.dedupe); });
    return make_ticket(std::move(batch), out_size(offsets));
}

// Whether all gradients are finite, and so small that no sum of them can overflow: one pass over them, before any
// change.
bool Engine::all_sums_finite(const GradientSource& source, Tickets tickets) {
    constexpr std::size_t kBlock = 4096; // stays in the first-level cache and in one register
    std::atomic<std::uint32_t> most{0};
    for (const std::span<const float> memory : source.memory())
        pool_.run([&](unsigned thread, unsigned threads) {
            const std::size_t end = memory.size() * (thread + 1) / threads;
            std::uint32_t here = 0;
            for (std::size_t at = memory.size() * thread / threads; at < end && here < 0x7f800000U; at += kBlock)
                here = std::max(here, kernels_->largest(memory.data() + at, std::min(kBlock, end - at)));
            for (std::uint32_t seen = most.load(); seen < here && !most.compare_exchange_weak(seen, here);) {
            }
        });
    const auto magnitude = static_cast<double>(std::bit_cast<float>(most.load()));
    return magnitude * source.largest_factor() * static_cast<double>(size_of(tickets)) <
           static_cast<double>(std::numeric_limits<float>::max());
}

// Throws for the first id, in the source's order, whose gradients or their sum are not finite, of a table that wants
// to know. A sum is blamed only if every gradient is finite.
void Engine::refuse_nonfinite(const GradientSource& source, Tickets tickets) {
    Scratch scratch;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        if (tables_[t]->config().on_nonfinite != OnNonfinite::raise) continue;
        std::optional<NonFinite> first;
        std::uint64_t first_order = 0;
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b) {
            if (!occupied(tickets, b)) continue;
            const Part part = source.part(t, b, scratch);
            const std::vector<NonFinite> found = tables_[t]->find_nonfinite(part.visit, part.gradients, scratch);
            if (found.empty()) continue;
            const std::vector<std::uint64_t> order = source.order(t, b);
            for (const NonFinite& each : found) {
                const std::uint64_t at = order[each.entry];
                if (first && std::tuple(each.of_sum, at, each.id) >= std::tuple(first->of_sum, first_order, first->id))
                    continue;
                first = each;
                first_order = at;
            }
        }
        if (first) tables_[t]->refuse_nonfinite(*first, source.where(first_order));
    }
}

// Sets all tickets used, or none and throws.
void Engine::claim(Tickets tickets) const {
    home_.require_here();
    for (const Ticket* ticket : tickets)
        if (!owns(*ticket))
            throw TicketError("this ticket came from another store; bring it back to the one that gave it");
    for (std::size_t i = 0; i < tickets.size(); ++i) {
        if (!tickets[i]->used.exchange(true)) continue;
        for (std::size_t k = 0; k < i; ++k) tickets[k]->used.store(false);
        throw TicketError("this ticket was used already; a batch is updated once, look it up again for another step");
    }
}

// The room that the largest bucket of an update needs in an undo slot; 0 if rows die with the process anyway.
std::size_t Engine::undo_bytes(Tickets tickets) const {
    std::size_t most = 0;
    for (std::size_t t = 0; arena_->survives_process() && t < tables_.size(); ++t)
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b) {
            std::size_t unique = 0;
            for (const Ticket* ticket : tickets) unique += ticket->batch->num_unique[b];
            most = std::max(most, UndoSlot::bytes_for(unique, tables_[t]->config().row_bytes()));
        }
    return most;
}

// See Scratch::reserve_update.
void Engine::reserve_update(ScratchSet& threads, Tickets tickets, bool filter) const {
    std::size_t entries = 0, unique = 0, sums = 0, dim = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        const std::size_t of_table = tables_[t]->config().dim;
        dim = std::max(dim, of_table);
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b) {
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
    for (unsigned thread = 0; thread < threads.size(); ++thread)
        threads[thread].reserve_update(entries, unique, sums, dim, filter, tickets[0]->bags != nullptr);
}

void Engine::apply(GradientSource&& source, Tickets tickets, std::uint32_t step, std::span<const double> lrs) {
    claim(tickets);
    const FloatMode mode;
    UndoSet undo(undo_, *arena_);
    std::optional<ScratchSet> threads;
    std::vector<StepScalars> scalars;
    bool filter = false, hinted = true;
    try {
        source.open();
        scalars.resize(tables_.size());
        threads.emplace(scratch_, threads_for(size_of(tickets)));
        filter = !all_sums_finite(source, tickets);
        if (filter) refuse_nonfinite(source, tickets);
        reserve_update(*threads, tickets, filter);
        if (const std::size_t bytes = undo_bytes(tickets); bytes != 0) undo.fill(pool_.num_threads(), bytes);
    } catch (...) {
        for (Ticket* ticket : tickets) ticket->used.store(false); // nothing was applied
        throw;
    }
    for (std::size_t t = 0; t < tables_.size(); ++t) scalars[t] = tables_[t]->step_scalars(step, lrs[t]);
    for (const Ticket* ticket : tickets) hinted &= ticket->batch->hinted;
    reach_step(step);
    for_each_bucket(
        *threads, [&](std::uint32_t b) { return occupied(tickets, b); },
        [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
            const Part part = source.part(t, b, scratch);
            tables_[t]->update(part.visit, part.gradients, scalars[t], hinted, filter, scratch);
        },
        &undo);
    for (Ticket* ticket : tickets) batches_.give(std::move(ticket->batch));
}

void Engine::update(Ticket& ticket, const float* gradients, std::uint32_t step, std::span<const double> lrs) {
    if (ticket.bags != nullptr) throw TicketError("this ticket came from a lookup of bags; its update is update_bags");
    Ticket* const tickets[] = {&ticket};
    apply(FlatSource(*this, ticket, gradients), tickets, step, lrs);
}

void Engine::drop(Ticket& ticket) {
    Ticket* const tickets[] = {&ticket};
    claim(tickets);
    batches_.give(std::move(ticket.batch));
}

TableStats Engine::stats(std::size_t t) {
    Table& table = this->table(t);
    TableStats stats;
    stats.bytes = sizeof(Table) + table.config().num_buckets * sizeof(Bucket);
    for (std::uint32_t b = 0; b < table.config().num_buckets; ++b) {
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        bucket.sweep(table.expire_before(), table.ledger().version.load());
        stats.counters.add(bucket.counters);
        stats.rows += bucket.rows.size();
        stats.sightings += bucket.sightings.size();
        stats.bytes += bucket.rows.bytes() + bucket.sightings.bytes() + bucket.removed.capacity() * sizeof(Removed);
    }
    return stats;
}

} // namespace satrap
