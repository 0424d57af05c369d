// The life of a row against a simple oracle: one table, every option mixed, steps that come late; after each call the
// same rows, sightings and counters. Then the cases that the oracle's random calls reach rarely.
#include <cmath>
#include <limits>

#include "base/errors.hpp"
#include "table_oracle.hpp"

using namespace satrap;
using testing::check_same, testing::draw_config, testing::draw_gradients, testing::draw_ids, testing::Ids,
    testing::kInitial, testing::Line, testing::Oracle, testing::Random;

namespace {

// The same lookup in both; without a ticket if both are full.
testing::Looked lookup_both(Engine& engine, Oracle& oracle, const Ids& ids, const LookupStep& at) {
    std::vector<float> expected;
    try {
        expected = oracle.lookup(ids, at);
    } catch (const Oracle::Full&) {
        CHECK_THROWS(CapacityError, "set capacity to at least",
                     testing::lookup(engine, {ids}, at.step, at.oldest_open, at.first_epoch));
        return {};
    }
    testing::Looked looked = testing::lookup(engine, {ids}, at.step, at.oldest_open, at.first_epoch);
    CHECK(looked.rows == expected);
    return looked;
}

// Training with staleness: steps lie between the oldest open one and the newest, in any order.
CASE(lives_as_the_oracle_says, testing::scaled(1000)) {
    const std::uint32_t kinds = random.pick(std::vector{50U, 600U, 2000U}),
                        most = random.pick(std::vector{3U, 20U, 60U});
    const TableConfig drawn = draw_config(random);
    const TableConfig config = random.chance(0.7) ? drawn : testing::direct_table(drawn, kinds);
    const auto engine = testing::make_engine({config}, 1, random.pick(available_kernels())->name);
    Oracle oracle(config);
    const unsigned calls = most == 3 ? 1500 : 150; // with few ids a call, the oldest rows are of many steps
    const std::uint32_t staleness = random.below(random.chance(0.5) ? 6 : 40);
    std::vector<std::pair<testing::Looked, Ids>> open;
    std::uint32_t newest = 1, oldest = 1;
    for (unsigned call = 0; call < calls; ++call) {
        newest += random.below(3) + (random.chance(0.02) ? 20 : 0);
        oldest = std::max(oldest, newest > staleness ? newest - staleness : 1);
        const Ids ids = draw_ids(random, kinds, most, config.is_direct());
        LookupStep at{true, random.between(oldest, newest), oldest, random.chance(0.5)};
        if (random.chance(0.1)) // and some far behind, which no reader waits for
            at.step = at.oldest_open = random.between(newest > 300 ? newest - 300 : 1, newest);
        const unsigned kind = random.below(10);
        if (kind < 6) {
            testing::Looked looked = lookup_both(*engine, oracle, ids, at);
            if (looked.ticket != nullptr) open.emplace_back(std::move(looked), ids);
        } else if (kind < 9 && !open.empty()) { // a ticket that may be old: its rows may have gone
            std::swap(open[random.below(open.size())], open.back());
            const Ids& of_ticket = open.back().second;
            const std::vector<float> gradients = draw_gradients(random, config, of_ticket.size());
            oracle.update(of_ticket, gradients, at.step);
            testing::update(*engine, *open.back().first.ticket, gradients, at.step);
            open.pop_back();
        } else if (kind == 9) {
            CHECK(testing::peek(*engine, {ids}) == oracle.read(ids));
            const std::vector<float> gradients = draw_gradients(random, config, ids.size());
            oracle.update(ids, gradients, at.step);
            testing::update(*engine, {ids}, gradients, at.step);
        }
        if (call % (calls / 15) == 0) check_same(*engine, oracle);
    }
    check_same(*engine, oracle);
}

// A full bucket, new ids in order, and updates that come late to rows which are about to go: their stamps rise to the
// middle of the order, which the table has partly worked out already.
CASE(late_updates_keep_the_order, testing::scaled(30)) {
    TableConfig config = testing::counting_table("late", 1);
    config.capacity = random.between(64, 300);
    config.admission = random.chance(0.5) ? AdmissionKind::always : AdmissionKind::min_count;
    config.min_count = 2;
    config.window = random.between(64, 300);
    config.initial_a = kInitial;
    const auto engine = testing::make_engine({config});
    Oracle oracle(config);
    const auto capacity = static_cast<std::uint32_t>(config.capacity);
    for (std::uint32_t step = 1000; step < 1000 + 4 * capacity; ++step) {
        const Ids ids{random.below(2 * capacity), random.below(2 * capacity)};
        for (const std::uint32_t at : {step, step - random.below(300)}) { // sightings come late, too
            if (at != step && config.admission == AdmissionKind::always) continue;
            lookup_both(*engine, oracle, ids, {true, at, at});
        }
        const auto rows = oracle.rows();
        for (unsigned i = 0; i < 3 && !rows.empty(); ++i) {
            const auto& [id, row] = *std::next(rows.begin(), random.below(rows.size()));
            const std::uint32_t at = row.stamp + random.below(capacity / 4);
            testing::update(*engine, {{id}}, {1.0f}, std::min(at, step));
            oracle.update({id}, {1.0f}, std::min(at, step));
        }
    }
    check_same(*engine, oracle);
}

CASE(pinned_rows_stay, 1) {
    TableConfig config = testing::counting_table("pinned", 1);
    config.capacity = 4;
    const auto engine = testing::make_engine({config});
    for (std::uint64_t id : {1, 2, 3, 4}) testing::lookup(*engine, {{id}}, static_cast<std::uint32_t>(id));
    CHECK_THROWS(CapacityError, "bucket 0 of 1 has 4 rows", testing::lookup(*engine, {{5}}, 5, 1));
    CHECK_THROWS(CapacityError, "set capacity to at least 5,", testing::lookup(*engine, {{5}}, 5, 1));
    testing::lookup(*engine, {{5}}, 5, 2); // 1 goes
    CHECK_THROWS(CapacityError, "open steps (3 and later)",
                 testing::lookup(*engine, {{6, 7}}, 6, 3)); // 6 evicts 2, 7 fails
    Ids left;
    for (const Line& line : testing::rows_of(*engine, 0)) left.push_back(line.id);
    CHECK(left == (Ids{3, 4, 5, 6}));
    testing::update(*engine, {{3}}, {-1.0f}, 7); // an update stamps, too: 4 is the oldest now
    testing::lookup(*engine, {{8}}, 8);
    CHECK_EQ(testing::peek(*engine, {{3}})[0], 1.0f);
    // A whole batch of new ids into a full table: none of them evicts another.
    CHECK_THROWS(CapacityError, "at least 5,", testing::lookup(*engine, {{11, 12, 13, 14, 15}}, 20));
    engine->table(0).check();
}

CASE(on_full_raise_and_grow, 1) {
    TableConfig config = testing::counting_table("bounded", 1);
    config.capacity = 3;
    config.on_full = OnFull::raise;
    config.expire_after = 10;
    auto engine = testing::make_engine({config});
    testing::lookup(*engine, {{1, 2, 3}}, 1);
    CHECK_THROWS(CapacityError, "on_full is 'raise'", testing::lookup(*engine, {{4}}, 5));
    CHECK_EQ(engine->num_rows(0), 3);
    testing::lookup(*engine, {{4}}, 12); // those of step 1 have expired: there is room
    CHECK_EQ(engine->num_rows(0), 1);
    config.on_full = OnFull::grow;
    engine = testing::make_engine({config});
    testing::lookup(*engine, {{1, 2, 3, 4, 5}}, 1);
    CHECK_EQ(engine->num_rows(0), 5);
}

CASE(expires_at_the_exact_step, 1) {
    TableConfig config = testing::counting_table("expiring", 1, 2);
    config.expire_after = 5;
    const auto engine = testing::make_engine({config});
    auto count_of = [&](std::uint64_t id) { return testing::peek(*engine, {{id}})[0]; };
    testing::lookup(*engine, {{1}}, 10);
    testing::update(*engine, {{1}}, {-7.0f}, 10);
    testing::lookup(*engine, {{2}}, 15); // 15 - 5 = 10: stamped at it, not before it
    CHECK_EQ(count_of(1), 7.0f);
    testing::lookup(*engine, {{2}}, 16, 10); // 11 - but step 10 is still open
    CHECK_EQ(count_of(1), 7.0f);
    testing::lookup(*engine, {{2}}, 16);
    CHECK_EQ(count_of(1), 0.0f); // gone for readers at once, in whichever bucket
    testing::update(*engine, {{1}}, {-1.0f}, 16);
    float value = 5.0f;
    CHECK(!engine->table(0).read(1, &value, nullptr));
    CHECK_EQ(value, 5.0f);
    const Counters counters = engine->stats(0).counters;
    CHECK_EQ(counters.expired, 1);
    CHECK_EQ(counters.not_applied_absent, 1);
    CHECK_EQ(testing::lookup(*engine, {{1}}, 17).rows[0], 0.0f); // inserted again
    CHECK_EQ(engine->num_rows(0), 2);
}

// A row that a very late step inserts is stamped with the line of expiry: it lives, and no id of a batch takes the
// place of another.
CASE(a_very_late_row_lives, 1) {
    TableConfig config = testing::counting_table("late", 1);
    config.expire_after = 5;
    config.capacity = 3;
    const auto engine = testing::make_engine({config});
    testing::lookup(*engine, {{1}}, 50); // rows stamped before 45 are gone
    testing::update(*engine, *testing::lookup(*engine, {{2, 3}}, 7).ticket, {-1.0f, -2.0f}, 7);
    CHECK(testing::peek(*engine, {{1, 2, 3}}) == (std::vector<float>{0, 1, 2}));
    CHECK_EQ(testing::rows_of(*engine, 0).at(1).step, 45);
    CHECK_THROWS(CapacityError, "open steps (8 and later)", testing::lookup(*engine, {{4}}, 8));
    engine->table(0).check();
    testing::lookup(*engine, {{1}}, 51);
    CHECK_EQ(engine->num_rows(0), 1);
    CHECK_EQ(engine->stats(0).counters.expired, 2);
}

// Whether an id gets in is a function of (seed, table, id, step), whatever came before, and about p of them do.
CASE(probability_is_pure, testing::scaled(20)) {
    TableConfig config = testing::counting_table("lottery", 1, 4);
    config.admission = AdmissionKind::probability;
    config.probability = random.real(0.05f, 0.95f);
    Ids ids;
    while (ids.size() < 4000) ids.push_back(random.bits());
    auto admitted = [&](std::uint64_t seed, std::uint32_t step) {
        Ids in;
        const auto engine = testing::make_engine({config}, 1, "auto", seed);
        testing::lookup(*engine, {Ids(ids.begin() + 2000, ids.end())}, step);
        testing::lookup(*engine, {ids}, step); // those refused a moment ago are refused again
        for (const Line& line : testing::rows_of(*engine, 0)) in.push_back(line.id);
        return in;
    };
    const Ids first = admitted(1, 10);
    CHECK(first == admitted(1, 10));
    CHECK(first != admitted(1, 11) && first != admitted(2, 10));
    const double p = config.probability, n = 4000;
    CHECK(std::fabs(static_cast<double>(first.size()) - p * n) < 6 * std::sqrt(n * p * (1 - p)));
}

// A full table must not cost an id its sightings: the call can be repeated once there is room.
CASE(a_failed_lookup_keeps_the_sightings, 1) {
    TableConfig config = testing::counting_table("patient", 1);
    config.admission = AdmissionKind::min_count;
    config.min_count = 3;
    config.capacity = 1;
    const auto engine = testing::make_engine({config});
    for (std::uint32_t step : {1, 2, 3}) testing::lookup(*engine, {{1}}, step);
    for (std::uint32_t step : {4, 5}) testing::lookup(*engine, {{2}}, step);
    CHECK_THROWS(CapacityError, "is full", testing::lookup(*engine, {{2}}, 6, 3));
    engine->table(0).check();
    testing::lookup(*engine, {{2}}, 6);
    CHECK_EQ(testing::rows_of(*engine, 0).at(0).id, 2);
    engine->table(0).check();
}

CASE(nonfinite_gradients, 1) {
    const float infinity = std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max();
    TableConfig config = testing::counting_table("strict", 3, 2);
    TableConfig skipping = testing::counting_table("lenient", 1, 2);
    skipping.on_nonfinite = OnNonfinite::skip;
    const auto engine = testing::make_engine({skipping, config});
    const testing::IdsOfTables ids{{1, 2, 1, 3}, {11, 12, 11}};
    const auto ticket = testing::lookup(*engine, ids, 1).ticket;
    const std::vector<float> fine(4 + 9, -1.0f);
    auto with = [&](std::vector<std::pair<std::size_t, float>> bad) {
        std::vector<float> gradients = fine;
        for (auto [at, value] : bad) gradients[at] = value;
        return gradients;
    };
    CHECK_THROWS(NonFiniteError, "table 'strict': the gradient of id 12 at position 1 ",
                 testing::update(*engine, *ticket, with({{4 + 5, infinity}, {4 + 8, NAN}}), 1));
    CHECK_THROWS(NonFiniteError, "id 11 (first at position 0) sum to",
                 testing::update(*engine, *ticket, with({{4, most}, {4 + 6, most}}), 1));
    CHECK_THROWS(NonFiniteError, "id 11 at position 2 ",
                 testing::update(*engine, *ticket, with({{4, most}, {4 + 6, -infinity}, {0, NAN}}), 1));
    CHECK(testing::peek(*engine, ids) ==
          std::vector<float>(13, 0.0f)); // nothing was applied, not even to the other table
    CHECK_EQ(engine->stats(0).counters.skipped + engine->stats(1).counters.updated, 0);
    testing::update(*engine, *ticket, with({{0, NAN}, {1, -infinity}, {3, -most}}), 1); // and the ticket is still good
    CHECK(testing::peek(*engine, {{1, 2, 3}, {11, 12}}) == (std::vector<float>{1, 0, most, 2, 2, 2, 1, 1, 1}));
    CHECK_EQ(engine->stats(0).counters.skipped, 2);
    CHECK_EQ(engine->stats(0).counters.updated, 2);
    testing::update(*engine, {{3, 1, 3}, {}}, {-most, -1.0f, -most}, 2); // a sum that overflows: both positions skipped
    CHECK(testing::peek(*engine, {{1, 3}, {}}) == (std::vector<float>{2, most}));
    CHECK_EQ(engine->stats(0).counters.skipped, 4);
}

CASE(check_sees_what_is_broken, 1) {
    struct Break {
        const char* says;
        void (*by)(Engine&, Bucket&);
    };
    const Break breaks[] = {
        {"version that has not started", [](Engine&, Bucket& b) { b.rows.head(0).changed = 9; }},
        {"after the latest step", [](Engine&, Bucket& b) { b.rows.head(0).stamp = 99; }},
        {"before a step that was swept", [](Engine&, Bucket& b) { b.swept_before = 3; }},
        {"a row's id belongs to another bucket",
         [](Engine& e, Bucket& b) {
             std::uint64_t id = 0;
             while (e.table(0).bucket_number(id) == e.table(0).bucket_number(b.rows.id(0))) ++id;
             b.rows.publish(b.rows.insert(id, mix64(id)), 1, 1);
         }},
        {"more rows than the bucket's share",
         [](Engine&, Bucket& b) {
             testing::Random random(1);
             while (b.rows.size() <= 4) {
                 const std::uint64_t id = random.bits();
                 b.rows.publish(b.rows.insert(id, mix64(id)), 1, 1);
             }
         }},
        {"an id has a row and a sighting",
         [](Engine&, Bucket& b) {
             const std::uint64_t id = b.rows.id(0);
             b.sightings.publish(b.sightings.insert(id, mix64(id)), 1, 1);
         }},
        {"counted beyond its admission", [](Engine&, Bucket& b) { b.sightings.head(0).changed = 7; }},
        {"a removal in the future", [](Engine&, Bucket& b) { b.removed.push_back({1, 5}); }},
        {"more hits than lookups", [](Engine&, Bucket& b) { b.counters.hits = b.counters.lookups + 1; }},
    };
    for (const Break& each : breaks) {
        if (kAssertions && std::string_view(each.says).starts_with("more rows")) continue; // Rows::insert asserts it
        TableConfig config = testing::counting_table("broken", 1, 2);
        config.admission = AdmissionKind::min_count;
        config.min_count = 2;
        config.capacity = 8;
        const auto engine = testing::make_engine({config});
        testing::lookup(*engine, {{1, 2, 3, 4}}, 1);
        testing::lookup(*engine, {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, 2);
        engine->table(0).check();
        Bucket& bucket = engine->table(0).bucket(0);
        CHECK(bucket.rows.size() > 0 && bucket.sightings.size() > 0);
        each.by(*engine, bucket);
        CHECK_THROWS(InvariantError, each.says, engine->table(0).check());
    }
}

} // namespace
