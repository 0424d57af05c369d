// Sets how the calling thread rounds, and whether it flushes subnormal numbers to 0: while a FloatMode lives, as IEEE
// 754 specifies, to nearest and with subnormals; then as before. A caller may have set another mode, for its thread and
// for those that it starts (torch.set_flush_denormal); results would then depend on which thread computes them. All
// code that rounds runs under one, and all kernels except `largest` do. It costs a read of a register.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace satrap {

class FloatMode {
  public:
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

#if defined(__SSE2__)
    FloatMode() : callers_(_mm_getcsr()) {
        if (is_other()) _mm_setcsr(kDefault);
    }
    ~FloatMode() {
        if (is_other()) _mm_setcsr(callers_);
    }

  private:
    static constexpr unsigned kDefault = 0x1f80; // to nearest, nothing flushed, every exception masked
    static constexpr unsigned kFlags = 0x3f;     // the exceptions that have occurred, which are not part of the mode

    bool is_other() const { return (callers_ & ~kFlags) != kDefault; }

    unsigned callers_;
#else
    FloatMode() {}
    ~FloatMode() {}
#endif
};

} // namespace satrap
