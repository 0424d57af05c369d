// Shared by the bindings' files: the types of arrays that Python may pass, and common checks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/pooled_block.hpp"
#include "engine/engine.hpp"

namespace satrap {

namespace nb = nanobind;
using nb::literals::operator""_a;

void bind_config(nb::module_& m);                           // bindings_config.cpp
void bind_interaction(nb::module_& m);                      // bindings_interaction.cpp
void bind_hash(nb::module_& m);                             // bindings_hash.cpp
void bind_samples(nb::module_& m);                          // bindings_samples.cpp
void bind_messages(nb::module_& m);                         // bindings_messages.cpp
void bind_split(nb::module_& m);                            // bindings_split.cpp
void bind_bags(nb::module_& m, nb::class_<Engine>& engine); // bindings_bags.cpp
void bind_frames(nb::class_<Engine>& engine);               // bindings_frames.cpp
void bind_migration(nb::class_<Engine>& engine);            // bindings_migration.cpp

using Ids = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsIn = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

// Releases the GIL while a function runs: its arguments are converted before, its result after. The function may use
// the memory of arrays, and no other Python object.
using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

// Returns the result of a call that runs without the GIL.
template <typename Call> auto without_gil(Call call) {
    nb::gil_scoped_release release;
    return call();
}

[[noreturn]] inline void refuse(const std::string& message) { throw InputError(message); }

// Names of an enum's values, as Python spells them.
template <typename Choice> using Choices = std::initializer_list<std::pair<const char*, Choice>>;

template <typename Choice> Choice choose(const std::string& field, const std::string& found, Choices<Choice> known) {
    std::string names;
    for (const auto& [name, value] : known) {
        if (found == name) return value;
        names += (names.empty() ? "'" : ", '") + std::string(name) + "'";
    }
    refuse(field + "='" + found + "' is not known; expected one of " + names);
}

inline void require_size(const char* what, std::size_t found, std::size_t expected) {
    if (found != expected)
        refuse(std::string(what) + " holds " + std::to_string(found) + " elements, expected " +
               std::to_string(expected));
}

inline void require_step(const char* what, std::uint64_t step) {
    if (step < 1 || step > kLastStep)
        refuse(std::string(what) + "=" + std::to_string(step) + ", expected 1.." + std::to_string(kLastStep) +
               " (a batch number)");
}

inline void require_tables(std::size_t count) {
    if (count == 0) refuse("no table was given; expected at least one");
}

inline void require_ends(std::int64_t first, std::int64_t last, std::size_t num_ids) {
    if (first != 0 || last != static_cast<std::int64_t>(num_ids))
        refuse("offsets run from " + std::to_string(first) + " to " + std::to_string(last) +
               "; expected 0 to the number of ids, " + std::to_string(num_ids));
}

inline unsigned checked_threads(unsigned num_threads) {
    if (num_threads < 1 || num_threads > 1024)
        refuse("num_threads=" + std::to_string(num_threads) + ", expected 1..1024");
    return num_threads;
}

// The ids of a call are numbered in 32 bits, with room to double.
inline void require_few(std::size_t num_ids) {
    if (num_ids >= 0x40000000U) refuse("a call of " + std::to_string(num_ids) + " ids; at most 2^30-1 fit, split it");
}

// Returns a copy of the offsets at which the ids of tables begin: another thread may write to the caller's array, and
// the checked values must be the ones used.
inline std::vector<std::int64_t> checked_offsets(const Offsets& offsets, std::size_t num_tables, std::size_t num_ids) {
    require_size("offsets", offsets.size(), num_tables + 1);
    std::vector<std::int64_t> at(offsets.data(), offsets.data() + offsets.size());
    require_ends(at.front(), at.back(), num_ids);
    for (std::size_t t = 0; t < num_tables; ++t)
        if (at[t] > at[t + 1])
            refuse("offsets fall from " + std::to_string(at[t]) + " to " + std::to_string(at[t + 1]) + " at table " +
                   std::to_string(t) + "; expected each at least the one before");
    require_few(num_ids);
    return at;
}

// Checks the steps of a lookup. See Engine::lookup for step 0 and oldest_open 0.
inline LookupStep checked_step(std::uint64_t step, std::uint64_t oldest_open, bool train, bool ticket,
                               bool first_epoch) {
    if (train) {
        if (step != 0) require_step("step", step);
        if (oldest_open != 0) require_step("oldest_open", oldest_open);
        if (step != 0 && oldest_open > step)
            refuse("oldest_open=" + std::to_string(oldest_open) + " is after step=" + std::to_string(step) +
                   ", which is open itself");
    } else if (ticket) {
        refuse("a ticket was requested from a lookup with train=False; such a batch is never updated");
    }
    return {train, static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(oldest_open), first_epoch};
}

inline std::size_t checked_table(const Engine& engine, std::size_t t) {
    if (t >= engine.num_tables()) refuse("table " + std::to_string(t) + " of " + std::to_string(engine.num_tables()));
    return t;
}

inline void require_lr(const Engine& engine, std::size_t t, double lr) {
    const TableConfig& config = engine.table(t).config();
    const bool divides = config.optimizer.kind == OptimizerKind::ftrl;
    if (!(lr >= 0.0) || lr > 3.4028234663852886e38 || (divides && lr < 1.1754943508222875e-38))
        refuse("table '" + config.name + "': lr=" + std::to_string(lr) + ", expected a finite number " +
               (divides ? "of at least 1.18e-38" : ">= 0"));
}

template <typename T, std::size_t Rank = 1> using Array = nb::ndarray<nb::numpy, T, nb::ndim<Rank>, nb::c_contig>;

// Returns memory as a numpy array, with which `keep`, the owner of the memory, is destroyed.
template <typename T, std::size_t Rank = 1, typename Owner>
Array<T, Rank> array_over(T* memory, const std::array<std::size_t, Rank>& shape, Owner keep) {
    auto* owner = new Owner(std::move(keep));
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<Owner*>(p); });
    return Array<T, Rank>(memory, Rank, shape.data(), capsule);
}

