// The file that outlives its process: what it refuses and by which words, that its chunks come back as they were, what
// a full disk leaves behind. Killing the process is test_killed.cpp's part.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/errors.hpp"
#include "calls.hpp"
#include "shared_file.hpp"

using namespace satrap;
using testing::Contents, testing::Ids, testing::Random, testing::SharedFile;

namespace {

std::vector<TableConfig> draw_tables(Random& random) {
    std::vector<TableConfig> configs{testing::counting_table("a", random.between(1, 40), 1U << random.below(4)),
                                     testing::counting_table("b", 3, 2)};
    configs[0].optimizer.kind = OptimizerKind::adam;
    configs[0].optimizer.lr = 0.01;
    configs[0].dtype = random.chance(0.5) ? Dtype::bfloat16 : Dtype::float32;
    configs[0].capacity = random.between(1300, 2000); // fewer than there are ids, enough for a batch
    configs[1].admission = AdmissionKind::min_count;
    configs[1].min_count = 3;
    configs[1].window = 200;
    configs[1].expire_after = 8;
    return configs;
}

CASE(attached_is_as_it_was, testing::scaled(12)) {
    const SharedFile file;
    const std::vector<TableConfig> configs = draw_tables(random);
    const auto beside = testing::make_engine(configs); // the same calls in memory
    auto engine = file.create(configs, 2);
    for (unsigned round = 0; round < 4; ++round) {
        Random same = random;
        testing::train(*engine, random, 5, 900, 3000);
        testing::train(*beside, same, 5, 900, 3000);
        engine->table(0).set_lr(0.5 + round);
        beside->table(0).set_lr(0.5 + round);
        engine->table(0).begin_version();
        beside->table(0).begin_version();
        engine = nullptr;
        CHECK_EQ(SharedArena::config_of(file.path), "the blob");
        engine = file.attach(configs, random.between(1, 3));
        CHECK(Contents(*engine) == Contents(*beside));
        CHECK_EQ(engine->latest_step(), beside->latest_step());
        CHECK_EQ(engine->table(0).lr(), 0.5 + round);
        CHECK_EQ(engine->table(0).ledger().version.load(), round + 2);
        CHECK_EQ(engine->removed_since(0), round + 3); // the log of removed ids died with the process
    }
}

std::string read_all(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_at(const std::string& path, std::size_t offset, std::uint64_t value, std::size_t bytes = 8) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    file.write(reinterpret_cast<const char*>(&value), static_cast<std::streamsize>(bytes));
    CHECK(file.good());
}

CASE(the_note_is_the_last_one, testing::scaled(6)) {
    const SharedFile file;
    const std::vector<TableConfig> configs = draw_tables(random);
    auto engine = file.create(configs, 1);
    std::string note;
    std::size_t size = 0;
    for (unsigned round = 0; round < 40; ++round) {
        CHECK(engine->arena().note() == note);
        note.assign(random.below(round % 10 == 9 ? 300000 : 2000), static_cast<char>('a' + round % 26));
        engine->arena().set_note(note);
        CHECK(engine->arena().note() == note);
        if (round == 20) size = std::filesystem::file_size(file.path);
        if (!random.chance(0.3)) continue;
        engine = nullptr;
        engine = file.attach(configs, 1);
    }
    CHECK(std::filesystem::file_size(file.path) <= size + SharedArena::kMappingBytes); // places are used again
}

CASE(files_that_are_not_ours, 2) {
    const std::vector<TableConfig> one{testing::counting_table("t", 1)};
    const SharedFile file;
    CHECK_THROWS(SharedMemoryError, "cannot be opened", file.attach(one));
    CHECK_THROWS(SharedMemoryError, file.path, file.attach(one)); // every message names the file
    CHECK_THROWS(SharedMemoryError, "cannot be created", SharedArena::create(file.path + "/below/it", 1, {}));
    for (std::size_t bytes : {0U, 1U, 4095U, 4096U, 4097U, 20480U}) {
        std::string foreign(bytes, '\0');
        for (char& c : foreign) c = static_cast<char>(random.word());
        std::ofstream(file.path, std::ios::binary) << foreign;
        std::filesystem::permissions(file.path, std::filesystem::perms(0600));
        const char* says = bytes == 0          ? "is empty"
                           : bytes % 4096 == 0 ? "its magic number is wrong"
                                               : "multiple of 4096";
        CHECK_THROWS(SharedMemoryError, says, file.attach(one));
        CHECK_THROWS(SharedMemoryError, says, SharedArena::config_of(file.path));
        CHECK_THROWS(SharedMemoryError, "already exists", file.create(one));
        CHECK(read_all(file.path) == foreign); // and stays as it was
    }
}

CASE(files_that_are_in_use_or_of_others, 1) {
    const std::vector<TableConfig> one{testing::counting_table("t", 1)}, two{one[0], testing::counting_table("u", 1)};
    const SharedFile file;
    auto engine = file.create(one);
    CHECK_THROWS(SharedMemoryError, "already open, in this process or another", file.attach(one));
    CHECK_THROWS(SharedMemoryError, "already exists", file.create(one));
    engine = nullptr;
    CHECK_THROWS(SharedMemoryError, "holds 1 tables, not 2", file.attach(two));
    engine = file.attach(one); // the refusals let the lock go
    CHECK_THROWS(SharedMemoryError, "already open, in this process or another", SharedArena::config_of(file.path));
}

// Offsets of FileHeader's and ChunkHeader's fields, which are the file's format.
constexpr std::size_t kMagicAt = 0, kHeaderBytesAt = 8, kTailAt = 32, kChunkBytes = 0, kChunkKind = 8, kChunkTable = 12,
                      kChunkBucket = 16, kChunkSequence = 20;

CASE(files_that_are_damaged, 1) {
    const std::vector<TableConfig> one{testing::counting_table("t", 1, 2)};
    struct Damage {
        const char* says;
        std::size_t at;
        std::uint64_t value;
        std::size_t bytes;
    };
    constexpr std::size_t kFirstChunk = 4096; // the header's size, for so few tables
    const Damage damages[] = {
        {"its creation was interrupted", kMagicAt, 0, 8},
        {"is truncated", kTailAt, std::uint64_t{1} << 40, 8},
        {"is truncated", kHeaderBytesAt, std::uint64_t{1} << 40, 8},
        {"claims 0 bytes", kFirstChunk + kChunkBytes, 0, 8},
        {"claims 100 bytes", kFirstChunk + kChunkBytes, 100, 8},
        {"claims 1099511627776 bytes", kFirstChunk + kChunkBytes, std::uint64_t{1} << 40, 8},
        {"chunk too small for its rows", kFirstChunk + kChunkBytes, 128, 8},
        {"a chunk of unknown kind", kFirstChunk + kChunkKind, 9, 4},
        {"a chunk of table 3", kFirstChunk + kChunkTable, 3, 4},
        {"a chunk of table 0, bucket 2", kFirstChunk + kChunkBucket, 2, 4},
        {"chunk out of sequence", kFirstChunk + kChunkSequence, 1, 4},
    };
    for (const Damage& each : damages) {
        const SharedFile file;
        auto engine = file.create(one);
        testing::lookup(*engine, {{1, 2, 3, 4, 5, 6}}, 1);
        engine = nullptr;
        write_at(file.path, each.at, each.value, each.bytes);
        CHECK_THROWS(SharedMemoryError, each.says, file.attach(one));
    }
    const SharedFile file;
    file.create(one);
    std::filesystem::resize_file(file.path, 4096 + 1);
    CHECK_THROWS(SharedMemoryError, "multiple of 4096", file.attach(one));
    auto engine = file.create_anew(one);
    testing::lookup(*engine, {{1}}, 1);
    engine = nullptr;
    std::filesystem::resize_file(file.path, 4096);
    CHECK_THROWS(SharedMemoryError, "is truncated", file.attach(one));
}

// Raw chunks of all sizes over several pieces of the file: aligned, zeroed, found again in order with all their bytes.
CASE(chunks_come_back, testing::scaled(6)) {
    struct Chunk {
        ChunkTag tag;
        std::size_t bytes;
        int filling;
    };
    const SharedFile file;
    std::vector<Chunk> chunks;
    auto arena = SharedArena::create(file.path, 1, std::span<const char>("xyz", 3));
    for (unsigned round = 0; round < 3; ++round) {
        for (unsigned i = 0; i < 6; ++i) {
            const std::size_t bytes = random.chance(0.5)
                                          ? random.between(1, 5000)
                                          : random.between(1U << 20, (random.chance(0.2) ? 20U : 7U) << 20);
            const ChunkTag tag{ChunkKind::rows, random.below(9), random.below(9), random.below(9)};
            std::byte* memory = arena->allocate(tag, bytes);
            CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0);
            for (std::size_t at = 0; at < bytes; at += 61) CHECK(memory[at] == std::byte{0});
            chunks.push_back({tag, bytes, static_cast<int>(random.between(1, 255))});
            std::memset(memory, chunks.back().filling, bytes);
        }
        arena = nullptr; // as it is after a kill, too: nothing is written at the end
        arena = SharedArena::attach(file.path, 1);
        std::size_t seen = 0;
        arena->for_each([&](const ChunkTag& tag, std::byte* memory, std::size_t bytes) {
            CHECK(seen < chunks.size());
            const Chunk& expected = chunks[seen++];
            CHECK(tag.kind == expected.tag.kind && tag.table == expected.tag.table &&
                  tag.bucket == expected.tag.bucket && tag.sequence == expected.tag.sequence);
            CHECK(bytes >= expected.bytes && bytes < expected.bytes + 64);
            for (std::size_t at = 0; at < expected.bytes; at += 61)
                CHECK(memory[at] == static_cast<std::byte>(expected.filling));
        });
        CHECK_EQ(seen, chunks.size());
    }
}

