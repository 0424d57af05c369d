// An Arena over one file (on tmpfs or a disk) whose chunks outlive the process: after kill -9 a new process maps the
// file again and finds every chunk by its header. It holds only rows; indexes and free lists are rebuilt.
//
// File: [FileHeader | TableLedger x tables | config blob | padding to 4096] [chunk]... ; chunk: [ChunkHeader | bytes].
// Invariants: tail <= file size; chunks are contiguous from header_bytes to tail, except for gaps where a chunk would
// straddle two mappings (a ChunkHeader of kind 0 with the gap's size); the file is grown by posix_fallocate, so a full
// tmpfs is an error of allocate() and never a SIGBUS in the middle of an update.
// One process at a time: an exclusive flock, which the kernel releases when its holder dies. A fork of the holder does
// not see the mapped file; it has the descriptor, and so the lock, until it calls leave() or exits.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <span>
#include <sstream>

#include "storage/arena.hpp"

namespace satrap {

struct FileHeader {
    static constexpr std::uint64_t kMagic = 0x344d485350525453ULL; // "STRPSHM4"
    std::atomic<std::uint64_t> magic;                              // written last: a file without it is incomplete
    std::uint64_t header_bytes;
    std::uint64_t num_tables;
    std::uint64_t config_bytes;
    std::atomic<std::uint64_t> tail;
    std::atomic<std::uint32_t> latest_step;
    std::atomic<std::uint32_t> incomplete; // 1: a snapshot is being loaded
    std::atomic<std::uint32_t> attempt;
    std::atomic<std::uint64_t> note_at; // the offset of the note's chunk; 0: there is none
};

struct NoteHeader { // followed by the note
    std::uint64_t bytes;
};

struct alignas(64) ChunkHeader {
    std::uint64_t bytes; // header included; 0: never written
    std::uint32_t kind;  // 0: a gap
    std::uint32_t table;
    std::uint32_t bucket;
    std::uint32_t sequence;
};

class SharedArena final : public Arena {
  public:
    static constexpr std::size_t kPage = 4096;
    static constexpr std::size_t kMappingBytes = std::size_t{16} << 20; // by which the file grows, at least
    // The addresses of a mapping, most of which the file reaches later: a process may have only some 65,000 mappings.
    static constexpr std::size_t kReservedBytes = std::size_t{1} << 30;

    // Creates a file. It has no name before it is complete, so that a kill leaves no empty one; an existing file of its
    // name holds rows and is refused.
    static std::unique_ptr<SharedArena> create(const std::string& path, std::size_t tables,
                                               std::span<const char> config, bool complete = true) {
        std::unique_ptr<SharedArena> arena(new SharedArena(path, tables));
        const std::size_t slash = path.rfind('/');
        const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
        arena->fd_ = ::open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
        const bool named = arena->fd_ < 0; // not every file system supports files without a name
        if (named) arena->fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (arena->fd_ < 0) arena->refuse_to_create();
        arena->lock();
        try {
            arena->write_header(tables, config, complete);
        } catch (...) {
            if (named) ::unlink(path.c_str());
            throw;
        }
        const std::string nameless = "/proc/self/fd/" + std::to_string(arena->fd_);
        if (!named && ::linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0)
            arena->refuse_to_create();
        return arena;
    }

    static std::unique_ptr<SharedArena> attach(const std::string& path, std::size_t tables) {
        std::unique_ptr<SharedArena> arena(new SharedArena(path, tables));
        arena->open_existing();
        if (arena->header().num_tables != tables)
            arena->fail("holds " + std::to_string(arena->header().num_tables) + " tables, not " +
                        std::to_string(tables));
        return arena;
    }

    static std::string config_of(const std::string& path) {
        SharedArena arena(path, 0);
        arena.open_existing();
        const char* blob = reinterpret_cast<const char*>(arena.mappings_[0].address) + arena.config_offset();
        return std::string(blob, arena.header().config_bytes);
    }

    // Returns whether the file is ours but incomplete: the process that filled it was killed.
    static bool unfinished(const std::string& path) {
        SharedArena arena(path, 0);
        const std::uint64_t size = arena.open_file(O_RDONLY);
        arena.lock();
        struct HeaderStart {
            std::uint64_t magic;
            std::byte more[offsetof(FileHeader, incomplete) - sizeof(std::uint64_t)];
            std::uint32_t incomplete;
        } begin{};
        const ssize_t bytes = ::pread(arena.fd_, &begin, sizeof(begin), 0);
        if (bytes < 0) arena.fail(errno_text("cannot be read"));
        return (begin.magic == 0 && size > 0) || (begin.magic == FileHeader::kMagic && begin.incomplete != 0);
    }

