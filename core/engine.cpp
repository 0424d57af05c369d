// Splitting calls over buckets and threads; see engine.hpp.
#include "engine.hpp"

#include <limits>

#include "errors.hpp"

namespace satrap {

static const Kernels& choose_kernels(const std::string& simd) {
    for (const Kernels* kernels : available_kernels())
        if (simd == "auto" || simd == kernels->name) return *kernels;
    throw InputError("simd='" + simd +
                     "' is not available on this machine; use 'auto' or one of satrap._core.simd_paths()");
}

static std::uint64_t next_identity() {
    static std::atomic<std::uint64_t> last{0}; // tells a foreign ticket from ours; decides nothing else
    return ++last;
}

Engine::Engine(std::vector<TableConfig> configs, const Options& options, std::unique_ptr<Arena> arena)
    : identity_(next_identity()), kernels_(&choose_kernels(options.simd)), arena_(std::move(arena)),
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
        case ChunkKind::undo: undo.emplace_back(file, memory, bytes); break;
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

std::uint32_t Engine::next_step() {
    std::uint32_t now = arena_->latest_step().load();
    do {
        if (now >= kLastStep) throw InputError("all " + std::to_string(kLastStep) + " steps are used");
    } while (!arena_->latest_step().compare_exchange_weak(now, now + 1));
    return now + 1;
}

void Engine::reach_step(std::uint32_t step) {
    std::uint32_t now = arena_->latest_step().load();
    while (now < step && !arena_->latest_step().compare_exchange_weak(now, step)) {
    }
}

std::size_t Engine::out_size(std::span<const std::int64_t> offsets) const {
    std::size_t floats = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t)
        floats += static_cast<std::size_t>(offsets[t + 1] - offsets[t]) * tables_[t]->config().dim;
    return floats;
}

std::unique_ptr<Batch> Engine::group(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    std::unique_ptr<Batch> batch = spares_.batches.take();
    batch->offsets.assign(offsets.begin(), offsets.end());
    batch->group(ids, map_, pool_);
    return batch;
}

Visit Engine::visit(Batch& batch, std::size_t t, std::uint32_t b) {
    const std::uint32_t first = batch.begin[b];
    return {b - map_.first[t],          batch.unique.data() + first,    batch.num_unique[b],
            batch.local.data() + first, batch.positions.data() + first, batch.begin[b + 1] - first,
            batch.hints.data() + first};
}

// Runs work(table, bucket, scratch) for every bucket with entries, on all threads. Of several errors the one of the
// lowest bucket is thrown, so the message does not depend on timing more than the state does.
// `undo`, if any, holds a slot for each thread.
template <typename Work> void Engine::for_each_bucket(Batch& batch, Work work, UndoSet* undo) {
    // So small that the last thread to finish is not late, so large that the counter is no bottleneck.
    const std::uint32_t grain = std::max(1U, map_.total() / (64 * pool_.num_threads()));
    std::atomic<std::uint32_t> next{0}, failed_bucket{0xffffffffU};
    std::mutex error_mutex;
    std::exception_ptr error;
    auto job = [&](unsigned thread, unsigned) {
        std::unique_ptr<Scratch> scratch = spares_.scratch.take();
        scratch->undo = undo == nullptr ? nullptr : undo->slot(thread);
        std::size_t t = 0;
        for (std::uint32_t b; (b = next.fetch_add(grain)) < map_.total();) {
            for (std::uint32_t end = std::min(b + grain, map_.total()); b < end; ++b) {
                if (batch.begin[b] == batch.begin[b + 1] || b > failed_bucket.load(std::memory_order_relaxed)) continue;
                while (b >= map_.first[t + 1]) ++t;
                try {
                    work(t, b, *scratch);
                } catch (...) {
                    std::lock_guard lock(error_mutex);
                    if (b < failed_bucket.load()) {
                        failed_bucket.store(b);
                        error = std::current_exception();
                    }
                }
            }
        }
        spares_.scratch.give(std::move(scratch));
    };
    if (batch.size() < 512)
        job(0, 1); // waking threads costs more than it saves
    else
        pool_.run(job);
    if (error != nullptr) std::rethrow_exception(error);
}

std::unique_ptr<Ticket> Engine::make_ticket(std::unique_ptr<Batch> batch) const {
    const std::size_t size = batch->size(), num_unique = batch->unique_size(), num_floats = out_size(batch->offsets);
    return std::unique_ptr<Ticket>(new Ticket{std::move(batch), identity_, size, num_unique, num_floats});
}

// The room that the largest bucket of an update needs in an undo slot; 0 if rows die with the process anyway.
std::size_t Engine::undo_bytes(const Batch& batch) const {
    std::size_t most = 0;
    for (std::size_t t = 0; arena_->survives_process() && t < tables_.size(); ++t)
        for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b)
            most = std::max(most, UndoSlot::bytes_for(batch.num_unique[b], tables_[t]->config().row_bytes()));
    return most;
}

