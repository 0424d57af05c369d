// The bodies of all kernels (see kernels.hpp), included once by each kernels_*.cpp inside an anonymous namespace, so
// that no code compiled for a newer machine can be linked into another path. Uses no standard library function.
// Every loop over a row's elements is element-wise with ivdep: the compiler's SIMD then equals the scalar loop bit for
// bit, whatever its width. Comments name the formula; torch's order of operations is kept.

inline float as_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t as_bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }

inline float decode_bfloat16(std::uint16_t h) { return as_float(static_cast<std::uint32_t>(h) << 16); }

inline float decode_float16(std::uint16_t h) {
    std::uint32_t magnitude = static_cast<std::uint32_t>(h & 0x7fffU) << 13;
    std::uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f); // exact, subnormals included
    std::uint32_t bits = (h & 0x7c00U) == 0x7c00U ? magnitude | 0x7f800000U : finite;
    return as_float(bits | static_cast<std::uint32_t>(h & 0x8000U) << 16);
}

// Rounding to 16 bits: `noise` of 32 random bits rounds stochastically; kNearest rounds to nearest, ties to even.
struct Nearest {};
inline std::uint32_t bump(std::uint32_t bits, unsigned dropped, Nearest) {
    return (1U << (dropped - 1)) - 1 + ((bits >> dropped) & 1U);
}
inline std::uint32_t bump(std::uint32_t, unsigned dropped, std::uint32_t noise) {
    return noise & ((1U << dropped) - 1);
}
inline bool bump_fraction(float fraction, std::uint32_t n, Nearest) {
    return fraction > 0.5f || (fraction == 0.5f && (n & 1U));
}
inline bool bump_fraction(float fraction, std::uint32_t, std::uint32_t noise) {
    return static_cast<float>(noise >> 8) * 0x1p-24f < fraction;
}

template <typename Noise> inline std::uint16_t encode_bfloat16(float value, Noise noise) {
    std::uint32_t bits = as_bits(value);
    std::uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U); // NaN stays NaN
    if (magnitude >= 0x7f7f0000U) return static_cast<std::uint16_t>(bits >> 16);          // never rounds up to infinity
    return static_cast<std::uint16_t>((bits + bump(bits, 16, noise)) >> 16);
}

template <typename Noise> inline std::uint16_t encode_float16(float value, Noise noise) {
    std::uint32_t bits = as_bits(value);
    std::uint32_t magnitude = bits & 0x7fffffffU;
    std::uint32_t sign = (bits >> 16) & 0x8000U;
    std::uint32_t half;
    if (magnitude > 0x7f800000U) {
        half = 0x7e00U;
    } else if (magnitude >= 0x477fe000U) { // 65504 and above saturate
        half = 0x7bffU;
    } else if (magnitude >= 0x38800000U) { // 2^-14: normal
        std::uint32_t rebased = magnitude - (112U << 23);
        half = (rebased + bump(rebased, 13, noise)) >> 13;
    } else { // subnormal: multiples of 2^-24
        float scaled = as_float(magnitude) * 0x1p24f;
        std::uint32_t n = static_cast<std::uint32_t>(scaled);
        half = n + (bump_fraction(scaled - static_cast<float>(n), n, noise) ? 1U : 0U);
    }
    return static_cast<std::uint16_t>(half | sign);
}

inline void decode(const std::byte* row, Dtype dtype, std::uint32_t dim, float* out) {
    const std::uint16_t* stored = reinterpret_cast<const std::uint16_t*>(row);
    if (dtype == Dtype::bfloat16) {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) out[i] = decode_bfloat16(stored[i]);
    } else {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) out[i] = decode_float16(stored[i]);
    }
}

template <typename NoiseAt>
inline void encode(const float* values, Dtype dtype, std::uint32_t dim, std::byte* row, NoiseAt noise) {
    std::uint16_t* stored = reinterpret_cast<std::uint16_t*>(row);
    if (dtype == Dtype::bfloat16) {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) stored[i] = encode_bfloat16(values[i], noise(i));
    } else {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) stored[i] = encode_float16(values[i], noise(i));
    }
}

