// An engine driven by vectors: what the tests of tables, engines, files and snapshots need to make a call in one line.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "testing.hpp"

namespace testing {

using satrap::Engine, satrap::LookupStep, satrap::TableConfig, satrap::Ticket;

inline constexpr std::uint64_t kSeed = 7; // where a test does not draw one

using Ids = std::vector<std::uint64_t>;
using IdsOfTables = std::vector<Ids>;

// Rows that count: they start at 0, and with lr 1 a gradient of -1 adds exactly 1.
inline TableConfig counting_table(std::string name, std::uint32_t dim, std::uint32_t num_buckets = 1) {
    TableConfig config;
    config.name = std::move(name);
    config.dim = dim;
    config.num_buckets = num_buckets;
    config.optimizer.kind = satrap::OptimizerKind::sgd;
    config.optimizer.lr = 1.0;
    config.initial = satrap::InitialKind::constant;
    config.initial_a = config.initial_b = 0.0;
    return config;
}

// Makes the table direct, which permits none of what removes rows.
inline TableConfig direct_table(TableConfig config, std::uint64_t num_rows) {
    config.num_rows = num_rows;
    config.capacity = 0;
    config.expire_after = 0;
    config.admission = satrap::AdmissionKind::always;
    return config;
}

inline std::unique_ptr<Engine> make_engine(const std::vector<TableConfig>& configs, unsigned threads = 1,
                                           const std::string& simd = "auto", std::uint64_t seed = kSeed) {
    return std::make_unique<Engine>(configs, satrap::Options{seed, threads, simd},
                                    std::make_unique<satrap::AnonymousArena>(configs.size()));
}

struct Flat {
    Ids ids;
    std::vector<std::int64_t> offsets{0};
    explicit Flat(const IdsOfTables& tables) {
        for (const Ids& each : tables) {
            ids.insert(ids.end(), each.begin(), each.end());
            offsets.push_back(static_cast<std::int64_t>(ids.size()));
        }
    }
};

struct Looked {
    std::vector<float> rows;
    std::unique_ptr<Ticket> ticket;
};

// oldest_open 0: the step itself.
inline Looked lookup(Engine& engine, const IdsOfTables& tables, std::uint32_t step, std::uint32_t oldest_open = 0,
                     bool first_epoch = true) {
    const Flat flat(tables);
    Looked looked{std::vector<float>(engine.out_size(flat.offsets)), nullptr};
    const LookupStep at{true, step, oldest_open == 0 ? step : oldest_open, first_epoch};
    looked.ticket = engine.lookup(flat.ids.data(), flat.offsets, at, looked.rows.data(), true);
    return looked;
}

// A lookup that changes nothing.
inline std::vector<float> peek(Engine& engine, const IdsOfTables& tables) {
    const Flat flat(tables);
    std::vector<float> rows(engine.out_size(flat.offsets));
    engine.lookup(flat.ids.data(), flat.offsets, {false, 0, 0}, rows.data(), false);
    return rows;
}

inline std::unique_ptr<Ticket> prepare(Engine& engine, const IdsOfTables& tables) {
    const Flat flat(tables);
    return engine.prepare(flat.ids.data(), flat.offsets);
}

inline std::vector<double> lrs_of(Engine& engine) {
    std::vector<double> lrs;
    for (std::size_t t = 0; t < engine.num_tables(); ++t) lrs.push_back(engine.table(t).lr());
    return lrs;
}

inline void update(Engine& engine, Ticket& ticket, const std::vector<float>& gradients, std::uint32_t step) {
    CHECK_EQ(gradients.size(), ticket.num_floats);
    engine.update(ticket, gradients.data(), step, lrs_of(engine));
}

inline void update(Engine& engine, const IdsOfTables& tables, const std::vector<float>& gradients, std::uint32_t step) {
    const auto ticket = prepare(engine, tables);
    update(engine, *ticket, gradients, step);
}

// Some calls, each with fewer than `most` ids of every table, of so many kinds.
inline void train(Engine& engine, Random& random, unsigned calls, std::uint32_t most, std::uint32_t kinds) {
    for (unsigned call = 0; call < calls; ++call) {
        IdsOfTables ids(engine.num_tables());
        for (std::size_t t = 0; t < ids.size(); ++t)
            for (unsigned i = random.below(most); i > 0; --i) {
                const std::uint64_t id = random.below(kinds);
                ids[t].push_back(engine.table(t).config().is_direct() ? id : satrap::mix64(id));
            }
        const std::uint32_t step = engine.next_step();
        const auto looked = lookup(engine, ids, step);
        std::vector<float> gradients(looked.rows.size());
        for (float& g : gradients) g = random.real(-1.0f, 1.0f);
        update(engine, *looked.ticket, gradients, step);
    }
}

// One row or sighting as it leaves the engine, bit for bit.
struct Line {
    std::uint64_t id;
    std::uint32_t step;
    std::vector<std::byte> values; // for a sighting: its count
    std::vector<float> state;
    bool operator==(const Line&) const = default;
    float value(std::size_t i = 0) const {
        float value;
        std::memcpy(&value, values.data() + 4 * i, 4);
        return value;
    }
};

inline std::vector<Line> lines_of(Engine& engine, satrap::RowColumns columns, std::size_t value_bytes,
                                  std::size_t state_dim) {
    std::vector<Line> lines(columns.rows);
    for (std::size_t i = 0; i < columns.rows; ++i) {
        std::memcpy(&lines[i].id, columns.id.memory + 8 * i, 8);
        std::memcpy(&lines[i].step, columns.step.memory + 4 * i, 4);
        const std::byte* values = columns.values.memory + i * value_bytes;
        lines[i].values.assign(values, values + value_bytes);
        lines[i].state.resize(state_dim);
        if (state_dim != 0) std::memcpy(lines[i].state.data(), columns.state.memory + 4 * i * state_dim, 4 * state_dim);
    }
    for (satrap::BlockPool::Block block : {columns.id, columns.step, columns.values, columns.state})
        engine.blocks()->give(block);
    return lines;
}

// The rows changed at version `since` or later (0: all), by id.
inline std::vector<Line> rows_of(Engine& engine, std::size_t t, std::uint32_t since = 0) {
    const TableConfig& config = engine.table(t).config();
    const std::size_t value_bytes = config.dim * (config.dtype == satrap::Dtype::float32 ? 4U : 2U);
    auto lines = lines_of(engine, engine.export_rows(t, 0, config.num_buckets, since), value_bytes, config.state_dim());
    std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.id < b.id; });
    return lines;
}

inline std::vector<Line> sightings_of(Engine& engine, std::size_t t) {
    const std::uint32_t buckets = engine.table(t).config().num_buckets;
    auto lines = lines_of(engine, engine.export_sightings(t, 0, buckets), 4, 0);
    std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.id < b.id; });
    return lines;
}

// Everything that a later call could tell apart, of all tables.
struct Contents {
    std::vector<std::vector<Line>> rows, sightings;
    explicit Contents(Engine& engine) {
        for (std::size_t t = 0; t < engine.num_tables(); ++t) {
            engine.table(t).check();
            rows.push_back(rows_of(engine, t));
            sightings.push_back(sightings_of(engine, t));
        }
    }
    bool operator==(const Contents&) const = default;
};

} // namespace testing
