// The rows of one bucket against std::map and std::set: what is found, where it lies, who is the oldest, what a restart
// finds again, what a full memory leaves behind, and that check() sees each broken invariant.
#include <iterator>
#include <map>
#include <new>
#include <set>

#include "table/rows.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

// Remembers its chunks, as a file does, and fails on request.
class TestArena final : public Arena {
  public:
    TestArena() : Arena(0) {}
    std::byte* allocate(const ChunkTag& tag, std::size_t bytes) override {
        fail_if_due();
        CHECK(is_direct || tag.sequence == chunks.size());
        std::byte* memory = memory_.allocate(tag, bytes);
        chunks.emplace_back(memory, bytes);
        sequences.push_back(tag.sequence);
        return memory;
    }
    std::byte* allocate_index(std::size_t bytes) override {
        fail_if_due();
        return memory_.allocate_index(bytes);
    }
    void release_index(std::byte* block, std::size_t bytes) override { memory_.release_index(block, bytes); }

    std::vector<std::pair<std::byte*, std::size_t>> chunks;
    std::vector<std::uint32_t> sequences; // one for each chunk
    bool is_direct = false;
    std::uint32_t allocations_left = ~0U;

  private:
    void fail_if_due() {
        if (allocations_left == 0) throw std::bad_alloc();
        if (allocations_left != ~0U) --allocations_left;
    }
    AnonymousArena memory_{0};
};

struct Known {
    std::uint32_t stamp, changed, slot;
    std::byte* row;
};

// Rows and what they should hold.
struct Modelled {
    TestArena arena;
    Rows rows;
    std::uint64_t limit;
    std::size_t row_bytes;
    std::map<std::uint64_t, Known> known;
    std::set<std::pair<std::uint32_t, std::uint64_t>> order; // (stamp, id)

    Modelled(std::size_t bytes, std::uint64_t most) : limit(most), row_bytes(bytes) {
        rows.init(&arena, {ChunkKind::rows, 3, 5, 0}, bytes, most);
    }

    void fill(std::uint64_t id, std::byte* row) const {
        for (std::size_t i = 0; i < row_bytes; ++i) row[i] = static_cast<std::byte>(mix64(id) >> (8 * (i % 8)));
    }
    void publish(std::uint64_t id, std::uint32_t slot, std::uint32_t stamp, std::uint32_t changed) {
        rows.publish(slot, stamp, changed);
        if (auto old = known.find(id); old != known.end()) order.erase({old->second.stamp, id});
        known[id] = {stamp, changed, slot, rows.row(slot)};
        order.insert({stamp, id});
    }
    void insert(std::uint64_t id, std::uint32_t stamp) {
        CHECK_EQ(rows.find(id, mix64(id)), kNoSlot);
        const std::uint32_t slot = rows.insert(id, mix64(id));
        CHECK(!rows.live(slot));
        fill(id, rows.row(slot));
        publish(id, slot, stamp, 1);
    }
    void touch(std::uint64_t id, std::uint32_t step) {
        Known& each = known.at(id);
        rows.touch(each.slot, step);
        order.erase({each.stamp, id});
        each.stamp = std::max(each.stamp, step);
        order.insert({each.stamp, id});
    }
    void erase(std::uint64_t id) {
        rows.erase(known.at(id).slot);
        order.erase({known.at(id).stamp, id});
        known.erase(id);
        CHECK_EQ(rows.find(id, mix64(id)), kNoSlot);
    }
    std::uint64_t any(Random& random) const {
        auto at = known.lower_bound(random.bits());
        return at == known.end() ? known.begin()->first : at->first;
    }

    void check() {
        rows.check(limit);
        CHECK_EQ(rows.size(), known.size());
        std::vector<std::byte> expected(row_bytes);
        for (const auto& [id, each] : known) {
            const std::uint32_t slot = rows.find(id, mix64(id));
            CHECK_EQ(slot, each.slot);
            CHECK(rows.holds(slot, id) && !rows.holds(slot, id + 1));
            CHECK_EQ(rows.head(slot).stamp, each.stamp);
            CHECK_EQ(rows.head(slot).changed, each.changed);
            CHECK(rows.row(slot) == each.row); // rows never move
            fill(id, expected.data());
            CHECK(row_bytes == 0 || std::memcmp(rows.row(slot), expected.data(), row_bytes) == 0);
        }
        std::size_t visited = 0;
        rows.for_each([&](std::uint32_t slot, const Head&) {
            ++visited;
            CHECK_EQ(known.at(rows.id(slot)).slot, slot);
        });
        CHECK_EQ(visited, known.size());
        check_oldest();
    }
    void check_oldest() {
        const std::uint32_t slot = rows.oldest();
        if (order.empty()) {
            CHECK_EQ(slot, kNoSlot);
            return;
        }
        CHECK(slot != kNoSlot);
        CHECK_EQ(rows.head(slot).stamp, order.begin()->first);
        CHECK_EQ(rows.id(slot), order.begin()->second);
    }
};