inline void copy_floats(float* to, const float* from, std::uint32_t dim) {
#pragma GCC ivdep
    for (std::uint32_t i = 0; i < dim; ++i) to[i] = from[i];
}

SATRAP_ALWAYS_INLINE void prefetch_gradient(const float* row, std::uint32_t dim) {
    for (std::uint32_t i = 0; i < dim && i < 128; i += 16) __builtin_prefetch(row + i);
}

void gather(const std::byte* const* rows, const std::uint32_t* local, float* const* to, std::size_t count,
            std::uint32_t dim, Dtype dtype) {
    if (dtype != Dtype::float32) {
        for (std::size_t e = 0; e < count; ++e) decode(rows[local[e]], dtype, dim, to[e]);
        return;
    }
    if (copy_streaming(rows, local, to, count, dim)) return;
    for (std::size_t e = 0; e < count; ++e) {
        prefetch_values(rows, local, e, count, dim);
        copy_floats(to[e], reinterpret_cast<const float*>(rows[local[e]]), dim);
    }
}

// to = value(i), or to += value(i), for all elements.
template <typename Value> inline void put_or_add(float* to, std::uint32_t dim, bool add, Value value) {
    if (add) {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) to[i] += value(i);
    } else {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) to[i] = value(i);
    }
}

// Calls add(e, sum of the entry's id, whether it has been started) for each entry, in order.
template <typename Add>
inline void sum_entries(const float* const* from, const std::uint32_t* local, std::size_t count, std::uint32_t dim,
                        float* sums, std::uint8_t* started, Add add) {
    constexpr std::size_t kAhead = 24;
    for (std::size_t e = 0; e < count; ++e) {
        if (e + kAhead < count) prefetch_gradient(from[e + kAhead], dim);
        const bool again = started[local[e]] != 0;
        started[local[e]] = 1;
        add(e, sums + static_cast<std::size_t>(local[e]) * dim, again);
    }
}

void sum(const Gradients& gradients, const std::uint32_t* local, std::size_t count, std::uint32_t dim, float* sums,
         std::uint8_t* started) {
    const float* const* from = gradients.from;
    const float scale = gradients.scale;
    if (gradients.factors == nullptr && scale == 1.0f) {
        sum_entries(from, local, count, dim, sums, started, [&](std::size_t e, float* to, bool again) {
            const float* g = from[e];
            put_or_add(to, dim, again, [g](std::uint32_t i) { return g[i]; });
        });
        return;
    }
    sum_entries(from, local, count, dim, sums, started, [&](std::size_t e, float* to, bool again) {
        const float* g = from[e];
        const Factor f = gradients.factors == nullptr ? Factor{} : gradients.factors[e];
        if (f.divisor == 1.0f)
            put_or_add(to, dim, again, [g, scale, f](std::uint32_t i) { return g[i] * scale * f.weight; });
        else
            put_or_add(to, dim, again, [g, scale, f](std::uint32_t i) { return g[i] * scale * f.weight / f.divisor; });
    });
}

// Bags are consecutive and written past the cache: later ones are prefetched in time.
constexpr std::size_t kPoolAhead = 512;

void pool(const float* rows, const float* weights, std::size_t count, std::uint32_t dim, float divisor, float* out) {
    if (count == 0) {
        for (std::uint32_t i = 0; i < dim; ++i) out[i] = 0.0f;
        return;
    }
    for (std::size_t i = 0; i < count * dim; i += 16) __builtin_prefetch(rows + kPoolAhead + i);
    if (weights == nullptr) {
        copy_floats(out, rows, dim);
    } else {
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) out[i] = weights[0] * rows[i];
    }
    for (std::size_t k = 1; k < count; ++k) {
        const float* row = rows + k * dim;
        if (weights == nullptr) {
#pragma GCC ivdep
            for (std::uint32_t i = 0; i < dim; ++i) out[i] += row[i];
        } else {
            const float weight = weights[k];
#pragma GCC ivdep
            for (std::uint32_t i = 0; i < dim; ++i) out[i] = __builtin_fmaf(weight, row[i], out[i]);
        }
    }
    if (divisor == 1.0f) return;
