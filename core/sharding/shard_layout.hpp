// The layout of what each server gets of a batch's unique ids, and of the floats that belong to them: one array, laid
// out server by server; within a server table by table, within a table bucket by bucket, within a bucket in order of
// first appearance. So a server's part is the input of its engine's flat lookup, and the layout of its answer.
//
// Bucket b belongs to server owners[b] and has counts[b] ids. Invariants:
//   server s has ids first_id[s] .. first_id[s] + num_ids(s) - 1, and floats in the same way, of table t those of
//   offsets(s)[t] .. offsets(s)[t + 1] - 1; both begin at a cache line;
//   the buckets of one server and table, in their order, follow one another without a gap.
#pragma once

#include <span>

#include "ids/id_batch.hpp"

namespace satrap {

struct ShardLayout {
    ShardLayout(const BucketNumbering& map, std::span<const std::uint32_t> dims, std::vector<std::uint32_t> of_buckets,
                std::uint32_t num_servers, const std::vector<std::uint32_t>& of_each)
        : owners(std::move(of_buckets)), counts(of_each), num_tables(map.num_tables()), id_begin(map.total()),
          float_begin(map.total()), first_id(num_servers + 1), first_float(num_servers + 1), num_floats(num_servers),
          ends(num_servers * (num_tables + 1)) {
        SATRAP_ASSERT(owners.size() == map.total() && counts.size() == map.total() && dims.size() == num_tables);
        SATRAP_ASSERT(std::all_of(owners.begin(), owners.end(), [&](std::uint32_t s) { return s < num_servers; }));
        for (std::size_t t = 0; t < num_tables; ++t)
            for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
                ends[owners[b] * (num_tables + 1) + t + 1] += counts[b];
                num_floats[owners[b]] += std::uint64_t{counts[b]} * dims[t];
            }
        for (std::size_t s = 0; s < num_servers; ++s) {
            std::int64_t* of_server = ends.data() + s * (num_tables + 1);
            for (std::size_t t = 0; t < num_tables; ++t) of_server[t + 1] += of_server[t];
            first_id[s + 1] = first_id[s] + (num_ids(s) + 7) / 8 * 8;
            first_float[s + 1] = first_float[s] + (num_floats[s] + 15) / 16 * 16;
        }
        std::vector<std::uint64_t> next_id(first_id), next_float(first_float);
        for (std::size_t t = 0; t < num_tables; ++t)
            for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
                id_begin[b] = next_id[owners[b]];
                float_begin[b] = next_float[owners[b]];
                next_id[owners[b]] += counts[b];
                next_float[owners[b]] += std::uint64_t{counts[b]} * dims[t];
            }
    }

    std::uint32_t num_servers() const { return static_cast<std::uint32_t>(num_floats.size()); }
    // Returns [tables + 1] offsets, from 0 to the number of the server's ids.
    const std::int64_t* offsets(std::size_t server) const {
        SATRAP_ASSERT(server < num_servers());
        return ends.data() + server * (num_tables + 1);
    }
    std::size_t num_ids(std::size_t server) const { return static_cast<std::size_t>(offsets(server)[num_tables]); }

    std::vector<std::uint32_t> owners, counts; // [buckets]
    std::size_t num_tables;
    std::vector<std::uint64_t> id_begin, float_begin; // [buckets]: the position of its first one
    std::vector<std::uint64_t> first_id, first_float; // [servers + 1]; the last: their number, including gaps
    std::vector<std::uint64_t> num_floats;            // [servers]

  private:
    std::vector<std::int64_t> ends; // [servers][tables + 1]
};

} // namespace satrap
