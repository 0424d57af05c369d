// Distributes the buckets of a call over threads, each with its own scratch space, which is kept from call to call. The
// caller supplies the work on a bucket. Results cannot depend on the number of threads, because one thread does all
// work on a bucket.
#pragma once

#include <exception>

#include "base/float_mode.hpp"
#include "base/thread_pool.hpp"
#include "ids/bucket_visit.hpp"
#include "ids/ticket.hpp"

namespace satrap {

class BucketScheduler {
  public:
    explicit BucketScheduler(unsigned num_threads) : pool_(num_threads) {}

    ThreadPool& pool() { return pool_; }
    unsigned num_threads() const { return pool_.num_threads(); }

    // Scratch space for each thread of a call with this many ids; returned when the call ends.
    class ScratchLease {
      public:
        ScratchLease(BucketScheduler& scheduler, std::size_t num_ids) : spare_(scheduler.spare_) {
            // For a few ids, waking threads costs more than it saves.
            const unsigned threads = num_ids < 512 ? 1 : scheduler.num_threads();
            taken_.reserve(threads);
            while (taken_.size() < threads) taken_.push_back(spare_.take());
        }
        ScratchLease(const ScratchLease&) = delete;
        ScratchLease& operator=(const ScratchLease&) = delete;
        ~ScratchLease() {
            for (auto& scratch : taken_) {
                scratch->undo = nullptr;
                spare_.give(std::move(scratch));
            }
        }
        Scratch& operator[](unsigned thread) {
            SATRAP_ASSERT(thread < taken_.size());
            return *taken_[thread];
        }
        unsigned size() const { return static_cast<unsigned>(taken_.size()); }

      private:
        Recycler<Scratch>& spare_;
        std::vector<std::unique_ptr<Scratch>> taken_;
    };

    template <typename Has, typename Work>
    void for_each_bucket(const BucketNumbering& map, ScratchLease& lease, Has has, Work work);
    // The same for the buckets that a batch, or tickets, have ids in.
    template <typename Ids, typename Work>
    void for_each_occupied(const BucketNumbering& map, ScratchLease& lease, const Ids& ids, Work work) {
        for_each_bucket(map, lease, [&](std::uint32_t b) { return occupied(ids, b); }, work);
    }
    // Makes the ids of every bucket of a batch unique.
    void deduplicate(const BucketNumbering& map, ScratchLease& lease, Batch& batch) {
        for_each_occupied(map, lease, batch, [&](std::size_t, std::uint32_t b, Scratch& scratch) {
            batch.deduplicate(b, scratch.dedupe);
        });
    }

  private:
    Recycler<Scratch> spare_;
    ThreadPool pool_;
};

// Runs work(table, bucket, scratch) for every bucket that has(bucket) entries, on all threads. Of several errors it
// throws that of the lowest bucket, so the message depends on timing no more than the state does.
template <typename Has, typename Work>
void BucketScheduler::for_each_bucket(const BucketNumbering& map, ScratchLease& lease, Has has, Work work) {
    SATRAP_ASSERT(lease.size() == 1 || lease.size() == num_threads());
    // Small enough that no thread finishes late, large enough that the counter is no bottleneck.
    const std::uint32_t grain = std::max(1U, map.total() / (64 * pool_.num_threads()));
    std::atomic<std::uint32_t> next{0}, failed_bucket{0xffffffffU};
    std::mutex error_mutex;
    std::exception_ptr error;
    auto job = [&](unsigned thread, unsigned) {
        const FloatMode mode; // each thread may have another mode
        Scratch& own = lease[thread];
        std::size_t t = 0;
        for (std::uint32_t b; (b = next.fetch_add(grain)) < map.total();) {
            for (std::uint32_t end = std::min(b + grain, map.total()); b < end; ++b) {
                if (!has(b) || b > failed_bucket.load(std::memory_order_relaxed)) continue;
                while (b >= map.first[t + 1]) ++t;
                SATRAP_ASSERT(map.first[t] <= b && t < map.num_tables());
                try {
                    work(t, b, own);
                } catch (...) {
                    std::lock_guard lock(error_mutex);
                    if (b < failed_bucket.load()) {
                        failed_bucket.store(b);
                        error = std::current_exception();
                    }
                }
            }
        }
    };
    if (lease.size() == 1)
        job(0, 1);
    else
        pool_.run(job);
    if (error != nullptr) std::rethrow_exception(error);
}

} // namespace satrap
