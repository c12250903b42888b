#include "registered_memory.h"

#include <utility>

namespace tokenweave {

Status RegisteredMemory::create(const NcclTable& table, Bootstrap& bootstrap, NcclComm* comm, size_t bytes,
                                NcclWindowFlags flags, std::unique_ptr<RegisteredMemory>* memory) {
  std::unique_ptr<RegisteredMemory> made(new RegisteredMemory(table, *comm));
  void* allocated = nullptr;
  // What can fail on one rank alone comes before the call in which NCCL waits for all.
  Status step = check_windows(table);
  if (step.ok()) step = nccl_status(table, table.MemAlloc(&allocated, bytes), "ncclMemAlloc");
  if (step.ok()) made->memory_ = allocated;
  TW_RETURN_IF_ERROR(agree(bootstrap, "allocating NCCL's memory", step));
  const auto give_up = [&] {
    made.reset();
    (void)table.CommAbort(std::exchange(*comm, nullptr));
  };
  step = made->open_window(bytes, flags);
  if (!step.ok()) give_up();  // before the ranks agree, which those that wait inside of NCCL cannot
  step = agree(bootstrap, "registering NCCL's window", step);
  if (step.ok()) {
    *memory = std::move(made);
  } else if (made != nullptr) {
    give_up();
  }
  return step;
}

Status RegisteredMemory::open_window(size_t bytes, NcclWindowFlags flags) {
  const NcclResult result = table_.CommWindowRegister(comm_, memory_, bytes, &window_, flags);
  TW_RETURN_IF_ERROR(nccl_status(table_, result, "ncclCommWindowRegister"));
  if (window_ != nullptr) return {};
  return error(TW_UNSUPPORTED,
               "NCCL gives no window. Do all GPUs reach one another, and is neither NCCL_CUMEM_ENABLE nor "
               "NCCL_WIN_ENABLE 0?");
}

void RegisteredMemory::abandon() {
  window_ = nullptr;
  memory_ = nullptr;
}

RegisteredMemory::~RegisteredMemory() {
  if (window_ != nullptr) (void)table_.CommWindowDeregister(comm_, window_);
  if (memory_ != nullptr) (void)table_.MemFree(memory_);
}

}  // namespace tokenweave
