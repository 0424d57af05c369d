// Lookups and updates of bags against an engine that sees only flat ids (bag_layout.hpp): the same bits, for any
// poolings, shapes, threads and SIMD path; and what is refused, and that it changes nothing.
#include <tuple>

#include "bag_draws.hpp"
#include "base/errors.hpp"
#include "shared_file.hpp"

using namespace satrap;
using testing::BagCall, testing::Contents, testing::Floats, testing::Model, testing::Random;

namespace {

std::vector<std::uint64_t> counted(Engine& engine) {
    std::vector<std::uint64_t> all;
    for (std::size_t t = 0; t < engine.num_tables(); ++t) {
        const Counters c = engine.stats(t).counters;
        for (std::uint64_t n :
             {c.lookups, c.hits, c.inserted, c.refused, c.evicted, c.updated, c.not_applied_absent, c.skipped})
            all.push_back(n);
    }
    return all;
}

std::size_t padding_of(const Model& model, const BagCall& call) {
    std::size_t padding = 0;
    for (std::size_t f = 0; f < call.bags.size(); ++f)
        for (const testing::Ids& bag : call.bags[f])
            padding += static_cast<std::size_t>(std::count(bag.begin(), bag.end(), model.features[f].padding));
    return padding;
}

// Interleaves groups of rows in the gradients of some jagged sequences, and returns how many groups each sequence has.
std::vector<std::uint32_t> interleave(Random& random, const satrap::Bags& described, Floats& gradients) {
    std::vector<std::uint32_t> groups;
    for (std::size_t q = 0; q < described.sequences.size(); ++q) {
        const satrap::BagFeature& feature = described.features[described.sequences[q]];
        const std::vector<float> rows = gradients.sequences[q];
        const std::size_t num_rows = rows.size() / feature.dim;
        std::size_t k = feature.jagged ? random.between(1, 4) : 1;
        if (num_rows % k != 0) k = 1;
        for (std::size_t row = 0; row < num_rows; ++row) {
            const std::size_t group = row / (num_rows / k), at = row % (num_rows / k) * k + group;
            std::copy_n(rows.data() + row * feature.dim, feature.dim, gradients.sequences[q].data() + at * feature.dim);
        }
        groups.push_back(static_cast<std::uint32_t>(k));
    }
    return groups;
}

// Steps of one to three batches each, on an engine with bags and on one with flat ids; returns all that was looked up.
std::vector<Floats> run_steps(const Model& model, Engine& engine, Engine& flat, std::uint64_t seed,
                              std::size_t most_samples) {
    Random random(seed);
    const auto described = model.describe(engine);
    std::vector<Floats> seen;
    std::uint64_t cut = 0;
    bool bounded = true; // large gradients leave numbers in the rows that compare equal
    for (const TableConfig& table : model.tables)
        bounded &= table.optimizer.kind != OptimizerKind::ftrl &&
                   (table.optimizer.kind != OptimizerKind::sgd || table.optimizer.momentum == 0.0);
    for (std::uint32_t step = 1; step <= 5; ++step) {
        std::vector<std::unique_ptr<Ticket>> tickets;
        std::vector<Ticket*> pointers;
        std::vector<Floats> gradients;
        std::vector<BagGradients> given;
        testing::TakenApart apart;
        const float scale = random.chance(0.5) ? 1.0f : random.real(0.01f, 2.0f);
        for (std::uint32_t batches = random.chance(0.6) ? 1 : random.between(2, 3); batches > 0; --batches) {
            const BagCall call = testing::draw_call(random, model, most_samples);
            auto looked = testing::lookup(engine, described, call, {true, step, step});
            const auto ids = testing::ids_of_tables(*described, call);
            CHECK(looked.rows == testing::pooled(*described, call, testing::lookup(flat, ids, step).rows));
            CHECK_EQ(looked.ticket->size, testing::Flat(ids).ids.size());
            const auto peeked = testing::lookup(engine, described, call, {false, 0, 0});
            CHECK(peeked.ticket == nullptr);
            CHECK(peeked.rows == testing::pooled(*described, call, testing::peek(flat, ids)));
            cut += 2 * (call.ids.size() - padding_of(model, call) - looked.ticket->size);
            gradients.push_back(testing::draw_gradients(random, *described, call, bounded && random.chance(0.1)));
            testing::take_apart(apart, *described, call, gradients.back(), scale);
            seen.push_back(looked.rows);
            tickets.push_back(std::move(looked.ticket));
        }
        for (std::size_t k = 0; k < tickets.size(); ++k) {
            pointers.push_back(tickets[k].get());
            auto groups = interleave(random, *described, gradients[k]);
            given.push_back(gradients[k].gradients());
            given.back().groups = std::move(groups);
        }
        testing::update(engine, pointers, given, scale, step);
        testing::update(flat, apart.ids, apart.flat(), step);
    }
    CHECK(Contents(engine) == Contents(flat));
    CHECK(counted(engine) == counted(flat));
    std::uint64_t truncated = 0;
    for (const auto& count : described->truncated) truncated += count.load();
    CHECK_EQ(truncated, cut);
    return seen;
}

CASE(equal_lookups_of_flat_ids, testing::scaled(40)) {
    const Model model = testing::draw_model(random);
    const std::uint64_t seed = random.bits();
    const std::size_t most = random.chance(0.5) ? 20 : 500;
    std::vector<Floats> first;
    for (const Kernels* kernels : available_kernels())
        for (unsigned threads : {1U, 2U, 4U}) {
            const auto engine = testing::make_engine(model.tables, threads, kernels->name),
                       flat = testing::make_engine(model.tables);
            const auto seen = run_steps(model, *engine, *flat, seed, most);
            if (first.empty()) first = seen;
            CHECK(seen == first);
        }
}

// In a file every update goes through undo slots, whose size is settled before.
CASE(equal_lookups_in_memory, testing::scaled(12)) {
    const Model model = testing::draw_model(random);
    const testing::SharedFile file;
    const auto engine = file.create(model.tables, 2), flat = testing::make_engine(model.tables);
    run_steps(model, *engine, *flat, random.bits(), 200);
}

CASE(bad_bags_change_nothing, 1) {
    const Model model =
        testing::counting_model(2, {{Pooling::sum, false}, {Pooling::mean, true}, {Pooling::none, false}});
    const auto engine = testing::make_engine(model.tables);
    const auto described = model.describe(*engine);
    BagCall call = testing::call_of({{{1}, {2, 3}}, {{4}, {5}}, {{6, 7, 8, 9}, {}}});
    BagCall falls = call;
    falls.offsets[3] = 2; // the first sample of b begins before a's last ends
    CHECK_THROWS(InputError, "offsets fall from 3 to 2 at sample 0 of feature 'b'",
                 testing::lookup(*engine, described, falls, {true, 1, 1}));
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        BagCall weighted = call;
        weighted.flat_weights[4] = bad;
        CHECK_THROWS(InputError, "the weight of id 5 in sample 1 of feature 'b' is",
                     testing::lookup(*engine, described, weighted, {true, 1, 1}));
    }
    call.flat_weights[0] = std::nanf(""); // a is not weighted
    CHECK_EQ(engine->num_rows(0), 0);
    CHECK_EQ(described->truncated[2].load(), 0);
    const auto looked = testing::lookup(*engine, described, call, {true, 1, 1});
    CHECK_EQ(engine->num_rows(0), 8); // 9 was cut
    CHECK_EQ(described->truncated[2].load(), 1);
    Model large = testing::counting_model(65536, {{Pooling::sum, false}});
    const auto wide = testing::make_engine(large.tables);
    const BagInputs huge{nullptr, nullptr, nullptr, 65536, 65536};
    CHECK_THROWS(InputError, "at most 2^32-1 fit, make smaller batches",
                 wide->lookup_bags(large.describe(*wide), huge, {true, 1, 1}, nullptr, nullptr, true));
}

