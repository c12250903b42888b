// The ranks that reduce together, as the plugins use them: the kernel library's group and what its calls need.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "status.h"
#include "table.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave::trt {

/// One call of the kernel.
struct KernelCall {
  TwAllReduceRmsNorm op{};
  TwAllReduceRmsNormTensors tensors{};
  TableLaunch launch;
};

/// Where and how a call is queued.
struct KernelQueue {
  cudaStream_t stream = nullptr;
  int32_t cluster_size = 1;
  cudaEvent_t started = nullptr;  ///< fires when all CTAs have started; null: not wanted
};

class RankGroup {
 public:
  struct Options {
    int device = 0;
    int32_t rank = 0;            ///< in the group
    std::vector<int32_t> ranks;  ///< of the group, in MPI_COMM_WORLD
    uint64_t config_hash = 0;    ///< compared over ranks
    uint64_t tensor_bytes = 0;   ///< of symmetric memory for tensors
    uint64_t staging_bytes = 0;  ///< of symmetric memory for copies of other tensors
  };

  /// Collective; see twGroupCreate.
  static Status create(const Options& options, std::unique_ptr<RankGroup>* group);

  /// Collective, on the host, for every layer before its first call: do its tensors lie at the same offsets of all
  /// ranks' tensor memory? Once they do not, all later calls of the group copy through staging memory, on all ranks,
  /// and nothing is compared any more. Nothing is either in a group of one, or without tensor memory. `where` names the
  /// layer.
  Status compare_offsets(const KernelCall& call, const std::string& where);

  Status queue(const KernelCall& call, const KernelQueue& queue);

  /// The fault that a kernel reported, the first time that it is asked for; else OK.
  Status take_fault();

  uint8_t* tensor_memory() const { return tensor_memory_; }
  bool holds(uint64_t tensor_bytes, uint64_t staging_bytes) const {
    return tensor_bytes <= tensor_bytes_ && staging_bytes <= staging_bytes_;
  }
  /// Its sizes, for messages.
  std::string sizes() const;

 private:
  struct Destroy {
    void operator()(TwGroup* group) const;
  };

  RankGroup() = default;
  TwFabric pick_fabric(TableFabric wanted);
  /// Bytes from the start of tensor memory; kOutside for tensors that lie elsewhere.
  int64_t offset_of(const void* tensor) const;

  std::unique_ptr<TwGroup, Destroy> group_;
  size_t num_ranks_ = 0;
  bool staged_ = false;  // all calls, because some layer's tensors lie at different offsets
  bool has_multimem_ = false;
  bool warned_of_fallback_ = false;
  bool took_fault_ = false;
  std::string multicast_reason_;  // why there is no multimem
  uint8_t* tensor_memory_ = nullptr;
  size_t tensor_bytes_ = 0;
  uint64_t staging_bytes_ = 0;
};

}  // namespace tokenweave::trt
