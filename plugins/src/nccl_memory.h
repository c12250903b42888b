// Symmetric memory that NCCL owns: a window of a communicator of the group's own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nccl.h"
#include "registered_memory.h"

namespace tokenweave {

/// Collective. OK where all ranks ask for NCCL's memory and have a library that can give it; else the first rank's
/// reason, the same on every rank.
Status load_nccl_memory(Bootstrap& bootstrap, bool asked, NcclTable* table,
                        const std::vector<std::string>& names = {"libnccl.so.2"});

class NcclMemory {
 public:
  /// Collective, on the current device. The same error on every rank when any step fails on any rank; then nothing is
  /// kept anywhere. `table` outlives the memory, `bytes` is equal on all ranks.
  static Status create(const NcclTable& table, Bootstrap& bootstrap, size_t bytes, std::unique_ptr<NcclMemory>* memory);
  ~NcclMemory();

  /// Collective. Sets NVSwitch multicast up, where NCCL has it on all ranks; else their first reason, and the memory
  /// serves without.
  Status set_up_multicast(Bootstrap& bootstrap);

  /// Leaves everything to the end of the process: with a device that is lost NCCL's functions might not return.
  void abandon();

  /// As this rank's device addresses it.
  uint8_t* of_rank(int rank) const { return addresses_[rank]; }
  /// Null when multicast is not set up.
  uint8_t* multicast() const { return multicast_; }

 private:
  explicit NcclMemory(const NcclTable& table) : table_(table) {}
  Status find_addresses(int rank, int size);

  const NcclTable& table_;
  NcclComm comm_ = nullptr;
  std::unique_ptr<RegisteredMemory> registered_;  // of a whole object never null
  std::vector<uint8_t*> addresses_;
  uint8_t* multicast_ = nullptr;
};

}  // namespace tokenweave
