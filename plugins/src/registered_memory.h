// Memory of NCCL that all ranks of a communicator have registered.
#pragma once

#include <memory>

#include "nccl.h"

namespace tokenweave {

class RegisteredMemory {
 public:
  /// Collective, on the current device. The same error on every rank when any step fails on any rank; then nothing is
  /// kept anywhere. `table` and `*comm` outlive the memory, `bytes` is equal on all ranks.
  ///
  /// Where a rank cannot register, all ranks abort the communicator and set it to null: the others may wait for that
  /// rank inside of NCCL, and learn of it by its closed connections, if at all.
  static Status create(const NcclTable& table, Bootstrap& bootstrap, NcclComm* comm, size_t bytes,
                       NcclWindowFlags flags, std::unique_ptr<RegisteredMemory>* memory);
  /// Needs no other rank.
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  void* data() const { return memory_; }
  NcclWindow window() const { return window_; }

  /// Leaves everything to the end of the process.
  void abandon();

 private:
  RegisteredMemory(const NcclTable& table, NcclComm comm) : table_(table), comm_(comm) {}
  Status open_window(size_t bytes, NcclWindowFlags flags);

  const NcclTable& table_;
  const NcclComm comm_;
  void* memory_ = nullptr;
  NcclWindow window_ = nullptr;
};

}  // namespace tokenweave
