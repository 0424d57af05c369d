// The worker's side of lookups whose rows are on servers: does what Engine does with bags, over the network instead of
// tables. It knows the shape of a table's rows and which bucket an id is in; it holds no rows. Each call passes the
// owners of the buckets.
//   lookup   groups the ids by bucket, makes them unique, lays them out for the servers (shard_layout.hpp)
//   fill     takes the servers' rows, and writes what Engine::lookup_bags would write
//   sums     takes gradients, and computes for each server the sums that Engine::update_bags would apply
// Both use the same classes (BagPlan, Batch, BagRows, BagSource, GradientSum), so the bits are the
// same.
//
// A ticket is looked up once, filled at most once, and then used (sums or drop) once. Each of these calls claims it
// while it runs, so that a concurrent call is refused; a call that fails leaves the ticket unchanged.
// Data for the network is in blocks that live until their last owner is destroyed, even after the ticket.
// Locks: as in Engine, less the buckets'. Processes: in a fork every call is refused.
#pragma once

#include "bags/bag_output.hpp"
#include "bags/bucket_runs.hpp"
#include "ids/bucket_scheduler.hpp"
#include "kernels/fp16_codec.hpp"
#include "sharding/shard_layout.hpp"

namespace satrap {

struct SplitTicket {
    Ticket ticket;
    std::unique_ptr<BagPlan> plan; // released when the ticket is filled
    std::shared_ptr<const ShardLayout> layout;
    std::shared_ptr<const PooledBlock> ids;
};

// The sums that an update sends to each server.
struct Sums {
    std::shared_ptr<const ShardLayout> layout;
    std::shared_ptr<const PooledBlock> ids, gradients;
    bool same_ids = false;              // the ids and servers are those of the one ticket's lookup
    std::vector<std::uint64_t> skipped; // [tables]: entries left out, not finite
};

// A batch for a device, which gets the servers' rows in groups of tables: of each group server by server, and within a
// server as ShardLayout has them.
struct SplitLines {
    std::vector<std::int32_t> lines;   // for each id, without what was cut: its row among those of its group
    std::vector<std::int64_t> offsets; // empty: each bag holds one id
    std::vector<float> weights;        // empty: nothing is weighted
};

// The sums that an update sends, for a device to compute: runs.frames has the line of each sum in its group.
struct SumRuns {
    std::shared_ptr<const ShardLayout> layout;
    std::shared_ptr<const PooledBlock> ids; // those with a gradient
    FrameRuns runs;
};

class Split {
  public:
    Split(const std::vector<TableConfig>& tables, std::vector<BagFeature> features, unsigned num_threads,
          const std::string& simd);
    // See Engine::owned.
    static std::shared_ptr<Split> owned(std::unique_ptr<Split> split);

    const Bags& bags() const { return *bags_; }
    // Other features of the same tables: an update may have tickets of lookups by both.
    std::shared_ptr<Bags> other_bags(std::vector<BagFeature> features) {
        fork_guard_.require_same_process();
        return std::make_shared<Bags>(std::move(features), map_.num_tables(), identity_);
    }
    const std::vector<std::uint32_t>& dims() const { return dims_; }
    const BucketNumbering& map() const { return map_; }
    const Fp16Codec& codec() const { return codec_; }
    const char* simd() const { return kernels_->name; }
    unsigned num_threads() const { return scheduler_.num_threads(); }
    bool owns(const SplitTicket& ticket) const { return ticket.ticket.maker == identity_; }
    const std::shared_ptr<BlockPool>& blocks() {
        fork_guard_.require_same_process();
        return blocks_;
    }

    // with_indexes: for `lines`. others: features beside this split's own, of which the inputs are.
    std::unique_ptr<SplitTicket> lookup(const BagInputs& inputs, std::vector<std::uint32_t> owners,
                                        std::uint32_t num_servers, bool with_indexes = false,
                                        const std::shared_ptr<const Bags>& others = nullptr);
    // rows[s]: num_floats[s] floats of server s, aligned as floats.
    void fill(SplitTicket& ticket, std::span<const float* const> rows, float* block, float* const* sequences);
    // Fills the ticket of a batch that a device pools. groups[t]: that of table t, from 0.
    SplitLines lines(SplitTicket& ticket, std::span<const std::uint32_t> groups);
    // The sums of all ids of the ticket's lookup, for a device that computes them: runs.frames as in SumRuns. Frozen
    // ids have no gradient, and a line. Leaves the ticket as it is.
    FrameRuns order(SplitTicket& ticket, std::span<const std::uint32_t> groups);
    // `sums`, for a device that computes them. Does not look at the gradients.
    SumRuns runs(std::span<SplitTicket* const> tickets, std::span<const GivenParts> given,
                 std::vector<std::uint32_t> owners, std::uint32_t num_servers, std::span<const std::uint32_t> groups);
    Sums sums(std::span<SplitTicket* const> tickets, std::span<const BagGradients> gradients, float scale,
              std::vector<std::uint32_t> owners, std::uint32_t num_servers);
    // Lays the ticket's ids out for other owners.
    void reshard(SplitTicket& ticket, std::vector<std::uint32_t> owners, std::uint32_t num_servers);
    // Returns the same sums laid out for other owners; each id stays in its bucket.
    Sums reshard_sums(const Sums& sums, std::vector<std::uint32_t> owners, std::uint32_t num_servers);
    // Releases the memory of a ticket that will not be updated.
    void drop(SplitTicket& ticket);

  private:
    std::shared_ptr<const PooledBlock> take_block(std::size_t bytes) {
        return std::make_shared<const PooledBlock>(blocks_, bytes);
    }
    std::shared_ptr<const ShardLayout> make_layout(std::vector<std::uint32_t> owners, std::uint32_t num_servers,
                                                   const std::vector<std::uint32_t>& counts) const;
    void sum_up(const BagSource& source, Tickets tickets, bool filter, Sums& sums, std::vector<std::uint32_t>& counts);
    void close_gaps(Sums& sums, const std::vector<std::uint32_t>& counts);
    void lay_out(SplitTicket& ticket, std::vector<std::uint32_t> owners, std::uint32_t num_servers,
                 BucketScheduler::ScratchLease& lease);
    void lay_out(const Sums& from, Sums& to);
    std::vector<std::uint32_t> first_lines(const ShardLayout& layout, std::span<const std::uint32_t> groups) const;

    ForkGuard fork_guard_;
    std::uint64_t identity_;
    std::shared_ptr<BlockPool> blocks_ = std::make_shared<BlockPool>();
    const Kernels* kernels_;
    BucketNumbering map_;
    std::vector<std::uint32_t> dims_; // one for each table
    std::vector<GradientSum> own_summations_;
    std::vector<const GradientSum*> summations_; // one for each table
    std::shared_ptr<const Bags> bags_;
    static constexpr std::size_t kMostSpare = 16; // number of calls whose memory is kept
    Recycler<Batch> batches_{kMostSpare};
    Recycler<BagPlan> plans_{kMostSpare};
    BucketScheduler scheduler_;
    Fp16Codec codec_;
};

} // namespace satrap
