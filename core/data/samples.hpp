// Decoded samples of a source, and how a batch is gathered from them. Data comes from delimited.hpp or from Arrow
// memory and is returned as the flat arrays of one batch: feature after feature, sample after sample. Nothing here
// reads files or decides an order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace satrap {

// The ids of one feature. offsets == nullptr: sample i holds the one id values[i * stride], so the ids of one
// sample may be adjacent, and a random sample costs few cache lines. Otherwise its bag is values[offsets[i] ..
// offsets[i + 1]). weights, if any, are parallel to values (then stride is 1); without them every id weighs 1.
struct BagColumn {
    const std::uint64_t* values = nullptr;
    const std::int64_t* offsets = nullptr;
    const float* weights = nullptr;
    std::size_t stride = 1;
};

inline std::int64_t bag_length(const BagColumn& column, std::uint64_t sample) {
    return column.offsets == nullptr ? 1 : column.offsets[sample + 1] - column.offsets[sample];
}

// Samples of one block. Invariants: each column covers n samples; dense is [n, num_dense], label [n, num_labels].
struct Samples {
    std::size_t n = 0;
    std::vector<BagColumn> ids;
    const float* dense = nullptr;
    std::size_t num_dense = 0;
    const float* label = nullptr;
    std::size_t num_labels = 0;
    std::vector<std::shared_ptr<const void>> owners; // they own the memory that the pointers above point into

    bool same_shape(const Samples& other) const {
        return ids.size() == other.ids.size() && num_dense == other.num_dense && num_labels == other.num_labels;
    }
};

// Writes how many ids of a feature each sample has, without those that are `padding`.
inline void count_ids(const Samples& samples, std::size_t feature, std::optional<std::uint64_t> padding,
                      std::int64_t* out) {
    const BagColumn& column = samples.ids[feature];
    for (std::size_t i = 0; i < samples.n; ++i) {
        out[i] = bag_length(column, i);
        if (!padding) continue;
        const std::uint64_t* begin =
            column.values +
            (column.offsets == nullptr ? i * column.stride : static_cast<std::size_t>(column.offsets[i]));
        out[i] -= std::count(begin, begin + out[i], *padding);
    }
}

// Builds Samples from copies of the caller's arrays, which the caller may change when `done` returns.
// Each offset is read once, so that the checked value is the one used.
class SamplesBuilder {
  public:
    SamplesBuilder(std::size_t n, std::size_t num_features)
        : n_(n), samples_(std::make_shared<Samples>()), single_(keep<std::uint64_t>(n * num_features)) {
        samples_->n = n;
        samples_->ids.resize(num_features);
    }

    // Adds a feature with one id in every sample. The single ids of a sample are adjacent.
    void single(std::size_t feature, const std::uint64_t* values, const float* weights) {
        const std::size_t stride = samples_->ids.size();
        BagColumn& column = samples_->ids[feature];
        if (weights != nullptr) { // the values keep their order, beside the weights
            column = {copy(values, n_), nullptr, copy(weights, n_), 1};
            return;
        }
        column = {single_ + feature, nullptr, nullptr, stride};
        to_place_.emplace_back(feature, values);
    }

    // Adds a feature with bags; returns false if the n + 1 offsets do not rise within the `size` values.
    bool bags(std::size_t feature, const std::uint64_t* values, std::size_t size, const std::int64_t* offsets,
              const float* weights) {
        std::int64_t* own = keep<std::int64_t>(n_ + 1);
        std::copy_n(offsets, n_ + 1, own);
        const std::int64_t first = own[0];
        if (first < 0 || own[n_] > static_cast<std::int64_t>(size) || !std::is_sorted(own, own + n_ + 1)) return false;
        for (std::size_t i = 0; i <= n_; ++i) own[i] -= first;
        const auto count = static_cast<std::size_t>(own[n_]);
        samples_->ids[feature] = {copy(values + first, count), own,
                                  weights == nullptr ? nullptr : copy(weights + first, count), 1};
        return true;
    }

    void dense(const float* rows, std::size_t width) {
        samples_->dense = copy(rows, n_ * width);
        samples_->num_dense = width;
    }
    void label(const float* rows, std::size_t width) {
        samples_->label = copy(rows, n_ * width);
        samples_->num_labels = width;
    }

    // Copies the ids of the single features, some samples at a time, so that their part of the matrix stays in the
    // cache.
    std::shared_ptr<Samples> done() {
        constexpr std::size_t kTogether = 256;
        const std::size_t stride = samples_->ids.size();
        for (std::size_t begin = 0; begin < n_; begin += kTogether)
            for (const auto& [feature, values] : to_place_)
                for (std::size_t i = begin; i < std::min(n_, begin + kTogether); ++i)
                    single_[i * stride + feature] = values[i];
        return std::move(samples_);
    }

  private:
    template <typename T> T* keep(std::size_t n) {
        std::shared_ptr<T[]> memory(new T[n + 1]); // never empty: a null pointer has a meaning
        samples_->owners.push_back(memory);
        return memory.get();
    }
    template <typename T> T* copy(const T* from, std::size_t n) {
        T* to = keep<T>(n);
        std::copy_n(from, n, to);
        return to;
    }

    std::size_t n_;
    std::shared_ptr<Samples> samples_;
    std::uint64_t* single_; // [n, features]
    std::vector<std::pair<std::size_t, const std::uint64_t*>> to_place_;
};

