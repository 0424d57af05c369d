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

// Sixteen partial sums; see RowWiseAdagrad in kernels_body.hpp. total() adds lane j to lane j + 8, then + 4, + 2, + 1.
struct Lanes {
    float sums[16] = {};
    void add_squares(float weight_decay, const float* values, const float* gradients) {
        for (int j = 0; j < 16; ++j) {
            const float g = __builtin_fmaf(weight_decay, values[j], gradients[j]);
            sums[j] = __builtin_fmaf(g, g, sums[j]);
        }
    }
    float total() {
        for (int half = 8; half != 0; half /= 2)
            for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
        return sums[0];
    }
};

#include "kernels_body.hpp"
} // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels{"portable", gather, sum, step, largest, initialise};
    return kernels;
}

} // namespace satrap