std::unique_ptr<Ticket> Engine::lookup(const std::uint64_t* ids, std::span<const std::int64_t> offsets,
                                       const LookupStep& at, float* out, bool want_ticket) {
    std::unique_ptr<Batch> batch = group(ids, offsets);
    std::vector<float*> out_of_table(tables_.size());
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        out_of_table[t] = out;
        out += static_cast<std::size_t>(offsets[t + 1] - offsets[t]) * tables_[t]->config().dim;
    }
    if (at.train) {
        reach_step(at.step);
        for (auto& table : tables_) table->open_step(at);
    }
    for_each_bucket(*batch, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        batch->deduplicate(b, scratch.dedupe);
        tables_[t]->lookup(visit(*batch, t, b), at, out_of_table[t], scratch);
    });
    batch->hinted = true;
    if (want_ticket) return make_ticket(std::move(batch));
    spares_.batches.give(std::move(batch));
    return nullptr;
}

std::unique_ptr<Ticket> Engine::prepare(const std::uint64_t* ids, std::span<const std::int64_t> offsets) {
    std::unique_ptr<Batch> batch = group(ids, offsets);
    for_each_bucket(*batch,
                    [&](std::size_t, std::uint32_t b, Scratch& scratch) { batch->deduplicate(b, scratch.dedupe); });
    return make_ticket(std::move(batch));
}

// Whether all gradients are finite, and so small that no sum of them can overflow: one pass over them, before any
// change.
bool Engine::all_sums_finite(const Batch& batch, const float* gradients) {
    constexpr std::size_t kBlock = 4096; // stays in the first-level cache and in one register
    const std::size_t n = out_size(batch.offsets);
    std::atomic<std::uint32_t> most{0};
    pool_.run([&](unsigned thread, unsigned threads) {
        const std::size_t end = n * (thread + 1) / threads;
        std::uint32_t here = 0;
        for (std::size_t at = n * thread / threads; at < end && here < 0x7f800000U; at += kBlock)
            here = std::max(here, kernels_->largest(gradients + at, std::min(kBlock, end - at)));
        for (std::uint32_t seen = most.load(); seen < here && !most.compare_exchange_weak(seen, here);) {
        }
    });
    const auto magnitude = static_cast<double>(std::bit_cast<float>(most.load()));
    return magnitude * static_cast<double>(batch.size()) < static_cast<double>(std::numeric_limits<float>::max());
}

// Throws for the first id, by position, whose gradients or their sum are not finite, of a table that wants to know.
void Engine::refuse_nonfinite(Batch& batch, const float* gradients) {
    Scratch scratch;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        Table& table = *tables_[t];
        if (table.config().on_nonfinite == OnNonfinite::raise) {
            NonFinite first;
            for (std::uint32_t b = map_.first[t]; b < map_.first[t + 1]; ++b)
                if (batch.num_unique[b] != 0) table.find_nonfinite(visit(batch, t, b), gradients, scratch, first);
            if (first.found()) table.refuse_nonfinite(first);
        }
        gradients += static_cast<std::size_t>(batch.offsets[t + 1] - batch.offsets[t]) * table.config().dim;
    }
}

void Engine::update(Ticket& ticket, const float* gradients, std::uint32_t step, std::span<const double> lrs) {
    if (!owns(ticket)) throw TicketError("this ticket came from another store; bring it back to the one that gave it");
    if (ticket.used.exchange(true))
        throw TicketError("this ticket was used already; a batch is updated once, look it up again for another step");
    Batch& batch = *ticket.batch;
    UndoSet undo(undo_, *arena_);
    bool filter = false;
    try {
        filter = !all_sums_finite(batch, gradients);
        if (filter) refuse_nonfinite(batch, gradients);
        if (const std::size_t bytes = undo_bytes(batch); bytes != 0) undo.fill(pool_.num_threads(), bytes);
    } catch (...) {
        ticket.used.store(false); // nothing was applied
        throw;
    }
    std::vector<const float*> of_table(tables_.size());
    std::vector<StepScalars> scalars(tables_.size());
    for (std::size_t t = 0; t < tables_.size(); ++t) {
        of_table[t] = gradients;
        gradients += static_cast<std::size_t>(batch.offsets[t + 1] - batch.offsets[t]) * tables_[t]->config().dim;
        scalars[t] = tables_[t]->step_scalars(step, lrs[t]);
    }
    reach_step(step);
    for_each_bucket(
        batch,
        [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
            tables_[t]->update(visit(batch, t, b), of_table[t], scalars[t], batch.hinted, filter, scratch);
        },
        &undo);
    spares_.batches.give(std::move(ticket.batch));
}

std::size_t Engine::num_rows(std::size_t t) {
    std::size_t rows = 0;
    counters(t, &rows, nullptr, nullptr);
    return rows;
}

Counters Engine::counters(std::size_t t, std::size_t* rows, std::size_t* sightings, std::size_t* bytes) {
    Table& table = *tables_[t];
    Counters sum;
    std::size_t num_rows = 0, num_sightings = 0,
                num_bytes = sizeof(Table) + table.config().num_buckets * sizeof(Bucket);
    for (std::uint32_t b = 0; b < table.config().num_buckets; ++b) {
        Bucket& bucket = table.bucket(b);
        std::lock_guard lock(bucket.mutex);
        bucket.sweep(table.expire_before(), table.ledger().version.load());
        sum.add(bucket.counters);
        num_rows += bucket.rows.size();
        num_sightings += bucket.sightings.size();
        num_bytes += bucket.rows.bytes() + bucket.sightings.bytes() + bucket.removed.capacity() * sizeof(Removed);
    }
    if (rows != nullptr) *rows = num_rows;
    if (sightings != nullptr) *sightings = num_sightings;
    if (bytes != nullptr) *bytes = num_bytes;
    return sum;
}

} // namespace satrap
