// Finds the gradients of bags; see bag_gradients.hpp.
#include "bags/bag_gradients.hpp"

#include <cmath>

namespace satrap {

void BagSource::open() {
    SATRAP_ASSERT(places_.empty() && gradients_.size() == tickets_.size());
    for (std::size_t k = 0; k < tickets_.size(); ++k) {
        const Ticket& ticket = *tickets_[k];
        const BagGradients& given = gradients_[k];
        SATRAP_ASSERT(ticket.bags != nullptr && given.sequences.size() == ticket.bags->sequences.size());
        places_.push_back(places_of(*ticket.bags, ticket.sequences, given.block, given.sequences.data(), given.groups));
        complete_ &= given.block != nullptr || ticket.bags->total_dim == 0;
        for (const float* sequence : given.sequences) complete_ &= sequence != nullptr;
        largest_weight_ = std::max(largest_weight_, ticket.batch->bags.largest_weight);
    }
}

std::vector<std::span<const float>> BagSource::memory() const {
    std::vector<std::span<const float>> all;
    for (std::size_t k = 0; k < tickets_.size(); ++k) {
        const SequencePlaces& begins = tickets_[k]->sequences;
        if (gradients_[k].block != nullptr) all.emplace_back(gradients_[k].block, begins[0]);
        for (std::size_t q = 0; q + 1 < begins.size(); ++q)
            if (const float* sequence = gradients_[k].sequences[q]; sequence != nullptr)
                all.emplace_back(sequence, begins[q + 1] - begins[q]);
    }
    return all;
}

double BagSource::largest_factor() const {
    return std::fabs(static_cast<double>(scale_)) * static_cast<double>(largest_weight_);
}

BucketGradients BagSource::part(std::size_t t, std::uint32_t b, Scratch& scratch) const {
    SATRAP_ASSERT(places_.size() == tickets_.size()); // open() was called
    if (!whole()) return joined(t, b, scratch);
    Batch& batch = *tickets_[0]->batch;
    const BucketVisit visit = visit_of(batch, map_.first[t], b);
    const float** from = scratch.from.reserve(visit.count);
    places_[0][t].resolve(batch.positions.data() + batch.begin[b], visit.count, from);
    const Factor* factors = batch.bags.scaled[t] != 0 ? batch.bags.factors.data() + batch.begin[b] : nullptr;
    return {visit, {from, factors, scale_}};
}

// Orders by ticket, then by place.
std::vector<std::uint64_t> BagSource::order(std::size_t t, std::uint32_t b) const {
    std::vector<std::uint64_t> order;
    for (std::size_t k = 0; k < tickets_.size(); ++k) {
        const Batch& batch = *tickets_[k]->batch;
        for (std::uint32_t e = batch.begin[b]; e < batch.begin[b + 1]; ++e)
            if (places_[k][t].at(batch.positions[e]) != nullptr) order.push_back(k << 32 | batch.positions[e]);
    }
    return order;
}

std::string BagSource::where(std::uint64_t order) const {
    const std::size_t k = order >> 32, place = order & 0xffffffffU;
    const Bags& bags = *tickets_[k]->bags;
    const SequencePlaces& begins = tickets_[k]->sequences;
    std::size_t f = 0;      // the feature's number
    std::size_t number = 0; // the sample's number, or the row's if the feature is jagged
    if (place < begins[0]) {
        const std::size_t column = place % bags.total_dim;
        while (bags.features[f].is_sequence() || bags.features[f].column != column) ++f;
        number = place / bags.total_dim;
    } else {
        std::size_t q = 0;
        while (begins[q + 1] <= place) ++q;
        f = bags.sequences[q];
        const BagFeature& feature = bags.features[f];
        number = (place - begins[q]) / (feature.jagged ? feature.dim : std::size_t{feature.max_length} * feature.dim);
    }
    return std::string(bags.features[f].jagged ? "in row " : "in sample ") + std::to_string(number) + " of feature '" +
           bags.features[f].name + "'" +
           (tickets_.size() == 1 ? ""
                                 : " (batch " + std::to_string(k + 1) + " of " + std::to_string(tickets_.size()) + ")");
}

std::uint32_t join_ids(Tickets tickets, std::uint32_t b, Scratch& scratch) {
    std::uint32_t total = 0;
    for (const Ticket* ticket : tickets) total += ticket->batch->num_unique[b];
    std::uint64_t* ids = scratch.joined_ids.reserve(total);
    std::uint32_t* hints = scratch.joined_hints.reserve(total);
    std::uint32_t* numbers = scratch.joined_numbers.reserve(total);
    std::uint32_t at = 0;
    for (const Ticket* ticket : tickets) {
        const Batch& batch = *ticket->batch;
        const std::uint32_t first = batch.begin[b], count = batch.num_unique[b];
        std::copy_n(batch.unique.data() + first, count, ids + at);
        std::copy_n(batch.hints.data() + first, count, hints + at);
        at += count;
    }
    const std::uint32_t num_unique = deduplicate_ids(ids, total, numbers, scratch.dedupe);
    for (std::uint32_t i = 0, next = 0; i < total; ++i)
        if (numbers[i] == next) hints[next++] = hints[i]; // where it appears first
    return num_unique;
}

BucketGradients BagSource::joined(std::size_t t, std::uint32_t b, Scratch& scratch) const {
    std::uint32_t most = 0;
    bool scaled = false;
    for (const Ticket* ticket : tickets_) {
        most += ticket->batch->begin[b + 1] - ticket->batch->begin[b];
        scaled |= ticket->batch->bags.scaled[t] != 0;
    }
    const std::uint32_t unique = join_ids(tickets_, b, scratch);
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
    const BucketVisit visit{.bucket = b - map_.first[t],
                            .unique = scratch.joined_ids.data(),
                            .num_unique = unique,
                            .local = local,
                            .count = count,
                            .hints = scratch.joined_hints.data()};
    return {visit, {from, factors, scale_}};
}

} // namespace satrap