CASE(nonfinite_gradients_are_named, 1) {
    const Model model =
        testing::counting_model(2, {{Pooling::sum, false}, {Pooling::mean, false}, {Pooling::none, false}});
    const auto engine = testing::make_engine(model.tables, 2);
    const auto described = model.describe(*engine);
    const BagCall call = testing::call_of({{{1}, {2}}, {{}, {7, 5}}, {{3}, {2, 4}}});
    const auto first = testing::lookup(*engine, described, call, {true, 1, 1}),
               second = testing::lookup(*engine, described, call, {true, 1, 1});
    const std::vector<Ticket*> one{first.ticket.get()}, both{first.ticket.get(), second.ticket.get()};
    const Contents before(*engine);
    const Floats fine(*described, call, -1.0f);
    auto refused = [&](const std::string& words, auto spoil) {
        Floats bad = fine;
        spoil(bad);
        CHECK_THROWS(NonFiniteError, words, testing::update(*engine, one, {bad.gradients()}, 1.0f, 1));
        CHECK_THROWS(NonFiniteError, words + " (batch 2 of 2)",
                     testing::update(*engine, both, {fine.gradients(), bad.gradients()}, 1.0f, 1));
        CHECK(Contents(*engine) == before);
        CHECK(!first.ticket->used && !second.ticket->used);
    };
    refused("table 'item': the gradient of id 2 in sample 1 of feature 'a'",
            [](Floats& bad) { bad.block[5] = std::nanf(""); });
    refused("the gradient of id 5 in sample 1 of feature 'b'", // the smaller of two ids in the bag
            [](Floats& bad) { bad.block[6] = -std::numeric_limits<float>::infinity(); });
    refused("the gradient of id 4 in sample 1 of feature 'c'",
            [](Floats& bad) { bad.sequences[0][2 * (3 + 1)] = std::nanf(""); });
    Floats large = fine;
    large.block[4] = large.sequences[0][2 * 3] = 3e38f; // both of id 2
    CHECK_THROWS(NonFiniteError, "the gradients of id 2 (first in sample 1 of feature 'a') sum to inf",
                 testing::update(*engine, one, {large.gradients()}, 1.0f, 1));
    CHECK_THROWS(NonFiniteError, "the gradient of id 2 in sample 1 of feature 'a'", // scaling makes it infinite
                 testing::update(*engine, one, {large.gradients()}, 2.0f, 1));
    CHECK(Contents(*engine) == before);
    Floats unseen = fine; // where there is no id
    unseen.block[2] = unseen.sequences[0][2] = std::nanf("");
    testing::update(*engine, both, {unseen.gradients(), fine.gradients()}, 1.0f, 1);
    CHECK(testing::peek(*engine, {{1, 2, 4, 7}}) == (std::vector<float>{2, 2, 4, 4, 2, 2, 1, 1}));
}

