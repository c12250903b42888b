// What one process holds of a tensor-parallel group: symmetric memory, fault record, limits of its device.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/kernel_args.h"
#include "cuda_status.h"
#include "driver.h"
#include "launch_plan.h"
#include "symmetric_buffer.h"

namespace tokenweave {

struct DeviceFree {
  void operator()(void* p) const;
};
struct HostFree {
  void operator()(void* p) const;
};

/// Makes `device` current until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

class Group {
 public:
  /// Collective, see twGroupCreate.
  static Status create(const TwGroupConfig& config, std::unique_ptr<Group>* group);
  /// Collective, see twGroupDestroy.
  Status leave();

  /// Collective, see twGroupAllGather.
  Status all_gather(const void* mine, void* all, size_t bytes);

  /// The fault that a kernel reported, if any.
  Status check() const;

  bool loopback() const { return config_.loopback != 0; }
  int rank() const { return loopback() ? 0 : config_.rank; }
  int size() const { return config_.size; }
  int local_ranks() const { return loopback() ? config_.size : 1; }
  int device() const { return config_.device; }
  bool has_multicast() const { return multicast() != nullptr; }
  const std::string& multicast_reason() const { return multicast_reason_; }
  TwMemory memory() const { return symmetric_ && symmetric_->is_nccl() ? TW_MEMORY_NCCL : TW_MEMORY_CUDA; }
  const std::string& memory_reason() const { return memory_reason_; }
  const DeviceLimits& limits() const { return limits_; }

  /// Every rank's buffer: the signal pad, the mailbox, tensor memory, staging memory.
  uint8_t* buffer(int rank) const { return buffers_[rank]; }
  uint8_t* multicast() const { return symmetric_ ? symmetric_->multicast() : nullptr; }
  size_t tensor_offset() const { return kTensorOffset; }
  size_t tensor_bytes() const { return config_.tensor_bytes; }
  size_t staging_offset() const { return tensor_offset() + config_.tensor_bytes; }
  size_t staging_bytes() const { return config_.staging_bytes; }

  /// Fills the fields of `args` that are the same in every call.
  void fill(KernelArgs* args) const;

 private:
  explicit Group(const TwGroupConfig& config) : config_(config) {}
  Status prepare_device();
  Status make_loopback_buffers();
  Status make_symmetric_buffers(Bootstrap& bootstrap, bool nccl_asked);
  size_t buffer_bytes() const { return staging_offset() + config_.staging_bytes; }

  TwGroupConfig config_;  // with the defaults filled in; its pointers are not used after create()
  std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<DriverTable> driver_;
  NcclTable nccl_{};
  DeviceLimits limits_;
  std::unique_ptr<FaultRecord, HostFree> fault_;
  std::unique_ptr<uint32_t, DeviceFree> fault_flag_;
  std::vector<std::unique_ptr<uint8_t, DeviceFree>> loopback_buffers_;
  std::unique_ptr<SymmetricBuffer> symmetric_;
  std::vector<uint8_t*> buffers_;
  std::string multicast_reason_;
  std::string memory_reason_;
};

/// Compares what the ranks were given; TW_RANKS_DISAGREE with the first difference, the same text on every rank.
Status compare_configurations(Bootstrap& bootstrap, const TwGroupConfig& config);

/// Loads every kernel and allows it the device's shared memory: lazy loading could block behind a kernel that spins.
Status prepare_kernels(int size, const DeviceLimits& limits);

}  // namespace tokenweave
