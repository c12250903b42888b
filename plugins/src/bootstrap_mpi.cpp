#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>

#include "bootstrap.h"

namespace tokenweave {
namespace {

// Open MPI's handles are addresses of these symbols (its mpi.h: OMPI_PREDEFINED_GLOBAL), its functions take them as
// such.
constexpr int kTag = 20875;
constexpr int kSuccess = 0;

template <typename Function>
Function symbol(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

Status exchange_address_by_mpi(const BootstrapOptions& options, std::string* address) {
  const auto initialized = symbol<int (*)(int*)>("MPI_Initialized");
  const auto send = symbol<int (*)(const void*, int, void*, int, int, void*)>("MPI_Send");
  const auto receive = symbol<int (*)(void*, int, void*, int, int, void*, void*)>("MPI_Recv");
  void* const world = dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world");
  void* const byte = dlsym(RTLD_DEFAULT, "ompi_mpi_byte");
  int is_initialized = 0;
  if (initialized == nullptr || initialized(&is_initialized) != kSuccess || is_initialized == 0) {
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
  } else if (receive(name.data(), name.size(), byte, world_rank(0), kTag, world, nullptr) != kSuccess) {
    return error(TW_BOOTSTRAP_ERROR, "MPI_Recv from rank 0 failed");
  }
  *address = name.data();
  return {};
}

}  // namespace tokenweave
