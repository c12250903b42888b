#include "env.h"

#include <cstdlib>

namespace tokenweave {
namespace {

constexpr int32_t kDefaultTimeoutMs = 30000;

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// `otherwise` for what is not the digits of an int32_t.
int32_t number(const std::string& digits, int32_t otherwise) {
  if (digits.empty() || digits.size() >= 10 || digits.find_first_not_of("0123456789") != std::string::npos) {
    return otherwise;
  }
  return static_cast<int32_t>(std::strtol(digits.c_str(), nullptr, 10));
}

}  // namespace

Environment environment() {
  const int32_t timeout = number(text("TOKENWEAVE_TIMEOUT_MS"), kDefaultTimeoutMs);
  Environment env{text("TOKENWEAVE_BOOTSTRAP"),
                  static_cast<uint32_t>(timeout > 0 ? timeout : kDefaultTimeoutMs),
                  text("TOKENWEAVE_MULTICAST") != "0" && text("NCCL_NVLS_ENABLE") != "0",
                  text("TOKENWEAVE_SYMMETRIC_MEMORY"),
                  number(text("TOKENWEAVE_RANK"), -1),
                  text("IS_BUILDING") == "1",
                  text("TOKENWEAVE_TRT_LIBRARY")};
  if (env.symmetric_memory.empty()) env.symmetric_memory = "vmm";
  return env;
}

}  // namespace tokenweave
