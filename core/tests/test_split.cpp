// A split and some servers against one engine that has all rows: the same bits looked up, and the same tables after
// each step, whatever the owners, threads and SIMD path. Besides: where ids and floats lie for the servers, what is
// refused and changes nothing, memory that outlives its split, and callers at the same time.
#include "sharding/shard_split.hpp"

#include <tuple>

#include "bag_draws.hpp"
#include "base/errors.hpp"

using namespace satrap;
using testing::BagCall, testing::Floats, testing::Line, testing::Model, testing::Random;

namespace {

struct Servers {
    std::shared_ptr<Split> split;
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<std::uint32_t> owners;
    std::uint32_t count() const { return static_cast<std::uint32_t>(engines.size()); }

    Servers(Random& random, const Model& model, std::uint32_t num_servers, unsigned threads = 1,
            const std::string& simd = "auto") {
        split = Split::owned(std::make_unique<Split>(model.tables, model.features, threads, simd));
        while (engines.size() < num_servers) engines.push_back(testing::make_engine(model.tables));
        draw_owners(random);
    }
    void draw_owners(Random& random) {
        owners.clear();
        const bool few = random.chance(0.3); // servers own nothing
        while (owners.size() < split->map().total()) owners.push_back(random.below(few ? 1 : count()));
    }
};

struct LookedSplit {
    Floats rows;
    std::unique_ptr<SplitTicket> ticket;
    std::vector<std::unique_ptr<Ticket>> of_servers;
    testing::Ids sent; // as they lay there
};

std::span<const std::int64_t> offsets_of(const ShardLayout& layout, std::size_t server) {
    return {layout.offsets(server), layout.num_tables + 1};
}

// Each bucket's ids are at their owner's, and everything follows without gaps; walks the whole structure.
void check_layout(const Split& split, const ShardLayout& layout, const PooledBlock& ids) {
    const BucketNumbering& map = split.map();
    std::uint64_t id = 0, floats = 0;
    for (std::uint32_t s = 0; s < layout.num_servers(); ++s) {
        CHECK_EQ(layout.first_id[s], (id + 7) / 8 * 8);
        CHECK_EQ(layout.first_float[s], (floats + 15) / 16 * 16);
        id = layout.first_id[s];
        floats = layout.first_float[s];
        for (std::size_t t = 0; t < layout.num_tables; ++t) {
            const std::uint64_t end = layout.first_id[s] + static_cast<std::uint64_t>(layout.offsets(s)[t + 1]);
            std::uint32_t dim = 0;
            for (const BagFeature& feature : split.bags().features)
                if (feature.table == t) dim = feature.dim;
            for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
                if (layout.owners[b] != s) continue;
                CHECK_EQ(layout.id_begin[b], id);
                CHECK_EQ(layout.float_begin[b], floats);
                for (; id < end; ++id, floats += dim)
                    if (map.first[t] + bucket_of(mix64(ids.as<std::uint64_t>()[id]), map.bits[t]) != b) break;
            }
            CHECK_EQ(id, end);
        }
        CHECK_EQ(floats - layout.first_float[s], layout.num_floats[s]);
    }
    CHECK_EQ(layout.first_id.back(), (id + 7) / 8 * 8);
    CHECK_EQ(layout.first_float.back(), (floats + 15) / 16 * 16);
}