#pragma GCC ivdep
    for (std::uint32_t i = 0; i < dim; ++i) out[i] = out[i] / divisor;
}

std::uint32_t largest(const float* values, std::size_t count) {
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = as_bits(values[i]) & 0x7fffffffU;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

// beta^n by squaring: the same bits everywhere, unlike libm's pow. n is a row's step count, below 2^24.
inline double power(double base, std::uint32_t n) {
    double result = 1.0;
    for (; n != 0; n >>= 1, base *= base)
        if (n & 1U) result *= base;
    return result;
}

struct Sgd {
    const StepScalars& k;
    float lr;
    explicit Sgd(const StepScalars& scalars) : k(scalars), lr(static_cast<float>(scalars.lr)) {}
    void operator()(float* p, float* buffer, const float* gradient) const {
        const std::uint32_t dim = k.dim;
        if (k.momentum == 0.0f && k.weight_decay == 0.0f) { // p = fma(-lr, g, p), bit for bit torch's
#pragma GCC ivdep
            for (std::uint32_t i = 0; i < dim; ++i) p[i] = __builtin_fmaf(-lr, gradient[i], p[i]);
        } else if (k.momentum == 0.0f) {
#pragma GCC ivdep
            for (std::uint32_t i = 0; i < dim; ++i)
                p[i] = __builtin_fmaf(-lr, __builtin_fmaf(k.weight_decay, p[i], gradient[i]), p[i]);
        } else { // the buffer starts as zeros, so torch's special first step is the same formula
#pragma GCC ivdep
            for (std::uint32_t i = 0; i < dim; ++i) {
                float g = __builtin_fmaf(k.weight_decay, p[i], gradient[i]);
                float b = buffer[i] * k.momentum + g;
                buffer[i] = b;
                p[i] = __builtin_fmaf(-lr, k.nesterov ? __builtin_fmaf(k.momentum, b, g) : b, p[i]);
            }
        }
    }
};

struct Adagrad {
    const StepScalars& k;
    float lr;
    explicit Adagrad(const StepScalars& scalars) : k(scalars), lr(static_cast<float>(scalars.lr)) {}
    void operator()(float* p, float* sum, const float* gradient) const {
        const std::uint32_t dim = k.dim;
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) { // s += g^2; p -= lr * (g / (sqrt(s) + eps))
            float g = __builtin_fmaf(k.weight_decay, p[i], gradient[i]);
            float s = sum[i] + g * g;
            sum[i] = s;
            p[i] = __builtin_fmaf(-lr, g / (__builtin_sqrtf(s) + k.eps), p[i]);
        }
    }
};

struct RowWiseAdagrad {
    const StepScalars& k;
    float lr;
    explicit RowWiseAdagrad(const StepScalars& scalars) : k(scalars), lr(static_cast<float>(scalars.lr)) {}
    void operator()(float* p, float* sum, const float* gradient) const {
        const std::uint32_t dim = k.dim;
        Lanes squares; // 16 partial sums, element i in lane i % 16, added up as a tree: the same order on every path
        std::uint32_t i = 0;
        for (; i + 16 <= dim; i += 16) squares.add_squares(k.weight_decay, p + i, gradient + i);
        if (i < dim) {
            float value[16] = {}, g[16] = {};
            for (std::uint32_t j = 0; i + j < dim; ++j) {
                value[j] = p[i + j];
                g[j] = gradient[i + j];
            }
            squares.add_squares(k.weight_decay, value, g); // the zeros add nothing
        }
        const float total = squares.total();
        sum[0] += total / static_cast<float>(dim); // s += mean(g^2)
        const float factor = lr / (__builtin_sqrtf(sum[0]) + k.eps);
#pragma GCC ivdep
        for (std::uint32_t e = 0; e < dim; ++e)
            p[e] = __builtin_fmaf(-factor, __builtin_fmaf(k.weight_decay, p[e], gradient[e]), p[e]);
    }
};

