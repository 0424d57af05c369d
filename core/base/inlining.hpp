// For functions that ask for cache lines and do nothing else, of which GCC takes a call for one without effect and
// leaves it out unless it is inlined; and for short ones that a step calls several times for each id, which GCC 12 may
// not inline where they have many callers.
#pragma once

#define SATRAP_ALWAYS_INLINE [[gnu::always_inline]] inline
