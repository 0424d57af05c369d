// Memory that is reused from call to call: growing buffers without initialisation, and a pool of
// large blocks for results that are returned to Python. Fresh pages cost more than the copy into them (a page fault per
// 4 KiB), so blocks are kept, bounded, in huge pages.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace satrap {

template <typename T> class Buffer {
  public:
    // Returns memory for at least n elements, contents undefined.
    T* reserve(std::size_t n) {
        if (n > capacity_) {
            const std::size_t needed = n + n / 4;
            memory_.reset(static_cast<T*>(::operator new[](needed * sizeof(T), std::align_val_t{64})));
            capacity_ = needed; // only now: if the allocation fails, the smaller buffer stays in use
        }
        return memory_.get();
    }
    T* data() const { return memory_.get(); }
    T& operator[](std::size_t i) const { return memory_[i]; }

  private:
    struct Free {
        void operator()(T* memory) const { ::operator delete[](static_cast<void*>(memory), std::align_val_t{64}); }
    };
    std::unique_ptr<T[], Free> memory_;
    std::size_t capacity_ = 0;
};

// A pool of objects that are expensive to create, such as scratch space and batches. At most `most` are kept.
template <typename T> class Recycler {
  public:
    explicit Recycler(std::size_t most = ~std::size_t{0}) : most_(most) {}

    std::unique_ptr<T> take() {
        std::lock_guard lock(mutex_);
        if (spare_.empty()) {
            spare_.reserve(std::min(most_, ++num_made_)); // here, so that give() never allocates
            return std::make_unique<T>();
        }
        std::unique_ptr<T> object = std::move(spare_.back());
        spare_.pop_back();
        return object;
    }
    void give(std::unique_ptr<T> object) {
        std::lock_guard lock(mutex_);
        if (spare_.size() < most_) spare_.push_back(std::move(object));
    }

  private:
    const std::size_t most_;
    std::size_t num_made_ = 0;
    std::mutex mutex_;
    std::vector<std::unique_ptr<T>> spare_;
};

// A pool of 64-byte aligned blocks. Freed blocks are kept, up to a bound, for requests of about their size.
class BlockPool {
  public:
    struct Block {
        std::byte* memory;
        std::size_t bytes;
    };

    BlockPool() = default;
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;
    ~BlockPool() {
        for (Block block : spare_) std::free(block.memory);
    }

    Block take(std::size_t bytes) {
        if (bytes < kHugePage) return {allocate(64, (bytes + 64) / 64 * 64), 0}; // small: malloc is as fast
        bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
        {
            std::lock_guard lock(mutex_);
            for (std::size_t i = 0; i < spare_.size(); ++i) {
                Block block = spare_[i];
                if (block.bytes < bytes || block.bytes > 2 * bytes) continue;
                spare_.erase(spare_.begin() + static_cast<std::ptrdiff_t>(i));
                kept_ -= block.bytes;
                return block;
            }
        }
        Block block{allocate(kHugePage, bytes), bytes};
        madvise(block.memory, bytes, MADV_HUGEPAGE);
        return block;
    }

    void give(Block block) {
        if (block.bytes != 0) {
            std::lock_guard lock(mutex_);
            if (kept_ + block.bytes <= kMostKept) {
                try {
                    spare_.push_back(block);
                    kept_ += block.bytes;
                    return;
                } catch (const std::bad_alloc&) { // the block is freed instead
                }
            }
        }
        std::free(block.memory);
    }

  private:
    static constexpr std::size_t kHugePage = std::size_t{2} << 20;
    static constexpr std::size_t kMostKept = std::size_t{512} << 20;

    static std::byte* allocate(std::size_t alignment, std::size_t bytes) {
        void* memory = std::aligned_alloc(alignment, bytes);
        if (memory == nullptr) throw std::bad_alloc();
        return static_cast<std::byte*>(memory);
    }

    std::mutex mutex_;
    std::vector<Block> spare_;
    std::size_t kept_ = 0;
};

} // namespace satrap