    ~SharedArena() override {
        for (const Mapping& mapping : mappings_) munmap(mapping.address, mapping.reserved);
        if (fd_ < 0) return;
        (void)::flock(fd_, LOCK_UN); // a fork may still have the file open; close() alone would leave it locked
        ::close(fd_);
    }

    bool survives_process() const override { return true; }
    void set_complete(bool complete) override { header().incomplete.store(complete ? 0 : 1); }
    void leave() noexcept override { ::close(fd_); } // the lock stays with the other processes that have the file open
    TableLedger& ledger(std::size_t table) override {
        SATRAP_ASSERT(table < header().num_tables);
        return reinterpret_cast<TableLedger*>(first_ + kLedgersAt)[table];
    }
    std::atomic<std::uint32_t>& latest_step() override { return header().latest_step; }
    std::atomic<std::uint32_t>& attempt() override { return header().attempt; }

    std::string note() override {
        std::lock_guard lock(mutex_);
        const std::uint64_t at = header().note_at.load();
        if (at == 0) return {};
        if (at < header().header_bytes || at + sizeof(ChunkHeader) + sizeof(NoteHeader) > header().tail.load())
            fail("is damaged: its note is outside the file's chunks");
        const ChunkHeader* chunk = chunk_header(at);
        const auto* head = reinterpret_cast<const NoteHeader*>(chunk + 1);
        if (chunk->bytes < sizeof(ChunkHeader) + sizeof(NoteHeader) ||
            head->bytes > chunk->bytes - sizeof(ChunkHeader) - sizeof(NoteHeader))
            fail("is damaged: its note is longer than its chunk");
        return {reinterpret_cast<const char*>(head + 1), head->bytes};
    }

    // Writes into the chunk of the note before the last, if it is large enough: killed at any moment, the file has the
    // old note or the new one.
    void set_note(const std::string& note) override {
        const std::size_t needed = sizeof(NoteHeader) + note.size();
        const std::uint64_t now = header().note_at.load();
        std::uint64_t to = 0;
        for (std::uint64_t& place : notes_)
            if (place != 0 && place != now && chunk_bytes(place) >= needed) to = place;
        if (to == 0) {
            std::byte* memory = allocate({ChunkKind::note, 0, 0, 0}, 2 * needed);
            std::lock_guard lock(mutex_);
            to = offset_of(memory) - sizeof(ChunkHeader);
            notes_[notes_[0] == now ? 1 : 0] = to;
        }
        std::lock_guard lock(mutex_);
        auto* head = reinterpret_cast<NoteHeader*>(chunk_header(to) + 1);
        head->bytes = note.size();
        std::memcpy(head + 1, note.data(), note.size());
        header().note_at.store(to);
    }

    std::byte* allocate(const ChunkTag& tag, std::size_t bytes) override {
        SATRAP_ASSERT(bytes != 0 && static_cast<std::uint32_t>(tag.kind) != 0);
        bytes = round_up(bytes, 64) + sizeof(ChunkHeader);
        std::lock_guard lock(mutex_);
        std::uint64_t tail = header().tail.load();
        if (tail + bytes > end()) {
            std::uint64_t old_end = end();
            const bool is_mapped_apart = grow(round_up(std::max(bytes, kMappingBytes), kPage));
            if (is_mapped_apart && tail < old_end) { // the chunk must not straddle two mappings
                *chunk_header(tail) = ChunkHeader{old_end - tail, 0, 0, 0, 0};
                tail = old_end;
                header().tail.store(
                    tail); // before anything is written there: bytes beyond the tail are assumed to be zero
            }
        }
        ChunkHeader* chunk = chunk_header(tail);
        *chunk = ChunkHeader{bytes, static_cast<std::uint32_t>(tag.kind), tag.table, tag.bucket, tag.sequence};
        header().tail.store(tail + bytes);
        return reinterpret_cast<std::byte*>(chunk + 1);
    }

