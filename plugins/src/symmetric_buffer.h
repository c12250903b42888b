// Memory of equal size on every rank that all ranks' kernels can address.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "multicast.h"
#include "vmm.h"

namespace tokenweave {

class SymmetricBuffer {
 public:
  struct Options {
    int device = 0;
    size_t bytes = 0;  ///< rounded up to the driver's granularity
    bool allow_multicast = true;
  };

  /// Collective. The same error on every rank when any step fails on any rank; then nothing is kept anywhere. A
  /// multicast address is an extra: when it can't be had, all ranks go without, and multicast_reason() says why.
  static Status create(const DriverTable& driver, Bootstrap& bootstrap, const Options& options,
                       std::unique_ptr<SymmetricBuffer>* buffer);

  /// The rank's buffer, as this rank's device addresses it.
  uint8_t* of_rank(int rank) const { return mappings_[rank].get(); }
  /// Null when multicast is not set up.
  uint8_t* multicast() const { return multicast_ ? multicast_->address() : nullptr; }
  const std::string& multicast_reason() const { return multicast_reason_; }

 private:
  MemoryHandle memory_;
  std::vector<Mapping> mappings_;
  std::unique_ptr<Multicast> multicast_;  // goes first: it is bound to memory_
  std::string multicast_reason_;
};

}  // namespace tokenweave
