// The kernels compiled for portable; see kernels.hpp.
#include "base/hash.hpp"
#include "base/inlining.hpp"
#include "kernels/kernels.hpp"

namespace satrap {
namespace {

#include "kernels/kernels_prefetch.hpp"

inline bool copy_streaming(const std::byte* const*, const std::uint32_t*, float* const*, std::size_t, std::uint32_t) {
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

struct Sixteen {
    float v[16] = {};
    static Sixteen load(const float* from) {
        Sixteen lanes;
        for (int j = 0; j < 16; ++j) lanes.v[j] = from[j];
        return lanes;
    }
    static Sixteen broadcast(const float* from) {
        Sixteen lanes;
        for (int j = 0; j < 16; ++j) lanes.v[j] = *from;
        return lanes;
    }
    void plus_product(const Sixteen& a, const Sixteen& b) {
        for (int j = 0; j < 16; ++j) v[j] += a.v[j] * b.v[j];
    }
    void store(float* to) const {
        for (int j = 0; j < 16; ++j) to[j] = v[j];
    }
};
constexpr std::uint32_t kBlock = 2;

inline std::uint32_t halve_blocks(const float*, std::uint32_t, float, float, std::byte*) { return 0; }

#include "kernels/kernels_body.hpp"
#include "kernels/kernels_dots.hpp"
#include "kernels/kernels_wire.hpp"
} // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels{"portable", gather, sum,       pool,    step,     largest,
                                     initialise, dots,   dots_back, to_wire, from_wire};
    return kernels;
}

} // namespace satrap
