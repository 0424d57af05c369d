// The exceptions that the core throws; bindings.cpp maps each to the class of that name in satrap.errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace satrap {

struct InputError : std::runtime_error { using std::runtime_error::runtime_error; };
struct NonFiniteError : std::runtime_error { using std::runtime_error::runtime_error; };
struct CapacityError : std::runtime_error { using std::runtime_error::runtime_error; };
struct SharedMemoryError : std::runtime_error { using std::runtime_error::runtime_error; };
struct ForkError : std::runtime_error { using std::runtime_error::runtime_error; };
struct MovedError : std::runtime_error { using std::runtime_error::runtime_error; };
struct TicketError : std::runtime_error { using std::runtime_error::runtime_error; };
struct InvariantError : std::logic_error { using std::logic_error::logic_error; };

// Says why a direct table cannot have the id.
inline std::string id_out_of_range(std::uint64_t id, std::uint64_t num_rows) {
    const std::string as_signed =
        id >> 63 == 0 ? "" : " (as a signed number " + std::to_string(static_cast<std::int64_t>(id)) + ")";
    return "id " + std::to_string(id) + as_signed + " is not below num_rows=" + std::to_string(num_rows) +
           "; expected ids from 0 to " + std::to_string(num_rows - 1) +
           ": raise num_rows, or leave it out if ids may be any 64-bit numbers";
}

} // namespace satrap
