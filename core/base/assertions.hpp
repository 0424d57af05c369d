// SATRAP_ASSERT states what a function's caller guarantees: a range, an order, a lock that is held, memory that was
// reserved. It is for our own mistakes and never for input, which the bindings refuse with an exception.
// Debug and sanitizer builds define SATRAP_ASSERTIONS (CMakeLists.txt): a condition that does not hold is printed with
// its file and line, and the process aborts. Other builds compile the condition, so that it stays valid C++, but
// evaluate nothing: no instruction of it is in a wheel. Not for kernels_*.cpp, which share no code with other files.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace satrap {

#ifdef SATRAP_ASSERTIONS
inline constexpr bool kAssertions = true;
#else
inline constexpr bool kAssertions = false;
#endif

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_assertion(const char* condition, const char* file, int line) {
    std::fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, condition);
    std::fflush(stderr);
    std::abort();
}

} // namespace satrap

#define SATRAP_ASSERT(...)                                                                                             \
    (::satrap::kAssertions && !(__VA_ARGS__) ? ::satrap::fail_assertion(#__VA_ARGS__, __FILE__, __LINE__) : void())
