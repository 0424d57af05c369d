// The columns of a parsed text: they grow sample by sample, and a sample that turns out to be bad is removed
// again. delimited.hpp fills them; they become Samples without a copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "data/samples.hpp"
#include "data/text_format.hpp"

namespace satrap {

// A growing array of uninitialised elements.
template <typename T> class GrowingArray {
  public:
    T* reserve(std::size_t n) {
        if (n <= capacity_) return memory_.get();
        const std::size_t capacity = std::max(n, capacity_ + capacity_ / 2);
        std::shared_ptr<T[]> grown(new T[capacity]);
        if (capacity_ != 0) std::copy_n(memory_.get(), capacity_, grown.get());
        memory_ = std::move(grown);
        capacity_ = capacity;
        return memory_.get();
    }
    T* data() const { return memory_.get(); }
    const std::shared_ptr<T[]>& shared() const { return memory_; }

  private:
    std::shared_ptr<T[]> memory_;
    std::size_t capacity_ = 0;
};

// The ids of one feature, and their weights. While every sample has exactly one id, it is in a matrix that features
// share, beside the sample's other ids: sample i in matrix[i * stride]. From the first other one on there are bags: bag
// i is values[offsets[i] .. offsets[i + 1]) and `count` ids are in use, those of the sample that is being read
// included.
class IdColumn {
  public:
    IdColumn(std::uint64_t* matrix, std::size_t stride, bool weighted, std::size_t most_samples)
        : matrix_(matrix), stride_(stride), most_samples_(most_samples), weighted_(weighted) {
        if (weighted) begin_bags(0);
    }

    bool in_bags() const { return offsets_.data() != nullptr; }

    // Writes the one id of sample n.
    void set(std::size_t n, std::uint64_t id) {
        if (in_bags())
            add(id);
        else
            matrix_[n * stride_] = id;
    }
    // Starts a sample n with no id, or a list of ids: `add` each.
    void begin_bag(std::size_t n) {
        if (!in_bags()) begin_bags(n);
    }
    void add(std::uint64_t id) {
        values_.reserve(count_ + 1)[count_] = id;
        ++count_;
    }
    void add_weight(float weight) {
        weights_.reserve(num_weights_ + 1)[num_weights_] = weight;
        ++num_weights_;
    }

    // -- only for weighted columns: how the sample that is being read stands ---------------------------------------
    bool weighted() const { return weighted_; }
    void bag_is_missing() { missing_ = true; }
    bool bag_missing() const { return missing_; }
    std::size_t new_ids(std::size_t n) const { return count_ - first(n); }
    std::size_t new_weights(std::size_t n) const { return num_weights_ - first(n); }
    // A missing bag ignores weights; the id that stands for it weighs 1.
    void settle_missing(std::size_t n) {
        num_weights_ = first(n);
        while (num_weights_ < count_) add_weight(1.0F);
    }

    // Keeps sample n, or removes it.
    void commit(std::size_t n) {
        missing_ = false;
        offsets_.data()[n + 1] = static_cast<std::int64_t>(count_);
    }
    void take_back(std::size_t n) {
        missing_ = false;
        count_ = first(n);
        if (weighted_) num_weights_ = first(n);
    }

    void hand_over(Samples& samples) {
        if (!in_bags()) {
            samples.ids.push_back({matrix_, nullptr, nullptr, stride_});
            return;
        }
        samples.ids.push_back({values_.data(), offsets_.data(), weighted_ ? weights_.reserve(1) : nullptr, 1});
        samples.owners.insert(samples.owners.end(), {values_.shared(), offsets_.shared(), weights_.shared()});
    }

  private:
    std::size_t first(std::size_t n) const { return static_cast<std::size_t>(offsets_.data()[n]); }