LookedSplit lookup(Servers& servers, const BagCall& call, std::uint32_t step) {
    Split& split = *servers.split;
    LookedSplit looked{Floats(split.bags(), call, std::nanf("")), nullptr, {}, {}}; // must be written whole
    {
        BagCall gone = call; // the inputs may end with the call
        looked.ticket = split.lookup(gone.inputs(split.bags()), servers.owners, servers.count());
    }
    const ShardLayout& layout = *looked.ticket->layout;
    check_layout(split, layout, *looked.ticket->ids);
    looked.sent.assign(looked.ticket->ids->as<std::uint64_t>(),
                       looked.ticket->ids->as<std::uint64_t>() + layout.first_id.back());
    std::vector<std::vector<float>> memory;
    std::vector<const float*> rows;
    for (std::uint32_t s = 0; s < servers.count(); ++s) {
        memory.emplace_back(layout.num_floats[s]);
        looked.of_servers.push_back(
            servers.engines[s]->lookup(looked.ticket->ids->as<std::uint64_t>() + layout.first_id[s],
                                       offsets_of(layout, s), {true, step, step}, memory.back().data(), true));
    }
    for (const auto& each : memory) rows.push_back(each.data());
    std::vector<float*> sequences;
    for (auto& sequence : looked.rows.sequences) sequences.push_back(sequence.data());
    split.fill(*looked.ticket, rows, looked.rows.block.data(), sequences.data());
    return looked;
}

// Updates with several tickets; returns the sums that were applied.
Sums update(Servers& servers, std::vector<LookedSplit>& looked, const std::vector<BagGradients>& gradients, float scale,
            std::uint32_t step) {
    std::vector<SplitTicket*> tickets;
    for (LookedSplit& each : looked) tickets.push_back(each.ticket.get());
    Sums sums = servers.split->sums(tickets, gradients, scale, servers.owners, servers.count());
    const ShardLayout& layout = *sums.layout;
    check_layout(*servers.split, layout, *sums.ids);
    for (const LookedSplit& each : looked)
        CHECK(std::equal(each.sent.begin(), each.sent.end(), each.ticket->ids->as<std::uint64_t>()));
    for (std::uint32_t s = 0; s < servers.count(); ++s) {
        Engine& engine = *servers.engines[s];
        std::unique_ptr<Ticket> own =
            sums.same_ids ? std::move(looked[0].of_servers[s])
                          : engine.prepare(sums.ids->as<std::uint64_t>() + layout.first_id[s], offsets_of(layout, s));
        CHECK_EQ(own->num_floats, layout.num_floats[s]);
        engine.update(*own, sums.gradients->as<float>() + layout.first_float[s], step, testing::lrs_of(engine));
    }
    return sums;
}

// The rows and sightings of all servers are those of the one engine.
void check_equal_tables(Servers& servers, Engine& engine) {
    for (std::size_t t = 0; t < engine.num_tables(); ++t) {
        std::vector<Line> rows, sightings;
        for (auto& each : servers.engines) {
            each->table(t).check();
            for (Line& line : testing::rows_of(*each, t)) rows.push_back(std::move(line));
            for (Line& line : testing::sightings_of(*each, t)) sightings.push_back(std::move(line));
        }
        auto by_id = [](const Line& a, const Line& b) { return a.id < b.id; };
        std::sort(rows.begin(), rows.end(), by_id);
        std::sort(sightings.begin(), sightings.end(), by_id);
        CHECK(rows == testing::rows_of(engine, t));
        CHECK(sightings == testing::sightings_of(engine, t));
    }
}

