// A cut of all tables: what is exported of it is what the tables were when it was taken, whatever is looked up,
// updated, evicted, expired and sighted before a bucket is exported. A model that is trained alike, up to the cut, says
// what that was. Also the bound of the copies, and the calls that wait for it.
#include <atomic>
#include <thread>

#include "bag_draws.hpp"
#include "base/errors.hpp"

using namespace satrap;
using testing::Contents, testing::Line, testing::Random;

namespace {

constexpr std::size_t kNoLimit = SIZE_MAX;
constexpr auto kPatience = std::chrono::minutes(5);

TableConfig draw_config(Random& random, std::size_t number) {
    TableConfig config = testing::draw_table(random, number);
    config.num_buckets = 1U << random.below(4);
    config.window = random.between(8, 200);
    config.capacity = random.chance(0.6) ? random.between(200, 400) : 0;
    if (random.chance(0.5)) config.expire_after = random.between(1, 6);
    return random.chance(0.7) ? config : testing::direct_table(config, 3000);
}

// The tables of an engine as the exports of a cut return them, and what leads there from an earlier cut.
struct Exported {
    std::vector<std::vector<Line>> rows, sightings;
    std::vector<std::vector<std::uint64_t>> removed;
    std::vector<std::size_t> alive;
};

void sort_by_id(std::vector<Line>& lines) {
    std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.id < b.id; });
}

void in_hash_order(const std::vector<Line>& lines, bool direct) {
    CHECK(std::is_sorted(lines.begin(), lines.end(), [&](const Line& a, const Line& b) {
        return order_hash(a.id, direct) < order_hash(b.id, direct);
    }));
}

// Exports some buckets at a time; `between` runs before each export.
template <typename Between>
Exported export_all(Engine& engine, Random& random, const std::vector<std::uint32_t>& since, Between between) {
    Exported out;
    for (std::size_t t = 0; t < engine.num_tables(); ++t) {
        const TableConfig& config = engine.table(t).config();
        const std::size_t value_bytes = config.dim * (config.dtype == Dtype::float32 ? 4U : 2U);
        between();
        out.sightings.push_back(testing::lines_of(engine, engine.export_cut_sightings(t, 0, config.num_buckets), 4, 0));
        in_hash_order(out.sightings.back(), config.is_direct());
        out.rows.emplace_back();
        out.removed.emplace_back();
        out.alive.push_back(0);
        for (std::uint32_t b = 0; b < config.num_buckets;) {
            between();
            const std::uint32_t end = b + random.between(1, config.num_buckets - b);
            CutRows found = engine.export_cut(t, b, end, since[t]);
            const std::vector<Line> lines =
                testing::lines_of(engine, std::move(found.columns), value_bytes, config.state_dim());
            in_hash_order(lines, config.is_direct());
            out.rows[t].insert(out.rows[t].end(), lines.begin(), lines.end());
            out.removed[t].insert(out.removed[t].end(), found.removed.begin(), found.removed.end());
            out.alive[t] += found.alive;
            b = end;
        }
        sort_by_id(out.rows[t]);
        sort_by_id(out.sightings[t]);
        engine.end_cut(t);
    }
    CHECK_EQ(engine.cut_figures().bytes, 0);
    return out;
}

std::vector<std::size_t> all_tables(const Engine& engine) {
    std::vector<std::size_t> tables(engine.num_tables());
    for (std::size_t t = 0; t < tables.size(); ++t) tables[t] = t;
    return tables;
}

CASE(a_full_cut_stays_as_it_was, testing::scaled(200)) {
    const std::vector<TableConfig> configs{draw_config(random, 0), draw_config(random, 1)};
    const auto engine = testing::make_engine(configs, 2), model = testing::make_engine(configs, 1);
    const std::uint32_t kinds = random.between(50, 600);
    for (unsigned round = 0; round < 3; ++round) {
        Random same = random;
        const unsigned calls = random.below(15);
        same = random;
        testing::train(*engine, random, calls, 60, kinds);
        testing::train(*model, same, calls, 60, kinds);
        const std::vector<TableCut> cuts = engine->begin_cut(all_tables(*engine), kNoLimit, kPatience);
        const Contents expected(*model);
        const Exported found = export_all(*engine, random, {0, 0}, [&] {
            if (random.chance(0.3)) return;
            const unsigned more = random.between(1, 4);
            Random again = random;
            testing::train(*engine, random, more, 60, kinds);
            testing::train(*model, again, more, 60, kinds);
            if (random.chance(0.2)) engine->stats(0); // sweeps
        });
        CHECK(found.rows == expected.rows);
        CHECK(found.sightings == expected.sightings);
        for (std::size_t t = 0; t < 2; ++t) {
            CHECK_EQ(found.alive[t], expected.rows[t].size());
            CHECK(cuts[t].rows >= found.alive[t]);
            CHECK_EQ(cuts[t].version, round + 2);
            CHECK(found.removed[t].empty());
        }
        CHECK(Contents(*engine) == Contents(*model)); // the copies changed nothing
    }
}