// Returns a block of the pool as a numpy array; it returns to the pool when the array is freed, maybe after the engine.
template <typename T, std::size_t Rank = 1>
Array<T, Rank> as_array(const std::shared_ptr<BlockPool>& pool, BlockPool::Block block,
                        const std::array<std::size_t, Rank>& shape) {
    if (block.memory == nullptr) block = pool->take(1);
    auto lease = std::make_unique<PooledBlock>(pool, block);
    T* memory = lease->template as<T>();
    return array_over<T, Rank>(memory, shape, std::move(lease));
}

// Returns memory of new[] as a numpy array, which owns it.
template <typename T, std::size_t Rank = 1>
Array<T, Rank> as_array(std::unique_ptr<T[]> memory, const std::array<std::size_t, Rank>& shape) {
    T* data = memory.get();
    return array_over<T, Rank>(data, shape, std::move(memory));
}

template <typename T> std::unique_ptr<T[]> uncleared(std::size_t n) { return std::unique_ptr<T[]>(new T[n]); }

inline Array<std::uint64_t> as_array(Engine& engine, const std::vector<std::uint64_t>& words) {
    const BlockPool::Block block = engine.blocks()->take(words.size() * 8);
    if (!words.empty()) std::memcpy(block.memory, words.data(), words.size() * 8);
    return as_array<std::uint64_t>(engine.blocks(), block, {words.size()});
}

inline Array<float, 2> empty_block(const std::shared_ptr<BlockPool>& pool, std::size_t rows, std::size_t dim) {
    if (dim != 0 && rows > (std::size_t{1} << 46) / dim)
        refuse("a block of " + std::to_string(rows) + " x " + std::to_string(dim) + " floats");
    return as_array<float, 2>(pool, pool->take(rows * dim * sizeof(float)), {rows, dim});
}

} // namespace satrap