// Gradients that only the scale or a weight makes infinite.
CASE(products_may_overflow, 1) {
    const Model model = testing::counting_model(1, {{Pooling::sum, true}});
    const auto engine = testing::make_engine(model.tables);
    const auto described = model.describe(*engine);
    for (const auto& [weight, scale, bad] : {std::tuple(1.0f, 1e10f, true), std::tuple(-1e20f, 1.0f, true),
                                             std::tuple(1e-5f, 1e8f, false), std::tuple(1e20f, 1e-20f, false)}) {
        BagCall call = testing::call_of({{{7}}});
        call.flat_weights = {weight};
        const auto looked = testing::lookup(*engine, described, call, {true, 1, 1});
        Floats large(*described, call, 1e30f);
        auto update = [&] { testing::update(*engine, {looked.ticket.get()}, {large.gradients()}, scale, 1); };
        if (bad)
            CHECK_THROWS(NonFiniteError, "the gradient of id 7 in sample 0 of feature 'a' holds", update());
        else
            update();
        CHECK(std::isfinite(testing::peek(*engine, {{7}})[0]));
    }
}

CASE(missing_gradients_leave_rows_alone, 1) {
    const Model model = testing::counting_model(1, {{Pooling::sum, false}, {Pooling::none, false}});
    const auto engine = testing::make_engine(model.tables);
    const auto described = model.describe(*engine);
    const BagCall call = testing::call_of({{{1}, {2}}, {{3}, {2, 4}}});
    const Floats ones(*described, call, -1.0f);
    auto update = [&](const BagGradients& gradients) {
        const auto looked = testing::lookup(*engine, described, call, {true, 1, 1});
        testing::update(*engine, {looked.ticket.get()}, {gradients}, 1.0f, 1);
        return testing::peek(*engine, {{1, 2, 3, 4}});
    };
    CHECK(update({nullptr, {ones.sequences[0].data()}}) == (std::vector<float>{0, 1, 1, 1}));
    CHECK(update({ones.block.data(), {nullptr}}) == (std::vector<float>{1, 2, 1, 1}));
    CHECK(update({nullptr, {nullptr}}) == (std::vector<float>{1, 2, 1, 1}));
    CHECK_EQ(engine->stats(0).counters.updated, 5);
    CHECK_EQ(engine->stats(0).counters.not_applied_absent, 0);
}

