// An engine with tables whose rows are on a device, which here is a vector of one number for each frame, and one for
// each slot at home.
#pragma once

#include <map>

#include "base/errors.hpp"
#include "table_oracle.hpp"

namespace testing {

using satrap::AbsentRow, satrap::BagFeature, satrap::BagInputs, satrap::Bags, satrap::CapacityError;
using satrap::FrameLookup, satrap::FrameRuns, satrap::GivenParts, satrap::InsertedRow, satrap::kAtHome;
using satrap::is_frame, satrap::kNoFrame, satrap::Move, satrap::OnNonfinite, satrap::Pooling, satrap::RowPlaces;

inline constexpr std::uint32_t kMost = 60; // ids of a table in a call

inline TableConfig on_device(TableConfig config, std::uint32_t pool = 0) {
    config.frame_pool = pool;
    return config;
}

struct Found {
    std::vector<float> rows; // table after table
    std::unique_ptr<Ticket> ticket;
};

// A table has one feature, a sequence of one sample, so that each id has its gradient.
class Device {
  public:
    explicit Device(const std::vector<TableConfig>& configs, unsigned threads = 1)
        : engine(make_engine(configs, threads)) {
        for (const TableConfig& config : configs) {
            const auto table = static_cast<std::uint32_t>(features_.size());
            features_.push_back({config.name, table, Pooling::none, false, kMost, false, false, 1, 0, {}});
            pools_.push_back(*config.frame_pool);
        }
        memory.resize(engine->directory().num_pools());
        home.resize(engine->directory().num_pools());
        bags = std::make_shared<Bags>(features_, configs.size(), engine->identity());
    }

    Found lookup(const IdsOfTables& tables, const LookupStep& at) {
        const Flat flat(tables);
        std::vector<std::int32_t> frames(flat.ids.size());
        const BagInputs inputs{flat.ids.data(), flat.offsets.data(), nullptr, 1, tables.size()};
        FrameLookup found;
        try {
            found = engine->lookup_frames(bags, inputs, at, frames.data(), at.train);
        } catch (...) {
            initialise();
            throw;
        }
        initialise();
        CHECK_EQ(found.num_ids, flat.ids.size());
        Found out{{}, std::move(found.ticket)};
        ordered_.erase(out.ticket.get()); // an earlier ticket had this address
        if (out.ticket != nullptr && at.step % 2 == 0) ordered_[out.ticket.get()] = engine->order_frames(*out.ticket);
        for (std::size_t t = 0, i = 0; t < tables.size(); ++t)
            for (; i < static_cast<std::size_t>(flat.offsets[t + 1]); ++i)
                out.rows.push_back(read(t, flat.ids[i], frames[i], found.absent));
        return out;
    }

    // One gradient for each id of the ticket.
    void update(Ticket& ticket, const std::vector<std::vector<float>>& gradients, std::uint32_t step) {
        std::vector<float> flat(pools_.size() * kMost);
        for (std::size_t t = 0; t < gradients.size(); ++t)
            std::copy(gradients[t].begin(), gradients[t].end(), flat.begin() + static_cast<std::ptrdiff_t>(t * kMost));
        Ticket* const tickets[] = {&ticket};
        const GivenParts given[] = {{false, std::vector<bool>(pools_.size(), true)}};
        const bool filter = std::any_of(flat.begin(), flat.end(), [](float g) { return !std::isfinite(g); });
        FrameRuns runs;
        if (const auto ahead = ordered_.find(&ticket); ahead != ordered_.end()) { // every id has a gradient
            std::optional<FrameRuns> updated = engine->update_ordered_frames(ticket, step, filter);
            runs = std::move(ahead->second);
            ordered_.erase(ahead);
            num_found_again += updated.has_value();
            ++num_ordered;
            if (updated) {
                CHECK(runs.first_run_of_table == updated->first_run_of_table);
                runs.frames = std::move(updated->frames);
                runs.ids = std::move(updated->ids);
            }
        } else {
            runs = engine->update_frames(tickets, given, step, filter);
        }
        for (std::size_t t = 0; t < pools_.size(); ++t) {
            Ids summed;
            std::uint64_t skipped = 0;
            for (std::uint32_t r = runs.first_run_of_table[t]; r < runs.first_run_of_table[t + 1]; ++r) {
                std::vector<float> finite;
                for (std::uint32_t e = runs.begin[r]; e < runs.end[r]; ++e)
                    if (std::isfinite(flat[runs.places[e]])) finite.push_back(flat[runs.places[e]]);
                skipped += runs.end[r] - runs.begin[r] - finite.size();
                if (finite.empty()) continue;
                if (filter) summed.push_back(runs.ids[r]);
                if (runs.frames[r] == kNoFrame) continue;
                float sum = finite[0];
                for (std::size_t i = 1; i < finite.size(); ++i) sum = sum + finite[i];
                float& value = at(t, runs.frames[r]);
                value = std::fma(-static_cast<float>(engine->table(t).lr()), sum, value);
            }
            if (filter && engine->table(t).config().on_nonfinite == OnNonfinite::skip)
                engine->settle_frames(t, summed, skipped, step);
        }
    }