// For its life this process's files cannot grow beyond a size, as on a full disk.
class FullDisk {
  public:
    explicit FullDisk(std::uintmax_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
        getrlimit(RLIMIT_FSIZE, &before_);
        const rlimit limit{static_cast<rlim_t>(bytes), before_.rlim_max};
        CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    }
    FullDisk(const FullDisk&) = delete;
    ~FullDisk() {
        setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }

  private:
    rlimit before_{};
    void (*handler_)(int);
};

Ids range(std::uint64_t first, std::uint64_t n) {
    Ids ids;
    while (ids.size() < n) ids.push_back(first++);
    return ids;
}

CASE(a_full_disk_loses_nothing, 1) {
    constexpr std::uint32_t kDim = 600, kBatch = 100; // rows of 2.4 KB
    const std::vector<TableConfig> configs{testing::counting_table("t", kDim, 2)};
    const SharedFile file;
    auto engine = file.create(configs);
    auto add_one = [&](const Ids& ids) {
        testing::update(*engine, {ids}, std::vector<float>(ids.size() * kDim, -1.0f), engine->latest_step());
    };
    testing::lookup(*engine, {range(0, kBatch)}, 1);
    add_one(range(0, kBatch));
    const std::uintmax_t size = std::filesystem::file_size(file.path);
    std::uint64_t known = kBatch;
    {
        const FullDisk full(size);
        for (std::uint32_t step = 2; known < 100000; ++step, known += kBatch) {
            try {
                testing::lookup(*engine, {range(known, kBatch)}, step);
            } catch (const SharedMemoryError& error) {
                CHECK(std::string(error.what()).find("cannot grow by 16777216 bytes: File too large") !=
                      std::string::npos);
                break;
            }
        }
        CHECK(known < 100000);
        engine->table(0).check();
        CHECK_EQ(std::filesystem::file_size(file.path), size);
        CHECK(engine->num_rows(0) >= known); // some of the failed call's may be there
        add_one(range(0, kBatch));
        // An update of more rows than the undo slot holds: refused before anything changes, and the ticket stays good.
        const Ids many = range(0, known);
        const auto ticket = testing::prepare(*engine, {many});
        for (unsigned i = 0; i < 20; ++i) {
            CHECK_THROWS(SharedMemoryError, "cannot grow",
                         testing::update(*engine, *ticket, std::vector<float>(known * kDim, -1.0f), 1));
            CHECK_EQ(testing::peek(*engine, {{0}})[0], 2.0f + static_cast<float>(i));
            CHECK_EQ(testing::peek(*engine, {{kBatch}})[0], 0.0f);
            CHECK(!ticket->used);
            add_one(range(0, kBatch)); // fits the slot that was there; new slots would fill the file's last bytes
        }
        engine->table(0).check();
    }
    testing::lookup(*engine, {range(known, kBatch)}, engine->next_step()); // there is room again
    add_one(range(0, known));
    CHECK(testing::peek(*engine, {{0, kBatch, known}}) == [&] {
        std::vector<float> v(kDim, 23.0f);
        v.resize(2 * kDim, 1.0f);
        v.resize(3 * kDim, 0.0f);
        return v;
    }());
    const Contents before(*engine);
    engine = nullptr;
    engine = file.attach(configs);
    CHECK(Contents(*engine) == before);
}

