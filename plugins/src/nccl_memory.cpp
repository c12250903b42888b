#include "nccl_memory.h"

namespace tokenweave {

Status load_nccl_memory(Bootstrap& bootstrap, bool asked, NcclTable* table, const std::vector<std::string>& names) {
  Status mine = error(TW_UNSUPPORTED, "TOKENWEAVE_SYMMETRIC_MEMORY is not nccl");
  if (asked) mine = load_nccl(table, names);
  if (mine.ok()) mine = check_nccl_memory(*table);
  return agree(bootstrap, "choosing symmetric memory", mine);
}

Status NcclMemory::create(const NcclTable& table, Bootstrap& bootstrap, size_t bytes,
                          std::unique_ptr<NcclMemory>* memory) {
  std::unique_ptr<NcclMemory> made(new NcclMemory(table));
  TW_RETURN_IF_ERROR(start_nccl(table, bootstrap, &made->comm_));
  // Not NCCL_WIN_COLL_SYMMETRIC: that is for NCCL's own collectives, for which it then sets multicast up unasked.
  TW_RETURN_IF_ERROR(
      RegisteredMemory::create(table, bootstrap, &made->comm_, bytes, kNcclWindowDefault, &made->registered_));
  const Status found = made->find_addresses(bootstrap.rank(), bootstrap.size());
  TW_RETURN_IF_ERROR(agree(bootstrap, "mapping NCCL's memory", found));
  *memory = std::move(made);
  return {};
}

Status NcclMemory::find_addresses(int rank, int size) {
  addresses_.resize(size);
  for (int peer = 0; peer < size; ++peer) {
    // NCCL maps this rank's memory a second time for itself; the first address is as good.
    void* address = registered_->data();
    if (peer != rank) {
      const NcclResult result = table_.GetPeerDevicePointer(registered_->window(), 0, peer, &address);
      TW_RETURN_IF_ERROR(nccl_status(table_, result, "ncclGetPeerDevicePointer"));
    }
    if (address == nullptr) {
      return error(TW_UNSUPPORTED, "NCCL does not map the memory of rank " + std::to_string(peer) +
                                       ". Do the two GPUs reach each other over NVLink or PCIe peer access?");
    }
    addresses_[peer] = static_cast<uint8_t*>(address);
  }
  return {};
}

Status NcclMemory::set_up_multicast(Bootstrap& bootstrap) {
  void* address = nullptr;
  const NcclResult result = table_.GetLsaMultimemDevicePointer(registered_->window(), 0, &address);
  Status mine = nccl_status(table_, result, "ncclGetLsaMultimemDevicePointer");
  if (mine.ok() && address == nullptr) mine = error(TW_UNSUPPORTED, "NCCL has no multicast");
  TW_RETURN_IF_ERROR(agree(bootstrap, "setting NCCL's multicast up", mine));
  multicast_ = static_cast<uint8_t*>(address);
  return {};
}

void NcclMemory::abandon() {
  registered_->abandon();
  comm_ = nullptr;
}

NcclMemory::~NcclMemory() {
  registered_.reset();
  // Not ncclCommDestroy: nothing was ever queued that it could wait for, and the other ranks may be gone.
  if (comm_ != nullptr) (void)table_.CommAbort(comm_);
}

}  // namespace tokenweave