    // Carries out the moves, then gives the places of new rows their values.
    void initialise() {
        for (const Move& move : engine->directory().take_moves()) {
            float& in_frame = reach(memory[move.pool], move.frame);
            float& in_slot = reach(home[move.pool], move.slot);
            const float kept = in_frame;
            if ((move.directions & Move::kIn) != 0) in_frame = in_slot;
            if ((move.directions & Move::kOut) != 0) in_slot = kept;
            if (move.directions == Move::kIn) in_slot = std::nanf(""); // a row is in one place
            ++moves;
        }
        for (const InsertedRow& row : engine->directory().take_inserted()) {
            float value;
            engine->initial_rows(row.table, {&row.id, 1}, reinterpret_cast<std::byte*>(&value), nullptr);
            write(row.table, row.place, value);
        }
    }

    void write(std::size_t t, std::uint32_t place, float value) {
        std::vector<float>& values = is_frame(place) ? memory[pools_[t]] : home[pools_[t]];
        reach(values, place & ~kAtHome) = value;
    }

    float value(std::size_t t, const Line& line) { return at(t, place_of(line)); }
    static std::uint32_t place_of(const Line& line) {
        std::uint32_t place;
        std::memcpy(&place, line.values.data(), sizeof(place));
        return place;
    }

    // A place is free or of one row.
    void check() {
        engine->directory().check();
        std::vector<std::size_t> rows(memory.size());
        for (std::size_t t = 0; t < pools_.size(); ++t) rows[pools_[t]] += engine->num_rows(t); // sweeps what expired
        for (std::uint32_t p = 0; p < rows.size(); ++p) {
            const RowPlaces& places = engine->directory().pool(p);
            CHECK_EQ(places.device.used() - places.device.num_free() + places.home.used() - places.home.num_free(),
                     rows[p]);
        }
    }

    std::unique_ptr<Engine> engine;
    std::shared_ptr<const Bags> bags;
    std::vector<std::vector<float>> memory, home; // for each pool, by frame and by slot
    std::size_t moves = 0;
    std::size_t num_ordered = 0, num_found_again = 0; // updates that were ordered ahead; those whose rows were visited

  private:
    static float& reach(std::vector<float>& values, std::uint32_t at) {
        values.resize(std::max<std::size_t>(values.size(), at + 1), std::nanf(""));
        return values[at];
    }
    float& at(std::size_t t, std::uint32_t place) {
        return is_frame(place) ? memory[pools_[t]].at(place) : home[pools_[t]].at(place & ~kAtHome);
    }
    float read(std::size_t t, std::uint64_t id, std::int32_t frame, const std::vector<AbsentRow>& absent) {
        if (frame >= 0) return memory[pools_[t]].at(static_cast<std::uint32_t>(frame));
        if (frame == -1) return 0.0f;
        const AbsentRow& row = absent.at(static_cast<std::size_t>(-2 - frame));
        CHECK_EQ(row.id, id);
        CHECK_EQ(row.table, t);
        if (row.place != kNoFrame) return at(t, row.place);
        float value;
        engine->initial_rows(t, {&id, 1}, reinterpret_cast<std::byte*>(&value), nullptr);
        return value;
    }

    std::vector<BagFeature> features_;
    std::vector<std::uint32_t> pools_;           // for each table
    std::map<const Ticket*, FrameRuns> ordered_; // at their lookup
};

inline std::vector<TableConfig> draw_tables(Random& random) {
    std::vector<TableConfig> configs;
    const std::uint32_t n = random.between(1, 3);
    for (std::uint32_t t = 0; t < n; ++t) {
        configs.push_back(on_device(draw_config(random), random.below(n)));
        configs[t].name += std::to_string(t);
    }
    return configs;
}

inline std::vector<std::vector<float>> draw_gradients_of(Random& random, const std::vector<TableConfig>& configs,
                                                         const IdsOfTables& ids) {
    std::vector<std::vector<float>> gradients;
    for (std::size_t t = 0; t < ids.size(); ++t) gradients.push_back(draw_gradients(random, configs[t], ids[t].size()));
    return gradients;
}

// The rows of a training lookup. The oracles run out of room table after table, as the engine does.
inline std::vector<float> oracle_lookup(std::vector<Oracle>& oracles, const IdsOfTables& ids, const LookupStep& at) {
    std::vector<float> rows;
    for (Oracle& oracle : oracles) oracle.open_step(at);
    for (std::size_t t = 0; t < ids.size(); ++t)
        for (const float row : oracles[t].lookup(ids[t], at)) rows.push_back(row);
    return rows;
}

} // namespace testing
