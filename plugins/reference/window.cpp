#include "window.h"

namespace tokenweave::reference {
namespace {

/// Both halves begin where NCCL's widest accesses may.
constexpr size_t kAlignment = 4096;

Status check_symmetric(const NcclTable& table) {
  if (table.MemAlloc != nullptr && table.MemFree != nullptr && table.CommWindowRegister != nullptr) return {};
  int version = 0;
  (void)table.GetVersion(&version);
  return error(TW_UNSUPPORTED, "strategy NCCL_SYMMETRIC needs NCCL 2.27 or later, found " + std::to_string(version) +
                                   ". Fix: another strategy, or a newer libnccl.so.2");
}

}  // namespace

Status Window::open(const NcclTable& table, NcclComm comm, Bootstrap& bootstrap, size_t bytes,
                    std::unique_ptr<Window>* window) {
  std::unique_ptr<Window> made(new Window((bytes + kAlignment - 1) / kAlignment * kAlignment));
  // What can fail on one rank alone comes before the call in which NCCL waits for all.
  Status ready = check_symmetric(table);
  if (ready.ok()) ready = nccl_status(table, table.MemAlloc(&made->memory_, 2 * made->bytes_), "ncclMemAlloc");
  Status step = agree(bootstrap, "allocating NCCL's memory", ready);
  if (step.ok()) {
    NcclWindow registered = nullptr;
    const NcclResult result =
        table.CommWindowRegister(comm, made->memory_, 2 * made->bytes_, &registered, kNcclWindowCollSymmetric);
    step = agree(bootstrap, "registering NCCL's window", nccl_status(table, result, "ncclCommWindowRegister"));
    if (step.ok()) {
      *window = std::move(made);
      return {};
    }
    // A window that this rank has stays, and what it covers: to take it back, all ranks would have to have one.
    if (result == kNcclSuccess) return step;
  }
  if (ready.ok()) (void)table.MemFree(made->memory_);
  return step;
}

}  // namespace tokenweave::reference
