// Takes the place of the CUDA runtime and of the kernel library when the tests are linked: every call is written down,
// and any can be made to fail.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/tokenweave.h"

namespace tokenweave::test {

/// Streams of the host. The plugins' own are called side0, side1, ...; events e0, e1, ... in the order of their
/// creation.
inline const auto kMain = reinterpret_cast<cudaStream_t>(0x100);
inline const auto kOther = reinterpret_cast<cudaStream_t>(0x200);

struct FakeGpu {
  std::vector<std::string> calls;  ///< what was queued, for example "record e1 main"
  std::string failing;             ///< the function that fails, for example "cudaEventRecord"
  bool capturing = false;          ///< the host's streams are
  bool work_is_over = true;        ///< what cudaEventQuery says
  int device = 0;
  int compute_major = 9;
  int sm_count = 132;
  TwFabric fabric = TW_FABRIC_MULTIMEM;
  std::string memory_reason;
  alignas(16) uint8_t tensor_memory[1024] = {};  ///< as much of it as the newest group asked for
  const void* copied_from = nullptr;             ///< by the newest copy
  std::function<int64_t(int64_t)> peer_offset;   ///< of the other ranks' tensor, for this rank's; none: the same

  std::vector<TwGroupConfig> groups;  ///< all that were created
  std::vector<int32_t> members;       ///< of the newest group, in MPI_COMM_WORLD
  TwAllReduceRmsNorm op{};            ///< of the newest collective
  TwLaunchConfig launch{};
  TwAllReduceRmsNormTensors tensors{};

  int streams = 0, events = 0, live_groups = 0;  ///< alive
  int created_streams = 0, created_events = 0;

  /// What was queued since the last call.
  std::vector<std::string> take() { return std::exchange(calls, {}); }
};

FakeGpu& gpu();

}  // namespace tokenweave::test
