// A shared-memory file of a test, removed when the test ends: on tmpfs where there is one, else among temporary files.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "calls.hpp"

namespace testing {

class SharedFile {
  public:
    SharedFile() : path(new_path()) {}
    SharedFile(const SharedFile&) = delete;
    SharedFile& operator=(const SharedFile&) = delete;
    ~SharedFile() { ::unlink(path.c_str()); }

    std::unique_ptr<satrap::Engine> create(const std::vector<satrap::TableConfig>& configs,
                                           unsigned threads = 1) const {
        const std::string blob = "the blob";
        return std::make_unique<satrap::Engine>(
            configs, options(threads), satrap::SharedArena::create(path, configs.size(), {blob.data(), blob.size()}));
    }
    std::unique_ptr<satrap::Engine> create_anew(const std::vector<satrap::TableConfig>& configs) const {
        ::unlink(path.c_str());
        return create(configs);
    }
    std::unique_ptr<satrap::Engine> attach(const std::vector<satrap::TableConfig>& configs,
                                           unsigned threads = 1) const {
        return satrap::Engine::attach(configs, options(threads), satrap::SharedArena::attach(path, configs.size()));
    }

    const std::string path;

  private:
    static satrap::Options options(unsigned threads) { return {kSeed, threads, "auto"}; }
    static std::string new_path() {
        static std::atomic<unsigned> last{0};
        const std::filesystem::path tmpfs = "/dev/shm";
        const bool usable = ::access(tmpfs.c_str(), W_OK) == 0;
        const std::string name = "satrap-test-" + std::to_string(::getpid()) + "-" + std::to_string(++last);
        return ((usable ? tmpfs : std::filesystem::temp_directory_path()) / name).string();
    }
};

} // namespace testing
