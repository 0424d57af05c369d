// kill -9 in the middle of anything: the next process finds every bucket of an update applied whole or not at all, all
// invariants hold, and it continues. The undo slot that promises this is also tested by hand, since a random kill may
// miss.
#include <sys/wait.h>

#include <csignal>
#include <ctime>

#include "calls.hpp"
#include "shared_file.hpp"

using namespace satrap;
using testing::Contents, testing::Ids, testing::Line, testing::Random, testing::SharedFile;

namespace {

constexpr std::uint64_t kFixed = 256; // ids of table 0 that every step updates

std::vector<TableConfig> tables() {
    std::vector<TableConfig> configs{testing::counting_table("fixed", 64, 4),
                                     testing::counting_table("churning", 8, 2)};
    configs[1].capacity = 64;
    configs[1].admission = AdmissionKind::min_count;
    configs[1].min_count = 2;
    configs[1].window = 40;
    return configs;
}

// What the doomed process does until it is killed: each step adds 1 to all rows of table 0, while rows and sightings of
// table 1 come and go.
[[noreturn]] void train_for_ever(const SharedFile& file, bool is_first, unsigned threads, std::uint64_t seed,
                                 int ready) {
    Random random(seed);
    const auto engine = is_first ? file.create(tables(), threads) : file.attach(tables(), threads);
    Ids fixed;
    while (fixed.size() < kFixed) fixed.push_back(mix64(fixed.size()));
    for (bool is_ready = false;; is_ready = true) {
        Ids churning;
        for (unsigned i = 0; i < 20; ++i) churning.push_back(random.below(200));
        const std::uint32_t step = engine->next_step();
        const auto looked = testing::lookup(*engine, {fixed, churning}, step);
        testing::update(*engine, *looked.ticket, std::vector<float>(looked.rows.size(), -1.0f), step);
        if (!is_ready) (void)!write(ready, "x", 1);
    }
}

// Starts the process, lets it train for a random time after its first step, and kills it.
void train_and_kill(const SharedFile& file, bool is_first, Random& random) {
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    const unsigned threads = random.between(1, 2);
    const std::uint64_t seed = random.bits();
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(ends[0]);
        try {
            train_for_ever(file, is_first, threads, seed, ends[1]);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "in the process to be killed: %s\n", error.what());
        }
        _exit(1);
    }
    close(ends[1]);
    char byte;
    const bool ready = read(ends[0], &byte, 1) == 1; // the end of the pipe, if it died early
    close(ends[0]);
    const timespec delay{0, static_cast<long>(random.below(8'000'000))};
    if (ready) nanosleep(&delay, nullptr);
    kill(child, SIGKILL);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(ready && WIFSIGNALED(status));
}

void check_whole_buckets(Engine& engine, unsigned kills) {
    std::vector<float> of_bucket(4, -1.0f);
    const std::vector<Line> rows = testing::rows_of(engine, 0);
    CHECK_EQ(rows.size(), kFixed);
    float least = 1e9f, most = 0.0f;
    for (const Line& row : rows) {
        float& applied = of_bucket[engine.table(0).bucket_number(row.id)];
        if (applied < 0) applied = row.value();
        for (unsigned i = 0; i < 64; ++i) CHECK_EQ(row.value(i), applied);
        least = std::min(least, applied);
        most = std::max(most, applied);
    }
    CHECK(most - least <= static_cast<float>(kills)); // a process's last step may have reached only some buckets
    for (const Line& row : testing::rows_of(engine, 1))
        for (unsigned i = 1; i < 8; ++i) CHECK_EQ(row.value(i), row.value(0));
}

CASE(no_bucket_is_half_applied, testing::scaled(40)) {
    const SharedFile file;
    for (unsigned generation = 0; generation < 6; ++generation) {
        train_and_kill(file, generation == 0, random);
        const auto engine = file.attach(tables());
        const Contents found(*engine); // checks all invariants
        check_whole_buckets(*engine, generation + 1);
        const float before = found.rows[0][0].value();
        Ids fixed;
        for (const Line& row : found.rows[0]) fixed.push_back(row.id);
        const std::uint32_t step = engine->next_step();
        testing::lookup(*engine, {fixed, {1, 2, 3}}, step);
        testing::update(*engine, {{fixed[0]}, {}}, std::vector<float>(64, -1.0f), step);
        CHECK_EQ(testing::rows_of(*engine, 0)[0].value(), before + 1.0f);
        testing::update(*engine, {{fixed[0]}, {}}, std::vector<float>(64, 1.0f), step); // as the others again
    }
}

// The chunks of one bucket and the undo slot of a file that no engine has open.
struct Opened {
    std::unique_ptr<SharedArena> arena;
    Rows rows;
    std::byte* undo = nullptr;
    std::size_t undo_bytes = 0;

