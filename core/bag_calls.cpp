// Lookups and updates of bags: where the rows of a batch go, and where its gradients come from; see bags.hpp.
#include "engine.hpp"
#include "errors.hpp"

namespace satrap {

namespace {

// Memory of a pool for the time of a call.
class Loan {
  public:
    Loan(BlockPool& pool, std::size_t bytes) : pool_(pool), block_(pool.take(bytes)) {}
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() { pool_.give(block_); }
    float* floats() const { return reinterpret_cast<float*>(block_.memory); }

  private:
    BlockPool& pool_;
    BlockPool::Block block_;
};

// The gradients of some tickets' blocks and sequences. With one ticket and a gradient for every entry, the entries are
// taken as the lookup grouped them. Otherwise they are joined, bucket by bucket: ids unique over all tickets, entries
// ticket after ticket without those that have no gradient.
class BagSource final : public GradientSource {
  public:
    BagSource(const Engine& engine, std::span<Ticket* const> tickets, std::span<const BagGradients> gradients,
              float scale)
        : engine_(engine), tickets_(tickets), gradients_(gradients), scale_(scale) {}

    void open() override {
        for (std::size_t k = 0; k < tickets_.size(); ++k) {
            const Ticket& ticket = *tickets_[k];
            const BagGradients& given = gradients_[k];
            places_.push_back(places_of(*ticket.bags, ticket.batch_size, given.block, given.sequences.data()));
            complete_ &= given.block != nullptr || ticket.bags->total_dim == 0;
            for (const float* sequence : given.sequences) complete_ &= sequence != nullptr;
            largest_weight_ = std::max(largest_weight_, ticket.batch->bags.largest_weight);
        }
    }

    std::vector<std::span<const float>> memory() const override {
        std::vector<std::span<const float>> all;
        for (std::size_t k = 0; k < tickets_.size(); ++k) {
            const Bags& bags = *tickets_[k]->bags;
            const std::size_t samples = tickets_[k]->batch_size;
            if (gradients_[k].block != nullptr) all.emplace_back(gradients_[k].block, samples * bags.total_dim);
            for (std::size_t q = 0; q < bags.sequences.size(); ++q) {
                const BagFeature& feature = bags.features[bags.sequences[q]];
                if (const float* sequence = gradients_[k].sequences[q]; sequence != nullptr)
                    all.emplace_back(sequence, samples * feature.max_length * feature.dim);
            }
        }
        return all;
    }

    double largest_factor() const override {
        return std::fabs(static_cast<double>(scale_)) * static_cast<double>(largest_weight_);
    }

    Part part(std::size_t t, std::uint32_t b, Scratch& scratch) const override {
        if (tickets_.size() != 1 || !complete_) return joined(t, b, scratch);
        Batch& batch = *tickets_[0]->batch;
        const Visit visit = visit_of(batch, engine_.map().first[t], b);
        const float** from = scratch.from.reserve(visit.count);
        places_[0][t].resolve(batch.positions.data() + batch.begin[b], visit.count, from);
        const Factor* factors = batch.bags.scaled[t] != 0 ? batch.bags.factors.data() + batch.begin[b] : nullptr;
        return {visit, {from, factors, scale_}};
    }

    // Ticket after ticket, then by place.
    std::vector<std::uint64_t> order(std::size_t t, std::uint32_t b) const override {
        std::vector<std::uint64_t> order;
        for (std::size_t k = 0; k < tickets_.size(); ++k) {
            const Batch& batch = *tickets_[k]->batch;
            for (std::uint32_t e = batch.begin[b]; e < batch.begin[b + 1]; ++e)
                if (places_[k][t].at(batch.positions[e]) != nullptr) order.push_back(k << 32 | batch.positions[e]);
        }
        return order;
    }

    std::string where(std::uint64_t order) const override {
        const std::size_t k = order >> 32, place = order & 0xffffffffU, samples = tickets_[k]->batch_size;
        const Bags& bags = *tickets_[k]->bags;
        std::size_t feature = 0, sample = 0;
        for (std::size_t f = 0; f < bags.features.size(); ++f) {
            const BagFeature& each = bags.features[f];
            const std::size_t begin = each.is_sequence() ? bags.sequence_begin(f, samples) : each.column;
            const std::size_t line = each.is_sequence() ? std::size_t{each.max_length} * each.dim : bags.total_dim;
            const bool in_block = place < samples * bags.total_dim;
            if (in_block == each.is_sequence() || place < begin || (place - begin) / line >= samples) continue;
            if (in_block && (place - begin) % line != 0) continue;
            feature = f;
            sample = (place - begin) / line;
        }
        return "in sample " + std::to_string(sample) + " of feature '" + bags.features[feature].name + "'" +
               (tickets_.size() == 1
                    ? ""
                    : " (batch " + std::to_string(k + 1) + " of " + std::to_string(tickets_.size()) + ")");
    }

  private:
    Part joined(std::size_t t, std::uint32_t b, Scratch& scratch) const;
    std::uint32_t join_ids(std::uint32_t b, Scratch& scratch) const;

