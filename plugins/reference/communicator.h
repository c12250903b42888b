// The ranks that reduce together, as NCCL has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bootstrap.h"
#include "nccl.h"
#include "status.h"
#include "window.h"

namespace tokenweave::reference {

/// Sorts a field 'group', as acquire takes it: the ranks count in that order. Refused: a rank that stands in it twice.
Status sort_group(std::vector<int32_t>* group);

/// Lives as long as the process. ncclCommDestroy is collective and waits for captured graphs that hold the
/// communicator, and no rank knows when the others, or its own graphs, let go of theirs; and were some ranks to drop it
/// and others not, the ranks would disagree on whether they have to meet.
class Communicator {
 public:
  /// The process's communicator of the current device and `group` (ranks in MPI_COMM_WORLD, ascending). Collective the
  /// first time: the ranks of the group meet, and all of them fail where one does. Never afterwards: a communicator
  /// that failed, then or later, is failed for good, and its first error is returned at once.
  static Status acquire(const std::vector<int32_t>& group, Communicator** communicator);

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Queues the sum over ranks of `count` elements. Threads may call this and all_gather at the same time, but the
  /// caller sees to it that all ranks queue the same in the same order. After an error, the call's or one that NCCL met
  /// since, all calls fail with it: this rank is out of step with the others.
  Status all_reduce(const void* input, void* sum, size_t count, TwDataType dtype, cudaStream_t stream);

  /// Collective, outside of steps: memory for tensors of up to `bytes` in which sum_in_window reduces. There may be one
  /// already. The process's: the caller sees to it that calls of one stream at a time use it, and graphs of one. Where
  /// NCCL cannot register it, the communicator fails for good.
  Status window(size_t bytes, const Window** window);

  /// Queues a copy of the input into a window and the sum there, by NCCL's kernels for registered memory.
  Status sum_in_window(const Window& window, const void* input, size_t count, TwDataType dtype, cudaStream_t stream);

  /// Queues the copies of every rank's `count` elements to all ranks, where they lie in the order of ranks.
  Status all_gather(const void* input, void* gathered, size_t count, TwDataType dtype, cudaStream_t stream);

 private:
  explicit Communicator(std::vector<int32_t> group) : group_(std::move(group)) {}

  Status meet();
  Status find_rank(int* rank) const;
  /// Calls `call`, which returns a Status, unless something failed before; its error is kept.
  template <typename Call>
  Status queue(Call call);
  /// Inside of queue().
  Status queue_sum(const void* input, void* sum, size_t count, TwDataType dtype, cudaStream_t stream);

  const std::vector<int32_t> group_;
  std::mutex mutex_;             // of all below
  std::optional<Status> state_;  // none: the ranks have not met; else OK, or the first error
  NcclTable nccl_{};
  NcclComm comm_ = nullptr;
  std::unique_ptr<Bootstrap> bootstrap_;
  std::vector<std::unique_ptr<Window>> windows_;
};

}  // namespace tokenweave::reference
