// Gathering a batch: against one that appends id by id, for parts of every kind of column.
#include "data/samples.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

struct Bag {
    std::vector<std::uint64_t> ids;
    std::vector<float> weights;
};

struct Sample {
    std::vector<Bag> bags;
    std::vector<float> dense, label;
};

// A block of random samples, held both ways.
struct Block {
    std::vector<Sample> plain;
    Samples samples;
    std::vector<std::vector<std::uint64_t>> values;
    std::vector<std::vector<std::int64_t>> offsets;
    std::vector<std::vector<float>> weights;
    std::vector<float> dense, label;

    Block(Random& random, std::size_t num_features, std::size_t num_dense, std::size_t num_labels, bool only_single)
        : values(num_features), offsets(num_features), weights(num_features) {
        const std::size_t n = random.below(30);
        plain.resize(n);
        for (std::size_t f = 0; f < num_features; ++f) {
            const bool single = only_single || random.chance(0.4), weighted = random.chance(0.3);
            const std::size_t before = single ? 0 : random.below(3); // ids that belong to no bag
            values[f].assign(before, 7);
            weights[f].assign(weighted ? before : 0, 7.0F);
            offsets[f].push_back(static_cast<std::int64_t>(before));
            for (Sample& sample : plain) {
                Bag bag;
                for (std::uint32_t k = single ? 1 : random.below(4); k > 0; --k) {
                    bag.ids.push_back(random.bits());
                    bag.weights.push_back(weighted ? random.real(-1, 1) : 1.0F);
                }
                values[f].insert(values[f].end(), bag.ids.begin(), bag.ids.end());
                if (weighted) weights[f].insert(weights[f].end(), bag.weights.begin(), bag.weights.end());
                offsets[f].push_back(static_cast<std::int64_t>(values[f].size()));
                sample.bags.push_back(bag);
            }
            const std::size_t stride = single && !weighted ? random.between(1, 3) : 1;
            if (stride > 1) {
                std::vector<std::uint64_t> wide(n * stride);
                for (std::size_t i = 0; i < n; ++i) wide[i * stride] = values[f][i];
                values[f] = wide;
            }
            samples.ids.push_back({values[f].data(), single ? nullptr : offsets[f].data(),
                                   weighted ? (weights[f].reserve(1), weights[f].data()) : nullptr, stride});
        }
        for (Sample& sample : plain) {
            for (std::size_t d = 0; d < num_dense; ++d) sample.dense.push_back(random.real(-1, 1));
            for (std::size_t l = 0; l < num_labels; ++l) sample.label.push_back(random.real(0, 1));
            dense.insert(dense.end(), sample.dense.begin(), sample.dense.end());
            label.insert(label.end(), sample.label.begin(), sample.label.end());
        }
        samples.n = n;
        samples.dense = dense.data(), samples.num_dense = num_dense;
        samples.label = label.data(), samples.num_labels = num_labels;
    }
};

void check_batch(const Gather& gather, const std::vector<const Sample*>& batch, std::size_t num_features) {
    std::vector<std::uint64_t> ids;
    std::vector<std::int64_t> ends{0};
    std::vector<float> weights, dense, label;
    bool one_each = true;
    for (std::size_t f = 0; f < num_features; ++f)
        for (const Sample* sample : batch) {
            const Bag& bag = sample->bags[f];
            ids.insert(ids.end(), bag.ids.begin(), bag.ids.end());
            weights.insert(weights.end(), bag.weights.begin(), bag.weights.end());
            ends.push_back(static_cast<std::int64_t>(ids.size()));
            one_each = one_each && bag.ids.size() == 1;
        }
    for (const Sample* sample : batch) {
        dense.insert(dense.end(), sample->dense.begin(), sample->dense.end());
        label.insert(label.end(), sample->label.begin(), sample->label.end());
    }
    CHECK_EQ(gather.one_each(), one_each);
    CHECK_EQ(gather.num_values(), ids.size());
    std::vector<std::uint64_t> found_ids(ids.size());
    std::vector<std::int64_t> found_ends(ends.size());
    std::vector<float> found_weights(ids.size()), found_dense(dense.size()), found_label(label.size());
    gather.values(found_ids.data());
    gather.offsets(found_ends.data());
    gather.weights(found_weights.data());
    gather.dense(found_dense.data());
    gather.label(found_label.data());
    CHECK(found_ids == ids);
    CHECK(found_ends == ends);
    CHECK(found_weights == weights);
    CHECK(found_dense == dense);
    CHECK(found_label == label);
}

