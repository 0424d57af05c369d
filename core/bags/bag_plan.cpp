// Plans how each bag of a lookup is processed; see bag_plan.hpp.
#include "bags/bag_plan.hpp"

#include <limits>

#include "base/errors.hpp"

namespace satrap {

void BagPlan::make(const Bags& bags, const BagInputs& inputs, const Kernels& kernels, ThreadPool& pool) {
    SATRAP_ASSERT(inputs.num_bags == bags.features.size() * inputs.batch_size);
    bags_ = &bags;
    inputs_ = inputs;
    features_.assign(bags.features.size() + 1, Feature{});
    measure(pool);
    if (cut()) measure(pool);
    largest_weight_ = 1.0f;
    if (bags.any_weighted) check_weights(kernels);
    lay_out();
    require_room(inputs.room);
    inputs_.room = {};
}

// Finds the shortest and the longest bag of each feature.
void BagPlan::measure(ThreadPool& pool) {
    constexpr std::size_t kAlone = 1 << 15; // bags; below this, waking threads costs more than it saves
    const std::size_t n = inputs_.num_bags;
    if (inputs_.offsets == nullptr || n == 0) {
        for (Feature& feature : features_) feature.least = feature.most = n == 0 ? 0 : 1;
        return;
    }
    const std::size_t ranges = n < kAlone ? 1 : pool.num_threads();
    const Feature unseen{Route::direct, false, 0, 0, std::numeric_limits<std::int64_t>::max(), 0, 0};
    std::vector<Feature> seen(ranges * features_.size(), unseen);
    auto pass = [&](unsigned thread, unsigned threads) {
        for (std::size_t r = thread; r < ranges; r += threads)
            measure_bags(n * r / ranges, n * (r + 1) / ranges, seen.data() + r * features_.size());
    };
    ranges == 1 ? pass(0, 1) : pool.run(pass);
    for (std::size_t f = 0; f < bags_->features.size(); ++f) {
        features_[f].least = unseen.least;
        features_[f].most = unseen.most;
        for (std::size_t r = 0; r < ranges; ++r) {
            const Feature& other = seen[r * features_.size() + f];
            features_[f].least = std::min(features_[f].least, other.least);
            features_[f].most = std::max(features_[f].most, other.most);
        }
        if (features_[f].least < 0) refuse_offsets();
    }
}

void BagPlan::measure_bags(std::size_t begin, std::size_t end, Feature* features) const {
    for (std::size_t at = begin; at < end;) {
        const std::size_t f = at / inputs_.batch_size, last = std::min(end, (f + 1) * inputs_.batch_size);
        std::int64_t least = features[f].least, most = features[f].most;
        for (; at < last; ++at) {
            const auto begin_of = static_cast<std::uint64_t>(inputs_.offsets[at]);
            const auto end_of = static_cast<std::uint64_t>(inputs_.offsets[at + 1]);
            const std::int64_t length =
                inputs_.offsets[at + 1] < inputs_.offsets[at] ? -1 : static_cast<std::int64_t>(end_of - begin_of);
            least = std::min(least, length);
            most = std::max(most, length);
        }
        features[f].least = least;
        features[f].most = most;
    }
}

void BagPlan::refuse_offsets() const {
    std::size_t bag = 0;
    while (inputs_.offsets[bag] <= inputs_.offsets[bag + 1]) ++bag;
    throw InputError("offsets fall from " + std::to_string(inputs_.offsets[bag]) + " to " +
                     std::to_string(inputs_.offsets[bag + 1]) + " at sample " +
                     std::to_string(bag % inputs_.batch_size) + " of feature '" +
                     bags_->features[bag / inputs_.batch_size].name + "'; expected each at least the one before");
}

void BagPlan::check_weights(const Kernels& kernels) {
    const std::size_t samples = inputs_.batch_size;
    for (std::size_t f = 0; f < bags_->features.size(); ++f) {
        if (!bags_->features[f].weighted) continue;
        const std::size_t begin = inputs_.begin(f * samples), end = inputs_.begin((f + 1) * samples);
        const float largest = std::bit_cast<float>(kernels.largest(inputs_.weights + begin, end - begin));
        if (largest <= std::numeric_limits<float>::max()) {
            largest_weight_ = std::max(largest_weight_, largest);
            continue;
        }
        std::size_t i = begin, bag = f * samples;
        while (i + 1 < end && std::isfinite(inputs_.weights[i])) ++i;
        while (inputs_.begin(bag + 1) <= i) ++bag;
        throw InputError("the weight of id " + std::to_string(inputs_.ids[i]) + " in sample " +
                         std::to_string(bag - f * samples) + " of feature '" + bags_->features[f].name + "' is " +
                         std::to_string(inputs_.weights[i]) + "; expected a finite number");
    }
}

bool BagPlan::too_long(std::size_t f) const {
    return bags_->features[f].max_length != 0 && features_[f].most > bags_->features[f].max_length;
}

bool BagPlan::padded(std::size_t f) const {
    const BagFeature& feature = bags_->features[f];
    if (!feature.padding) return false;
    const std::uint64_t* end = inputs_.ids + inputs_.begin((f + 1) * inputs_.batch_size);
    return std::find(inputs_.ids + inputs_.begin(f * inputs_.batch_size), end, *feature.padding) != end;
}

// Copies the batch without padding and without ids beyond a sequence's max_length, if there are any.
bool BagPlan::cut() {
    const std::size_t num_features = bags_->features.size();
    bool any = false;
    for (std::size_t f = 0; f < num_features && !any; ++f) any = too_long(f) || padded(f);
    if (!any) return false;
    const BagInputs given = inputs_;
    const std::size_t n = given.begin(given.num_bags);
    own_ids_.reserve(n);
    own_offsets_.reserve(given.num_bags + 1);
    if (given.weights != nullptr) own_weights_.reserve(n);
    std::size_t kept = 0;
    for (std::size_t f = 0; f < num_features; ++f) cut_feature(f, given, kept);
    own_offsets_[given.num_bags] = static_cast<std::int64_t>(kept);
    inputs_ = {own_ids_.data(), own_offsets_.data(), given.weights == nullptr ? nullptr : own_weights_.data(),
               given.batch_size, given.num_bags};
    return true;
}

void BagPlan::cut_feature(std::size_t f, const BagInputs& given, std::size_t& kept) {
    const BagFeature& feature = bags_->features[f];
    const bool cuts = too_long(f), drops = feature.padding.has_value();
    auto is_padding = [&](std::size_t i) { return drops && given.ids[i] == *feature.padding; };
    auto keep = [&](std::size_t i) {
        own_ids_[kept] = given.ids[i];
        if (given.weights != nullptr) own_weights_[kept] = given.weights[i];
        ++kept;
    };
    for (std::size_t bag = f * given.batch_size; bag < (f + 1) * given.batch_size; ++bag) {
        own_offsets_[bag] = static_cast<std::int64_t>(kept);
        const std::size_t begin = given.begin(bag), end = given.begin(bag + 1);
        std::size_t beyond = 0, skip = 0;
        if (cuts) {
            std::size_t length = 0;
            for (std::size_t i = begin; i < end; ++i) length += !is_padding(i);
            beyond = length - std::min<std::size_t>(length, feature.max_length);
            skip = feature.keep_last ? beyond : 0;
        }
        const std::size_t last = cuts ? kept + feature.max_length : kept + (end - begin);
        for (std::size_t i = begin; i < end && kept < last; ++i) {
            if (is_padding(i)) continue;
            if (skip != 0)
                --skip;
            else
                keep(i);
        }
        features_[f].num_cut += beyond;
    }
}

void BagPlan::lay_out() {
    const std::size_t samples = inputs_.batch_size;
    for (std::size_t f = 0; f <= bags_->features.size(); ++f) features_[f].first_id = inputs_.begin(f * samples);
    sequences_.assign(1, samples * bags_->total_dim);
    for (const std::size_t f : bags_->sequences) {
        const BagFeature& feature = bags_->features[f];
        const std::size_t num_ids = features_[f + 1].first_id - features_[f].first_id;
        features_[f].rows = sequences_.back();
        sequences_.push_back(features_[f].rows +
                             (feature.jagged ? num_ids : samples * feature.max_length) * feature.dim);
    }
    const std::uint64_t begin = sequences_.back();
    std::uint64_t next = begin;
    for (std::size_t f = 0; f < bags_->features.size(); ++f) {
        const BagFeature& feature = bags_->features[f];
        Feature& plan = features_[f];
        plan.uniform = plan.least == 1 && plan.most == 1;
        plan.route = feature.is_sequence()               ? Route::sequence
                     : feature.weighted || plan.most > 1 ? Route::pooled
                                                         : Route::direct;
        if (plan.route != Route::pooled) continue;
        next = (next - begin + 15) / 16 * 16 + begin; // whole cache lines from the start of the loose memory
        plan.rows = next;
        next += (features_[f + 1].first_id - plan.first_id) * feature.dim;
    }
    loose_floats_ = next - begin;
    if (next > std::numeric_limits<std::uint32_t>::max())
        throw InputError("a batch of " + std::to_string(samples) + " samples and " +
                         std::to_string(inputs_.begin(inputs_.num_bags)) + " ids needs " + std::to_string(next) +
                         " floats; at most 2^32-1 fit, make smaller batches");
}

void BagPlan::require_room(std::span<const std::size_t> room) const {
    SATRAP_ASSERT(room.empty() || room.size() == bags_->sequences.size());
    for (std::size_t q = 0; q < room.size(); ++q)
        if (room[q] != sequences_[q + 1] - sequences_[q])
            throw InputError("the memory of feature '" + bags_->features[bags_->sequences[q]].name + "' holds " +
                             std::to_string(room[q]) + " floats; its rows have " +
                             std::to_string(sequences_[q + 1] - sequences_[q]));
}

void BagPlan::keep_inputs() {
    const std::size_t num_ids = inputs_.begin(inputs_.num_bags), num_offsets = inputs_.num_bags + 1;
    if (inputs_.offsets != nullptr && inputs_.offsets != own_offsets_.data())
        inputs_.offsets = std::copy_n(inputs_.offsets, num_offsets, own_offsets_.reserve(num_offsets)) - num_offsets;
    if (inputs_.weights != nullptr && inputs_.weights != own_weights_.data())
        inputs_.weights = std::copy_n(inputs_.weights, num_ids, own_weights_.reserve(num_ids)) - num_ids;
    inputs_.ids = nullptr;
}

namespace {

struct IndexedCursor {
    BagCursor cursor;
    std::uint32_t* indexes;
    std::uint32_t next;
    void put(std::uint32_t e) {
        indexes[e] = next++;
        cursor.put(e);
    }
};

} // namespace

void BagPlan::group(Batch& batch, const BucketNumbering& map, ThreadPool& pool, bool with_indexes) const {
    SATRAP_ASSERT(inputs_.ids != nullptr || num_ids() == 0); // not after keep_inputs()
    describe(batch);
    auto cursor_at = [&](std::size_t t, std::size_t first) { return BagCursor(*this, batch, t, first); };
    auto feature_of = [&](std::size_t i) {
        std::size_t f = 0;
        while (features_[f + 1].first_id <= i) ++f;
        return "feature '" + bags_->features[f].name + "', ";
    };
    if (!with_indexes) return batch.group(inputs_.ids, map, pool, feature_of, cursor_at);
    std::uint32_t* indexes = batch.indexes.reserve(batch.size());
    batch.group(inputs_.ids, map, pool, feature_of, [&](std::size_t t, std::size_t first) {
        return IndexedCursor{cursor_at(t, first), indexes, static_cast<std::uint32_t>(first)};
    });
}

// Tells the batch where each table's ids begin, and which data its entries have.
void BagPlan::describe(Batch& batch) const {
    const std::size_t num_tables = bags_->first.size() - 1;
    BagEntries& entries = batch.bags;
    batch.offsets.resize(num_tables + 1);
    entries.loose.assign(num_tables, 0);
    entries.scaled.assign(num_tables, 0);
    entries.largest_weight = largest_weight_;
    for (std::size_t t = 0; t <= num_tables; ++t)
        batch.offsets[t] = static_cast<std::int64_t>(features_[bags_->first[t]].first_id);
    bool any_loose = false, any_scaled = false;
    for (std::size_t f = 0; f < bags_->features.size(); ++f) {
        const BagFeature& feature = bags_->features[f];
        if (features_[f].route != Route::pooled) continue;
        const bool scaled = feature.weighted || feature.pooling != Pooling::sum;
        entries.loose[feature.table] = any_loose = true;
        if (scaled) entries.scaled[feature.table] = any_scaled = true;
    }
    if (any_loose) entries.to.reserve(batch.size());
    if (any_scaled) entries.factors.reserve(batch.size());
}

void BagPlan::finish(float* block, float* const* sequences, const float* loose, const Kernels& kernels,
                     ThreadPool& pool) const {
    constexpr std::size_t kAlone = 64; // samples
    const std::size_t samples = inputs_.batch_size;
    bool any = false;
    for (std::size_t f = 0; f < bags_->features.size(); ++f)
        any |= !bags_->features[f].jagged && (features_[f].route != Route::direct || features_[f].least == 0);
    if (!any) return;
    auto pass = [&](unsigned thread, unsigned threads) {
        const FloatMode mode;
        std::size_t q = 0;
        for (std::size_t f = 0; f < bags_->features.size(); ++f) {
            float* sequence = bags_->features[f].is_sequence() ? sequences[q++] : nullptr;
            finish_feature(f, samples * thread / threads, samples * (thread + 1) / threads, block, sequence, loose,
                           kernels);
        }
    };
    samples < kAlone ? pass(0, 1) : pool.run(pass);
}

// Pools one feature for samples begin .. end-1.
void BagPlan::finish_feature(std::size_t f, std::size_t begin, std::size_t end, float* block, float* sequence,
                             const float* loose, const Kernels& kernels) const {
    const BagFeature& feature = bags_->features[f];
    const Feature& plan = features_[f];
    if (feature.jagged || (plan.route == Route::direct && plan.least == 1)) return;
    SATRAP_ASSERT(begin <= end && end <= inputs_.batch_size);
    const std::size_t first_bag = f * inputs_.batch_size, dim = feature.dim;
    for (std::size_t s = begin; s < end; ++s) {
        const std::size_t id = inputs_.begin(first_bag + s), length = inputs_.begin(first_bag + s + 1) - id;
        float* to = block + s * bags_->total_dim + feature.column;
        switch (plan.route) {
        case Route::direct:
            if (length == 0) std::fill(to, to + dim, 0.0f);
            break;
        case Route::pooled: {
            const float* rows = loose + (plan.rows - sequences_.back()) + (id - plan.first_id) * dim;
            kernels.pool(rows, feature.weighted ? inputs_.weights + id : nullptr, length, feature.dim,
                         feature.divisor(length), to);
            break;
        }
        case Route::sequence: {
            float* of_sample = sequence + s * feature.max_length * dim;
            std::fill(of_sample + length * dim, of_sample + feature.max_length * dim, 0.0f);
            break;
        }
        }
    }
}

void BagPlan::count_cut() const {
    for (std::size_t f = 0; f < bags_->features.size(); ++f)
        if (features_[f].num_cut != 0) bags_->truncated[f].fetch_add(features_[f].num_cut);
}

// Moves to the run that begins at id next_.
void BagCursor::enter() {
    const Bags& bags = *plan_.bags_;
    const BagInputs& inputs = plan_.inputs_;
    const std::size_t i = next_, samples = inputs.batch_size;
    SATRAP_ASSERT(i < plan_.num_ids());
    while (plan_.features_[f_ + 1].first_id <= i) ++f_;
    const BagFeature& feature = bags.features[f_];
    const BagPlan::Feature& plan = plan_.features_[f_];
    std::size_t sample = i - plan.first_id, in_bag = 0;
    weights_ = nullptr;
    divisor_ = 1.0f;
    if (plan.route == BagPlan::Route::direct && plan.uniform) {
        next_ = plan_.features_[f_ + 1].first_id;
        step_ = static_cast<std::uint32_t>(bags.total_dim);
    } else if (feature.jagged) {
        next_ = plan_.features_[f_ + 1].first_id;
        step_ = feature.dim;
    } else {
        find_bag(i);
        sample = bag_ - f_ * samples;
        in_bag = i - inputs.begin(bag_);
        next_ = inputs.begin(bag_ + 1);
        step_ = plan.route == BagPlan::Route::sequence ? feature.dim : 0;
    }
    left_ = next_ - i;
    if (plan.route == BagPlan::Route::sequence) {
        const std::size_t row = feature.jagged ? i - plan.first_id : sample * feature.max_length + in_bag;
        place_ = static_cast<std::uint32_t>(plan.rows + row * feature.dim);
    } else
        place_ = static_cast<std::uint32_t>(sample * bags.total_dim + feature.column);
    to_place_ = place_;
    to_step_ = step_;
    if (plan.route != BagPlan::Route::pooled) return;
    to_place_ = static_cast<std::uint32_t>(plan.rows + (i - plan.first_id) * feature.dim);
    to_step_ = feature.dim;
    if (feature.weighted) weights_ = inputs.weights + i;
    divisor_ = feature.divisor(left_ + in_bag);
}

// Finds the bag of id i of feature f_; bag_ is one before it, or of another feature, or none yet.
void BagCursor::find_bag(std::size_t i) {
    const BagInputs& inputs = plan_.inputs_;
    const std::size_t first = f_ * inputs.batch_size;
    if (inputs.offsets == nullptr) {
        bag_ = i;
    } else if (bag_ == kNoBag || bag_ < first) {
        const std::int64_t* begin = inputs.offsets + first;
        bag_ = first - 1 +
               static_cast<std::size_t>(
                   std::upper_bound(begin, begin + inputs.batch_size, static_cast<std::int64_t>(i)) - begin);
    } else {
        while (inputs.begin(bag_ + 1) <= i) ++bag_;
    }
    SATRAP_ASSERT(first <= bag_ && inputs.begin(bag_) <= i && i < inputs.begin(bag_ + 1));
}

} // namespace satrap
