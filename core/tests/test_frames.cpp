// Tables whose rows are on a device, which here is a vector: the oracle of test_table.cpp with several tables and
// pools, and after each call the same rows, sightings and counters, and no frame of two rows. Then what such an engine
// refuses.
#include <array>
#include <limits>

#include "frame_calls.hpp"
#include "shared_file.hpp"

using namespace satrap;
using testing::Device, testing::Found, testing::Ids, testing::IdsOfTables, testing::kMost, testing::Line,
    testing::on_device, testing::Random;

namespace {

CASE(live_as_the_oracle_says, testing::scaled(400)) {
    const std::vector<TableConfig> configs = testing::draw_tables(random);
    Device device(configs);
    testing::check_random_calls(random, device, configs, random.below(20));
}

// Rows pass from one engine to another as those of a snapshot; removed ones leave their frames.
CASE(rows_are_imported_with_their_values, testing::scaled(40)) {
    std::vector<TableConfig> configs{on_device(testing::counting_table("item", 1, 4))};
    if (random.chance(0.5)) configs[0].capacity = 64;
    Device from(configs), to(configs);
    for (std::uint32_t step = 1; step < 10; ++step) {
        const IdsOfTables ids{testing::draw_ids(random, 100, 20)};
        from.update(*from.lookup(ids, {true, step, step}).ticket, testing::draw_gradients_of(random, configs, ids),
                    step);
        to.lookup({testing::draw_ids(random, 100, 20)}, {true, step, step});
    }
    to.engine->import_removed(0, [&] {
        Ids ids;
        for (const Line& line : testing::rows_of(*to.engine, 0)) ids.push_back(line.id);
        return ids;
    }());
    to.check();
    CHECK_EQ(to.engine->num_rows(0), 0);
    const std::vector<Line> lines = testing::rows_of(*from.engine, 0);
    for (const Line& line : lines) {
        const std::uint32_t frame = to.engine->table(0).import_place(line.id, line.step);
        CHECK_EQ(to.engine->table(0).import_place(line.id, line.step), frame); // it replaces the row
        CHECK_EQ(to.engine->table(0).place_of(line.id), frame);
        to.write(0, frame, from.value(0, line));
    }
    to.check();
    const std::vector<Line> arrived = testing::rows_of(*to.engine, 0);
    CHECK_EQ(arrived.size(), lines.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
        CHECK_EQ(arrived[i].id, lines[i].id);
        CHECK_EQ(arrived[i].step, lines[i].step);
        CHECK_EQ(to.value(0, arrived[i]), from.value(0, lines[i]));
    }
    CHECK_EQ(to.engine->table(0).place_of(1), kNoFrame);
}

CASE(frames_are_used_again, 1) {
    TableConfig config = testing::counting_table("small", 1, 2);
    config.capacity = 8;
    TableConfig expiring = testing::counting_table("expiring", 1);
    expiring.expire_after = 2;
    Device device({on_device(config), on_device(expiring)});
    for (std::uint32_t step = 1; step < 200; ++step) device.lookup({{2 * step}, {step}}, {true, step, step});
    device.check();
    CHECK(device.engine->directory().pool(0).device.used() <= 8 + 4);
    for (std::size_t t = 0; t < 2; ++t) CHECK(device.engine->stats(t).counters.inserted == 199);
}

CASE(the_limit_of_frames_refuses_a_row, 1) {
    Device device({on_device(testing::counting_table("item", 1))});
    FramePool& pool = device.engine->directory().pool(0).device;
    pool.set_limit(3);
    CHECK_THROWS(CapacityError, "table 'item': all 3 frames of the device's memory are in use",
                 device.lookup({{1, 2, 3, 4}}, {true, 1, 1}));
    device.check();
    CHECK_EQ(device.engine->num_rows(0), 3); // those that were inserted before stay, and have their values
    CHECK(device.lookup({{1, 2, 3}}, {false, 0, 0}).rows == std::vector<float>(3, 0.0f));
    CHECK_THROWS(CapacityError, "all 3 frames", device.engine->table(0).import_place(4, 1));
    device.check();
    pool.set_limit(1); // never below what is used
    CHECK_EQ(pool.limit(), 3);
    pool.set_limit(kNoFrame);
    CHECK_EQ(pool.limit(), kMostFrames);
    device.lookup({{1, 2, 3, 4}}, {true, 2, 2});
    device.check();
}

// Threads look up, update and drop in the same buckets, while rows are evicted and their frames taken by others.
CASE(threads_never_share_a_frame, testing::scaled(8)) {
    TableConfig config = testing::counting_table("item", 1, 4);
    config.capacity = 400;
    Device device({on_device(config), on_device(testing::counting_table("user", 1, 2))}, 2);
    const std::uint64_t seed = random.bits();
    testing::in_threads(4, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned call = 0; call < 200; ++call) {
            const auto done = testing::look_up_in_thread(own, device, 5, std::numeric_limits<std::int32_t>::max());
            if (!done) continue;
            Ticket* const tickets[] = {done->ticket.get()};
            if (own.chance(0.3)) {
                device.engine->drop(*done->ticket);
                continue;
            }
            const GivenParts given[] = {{false, {true, own.chance(0.5)}}};
            const FrameRuns runs = device.engine->update_frames(tickets, given, done->step);
            const std::uint32_t used = device.engine->directory().pool(0).device.used();
            for (const std::uint32_t frame : runs.frames) CHECK(frame == kNoFrame || frame < used);
        }
    });
    CHECK(device.engine->directory().take_inserted().size() >= device.engine->num_rows(0) + device.engine->num_rows(1));
    device.check();
}