CASE(a_file_that_cannot_be_made_is_removed, 1) {
    const SharedFile file;
    const FullDisk full(1 << 20);
    CHECK_THROWS(SharedMemoryError, "cannot grow", file.create({testing::counting_table("t", 1)}));
    CHECK(!std::filesystem::exists(file.path));
}

// Several callers while the file grows piece by piece: what they read beside each other's growth stays sound.
CASE(callers_share_a_growing_file, testing::scaled(2)) {
    constexpr std::uint32_t kDim = 1000;
    const std::vector<TableConfig> configs{testing::counting_table("t", kDim, 16)};
    const SharedFile file;
    auto engine = file.create(configs, 2);
    const std::uint64_t seed = random.bits();
    constexpr unsigned kCalls = 60, kIds = 90; // 3 callers x 60 calls x 90 rows of 4 KB: four pieces and more
    testing::in_threads(3, [&](unsigned thread) {
        Random own(seed + thread);
        for (unsigned call = 0; call < kCalls; ++call) {
            const Ids ids = range((std::uint64_t{thread} << 32) + call * kIds, kIds);
            const std::uint32_t step = engine->next_step();
            const auto looked = testing::lookup(*engine, {ids}, step);
            testing::update(*engine, *looked.ticket, std::vector<float>(looked.rows.size(), -1.0f), step);
            if (own.chance(0.1)) engine->table(0).check();
            CHECK(engine->latest_step() >= step);
        }
    });
    CHECK(std::filesystem::file_size(file.path) > 3 * SharedArena::kMappingBytes);
    const Contents before(*engine);
    CHECK_EQ(before.rows[0].size(), 3 * kCalls * kIds);
    for (const testing::Line& line : before.rows[0]) CHECK(line.value(0) == 1.0f && line.value(kDim - 1) == 1.0f);
    engine = nullptr;
    CHECK(Contents(*file.attach(configs)) == before);
}

// Linux limits the mappings of a process to 65530; a file may have terabytes.
CASE(a_growing_file_has_few_mappings, 1) {
    const SharedFile file;
    const std::string config = "{}";
    SharedArena::create(file.path, 1, config);
    const auto arena = SharedArena::attach(file.path, 1); // now it is mapped by its name
    for (unsigned i = 0; i < 8; ++i) arena->allocate({ChunkKind::rows, 0, 0, i}, SharedArena::kMappingBytes - 64);
    std::ifstream maps("/proc/self/maps");
    unsigned mappings = 0;
    for (std::string line; std::getline(maps, line);)
        if (line.find(file.path) != std::string::npos) ++mappings;
    CHECK(mappings >= 1 && mappings <= 2); // that of the attached bytes, and that of the later ones
}

} // namespace
