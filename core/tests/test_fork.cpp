// A fork of a process that has an engine: it has a copy of the memory, none of the threads, and the same file. Every
// call that works on rows is refused there, whatever locks were held at the fork; an engine's end neither hangs nor
// touches the file.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>
#include <thread>
#include <utility>

#include "calls.hpp"
#include "shared_file.hpp"

using namespace satrap;
using testing::Ids, testing::Random, testing::SharedFile;

namespace {

constexpr unsigned kMostSeconds = 60;

std::vector<TableConfig> tables() { return {testing::counting_table("counted", 4, 8)}; }

Ids many_ids() { // more than a call does alone
    Ids ids;
    while (ids.size() < 4096) ids.push_back(mix64(ids.size()));
    return ids;
}

class Child {
  public:
    // Runs the body in a fork, which ends without destructors; a signal ends it if it hangs.
    template <typename Body> explicit Child(Body body) : pid_(::fork()) {
        CHECK(pid_ >= 0);
        if (pid_ != 0) return;
        alarm(kMostSeconds);
        try {
            body();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "in the fork: %s\n", error.what());
            ::_exit(1);
        }
        ::_exit(0);
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;
    ~Child() {
        if (pid_ > 0) (void)end();
    }

    int end() {
        int status = 0;
        CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
        return status;
    }
    void kill_it() const { ::kill(pid_, SIGKILL); }

  private:
    pid_t pid_;
};

// One end tells, the other waits. A fork has both.
class Pipe {
  public:
    Pipe() { CHECK_EQ(::pipe(ends_), 0); }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    ~Pipe() {
        ::close(ends_[0]);
        ::close(ends_[1]);
    }
    void tell() const { CHECK_EQ(::write(ends_[1], "x", 1), 1); }
    void wait() const {
        char byte;
        CHECK_EQ(::read(ends_[0], &byte, 1), 1);
    }

