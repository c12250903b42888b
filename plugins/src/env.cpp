#include "env.h"

#include <cstdlib>

namespace tokenweave {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 30000;

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Environment environment() {
  Environment env{text("TOKENWEAVE_BOOTSTRAP"),
                  kDefaultTimeoutMs,
                  text("TOKENWEAVE_MULTICAST") != "0" && text("NCCL_NVLS_ENABLE") != "0",
                  text("TOKENWEAVE_SYMMETRIC_MEMORY"),
                  -1,
                  text("IS_BUILDING") == "1",
                  text("TOKENWEAVE_TRT_LIBRARY")};
  if (env.symmetric_memory.empty()) env.symmetric_memory = "vmm";
  if (const auto timeout = std::strtoul(text("TOKENWEAVE_TIMEOUT_MS").c_str(), nullptr, 10); timeout > 0) {
    env.timeout_ms = static_cast<uint32_t>(timeout);
  }
  const std::string rank = text("TOKENWEAVE_RANK");
  if (!rank.empty() && rank.size() < 10 && rank.find_first_not_of("0123456789") == std::string::npos) {
    env.rank = static_cast<int32_t>(std::strtol(rank.c_str(), nullptr, 10));
  }
  return env;
}

}  // namespace tokenweave
