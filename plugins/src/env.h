// Every environment variable that the library reads.
#pragma once

#include <cstdint>
#include <string>

namespace tokenweave {

struct Environment {
  std::string bootstrap;  ///< TOKENWEAVE_BOOTSTRAP: "/path" or "@name" of the socket where the ranks meet
  uint32_t timeout_ms;    ///< TOKENWEAVE_TIMEOUT_MS: longest wait for another rank; 30000 when unset or not a number
  /// False when TOKENWEAVE_MULTICAST or NCCL_NVLS_ENABLE is "0": who switched NVSwitch multicast off for NCCL means us
  /// too.
  bool multicast;
  std::string symmetric_memory;  ///< TOKENWEAVE_SYMMETRIC_MEMORY: who owns it, "vmm" (when unset) or "nccl"
  int32_t rank;   ///< TOKENWEAVE_RANK: this process's rank where MPI does not say it; -1 when unset or not a number
  bool building;  ///< IS_BUILDING is "1": TensorRT-LLM says so while it builds an engine
  std::string trt_library;  ///< TOKENWEAVE_TRT_LIBRARY: the plugins that the library for LD_PRELOAD loads
};

/// Reads the environment anew: a host may change it between two groups.
Environment environment();

}  // namespace tokenweave
