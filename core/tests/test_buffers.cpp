// Memory for one call and again for the next: what a buffer holds after an allocation has failed.
#include "base/buffers.hpp"
#include "testing.hpp"

static bool no_memory = false;

void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    const auto unit = static_cast<std::size_t>(alignment);
    void* memory = no_memory ? nullptr : std::aligned_alloc(unit, (bytes + unit) / unit * unit);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }

using namespace satrap;

namespace {

// A buffer that could not grow is as large as it was, with what it held; the next request makes it grow.
CASE(failed_growth, 20) {
    Buffer<std::uint32_t> buffer;
    std::size_t held = 0;
    for (int i = 0; i < 200; ++i) {
        const std::size_t expected = random.between(1, 5000);
        no_memory = random.chance(0.5);
        try {
            buffer.reserve(expected);
        } catch (const std::bad_alloc&) {
            no_memory = false;
            for (std::size_t k = 0; k < held; ++k) CHECK_EQ(buffer[k], held + k);
            buffer.reserve(expected);
        }
        no_memory = false;
        held = expected;
        for (std::size_t k = 0; k < held; ++k) buffer[k] = static_cast<std::uint32_t>(held + k);
    }
}

} // namespace
