// Lookups and updates of bags in an engine; see bag_layout.hpp.
#include "bags/bag_gradients.hpp"
#include "bags/bag_output.hpp"
#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

std::unique_ptr<Ticket> Engine::lookup_bags(const std::shared_ptr<const Bags>& bags, const BagInputs& inputs,
                                            LookupStep at, float* block, float* const* sequences, bool want_ticket) {
    fork_guard_.require_same_process();
    require_rows_here();
    std::unique_ptr<BagPlan> plan = plans_.take();
    plan->make(*bags, inputs, *kernels_, scheduler_.pool());
    if (at.train && at.step == 0) at.step = next_step();
    if (at.train && at.oldest_open == 0) at.oldest_open = at.step;
    std::unique_ptr<Batch> batch = batches_.take();
    plan->group(*batch, map_, scheduler_.pool());
    if (at.train) wait_for_cut_room();
    const BagRows rows(*bags, *plan, *batch, block, sequences, blocks_);
    lookup_buckets(*batch, at,
                   [&](std::size_t t, std::uint32_t b, Scratch& scratch) { return rows.to(t, b, scratch); });
    rows.finish(*kernels_, scheduler_.pool());
    plan->count_cut();
    plans_.give(std::move(plan));
    if (!want_ticket) {
        batches_.give(std::move(batch));
        return nullptr;
    }
    const std::size_t num_floats = inputs.batch_size * bags->total_dim;
    return std::unique_ptr<Ticket>(
        new Ticket(ticket_of(std::move(batch), identity_, num_floats, bags, inputs.batch_size)));
}

void Engine::update_bags(Tickets tickets, std::span<const BagGradients> gradients, float scale, std::uint32_t step,
                         std::span<const double> lrs) {
    for (const Ticket* ticket : tickets)
        if (ticket->bags == nullptr) throw TicketError("this ticket came from a flat lookup; its update is update");
    apply(BagSource(map_, tickets, gradients, scale), tickets, step, lrs, kNoTrainer);
}

} // namespace satrap
