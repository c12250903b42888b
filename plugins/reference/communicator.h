// The ranks that reduce together, as NCCL has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "bootstrap.h"
#include "nccl.h"
#include "status.h"

namespace tokenweave::reference {

class Communicator {
 public:
  /// The process's communicator of the current device and `group` (ranks in MPI_COMM_WORLD, ascending). Collective the
  /// first time: the ranks of the group meet, and all of them fail where one does.
  static Status acquire(const std::vector<int32_t>& group, std::shared_ptr<Communicator>* communicator);

  explicit Communicator(std::vector<int32_t> group) : group_(std::move(group)) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Queues the sum over ranks of `count` elements. Called in the same order on all ranks.
  Status all_reduce(const void* input, void* sum, size_t count, TwDataType dtype, cudaStream_t stream);

 private:
  Status meet();
  Status find_rank(int* rank) const;
  Status start(Bootstrap& bootstrap);

  const std::vector<int32_t> group_;
  std::mutex mutex_;
  NcclTable nccl_{};
  NcclComm comm_ = nullptr;
};

}  // namespace tokenweave::reference
