#include "window.h"

#include <string>
#include <utility>
#include <vector>

namespace tokenweave::reference {
namespace {

/// Both halves begin where NCCL's widest accesses may.
constexpr size_t kAlignment = 4096;

/// NCCL takes the ranks' sizes for equal and does not ask.
Status compare_sizes(Bootstrap& bootstrap, size_t bytes) {
  std::vector<size_t> all;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, "comparing windows", bytes, &all));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return error(TW_RANKS_DISAGREE, "a layer of strategy NCCL_SYMMETRIC sums up to " + std::to_string(all[0]) +
                                        " bytes on rank 0 and " + std::to_string(all[rank]) + " on rank " +
                                        std::to_string(rank) + ". Fix: build the engines of all ranks together");
  }
  return {};
}

}  // namespace

Status Window::open(const NcclTable& table, NcclComm* comm, Bootstrap& bootstrap, size_t bytes,
                    std::unique_ptr<Window>* window) {
  TW_RETURN_IF_ERROR(compare_sizes(bootstrap, bytes));
  std::unique_ptr<Window> made(new Window((bytes + kAlignment - 1) / kAlignment * kAlignment));
  TW_RETURN_IF_ERROR(
      RegisteredMemory::create(table, bootstrap, comm, 2 * made->bytes_, kNcclWindowCollSymmetric, &made->memory_));
  *window = std::move(made);
  return {};
}

}  // namespace tokenweave::reference
