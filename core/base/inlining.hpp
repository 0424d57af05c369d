// For functions that ask for cache lines and do nothing else: GCC takes a call of one for a call without effect, and
// leaves it out unless it is inlined.
#pragma once

#define SATRAP_ALWAYS_INLINE [[gnu::always_inline]] inline
