// Asks for a cache line that is read only after many others were asked for.
#pragma once

#include "base/inlining.hpp"

namespace satrap {

#ifdef SATRAP_HAVE_X86
// Whether such lines wait in the second-level cache. The first level of Zen 3 and 4 can wait for few lines at a time:
// on Zen 4, 128 random rows of two lines each took 9 ns a row into the second level, 23 into the first (log, 29
// November 2026).
inline const bool kWaitsInSecondLevel = __builtin_cpu_is("amdfam19h");

SATRAP_ALWAYS_INLINE void prefetch_early(const void* line) {
    if (kWaitsInSecondLevel)
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line, 0, 3);
}
#else
SATRAP_ALWAYS_INLINE void prefetch_early(const void* line) { __builtin_prefetch(line); }
#endif

} // namespace satrap
