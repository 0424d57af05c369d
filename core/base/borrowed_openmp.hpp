// Runs table work on the threads of another library. torch runs its operators on GNU's OpenMP threads, which spin for
// some milliseconds after each, waiting for the next. Table work between two operators, on the core's own threads,
// would share the cores with them: a call of 1.2 ms took 3.6. So a thread that runs torch's operators can let its calls
// into the core run on the same threads; docs/internals/log.md has the figures. Nothing is linked: the library is the
// one that the process has already loaded.
#pragma once

#include <dlfcn.h>

#include <string>

#include "base/errors.hpp"

namespace satrap {

class OpenMp {
  public:
    // The library whose threads this thread's calls use; nullptr: the core's threads.
    static const OpenMp*& borrowed() {
        static thread_local const OpenMp* mine = nullptr;
        return mine;
    }

    // Opens the library at this path, which the process has loaded. It is never closed, like its threads.
    explicit OpenMp(const std::string& path) {
        void* library = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (library == nullptr)
            throw InputError("no library " + path + " is loaded in this process; import torch first");
        find(library, path, "GOMP_parallel", parallel_);
        find(library, path, "omp_get_thread_num", thread_num_);
        find(library, path, "omp_get_num_threads", num_threads_);
    }

    // Calls job(thread, threads) once for each thread of a team of at most num_threads, the caller among them.
    template <typename Job> void run(unsigned num_threads, const Job& job) const {
        struct Call {
            const OpenMp* openmp;
            const Job* job;
        } call{this, &job};
        const auto region = [](void* data) {
            const Call& mine = *static_cast<Call*>(data);
            (*mine.job)(static_cast<unsigned>(mine.openmp->thread_num_()),
                        static_cast<unsigned>(mine.openmp->num_threads_()));
        };
        parallel_(region, &call, num_threads, 0);
    }

  private:
    template <typename Function>
    static void find(void* library, const std::string& path, const char* name, Function*& into) {
        into = reinterpret_cast<Function*>(::dlsym(library, name));
        if (into == nullptr) throw InputError(path + " has no " + name + ": it is not GNU's OpenMP");
    }

    void (*parallel_)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*thread_num_)() = nullptr;
    int (*num_threads_)() = nullptr;
};

} // namespace satrap
