#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "bootstrap.h"
#include "env.h"

namespace tokenweave {
namespace {

// Open MPI's handles are addresses of these symbols (its mpi.h: OMPI_PREDEFINED_GLOBAL), its functions take them as
// such.
constexpr int kTag = 20875;
constexpr int kSuccess = 0;
constexpr std::chrono::milliseconds kProbeEvery{1};

template <typename Function>
Function symbol(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

bool mpi_is_initialized() {
  const auto initialized = symbol<int (*)(int*)>("MPI_Initialized");
  int result = 0;
  return initialized != nullptr && initialized(&result) == kSuccess && result != 0;
}

void* world_communicator() { return dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world"); }

/// Until rank `from` of MPI_COMM_WORLD has sent a message, or the time is over.
Status wait_for_message(int from, std::chrono::milliseconds timeout) {
  const auto probe = symbol<int (*)(int, int, void*, int*, void*)>("MPI_Iprobe");
  if (probe == nullptr) return error(TW_UNSUPPORTED, "the MPI library in this process has no MPI_Iprobe");
  const auto until = std::chrono::steady_clock::now() + timeout;
  for (int there = 0;;) {
    if (probe(from, kTag, world_communicator(), &there, nullptr) != kSuccess) {
      return error(TW_BOOTSTRAP_ERROR, "MPI_Iprobe for rank 0 failed");
    }
    if (there != 0) return {};
    if (std::chrono::steady_clock::now() >= until) {
      return error(TW_BOOTSTRAP_ERROR, "bootstrap by MPI: missing rank 0 (rank " + std::to_string(from) +
                                           " of MPI_COMM_WORLD): it did not come in " +
                                           std::to_string(timeout.count()) +
                                           " ms. Fix: start all ranks of the group, with the same engine");
    }
    std::this_thread::sleep_for(kProbeEvery);
  }
}

}  // namespace

Status exchange_address_by_mpi(const BootstrapOptions& options, std::string* address) {
  const auto send = symbol<int (*)(const void*, int, void*, int, int, void*)>("MPI_Send");
  const auto receive = symbol<int (*)(void*, int, void*, int, int, void*, void*)>("MPI_Recv");
  void* const world = world_communicator();
  void* const byte = dlsym(RTLD_DEFAULT, "ompi_mpi_byte");
  if (!mpi_is_initialized()) {
    return error(TW_BOOTSTRAP_ERROR,
                 "no way to find the other ranks: TOKENWEAVE_BOOTSTRAP is not set and MPI is not initialised");
  }
  if (send == nullptr || receive == nullptr || world == nullptr || byte == nullptr) {
    return error(TW_UNSUPPORTED, "the MPI library in this process is not Open MPI. Fix: set TOKENWEAVE_BOOTSTRAP");
  }
  const auto world_rank = [&](int rank) { return options.mpi_ranks.empty() ? rank : options.mpi_ranks[rank]; };

  std::array<char, 64> name{};
  if (options.rank == 0) {
    static unsigned serial = 0;
    std::snprintf(name.data(), name.size(), "@tokenweave-%d-%u", static_cast<int>(getpid()), serial++);
    for (int rank = 1; rank < options.size; ++rank) {
      if (send(name.data(), name.size(), byte, world_rank(rank), kTag, world) != kSuccess) {
        return error(TW_BOOTSTRAP_ERROR, "MPI_Send to rank " + std::to_string(rank) + " failed");
      }
    }
  } else {
    TW_RETURN_IF_ERROR(wait_for_message(world_rank(0), options.timeout));
    if (receive(name.data(), name.size(), byte, world_rank(0), kTag, world, nullptr) != kSuccess) {
      return error(TW_BOOTSTRAP_ERROR, "MPI_Recv from rank 0 failed");
    }
  }
  *address = name.data();
  return {};
}

Status world_rank(int* rank) {
  const auto comm_rank = symbol<int (*)(void*, int*)>("MPI_Comm_rank");
  void* const world = world_communicator();
  if (comm_rank != nullptr && world != nullptr && mpi_is_initialized()) {
    return comm_rank(world, rank) == kSuccess ? Status{} : error(TW_BOOTSTRAP_ERROR, "MPI_Comm_rank failed");
  }
  *rank = environment().rank;
  if (*rank >= 0) return {};
  return error(TW_BOOTSTRAP_ERROR,
               "no way to tell this process's rank: TOKENWEAVE_RANK is not set and Open MPI is not initialised");
}

}  // namespace tokenweave