    std::byte* allocate_index(std::size_t bytes) override { return index_memory_.allocate_index(bytes); }
    void release_index(std::byte* block, std::size_t bytes) override { index_memory_.release_index(block, bytes); }

    // Visits every chunk of the file in order of creation: owners find their rows by it after attach().
    void for_each(const std::function<void(const ChunkTag&, std::byte*, std::size_t)>& visit) {
        for (std::uint64_t at = header().header_bytes; at < header().tail.load();) {
            ChunkHeader* chunk = chunk_header(at);
            if (chunk->bytes < sizeof(ChunkHeader) || chunk->bytes % 64 != 0 ||
                at + chunk->bytes > header().tail.load())
                fail("is damaged: a chunk at byte " + std::to_string(at) + " claims " + std::to_string(chunk->bytes) +
                     " bytes");
            if (chunk->kind == static_cast<std::uint32_t>(ChunkKind::note)) {
                notes_[0] = notes_[1];
                notes_[1] = at;
            }
            if (chunk->kind != 0)
                visit({static_cast<ChunkKind>(chunk->kind), chunk->table, chunk->bucket, chunk->sequence},
                      reinterpret_cast<std::byte*>(chunk + 1), chunk->bytes - sizeof(ChunkHeader));
            at += chunk->bytes;
        }
    }

    [[noreturn]] void fail(const std::string& what) const {
        throw SharedMemoryError("shared-memory file '" + path_ + "' " + what);
    }

  private:
    static constexpr std::size_t kLedgersAt = (sizeof(FileHeader) + 63) / 64 * 64;

    struct Mapping {
        std::byte* address;
        std::uint64_t offset;
        std::size_t bytes;    // which the file has
        std::size_t reserved; // with the addresses beyond them
    };

    SharedArena(std::string path, std::size_t tables) : Arena(tables), path_(std::move(path)) {}

    static std::string errno_text(const char* what) { return std::string(what) + ": " + std::strerror(errno); }
    FileHeader& header() {
        SATRAP_ASSERT(first_ != nullptr);
        return *reinterpret_cast<FileHeader*>(first_);
    }
    std::uint64_t end() const { return mappings_.back().offset + mappings_.back().bytes; }
    std::size_t config_offset() { return config_offset(header().num_tables); }
    static std::size_t config_offset(std::size_t tables) { return kLedgersAt + tables * sizeof(TableLedger); }

    ChunkHeader* chunk_header(std::uint64_t offset) {
        SATRAP_ASSERT(offset < end());
        auto mapping = std::upper_bound(mappings_.begin(), mappings_.end(), offset,
                                        [](std::uint64_t at, const Mapping& p) { return at < p.offset; });
        --mapping;
        return reinterpret_cast<ChunkHeader*>(mapping->address + (offset - mapping->offset));
    }

    std::uint64_t offset_of(const std::byte* memory) const {
        for (const Mapping& mapping : mappings_)
            if (memory >= mapping.address && memory < mapping.address + mapping.bytes)
                return mapping.offset + static_cast<std::uint64_t>(memory - mapping.address);
        throw InvariantError("memory that belongs to no chunk");
    }

    // Returns the bytes of the chunk that its owner may use.
    std::size_t chunk_bytes(std::uint64_t offset) {
        std::lock_guard lock(mutex_);
        return chunk_header(offset)->bytes - sizeof(ChunkHeader);
    }

    void lock() {
        if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
        if (errno != EWOULDBLOCK) fail(errno_text("cannot be locked") + "; put it into another file system");
        fail("is already open, in this process or another; close that store first");
    }

    void map_range(std::uint64_t offset, std::size_t bytes, std::size_t reserved) {
        SATRAP_ASSERT(fd_ >= 0 && reserved >= bytes);
        SATRAP_ASSERT(bytes != 0 && bytes % kPage == 0 && offset % kPage == 0);
        const auto map = [&] {
            return mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(offset));
        };
        void* address = map();
        if (address == MAP_FAILED && reserved > bytes) { // a limit on addresses may leave room for the bytes alone
            reserved = bytes;
            address = map();
        }
        if (address == MAP_FAILED) fail(errno_text("cannot be mapped"));
        madvise(address, reserved, MADV_HUGEPAGE); // honoured where the system allows huge pages on tmpfs
        // A fork could write to it, and would hold the lock through its mapping.
        madvise(address, reserved, MADV_DONTFORK);
        mappings_.push_back({static_cast<std::byte*>(address), offset, bytes, reserved});
        if (first_ == nullptr) first_ = mappings_.front().address;
    }

