// Rows in two tiers, frames of a device and home: the oracle of test_table.cpp for any sizes of the tiers, every row in
// one place, and the rows that go home are those that were used least recently. Then what does not fit.
#include <map>
#include <set>

#include "frame_calls.hpp"

using namespace satrap;
using testing::Device, testing::Found, testing::Ids, testing::IdsOfTables, testing::kMost, testing::Line,
    testing::on_device, testing::Random;

namespace {

// Random calls, of which those that do not fit are refused; the tables know nothing of tiers, except those calls.
CASE(tiers_change_no_result, testing::scaled(400)) {
    const std::vector<TableConfig> configs = testing::draw_tables(random);
    Device device(configs);
    for (std::size_t p = 0; p < device.engine->directory().num_pools(); ++p)
        if (random.chance(0.9))
            device.engine->directory().set_device_frames(p, random.pick(std::vector{0U, 20U, 100U, 200U}));
    testing::check_random_calls(random, device, configs, random.below(4));
}

// A dictionary of the rows in frames, over two tables that share them: what a lookup needs comes in, and the smallest
// (stamp, table, id) below the oldest open step leave.
CASE(the_least_recently_used_rows_go_home, testing::scaled(60)) {
    std::vector<TableConfig> configs{on_device(testing::counting_table("a", 1, 4)),
                                     on_device(testing::counting_table("b", 1, 2))};
    Device device(configs, random.pick(std::vector{1U, 2U}));
    const std::uint32_t k = random.below(3), kinds = random.pick(std::vector{100U, 400U}),
                        frames = random.between(40 * (k + 1), 200);
    device.engine->directory().set_device_frames(0, frames);
    std::map<std::pair<std::size_t, std::uint64_t>, std::uint32_t> in_frames; // to the stamp
    std::map<std::size_t, std::uint64_t> moved_out;
    for (std::uint32_t step = 1; step < 60; ++step) {
        const IdsOfTables ids{testing::draw_ids(random, kinds, 20), testing::draw_ids(random, kinds, 20)};
        const std::uint32_t oldest = step > k ? step - k : 1;
        std::set<std::pair<std::size_t, std::uint64_t>> missing;
        auto expected = in_frames;
        for (std::size_t t = 0; t < 2; ++t)
            for (const std::uint64_t id : ids[t]) {
                if (!expected.contains({t, id}))
                    missing.insert({t, id});
                else
                    expected[{t, id}] = step;
            }
        std::set<std::tuple<std::uint32_t, std::size_t, std::uint64_t>> by_use;
        for (const auto& [row, stamp] : expected)
            if (stamp < oldest) by_use.insert({stamp, row.first, row.second});
        bool fits = true;
        for (std::size_t used = expected.size() + missing.size(); used > frames && fits; --used) {
            if (!(fits = !by_use.empty())) break;
            const auto [stamp, t, id] = *by_use.begin();
            expected.erase({t, id});
            by_use.erase(by_use.begin());
            ++moved_out[t];
        }
        CHECK(fits);
        for (const auto& row : missing) expected[row] = step;
        device.lookup(ids, {true, step, oldest});
        device.check();
        in_frames = expected;
        for (std::size_t t = 0; t < 2; ++t) {
            std::size_t rows = 0;
            for (const Line& line : testing::rows_of(*device.engine, t)) {
                CHECK_EQ(is_frame(Device::place_of(line)), in_frames.contains({t, line.id}));
                rows += is_frame(Device::place_of(line));
            }
            CHECK_EQ(device.engine->stats(t).in_frames, rows);
            CHECK_EQ(device.engine->stats(t).moved_out, moved_out[t]);
        }
    }
}

// The order of the frames alone, against a sort.
CASE(the_order_of_frames_is_that_of_a_sort, testing::scaled(300)) {
    const std::uint32_t size = random.between(1, 100);
    FrameOrder order(size);
    std::map<std::uint32_t, FrameOrder::Use> model; // by frame
    for (unsigned call = 0; call < 200; ++call) {
        const std::uint32_t frame = random.below(size), stamp = random.between(1, 40);
        switch (random.below(4)) {
        case 0: {
            const FrameOrder::Use use{stamp, random.below(3), random.bits() % 50, frame, 0};
            order.put(use);
            model[frame] = use;
            break;
        }
        case 1:
            if (!model.contains(frame)) break;
            model[frame].stamp = std::max(stamp, model[frame].stamp);
            order.touch(frame, model[frame].stamp);
            break;
        case 2:
            order.clear(frame);
            model.erase(frame);
            break;
        default:
            std::vector<FrameOrder::Use> found, expected;
            const std::size_t n = random.below(10);
            order.oldest(n, stamp, found);
            for (const auto& [_, use] : model)
                if (use.stamp < stamp) expected.push_back(use);
            std::sort(expected.begin(), expected.end());
            expected.resize(std::min(n, expected.size()));
            CHECK_EQ(found.size(), expected.size());
            for (std::size_t i = 0; i < found.size(); ++i)
                CHECK(!(found[i] < expected[i]) && !(expected[i] < found[i]));
            if (random.chance(0.3)) {
                order.retry();
                break;
            }
            for (const FrameOrder::Use& use : found) {
                order.clear(use.frame);
                model.erase(use.frame);
            }
        }
        std::size_t used = 0;
        for (const auto& [_, use] : model) used += use.stamp >= stamp;
        CHECK_EQ(order.used_since(stamp), used);
    }
}

CASE(a_batch_that_does_not_fit_is_refused_by_name, 1) {
    TableConfig item = testing::counting_table("item", 1, 2);
    Device device({on_device(item), on_device(testing::counting_table("user", 1))});
    device.engine->directory().set_device_frames(0, 4);
    CHECK_THROWS(CapacityError,
                 "table 'item': the batch has 5 unique ids; expected at most 4, the rows in 16 bytes of the device: "
                 "give the tables at least 20 bytes of device_memory",
                 device.lookup({{1, 2, 3, 4, 5, 5}, {}}, {true, 1, 1}));
    CHECK_THROWS(CapacityError,
                 "table 'user': the batch has 3 unique ids, and with the tables before it that share its memory 5",
                 device.lookup({{1, 2}, {1, 2, 3}}, {true, 1, 1}));
    CHECK_EQ(device.engine->num_rows(0) + device.engine->num_rows(1), 0);
    CHECK_EQ(device.engine->latest_step(), 0);
    device.lookup({{1, 2}, {1}}, {true, 1, 1});
    CHECK_THROWS(CapacityError,
                 "table 'item': at step 2 the batch has 3 unique ids of the tables that share its memory, and 2 other "
                 "rows are in use by open steps (1 and later); expected at most 4 together, the rows in 16 bytes of "
                 "the device: give the tables at least 20 bytes of device_memory",
                 device.lookup({{3, 4}, {1}}, {true, 2, 1}));
    CHECK_EQ(device.engine->num_rows(0) + device.engine->num_rows(1), 3); // nothing was changed
    CHECK_EQ(device.engine->latest_step(), 1);
    device.check();
    CHECK_EQ(device.moves, 0);
    CHECK(device.lookup({{1, 2, 3, 4}, {1}}, {false, 0, 0}).rows == std::vector<float>(5, 0.0f)); // its rows are home
    device.lookup({{3, 4}, {1}}, {true, 2, 2});
    device.check();
    CHECK_EQ(device.moves, 1);
    CHECK_THROWS(InputError, "frame pool 0 has rows already", device.engine->directory().set_device_frames(0, 8));
}

// Ids that may be refused are not counted before the lookup.
CASE(ids_that_get_no_row_need_no_frame, 1) {
    TableConfig config = testing::counting_table("item", 1);
    config.admission = AdmissionKind::min_count;
    config.min_count = 2;
    Device device({on_device(config)});
    device.engine->directory().set_device_frames(0, 2);
    for (std::uint32_t step = 1; step < 3; ++step) device.lookup({{1, 2}}, {true, step, step});
    device.lookup({{1, 2, 3, 4, 5}}, {true, 3, 3});
    CHECK_EQ(device.engine->num_rows(0), 2);
    CHECK_THROWS(CapacityError, "has no room for 3 rows of the batch", device.lookup({{1, 2, 3, 4, 5}}, {true, 4, 4}));
    device.check();
    CHECK_EQ(device.engine->num_rows(0), 5);
}

// Threads look up, update, drop, count and remove; the device would carry out their calls one after another.
CASE(threads_leave_every_row_in_one_place, testing::scaled(8)) {
    TableConfig config = testing::counting_table("item", 1, 4);
    config.capacity = 400;
    TableConfig expiring = testing::counting_table("user", 1, 2);
    expiring.expire_after = 8;
    Device device({on_device(config), on_device(expiring)}, 2);
    device.engine->directory().set_device_frames(0, 300);
    const std::uint64_t seed = random.bits();
    testing::in_threads(4, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned call = 0; call < 200; ++call) {
            const auto done = testing::look_up_in_thread(own, device, 2, 300);
            if (!done) continue;
            Ticket* const tickets[] = {done->ticket.get()};
            if (own.chance(0.3)) {
                device.engine->drop(*done->ticket);
                if (own.chance(0.3)) device.engine->import_removed(0, Ids{done->ids[0]});
                if (own.chance(0.3)) testing::rows_of(*device.engine, 1);
                if (own.chance(0.3)) device.engine->directory().check();
            } else {
                device.engine->update_frames(tickets, std::vector<GivenParts>{{false, {true, own.chance(0.5)}}},
                                             done->step);
            }
        }
    });
    device.check();
}

} // namespace
