// Where NCCL's symmetric kernels reduce: memory that every rank of a communicator has registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "registered_memory.h"

namespace tokenweave::reference {

/// An input and a sum. Lives as long as the process, as its communicator: graphs hold its addresses.
///
/// No rank overwrites what another still reads: NCCL's sum ends on a rank when all ranks have read that rank's input,
/// and writes a rank's sum only once that rank has come to it, behind its stream's earlier work.
class Window {
 public:
  /// Collective. As RegisteredMemory::create; `bytes` of a tensor. TW_RANKS_DISAGREE: they are not equal on all ranks.
  static Status open(const NcclTable& table, NcclComm* comm, Bootstrap& bootstrap, size_t bytes,
                     std::unique_ptr<Window>* window);

  size_t bytes() const { return bytes_; }
  void* input() const { return memory_->data(); }
  void* sum() const { return static_cast<uint8_t*>(memory_->data()) + bytes_; }

 private:
  explicit Window(size_t bytes) : bytes_(bytes) {}

  size_t bytes_;
  std::unique_ptr<RegisteredMemory> memory_;
};

}  // namespace tokenweave::reference
