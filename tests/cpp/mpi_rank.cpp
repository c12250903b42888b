// One rank under mpirun: finds the others through MPI alone, and sees what each of them sent. Started by ctest.
#define OMPI_SKIP_MPICXX 1  // the C interface only
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "bootstrap.h"

namespace {

/// The group is the world in reverse order, so that group ranks and MPI ranks differ.
tokenweave::BootstrapOptions reversed(int world_rank, int size) {
  tokenweave::BootstrapOptions options;
  options.rank = size - 1 - world_rank;
  options.size = size;
  for (int rank = 0; rank < size; ++rank) options.mpi_ranks.push_back(size - 1 - rank);
  return options;
}

int run(int world_rank, int size) {
  tokenweave::BootstrapOptions options = reversed(world_rank, size);
  std::unique_ptr<tokenweave::Bootstrap> bootstrap;
  tokenweave::Status status = tokenweave::exchange_address_by_mpi(options, &options.address);
  if (status.ok()) status = tokenweave::connect_bootstrap(options, &bootstrap);
  std::vector<int> all;
  if (status.ok()) status = tokenweave::all_gather(*bootstrap, "ranks", 10 * options.rank, &all);
  if (!status.ok()) {
    std::printf("rank %d: %s\n", options.rank, status.message.c_str());
    return 1;
  }
  for (int rank = 0; rank < size; ++rank) {
    if (all[rank] != 10 * rank) return 2;
  }
  return 0;
}

/// Rank 0 stays away: the others wait no longer than they were told, and can still meet afterwards.
int run_without_first(int world_rank, int size) {
  if (world_rank != 0) {
    tokenweave::BootstrapOptions options;
    options.rank = world_rank;
    options.size = size;
    options.timeout = std::chrono::milliseconds(50);
    const tokenweave::Status status = tokenweave::exchange_address_by_mpi(options, &options.address);
    if (status.code != TW_BOOTSTRAP_ERROR) return 5;
    if (status.message.find("missing rank 0 (rank 0 of MPI_COMM_WORLD)") == std::string::npos) return 6;
  }
  MPI_Barrier(MPI_COMM_WORLD);
  return 0;
}

/// Rank 0 has tried in vain, more often than the others: what it sent then still leads them to it.
int run_after_failures(int world_rank, int size) {
  tokenweave::BootstrapOptions options = reversed(world_rank, size);
  for (int attempt = 0; options.rank == 0 && attempt < 2; ++attempt) {
    if (!tokenweave::exchange_address_by_mpi(options, &options.address).ok()) return 7;
  }
  MPI_Barrier(MPI_COMM_WORLD);
  return run(world_rank, size);
}

/// MPI would end the process that asks for a rank which it does not have.
int run_with_too_few_ranks(int world_rank, int size) {
  tokenweave::BootstrapOptions options;
  options.rank = world_rank;
  options.size = size + 1;
  const tokenweave::Status status = tokenweave::exchange_address_by_mpi(options, &options.address);
  if (status.code != TW_INVALID_ARGUMENT) return 8;
  const std::string last = std::to_string(size);
  return status.message.find("rank " + last + " of MPI_COMM_WORLD, which has " + last) != std::string::npos ? 0 : 9;
}

}  // namespace

int main(int argc, char** argv) {
  tokenweave::BootstrapOptions lonely;
  lonely.size = 2;
  std::string address;
  if (tokenweave::exchange_address_by_mpi(lonely, &address).code != TW_BOOTSTRAP_ERROR) return 3;  // before MPI_Init

  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int found = -1;
  const bool knows_its_rank = tokenweave::world_rank(&found).ok() && found == rank;
  int failed = knows_its_rank ? run_without_first(rank, size) : 4;
  if (failed == 0) failed = run_with_too_few_ranks(rank, size);
  if (failed == 0) failed = run(rank, size);
  if (failed == 0) failed = run_after_failures(rank, size);
  MPI_Finalize();
  const bool is_refused = tokenweave::exchange_address_by_mpi(lonely, &address).code == TW_BOOTSTRAP_ERROR;
  return failed == 0 && !is_refused ? 10 : failed;
}