// Ids of every kind, the ones that could be mistaken for something else among them.
std::uint64_t draw_id(Random& random) {
    switch (random.below(4)) {
    case 0: return random.bits();
    case 1: return random.below(3000);
    case 2: return ~std::uint64_t{random.below(100)};
    default: return std::uint64_t{random.below(100)} << 32 | 0xffffffffU;
    }
}

CASE(agrees_with_a_map, testing::scaled(60)) {
    const bool limited = random.chance(0.5);
    const std::size_t most = random.chance(0.3) ? random.between(1, 40) : random.between(40, 2500);
    Modelled model(4 * std::size_t{random.below(10)}, limited ? most : 0);
    std::uint32_t clock = 100;
    for (unsigned i = 0; i < 4000; ++i) {
        clock += random.below(2);
        const std::uint32_t stamp = random.chance(0.8) ? clock : clock - random.below(60); // some come late
        const std::uint64_t id = draw_id(random);
        if (random.chance(i / 1000 % 2 == 0 ? 0.7 : 0.3)) {
            if (model.known.contains(id)) continue;
            if (model.known.size() >= most) {
                model.check_oldest();
                model.erase(model.order.begin()->second);
            }
            model.insert(id, stamp);
        } else if (!model.known.empty()) {
            const std::uint64_t old = model.any(random);
            const Known known = model.known.at(old);
            if (random.chance(0.4))
                model.erase(old);
            else if (random.chance(0.7))
                model.touch(old, stamp);
            else
                model.publish(old, known.slot, stamp, known.changed + 1); // an import: stamps may fall
        }
        if (random.chance(0.1)) model.check_oldest();
        if (i % 500 == 0) model.check();
    }
    model.check();
    while (!model.known.empty()) {
        model.check_oldest();
        model.erase(model.order.begin()->second);
    }
    model.check();
}

// The bucket is full and churns: for ever the oldest out, a new one in, with touches in between. Small ones above all,
// where all groups of the index have overflowed at some time.
CASE(oldest_goes_first, testing::scaled(200)) {
    const std::uint32_t most = random.chance(0.5) ? random.between(1, 130) : random.between(130, 1200);
    Modelled model(4, most);
    std::uint64_t next = random.bits();
    for (std::uint32_t step = 1000; step < 1000 + std::max(500U, 4 * most); ++step) {
        if (model.known.size() == most) {
            model.check_oldest();
            model.erase(model.order.begin()->second);
        }
        model.insert(next += random.between(1, 3), random.chance(0.9) ? step : step - random.below(500));
        for (unsigned touched = 0; touched < 2; ++touched) {
            const std::uint64_t id = random.chance(0.5) ? model.any(random) : model.order.begin()->second;
            model.touch(id, random.chance(0.5) ? step : step - random.below(2 * most)); // steps come late, too
        }
    }
    model.check();
}

// No two rows share a byte, at every size around the chunks' boundaries; a limited bucket allocates what it needs.
CASE(chunks_fit, testing::scaled(8)) {
    const std::size_t row_bytes = 4 * std::size_t{random.below(20)}, stride = 8 + sizeof(Head) + row_bytes;
    for (std::uint32_t most : {0U, 1U, 15U, 16U, 17U, 31U, 33U, 100U, 512U, 1023U, 1024U, 1025U, 1500U, 2048U, 3100U}) {
        Modelled model(row_bytes, most);
        std::set<std::byte*> starts;
        for (std::uint32_t n = 0; n < (most == 0 ? 3100 : most); ++n) {
            model.insert(n, 1);
            starts.insert(const_cast<std::byte*>(model.rows.line(model.known.at(n).slot)));
        }
        CHECK_EQ(starts.size(), model.known.size());
        for (auto at = starts.begin(); std::next(at) != starts.end(); ++at) CHECK(*at + stride <= *std::next(at));
        std::size_t allocated = 0;
        for (auto [memory, bytes] : model.arena.chunks) {
            allocated += bytes;
            const auto first = starts.lower_bound(memory), last = starts.lower_bound(memory + bytes);
            CHECK(first != last && *std::prev(last) + stride <= memory + bytes);
        }
        if (most != 0)
            CHECK_EQ(allocated, most * stride);
        else
            CHECK(allocated <= 4096 * stride);
        CHECK(model.rows.bytes() >= allocated + model.rows.index().bytes());
        model.check();
    }
}

