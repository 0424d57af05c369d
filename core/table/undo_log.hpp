// Undo slots in a shared-memory file: an update of one bucket is applied whole or not at all, even under kill -9. So is
// the replacement of one row by that of a snapshot.
// Protocol: (1) copy head and bytes of every row to be written into a slot, and the window that will record that this
// is done, (2) arm it, (3) apply, mark the window, (4) disarm. A process that attaches the file later writes back
// whatever an armed slot holds; then no bucket is half-applied, and none is marked without being applied. Only arenas
// that survive their process have slots. A slot belongs to one thread from take() to give(); its size is settled before
// a call changes anything.
#pragma once

#include "base/buffers.hpp"
#include "table/applied_steps.hpp"
#include "table/rows.hpp"

namespace satrap {

struct UndoHeader {
    std::atomic<std::uint32_t> armed;
    std::uint32_t table;
    std::uint32_t bucket;
    std::uint32_t count;
    std::uint64_t row_bytes;
    std::uint32_t trainer; // the trainer whose window of the bucket this is
    std::uint32_t unused;
    StepWindow window;
};

struct UndoEntry {    // followed by the row's bytes
    std::uint64_t id; // unused: a row that is written keeps its id
    Head head;
    std::uint32_t slot;
    std::uint32_t unused;
};

class UndoSlot {
  public:
    UndoSlot() = default;
    UndoSlot(std::byte* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}

    static std::size_t bytes_for(std::size_t count, std::size_t row_bytes) {
        return sizeof(UndoHeader) + count * (sizeof(UndoEntry) + row_bytes);
    }

    // Makes the slot large enough, before anything is written; changes nothing if it throws.
    void reserve(Arena& arena, std::size_t needed) {
        if (needed <= bytes_) return;
        SATRAP_ASSERT(arena.survives_process());
        std::size_t grown = std::max(2 * bytes_, round_up(needed, 4096));
        memory_ = arena.allocate({ChunkKind::undo, 0, 0, 0}, grown);
        bytes_ = grown;
    }

    void open(std::uint32_t table, std::uint32_t bucket, std::size_t row_bytes) {
        SATRAP_ASSERT(bytes_ >= sizeof(UndoHeader) && header().armed.load() == 0);
        header().table = table;
        header().bucket = bucket;
        header().count = 0;
        header().row_bytes = row_bytes;
        header().trainer = kNoTrainer;
        next_ = memory_ + sizeof(UndoHeader);
    }

    void add(std::uint32_t slot, const Head& head, const std::byte* row) {
        SATRAP_ASSERT(header().armed.load() == 0);
        SATRAP_ASSERT(bytes_for(header().count + std::size_t{1}, header().row_bytes) <= bytes_); // it was reserved
        UndoEntry entry{0, head, slot, 0};
        std::memcpy(next_, &entry, sizeof(entry));
        std::memcpy(next_ + sizeof(entry), row, header().row_bytes);
        next_ += sizeof(entry) + header().row_bytes;
        ++header().count;
    }

    // Copies the trainer's window of the bucket.
    void keep(std::uint32_t trainer, const StepWindow& window) {
        SATRAP_ASSERT(trainer != kNoTrainer && header().armed.load() == 0);
        header().trainer = trainer;
        header().window = window;
    }

    void arm() {
        SATRAP_ASSERT(header().armed.load() == 0);
        header().armed.store(1, std::memory_order_release);
        std::atomic_signal_fence(std::memory_order_seq_cst); // later writes stay after this
    }
    void disarm() { header().armed.store(0, std::memory_order_release); }

    // After a restart: undoes the update that the slot holds, if it is armed. `rows_of(table, bucket)` returns the
    // rows, `window_of(trainer, table, bucket)` the window of a bucket.
    template <typename RowsOf, typename WindowOf> void recover(RowsOf rows_of, WindowOf window_of) {
        if (header().armed.load(std::memory_order_acquire) == 0) return;
        Rows& rows = rows_of(header().table, header().bucket);
        if (header().row_bytes != rows.row_bytes() || header().count > bytes_ / sizeof(UndoEntry) ||
            bytes_for(header().count, rows.row_bytes()) > bytes_)
            throw InvariantError("an undo slot claims more than it holds");
        next_ = memory_ + sizeof(UndoHeader);
        for (std::uint32_t i = 0; i < header().count; ++i) {
            UndoEntry entry;
            std::memcpy(&entry, next_, sizeof(entry));
            if (entry.slot >= rows.capacity()) throw InvariantError("an undo slot names a row that does not exist");
            std::memcpy(rows.row(entry.slot), next_ + sizeof(entry), header().row_bytes);
            rows.head(entry.slot) = entry.head;
            next_ += sizeof(entry) + header().row_bytes;
        }
        if (header().trainer != kNoTrainer)
            window_of(header().trainer, header().table, header().bucket) = header().window;
        disarm();
    }

  private:
    UndoHeader& header() {
        SATRAP_ASSERT(memory_ != nullptr);
        return *reinterpret_cast<UndoHeader*>(memory_);
    }

    std::byte* memory_ = nullptr;
    std::size_t bytes_ = 0;
    std::byte* next_ = nullptr;
};

// The slots of one call, one for each thread: all taken before anything changes, all returned when it ends.
class UndoSet {
  public:
    UndoSet(Recycler<UndoSlot>& slots, Arena& arena) : slots_(slots), arena_(arena) {}
    UndoSet(const UndoSet&) = delete;
    UndoSet& operator=(const UndoSet&) = delete;
    ~UndoSet() {
        for (auto& slot : taken_) slots_.give(std::move(slot));
    }

    void fill(unsigned threads, std::size_t bytes) {
        SATRAP_ASSERT(taken_.empty());
        taken_.reserve(threads);
        while (taken_.size() < threads) {
            taken_.push_back(slots_.take());
            taken_.back()->reserve(arena_, bytes); // if it throws, the slot can still serve a smaller update
        }
    }
    UndoSlot* slot(unsigned thread) {
        SATRAP_ASSERT(taken_.empty() || thread < taken_.size());
        return taken_.empty() ? nullptr : taken_[thread].get();
    }

  private:
    Recycler<UndoSlot>& slots_;
    Arena& arena_;
    std::vector<std::unique_ptr<UndoSlot>> taken_;
};

} // namespace satrap
