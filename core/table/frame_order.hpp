// The rows in the frames of a device, ordered by their last use: which row leaves next. Exact LRU over all tables of a
// pool, by (stamp, table, id), so that the choice depends on neither threads nor the numbers of frames.
//
// The stamps are apart from the rest, so that a search for victims reads them one after another; chunks are allocated
// as frames are used, so a limit far above the rows costs nothing. A search collects at least the oldest 1/32; a row
// whose stamp has risen since is skipped, and a stamp within their range makes the next call search again. So the rows
// that are returned are always the oldest.
// Invariants: victims_ falls by (stamp, table, id), as these were when they were collected, all with stamps of at most
//   newest_victim_; a stamp is kFree <=> its frame holds no row. Thread safety: put, touch and clear of different
//   frames at the same time;
// oldest() by one thread, beside them: a row that they change meanwhile may be returned, and the caller checks each
// under its bucket's lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/assertions.hpp"
#include "base/inlining.hpp"

namespace satrap {

class FrameOrder {
  public:
    struct Use {
        std::uint32_t stamp;
        std::uint32_t table;
        std::uint64_t id;
        std::uint32_t frame;
        std::uint32_t slot; // where the row is in its bucket
        bool operator<(const Use& other) const {
            return std::tie(stamp, table, id) < std::tie(other.stamp, other.table, other.id);
        }
    };

    static constexpr std::size_t kBytes = 20; // for a frame

    explicit FrameOrder(std::uint32_t frames)
        : chunk_frames_(std::clamp(frames, 1U, kMostChunkFrames)),
          chunks_((std::size_t{frames} + chunk_frames_ - 1) / chunk_frames_) {}

    // Makes room for the frame: put() of it will not throw.
    void reserve(std::uint32_t frame) { chunk_for(frame); }
    // The frame holds this row, last used at the stamp.
    void put(const Use& use) {
        SATRAP_ASSERT(use.stamp != kFree);
        Chunk& chunk = chunk_for(use.frame);
        const std::uint32_t i = use.frame % chunk_frames_;
        chunk.rows[i].table.store(use.table, kRelaxed);
        chunk.rows[i].slot.store(use.slot, kRelaxed);
        chunk.rows[i].id.store(use.id, kRelaxed);
        touch(use.frame, use.stamp);
    }
    // Notes that the row in this frame was used.
    void touch(std::uint32_t frame, std::uint32_t stamp) {
        SATRAP_ASSERT(stamp != kFree && chunk_of(frame) != nullptr);
        chunk_of(frame)->stamps[frame % chunk_frames_].store(stamp, kRelaxed);
        if (stamp <= newest_victim_.load(kRelaxed)) is_spoiled_.store(true, kRelaxed);
    }
    // The frame holds no row.
    void clear(std::uint32_t frame) {
        if (Chunk* chunk = chunk_of(frame)) chunk->stamps[frame % chunk_frames_].store(kFree, kRelaxed);
    }

    // The frame's row; stamp kFree: it has none.
    Use of(std::uint32_t frame) const {
        const Chunk* chunk = chunk_of(frame);
        if (chunk == nullptr) return {kFree, 0, 0, frame, 0};
        const std::uint32_t i = frame % chunk_frames_;
        const Row& row = chunk->rows[i];
        return {chunk->stamps[i].load(kRelaxed), row.table.load(kRelaxed), row.id.load(kRelaxed), frame,
                row.slot.load(kRelaxed)};
    }

    // Adds up to n rows with the smallest stamps, all below `before`, to `out`, the oldest first. The caller moves each
    // away, or calls retry().
    void oldest(std::size_t n, std::uint32_t before, std::vector<Use>& out) {
        SATRAP_ASSERT(before != kFree);
        if (is_spoiled_.exchange(false)) victims_.clear();
        const std::size_t first = out.size();
        take_victims(n, before, out);
        if (out.size() - first == n) return;
        out.resize(first); // a search finds those again
        collect(std::max<std::size_t>(4 * n, num_chunks_.load() * std::size_t{chunk_frames_} / 32), before);
        take_victims(n, before, out);
    }
    // Makes the next call return these rows again.
    void retry() { is_spoiled_.store(true); }

    // How many frames hold rows that were used at `since` or later.
    std::size_t used_since(std::uint32_t since) const {
        std::size_t n = 0;
        for_each_stamp([&](std::uint32_t, std::uint32_t stamp) { n += stamp >= since && stamp != kFree; });
        return n;
    }

    static constexpr std::uint32_t kFree = 0xffffffffU; // no step's number

  private:
    static constexpr auto kRelaxed = std::memory_order_relaxed;
    static constexpr std::size_t kAhead = 16;
    static constexpr std::uint32_t kMostChunkFrames = 1U << 16;