void train_alike(Random& random, const Model& model, Servers& servers, Engine& engine, std::size_t most_samples) {
    const auto described = model.describe(engine);
    std::vector<std::uint64_t> skipped(model.tables.size());
    for (std::uint32_t step = 1; step <= 4; ++step) {
        if (random.chance(0.3)) continue;
        const float scale = random.chance(0.5) ? 1.0f : random.real(0.01f, 2.0f);
        std::vector<std::unique_ptr<Ticket>> tickets;
        std::vector<Ticket*> pointers;
        std::vector<LookedSplit> looked;
        std::vector<Floats> floats;
        std::vector<BagGradients> gradients;
        bool whole = true;
        for (std::uint32_t n = random.chance(0.6) ? 1 : random.between(2, 3); n > 0; --n) {
            const BagCall call = testing::draw_call(random, model, most_samples);
            auto expected = testing::lookup(engine, described, call, {true, step, step});
            looked.push_back(lookup(servers, call, step));
            CHECK(looked.back().rows == expected.rows);
            tickets.push_back(std::move(expected.ticket));
            pointers.push_back(tickets.back().get());
            floats.push_back(testing::draw_gradients(random, *described, call, false));
        }
        for (const Floats& each : floats) {
            gradients.push_back(each.gradients());
            if (random.chance(0.2)) gradients.back().block = nullptr;
            for (const float*& sequence : gradients.back().sequences)
                if (random.chance(0.2)) sequence = nullptr;
            whole &= gradients.back().block != nullptr;
            for (const float* sequence : gradients.back().sequences) whole &= sequence != nullptr;
        }
        testing::update(engine, pointers, gradients, scale, step);
        const Sums sums = update(servers, looked, gradients, scale, step);
        CHECK(!sums.same_ids || looked.size() == 1);
        for (std::size_t t = 0; t < skipped.size(); ++t) {
            skipped[t] += sums.skipped[t];
            CHECK_EQ(engine.stats(t).counters.skipped, skipped[t]);
            whole &= sums.skipped[t] == 0 && !model.tables[t].frozen.any();
        }
        if (whole && looked.size() == 1) CHECK(sums.same_ids);
        check_equal_tables(servers, engine);
    }
    for (std::size_t f = 0; f < described->features.size(); ++f)
        CHECK_EQ(servers.split->bags().truncated[f].load(), described->truncated[f].load());
}

CASE(equal_one_engine, testing::scaled(40)) {
    const Model model = testing::draw_model(random);
    const std::uint64_t seed = random.bits();
    const std::size_t most = random.chance(0.5) ? 20 : 500;
    for (const Kernels* kernels : available_kernels())
        for (unsigned threads : {1U, 2U, 4U}) {
            Random own(seed);
            const auto engine = testing::make_engine(model.tables, threads, kernels->name);
            Servers servers(own, model, own.between(1, 4), threads, kernels->name);
            train_alike(own, model, servers, *engine, most);
        }
}

// Sums for other owners than the lookup's: each id has the same, elsewhere.
CASE(owners_may_change_in_between, testing::scaled(40)) {
    const Model model = testing::draw_model(random);
    Servers servers(random, model, 3, 2);
    Split& split = *servers.split;
    const BagCall call = testing::draw_call(random, model, 300);
    const Floats floats = testing::draw_gradients(random, split.bags(), call, false);
    std::unique_ptr<SplitTicket> tickets[2];
    for (auto& each : tickets) each = split.lookup(call.inputs(split.bags()), servers.owners, servers.count());
    std::vector<std::tuple<std::size_t, std::uint64_t, std::vector<float>>> seen[2]; // table, id, sum
    for (std::size_t k = 0; k < 2; ++k) {
        SplitTicket* const ticket[] = {tickets[k].get()};
        const BagGradients gradients[] = {floats.gradients()};
        const Sums sums = split.sums(ticket, gradients, 1.0f, servers.owners, servers.count());
        const ShardLayout& layout = *sums.layout;
        check_layout(split, layout, *sums.ids);
        CHECK(!sums.same_ids || servers.owners == tickets[k]->layout->owners);
        CHECK(layout.owners == servers.owners);
        for (std::uint32_t s = 0; s < servers.count(); ++s) {
            const float* next = sums.gradients->as<float>() + layout.first_float[s];
            for (std::size_t t = 0; t < layout.num_tables; ++t)
                for (std::int64_t i = layout.offsets(s)[t]; i < layout.offsets(s)[t + 1]; ++i) {
                    const std::size_t dim = model.tables[t].dim, at = static_cast<std::size_t>(i);
                    seen[k].emplace_back(t, sums.ids->as<std::uint64_t>()[layout.first_id[s] + at],
                                         std::vector<float>(next, next + dim));
                    next += dim;
                }
        }
        std::sort(seen[k].begin(), seen[k].end());
        servers.draw_owners(random);
    }
    CHECK(seen[0] == seen[1]);
}

