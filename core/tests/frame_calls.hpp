// Calls that the tests of frames and of tiers have in common: random ones compared with the oracle of test_table.cpp,
// and lookups by several threads.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "frame_device.hpp"

namespace testing {

// A lookup of the device, which returns the rows of the oracles or is refused; then there is no ticket.
inline std::unique_ptr<Ticket> checked_lookup(Device& device, std::vector<Oracle>& oracles, const IdsOfTables& ids,
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
        expected = oracle_lookup(oracles, ids, at);
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

// Random calls of a new device with these tables; after some of them, and at the end, it has the rows, sightings and
// counters of the oracles.
inline void check_random_calls(Random& random, Device& device, const std::vector<TableConfig>& configs,
                               std::uint32_t staleness) {
    std::vector<Oracle> oracles(configs.begin(), configs.end());
    struct Open {
        std::unique_ptr<Ticket> ticket;
        IdsOfTables ids;
        std::uint32_t step;
    };
    std::vector<Open> open;
    const std::uint32_t kinds = random.pick(std::vector{30U, 300U, 1000U});
    std::uint32_t newest = 1, oldest = 1;
    auto check = [&] {
        device.check();
        for (std::size_t t = 0; t < configs.size(); ++t)
            check_same(*device.engine, t, oracles[t], [&](const Line& line) { return device.value(t, line); });
    };
    for (unsigned call = 0; call < 120; ++call) {
        newest += random.below(3) + (random.chance(0.02) ? 20 : 0);
        oldest = std::max(oldest, newest > staleness ? newest - staleness : 1);
        const LookupStep at{true, random.between(oldest, newest), oldest, random.chance(0.5)};
        IdsOfTables ids;
        for (std::size_t t = 0; t < configs.size(); ++t) // a table without an id, too
            ids.push_back(random.chance(0.2) ? Ids{}
                                             : draw_ids(random, kinds, random.pick(std::vector{3U, 20U, kMost})));
        const unsigned kind = random.below(10);
        if (kind < 5) {
            if (auto ticket = checked_lookup(device, oracles, ids, at))
                open.push_back({std::move(ticket), ids, at.step});
        } else if (kind < 9 && !open.empty()) { // a ticket that may be old: its rows may have gone, or gone home
            std::swap(open[random.below(open.size())], open.back());
            if (random.chance(0.2)) {
                device.engine->drop(*open.back().ticket);
            } else {
                const auto gradients = draw_gradients_of(random, configs, open.back().ids);
                const std::uint32_t step = random.chance(0.5) ? open.back().step : at.step;
                for (std::size_t t = 0; t < configs.size(); ++t)
                    oracles[t].update(open.back().ids[t], gradients[t], step);
                device.update(*open.back().ticket, gradients, step);
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

struct ThreadLookup {
    IdsOfTables ids;
    std::uint32_t step;
    std::unique_ptr<Ticket> ticket;
};

// A lookup of two tables, which other threads use at the same time: every id has a frame that no other id of it has.
// None if the rows do not fit beside those of the other threads.
inline std::optional<ThreadLookup> look_up_in_thread(Random& random, Device& device, std::uint32_t staleness,
                                                     std::int32_t num_frames) {
    ThreadLookup done{{draw_ids(random, 1000, 40), draw_ids(random, 300, 40)}, device.engine->next_step(), nullptr};
    const Flat flat(done.ids);
    std::vector<std::int32_t> frames(flat.ids.size());
    try {
        const BagInputs inputs{flat.ids.data(), flat.offsets.data(), nullptr, 1, 2};
        const LookupStep at{true, done.step, done.step > staleness ? done.step - staleness : 1};
        done.ticket = device.engine->lookup_frames(device.bags, inputs, at, frames.data(), true).ticket;
    } catch (const CapacityError&) {
        return std::nullopt;
    }
    std::map<std::int32_t, std::uint64_t> of;
    for (std::size_t i = 0; i < frames.size(); ++i) {
        const std::uint64_t id = flat.ids[i] * 2 + (i >= static_cast<std::size_t>(flat.offsets[1]));
        CHECK(frames[i] >= 0 && frames[i] < num_frames && of.try_emplace(frames[i], id).first->second == id);
    }
    return done;
}

} // namespace testing
