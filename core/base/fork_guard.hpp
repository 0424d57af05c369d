// Refuses the use of an object in a fork of the process that created it. A fork has a copy of the memory but not of the
// threads: pool threads do not exist, a lock that another thread held is held forever, and a shared-memory file would
// have two writers. So an object with threads, locks or a file may be used only by the process that created it.
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
            throw ForkError("this store was created in process " + std::to_string(process_) + " and this is its fork " +
                            std::to_string(::getpid()) + ": open it here, or start workers with 'spawn'");
    }

  private:
    const pid_t process_ = ::getpid();
};

} // namespace satrap