CASE(tickets_are_good_once, 1) {
    const Model model = testing::counting_model(2, {{Pooling::sum, false}, {Pooling::none, false}});
    Servers servers(random, model, 2), other(random, model, 2);
    Split& split = *servers.split;
    const BagCall call = testing::call_of({{{1}, {2}}, {{3}, {2, 4}}});
    const Floats ones(split.bags(), call, -1.0f);
    const std::vector<float> room(64);
    const float* const rows[] = {room.data(), room.data()};
    auto look_up = [&] { return split.lookup(call.inputs(split.bags()), servers.owners, 2); };
    auto fill = [&](Split& by, SplitTicket& ticket) {
        Floats out(split.bags(), call, 0.0f);
        float* const sequences[] = {out.sequences[0].data()};
        by.fill(ticket, rows, out.block.data(), sequences);
    };
    auto sums = [&](Split& by, std::vector<SplitTicket*> tickets) {
        return by.sums(tickets, std::vector<BagGradients>(tickets.size(), ones.gradients()), 1.0f, servers.owners, 2);
    };
    const auto a = look_up(), b = look_up(), c = look_up();
    CHECK_THROWS(TicketError, "another store", fill(*other.split, *a));
    CHECK_THROWS(TicketError, "another store", sums(*other.split, {a.get()}));
    CHECK_THROWS(TicketError, "another store", other.split->drop(*a));
    fill(split, *a);
    CHECK_THROWS(TicketError, "already filled", fill(split, *a));
    CHECK_THROWS(TicketError, "used already", sums(split, {a.get(), b.get(), a.get()}));
    CHECK(!a->ticket.used && !b->ticket.used);
    split.drop(*c);
    CHECK_THROWS(TicketError, "used already", split.drop(*c));
    CHECK_THROWS(TicketError, "used already", fill(split, *c));
    CHECK_THROWS(TicketError, "used already", sums(split, {a.get(), c.get()}));
    Floats bad = ones;
    bad.block[2] = std::nanf("");
    SplitTicket* const both[] = {a.get(), b.get()};
    const BagGradients spoilt[] = {ones.gradients(), bad.gradients()};
    CHECK_THROWS(NonFiniteError,
                 "table 'item': the gradient of id 2 in sample 1 of feature 'a' holds nan; expected finite values; "
                 "nothing was applied; on_nonfinite='skip' ignores and counts such gradients",
                 split.sums(std::span(both).subspan(1), std::span(spoilt).subspan(1), 1.0f, servers.owners, 2));
    CHECK_THROWS(NonFiniteError, "of feature 'a' (batch 2 of 2)", split.sums(both, spoilt, 1.0f, servers.owners, 2));
    CHECK(!a->ticket.used && !b->ticket.used);
    CHECK(!sums(split, {a.get(), b.get()}).same_ids); // b was never filled, and need not be
    CHECK(a->ticket.used && b->ticket.used);
    CHECK_THROWS(InputError, "offsets fall", [&] {
        BagCall falls = call;
        falls.offsets[1] = 5;
        return split.lookup(falls.inputs(split.bags()), servers.owners, 2);
    }());
}

