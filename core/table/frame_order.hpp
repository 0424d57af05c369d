// The rows in the frames of a device, ordered by their last use: which row leaves next. Exact LRU over all tables of a
// pool, by (stamp, table, id), so that the choice depends on neither threads nor the numbers of frames.
//
// One array for each property of a frame, so that a search for victims reads the stamps one after another. A search
// collects the oldest 1/32; a row whose stamp has risen since is skipped, and a stamp within their range makes the next
// call search again. So the rows that are returned are always the oldest.
// Thread safety: put, touch and clear of different frames at the same time; oldest() by one thread, beside them: a row
// that they change meanwhile may be returned, and the caller checks each under its bucket's lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

namespace satrap {

class FrameOrder {
  public:
    struct Use {
        std::uint32_t stamp;
        std::uint32_t table;
        std::uint64_t id;
        std::uint32_t frame;
        bool operator<(const Use& other) const {
            return std::tie(stamp, table, id) < std::tie(other.stamp, other.table, other.id);
        }
    };

    explicit FrameOrder(std::uint32_t frames)
        : size_(frames), stamps_(std::make_unique<std::atomic<std::uint32_t>[]>(frames)),
          tables_(std::make_unique<std::atomic<std::uint32_t>[]>(frames)),
          ids_(std::make_unique<std::atomic<std::uint64_t>[]>(frames)) {
        for (std::uint32_t frame = 0; frame < frames; ++frame) clear(frame);
    }

    std::size_t bytes() const { return std::size_t{size_} * 16; }

    // The frame holds this row, last used at the stamp.
    void put(const Use& use) {
        tables_[use.frame].store(use.table, kRelaxed);
        ids_[use.frame].store(use.id, kRelaxed);
        touch(use.frame, use.stamp);
    }
    void touch(std::uint32_t frame, std::uint32_t stamp) {
        stamps_[frame].store(stamp, kRelaxed);
        if (stamp <= newest_victim_.load(kRelaxed)) is_spoiled_.store(true, kRelaxed);
    }
    // The frame holds no row.
    void clear(std::uint32_t frame) { stamps_[frame].store(kFree, kRelaxed); }

    // The frame's row; stamp kFree: it has none.
    Use of(std::uint32_t frame) const {
        return {stamps_[frame].load(kRelaxed), tables_[frame].load(kRelaxed), ids_[frame].load(kRelaxed), frame};
    }

    // Adds up to n rows with the smallest stamps, all below `before`, to `out`, the oldest first. The caller moves each
    // away, or calls retry().
    void oldest(std::size_t n, std::uint32_t before, std::vector<Use>& out) {
        if (is_spoiled_.exchange(false)) victims_.clear();
        const std::size_t first = out.size();
        take_victims(n, before, out);
        if (out.size() - first == n) return;
        out.resize(first); // a search finds those again
        collect(std::max<std::size_t>(n, size_ / 32), before);
        take_victims(n, before, out);
    }
    // Makes the next call return these rows again.
    void retry() { is_spoiled_.store(true); }

    // How many frames hold rows that were used at `since` or later.
    std::size_t used_since(std::uint32_t since) const {
        std::size_t n = 0;
        for (std::uint32_t frame = 0; frame < size_; ++frame) {
            const std::uint32_t stamp = stamps_[frame].load(kRelaxed);
            n += stamp >= since && stamp != kFree;
        }
        return n;
    }

    static constexpr std::uint32_t kFree = 0xffffffffU; // no step's number

  private:
    static constexpr auto kRelaxed = std::memory_order_relaxed;

    void take_victims(std::size_t n, std::uint32_t before, std::vector<Use>& out) {
        for (; n != 0 && !victims_.empty() && victims_.back().stamp < before; victims_.pop_back()) {
            const Use& victim = victims_.back();
            const Use now = of(victim.frame);
            if (now.stamp != victim.stamp || now.id != victim.id || now.table != victim.table) continue;
            out.push_back(victim);
            --n;
        }
    }

    // Collects the oldest rows, in falling order.
    void collect(std::size_t target, std::uint32_t before) {
        std::vector<Use> heap; // a max-heap of the smallest so far
        for (std::uint32_t frame = 0; frame < size_; ++frame) {
            const std::uint32_t stamp = stamps_[frame].load(kRelaxed);
            if (stamp >= before) continue;
            if (heap.size() == target) {
                if (stamp > heap.front().stamp) continue;
                const Use use = of(frame);
                if (!(use < heap.front())) continue;
                std::pop_heap(heap.begin(), heap.end());
                heap.back() = use;
            } else {
                heap.push_back(of(frame));
            }
            std::push_heap(heap.begin(), heap.end());
        }
        std::sort(heap.begin(), heap.end(), [](const Use& a, const Use& b) { return b < a; });
        newest_victim_.store(heap.empty() ? 0 : heap.front().stamp, kRelaxed);
        victims_ = std::move(heap);
    }

    std::uint32_t size_;
    std::unique_ptr<std::atomic<std::uint32_t>[]> stamps_;
    std::unique_ptr<std::atomic<std::uint32_t>[]> tables_;
    std::unique_ptr<std::atomic<std::uint64_t>[]> ids_;
    std::vector<Use> victims_; // the next is the last
    std::atomic<std::uint32_t> newest_victim_{0};
    std::atomic<bool> is_spoiled_{false};
};

} // namespace satrap
