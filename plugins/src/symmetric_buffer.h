// Memory of equal size on every rank that all ranks' kernels can address.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "multicast.h"
#include "nccl_memory.h"
#include "vmm.h"

namespace tokenweave {

class SymmetricBuffer {
 public:
  struct Options {
    int device = 0;
    size_t bytes = 0;  ///< rounded up to the driver's granularity
    bool allow_multicast = true;
    /// Null on all ranks or on none. Not null: NCCL owns the memory where it can. Outlives the buffer.
    const NcclTable* nccl = nullptr;
  };

  /// Collective. The same error on every rank when any step fails on any rank; then nothing is kept anywhere. A
  /// multicast address is an extra: when it can't be had, as where two ranks share a GPU, all ranks go without, and
  /// multicast_reason() says why. Where NCCL cannot own the memory, on all ranks the driver's serves, and nccl_reason()
  /// says why.
  static Status create(const DriverTable& driver, Bootstrap& bootstrap, const Options& options,
                       std::unique_ptr<SymmetricBuffer>* buffer);

  /// The rank's buffer, as this rank's device addresses it.
  uint8_t* of_rank(int rank) const { return nccl_ ? nccl_->of_rank(rank) : mappings_[rank].get(); }
  /// Null when multicast is not set up.
  uint8_t* multicast() const { return nccl_ ? nccl_->multicast() : multicast_ ? multicast_->address() : nullptr; }
  const std::string& multicast_reason() const { return multicast_reason_; }
  bool is_nccl() const { return nccl_ != nullptr; }
  /// Why the memory is the driver's though Options.nccl is given; else empty.
  const std::string& nccl_reason() const { return nccl_reason_; }

  /// For a device that is lost: the destructor then calls nothing that might not return.
  void abandon() {
    if (nccl_) nccl_->abandon();
  }

 private:
  Status create_by_nccl(const NcclTable& nccl, Bootstrap& bootstrap, size_t bytes);

  std::unique_ptr<NcclMemory> nccl_;  // else the driver's:
  MemoryHandle memory_;
  std::vector<Mapping> mappings_;
  std::unique_ptr<Multicast> multicast_;  // goes first: it is bound to memory_
  std::string multicast_reason_;
  std::string nccl_reason_;
};

}  // namespace tokenweave
