// What all core tests share: checks that say what was found, seeded random numbers, and the main of a test program,
// which names the seed of a failure. It knows nothing of tables.
//
// A test program is one file of cases; a case runs `rounds` times, each with another seed. `test_x` runs all of
// them, `test_x 42` every case once with that seed, `test_x 42 name` one case. A case that hangs is a failure too.
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace testing {

#ifdef SATRAP_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// How much of a test to do: all of it plain, part of it under a sanitizer, with which it takes many times as long.
#ifdef __SANITIZE_THREAD__
inline constexpr unsigned kScale = 16;
#else
inline constexpr unsigned kScale = kSanitized ? 4 : 1;
#endif
inline constexpr unsigned scaled(unsigned n) { return n < kScale ? 1 : n / kScale; }

struct Failure : std::runtime_error { using std::runtime_error::runtime_error; };

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B> bool equal(const A& a, const B& b) {
    if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                  !std::is_same_v<B, bool>)
        return std::cmp_equal(a, b);
    else
        return a == b;
}

template <typename A, typename B>
void check_equal(const A& found, const B& expected, const char* file, int line, const char* found_text,
                 const char* expected_text) {
    if (equal(found, expected)) return;
    std::ostringstream message;
    message.precision(17);
    message << found_text << " is " << found << "; expected " << expected << " (" << expected_text << ")";
    fail(file, line, message.str());
}

template <typename Error, typename Call>
void check_throws(Call call, const std::string& text, const char* file, int line, const char* call_text) {
    try {
        call();
    } catch (const Error& error) {
        if (std::string(error.what()).find(text) != std::string::npos) return;
        fail(file, line, std::string(call_text) + " says \"" + error.what() + "\"; expected \"" + text + "\" in it");
    }
    fail(file, line, std::string(call_text) + " did not throw; expected \"" + text + "\"");
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) ::testing::fail(__FILE__, __LINE__, #condition);                                             \
    } while (false)
#define CHECK_EQ(found, expected) ::testing::check_equal((found), (expected), __FILE__, __LINE__, #found, #expected)
// The call throws Error with `text` somewhere in its message.
#define CHECK_THROWS(Error, text, ...)                                                                                 \
    ::testing::check_throws<Error>([&] { (void)(__VA_ARGS__); }, text, __FILE__, __LINE__, #__VA_ARGS__)

// A random generator that gives the same numbers with any standard library (splitmix64).
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed * 0xd1342543de82ef95ULL + 1) {}

    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    std::uint32_t word() { return static_cast<std::uint32_t>(bits() >> 32); }
    // 0 .. n-1
    std::uint32_t below(std::uint64_t n) { return static_cast<std::uint32_t>(((bits() >> 32) * n) >> 32); }
    // low .. high, both included
    std::uint32_t between(std::uint32_t low, std::uint32_t high) { return low + below(std::uint64_t{high} - low + 1); }
    bool chance(double p) { return static_cast<double>(bits() >> 11) * 0x1p-53 < p; }
    float real(float low, float high) { return low + (high - low) * static_cast<float>(below(1U << 24)) * 0x1p-24f; }
    template <typename T> const T& pick(const std::vector<T>& things) { return things[below(things.size())]; }

  private:
    std::uint64_t state_;
};

// Calls body(0) .. body(n-1), each on another thread, and throws the first failure of any.
inline void in_threads(unsigned n, const std::function<void(unsigned)>& body) {
    std::mutex mutex;
    std::exception_ptr error;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < n; ++i)
        threads.emplace_back([&, i] {
            try {
                body(i);
            } catch (...) {
                std::lock_guard lock(mutex);
                if (error == nullptr) error = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    if (error != nullptr) std::rethrow_exception(error);
}

struct Case {
    const char* name;
    unsigned rounds;
    void (*body)(Random&);
};

inline std::vector<Case> cases; // in the order of their definition

struct Registration {
    explicit Registration(const Case& one) { cases.push_back(one); }
};

// Defines a case, whose body draws from `random`: CASE(name, rounds) { ... }
#define CASE(name, rounds)                                                                                             \
    void name(::testing::Random& random);                                                                              \
    const ::testing::Registration registration_of_##name({#name, rounds, name});                                       \
    void name([[maybe_unused]] ::testing::Random& random)

inline char now_running[256]; // for the signal handler below, which may not allocate

inline void report_hang(int) {
    constexpr char text[] = "\nFAILED, it hangs: ";
    (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)!write(STDERR_FILENO, now_running, std::strlen(now_running));
    std::_Exit(1);
}

inline int run(int argc, char** argv) {
    constexpr unsigned kMostSeconds = 240; // for one round, on a machine many times slower than ours
    const std::uint64_t given = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    bool found = false;
    std::signal(SIGALRM, report_hang);
    for (const Case& each : cases) {
        if (argc > 2 && std::strcmp(argv[2], each.name) != 0) continue;
        found = true;
        const auto start = std::chrono::steady_clock::now();
        const unsigned rounds = argc > 1 ? 1 : each.rounds;
        for (unsigned round = 0; round < rounds; ++round) {
            const std::uint64_t seed = argc > 1 ? given : round + 1;
            std::snprintf(now_running, sizeof(now_running), "%s; again: %s %llu %s\n", each.name, argv[0],
                          static_cast<unsigned long long>(seed), each.name);
            alarm(kMostSeconds);
            try {
                Random random(seed);
                each.body(random);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "FAILED: %s\n%s\n", now_running, error.what());
                return 1;
            }
        }
        alarm(0);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        std::printf("%-40s seeds %llu..%llu  %.2f s\n", each.name,
                    static_cast<unsigned long long>(argc > 1 ? given : 1),
                    static_cast<unsigned long long>(argc > 1 ? given : rounds), taken.count());
        std::fflush(stdout);
    }
    if (!found) std::fprintf(stderr, "no case of the name %s\n", argc > 2 ? argv[2] : "");
    return found ? 0 : 1;
}

} // namespace testing

int main(int argc, char** argv) { return testing::run(argc, argv); }
