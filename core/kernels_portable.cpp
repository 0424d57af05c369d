// The kernels compiled for portable; see kernels.hpp.
#include "hash.hpp"
#include "kernels.hpp"

namespace satrap {
namespace {

#include "kernels_prefetch.hpp"

inline bool copy_streaming(const std::byte* const*, const std::uint32_t*, const std::uint32_t*, std::size_t,
                           std::uint32_t, float*) {
    return false;
}

#include "kernels_body.hpp"
} // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels{"portable", gather, sum, step, largest, initialise};
    return kernels;
}

} // namespace satrap
