// The exceptions that the core throws; bindings.cpp maps each to the class of that name in satrap.errors.
#pragma once

#include <stdexcept>

namespace satrap {

struct InputError : std::runtime_error { using std::runtime_error::runtime_error; };
struct NonFiniteError : std::runtime_error { using std::runtime_error::runtime_error; };
struct CapacityError : std::runtime_error { using std::runtime_error::runtime_error; };
struct SharedMemoryError : std::runtime_error { using std::runtime_error::runtime_error; };
struct ForkError : std::runtime_error { using std::runtime_error::runtime_error; };
struct MovedError : std::runtime_error { using std::runtime_error::runtime_error; };
struct TicketError : std::runtime_error { using std::runtime_error::runtime_error; };
struct InvariantError : std::logic_error { using std::logic_error::logic_error; };

} // namespace satrap
