// Rows in two tiers, frames of a device and home: the oracle of test_table.cpp for any sizes of the tiers, every row in
// one place, and the rows that go home are those that were used least recently. Then what does not fit.
#include <set>

#include "frame_device.hpp"

using namespace satrap;
using testing::Device, testing::Found, testing::Ids, testing::IdsOfTables, testing::kMost, testing::Line,
    testing::on_device, testing::Oracle, testing::Random;

namespace {

// A lookup of the device, which has the rows of the oracles' or is refused; then it returns nothing.
std::unique_ptr<Ticket> checked_lookup(Device& device, std::vector<Oracle>& oracles, const IdsOfTables& ids,
                                       const LookupStep& at) {
    Found found;
    std::string refused;
    try {
        found = device.lookup(ids, at);
    } catch (const CapacityError& error) {
        refused = error.what();
    }
    if (refused.find("the batch has") != std::string::npos) return nullptr; // before anything was changed
    std::vector<float> expected;
    bool is_full = false;
    try {
        expected = testing::oracle_lookup(oracles, ids, at);
    } catch (const Oracle::Full&) {
        is_full = true;
    }
    if (refused.empty()) {
        CHECK(!is_full && found.rows == expected);
    } else {
        CHECK_EQ(refused.find("set capacity to at least") != std::string::npos, is_full);
        CHECK_EQ(refused.find("device_memory") != std::string::npos, !is_full);
    }
    return std::move(found.ticket);
}

// Random calls, of which those that do not fit are refused; the tables know nothing of tiers, except those calls.
CASE(tiers_change_no_result, testing::scaled(400)) {
    const std::vector<TableConfig> configs = testing::draw_tables(random);
    Device device(configs);
    std::vector<Oracle> oracles(configs.begin(), configs.end());
    for (std::size_t p = 0; p < device.engine->num_frame_pools(); ++p)
        if (random.chance(0.9)) device.engine->set_device_frames(p, random.pick(std::vector{0U, 20U, 100U, 200U}));
    struct Open {
        std::unique_ptr<Ticket> ticket;
        IdsOfTables ids;
    };
    std::vector<Open> open;
    const std::uint32_t kinds = random.pick(std::vector{30U, 300U, 1000U}), staleness = random.below(4);
    std::uint32_t newest = 1, oldest = 1;
    auto check = [&] {
        device.check();
        for (std::size_t t = 0; t < configs.size(); ++t)
            testing::check_same(*device.engine, t, oracles[t], [&](const Line& line) { return device.value(t, line); });
    };
    for (unsigned call = 0; call < 120; ++call) {
        newest += random.below(3) + (random.chance(0.02) ? 20 : 0);
        oldest = std::max(oldest, newest > staleness ? newest - staleness : 1);
        const LookupStep at{true, random.between(oldest, newest), oldest, random.chance(0.5)};
        IdsOfTables ids;
        for (std::size_t t = 0; t < configs.size(); ++t)
            ids.push_back(random.chance(0.2)
                              ? Ids{}
                              : testing::draw_ids(random, kinds, random.pick(std::vector{3U, 20U, kMost})));
        const unsigned kind = random.below(10);
        if (kind < 5) {
            if (auto ticket = checked_lookup(device, oracles, ids, at)) open.push_back({std::move(ticket), ids});
        } else if (kind < 9 && !open.empty()) { // a ticket that may be old: its rows may have gone, or gone home
            std::swap(open[random.below(open.size())], open.back());
            if (random.chance(0.2)) {
                device.engine->drop(*open.back().ticket);
            } else {
                const auto gradients = testing::draw_gradients_of(random, configs, open.back().ids);
                for (std::size_t t = 0; t < configs.size(); ++t)
                    oracles[t].update(open.back().ids[t], gradients[t], at.step);
                device.update(*open.back().ticket, gradients, at.step);
            }
            open.pop_back();
        } else if (kind == 9) {
            std::vector<float> expected;
            for (std::size_t t = 0; t < configs.size(); ++t)
                for (const float row : oracles[t].read(ids[t])) expected.push_back(row);
            const std::size_t moves = device.moves;
            CHECK(device.lookup(ids, {false, 0, 0}).rows == expected);
            CHECK_EQ(device.moves, moves);
        }
        if (call % 10 == 0) check();
    }
    check();
}

// A dictionary of the rows in frames, over two tables that share them: what a lookup needs comes in, and the smallest
// (stamp, table, id) below the oldest open step leave.
CASE(the_least_recently_used_rows_go_home, testing::scaled(60)) {
    std::vector<TableConfig> configs{on_device(testing::counting_table("a", 1, 4)),
                                     on_device(testing::counting_table("b", 1, 2))};
    Device device(configs, random.pick(std::vector{1U, 2U}));
    const std::uint32_t k = random.below(3), kinds = random.pick(std::vector{100U, 400U}),
                        frames = random.between(40 * (k + 1), 200);
    device.engine->set_device_frames(0, frames);
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
    device.engine->set_device_frames(0, 4);
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
    CHECK_THROWS(InputError, "frame pool 0 has rows already", device.engine->set_device_frames(0, 8));
}

// Ids that may be refused are not counted before the lookup.
CASE(ids_that_get_no_row_need_no_frame, 1) {
    TableConfig config = testing::counting_table("item", 1);
    config.admission = AdmissionKind::min_count;
    config.min_count = 2;
    Device device({on_device(config)});
    device.engine->set_device_frames(0, 2);
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
    device.engine->set_device_frames(0, 300);
    const std::uint64_t seed = random.bits();
    testing::in_threads(4, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned call = 0; call < 200; ++call) {
            const IdsOfTables ids{testing::draw_ids(own, 1000, 40), testing::draw_ids(own, 300, 40)};
            const testing::Flat flat(ids);
            std::vector<std::int32_t> frames(flat.ids.size());
            const std::uint32_t step = device.engine->next_step();
            FrameLookup found;
            try {
                const BagInputs inputs{flat.ids.data(), flat.offsets.data(), nullptr, 1, 2};
                const LookupStep at{true, step, step > 2 ? step - 2 : 1};
                found = device.engine->lookup_frames(device.bags, inputs, at, frames.data(), true);
            } catch (const CapacityError&) {
                continue;
            }
            std::map<std::int32_t, std::uint64_t> of;
            for (std::size_t i = 0; i < frames.size(); ++i) {
                const std::uint64_t id = flat.ids[i] * 2 + (i >= static_cast<std::size_t>(flat.offsets[1]));
                CHECK(frames[i] >= 0 && frames[i] < 300 && of.try_emplace(frames[i], id).first->second == id);
            }
            Ticket* const tickets[] = {found.ticket.get()};
            if (own.chance(0.3)) {
                device.engine->drop(*found.ticket);
                if (own.chance(0.3)) device.engine->import_removed(0, Ids{ids[0]});
                if (own.chance(0.3)) testing::rows_of(*device.engine, 1);
                if (own.chance(0.3)) device.engine->check_frames();
            } else {
                device.engine->update_frames(tickets, std::vector<GivenParts>{{false, {true, own.chance(0.5)}}}, step);
            }
        }
    });
    device.check();
}

} // namespace
