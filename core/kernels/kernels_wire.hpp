// Encodes and decodes rows (fp16_codec.hpp); included by each kernels_*.cpp in its own anonymous namespace, after
// kernels_body.hpp. Element-wise with one exact scaling on each side, so all paths give the same bits; a path may bring
// instructions for some elements of a row (halve_blocks), which save 60 % of what the compiler's own SIMD takes. Halves
// are read and written byte-wise: a message may be unaligned.

inline float power_of_two(std::int32_t e) { return as_float(static_cast<std::uint32_t>(e + 127) << 23); }

inline std::int32_t wire_exponent(const float* row, std::uint32_t dim) {
    std::int32_t most = 0;
    for (std::uint32_t i = 0; i < dim; ++i) {
        const auto magnitude = static_cast<std::int32_t>(as_bits(row[i]) & 0x7fffffffU);
        const std::int32_t finite = magnitude < 0x7f800000 ? magnitude : 0;
        most = finite > most ? finite : most;
    }
    const std::int32_t e = (most >> 23) - 127 - 14; // 2^14 <= most * 2^-e < 2^15
    return e < kLeastWireExponent ? kLeastWireExponent : e;
}

// scale: 2^-e of the row's exponent e. Numbers above `most` are no magnitudes of finite values.
inline std::uint16_t wire_half(float value, float scale, std::int32_t most) {
    const std::uint32_t bits = as_bits(value), given = bits & 0x7fffffffU;
    const std::uint32_t scaled = as_bits(as_float(given) * scale); // exact, or far below what rounds to 0
    const std::uint32_t normal = (scaled + 0xfffU + ((scaled >> 13) & 1U) - (112U << 23)) >> 13;
    const std::uint32_t subnormal = as_bits(as_float(scaled) + 0.5f) - 0x3f000000U; // in fp16: multiples of 2^-24
    const auto nearest = static_cast<std::int32_t>(scaled < 0x38800000U ? subnormal : normal);
    const std::int32_t finite = nearest < most ? nearest : most;
    const std::uint32_t quiet = static_cast<std::int32_t>(given) > 0x7f800000 ? 0x7e00U : 0x7c00U;
    const std::uint32_t other = quiet | ((given >> 13) & 0x3ffU);
    const std::uint32_t half =
        static_cast<std::int32_t>(given) < 0x7f800000 ? static_cast<std::uint32_t>(finite) : other;
    return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000U));
}

void to_wire(const float* rows, std::size_t count, std::uint32_t dim, std::int8_t* exponents, std::byte* halves) {
    for (std::size_t r = 0; r < count; ++r, rows += dim, halves += std::size_t{2} * dim) {
        const std::int32_t e = wire_exponent(rows, dim);
        exponents[r] = static_cast<std::int8_t>(e);
        const float scale = power_of_two(-e);
        const bool highest = e == kMostWireExponent; // 2^15 there would be 2^128
        const std::uint32_t done = halve_blocks(rows, dim, scale, highest ? 32752.0f : 32768.0f, halves);
        const std::int32_t most = highest ? 0x77ff : 0x7800; // the same two numbers
#pragma GCC ivdep
        for (std::uint32_t i = done; i < dim; ++i) {
            const std::uint16_t half = wire_half(rows[i], scale, most);
            __builtin_memcpy(halves + std::size_t{2} * i, &half, 2);
        }
    }
}

void from_wire(const std::int8_t* exponents, const std::byte* halves, std::size_t count, std::uint32_t dim,
               float* rows) {
    for (std::size_t r = 0; r < count; ++r, rows += dim, halves += std::size_t{2} * dim) {
        const float scale = power_of_two(exponents[r]);
#pragma GCC ivdep
        for (std::uint32_t i = 0; i < dim; ++i) {
            std::uint16_t half;
            __builtin_memcpy(&half, halves + std::size_t{2} * i, 2);
            rows[i] = decode_float16(half) * scale;
        }
    }
}
