// Encodes rows, or gradients of rows, for a network that is slower than the encoding: fp16 with a scale for each
// row. The sender chooses it; fp32 is sent unchanged, without this file.
//
// A message is a contiguous, little-endian run of n rows table by table, of which the receiver knows the number and
// the dims:
//   n bytes          int8 exponents of all rows
//   n % 2 bytes      0, so that what follows is aligned if the message is
//   2 bytes each     IEEE 754 binary16, of all values of the first row, then of the second, ...
// A value is half * 2^exponent of its row. For a row whose largest finite magnitude is m > 0:
//   exponent = max(floor(log2 m) - 14, kLeastWireExponent), so 2^14 <= m * 2^-exponent < 2^15 but for m < 2^-112;
//   half = value * 2^-exponent, a product without rounding, rounded to nearest, ties to even. Only where that is 2^128,
//   which no float is, it is rounded down.
// The exponent of a row of zeros is kLeastWireExponent. Zeros keep their sign, infinity is infinity of its sign, a NaN
// is a NaN of its sign; neither changes the exponent. So, for a finite value v of the row, decoded as d:
//   |d - v| <= max(2^-11 |v|, 2^-39 m) <= 2^-11 m, and d == v where fp16 holds v * 2^-exponent.
// Proof. A half of at least 2^-14, a normal one, has 11 bits: it is off by at most half of its last, 2^-11 of what it
// stands for, and rounded down at the top by less, 2^-10 - 2^-23 of at least 2 - 2^-11. A smaller half is a multiple of
// 2^-24, so off by at most 2^-25, which stands for 2^(exponent - 25) <= 2^-39 m; or by nothing where the exponent is
// kLeastWireExponent: floats are multiples of 2^-149, and 2^-149 * 2^126 is one of 2^-24. What is decoded, 11 bits and
// no less than a float's last, is a float: that product does not round either.
//
// A message of another size, or with an exponent that no row has, is refused. The bits depend on neither path nor
// threads. Locks: none; several threads may call at once (ThreadPool).
#pragma once

#include <atomic>
#include <span>

#include "base/float_mode.hpp"
#include "base/thread_pool.hpp"
#include "kernels/kernels.hpp"

namespace satrap {

template <typename Sized> std::vector<std::uint32_t> dims_of(const std::vector<Sized>& tables) {
    std::vector<std::uint32_t> dims;
    for (const Sized& table : tables) dims.push_back(table.dim);
    return dims;
}

class Fp16Codec {
  public:
    // dims: of the tables. Both references must outlive it.
    Fp16Codec(std::vector<std::uint32_t> dims, const Kernels& kernels, ThreadPool& pool)
        : dims_(std::move(dims)), kernels_(kernels), pool_(pool) {}

    // A codec of other rows, with the same kernels and threads.
    Fp16Codec with_dims(std::vector<std::uint32_t> dims) const { return {std::move(dims), kernels_, pool_}; }

    const std::vector<std::uint32_t>& dims() const { return dims_; }
    // offsets: [tables + 1], where each table's rows begin, and where the last one's end. Returns the same in floats.
    std::vector<std::size_t> float_offsets(std::span<const std::int64_t> offsets) const {
        std::vector<std::size_t> before(dims_.size() + 1);
        for (std::size_t t = 0; t < dims_.size(); ++t)
            before[t + 1] = before[t] + static_cast<std::size_t>(offsets[t + 1] - offsets[t]) * dims_[t];
        return before;
    }
    std::size_t num_floats(std::span<const std::int64_t> offsets) const { return float_offsets(offsets).back(); }
    std::size_t num_bytes(std::span<const std::int64_t> offsets) const {
        return first_half(offsets) + 2 * num_floats(offsets);
    }

    // message: num_bytes(); rows: num_floats(), table by table and side by side.
    void encode(std::span<const std::int64_t> offsets, const float* rows, std::byte* message) const {
        auto* exponents = reinterpret_cast<std::int8_t*>(message);
        std::byte* halves = message + first_half(offsets);
        if (offsets.back() % 2 != 0) halves[-1] = std::byte{0};
        for_each_run(offsets, [&](const Run& run) {
            kernels_.to_wire(rows + run.first_float, run.count, run.dim, exponents + run.first,
                             halves + 2 * run.first_float);
        });
    }

    void decode(std::span<const std::int64_t> offsets, const std::byte* message, float* rows) const {
        const auto* exponents = reinterpret_cast<const std::int8_t*>(message);
        const std::byte* halves = message + first_half(offsets);
        std::atomic<bool> known{true};
        for_each_run(offsets, [&](const Run& run) {
            kernels_.from_wire(exponents + run.first, halves + 2 * run.first_float, run.count, run.dim,
                               rows + run.first_float);
            if (first_unknown(exponents + run.first, run.count) != run.count) known.store(false);
        });
        if (known.load()) return;
        const auto n = static_cast<std::size_t>(offsets.back());
        const std::size_t bad = first_unknown(exponents, n);
        throw InputError("row " + std::to_string(bad) + " of " + std::to_string(n) + " has the exponent " +
                         std::to_string(bad < n ? exponents[bad] : 0) + ", expected " +
                         std::to_string(kLeastWireExponent) + ".." + std::to_string(kMostWireExponent) +
                         ": the message is not from a peer of this version");
    }

  private:
    // Rows of one table that follow one another.
    struct Run {
        std::size_t first, count, first_float; // rows of the message, and floats before them
        std::uint32_t dim;
    };

    static std::size_t first_half(std::span<const std::int64_t> offsets) {
        return (static_cast<std::size_t>(offsets.back()) + 1) / 2 * 2;
    }

    static std::size_t first_unknown(const std::int8_t* exponents, std::size_t n) {
        std::size_t r = 0;
        while (r < n && exponents[r] >= kLeastWireExponent && exponents[r] <= kMostWireExponent) ++r;
        return r;
    }

    // Runs on all threads; the split cannot matter, since rows are independent.
    template <typename Work> void for_each_run(std::span<const std::int64_t> offsets, Work work) const {
        constexpr std::size_t kGrain = 256;     // rows
        constexpr std::size_t kAlone = 1 << 15; // floats: for fewer, waking threads costs more than it saves
        const std::vector<std::size_t> before = float_offsets(offsets);
        const auto n = static_cast<std::size_t>(offsets.back());
        std::atomic<std::size_t> next{0};
        auto job = [&](unsigned, unsigned) {
            const FloatMode mode; // each thread may have another mode
            std::size_t t = 0;
            for (std::size_t first; (first = next.fetch_add(kGrain)) < n;) {
                for (const std::size_t end = std::min(first + kGrain, n); first < end;) {
                    while (static_cast<std::size_t>(offsets[t + 1]) <= first) ++t;
                    const auto begin = static_cast<std::size_t>(offsets[t]),
                               last = static_cast<std::size_t>(offsets[t + 1]);
                    const std::size_t count = std::min(end, last) - first;
                    work({first, count, before[t] + (first - begin) * dims_[t], dims_[t]});
                    first += count;
                }
            }
        };
        if (before.back() < kAlone)
            job(0, 1);
        else
            pool_.run(job);
    }

    std::vector<std::uint32_t> dims_;
    const Kernels& kernels_;
    ThreadPool& pool_;
};

} // namespace satrap
