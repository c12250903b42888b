// Where NCCL's symmetric kernels reduce: memory that every rank of a communicator has registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bootstrap.h"
#include "nccl.h"
#include "status.h"

namespace tokenweave::reference {

/// An input and a sum. Lives as long as the process, as its communicator: graphs hold its addresses.
class Window {
 public:
  /// Collective. The same error on every rank when any step fails on any rank; then nothing is kept anywhere. `bytes`
  /// of a tensor, equal on all ranks. TW_UNSUPPORTED for an NCCL before 2.27.
  static Status open(const NcclTable& table, NcclComm comm, Bootstrap& bootstrap, size_t bytes,
                     std::unique_ptr<Window>* window);

  size_t bytes() const { return bytes_; }
  void* input() const { return memory_; }
  void* sum() const { return static_cast<uint8_t*>(memory_) + bytes_; }

 private:
  explicit Window(size_t bytes) : bytes_(bytes) {}

  size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace tokenweave::reference