CASE(changes_of_cuts_lead_from_cut_to_cut, testing::scaled(200)) {
    const std::vector<TableConfig> configs{draw_config(random, 0)};
    const auto engine = testing::make_engine(configs), model = testing::make_engine(configs),
               replica = testing::make_engine(configs);
    const std::uint32_t kinds = random.between(50, 600);
    const auto train = [&](unsigned calls) {
        Random same = random;
        testing::train(*engine, random, calls, 60, kinds);
        testing::train(*model, same, calls, 60, kinds);
    };
    std::uint32_t since = 0;
    for (unsigned round = 0; round < 6; ++round) {
        train(random.below(12));
        CHECK(since == 0 || engine->removed_since(0) <= since);
        const TableCut cut = engine->begin_cut(all_tables(*engine), kNoLimit, kPatience)[0];
        const Contents expected(*model);
        const Exported found = export_all(*engine, random, {since}, [&] { train(random.below(4)); });
        CHECK_EQ(found.alive[0], expected.rows[0].size());
        replica->table(0).reach(cut.version, cut.expire_before);
        replica->stats(0); // what has expired makes room
        replica->import_removed(0, found.removed[0]);
        replica->import_sightings(0, 0, nullptr, nullptr, nullptr, true);
        for (const Line& row : found.rows[0])
            replica->import_rows(0, 1, &row.id, &row.step, row.values.data(), row.state.data());
        for (const Line& seen : found.sightings[0])
            replica->import_sightings(0, 1, &seen.id, &seen.step,
                                      reinterpret_cast<const std::uint32_t*>(seen.values.data()), false);
        replica->reach_step(engine->latest_step());
        CHECK(Contents(*replica) == expected);
        since = cut.version;
    }
}

CASE(threads_train_while_a_cut_is_exported, testing::scaled(30)) {
    const std::vector<TableConfig> configs{draw_config(random, 0), draw_config(random, 1)};
    const auto engine = testing::make_engine(configs, 2), model = testing::make_engine(configs);
    Random same = random;
    testing::train(*engine, random, 12, 120, 800);
    testing::train(*model, same, 12, 120, 800);
    engine->begin_cut(all_tables(*engine), kNoLimit, kPatience);
    const Contents expected(*model);
    std::atomic<bool> is_done{false};
    std::vector<std::thread> trainers;
    for (unsigned i = 0; i < 2; ++i)
        trainers.emplace_back([&, seed = random.bits()] {
            Random own(seed);
            do try {
                    testing::train(*engine, own, 1, 120, 800);
                } catch (const CapacityError&) { // the other thread's step has long been open
                }
            while (!is_done);
        });
    const Exported found = export_all(*engine, random, {0, 0}, [] {});
    is_done = true;
    for (std::thread& trainer : trainers) trainer.join();
    CHECK(found.rows == expected.rows);
    CHECK(found.sightings == expected.sightings);
    for (std::size_t t = 0; t < 2; ++t) engine->table(t).check();
}

CASE(calls_wait_at_the_bound_until_rows_are_exported, 3) {
    const auto engine = testing::make_engine({testing::counting_table("t", 4, 4)});
    testing::train(*engine, random, 5, 200, 500);
    engine->begin_cut(all_tables(*engine), 1, kPatience);
    testing::train(*engine, random, 1, 2, 500); // the first call has room
    while (engine->cut_figures().bytes == 0)
        testing::lookup(*engine, {{mix64(random.below(500))}}, engine->next_step());
    std::atomic<bool> is_through{false};
    Random own(random.bits());
    std::thread trainer([&] {
        testing::lookup(*engine, {{mix64(1), mix64(2)}}, engine->next_step());
        is_through = true;
    });
    while (engine->cut_figures().waits == 0) std::this_thread::yield();
    testing::peek(*engine, {{mix64(1)}}); // what changes nothing does not wait
    CHECK(!is_through);
    export_all(*engine, random, {0}, [] {});
    trainer.join();
    const CutFigures figures = engine->cut_figures();
    CHECK_EQ(figures.bytes, 0);
    CHECK(figures.peak > 1);
    CHECK(figures.kept > 0);
    CHECK_EQ(figures.waits, 1);
    CHECK(figures.waited_ns > 0);
}

CASE(a_cut_that_nothing_exports_is_given_up, 1) {
    const auto engine = testing::make_engine({testing::counting_table("t", 4, 4)});
    testing::lookup(*engine, {{1, 2, 3}}, 1);
    engine->begin_cut(all_tables(*engine), 1, std::chrono::milliseconds(20));
    testing::lookup(*engine, {{1, 2, 3}}, 2);
    testing::lookup(*engine, {{1, 2, 3}}, 3); // waits, then continues
    CHECK_EQ(engine->cut_figures().bytes, 0);
    CHECK_THROWS(InputError, "given up", engine->export_cut(0, 0, 4, 0));
    CHECK_THROWS(InputError, "given up", engine->export_cut_sightings(0, 0, 4));
    engine->begin_cut(all_tables(*engine), kNoLimit, kPatience); // the next one is like any other
    CHECK_EQ(export_all(*engine, random, {0}, [] {}).alive[0], 3);
}

CASE(one_cut_of_a_table_at_a_time, 1) {
    const auto engine = testing::make_engine({testing::counting_table("t", 4), testing::counting_table("u", 4)});
    testing::lookup(*engine, {{1}, {2}}, 1);
    const std::size_t first[] = {0}, second[] = {1};
    engine->begin_cut(first, kNoLimit, kPatience);
    CHECK_THROWS(InputError, "table 't': a save of it has not ended",
                 engine->begin_cut(all_tables(*engine), kNoLimit, kPatience));
    CHECK_EQ(engine->begin_cut(second, kNoLimit, kPatience)[0].version, 2);
    testing::lookup(*engine, {{1}, {2}}, 2);
    CHECK(engine->cut_figures().bytes > 0);
    engine->end_cut(0);
    engine->end_cut(1);
    CHECK_EQ(engine->cut_figures().bytes, 0);
    CHECK_THROWS(InputError, "ended", engine->export_cut(0, 0, 1, 0));
}

} // namespace