struct Adam {
    const StepScalars& k;
    explicit Adam(const StepScalars& scalars) : k(scalars) {}
    void operator()(float* p, float* state, const float* gradient) const {
        const std::uint32_t dim = k.dim;
        float* average = state;
        float* square = state + dim;
        state[2 * dim] += 1.0f; // the row's own step count
        const std::uint32_t count = static_cast<std::uint32_t>(state[2 * dim]);
        const float step_size = static_cast<float>(k.lr / (1.0 - power(k.beta1, count)));
        const float correction = static_cast<float>(__builtin_sqrt(1.0 - power(k.beta2, count)));
        const float weight = static_cast<float>(1.0 - k.beta1); // torch's lerp: from whichever end is nearer
        const bool from_average = weight < 0.5f;
        const float coefficient = from_average ? weight : weight - 1.0f;
        const float one_minus_beta2 = static_cast<float>(1.0 - k.beta2);
        const float beta2 = static_cast<float>(k.beta2);
        const bool decoupled = k.kind == OptimizerKind::adamw;
        const float shrink = decoupled ? static_cast<float>(1.0 - k.lr * static_cast<double>(k.weight_decay)) : 1.0f;
        const float coupled = decoupled ? 0.0f : k.weight_decay;
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) {
            float value = p[i] * shrink;
            float g = __builtin_fmaf(coupled, value, gradient[i]);
            float m = __builtin_fmaf(coefficient, g - average[i], from_average ? average[i] : g);
            float v = __builtin_fmaf(one_minus_beta2 * g, g, square[i] * beta2);
            average[i] = m;
            square[i] = v;
            p[i] = __builtin_fmaf(-step_size, m / (__builtin_sqrtf(v) / correction + k.eps), value);
        }
    }
};

struct Ftrl {
    const StepScalars& k;
    float inverse_lr;
    explicit Ftrl(const StepScalars& scalars) : k(scalars), inverse_lr(static_cast<float>(1.0 / scalars.lr)) {}
    void operator()(float* p, float* state, const float* gradient) const {
        const std::uint32_t dim = k.dim;
        float* z = state;
        float* n = state + dim;
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) {
            float g = gradient[i];
            float n_new = __builtin_fmaf(g, g, n[i]);
            float root = __builtin_sqrtf(n_new);
            float sigma = (root - __builtin_sqrtf(n[i])) * inverse_lr;
            float z_new = __builtin_fmaf(-sigma, p[i], z[i] + g);
            float magnitude = __builtin_fabsf(z_new);
            float shrunk = __builtin_copysignf(magnitude - k.l1, z_new);
            float value = -shrunk / ((k.ftrl_beta + root) * inverse_lr + k.l2);
            n[i] = n_new;
            z[i] = z_new;
            p[i] = magnitude <= k.l1 ? 0.0f : value;
        }
    }
};

template <typename Optimizer>
void step_rows(const StepScalars& k, const RowStep* steps, std::size_t count, float* scratch) {
    constexpr std::size_t kAhead = 6;
    const Optimizer optimizer(k);
    for (std::size_t r = 0; r < count; ++r) {
        std::byte* row = steps[r].row;
        if (r + kAhead < count)
            for (std::uint32_t at = 0; at < k.row_bytes && at < 1024; at += 64)
                __builtin_prefetch(steps[r + kAhead].row + at, 1);
        float* state = reinterpret_cast<float*>(row + k.value_bytes);
        if (k.dtype == Dtype::float32) {
            optimizer(reinterpret_cast<float*>(row), state, steps[r].gradient);
        } else {
            decode(row, k.dtype, k.dim, scratch);
            optimizer(scratch, state, steps[r].gradient);
            const std::uint64_t key = step_key(row_key(k.table_key, steps[r].id), k.step);
            encode(scratch, k.dtype, k.dim, row, [key](std::uint32_t i) { return draw_element(key, i); });
        }
    }
}