    // Returns whether the new bytes have a mapping of their own; else the last one has addresses for them.
    bool grow(std::size_t bytes) {
        std::uint64_t offset = mappings_.empty() ? 0 : end();
        if (int error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes)); error != 0) {
            (void)!ftruncate(fd_, static_cast<off_t>(offset)); // restores the file's size
            fail("cannot grow by " + std::to_string(bytes) + " bytes: " + std::strerror(error));
        }
        if (!mappings_.empty() && bytes <= mappings_.back().reserved - mappings_.back().bytes) {
            mappings_.back().bytes += bytes;
            return false;
        }
        map_range(offset, bytes, std::max(bytes, kReservedBytes));
        return true;
    }

    void write_header(std::size_t tables, std::span<const char> config, bool complete) {
        SATRAP_ASSERT(mappings_.empty());
        const std::size_t bytes = round_up(config_offset(tables) + config.size(), kPage);
        grow(round_up(std::max(bytes, kMappingBytes), kPage));
        FileHeader& head = header();
        head.header_bytes = bytes;
        head.num_tables = tables;
        head.config_bytes = config.size();
        head.tail.store(bytes);
        head.incomplete.store(complete ? 0 : 1);
        std::memcpy(mappings_[0].address + config_offset(), config.data(), config.size());
        head.magic.store(FileHeader::kMagic);
    }

    // Opens the file and returns its size. Refuses a file that another user created or can write to, and a symbolic
    // link.
    std::uint64_t open_file(int access) {
        fd_ = ::open(path_.c_str(),
                     access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); // O_NONBLOCK: opening a pipe would wait
        if (fd_ < 0)
            fail(errno == ELOOP ? "is a symbolic link; expected the file itself" : errno_text("cannot be opened"));
        struct stat status{};
        if (fstat(fd_, &status) != 0) fail(errno_text("cannot be examined"));
        if (!S_ISREG(status.st_mode)) fail("is not a regular file; give another path");
        if (status.st_uid != ::geteuid())
            fail("belongs to user " + std::to_string(status.st_uid) + ", and this is user " +
                 std::to_string(::geteuid()) + "; give another path");
        if ((status.st_mode & 077) != 0) {
            std::ostringstream mode;
            mode << std::oct << (status.st_mode & 0777);
            fail("may be used by others (mode " + mode.str() + "), who may have changed it; expected mode 600");
        }
        return static_cast<std::uint64_t>(status.st_size);
    }

    [[noreturn]] void refuse_to_create() const {
        fail(errno == EEXIST ? "already exists; open it with Store.attach(), or remove it first"
                             : errno_text("cannot be created"));
    }

    void open_existing() {
        const std::uint64_t size = open_file(O_RDWR);
        lock();
        if (size == 0) fail("is empty: it was truncated, or its creator was killed; remove it to start without rows");
        if (size < kPage || size % kPage != 0)
            fail("is not a whole Satrap shared-memory file: " + std::to_string(size) +
                 " bytes, expected a multiple of 4096");
        map_range(0, size, size);
        FileHeader& head = header();
        if (head.magic.load() != FileHeader::kMagic)
            fail("is not a Satrap shared-memory file, or its creation was interrupted: its magic number is wrong");
        if (head.incomplete.load() != 0)
            fail("is incomplete: loading a snapshot into it was interrupted; remove it and load again");
        const std::size_t fixed = config_offset() + head.config_bytes;
        if (head.tail.load() > size || head.header_bytes > head.tail.load() || head.header_bytes % 64 != 0 ||
            fixed > head.header_bytes)
            fail("is truncated: " + std::to_string(size) + " bytes found, " + std::to_string(head.tail.load()) +
                 " expected");
    }

    AnonymousArena index_memory_{0}; // an index is rebuilt from the rows, never shared
    std::string path_;
    int fd_ = -1;
    std::mutex mutex_;
    std::vector<Mapping> mappings_;
    std::uint64_t notes_[2] = {}; // chunks of notes, one in use and one to be written next
    std::byte* first_ = nullptr;  // in mappings_, which other threads may read only under the lock
};

} // namespace satrap