// An update that was ordered at its lookup visits no row, unless one may have another place, or lacks a mark.
CASE(ordered_updates_find_rows_again_if_they_may_have_changed, 1) {
    TableConfig config = testing::counting_table("item", 1);
    config.capacity = 4;
    config.frozen = {9, 10};
    Device device({on_device(config)});
    const auto lookup = [&](std::uint32_t step) { return device.lookup({{1, 2, 9}}, {true, step, step}).ticket; };
    const auto update = [&](Ticket& ticket, std::uint32_t step) {
        const std::size_t before = device.num_found_again;
        device.update(ticket, {{1.0f, 1.0f, 1.0f}}, step);
        return device.num_found_again - before;
    };
    auto ticket = lookup(2);
    CHECK_EQ(update(*ticket, 2), 0);
    CHECK_EQ(device.engine->stats(0).counters.updated, 2); // the frozen id is not
    CHECK_THROWS(TicketError, "used already", device.engine->order_frames(*ticket));
    ticket = lookup(4);
    CHECK_EQ(update(*ticket, 5), 1); // another step
    ticket = lookup(6);
    device.engine->table(0).begin_version();
    CHECK_EQ(update(*ticket, 6), 1);
    const RowColumns saved = device.engine->export_rows(0, 0, 1, 2);
    CHECK_EQ(saved.rows, 2); // the save of the new version has them
    for (BlockPool::Block block : {saved.id, saved.step, saved.values, saved.state})
        device.engine->blocks()->give(block);
    ticket = lookup(8);
    device.lookup({{3, 4}}, {true, 9, 9}); // evicts the row of id 1
    CHECK_EQ(update(*ticket, 8), 1);
    CHECK_EQ(device.engine->stats(0).counters.not_applied_absent, 1);
    CHECK_EQ(device.engine->stats(0).counters.updated, 2 + 2 + 2 + 1);
    ticket = lookup(10);
    device.lookup({{3}}, {true, 11, 10}); // evicts a row that no open step uses
    CHECK_EQ(update(*ticket, 10), 0);
    ticket = lookup(12);
    device.engine->table(0).import_place(1, 3);
    CHECK_EQ(update(*ticket, 12), 1);
    ticket = lookup(14); // later steps do not find their rows again
    CHECK_EQ(update(*ticket, 14), 0);
    CHECK_EQ(device.num_ordered, 7);
    device.check();
}

