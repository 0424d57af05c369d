// The process that a thing was made in. A fork has a copy of the memory and nothing of the threads: pool threads are
// gone, a lock that another thread held is held for ever, and a shared-memory file is written by two. So whatever has
// threads, locks or a file is good at home only.
#pragma once

#include <unistd.h>

#include <string>

#include "base/errors.hpp"

namespace satrap {

class ForkGuard {
  public:
    bool is_same_process() const { return ::getpid() == process_; }
    void require_same_process() const {
        if (!is_same_process())
            throw ForkError("this store was made in process " + std::to_string(process_) + " and this is its fork " +
                            std::to_string(::getpid()) + ": open it here, or start workers with 'spawn'");
    }

  private:
    const pid_t process_ = ::getpid();
};

} // namespace satrap