CASE(tickets_of_bags_are_good_once, 1) {
    const Model model = testing::counting_model(1, {{Pooling::sum, false}});
    const auto engine = testing::make_engine(model.tables), other = testing::make_engine(model.tables);
    const auto described = model.describe(*engine);
    const BagCall call = testing::call_of({{{1}, {2}}});
    const Floats ones(*described, call, -1.0f);
    const auto a = testing::lookup(*engine, described, call, {true, 1, 1}),
               b = testing::lookup(*engine, described, call, {true, 1, 1}),
               c = testing::lookup(*engine, described, call, {true, 1, 1});
    auto update = [&](Engine& where, const std::vector<Ticket*>& tickets) {
        testing::update(where, tickets, std::vector<BagGradients>(tickets.size(), ones.gradients()), 1.0f, 1);
    };
    CHECK_THROWS(TicketError, "another store", update(*other, {a.ticket.get()}));
    CHECK_THROWS(TicketError, "used already", update(*engine, {a.ticket.get(), b.ticket.get(), a.ticket.get()}));
    CHECK(!a.ticket->used && !b.ticket->used);
    CHECK_THROWS(TicketError, "lookup of bags", testing::update(*engine, *a.ticket, ones.block, 1));
    const auto flat = testing::lookup(*engine, {{1, 2}}, 1);
    CHECK_THROWS(TicketError, "flat lookup", update(*engine, {flat.ticket.get()}));
    engine->drop(*c.ticket);
    CHECK_THROWS(TicketError, "used already", engine->drop(*c.ticket));
    CHECK_THROWS(TicketError, "used already", update(*engine, {a.ticket.get(), c.ticket.get()}));
    CHECK_THROWS(TicketError, "another store", other->drop(*a.ticket));
    update(*engine, {a.ticket.get(), b.ticket.get()});
    CHECK(a.ticket->used && b.ticket->used);
    CHECK(testing::peek(*engine, {{1, 2}}) == (std::vector<float>{2, 2}));
}

// Lookups and updates at the same time, by several callers: every gradient is applied once.
CASE(callers_lose_nothing, testing::scaled(6)) {
    const Model model =
        testing::counting_model(3, {{Pooling::sum, false}, {Pooling::sum, false}, {Pooling::none, false}});
    const auto engine = testing::make_engine(model.tables, 2);
    const auto described = model.describe(*engine);
    const std::uint64_t seed = random.bits();
    std::atomic<std::uint64_t> applied{0};
    testing::in_threads(3, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned round = 0; round < testing::scaled(60); ++round) {
            std::vector<std::unique_ptr<Ticket>> tickets;
            std::vector<Ticket*> pointers;
            std::vector<Floats> ones;
            std::vector<BagGradients> given;
            const std::uint32_t step = engine->next_step();
            for (std::uint32_t n = own.between(1, 2); n > 0; --n) {
                const BagCall call = testing::draw_call(own, model, 400);
                auto looked = testing::lookup(*engine, described, call, {true, step, step});
                for (float value : looked.rows.block) CHECK(value == std::floor(value));
                applied += 3 * looked.ticket->size;
                ones.emplace_back(*described, call, -1.0f);
                tickets.push_back(std::move(looked.ticket));
                pointers.push_back(tickets.back().get());
            }
            for (const Floats& each : ones) given.push_back(each.gradients());
            testing::update(*engine, pointers, given, 1.0f, step);
        }
    });
    double total = 0;
    engine->table(0).check();
    for (const testing::Line& line : testing::rows_of(*engine, 0))
        for (std::uint32_t i = 0; i < 3; ++i) total += line.value(i);
    CHECK_EQ(total, static_cast<double>(applied.load()));
}

} // namespace
