// A block of a pool, returned when its owner is destroyed: after one call, or with the last array that Python has of
// it, which may outlive the creator of the pool. In a fork the pool's lock may be held by a thread that does not
// exist there, and its list be half changed, so neither is touched.
#pragma once

#include "base/buffers.hpp"
#include "base/fork_guard.hpp"

namespace satrap {

class PooledBlock {
  public:
    PooledBlock(const std::shared_ptr<BlockPool>& pool, BlockPool::Block block)
        : pool_(std::make_unique<std::shared_ptr<BlockPool>>(pool)), block_(block) {}
    PooledBlock(const std::shared_ptr<BlockPool>& pool, std::size_t bytes) : PooledBlock(pool, pool->take(bytes)) {}
    PooledBlock(const PooledBlock&) = delete;
    PooledBlock& operator=(const PooledBlock&) = delete;
    ~PooledBlock() {
        if (fork_guard_.is_same_process())
            (*pool_)->give(block_);
        else
            (void)pool_.release(); // it may be the last owner, and must not destroy the pool
    }

    template <typename T> T* as() const { return reinterpret_cast<T*>(block_.memory); }

  private:
    std::unique_ptr<std::shared_ptr<BlockPool>> pool_;
    BlockPool::Block block_;
    ForkGuard fork_guard_;
};

} // namespace satrap