// What was laid out for the servers is there when ticket and split are gone, and others have used their memory.
CASE(memory_outlives_the_split, 1) {
    const Model model = testing::counting_model(16, {{Pooling::sum, false}});
    Servers servers(random, model, 2, 2);
    auto call = std::make_unique<BagCall>();
    call->samples = 50000; // so that the blocks are those of the pool
    call->no_offsets = true;
    for (std::size_t i = 0; i < call->samples; ++i) call->ids.push_back(random.bits());
    call->offsets.resize(call->samples + 1);
    const Floats ones(servers.split->bags(), *call, 1.0f);
    std::shared_ptr<const PooledBlock> ids, gradients;
    std::shared_ptr<const ShardLayout> layout;
    std::vector<std::uint64_t> copy;
    for (int round = 0; round < 3; ++round) {
        const auto ticket = servers.split->lookup(call->inputs(servers.split->bags()), servers.owners, 2);
        SplitTicket* const tickets[] = {ticket.get()};
        const BagGradients given[] = {ones.gradients()};
        const Sums sums = servers.split->sums(tickets, given, 1.0f, servers.owners, 2);
        if (round != 0) continue;
        CHECK(sums.same_ids && sums.ids == ticket->ids);
        ids = sums.ids;
        gradients = sums.gradients;
        layout = sums.layout;
        copy.assign(ids->as<std::uint64_t>(), ids->as<std::uint64_t>() + layout->num_ids(0));
        for (std::uint64_t& id : call->ids) id = random.bits(); // the next rounds bring others
    }
    servers.split.reset();
    CHECK(std::equal(copy.begin(), copy.end(), ids->as<std::uint64_t>()));
    for (std::size_t i = 0; i < layout->num_floats[0]; ++i) CHECK_EQ(gradients->as<float>()[i], 1.0f);
}

// Lookups, fills and sums at the same time, by several callers: every gradient is applied once.
CASE(callers_lose_nothing, testing::scaled(6)) {
    const Model model =
        testing::counting_model(3, {{Pooling::sum, false}, {Pooling::sum, false}, {Pooling::none, false}});
    Servers servers(random, model, 2, 2);
    const std::uint64_t seed = random.bits();
    std::atomic<std::uint64_t> applied{0};
    std::atomic<std::uint32_t> steps{0};
    testing::in_threads(3, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned round = 0; round < testing::scaled(60); ++round) {
            std::vector<LookedSplit> looked;
            std::vector<Floats> ones;
            std::vector<BagGradients> given;
            const std::uint32_t step = ++steps;
            for (std::uint32_t n = own.between(1, 2); n > 0; --n) {
                const BagCall call = testing::draw_call(own, model, 400);
                looked.push_back(lookup(servers, call, step));
                for (float value : looked.back().rows.block) CHECK(value == std::floor(value));
                applied += 3 * looked.back().ticket->ticket.size;
                ones.emplace_back(servers.split->bags(), call, -1.0f);
            }
            for (const Floats& each : ones) given.push_back(each.gradients());
            update(servers, looked, given, 1.0f, step);
        }
    });
    double total = 0;
    for (auto& engine : servers.engines)
        for (const Line& line : testing::rows_of(*engine, 0))
            for (std::uint32_t i = 0; i < 3; ++i) total += line.value(i);
    CHECK_EQ(total, static_cast<double>(applied.load()));
}

// One ticket, several callers: one of them uses it, and none observes a half-finished call of another.
CASE(one_of_several_claims_a_ticket, 1) {
    const Model model = testing::counting_model(2, {{Pooling::sum, false}});
    Servers servers(random, model, 1, 2);
    Split& split = *servers.split;
    const BagCall call = testing::draw_call(random, model, 200);
    const Floats ones(split.bags(), call, -1.0f);
    for (unsigned round = 0; round < testing::scaled(100); ++round) {
        const auto ticket = split.lookup(call.inputs(split.bags()), servers.owners, 1);
        const std::vector<float> room(ticket->layout->num_floats[0]);
        std::atomic<unsigned> used{0}, filled{0};
        testing::in_threads(4, [&](unsigned thread) {
            Floats out(split.bags(), call, 0.0f);
            SplitTicket* const tickets[] = {ticket.get()};
            const BagGradients gradients[] = {ones.gradients()};
            const float* const rows[] = {room.data()};
            try {
                if (thread < 2) {
                    split.fill(*ticket, rows, out.block.data(), nullptr);
                    ++filled;
                } else {
                    split.sums(tickets, gradients, 1.0f, servers.owners, 1);
                    ++used;
                }
            } catch (const TicketError&) { // another was there
            }
        });
        CHECK(used <= 1 && filled <= 1 && used + filled >= 1);
        CHECK_EQ(ticket->ticket.used.load(), used == 1);
    }
}

} // namespace