// What a process finds whose predecessor was killed: chunks, some live heads, no index.
CASE(restart_finds_the_rows, testing::scaled(100)) {
    const std::uint64_t limit = random.chance(0.5) ? random.between(1, 2000) : 0;
    Modelled before(8, limit);
    const std::uint32_t inserted = limit == 0 ? random.below(2500) : random.below(limit + 1);
    for (std::uint32_t n = 0; n < inserted; ++n) before.insert(random.bits(), random.below(100));
    for (std::uint32_t n = inserted / 3; n > 0; --n) before.erase(before.any(random));
    Modelled after(8, limit);
    std::uint32_t sequence = 0;
    for (auto [memory, bytes] : before.arena.chunks) after.rows.adopt_chunk(sequence++, memory, bytes);
    after.arena.chunks = before.arena.chunks; // the next one has the next number
    after.rows.rebuild();
    after.known = before.known;
    after.order = before.order;
    after.check();
    const std::uint64_t most = limit == 0 ? 3000 : limit;
    while (after.known.size() < most) after.insert(random.bits(), random.below(100));
    after.check();
}

// Slots of a direct table: every id of the bucket has one, rows share no byte, and only chunks with a row are
// allocated.
CASE(direct_slots, testing::scaled(60)) {
    const unsigned bits = random.below(5);
    const std::uint64_t num_rows = random.between(1, random.chance(0.5) ? 60 : 60000);
    const std::uint32_t b = random.below(1U << bits);
    const std::size_t row_bytes = 4 * std::size_t{random.below(20)};
    TestArena arena;
    arena.is_direct = true;
    Rows rows, after;
    const DirectSlots direct = DirectSlots::of(num_rows, bits, b);
    for (Rows* each : {&rows, &after}) each->init(&arena, {ChunkKind::rows, 0, b, 0}, row_bytes, 0, direct);
    std::vector<std::uint64_t> ids;
    for (std::uint64_t id = 0; id < num_rows; ++id)
        if (bucket_of(reverse_bits(id), bits) == b) ids.push_back(id);
    CHECK_EQ(rows.used(), ids.size());
    std::set<std::uint64_t> known;
    std::set<const std::byte*> starts;
    for (std::uint32_t n = ids.empty() ? 0 : random.below(400); n > 0; --n) {
        const std::size_t most = random.chance(0.5) ? std::min<std::size_t>(ids.size(), 40) : ids.size();
        const std::uint64_t id = ids[random.below(static_cast<std::uint32_t>(most))];
        std::uint32_t slot = rows.find(id, mix64(id));
        CHECK_EQ(slot != kNoSlot, known.contains(id));
        if (slot == kNoSlot) {
            slot = rows.insert(id, mix64(id));
            std::memset(rows.row(slot), 0xff, row_bytes);
            rows.publish(slot, 1, 1);
            known.insert(id);
        } else if (random.chance(0.3)) {
            rows.erase(slot);
            known.erase(id);
        }
        CHECK_EQ(rows.id(slot), id);
        starts.insert(rows.line(slot));
    }
    for (auto at = starts.begin(); at != starts.end() && std::next(at) != starts.end(); ++at)
        CHECK(*at + sizeof(Head) + row_bytes <= *std::next(at));
    rows.check(0);
    CHECK_EQ(rows.size(), known.size());
    std::size_t allocated = 0;
    for (const auto& [memory, bytes] : arena.chunks) {
        allocated += bytes;
        const auto first = starts.lower_bound(memory);
        CHECK(first != starts.end() && *first < memory + bytes);
    }
    CHECK(allocated <= ids.size() * (sizeof(Head) + row_bytes));
    for (std::size_t i = 0; i < arena.chunks.size(); ++i) // as another process finds them
        after.adopt_chunk(arena.sequences[i], arena.chunks[i].first, arena.chunks[i].second);
    after.rebuild();
    after.check(0);
    CHECK_EQ(after.size(), known.size());
    rows.clear();
    CHECK(rows.size() == 0 && (ids.empty() || rows.find(ids[0], mix64(ids[0])) == kNoSlot));
}