    struct Row {
        std::atomic<std::uint64_t> id;
        std::atomic<std::uint32_t> table, slot;
    };
    struct Chunk {
        explicit Chunk(std::uint32_t frames) : stamps(frames), rows(frames) {
            for (auto& stamp : stamps) stamp.store(kFree, kRelaxed);
        }
        std::vector<std::atomic<std::uint32_t>> stamps;
        std::vector<Row> rows;
    };
    struct ChunkPointer : std::atomic<Chunk*> {
        ChunkPointer() : std::atomic<Chunk*>(nullptr) {}
        ~ChunkPointer() { delete load(); }
    };

    Chunk* chunk_of(std::uint32_t frame) const {
        SATRAP_ASSERT(frame / chunk_frames_ < chunks_.size());
        return chunks_[frame / chunk_frames_].load(std::memory_order_acquire);
    }
    Chunk& chunk_for(std::uint32_t frame) {
        if (Chunk* chunk = chunk_of(frame)) return *chunk;
        std::lock_guard lock(growth_);
        ChunkPointer& pointer = chunks_[frame / chunk_frames_];
        if (pointer.load() == nullptr) {
            pointer.store(new Chunk(chunk_frames_), std::memory_order_release);
            ++num_chunks_;
        }
        return *pointer.load();
    }
    SATRAP_ALWAYS_INLINE void prefetch(std::uint32_t frame) const {
        const Chunk* chunk = chunk_of(frame);
        __builtin_prefetch(&chunk->stamps[frame % chunk_frames_]);
        __builtin_prefetch(&chunk->rows[frame % chunk_frames_]);
    }
    template <typename Visit> void for_each_stamp(Visit visit) const {
        for (std::size_t c = 0; c < chunks_.size(); ++c)
            if (const Chunk* chunk = chunks_[c].load(std::memory_order_acquire))
                for (std::uint32_t i = 0; i < chunk_frames_; ++i)
                    visit(static_cast<std::uint32_t>(c * chunk_frames_ + i), chunk->stamps[i].load(kRelaxed));
    }

    void take_victims(std::size_t n, std::uint32_t before, std::vector<Use>& out) {
        for (; n != 0 && !victims_.empty() && victims_.back().stamp < before; victims_.pop_back()) {
            if (victims_.size() > kAhead) prefetch(victims_[victims_.size() - kAhead].frame);
            const Use& victim = victims_.back();
            const Use now = of(victim.frame);
            if (now.stamp != victim.stamp || now.id != victim.id || now.table != victim.table) continue;
            out.push_back(now); // its row may have another slot since
            --n;
        }
    }

    // Collects all rows up to a stamp, at least `target` if there are so many below `before`, in falling order.
    void collect(std::size_t target, std::uint32_t before) {
        SATRAP_ASSERT(target != 0);
        victims_.clear();
        const std::uint32_t newest = stamp_of(target, before);
        for_each_stamp([&](std::uint32_t frame, std::uint32_t stamp) {
            if (stamp <= newest && stamp < before) victims_.push_back(of(frame));
        });
        std::sort(victims_.begin(), victims_.end(), [](const Use& a, const Use& b) { return b < a; });
        newest_victim_.store(victims_.empty() ? 0 : victims_.front().stamp, kRelaxed);
    }

    // Returns a stamp up to which there are at least `target` rows below `before`, or all: the end of a bin.
    std::uint32_t stamp_of(std::size_t target, std::uint32_t before) const {
        std::uint32_t oldest = kFree, newest = 0; // kFree is above all steps
        for_each_stamp([&](std::uint32_t, std::uint32_t stamp) {
            if (stamp >= before) return;
            oldest = std::min(oldest, stamp);
            newest = std::max(newest, stamp);
        });
        if (oldest == kFree) return 0;
        constexpr unsigned kBits = 12;
        const unsigned width = static_cast<unsigned>(std::bit_width(newest - oldest));
        const unsigned shift = width > kBits ? width - kBits : 0;
        std::vector<std::size_t> counts(std::size_t{1} << kBits);
        for_each_stamp([&](std::uint32_t, std::uint32_t stamp) {
            if (stamp < before) ++counts[(stamp - oldest) >> shift];
        });
        std::size_t bin = 0;
        for (std::size_t sum = counts[0]; sum < target && bin + 1 < counts.size();) sum += counts[++bin];
        const std::uint64_t end = oldest + ((std::uint64_t{bin} + 1) << shift) - 1;
        return static_cast<std::uint32_t>(std::min<std::uint64_t>(end, newest));
    }

    std::uint32_t chunk_frames_;
    std::vector<ChunkPointer> chunks_;
    std::atomic<std::size_t> num_chunks_{0};
    std::mutex growth_;
    std::vector<Use> victims_; // the next is the last
    std::atomic<std::uint32_t> newest_victim_{0};
    std::atomic<bool> is_spoiled_{false};
};

} // namespace satrap
