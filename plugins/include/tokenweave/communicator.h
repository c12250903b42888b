/// C++ over tokenweave.h: the ranks of a group, as an object. Link libtokenweave.so.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/status.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave {

struct CommunicatorOptions {
  int32_t rank = 0;
  int32_t size = 1;
  int32_t device = 0;
  /// Where the ranks meet, on one machine: "/path" of a socket, or "@name" of one without a file. Empty:
  /// TOKENWEAVE_BOOTSTRAP, else MPI when it is initialised.
  std::string bootstrap;
  std::vector<int32_t> mpi_ranks;        ///< of the group in MPI_COMM_WORLD; empty: 0 to size - 1
  bool allow_multicast = true;           ///< NVSwitch multicast where it can be had
  std::chrono::milliseconds timeout{0};  ///< of one wait for a rank; 0: TOKENWEAVE_TIMEOUT_MS, else 30 s
  uint64_t tensor_bytes = 0;             ///< symmetric memory for tensors
  uint64_t staging_bytes = 0;            ///< symmetric memory for the copies of tensors that lie elsewhere
  uint64_t config_hash = 0;              ///< of whatever must be equal on all ranks
};

/// A TwGroup. What is collective there is collective here, the destructor too: destroy it on all ranks.
class Communicator {
 public:
  /// Collective. Meets the other ranks and makes the symmetric memory.
  static Result<Communicator> create(const CommunicatorOptions& options) {
    TwGroupConfig config{};
    config.struct_bytes = sizeof config;
    config.rank = options.rank;
    config.size = options.size;
    config.device = options.device;
    config.allow_multicast = options.allow_multicast ? 1 : 0;
    config.timeout_ms = static_cast<uint32_t>(options.timeout.count());
    config.tensor_bytes = options.tensor_bytes;
    config.staging_bytes = options.staging_bytes;
    config.config_hash = options.config_hash;
    config.bootstrap = options.bootstrap.empty() ? nullptr : options.bootstrap.c_str();
    if (!options.mpi_ranks.empty() && options.mpi_ranks.size() != static_cast<size_t>(options.size)) {
      return error(TW_INVALID_ARGUMENT, "mpi_ranks has " + std::to_string(options.mpi_ranks.size()) +
                                            " ranks, size is " + std::to_string(options.size) +
                                            ". Fix: give one rank of MPI_COMM_WORLD for each rank of the group");
    }
    config.mpi_ranks = options.mpi_ranks.empty() ? nullptr : options.mpi_ranks.data();
    TwGroup* group = nullptr;
    TW_RETURN_IF_ERROR(call([&](TwStatus* status) { return twGroupCreate(&config, &group, status); }));
    return Communicator(group);
  }

  /// From now on this object destroys the group.
  static Communicator adopt(TwGroup* group) { return Communicator(group); }

  Communicator(Communicator&& other) noexcept : group_(other.release()) {}
  Communicator& operator=(Communicator&& other) noexcept {
    if (this != &other) {
      static_cast<void>(destroy());
      group_ = other.release();
    }
    return *this;
  }
  ~Communicator() { static_cast<void>(destroy()); }

  /// Collective; waits for the device. A second time does nothing. The status is advisory: all is freed whatever it is.
  Status destroy() {
    TwGroup* const group = release();
    return call([&](TwStatus* status) { return twGroupDestroy(group, status); });
  }

  TwGroup* get() const { return group_; }
  TwGroup* release() { return std::exchange(group_, nullptr); }

  Result<TwGroupInfo> info() const {
    TwGroupInfo info{};
    info.struct_bytes = sizeof info;
    TW_RETURN_IF_ERROR(call([&](TwStatus* status) { return twGroupGetInfo(group_, &info, status); }));
    return info;
  }

  struct Memory {
    void* data;
    size_t bytes;
  };

  /// Symmetric memory of a rank, as this process's device addresses it.
  Result<Memory> tensor_memory(int32_t rank) const {
    Memory memory{};
    TW_RETURN_IF_ERROR(
        call([&](TwStatus* status) { return twGroupTensorMemory(group_, rank, &memory.data, &memory.bytes, status); }));
    return memory;
  }

  /// Collective, on the host. `bytes` of every rank in `all`, in the order of ranks.
  Status all_gather(const void* mine, void* all, size_t bytes) {
    return call([&](TwStatus* status) { return twGroupAllGather(group_, mine, all, bytes, status); });
  }

  /// Whether a kernel gave up so far; ask after synchronising a stream.
  Status check() const {
    return call([&](TwStatus* status) { return twGroupCheck(group_, status); });
  }

  /// Collective. Queues normed = RMSNorm(sum over ranks of input + bias + residual) on `stream`, a cudaStream_t.
  Status all_reduce_rms_norm(const TwAllReduceRmsNorm& op, const TwAllReduceRmsNormTensors& tensors, void* stream,
                             const TwLaunchConfig* launch = nullptr) {
    return call([&](TwStatus* status) { return twAllReduceRmsNorm(group_, &op, &tensors, launch, stream, status); });
  }

 private:
  explicit Communicator(TwGroup* group) : group_(group) {}

  template <typename Function>
  static Status call(Function function) {
    TwStatus status{};
    const TwCode code = function(&status);
    return {code, status.message};
  }

  TwGroup* group_ = nullptr;
};

}  // namespace tokenweave
