#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
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

bool says_yes(const char* question) {
  const auto ask = symbol<int (*)(int*)>(question);
  int answer = 0;
  return ask != nullptr && ask(&answer) == kSuccess && answer != 0;
}

/// Whether MPI may be called: before it is initialised, and after it was finalised, a call ends the process.
bool mpi_is_running() { return says_yes("MPI_Initialized") && !says_yes("MPI_Finalized"); }

void* world_communicator() { return dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world"); }

using Name = std::array<char, 64>;

/// Of the socket where this process listens as rank 0; the same for all of its groups. So a rank that finds what rank 0
/// sent for an attempt that has failed since comes to the right place all the same. Random, because containers may
/// share the names of sockets (a host's network) and have the same process ids.
const Name& name_of_process() {
  static const Name name = [] {
    std::random_device random;
    Name made{};
    std::snprintf(made.data(), made.size(), "@tokenweave-%d-%08x%08x", static_cast<int>(getpid()), random(), random());
    return made;
  }();
  return name;
}

int world_rank_of(const BootstrapOptions& options, int rank) {
  return options.mpi_ranks.empty() ? rank : options.mpi_ranks[rank];
}

/// MPI ends the process that names a rank which MPI_COMM_WORLD does not have.
Status check_members(const BootstrapOptions& options) {
  const auto comm_size = symbol<int (*)(void*, int*)>("MPI_Comm_size");
  int world_size = 0;
  if (comm_size == nullptr || comm_size(world_communicator(), &world_size) != kSuccess) {
    return error(TW_BOOTSTRAP_ERROR, "MPI_Comm_size failed");
  }
  for (int rank = 0; rank < options.size; ++rank) {
    const int in_world = world_rank_of(options, rank);
    if (in_world >= 0 && in_world < world_size) continue;
    return error(TW_INVALID_ARGUMENT, "rank " + std::to_string(rank) + " of the group is rank " +
                                          std::to_string(in_world) + " of MPI_COMM_WORLD, which has " +
                                          std::to_string(world_size) + ". Fix: start as many ranks as the group needs");
  }
  return {};
}

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
  if (!mpi_is_running()) {
    return error(TW_BOOTSTRAP_ERROR,
                 "no way to find the other ranks: TOKENWEAVE_BOOTSTRAP is not set and MPI is not initialised");
  }
  if (send == nullptr || receive == nullptr || world == nullptr || byte == nullptr) {
    return error(TW_UNSUPPORTED, "the MPI library in this process is not Open MPI. Fix: set TOKENWEAVE_BOOTSTRAP");
  }
  TW_RETURN_IF_ERROR(check_members(options));

  Name name{};
  if (options.rank == 0) {
    name = name_of_process();
    for (int rank = 1; rank < options.size; ++rank) {
      if (send(name.data(), name.size(), byte, world_rank_of(options, rank), kTag, world) != kSuccess) {
        return error(TW_BOOTSTRAP_ERROR, "MPI_Send to rank " + std::to_string(rank) + " failed");
      }
    }
  } else {
    TW_RETURN_IF_ERROR(wait_for_message(world_rank_of(options, 0), options.timeout));
    if (receive(name.data(), name.size(), byte, world_rank_of(options, 0), kTag, world, nullptr) != kSuccess) {
      return error(TW_BOOTSTRAP_ERROR, "MPI_Recv from rank 0 failed");
    }
  }
  *address = name.data();
  return {};
}

Status world_rank(int* rank) {
  const auto comm_rank = symbol<int (*)(void*, int*)>("MPI_Comm_rank");
  void* const world = world_communicator();
  if (comm_rank != nullptr && world != nullptr && mpi_is_running()) {
    return comm_rank(world, rank) == kSuccess ? Status{} : error(TW_BOOTSTRAP_ERROR, "MPI_Comm_rank failed");
  }
  *rank = environment().rank;
  if (*rank >= 0) return {};
  return error(TW_BOOTSTRAP_ERROR,
               "no way to tell this process's rank: TOKENWEAVE_RANK is not set and Open MPI is not initialised");
}

}  // namespace tokenweave