CASE(foreign_chunks_are_refused, 1) {
    TestArena arena;
    Rows rows;
    rows.init(&arena, {ChunkKind::rows, 0, 0, 0}, 8, 0);
    std::vector<std::byte> memory(64 * 24);
    CHECK_THROWS(InvariantError, "out of sequence", rows.adopt_chunk(1, memory.data(), memory.size()));
    CHECK_THROWS(InvariantError, "too small", rows.adopt_chunk(0, memory.data(), 16 * 24 - 1));
}

// Slots are 32-bit numbers: a bucket that has used them all up says so instead of beginning again at 0.
CASE(a_bucket_ends_before_its_slot_numbers, 1) {
    TestArena arena;
    Rows rows;
    rows.init(&arena, {ChunkKind::rows, 0, 0, 0}, 8, 0);
    std::vector<std::byte> memory(Rows::kChunkRows * 24); // for all chunks: no row is looked at
    std::uint32_t sequence = 0;
    while (kNoSlot - rows.capacity() >= Rows::kChunkRows) rows.adopt_chunk(sequence++, memory.data(), memory.size());
    CHECK_EQ(rows.capacity(), kNoSlot - (Rows::kChunkRows - 1));
    CHECK_THROWS(CapacityError, "give the table more num_buckets",
                 rows.adopt_chunk(sequence, memory.data(), memory.size()));
}

// Memory ends at any allocation: the insert throws, the rows are as they were, and go on when there is memory again.
CASE(full_memory_changes_nothing, 10) {
    Modelled model(4, 0);
    std::uint64_t id = random.bits();
    while (model.known.size() < 300) {
        model.arena.allocations_left = random.below(2);
        try {
            model.insert(++id, 1);
        } catch (const std::bad_alloc&) {
            model.rows.check(0);
            CHECK_EQ(model.rows.find(id, mix64(id)), kNoSlot);
        }
    }
    model.check();
}

void set_id(Modelled& m, std::uint32_t slot, std::uint64_t id) {
    std::memcpy(const_cast<std::byte*>(m.rows.line(slot)), &id, sizeof(id));
}

// Each breaks one invariant of a sound bucket of 40 rows, 10 of them free again.
CASE(check_sees_what_is_broken, 1) {
    struct Break {
        const char* says;
        void (*by)(Modelled&);
    };
    const Break breaks[] = {
        {"not found by its id", [](Modelled& m) { set_id(m, 20, 999); }},
        {"not found by its id", [](Modelled& m) { set_id(m, 20, m.rows.id(21)); }},
        {"size differs", [](Modelled& m) { m.rows.head(20).changed = 0; }},
        {"not found by its id", [](Modelled& m) { m.rows.head(3).changed = 1; }},
        {"names a live row or none", [](Modelled& m) { set_id(m, 3, 20); }},
        {"names a live row or none", [](Modelled& m) { set_id(m, 3, 4000); }},
        {"a ring", [](Modelled& m) { set_id(m, 3, 3); }},
        {"used != live + free", [](Modelled& m) { set_id(m, 3, kNoSlot); }},
        {"names a free row", [](Modelled& m) { const_cast<Index&>(m.rows.index()).insert(mix64(1), 3); }},
        {"counts other entries",
         [](Modelled& m) { m.rows.index().page_of(mix64(1)).insert(mix64(m.rows.id(20)), 20); }},
        {"not found by its id",
         [](Modelled& m) { const_cast<Index&>(m.rows.index()).erase(mix64(m.rows.id(20)), 20); }},
        {"index entries != rows",
         [](Modelled& m) { const_cast<Index&>(m.rows.index()).insert(mix64(m.rows.id(20)), 20); }},
    };
    for (const Break& each : breaks) {
        Modelled model(4, 0);
        for (std::uint64_t id = 100; id < 140; ++id) model.insert(id, 1);
        for (std::uint64_t id = 100; id < 110; ++id) model.erase(id); // slots 0..9, in a list from 9 down to 0
        model.rows.check(0);
        model.rows.check(30);
        CHECK_THROWS(InvariantError, "more rows than", model.rows.check(29));
        each.by(model);
        CHECK_THROWS(InvariantError, each.says, model.rows.check(0));
    }
}

} // namespace
