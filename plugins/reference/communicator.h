// The ranks that reduce together, as NCCL has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bootstrap.h"
#include "nccl.h"
#include "status.h"

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

  /// Queues the copies of every rank's `count` elements to all ranks, where they lie in the order of ranks.
  Status all_gather(const void* input, void* gathered, size_t count, TwDataType dtype, cudaStream_t stream);

 private:
  explicit Communicator(std::vector<int32_t> group) : group_(std::move(group)) {}

  Status meet();
  Status find_rank(int* rank) const;
  Status start(Bootstrap& bootstrap);
  template <typename Call>
  Status queue(const char* name, Call call);

  const std::vector<int32_t> group_;
  std::mutex mutex_;             // of all below
  std::optional<Status> state_;  // none: the ranks have not met; else OK, or the first error
  NcclTable nccl_{};
  NcclComm comm_ = nullptr;
};

}  // namespace tokenweave::reference
