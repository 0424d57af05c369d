// Rows out of a table as columns and into another: all of them, or what changed since a version, and the log of removed
// ids with its bound. What files add to this is tested in Python.
#include <map>

#include "bag_draws.hpp"
#include "base/errors.hpp"
#include "unmix.hpp"

using namespace satrap;
using testing::Contents, testing::Ids, testing::IdsOfTables, testing::Line, testing::Random;

namespace {

TableConfig draw_config(Random& random, std::size_t number) {
    TableConfig config = testing::draw_table(random, number);
    config.num_buckets = 1U << random.below(4);
    config.window = random.between(8, 200);
    config.capacity = random.chance(0.6) ? random.between(200, 400) : 0;
    if (random.chance(0.3)) config.expire_after = 6;
    return random.chance(0.7) ? config : testing::direct_table(config, 3000);
}

// The columns of a range of buckets, straight into another engine.
void copy_rows(Engine& from, Engine& to, std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since) {
    const RowColumns c = from.export_rows(t, first, last, since);
    to.import_rows(t, c.rows, reinterpret_cast<const std::uint64_t*>(c.id.memory),
                   reinterpret_cast<const std::uint32_t*>(c.step.memory), c.values.memory,
                   reinterpret_cast<const float*>(c.state.memory));
    for (BlockPool::Block block : {c.id, c.step, c.values, c.state}) from.blocks()->give(block);
}

void copy_sightings(Engine& from, Engine& to, std::size_t t) {
    const RowColumns c = from.export_sightings(t, 0, from.table(t).config().num_buckets);
    to.import_sightings(t, c.rows, reinterpret_cast<const std::uint64_t*>(c.id.memory),
                        reinterpret_cast<const std::uint32_t*>(c.step.memory),
                        reinterpret_cast<const std::uint32_t*>(c.values.memory), true);
    for (BlockPool::Block block : {c.id, c.step, c.values, c.state}) from.blocks()->give(block);
}

// A save as snapshot.py makes it: a new version begins, then rows, removed ids and sightings, bucket range by range.
std::uint32_t copy(Random& random, Engine& from, Engine& to, std::size_t t, std::uint32_t since) {
    const std::uint32_t version = from.table(t).begin_version(), buckets = from.table(t).config().num_buckets;
    CHECK(since == 0 || from.removed_since(t) <= since);
    const std::uint32_t middle = random.below(buckets + 1);
    if (since != 0) { // all rows are read before the removed ids, and applied after them
        testing::rows_of(from, t, since);
        to.import_removed(t, from.export_removed(t, 0, middle, since));
        to.import_removed(t, from.export_removed(t, middle, buckets, since));
    }
    to.import_sightings(t, 0, nullptr, nullptr, nullptr, true);
    copy_rows(from, to, t, 0, middle, since);
    copy_rows(from, to, t, middle, buckets, since);
    copy_sightings(from, to, t);
    to.reach_step(from.latest_step());
    to.table(t).ledger().version.store(version);
    return version;
}

CASE(a_copy_is_equal_and_goes_on_equally, testing::scaled(150)) {
    const std::vector<TableConfig> configs{draw_config(random, 0), draw_config(random, 1)};
    const auto from = testing::make_engine(configs, 2), to = testing::make_engine(configs, 1);
    testing::train(*from, random, 20, 60, 500);
    for (std::size_t t = 0; t < 2; ++t) copy(random, *from, *to, t, 0);
    CHECK(Contents(*from) == Contents(*to));
    Random same = random;
    testing::train(*from, random, 10, 60, 500); // evictions, draws and admissions go on as if nothing had happened
    testing::train(*to, same, 10, 60, 500);
    CHECK(Contents(*from) == Contents(*to));
}

CASE(changes_lead_from_copy_to_copy, testing::scaled(150)) {
    const std::vector<TableConfig> configs{draw_config(random, 0)};
    const auto from = testing::make_engine(configs), to = testing::make_engine(configs);
    testing::train(*from, random, 10, 60, 500);
    std::uint32_t since = copy(random, *from, *to, 0, 0);
    for (unsigned round = 0; round < 6; ++round) {
        CHECK(testing::rows_of(*from, 0, since).empty());
        testing::train(*from, random, random.below(12), 60, 500);
        since = copy(random, *from, *to, 0, since);
        CHECK(Contents(*from) == Contents(*to));
    }
}

// Ids whose hashes begin alike, too: then one bin of the counting sort holds all of them.
CASE(exports_are_in_the_order_of_the_hashes, testing::scaled(40)) {
    TableConfig config = testing::counting_table("t", 1, 1U << random.below(4));
    config.admission = AdmissionKind::min_count;
    config.min_count = 2;
    config.window = 1U << 16;
    const auto engine = testing::make_engine({config});
    const bool is_narrow = random.chance(0.3);
    std::map<std::uint64_t, std::uint64_t> by_hash; // the rows' ids
    const std::size_t n = random.below(3000);
    Ids ids;
    while (by_hash.size() < n) {
        const std::uint64_t id = is_narrow ? testing::unmix64(random.below(1U << 20)) : random.bits();
        if (by_hash.emplace(mix64(id), id).second) ids.push_back(id);
    }
    testing::lookup(*engine, {ids}, 1); // all are sighted
    const auto in_order = [&](RowColumns columns) {
        const auto* found = reinterpret_cast<const std::uint64_t*>(columns.id.memory);
        CHECK_EQ(columns.rows, n);
        std::size_t i = 0;
        for (const auto& entry : by_hash) CHECK_EQ(found[i++], entry.second);
        for (BlockPool::Block block : {columns.id, columns.step, columns.values, columns.state})
            engine->blocks()->give(block);
    };
    in_order(engine->export_sightings(0, 0, config.num_buckets));
    testing::lookup(*engine, {ids}, 2);
    in_order(engine->export_rows(0, 0, config.num_buckets, 0));
    engine->table(0).begin_version();
    engine->import_removed(0, ids);
    const Ids removed = engine->export_removed(0, 0, config.num_buckets, 2);
    CHECK_EQ(removed.size(), n);
    CHECK(std::is_sorted(removed.begin(), removed.end(),
                         [](std::uint64_t a, std::uint64_t b) { return mix64(a) < mix64(b); }));
    engine->table(0).check();
}

// Exactly the rows that a lookup or an update touched carry the new version; a look without training touches none.
CASE(changes_are_the_touched_rows, 1) {
    const auto engine = testing::make_engine({testing::counting_table("t", 2, 4)});
    testing::lookup(*engine, {{1, 2, 3, 4}}, 1);
    CHECK_EQ(engine->table(0).begin_version(), 2);
    testing::peek(*engine, {{1, 2}});
    CHECK_EQ(testing::rows_of(*engine, 0, 2).size(), 0);
    testing::lookup(*engine, {{3}}, 2); // only its stamp
    testing::update(*engine, {{4}}, {1.0f, 1.0f}, 2);
    const std::vector<Line> changed = testing::rows_of(*engine, 0, 2);
    CHECK_EQ(changed.size(), 2);
    CHECK_EQ(changed[0].id + changed[1].id, 7);
    CHECK_EQ(testing::rows_of(*engine, 0, 1).size(), 4);
    CHECK_EQ(testing::rows_of(*engine, 0, 0).size(), 4);
    engine->table(0).check();
}

// Evictions before the first save are not remembered, later ones are, each id once, until the log overflows.
CASE(removed_ids_are_remembered_up_to_a_bound, 1) {
    TableConfig config = testing::counting_table("t", 1);
    config.capacity = 100;
    const auto engine = testing::make_engine({config});
    std::uint32_t step = 0;
    std::uint64_t id = 0;
    auto evict = [&](unsigned n) {
        for (unsigned i = 0; i < n; ++i) testing::lookup(*engine, {{++id}}, ++step);
    };
    evict(150);
    CHECK(engine->export_removed(0, 0, 1, 0).empty());
    CHECK_EQ(engine->table(0).begin_version(), 2);
    evict(10);
    CHECK_EQ(engine->export_removed(0, 0, 1, 2).size(), 10);
    CHECK_EQ(engine->table(0).begin_version(), 3);
    evict(5);
    testing::lookup(*engine, {{1}}, ++step); // was there, was removed, is there again, and goes once more
    evict(101);
    CHECK_EQ(engine->export_removed(0, 0, 1, 3).size(), 5 + 102);
    CHECK_EQ(engine->export_removed(0, 0, 1, 2).size(), 10 + 5 + 102);
    CHECK_EQ(engine->removed_since(0), 2);
    evict(5000);
    const std::uint32_t known_since = engine->removed_since(0);
    CHECK_EQ(known_since, 4); // half of the log went, entries of version 3 among them
    CHECK_EQ(engine->table(0).begin_version(), 4);
    evict(20);
    CHECK_EQ(engine->export_removed(0, 0, 1, 4).size(), 20);
    CHECK_EQ(engine->removed_since(0), 4);
    engine->table(0).check();
}

CASE(removed_rows_are_removed, 1) {
    TableConfig config = testing::counting_table("t", 1, 2);
    const auto engine = testing::make_engine({config});
    testing::lookup(*engine, {{1, 2, 3}}, 1);
    engine->table(0).begin_version();
    engine->import_removed(0, std::vector<std::uint64_t>{2, 77, 2});
    CHECK_EQ(engine->num_rows(0), 2);
    CHECK(engine->export_removed(0, 0, 2, 2) == Ids{2}); // so that changes of the copy know it, too
    engine->table(0).check();
}

CASE(too_many_rows_are_refused, 1) {
    TableConfig config = testing::counting_table("narrow", 1);
    config.capacity = 2;
    const auto engine = testing::make_engine({config});
    const Ids ids{1, 2, 1, 3};
    const std::uint32_t steps[4] = {1, 2, 3, 4};
    const float values[4] = {1, 2, 3, 4};
    CHECK_THROWS(CapacityError, "no room for id 3",
                 engine->import_rows(0, 4, ids.data(), steps, reinterpret_cast<const std::byte*>(values), nullptr));
    engine->reach_step(4);
    engine->table(0).check();
    const std::vector<Line> rows = testing::rows_of(*engine, 0);
    CHECK_EQ(rows.size(), 2);
    CHECK_EQ(rows[0].value(), 3.0f); // a repeated id replaces its row
    CHECK_EQ(rows[0].step, 3);
}

// Sightings of a foreign or an overlapping save: beyond the window, twice, of ids with rows, counted zero or too far.
CASE(sightings_stay_in_their_window, 40) {
    TableConfig config = testing::counting_table("patient", 1, 2);
    config.admission = AdmissionKind::min_count;
    config.min_count = 3;
    config.window = random.between(1, 60);
    const auto engine = testing::make_engine({config});
    for (std::uint32_t step : {1, 2, 3}) testing::lookup(*engine, {{500, 501, 502}}, step);
    const std::uint64_t with_rows = engine->num_rows(0);
    Ids ids;
    std::vector<std::uint32_t> steps, counts;
    for (unsigned i = 0; i < 300; ++i) {
        ids.push_back(random.chance(0.1) ? 500 + random.below(3) : random.below(120));
        steps.push_back(random.between(1, 50));
        counts.push_back(random.below(5));
    }
    engine->reach_step(50);
    engine->import_sightings(0, ids.size(), ids.data(), steps.data(), counts.data(), random.chance(0.5));
    engine->table(0).check();
    CHECK_EQ(engine->num_rows(0), with_rows);
    for (const Line& line : testing::sightings_of(*engine, 0)) CHECK(line.id < 500 || with_rows < 3);
    for (std::uint32_t step = 51; step < 55; ++step)
        testing::lookup(*engine, {Ids(ids.begin(), ids.begin() + 20)}, step);
    engine->table(0).check();
}

} // namespace
