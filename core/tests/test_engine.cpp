// Many tables in one call: the result depends on neither threads nor SIMD path, tickets are good once and at home, and
// callers on several threads lose nothing and count nothing twice. Run under TSan like all of these tests.
#include <atomic>
#include <cmath>
#include <limits>
#include <set>

#include "bag_draws.hpp"
#include "base/errors.hpp"

using namespace satrap;
using testing::Contents, testing::Ids, testing::IdsOfTables, testing::Random;

namespace {

TableConfig draw_config(Random& random, std::size_t number) {
    TableConfig config = testing::draw_table(random, number);
    config.num_buckets = 1U << random.below(7);
    config.optimizer.weight_decay = random.chance(0.5) ? 0.01 : 0.0;
    config.initial = random.chance(0.5) ? InitialKind::uniform : InitialKind::normal;
    config.admission = std::vector{AdmissionKind::always, AdmissionKind::always, AdmissionKind::probability,
                                   AdmissionKind::min_count}[random.below(4)];
    config.probability = 0.6;
    config.window = 1 + random.below(3000);
    config.capacity = random.chance(0.6) ? 4000 + random.below(3000) : 0;
    config.expire_after = random.chance(0.4) ? 3 : 0;
    return config;
}

// Everything that a run of lookups and updates leaves and returns.
struct Outcome {
    Contents contents;
    std::vector<std::vector<float>> returned;
    std::vector<std::vector<std::uint64_t>> counted;
    bool operator==(const Outcome&) const = default;
};

Outcome run_workload(const std::vector<TableConfig>& configs, unsigned threads, const std::string& simd,
                     std::uint64_t seed) {
    Random random(seed);
    const auto engine = testing::make_engine(configs, threads, simd);
    std::vector<std::vector<float>> returned;
    std::vector<testing::Looked> open;
    for (std::uint32_t step = 1; step <= 8; ++step) {
        IdsOfTables ids(configs.size());
        for (Ids& each : ids)
            if (!random.chance(0.2)) {
                const std::uint32_t n = random.chance(0.2) ? random.below(10) : random.between(500, 1500),
                                    kinds = random.between(20, 4000);
                for (std::uint32_t i = 0; i < n; ++i) each.push_back(mix64(random.below(kinds)));
            }
        open.push_back(testing::lookup(*engine, ids, step, step > 1 ? step - 1 : 1));
        returned.push_back(open.back().rows);
        if (open.size() > 1) { // one batch of staleness
            std::vector<float> gradients(open.front().ticket->num_floats);
            for (float& g : gradients) g = random.real(-1.0f, 1.0f);
            if (!gradients.empty() && random.chance(0.3)) gradients[random.below(gradients.size())] = std::nanf("");
            testing::update(*engine, *open.front().ticket, gradients, step - 1);
            open.erase(open.begin());
        }
        returned.push_back(testing::peek(*engine, ids));
    }
    Outcome outcome{Contents(*engine), std::move(returned), {}};
    for (std::size_t t = 0; t < configs.size(); ++t) {
        const auto stats = engine->stats(t);
        const Counters& c = stats.counters;
        outcome.counted.push_back({stats.rows, stats.sightings, c.lookups, c.hits, c.inserted, c.refused, c.evicted,
                                   c.expired, c.updated, c.not_applied_absent, c.skipped});
        CHECK_EQ(c.lookups, c.hits + c.inserted + c.refused);
        CHECK_EQ(stats.rows, c.inserted - c.evicted - c.expired);
    }
    return outcome;
}

CASE(same_for_any_threads_and_path, testing::scaled(20)) {
    std::vector<TableConfig> configs;
    while (configs.size() < 6) configs.push_back(draw_config(random, configs.size()));
    const std::uint64_t seed = random.bits();
    const Outcome one = run_workload(configs, 1, "auto", seed);
    for (unsigned threads : {2, 3}) CHECK(run_workload(configs, threads, "auto", seed) == one);
    for (const Kernels* kernels : available_kernels())
        CHECK(run_workload(configs, random.between(1, 2), kernels->name, seed) == one);
}

// A table alone and among others, and rows of other tables with the same ids: none disturbs another.
CASE(tables_are_apart, 5) {
    std::vector<TableConfig> configs;
    while (configs.size() < 3)
        configs.push_back(testing::counting_table(std::string(1, static_cast<char>('a' + configs.size())), 2, 4));
    configs[1].initial = InitialKind::uniform;
    configs[1].initial_a = -1.0;
    configs[1].initial_b = 1.0;
    const auto together = testing::make_engine(configs), alone = testing::make_engine({configs[1]});
    Ids ids;
    while (ids.size() < 100) ids.push_back(random.bits());
    const auto looked = testing::lookup(*together, {ids, ids, ids}, 1);
    const auto single = testing::lookup(*alone, {ids}, 1);
    CHECK(std::vector<float>(looked.rows.begin() + 200, looked.rows.begin() + 400) == single.rows);
    testing::update(*together, {{}, ids, {}}, std::vector<float>(200, -1.0f), 2);
    testing::update(*alone, {ids}, std::vector<float>(200, -1.0f), 2);
    CHECK(testing::rows_of(*together, 1) == testing::rows_of(*alone, 0));
    CHECK(testing::peek(*together, {ids, {}, ids}) == std::vector<float>(400, 0.0f));
    configs[1].name = "another";
    CHECK(testing::lookup(*testing::make_engine({configs[1]}), {ids}, 1).rows !=
          single.rows);                          // the name is part of the draw
    testing::lookup(*together, {{}, {}, {}}, 3); // nothing at all is a batch, too
    testing::update(*together, {{}, {}, {}}, {}, 3);
}

CASE(tickets_are_good_once_and_at_home, 1) {
    const auto engine = testing::make_engine({testing::counting_table("home", 1, 4)});
    const auto other = testing::make_engine({testing::counting_table("home", 1, 4)});
    auto looked = testing::lookup(*engine, {{1, 2, 1}}, 1);
    CHECK_EQ(looked.ticket->size, 3);
    const std::vector<float> ones(3, -1.0f);
    CHECK_THROWS(TicketError, "another store", testing::update(*other, *looked.ticket, ones, 1));
    CHECK(!looked.ticket->used);
    testing::update(*engine, *looked.ticket, ones, 1);
    CHECK(looked.ticket->used);
    CHECK_THROWS(TicketError, "used already", testing::update(*engine, *looked.ticket, ones, 1));
    CHECK(testing::peek(*engine, {{1, 2}}) == (std::vector<float>{2, 1}));
    const auto prepared = testing::prepare(*engine, {{2, 3}}); // without a lookup: 3 has no row
    testing::update(*engine, *prepared, {-1.0f, -1.0f}, 2);
    CHECK(testing::peek(*engine, {{2, 3}}) == (std::vector<float>{2, 0}));
    CHECK_EQ(engine->stats(0).counters.not_applied_absent, 1);
}

// If many threads update with the same ticket, one succeeds and the others are refused.
CASE(one_ticket_many_threads, 1) {
    const auto engine = testing::make_engine({testing::counting_table("contested", 1)}, 2);
    for (std::uint32_t step = 1; step <= testing::scaled(40); ++step) {
        const auto looked = testing::lookup(*engine, {{5}}, step);
        std::atomic<unsigned> refused{0};
        testing::in_threads(3, [&](unsigned) {
            try {
                testing::update(*engine, *looked.ticket, {-1.0f}, step);
            } catch (const TicketError&) {
                ++refused;
            }
        });
        CHECK_EQ(refused.load(), 2);
        CHECK_EQ(testing::peek(*engine, {{5}})[0], static_cast<float>(step));
    }
}

CASE(unknown_path_is_refused, 1) {
    CHECK_THROWS(InputError, "simd='mmx'", testing::make_engine({testing::counting_table("t", 1)}, 1, "mmx"));
}

CASE(steps_only_rise, 1) {
    const auto engine = testing::make_engine({testing::counting_table("t", 1)});
    CHECK_EQ(engine->next_step(), 1);
    testing::lookup(*engine, {{1}}, 10);
    CHECK_EQ(engine->latest_step(), 10);
    testing::lookup(*engine, {{1}}, 5);
    CHECK_EQ(engine->latest_step(), 10);
    testing::update(*engine, {{1}}, {0.0f}, 12);
    CHECK_EQ(engine->next_step(), 13);
    testing::in_threads(3, [&](unsigned) {
        for (unsigned i = 0; i < 100; ++i) engine->next_step();
    });
    CHECK_EQ(engine->latest_step(), 313);
}

void train(Engine& engine, Random random, unsigned calls, std::uint32_t ids_a_call,
           std::atomic<std::uint64_t>& applied) {
    for (unsigned call = 0; call < calls; ++call) {
        IdsOfTables ids(engine.num_tables());
        for (Ids& each : ids)
            for (std::uint32_t i = random.below(ids_a_call); i > 0; --i)
                each.push_back(mix64(random.below(call % 2 == 0 ? 40 : 2000)));
        const std::uint32_t step = engine.next_step();
        const auto looked = testing::lookup(engine, ids, step, step > 8 ? step - 8 : 1);
        for (float value : looked.rows) CHECK(value >= 0 && value == std::floor(value));
        const auto again = random.chance(0.3) ? testing::prepare(engine, ids) : nullptr;
        testing::update(engine, again == nullptr ? *looked.ticket : *again,
                        std::vector<float>(looked.rows.size(), -1.0f), step);
        applied += looked.rows.size();
    }
}

// Every row has the same number in all of its elements: it is never seen half-written.
void watch(Engine& engine, Random random, const std::atomic<unsigned>& training) {
    while (training != 0) {
        const std::size_t t = random.below(engine.num_tables());
        const std::uint32_t dim = engine.table(t).config().dim;
        switch (random.below(6)) {
        case 0: engine.table(t).check(); break;
        case 1: engine.stats(t).counters; break;
        case 2: engine.table(t).begin_version(); break;
        case 3:
            for (const testing::Line& line : testing::rows_of(engine, t, random.below(2)))
                for (std::uint32_t i = 1; i < dim; ++i) CHECK_EQ(line.value(i), line.value(0));
            break;
        case 4: {
            std::vector<float> values(dim);
            if (engine.table(t).read(mix64(random.below(40)), values.data(), nullptr))
                CHECK(values == std::vector<float>(dim, values[0]));
            break;
        }
        default: {
            IdsOfTables ids(engine.num_tables());
            for (unsigned i = 0; i < 50; ++i) ids[t].push_back(mix64(random.below(40)));
            const std::vector<float> rows = testing::peek(engine, ids);
            for (std::size_t i = 0; i < rows.size(); ++i) CHECK_EQ(rows[i], rows[i - i % dim]);
        }
        }
        engine.export_removed(t, 0, engine.table(t).config().num_buckets, engine.removed_since(t));
    }
}

// Calls train(0) and train(1) on two threads, beside a third that watches.
void train_and_watch(Engine& engine, std::uint64_t seed, const std::function<void(unsigned)>& train) {
    std::atomic<unsigned> training{2};
    testing::in_threads(3, [&](unsigned thread) {
        if (thread == 2) return watch(engine, Random(seed), training);
        try {
            train(thread);
        } catch (...) {
            --training;
            throw;
        }
        --training;
    });
}

CASE(callers_lose_nothing, testing::scaled(8)) {
    std::vector<TableConfig> configs;
    for (std::uint32_t t = 0; t < 4; ++t)
        configs.push_back(testing::counting_table("shared " + std::to_string(t), 1 + 5 * t, 1U << (2 * t)));
    const auto engine = testing::make_engine(configs, 2);
    std::atomic<std::uint64_t> applied{0};
    const std::uint64_t seed = random.bits();
    train_and_watch(*engine, seed, [&](unsigned thread) {
        train(*engine, Random(seed + 1 + thread), testing::scaled(120), 1200, applied);
    });
    double total = 0;
    for (std::size_t t = 0; t < configs.size(); ++t) {
        engine->table(t).check();
        for (const testing::Line& line : testing::rows_of(*engine, t))
            for (std::uint32_t i = 0; i < configs[t].dim; ++i) total += line.value(i);
    }
    CHECK_EQ(total, static_cast<double>(applied.load()));
}

// The same with a table that evicts and one that expires: nothing to count, all invariants hold.
CASE(callers_with_rows_that_go, testing::scaled(8)) {
    std::vector<TableConfig> configs{testing::counting_table("small", 4, 4), testing::counting_table("short", 4, 8),
                                     testing::counting_table("slow", 4, 2)};
    configs[0].capacity = 3000; // less than there are ids, more than a few open batches need
    configs[1].expire_after = 10;
    configs[2].admission = AdmissionKind::min_count;
    configs[2].min_count = 3;
    configs[2].window = 100;
    const auto engine = testing::make_engine(configs, 2);
    const std::uint64_t seed = random.bits();
    train_and_watch(*engine, seed, [&](unsigned thread) {
        for (unsigned round = 0; round < testing::scaled(60); ++round) {
            Random own(seed + thread + 10 * round);
            IdsOfTables ids(3);
            for (Ids& each : ids)
                for (unsigned i = 0; i < 300; ++i) each.push_back(mix64(own.below(6000)));
            const std::uint32_t step = engine->next_step();
            try {
                const auto looked = testing::lookup(*engine, ids, step, step);
                testing::update(*engine, *looked.ticket, std::vector<float>(looked.rows.size(), -1.0f), step);
            } catch (const CapacityError&) { // the other caller is so far ahead that all rows are of later steps
            }
        }
    });
    for (std::size_t t = 0; t < configs.size(); ++t) {
        const TableStats stats = engine->stats(t);
        const Counters& c = stats.counters;
        engine->table(t).check();
        CHECK_EQ(stats.rows, c.inserted - c.evicted - c.expired);
        CHECK(c.lookups >= c.hits + c.inserted + c.refused);
    }
    CHECK(engine->num_rows(0) <= 3000);
}

// A late step looks up while later steps of another call raise the line of expiry: whatever expires meanwhile, no id
// gets the row of another. Nothing is updated, so each id reads its initial value, whether it has a row or not.
CASE(no_id_gets_the_row_of_another, testing::scaled(6)) {
    constexpr std::uint64_t kHits = 3000, kMisses = 300;
    const unsigned rounds = testing::scaled(300);
    TableConfig expiring = testing::counting_table("expiring", 1);
    expiring.initial = InitialKind::uniform;
    expiring.initial_a = -1.0;
    expiring.initial_b = 1.0;
    expiring.expire_after = 1;
    if (random.chance(0.5)) expiring.capacity = kHits + random.below(kMisses); // else rows expire in a sweep
    const auto engine = testing::make_engine({expiring, testing::counting_table("clock", 1)});
    std::atomic<unsigned> begun{0}, ended{0}, wrong{0};
    Random pauses(random.bits());
    testing::in_threads(2, [&](unsigned thread) {
        for (unsigned round = 1; round <= rounds; ++round) {
            if (thread == 1) { // raises the line while the other thread is in its lookup
                while (begun.load() < round) relax_cpu();
                for (unsigned spin = pauses.below(20000); spin > 0; --spin) relax_cpu();
                testing::lookup(*engine, {{}, {1}}, 10 * round);
                ended.store(round);
                continue;
            }
            Ids ids;
            for (std::uint64_t i = 0; i < kHits; ++i) ids.push_back(mix64(i));
            testing::lookup(*engine, {ids, {}}, 1);
            for (std::uint64_t i = 0; i < kMisses; ++i) ids.push_back(mix64((std::uint64_t{round} << 20) + i));
            const std::vector<float> expected = testing::peek(*engine, {ids, {}});
            begun.store(round);
            try {
                wrong += testing::lookup(*engine, {ids, {}}, 1).rows != expected;
            } catch (const CapacityError&) { // no row of the batch makes room for another
            }
            while (ended.load() < round) relax_cpu();
        }
    });
    CHECK_EQ(wrong.load(), 0);
    engine->table(0).check();
}

} // namespace