CASE(tickets_are_used_once, 1) {
    Device device({on_device(testing::counting_table("item", 1))}), other({on_device(testing::counting_table("b", 1))});
    Found found = device.lookup({{1, 2}}, {true, 1, 1}), foreign = other.lookup({{1}}, {true, 1, 1});
    Ticket* const tickets[] = {found.ticket.get()};
    const float gradients[kMost] = {};
    const BagGradients given[] = {{nullptr, {gradients}}};
    CHECK_EQ(device.engine->sum_bound(tickets), 2.0);
    CHECK(!device.engine->check_gradients(tickets, given, 1.0f));
    device.update(*found.ticket, {{1.0f, 1.0f}}, 1); // neither of them has used it
    CHECK_THROWS(TicketError, "used already", device.update(*found.ticket, {{1.0f, 1.0f}}, 1));
    CHECK_THROWS(TicketError, "used already", device.engine->sum_bound(tickets));
    CHECK_THROWS(TicketError, "used already", device.engine->check_gradients(tickets, given, 1.0f));
    CHECK_THROWS(TicketError, "another store", device.update(*foreign.ticket, {{1.0f}}, 1));
}

CASE(flat_calls_memory_files_and_migration_are_refused, 1) {
    Device device({on_device(testing::counting_table("item", 1))});
    Engine& engine = *device.engine;
    Found found = device.lookup({{1, 2}}, {true, 1, 1});
    Ticket* const tickets[] = {found.ticket.get()};
    const std::uint64_t id = 1;
    const std::uint32_t bucket = 0, step = 1;
    const std::int64_t offsets[] = {0, 1};
    const double lr = 1.0;
    float value = 5.0f, rows[kMost] = {};
    float* const sequences[] = {rows};
    const BagGradients gradients[] = {{nullptr, {rows}}};
    const BagInputs inputs{&id, nullptr, nullptr, 1, 1};
    auto refused = [](auto call) { CHECK_THROWS(InputError, "table 'item': its rows are on a device", call()); };
    refused([&] { engine.lookup(&id, offsets, {true, 2, 2}, &value, true); });
    refused([&] { engine.lookup(&id, offsets, {false, 0, 0}, &value, false); });
    refused([&] { engine.prepare(&id, offsets); });
    refused([&] { engine.lookup_bags(device.bags, inputs, {true, 2, 2}, nullptr, sequences, true); });
    refused([&] { engine.update_bags(tickets, gradients, 1.0f, 1, {&lr, 1}); });
    CHECK_THROWS(TicketError, "came from a lookup of bags", engine.update(*found.ticket, &value, 1, {&lr, 1}));
    refused([&] { engine.table(0).read(id, &value, nullptr); });
    refused([&] { engine.import_rows(0, 1, &id, &step, reinterpret_cast<std::byte*>(&value), nullptr); });
    std::vector<std::uint32_t> trainers;
    refused([&] { engine.ownership().freeze({&bucket, 1}, true); });
    refused([&] { engine.ownership().export_windows({&bucket, 1}, trainers); });
    refused([&] { engine.ownership().import_windows({&bucket, 1}, {}, {}); });
    refused([&] { engine.ownership().export_counters({&bucket, 1}); });
    refused([&] { engine.ownership().import_counters({&bucket, 1}, {}); });
    refused([&] { engine.ownership().forget({&bucket, 1}); });
    CHECK_EQ(value, 5.0f);
    CHECK_EQ(engine.num_rows(0), 2);
    device.check();
    device.update(*found.ticket, {{-1.0f, -2.0f}}, 1); // the ticket is still good
    CHECK(device.lookup({{1, 2}}, {false, 0, 0}).rows == (std::vector<float>{1.0f, 2.0f}));
    const testing::SharedFile file;
    CHECK_THROWS(InputError, "cannot be in a shared-memory file",
                 file.create({on_device(testing::counting_table("item", 1))}));
}

