// The atomic maximum that C++ has only from 2026 on.
#pragma once

#include <atomic>

namespace satrap {

// Raises a number to at least `least`, beside other threads that do.
template <typename Number> void raise_to(std::atomic<Number>& number, Number least) {
    for (Number now = number.load(); now < least && !number.compare_exchange_weak(now, least);) {
    }
}

} // namespace satrap
