// Assertions: where they are on, one that does not hold prints its text and place and aborts, at the function whose
// caller broke its promise; where they are off, nothing of a condition is evaluated.
#include "base/assertions.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "calls.hpp"

using namespace satrap;
using testing::Random;

namespace {

// Calls body in a fork. Returns what it wrote to stderr, and how it ended.
template <typename Body> std::pair<std::string, int> in_fork(Body body) {
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char bytes[512];
    for (ssize_t n; (n = read(ends[0], bytes, sizeof(bytes))) > 0;) text.append(bytes, static_cast<std::size_t>(n));
    close(ends[0]);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    return {text, status};
}

// The body breaks a promise that this condition of this file states.
template <typename Body> void check_fires(const std::string& file, const std::string& condition, Body body) {
    if (!kAssertions) return;
    const auto [text, status] = in_fork(body);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    if (text.find(file + ":") == std::string::npos ||
        text.find(": assertion failed: " + condition) == std::string::npos)
        testing::fail(__FILE__, __LINE__, "expected '" + condition + "' of " + file + "; the process wrote: " + text);
}

struct TestRows {
    AnonymousArena arena{0};
    Rows rows;
    TestRows() { rows.init(&arena, {ChunkKind::rows, 0, 0, 0}, 4, 2); }
    std::uint32_t add(std::uint64_t id) {
        const std::uint32_t slot = rows.insert(id, mix64(id));
        rows.publish(slot, 1, 1);
        return slot;
    }
};

CASE(on_where_mistakes_are_looked_for, 1) {
    CHECK(kAssertions || !testing::kSanitized);
    unsigned evaluated = 0;
    SATRAP_ASSERT(++evaluated == 1);
    CHECK_EQ(evaluated, kAssertions ? 1U : 0U);
}

CASE(a_promise_that_holds_changes_nothing, 1) {
    const auto [text, status] = in_fork([] { SATRAP_ASSERT(std::pair<int, int>{1, 2}.second == 2); });
    CHECK(text.empty() && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

CASE(rows_know_their_ids_and_slots, 1) {
    TestRows all;
    const std::uint32_t slot = all.add(7);
    check_fires("rows.hpp", "hash == mix64(id)", [&] { (void)all.rows.find(7, mix64(8)); });
    check_fires("rows.hpp", "find(id, hash) == kNoSlot", [&] { all.add(7); });
    check_fires("rows.hpp", "slot < capacity_", [&] { (void)all.rows.head(1U << 20); });
    check_fires("rows.hpp", "slot < used_ && changed != 0", [&] { all.rows.publish(slot, 1, 0); });
    all.add(8);
    check_fires("rows.hpp", "!full()", [&] { all.add(9); });
    all.rows.erase(slot);
    check_fires("rows.hpp", "slot < used_ && live(slot) && size_ != 0", [&] { all.rows.erase(slot); });
}

CASE(an_index_has_room_for_what_is_inserted, 1) {
    AnonymousArena arena(0);
    Index index;
    index.init(arena, 0, 0.5);
    check_fires("index.hpp", "has_room(hash)", [&] { index.insert(mix64(1), 0); });
    check_fires("index.hpp", "size_ != 0", [&] { index.erase(mix64(1), 0); });
}

CASE(memory_is_released_once, 1) {
    AnonymousArena arena(0);
    std::byte* const block = arena.allocate_index(128);
    arena.release_index(block, 128);
    check_fires("arena.hpp", "after == by_address_.end()", [&] { arena.release_index(block, 128); });
    check_fires("arena.hpp", "reinterpret_cast<std::uintptr_t>(block) % 64",
                [&] { arena.release_index(block + 1, 64); });
}

CASE(a_bucket_is_changed_under_its_lock, 1) {
    const auto engine = testing::make_engine({testing::counting_table("counted", 4)});
    Bucket& bucket = engine->table(0).bucket(0);
    check_fires("bucket.hpp", "mutex.is_held()", [&] { bucket.sweep(5, 1); });
    std::lock_guard lock(bucket.mutex);
    bucket.sweep(5, 1);
    if (kAssertions) testing::in_threads(1, [&](unsigned) { CHECK(!bucket.mutex.is_held()); });
    check_fires("mutex.hpp", "!is_held()", [&] { bucket.mutex.lock(); });
}

CASE(ids_of_a_bucket_are_made_unique_once, 1) {
    ThreadPool pool(1);
    BucketNumbering map;
    map.add_table(0);
    const std::uint64_t ids[] = {3, 3};
    Batch batch;
    batch.offsets = {0, 2};
    batch.group(ids, map, pool);
    Buffer<std::uint32_t> scratch;
    batch.deduplicate(0, scratch);
    check_fires("id_batch.hpp", "num_unique[b] == 0", [&] { batch.deduplicate(0, scratch); });
    check_fires("ticket.hpp", "b + std::size_t{1} < batch.begin.size()", [&] { (void)occupied(batch, 1); });
    batch.offsets = {0, 3, 2};
    check_fires("id_batch.hpp", "offsets.size() == map.num_tables() + 1", [&] { batch.group(ids, map, pool); });
}

} // namespace
