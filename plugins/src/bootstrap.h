// How the host sides of a group find and talk to one another while the group is set up.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "status.h"
#include "unique_fd.h"

namespace tokenweave {

/// Every call is collective and returns an error on every rank when any rank fails or stays away: rank 0's text on all
/// ranks that it can tell, however late they come. From then on the ranks may be out of step: all later calls return
/// that error at once.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// `bytes` from every rank, in rank order, into `all` (size() * bytes). `what` names the step in error messages.
  virtual Status all_gather(const char* what, const void* mine, void* all, size_t bytes) = 0;

  /// One file descriptor from each rank that has one (`mine` >= 0) to all others. `all` has size() entries; those of
  /// ranks without a descriptor, and this rank's own, are empty.
  virtual Status share_fds(const char* what, int mine, std::vector<UniqueFd>* all) = 0;
};

template <typename T>
Status all_gather(Bootstrap& bootstrap, const char* what, const T& mine, std::vector<T>* all) {
  static_assert(std::is_trivially_copyable_v<T>);
  all->resize(static_cast<size_t>(bootstrap.size()));
  return bootstrap.all_gather(what, &mine, all->data(), sizeof(T));
}

/// OK when `mine` is OK on all ranks; else the first failing rank's error, the same text on every rank.
Status agree(Bootstrap& bootstrap, const char* what, const Status& mine);

struct BootstrapOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{30000};
  std::string address;         ///< "/path" or "@name" of a Unix socket; empty: MPI gives rank 0's
  std::vector<int> mpi_ranks;  ///< of the group's members in MPI_COMM_WORLD; empty: 0 to size - 1
};

/// Ranks of one machine over a Unix socket: rank 0 listens, the others connect and all data goes through rank 0.
Status connect_bootstrap(const BootstrapOptions& options, std::unique_ptr<Bootstrap>* bootstrap);

/// Rank 0 sends an address of its process to the group's other ranks with MPI, which the host has initialised. Uses the
/// MPI library that is loaded, if any. Only Open MPI's binary interface is known. TW_BOOTSTRAP_ERROR: rank 0 sent
/// nothing within the timeout. TW_INVALID_ARGUMENT: MPI_COMM_WORLD does not have a rank of the group.
Status exchange_address_by_mpi(const BootstrapOptions& options, std::string* address);

/// This process's rank in MPI_COMM_WORLD, where the host has initialised Open MPI; else TOKENWEAVE_RANK.
Status world_rank(int* rank);

}  // namespace tokenweave
