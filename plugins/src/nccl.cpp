#include "nccl.h"

#include "runtime_library.h"

namespace tokenweave {
namespace {

constexpr int kFirstWithPeerPointers = 22902;  // 2.29.2, of all releases the first with ncclGetPeerDevicePointer

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Status load_nccl(NcclTable* table, const std::vector<std::string>& names) {
  RuntimeLibrary library;
  TW_RETURN_IF_ERROR(library.open(
      names, "install NCCL 2 (Python: nvidia-nccl-cu12 or nvidia-nccl-cu13) and add its folder to LD_LIBRARY_PATH"));
  TW_RETURN_IF_ERROR(library.find("ncclGetErrorString", &table->GetErrorString));
  TW_RETURN_IF_ERROR(library.find("ncclGetVersion", &table->GetVersion));
  TW_RETURN_IF_ERROR(library.find("ncclGetUniqueId", &table->GetUniqueId));
  TW_RETURN_IF_ERROR(library.find("ncclCommInitRank", &table->CommInitRank));
  TW_RETURN_IF_ERROR(library.find("ncclCommAbort", &table->CommAbort));
  TW_RETURN_IF_ERROR(library.find("ncclCommGetAsyncError", &table->CommGetAsyncError));
  TW_RETURN_IF_ERROR(library.find("ncclAllReduce", &table->AllReduce));
  TW_RETURN_IF_ERROR(library.find("ncclAllGather", &table->AllGather));
  const auto find_extra = [&library](const char* symbol, auto* function) {
    if (!library.find(symbol, function).ok()) *function = nullptr;
  };
  find_extra("ncclMemAlloc", &table->MemAlloc);
  find_extra("ncclMemFree", &table->MemFree);
  find_extra("ncclCommWindowRegister", &table->CommWindowRegister);
  find_extra("ncclCommWindowDeregister", &table->CommWindowDeregister);
  find_extra("ncclGetPeerDevicePointer", &table->GetPeerDevicePointer);
  find_extra("ncclGetLsaMultimemDevicePointer", &table->GetLsaMultimemDevicePointer);
  return {};
}

Status check_windows(const NcclTable& table) {
  if (table.MemAlloc && table.MemFree && table.CommWindowRegister && table.CommWindowDeregister) return {};
  int version = 0;
  TW_RETURN_IF_ERROR(nccl_status(table, table.GetVersion(&version), "ncclGetVersion"));
  return error(TW_UNSUPPORTED, "NCCL " + version_text(version) +
                                   " has no windows. Fix: install NCCL 2.27 or later and load it before any other");
}

Status check_nccl_memory(const NcclTable& table) {
  int version = 0;
  TW_RETURN_IF_ERROR(nccl_status(table, table.GetVersion(&version), "ncclGetVersion"));
  if (version >= kFirstWithPeerPointers && check_windows(table).ok() && table.GetPeerDevicePointer &&
      table.GetLsaMultimemDevicePointer) {
    return {};
  }
  return error(TW_UNSUPPORTED, "NCCL " + version_text(version) +
                                   " does not tell the host where other ranks' memory is mapped. Fix: install NCCL " +
                                   version_text(kFirstWithPeerPointers) +
                                   " or later and load it before any other, or unset TOKENWEAVE_SYMMETRIC_MEMORY");
}

Status nccl_status(const NcclTable& table, NcclResult result, const char* call) {
  if (result == kNcclSuccess) return {};
  return error(TW_CUDA_ERROR, std::string(call) + " failed: " + table.GetErrorString(result) + " (" +
                                  std::to_string(static_cast<int>(result)) + ")");
}

Status start_nccl(const NcclTable& table, Bootstrap& bootstrap, NcclComm* comm) {
  NcclUniqueId id{};
  Status made_id;
  if (bootstrap.rank() == 0) made_id = nccl_status(table, table.GetUniqueId(&id), "ncclGetUniqueId");
  TW_RETURN_IF_ERROR(agree(bootstrap, "making NCCL's id", made_id));
  std::vector<NcclUniqueId> ids;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, "NCCL's id", id, &ids));
  NcclComm mine = nullptr;
  const NcclResult result = table.CommInitRank(&mine, bootstrap.size(), ids[0], bootstrap.rank());
  const Status started = agree(bootstrap, "starting NCCL", nccl_status(table, result, "ncclCommInitRank"));
  if (started.ok()) {
    *comm = mine;
  } else if (result == kNcclSuccess || result == kNcclInProgress) {  // the latter where NCCL_COMM_BLOCKING is 0
    (void)table.CommAbort(mine);
  }
  return started;
}

}  // namespace tokenweave