// A range of a block's samples. Parts are numbered through: sample k of several parts counts over all of them.
struct BlockRange {
    const Samples* samples;
    std::size_t begin;
    std::size_t end;
};

// One batch: samples order[0 .. n) of the parts. First the constructor measures, then the caller makes the arrays and
// the functions fill them. The parts have one shape and at least one part is given.
class Gather {
  public:
    Gather(std::span<const BlockRange> parts, std::span<const std::int64_t> order)
        : parts_(parts), samples_(order.size()), num_features_(parts[0].samples->ids.size()) {
        place(order);
        measure();
    }

    std::size_t size() const { return samples_.size(); }
    std::size_t num_features() const { return num_features_; }
    // Every bag of the batch holds exactly one id, so it needs no offsets.
    bool one_each() const { return one_each_; }
    bool weighted() const { return weighted_; }
    std::size_t num_values() const { return num_values_; }

    void values(std::uint64_t* out) const {
        single_ids(out);
        for (std::size_t f = 0; f < num_features_; ++f)
            if (!single_[f]) bags<std::uint64_t>(&BagColumn::values, f, 0, out + starts_[f]);
    }
    void weights(float* out) const {
        for (std::size_t f = 0; f < num_features_; ++f) bags<float>(&BagColumn::weights, f, 1.0F, out + starts_[f]);
    }

    void offsets(std::int64_t* out) const {
        std::int64_t at = 0;
        *out++ = 0;
        for (std::size_t f = 0; f < num_features_; ++f)
            for (const SampleRef& ref : samples_)
                *out++ = at += bag_length(parts_[ref.part].samples->ids[f], ref.sample);
    }

    void dense(float* out) const { rows(&Samples::dense, parts_[0].samples->num_dense, out); }
    void label(float* out) const { rows(&Samples::label, parts_[0].samples->num_labels, out); }

  private:
    struct SampleRef {
        std::uint32_t part;
        std::uint64_t sample;
    };

    void place(std::span<const std::int64_t> order) {
        std::vector<std::uint64_t> starts; // for each part, in the common numbering
        std::uint64_t start = 0;
        for (const BlockRange& part : parts_) {
            starts.push_back(start);
            start += part.end - part.begin;
        }
        for (std::size_t i = 0; i < order.size(); ++i) {
            const auto k = static_cast<std::uint64_t>(order[i]);
            const auto part =
                static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), k) - starts.begin() - 1);
            samples_[i] = {static_cast<std::uint32_t>(part), parts_[part].begin + (k - starts[part])};
        }
    }

    void measure() {
        for (std::size_t f = 0; f < num_features_; ++f) {
            bool single = true;
            for (const BlockRange& part : parts_) {
                single = single && part.samples->ids[f].offsets == nullptr;
                weighted_ = weighted_ || part.samples->ids[f].weights != nullptr;
            }
            single_.push_back(single);
            starts_.push_back(num_values_);
            if (single) {
                num_values_ += samples_.size();
                continue;
            }
            for (const SampleRef& ref : samples_) {
                const std::int64_t n = bag_length(parts_[ref.part].samples->ids[f], ref.sample);
                one_each_ = one_each_ && n == 1;
                num_values_ += static_cast<std::size_t>(n);
            }
        }
    }

    // Copies the features whose samples all hold one id: some samples at a time, so that adjacent ids are read once.
    void single_ids(std::uint64_t* out) const {
        constexpr std::size_t kTogether = 128;
        std::vector<BagColumn> columns(parts_.size());
        for (std::size_t begin = 0; begin < samples_.size(); begin += kTogether) {
            const std::size_t end = std::min(samples_.size(), begin + kTogether);
            for (std::size_t f = 0; f < num_features_; ++f) {
                if (!single_[f]) continue;
                for (std::size_t p = 0; p < parts_.size(); ++p) columns[p] = parts_[p].samples->ids[f];
                std::uint64_t* to = out + starts_[f];
                for (std::size_t i = begin; i < end; ++i) {
                    const BagColumn& column = columns[samples_[i].part];
                    to[i] = column.values[samples_[i].sample * column.stride];
                }
            }
        }
    }

    // Copies one of a feature's arrays bag by bag; where a part has none, `missing` for each of its ids.
    template <typename T> void bags(const T* BagColumn::* member, std::size_t feature, T missing, T* out) const {
        std::vector<BagColumn> columns;
        for (const BlockRange& part : parts_) columns.push_back(part.samples->ids[feature]);
        for (const SampleRef& ref : samples_) {
            const BagColumn& column = columns[ref.part];
            const T* from = column.*member;
            const auto n = static_cast<std::size_t>(bag_length(column, ref.sample));
            if (from == nullptr)
                std::fill_n(out, n, missing);
            else if (column.offsets == nullptr)
                *out = from[ref.sample * column.stride];
            else
                std::copy_n(from + column.offsets[ref.sample], n, out);
            out += n;
        }
    }

    void rows(const float* Samples::* member, std::size_t width, float* out) const {
        for (const SampleRef& ref : samples_) {
            const float* from = parts_[ref.part].samples->*member + ref.sample * width;
            std::copy_n(from, width, out);
            out += width;
        }
    }

    std::span<const BlockRange> parts_;
    std::vector<SampleRef> samples_;
    std::size_t num_features_;
    std::vector<bool> single_;        // for each feature: every sample holds one id
    std::vector<std::size_t> starts_; // for each feature: where its values begin
    std::size_t num_values_ = 0;
    bool one_each_ = true;
    bool weighted_ = false;
};

} // namespace satrap