    void begin_bags(std::size_t n) {
        std::int64_t* offsets = offsets_.reserve(most_samples_ + 1);
        for (std::size_t i = 0; i <= n; ++i) offsets[i] = static_cast<std::int64_t>(i);
        std::uint64_t* values = values_.reserve(most_samples_);
        for (std::size_t i = 0; i < n; ++i) values[i] = matrix_[i * stride_];
        count_ = n;
    }

    std::uint64_t* matrix_;
    std::size_t stride_;
    GrowingArray<std::uint64_t> values_;
    GrowingArray<std::int64_t> offsets_;
    GrowingArray<float> weights_;
    std::size_t most_samples_;
    std::size_t count_ = 0;
    std::size_t num_weights_ = 0;
    bool weighted_;
    bool missing_ = false;
};

// A column that is returned to the user as text. present[i] is 1, or 0 if the field was missing.
struct TextColumn {
    GrowingArray<std::int64_t> offsets;
    GrowingArray<std::uint8_t> data; // UTF-8
    GrowingArray<std::uint8_t> present;

    explicit TextColumn(std::size_t most_samples) {
        offsets.reserve(most_samples + 1)[0] = 0;
        present.reserve(most_samples + 1);
        data.reserve(1);
    }
    // Writes sample n; the next write of n replaces it, so nothing has to be removed.
    void set(std::size_t n, std::string_view text, bool is_present) {
        const auto first = static_cast<std::size_t>(offsets.data()[n]);
        std::copy_n(text.data(), text.size(), data.reserve(first + text.size()) + first);
        offsets.data()[n + 1] = static_cast<std::int64_t>(first + text.size());
        present.data()[n] = is_present ? 1 : 0;
    }
};

// All columns of a text. `most_samples` bounds the number of samples.
class TextColumns {
  public:
    TextColumns(const TextFormat& format, std::size_t most_samples)
        : num_dense(format.num_dense), num_labels(format.num_labels) {
        std::vector<bool> weighted(format.num_features);
        for (const auto& uses : format.columns)
            for (const FieldUse& use : uses)
                if (use.kind == UseKind::weights) weighted[use.index] = true;
        dense.reserve(most_samples * num_dense);
        label.reserve(most_samples * num_labels);
        std::uint64_t* first = single_ids.reserve(most_samples * format.num_features);
        for (std::size_t f = 0; f < format.num_features; ++f)
            ids.emplace_back(first + f, format.num_features, weighted[f], most_samples);
        for (std::size_t t = 0; t < format.num_texts; ++t) texts.emplace_back(most_samples);
    }

    // Returns the first feature with another number of weights than ids in the current sample, if there is one.
    const IdColumn* uneven_weights(std::size_t& feature) {
        for (feature = 0; feature < ids.size(); ++feature) {
            IdColumn& column = ids[feature];
            if (!column.weighted()) continue;
            if (column.bag_missing()) column.settle_missing(n);
            if (column.new_ids(n) != column.new_weights(n)) return &column;
        }
        return nullptr;
    }

    void commit() {
        for (IdColumn& column : ids)
            if (column.in_bags()) column.commit(n);
        ++n;
    }
    void take_back() {
        for (IdColumn& column : ids)
            if (column.in_bags()) column.take_back(n);
    }

    std::shared_ptr<Samples> hand_over() {
        auto samples = std::make_shared<Samples>();
        samples->n = n;
        for (IdColumn& column : ids) column.hand_over(*samples);
        samples->dense = dense.data();
        samples->num_dense = num_dense;
        samples->label = label.data();
        samples->num_labels = num_labels;
        samples->owners.insert(samples->owners.end(), {dense.shared(), label.shared(), single_ids.shared()});
        return samples;
    }

    std::size_t n = 0;
    std::size_t num_dense;
    std::size_t num_labels;
    GrowingArray<float> dense;
    GrowingArray<float> label;
    GrowingArray<std::uint64_t> single_ids; // [samples, features]
    std::vector<IdColumn> ids;
    std::vector<TextColumn> texts;
};

} // namespace satrap