    const Engine& engine_;
    std::span<Ticket* const> tickets_;
    std::span<const BagGradients> gradients_;
    float scale_;
    std::vector<std::vector<Places<const float>>> places_; // [tickets][tables]
    bool complete_ = true;                                 // every entry has a gradient
    float largest_weight_ = 1.0f;
};

// The unique ids of bucket b over all tickets, with a hint each, into scratch.joined_*; joined_numbers has the number
// of each ticket's first, second, ... unique id, ticket after ticket. Returns how many there are.
std::uint32_t BagSource::join_ids(std::uint32_t b, Scratch& scratch) const {
    std::uint32_t total = 0;
    for (const Ticket* ticket : tickets_) total += ticket->batch->num_unique[b];
    std::uint64_t* ids = scratch.joined_ids.reserve(total);
    std::uint32_t* hints = scratch.joined_hints.reserve(total);
    std::uint32_t* numbers = scratch.joined_numbers.reserve(total);
    std::uint32_t at = 0;
    for (const Ticket* ticket : tickets_) {
        const Batch& batch = *ticket->batch;
        const std::uint32_t first = batch.begin[b], count = batch.num_unique[b];
        std::copy_n(batch.unique.data() + first, count, ids + at);
        std::copy_n(batch.hints.data() + first, count, hints + at);
        at += count;
    }
    const std::uint32_t found = deduplicate_ids(ids, total, numbers, scratch.dedupe);
    for (std::uint32_t i = 0, next = 0; i < total; ++i)
        if (numbers[i] == next) hints[next++] = hints[i]; // where it appears first
    return found;
}

Part BagSource::joined(std::size_t t, std::uint32_t b, Scratch& scratch) const {
    std::uint32_t most = 0;
    bool scaled = false;
    for (const Ticket* ticket : tickets_) {
        most += ticket->batch->begin[b + 1] - ticket->batch->begin[b];
        scaled |= ticket->batch->bags.scaled[t] != 0;
    }
    const std::uint32_t unique = join_ids(b, scratch);
    std::uint32_t* local = scratch.joined_local.reserve(most);
    const float** from = scratch.from.reserve(most);
    Factor* factors = scaled ? scratch.joined_factors.reserve(most) : nullptr;
    std::uint32_t count = 0;
    const std::uint32_t* numbers = scratch.joined_numbers.data();
    for (std::size_t k = 0; k < tickets_.size(); ++k) {
        const Batch& batch = *tickets_[k]->batch;
        const Factor* own = batch.bags.scaled[t] != 0 ? batch.bags.factors.data() : nullptr;
        for (std::uint32_t e = batch.begin[b]; e < batch.begin[b + 1]; ++e) {
            const float* gradient = places_[k][t].at(batch.positions[e]);
            if (gradient == nullptr) continue;
            local[count] = numbers[batch.local[e]];
            if (scaled) factors[count] = own == nullptr ? Factor{} : own[e];
            from[count++] = gradient;
        }
        numbers += batch.num_unique[b];
    }
    const Visit visit{.bucket = b - engine_.map().first[t],
                      .unique = scratch.joined_ids.data(),
                      .num_unique = unique,
                      .local = local,
                      .count = count,
                      .hints = scratch.joined_hints.data()};
    return {visit, {from, factors, scale_}};
}

} // namespace

std::unique_ptr<Ticket> Engine::lookup_bags(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs,
                                            LookupStep at, float* block, float* const* sequences, bool want_ticket) {
    home_.require_here();
    std::unique_ptr<BagPlan> plan = plans_.take();
    plan->make(*bags, inputs, *kernels_, pool_);
    if (at.train && at.step == 0) at.step = next_step();
    if (at.train && at.oldest_open == 0) at.oldest_open = at.step;
    std::unique_ptr<Batch> batch = batches_.take();
    plan->describe(*batch);
    batch->group(plan->ids(), map_, pool_,
                 [&](std::size_t t, std::size_t first) { return BagCursor(*plan, *batch, t, first); });
    const Loan loose(*blocks_, plan->loose_floats() * sizeof(float));
    std::vector<Places<float>> places = places_of(*bags, inputs.batch_size, block, sequences);
    const std::uint64_t begin = bags->loose_begin(inputs.batch_size);
    for (std::size_t t = 0; t < tables_.size(); ++t)
        if (batch->bags.loose[t] != 0) places[t].add(begin, begin + plan->loose_floats(), loose.floats());
    lookup_buckets(*batch, at, [&](std::size_t t, std::uint32_t b, Scratch& scratch) {
        const std::uint32_t first = batch->begin[b], count = batch->begin[b + 1] - first;
        const auto& place = batch->bags.loose[t] != 0 ? batch->bags.to : batch->positions;
        float** to = scratch.to.reserve(count);
        places[t].resolve(place.data() + first, count, to);
        return to;
    });
    plan->finish(block, sequences, loose.floats(), *kernels_, pool_);
    plan->count_cut();
    plans_.give(std::move(plan));
    if (!want_ticket) {
        batches_.give(std::move(batch));
        return nullptr;
    }
    std::unique_ptr<Ticket> ticket = make_ticket(std::move(batch), inputs.batch_size * bags->total_dim);
    ticket->bags = bags;
    ticket->batch_size = inputs.batch_size;
    return ticket;
}

void Engine::update_bags(Tickets tickets, std::span<const BagGradients> gradients, float scale, std::uint32_t step,
                         std::span<const double> lrs) {
    for (const Ticket* ticket : tickets)
        if (ticket->bags == nullptr) throw TicketError("this ticket came from a flat lookup; its update is update");
    apply(BagSource(*this, tickets, gradients, scale), tickets, step, lrs);
}

} // namespace satrap
