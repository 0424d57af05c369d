// Lookups and updates of bags in an engine; see bag_layout.hpp.
#include "bags/bag_gradients.hpp"
#include "bags/bag_output.hpp"
#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

std::unique_ptr<Ticket> Engine::lookup_bags(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs,
                                            LookupStep at, float* block, float* const* sequences, bool want_ticket) {
    require_rows_here();
    PlannedBags planned = plan_bags(*bags, inputs, at, false);
    if (at.train) wait_for_cut_room();
    const BagRows rows(*bags, *planned.plan, *planned.batch, block, sequences, blocks_);
    lookup_buckets(*planned.batch, at,
                   [&](std::size_t t, std::uint32_t b, Scratch& scratch) { return rows.to(t, b, scratch); });
    rows.finish(*kernels_, scheduler_.pool());
    return end_lookup(std::move(planned), bags, want_ticket);
}

Engine::PlannedBags Engine::plan_bags(const Bags& bags, const BagInputs& inputs, LookupStep& at, bool with_indexes) {
    SATRAP_ASSERT(bags.engine == identity_);
    PlannedBags planned{plans_.take(), nullptr};
    planned.plan->make(bags, inputs, *kernels_, scheduler_.pool());
    if (at.train && at.step == 0) at.step = next_step();
    if (at.train && at.oldest_open == 0) at.oldest_open = at.step;
    planned.batch = batches_.take();
    planned.plan->group(*planned.batch, map(), scheduler_.pool(), with_indexes);
    return planned;
}

std::unique_ptr<Ticket> Engine::end_lookup(PlannedBags planned, const std::shared_ptr<const Bags>& bags,
                                           bool want_ticket) {
    const std::size_t batch_size = planned.plan->batch_size();
    planned.plan->count_cut();
    plans_.give(std::move(planned.plan));
    if (want_ticket)
        return std::unique_ptr<Ticket>(
            new Ticket(ticket_of(std::move(planned.batch), identity_, batch_size * bags->total_dim, bags, batch_size)));
    batches_.give(std::move(planned.batch));
    return nullptr;
}

void Engine::update_bags(Tickets tickets, std::span<const BagGradients> gradients, float scale, std::uint32_t step,
                         std::span<const double> lrs) {
    for (const Ticket* ticket : tickets)
        if (ticket->bags == nullptr) throw TicketError("this ticket came from a flat lookup; its update is update");
    apply(BagSource(map(), tickets, gradients, scale), tickets, step, lrs, kNoTrainer);
}

} // namespace satrap