    Opened(const SharedFile& file, const TableConfig& config) : arena(SharedArena::attach(file.path, 1)) {
        rows.init(arena.get(), {ChunkKind::rows, 0, 0, 0}, config.row_bytes(), 0);
        arena->for_each([&](const ChunkTag& tag, std::byte* memory, std::size_t bytes) {
            if (tag.kind == ChunkKind::rows) rows.adopt_chunk(tag.sequence, memory, bytes);
            if (tag.kind == ChunkKind::undo) undo = memory, undo_bytes = bytes;
        });
        rows.rebuild();
        CHECK(undo != nullptr);
    }
    bool armed() const { return reinterpret_cast<const UndoHeader*>(undo)->armed.load() != 0; }
};

// The process died between arming and disarming, and spoilt the heads and half the bytes of all rows.
CASE(an_armed_slot_is_undone, 10) {
    TableConfig config = testing::counting_table("t", 5);
    config.optimizer.kind = OptimizerKind::adam;
    const SharedFile file;
    auto engine = file.create({config});
    const auto looked = testing::lookup(*engine, {{1, 2, 3, 4, 5, 6, 7, 8}}, 1);
    testing::update(*engine, *looked.ticket, std::vector<float>(40, -1.0f), 1);
    const Contents before(*engine);
    engine = nullptr;
    for (const bool arm : {true, false}) {
        {
            Opened opened(file, config);
            UndoSlot slot(opened.undo, opened.undo_bytes);
            slot.open(0, 0, config.row_bytes());
            opened.rows.for_each(
                [&](std::uint32_t number, const Head& head) { slot.add(number, head, opened.rows.row(number)); });
            if (arm) slot.arm();
            if (arm)
                opened.rows.for_each([&](std::uint32_t number, Head& head) {
                    head.stamp += random.below(3);
                    head.changed += random.below(3);
                    for (std::size_t i = 0; i < config.row_bytes(); ++i)
                        if (random.chance(0.5)) opened.rows.row(number)[i] = static_cast<std::byte>(random.word());
                });
            CHECK_EQ(opened.armed(), arm);
        }
        engine = file.attach({config});
        CHECK(Contents(*engine) == before);
        engine = nullptr;
        CHECK(!Opened(file, config).armed());
    }
    engine = file.attach({config});
    testing::update(*engine, {{1}}, std::vector<float>(5, -1.0f), 2); // and the slot serves again
    CHECK(!(Contents(*engine) == before));
}

// Killed half way through a row of a snapshot that takes the place of a live one: when it comes to read the new state.
CASE(an_imported_row_is_whole_or_not, 1) {
    TableConfig config = testing::counting_table("t", 5);
    config.optimizer.momentum = 0.5;
    const SharedFile file;
    auto engine = file.create({config});
    testing::lookup(*engine, {{1, 2, 3}}, 1);
    testing::update(*engine, {{1, 2, 3}}, std::vector<float>(15, -1.0f), 1);
    const Contents before(*engine);
    engine = nullptr;

    const std::uint64_t id = 2;
    const std::uint32_t step = 7;
    const std::vector<float> values(5, 9.0f), state(5, 8.0f);
    const auto import = [&](Engine& into, const float* from) {
        into.import_rows(0, 1, &id, &step, reinterpret_cast<const std::byte*>(values.data()), from);
    };
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::signal(SIGSEGV, [](int) { kill(getpid(), SIGKILL); });
        void* unreadable = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        import(*file.attach({config}), static_cast<const float*>(unreadable));
        _exit(1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    engine = file.attach({config});
    CHECK(Contents(*engine) == before);

    import(*engine, state.data()); // and not killed, it is there
    engine->reach_step(step);
    engine = nullptr;
    engine = file.attach({config});
    engine->table(0).check();
    const Line row = testing::rows_of(*engine, 0).at(1);
    CHECK_EQ(row.id, id);
    CHECK_EQ(row.step, step);
    for (unsigned i = 0; i < 5; ++i) CHECK(row.value(i) == values[i] && row.state[i] == state[i]);
}

// Killed between the birth of a row and the end of its sighting: the row counts.
CASE(a_row_outlives_its_sighting, 1) {
    const SharedFile file;
    auto engine = file.create(tables());
    for (std::uint32_t step : {1, 2}) testing::lookup(*engine, {{}, {1, 2}}, step);
    Bucket& bucket = engine->table(1).bucket(engine->table(1).bucket_number(1));
    bucket.sightings.publish(bucket.sightings.insert(1, mix64(1)), 2, 2);
    engine = nullptr;
    engine = file.attach(tables());
    engine->table(1).check();
    CHECK_EQ(engine->num_rows(1), 2);
    CHECK(testing::sightings_of(*engine, 1).empty());
}

} // namespace