CASE(gathers_what_was_asked_for, testing::scaled(400)) {
    const std::size_t num_features = random.below(5), num_dense = random.below(4), num_labels = random.below(3);
    const bool only_single = random.chance(0.3);
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<BlockRange> parts;
    std::vector<const Sample*> all;
    for (std::uint32_t p = random.between(1, 5); p > 0; --p) {
        blocks.push_back(std::make_unique<Block>(random, num_features, num_dense, num_labels, only_single));
        const std::size_t n = blocks.back()->samples.n;
        const std::size_t begin = random.below(n + 1), end = begin + random.below(n - begin + 1);
        parts.push_back({&blocks.back()->samples, begin, end});
        for (std::size_t i = begin; i < end; ++i) all.push_back(&blocks.back()->plain[i]);
    }
    std::vector<std::int64_t> order;
    std::vector<const Sample*> batch;
    for (std::uint32_t i = all.empty() ? 0 : random.below(60); i > 0; --i) {
        order.push_back(random.below(all.size()));
        batch.push_back(all[static_cast<std::size_t>(order.back())]);
    }
    const Gather gather(parts, order);
    CHECK_EQ(gather.size(), batch.size());
    bool weighted = false;
    for (const auto& block : blocks)
        for (const BagColumn& column : block->samples.ids) weighted = weighted || column.weights != nullptr;
    CHECK_EQ(gather.weighted(), weighted);
    check_batch(gather, batch, num_features);
}

// What the builder keeps of arrays is what they were, whatever becomes of them.
CASE(the_builder_copies, 1) {
    std::vector<std::uint64_t> ids{1, 2, 3, 4, 5};
    std::vector<std::int64_t> offsets{1, 1, 3, 4};
    std::vector<float> weights{0, 1, 2, 3, 4}, dense{1, 2, 3, 4, 5, 6};
    SamplesBuilder builder(3, 4);
    builder.single(0, ids.data(), nullptr);
    CHECK(builder.bags(1, ids.data(), 5, offsets.data(), weights.data()));
    builder.single(2, ids.data() + 1, weights.data());
    CHECK(builder.bags(3, ids.data(), 5, offsets.data(), nullptr));
    builder.dense(dense.data(), 2);
    builder.label(dense.data(), 1);
    for (auto wrong : {std::vector<std::int64_t>{-1, 0, 1, 2}, {0, 2, 1, 3}, {0, 1, 2, 6}}) {
        SamplesBuilder other(3, 1);
        CHECK(!other.bags(0, ids.data(), 5, wrong.data(), nullptr));
    }
    const std::shared_ptr<Samples> samples = builder.done();
    for (std::uint64_t& id : ids) id = random.bits();
    for (std::int64_t& offset : offsets) offset = random.word();
    for (float& x : weights) x = -1;
    for (float& x : dense) x = -1;
    const std::vector<BlockRange> parts{{samples.get(), 0, 3}};
    const std::vector<std::int64_t> order{2, 0, 1};
    const Gather gather(parts, order);
    std::vector<std::uint64_t> values(gather.num_values());
    std::vector<std::int64_t> ends(13);
    std::vector<float> beside(gather.num_values()), rows(6), label(3);
    gather.values(values.data());
    gather.offsets(ends.data());
    gather.weights(beside.data());
    gather.dense(rows.data());
    gather.label(label.data());
    CHECK((values == std::vector<std::uint64_t>{3, 1, 2, 4, 2, 3, 4, 2, 3, 4, 2, 3}));
    CHECK((ends == std::vector<std::int64_t>{0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 10, 12}));
    CHECK((beside == std::vector<float>{1, 1, 1, 3, 1, 2, 2, 0, 1, 1, 1, 1}));
    CHECK((rows == std::vector<float>{5, 6, 1, 2, 3, 4}));
    CHECK((label == std::vector<float>{3, 1, 2}));
    std::vector<std::int64_t> counts(3);
    count_ids(*samples, 1, std::nullopt, counts.data());
    CHECK((counts == std::vector<std::int64_t>{0, 2, 1}));
    count_ids(*samples, 1, 3, counts.data());
    CHECK((counts == std::vector<std::int64_t>{0, 1, 1}));
    for (std::size_t feature : {0, 2}) { // one id each: among those of other features, or beside weights
        count_ids(*samples, feature, 2, counts.data());
        CHECK((counts == (feature == 0 ? std::vector<std::int64_t>{1, 0, 1} : std::vector<std::int64_t>{0, 1, 1})));
    }
}

} // namespace
