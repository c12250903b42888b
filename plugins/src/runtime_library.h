// A shared library that is found when the process runs, not when ours is linked.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace tokenweave {

class RuntimeLibrary {
 public:
  /// Opens the first of `names` that the process has loaded already, else the first that the loader finds. It stays
  /// loaded. TW_UNSUPPORTED says what was tried and why that failed, and ends with `fix`.
  Status open(const std::vector<std::string>& names, const std::string& fix);

  /// TW_UNSUPPORTED when the library does not have the function.
  template <typename Function>
  Status find(const char* symbol, Function* function) const {
    void* found = nullptr;
    TW_RETURN_IF_ERROR(find_address(symbol, &found));
    *function = reinterpret_cast<Function>(found);
    return {};
  }

 private:
  Status find_address(const char* symbol, void** address) const;

  void* handle_ = nullptr;
  std::string name_, fix_;
};

}  // namespace tokenweave
