// Models of tables and features, batches of bags and gradients, drawn at random: what the tests of bags and of splits
// share. And small ones whose rows count.
#pragma once

#include <limits>
#include <set>

#include "bag_calls.hpp"

namespace testing {

using satrap::Absent, satrap::AdmissionKind, satrap::Dtype, satrap::OnNonfinite, satrap::OptimizerKind;

struct Model {
    std::vector<TableConfig> tables;
    std::vector<BagFeature> features;
    std::shared_ptr<const Bags> describe(const Engine& engine) const {
        return std::make_shared<Bags>(features, tables.size(), engine.identity());
    }
};

inline TableConfig draw_table(Random& random, std::size_t number) {
    TableConfig config;
    config.name = "table " + std::to_string(number);
    config.dim = random.chance(0.4) ? 16 * random.between(1, 2) : random.between(1, 20);
    config.dtype = std::vector{Dtype::float32, Dtype::float32, Dtype::float16, Dtype::bfloat16}[random.below(4)];
    config.num_buckets = 1U << random.below(5);
    config.optimizer.kind = static_cast<OptimizerKind>(random.below(6));
    config.optimizer.lr = 0.05;
    config.optimizer.momentum = random.chance(0.5) ? 0.9 : 0.0;
    config.initial_a = -1.0;
    config.initial_b = 2.0;
    config.admission = random.chance(0.7) ? AdmissionKind::always : AdmissionKind::min_count;
    config.min_count = 2;
    if (random.chance(0.4)) config.capacity = 3000;
    config.absent = random.chance(0.5) ? Absent::zeros : Absent::initial;
    config.on_nonfinite = OnNonfinite::skip;
    if (random.chance(0.2)) {
        config.frozen = {0, random.chance(0.5) ? ~std::uint64_t{0} : std::uint64_t{1} << 63};
    } else if (random.chance(0.2)) {
        std::set<std::uint64_t> ids;
        for (std::uint32_t n = random.between(1, 60); n > 0; --n) ids.insert(satrap::mix64(random.below(80)));
        config.frozen = satrap::FrozenIds::of(std::vector<std::uint64_t>(ids.begin(), ids.end()));
    }
    return config;
}

inline Model draw_model(Random& random) {
    Model model;
    for (std::uint32_t tables = random.between(1, 4); tables > 0; --tables)
        model.tables.push_back(draw_table(random, model.tables.size()));
    for (std::uint32_t t = 0; t < model.tables.size(); ++t)
        for (std::uint32_t n = random.below(4) + (t == 0); n > 0; --n) {
            BagFeature feature;
            feature.name = "feature " + std::to_string(model.features.size());
            feature.table = t;
            feature.pooling = static_cast<Pooling>(random.below(4));
            feature.dim = model.tables[t].dim;
            if (feature.is_sequence()) {
                feature.jagged = random.chance(0.5);
                feature.max_length = feature.jagged && random.chance(0.5) ? 0 : random.between(1, 4);
            } else
                feature.weighted = random.chance(0.3);
            feature.keep_last = random.chance(0.5);
            if (random.chance(0.3)) feature.padding = satrap::mix64(random.below(5));
            model.features.push_back(feature);
        }
    return model;
}

inline BagCall draw_call(Random& random, const Model& model, std::size_t most_samples) {
    BagCall call;
    call.samples = random.chance(0.1) ? 0 : random.below(most_samples);
    call.no_offsets = random.chance(0.3);
    const bool plain = call.no_offsets || random.chance(0.2);
    for (std::size_t f = 0; f < model.features.size(); ++f) {
        const std::uint32_t most = plain ? 1 : random.below(7), least = plain || most == 1 ? random.below(2) : 0;
        const std::uint32_t kinds = random.chance(0.3) ? 5 : 3000;
        call.bags.emplace_back(call.samples);
        call.weights.emplace_back(call.samples);
        for (std::size_t s = 0; s < call.samples; ++s)
            for (std::uint32_t n = plain ? 1 : random.between(std::min(least, most), most); n > 0; --n) {
                call.bags[f][s].push_back(satrap::mix64(random.below(kinds)));
                call.weights[f][s].push_back(random.chance(0.2) ? 1.0f : random.real(-2.0f, 2.0f));
            }
    }
    call.flatten();
    return call;
}

// With `large` ones, whose sums may overflow.
inline Floats draw_gradients(Random& random, const Bags& described, const BagCall& call, bool large) {
    Floats floats(described, call, 0.0f);
    auto fill = [&](std::vector<float>& values) {
        for (float& value : values) value = random.chance(0.05) ? 0.0f : random.real(-1.0f, 1.0f);
        if (!values.empty() && random.chance(0.05)) values[random.below(values.size())] = std::nanf("");
        for (unsigned i = 0; large && !values.empty() && i < 8; ++i)
            values[random.below(values.size())] = std::numeric_limits<float>::max();
    };
    fill(floats.block);
    for (auto& sequence : floats.sequences) fill(sequence);
    return floats;
}

inline Model counting_model(std::uint32_t dim, std::vector<std::pair<Pooling, bool>> poolings) {
    Model model{{testing::counting_table("item", dim, 4)}, {}};
    for (const auto& [pooling, weighted] : poolings) {
        const std::string name(1, static_cast<char>('a' + model.features.size()));
        model.features.push_back(
            {name, 0, pooling, weighted, pooling == Pooling::none ? 3U : 0U, false, false, dim, 0, {}});
    }
    return model;
}

inline BagCall call_of(std::vector<std::vector<Ids>> bags) {
    BagCall call;
    call.samples = bags[0].size();
    for (const auto& feature : bags) {
        call.weights.emplace_back();
        for (const Ids& bag : feature) call.weights.back().emplace_back(bag.size(), 1.0f);
    }
    call.bags = std::move(bags);
    call.flatten();
    return call;
}

} // namespace testing