  private:
    int ends_[2];
};

void every_call_is_refused(Engine& engine, Ticket& ticket, const Ids& ids, pid_t home) {
    const std::string says =
        "created in process " + std::to_string(home) + " and this is its fork " + std::to_string(::getpid());
    std::vector<float> floats(4 * ids.size());
    const std::vector<std::uint32_t> words(ids.size(), 1);
    const std::uint64_t* id = ids.data();
    CHECK_THROWS(ForkError, says, testing::lookup(engine, {ids}, 9));
    CHECK_THROWS(ForkError, says, testing::peek(engine, {ids}));
    CHECK_THROWS(ForkError, says, testing::prepare(engine, {ids}));
    CHECK_THROWS(ForkError, says, engine.update(ticket, floats.data(), 9, std::vector<double>{1.0}));
    CHECK_THROWS(ForkError, says, engine.drop(ticket));
    CHECK(!ticket.used.load());
    const auto bags = std::make_shared<Bags>(std::vector<BagFeature>{}, 1, engine.identity());
    CHECK_THROWS(ForkError, says,
                 engine.lookup_bags(bags, {id, nullptr, nullptr, 0, 0}, {true, 9, 9}, nullptr, nullptr, false));
    CHECK_THROWS(ForkError, says, engine.table(0).set_lr(2.0));
    CHECK_THROWS(ForkError, says, engine.blocks()->take(64));
    CHECK_THROWS(ForkError, says, engine.next_step());
    CHECK_THROWS(ForkError, says, engine.latest_step());
    CHECK_THROWS(ForkError, says, engine.reach_step(9));
    CHECK_THROWS(ForkError, says, engine.num_rows(0));
    CHECK_THROWS(ForkError, says, engine.table(0).begin_version());
    CHECK_THROWS(ForkError, says, engine.export_rows(0, 0, 8, 0));
    CHECK_THROWS(ForkError, says, engine.export_sightings(0, 0, 8));
    CHECK_THROWS(ForkError, says, engine.export_removed(0, 0, 8, 0));
    CHECK_THROWS(ForkError, says, engine.removed_since(0));
    CHECK_THROWS(
        ForkError, says,
        engine.import_rows(0, ids.size(), id, words.data(), reinterpret_cast<std::byte*>(floats.data()), nullptr));
    CHECK_THROWS(ForkError, says, engine.import_removed(0, ids));
    CHECK_THROWS(ForkError, says, engine.import_sightings(0, ids.size(), id, words.data(), words.data(), true));
}

CASE(rows_on_a_device_are_refused, 1) {
    TableConfig config = testing::counting_table("item", 1);
    config.frame_pool = 0;
    const std::shared_ptr<Engine> engine = Engine::owned(testing::make_engine({config}, 2));
    const auto bags =
        std::make_shared<Bags>(std::vector<BagFeature>{{"item", 0, Pooling::sum, false, 0, false, false, 1, 0, {}}},
                               std::size_t{1}, engine->identity());
    const std::uint64_t id = 1;
    std::int32_t frame = 5;
    const BagInputs inputs{&id, nullptr, nullptr, 1, 1};
    const auto ticket = engine->lookup_frames(bags, inputs, {true, 1, 1}, &frame, true).ticket;
    const std::string says = "created in process " + std::to_string(::getpid());
    Child fork([&] {
        Ticket* const tickets[] = {ticket.get()};
        const GivenParts given[] = {{true, {}}};
        float value = 0.0f;
        CHECK_THROWS(ForkError, says, engine->lookup_frames(bags, inputs, {true, 2, 2}, &frame, true));
        CHECK_THROWS(ForkError, says, engine->update_frames(tickets, given, 1));
        CHECK_THROWS(ForkError, says, engine->sum_bound(tickets));
        CHECK_THROWS(ForkError, says, engine->check_gradients(tickets, {}, 1.0f));
        CHECK_THROWS(ForkError, says, engine->directory().take_inserted());
        CHECK_THROWS(ForkError, says, engine->initial_rows(0, {&id, 1}, reinterpret_cast<std::byte*>(&value), nullptr));
        CHECK_THROWS(ForkError, says, engine->directory().pool(0).device);
        CHECK_THROWS(ForkError, says, engine->directory().check());
        CHECK(!ticket->used.load());
    });
    CHECK_EQ(fork.end(), 0);
}

// Forks at random moments of other threads' calls, so that any of the locks may be held.
CASE(refused_and_left_whatever_is_held, 6) {
    const SharedFile file;
    const bool shared = random.chance(0.5);
    std::shared_ptr<Engine> engine =
        Engine::owned(shared ? file.create(tables(), 2) : testing::make_engine(tables(), 2));
    const Ids ids = many_ids();
    const auto ticket = testing::lookup(*engine, {ids}, 1).ticket;
    std::atomic<bool> over{false};
    std::mutex calm; // the allocator of a sanitizer, unlike malloc, does not survive a fork amid an allocation
    const auto calmly = [&calm] {
        return testing::kSanitized ? std::unique_lock(calm) : std::unique_lock(calm, std::defer_lock);
    };
    std::thread busy([&] {
        Ids more = ids;
        for (std::uint32_t step = 2; !over.load(); ++step) {
            const auto guard = calmly();
            for (std::uint64_t& id : more) id = mix64(id);
            const auto looked = testing::lookup(*engine, {more}, step);
            testing::update(*engine, *looked.ticket, std::vector<float>(looked.rows.size(), -1.0f), step);
        }
    });
    const pid_t home = ::getpid();
    for (unsigned round = 0; round < 5; ++round) {
        while (engine->latest_step() < 2 * round) relax_cpu();
        const auto guard = calmly();
        Child child([&] {
            every_call_is_refused(*engine, *ticket, ids, home);
            engine.reset();
        });
        CHECK_EQ(child.end(), 0);
    }
    over.store(true);
    busy.join();
    engine->table(0).check();
    testing::update(*engine, *ticket, std::vector<float>(4 * ids.size(), -1.0f), engine->latest_step());
}

CASE(the_file_is_as_its_process_left_it, 1) {
    const SharedFile file;
    const Ids ids = many_ids();
    const Pipe begun, over;
    std::shared_ptr<Engine> engine = Engine::owned(file.create(tables(), 2));
    const auto looked = testing::lookup(*engine, {ids}, 1);
    Child child([&] {
        CHECK_THROWS(ForkError, "open it here", engine->import_removed(0, ids));
        begun.tell();
        over.wait(); // the engine's file stays open here
        engine.reset();
    });
    begun.wait();
    testing::update(*engine, *looked.ticket, std::vector<float>(looked.rows.size(), -1.0f), 1);
    engine.reset();
    const auto again = file.attach(tables()); // not locked by the fork
    over.tell();
    CHECK_EQ(child.end(), 0);
    CHECK(testing::peek(*again, {ids}) == std::vector<float>(4 * ids.size(), 1.0f));
    CHECK_THROWS(SharedMemoryError, "is already open", file.attach(tables())); // nor unlocked by its end
    again->table(0).check();
}

// A fork that let the engine go does not hold the file of a process that was killed.
CASE(a_killed_owner_leaves_the_file_free, 1) {
    const SharedFile file;
    const Ids ids{1, 2, 3};
    const Pipe left, over;
    Child owner([&] {
        std::shared_ptr<Engine> engine = Engine::owned(file.create(tables(), 2));
        testing::lookup(*engine, {ids}, 1);
        Child fork([&] {
            engine.reset();
            left.tell();
            over.wait();
        });
        (void)fork.end(); // killed before
    });
    left.wait();
    owner.kill_it();
    CHECK(WIFSIGNALED(owner.end()));
    CHECK_EQ(file.attach(tables())->num_rows(0), ids.size());
    over.tell();
}

} // namespace