CASE(an_engine_has_its_rows_in_one_place, 1) {
    const TableConfig here = testing::counting_table("here", 1);
    TableConfig there = on_device(testing::counting_table("there", 1));
    CHECK_THROWS(InputError, "table 'there': its rows are on a device, unlike those of table 'here'",
                 testing::make_engine({here, there}));
    CHECK_THROWS(InputError, "table 'here': its rows are not on a device", testing::make_engine({there, here}));
    there.frame_pool = 1;
    CHECK_THROWS(InputError, "frame pool 1; expected one below 1", testing::make_engine({there}));
    const auto engine = testing::make_engine({here});
    const auto bags =
        std::make_shared<Bags>(std::vector<BagFeature>{{"here", 0, Pooling::sum, false, 0, false, false, 1, 0, {}}},
                               std::size_t{1}, engine->identity());
    const std::uint64_t id = 1;
    std::int32_t frame = 5;
    float row = 5.0f;
    const BagInputs inputs{&id, nullptr, nullptr, 1, 1};
    CHECK_THROWS(InputError, "table 'here': its rows are not on a device",
                 engine->lookup_frames(bags, inputs, {true, 1, 1}, &frame, true));
    const auto ticket = engine->lookup_bags(bags, inputs, {true, 1, 1}, &row, nullptr, true);
    Ticket* const tickets[] = {ticket.get()};
    const GivenParts given[] = {{true, {}}};
    CHECK_THROWS(InputError, "table 'here': its rows are not on a device", engine->update_frames(tickets, given, 1));
    CHECK_THROWS(InputError, "table 'here': its rows are not on a device",
                 engine->lookup_id_frames(&id, std::array<std::int64_t, 2>{0, 1}, {true, 1, 1}, &frame));
    CHECK_EQ(frame, 5);
}

// Other processes look up and update ids here, an id of several of them more than once.
CASE(ids_in_flat_arrays_find_the_frames_of_bags, 1) {
    Device device({on_device(testing::counting_table("item", 1)), on_device(testing::counting_table("user", 1))});
    Engine& engine = *device.engine;
    const std::uint64_t ids[] = {7, 8, 7, 7};
    const std::int64_t offsets[] = {0, 3, 4};
    std::int32_t frames[4] = {};
    const FrameLookup found = engine.lookup_id_frames(ids, offsets, {true, 1, 1}, frames);
    CHECK_EQ(found.num_ids, 4);
    CHECK(found.absent.empty());
    CHECK(frames[0] == frames[2] && frames[0] != frames[1] && frames[3] != frames[0]);
    CHECK_EQ(engine.directory().take_inserted().size(), 3);
    const std::int32_t places[] = {5, 3, 1, 9};
    const FrameRuns runs = engine.update_id_frames(ids, offsets, places, 1, false);
    CHECK_EQ(runs.first_run_of_table.size(), 3);
    std::map<std::uint32_t, std::vector<std::uint32_t>> of_frame;
    for (std::size_t r = 0; r < runs.frames.size(); ++r)
        if (runs.frames[r] != kNoFrame)
            of_frame[runs.frames[r]] = {runs.places.begin() + runs.begin[r], runs.places.begin() + runs.end[r]};
    CHECK(of_frame[static_cast<std::uint32_t>(frames[0])] == (std::vector<std::uint32_t>{5, 1}));
    CHECK(of_frame[static_cast<std::uint32_t>(frames[1])] == (std::vector<std::uint32_t>{3}));
    CHECK(of_frame[static_cast<std::uint32_t>(frames[3])] == (std::vector<std::uint32_t>{9}));
    CHECK_EQ(engine.stats(0).counters.updated, 2);
    const FrameLookup again = engine.lookup_id_frames(ids, offsets, {true, 1, 1}, frames, true);
    const FrameRuns ordered = engine.order_id_frames(*again.ticket, places);
    CHECK(ordered.frames == runs.frames && ordered.places == runs.places);
    CHECK(ordered.begin == runs.begin && ordered.end == runs.end);
    CHECK(!engine.update_ordered_frames(*again.ticket, 1));
    CHECK_EQ(engine.stats(0).counters.updated, 4);
    CHECK_EQ(engine.stats(1).counters.updated, 2);
    const std::uint32_t owners[] = {1, 0}; // the engine's tables have a bucket each
    engine.ownership().set(owners, 0);
    CHECK_THROWS(MovedError, "belongs to server 1", engine.update_id_frames(ids, offsets, places, 2, false));
    CHECK_THROWS(MovedError, "belongs to server 1", engine.lookup_id_frames(ids, offsets, {true, 2, 2}, frames));
    const std::uint64_t rows = engine.stats(0).rows;
    engine.ownership().share(0);
    engine.lookup_id_frames(ids, offsets, {true, 2, 2}, frames);
    engine.update_id_frames(ids, offsets, places, 2, false);
    CHECK(frames[0] >= 0 && rows == 0 && engine.stats(0).rows == 0); // its owner counts and saves them
    CHECK_EQ(engine.export_rows(0, 0, 1, 0).rows, 0);
    engine.directory().check();
}

} // namespace
