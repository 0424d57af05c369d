// Grouping a call's ids by bucket and making them unique, against the plain way of doing it; and the thread pool below.
#include <algorithm>
#include <map>

#include "ids/id_batch.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

constexpr std::uint64_t kNumRows = std::uint64_t{1} << 33; // in direct tables

BucketNumbering draw_map(Random& random) {
    BucketNumbering map;
    for (std::uint32_t tables = random.between(1, 12); tables > 0; --tables)
        map.add_table(random.below(7), random.chance(0.7) ? 0 : kNumRows, "t");
    return map;
}

struct Call {
    std::vector<std::uint64_t> ids;
    std::vector<std::int64_t> offsets{0};
};

// Some tables without ids, some with one id many times, some with ids all different.
Call draw_call(Random& random, const BucketNumbering& map, std::size_t most) {
    Call call;
    for (std::size_t t = 0; t < map.num_tables(); ++t) {
        const std::uint64_t kinds = random.chance(0.3) ? 3 : random.chance(0.5) ? 200 : std::uint64_t{1} << 32;
        const std::uint64_t first = map.num_rows[t] == 0 ? random.bits() : random.bits() % (kNumRows / 2);
        for (std::uint32_t n = random.chance(0.2) ? 0 : random.below(most); n > 0; --n)
            call.ids.push_back(first + random.below(kinds));
        call.offsets.push_back(static_cast<std::int64_t>(call.ids.size()));
    }
    return call;
}

// What the batch must hold, bucket by bucket: for each, the positions of its ids in order of appearance.
void check_grouped(const Batch& batch, const Call& call, const BucketNumbering& map) {
    std::vector<std::vector<std::uint32_t>> positions(map.total());
    for (std::size_t t = 0; t < map.num_tables(); ++t)
        for (std::int64_t i = call.offsets[t]; i < call.offsets[t + 1]; ++i) {
            const std::uint64_t hash = order_hash(call.ids[static_cast<std::size_t>(i)], map.num_rows[t] != 0);
            positions[map.first[t] + bucket_of(hash, map.bits[t])].push_back(
                static_cast<std::uint32_t>(i - call.offsets[t]));
        }
    CHECK_EQ(batch.size(), call.ids.size());
    CHECK_EQ(batch.begin.size(), map.total() + 1);
    std::uint32_t at = 0;
    for (std::uint32_t b = 0; b < map.total(); ++b) {
        CHECK_EQ(batch.begin[b], at);
        for (std::uint32_t position : positions[b]) CHECK_EQ(batch.positions[at++], position);
        CHECK_EQ(batch.begin[b + 1], at);
    }
}

void check_unique(const Batch& batch, const Call& call, const BucketNumbering& map) {
    for (std::size_t t = 0; t < map.num_tables(); ++t)
        for (std::uint32_t b = map.first[t]; b < map.first[t + 1]; ++b) {
            const std::uint32_t first = batch.begin[b];
            std::vector<std::uint64_t> seen; // in order of first appearance
            std::map<std::uint64_t, std::uint32_t> local;
            for (std::uint32_t e = first; e < batch.begin[b + 1]; ++e) {
                const std::uint64_t id = call.ids[static_cast<std::size_t>(call.offsets[t]) + batch.positions[e]];
                if (local.emplace(id, static_cast<std::uint32_t>(seen.size())).second) seen.push_back(id);
                CHECK_EQ(batch.local[e], local[id]);
            }
            CHECK_EQ(batch.num_unique[b], seen.size());
            for (std::size_t i = 0; i < seen.size(); ++i) CHECK_EQ(batch.unique[first + i], seen[i]);
        }
}

CASE(groups_like_the_plain_way, testing::scaled(60)) {
    ThreadPool one(1), two(2), three(3);
    Batch batches[3]; // used again and again, as the engine does
    ThreadPool* pools[] = {&one, &two, &three};
    Buffer<std::uint32_t> scratch;
    for (unsigned call_number = 0; call_number < 6; ++call_number) {
        const BucketNumbering map = draw_map(random);
        const Call call = draw_call(random, map, call_number % 2 == 0 ? 60 : 2500);
        for (unsigned i = 0; i < 3; ++i) {
            Batch& batch = batches[i];
            batch.hinted = true;
            batch.offsets = call.offsets;
            batch.group(call.ids.data(), map, *pools[i]);
            CHECK(!batch.hinted);
            check_grouped(batch, call, map);
            for (std::uint32_t b = 0; b < map.total(); ++b)
                if (batch.begin[b] != batch.begin[b + 1]) batch.deduplicate(b, scratch);
            check_unique(batch, call, map);
        }
    }
}

CASE(an_id_out_of_range_is_refused, testing::scaled(20)) {
    ThreadPool pool(random.between(1, 3));
    BucketNumbering map;
    map.add_table(3);
    map.add_table(random.below(5), 7, "small");
    Call call{{}, {0}};
    for (unsigned t = 0; t < 2; ++t) {
        for (std::uint32_t n = random.between(1, 3000); n > 0; --n) call.ids.push_back(random.below(7));
        call.offsets.push_back(static_cast<std::int64_t>(call.ids.size()));
    }
    Batch batch;
    batch.offsets = call.offsets;
    call.ids[0] = ~std::uint64_t{0}; // the first table takes any
    batch.group(call.ids.data(), map, pool);
    const auto wrong = static_cast<std::size_t>(
        random.between(static_cast<std::uint32_t>(call.offsets[1]), static_cast<std::uint32_t>(call.offsets[2] - 1)));
    call.ids[wrong] = 7;
    CHECK_THROWS(InputError, "table 'small': id 7 is not below num_rows=7", batch.group(call.ids.data(), map, pool));
    call.ids[wrong] = ~std::uint64_t{0};
    CHECK_THROWS(InputError, "as a signed number -1", batch.group(call.ids.data(), map, pool));
}

// Ids whose probe sequences in the scratch table all start at the same place.
CASE(colliding_ids, 10) {
    ThreadPool pool(1);
    BucketNumbering map;
    map.add_table(0);
    Call call;
    while (call.ids.size() < 300) {
        const std::uint64_t id = random.bits();
        if (((mix64(id) >> 8) & 0xff) == 0xff) call.ids.push_back(id);
    }
    for (unsigned i = 0; i < 300; ++i) call.ids.push_back(call.ids[random.below(300)]);
    call.offsets.push_back(600);
    Batch batch;
    Buffer<std::uint32_t> scratch;
    batch.offsets = call.offsets;
    batch.group(call.ids.data(), map, pool);
    batch.deduplicate(0, scratch);
    check_unique(batch, call, map);
}

// Each thread's number occurs exactly once a run, from any caller, and runs of several callers are never mixed up.
CASE(pool_runs_each_thread_once, 8) {
    const unsigned size = random.between(1, 4);
    ThreadPool pool(size);
    CHECK_EQ(pool.num_threads(), size);
    testing::in_threads(3, [&](unsigned) {
        for (unsigned i = 0; i < testing::scaled(400); ++i) {
            std::vector<std::atomic<unsigned>> calls(size);
            std::atomic<unsigned> num_threads{0};
            pool.run([&](unsigned thread, unsigned threads) {
                num_threads.store(threads);
                calls[thread].fetch_add(1);
            });
            for (unsigned thread = 0; thread < num_threads.load(); ++thread) CHECK_EQ(calls[thread].load(), 1);
            CHECK(num_threads.load() == 1 || num_threads.load() == size);
        }
    });
}

} // namespace