void step(const StepScalars& k, const RowStep* steps, std::size_t count, float* scratch) {
    switch (k.kind) {
    case OptimizerKind::sgd: return step_rows<Sgd>(k, steps, count, scratch);
    case OptimizerKind::adagrad: return step_rows<Adagrad>(k, steps, count, scratch);
    case OptimizerKind::rowwise_adagrad: return step_rows<RowWiseAdagrad>(k, steps, count, scratch);
    case OptimizerKind::adam:
    case OptimizerKind::adamw: return step_rows<Adam>(k, steps, count, scratch);
    case OptimizerKind::ftrl: return step_rows<Ftrl>(k, steps, count, scratch);
    }
}

// The standard normal quantile (Acklam's rational approximation, relative error below 1.2e-9).
inline double normal_quantile(double u) {
    const double q = u < 0.5 ? u : 1.0 - u;
    if (q > 0.02425) {
        const double d = u - 0.5, r = d * d;
        return (((((-3.969683028665376e+01 * r + 2.209460984245205e+02) * r - 2.759285104469687e+02) * r +
                  1.383577518672690e+02) *
                     r -
                 3.066479806614716e+01) *
                    r +
                2.506628277459239e+00) *
               d /
               (((((-5.447609879822406e+01 * r + 1.615858368580409e+02) * r - 1.556989798598866e+02) * r +
                  6.680131188771972e+01) *
                     r -
                 1.328068155288572e+01) *
                    r +
                1.0);
    }
    const double t = __builtin_sqrt(-2.0 * portable_log(q));
    const double x = (((((-7.784894002430293e-03 * t - 3.223964580411365e-01) * t - 2.400758277161838e+00) * t -
                        2.549732539343734e+00) *
                           t +
                       4.374664141464968e+00) *
                          t +
                      2.938163982698783e+00) /
                     ((((7.784695709041462e-03 * t + 3.224671290700398e-01) * t + 2.445134137142996e+00) * t +
                       3.754408661907416e+00) *
                          t +
                      1.0);
    return u < 0.5 ? x : -x;
}

void initialise(const InitialScalars& k, std::uint64_t id, std::byte* row, float* scratch) {
    const std::uint32_t dim = k.dim;
    const std::uint64_t key = row_key(k.table_key, id);
    float* values = k.dtype == Dtype::float32 ? reinterpret_cast<float*>(row) : scratch;
    const float low = static_cast<float>(k.a), span = static_cast<float>(k.b - k.a);
    switch (k.kind) {
    case InitialKind::uniform:
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i)
            values[i] = __builtin_fmaf(
                static_cast<float>(static_cast<std::int32_t>(draw_element(key, i) >> 8)) * 0x1p-24f, span, low);
        break;
    case InitialKind::normal:
        for (std::uint32_t i = 0; i < dim; ++i) {
            const double u = (static_cast<double>(draw_element(key, i)) + 0.5) * 0x1p-32;
            values[i] = static_cast<float>(k.a + k.b * normal_quantile(u));
        }
        break;
    case InitialKind::constant:
        for (std::uint32_t i = 0; i < dim; ++i) values[i] = low;
        break;
    }
    if (k.dtype != Dtype::float32) {
        encode(values, k.dtype, dim, row, [](std::uint32_t) { return Nearest{}; });
        decode(row, k.dtype, dim, scratch);
    }
    float* state = reinterpret_cast<float*>(row + k.value_bytes);
    const bool accumulates = k.optimizer == OptimizerKind::adagrad || k.optimizer == OptimizerKind::rowwise_adagrad;
    const float start = accumulates ? k.initial_accumulator_value : 0.0f;
    for (std::uint32_t i = 0; i < k.state_dim; ++i) state[i] = start;
    if (k.optimizer == OptimizerKind::ftrl) // z such that FTRL's closed form at n = 0 is the initial value
        for (std::uint32_t i = 0; i < dim; ++i)
            state[i] =
                values[i] == 0.0f ? 0.0f : -(values[i] * k.ftrl_decay) - __builtin_copysignf(k.ftrl_l1, values[i]);
}
