#include "nccl.h"

#include "runtime_library.h"

namespace tokenweave::reference {

Status load_nccl(NcclTable* table, const std::vector<std::string>& names) {
  RuntimeLibrary library;
  TW_RETURN_IF_ERROR(library.open(
      names, "install NCCL 2 (Python: nvidia-nccl-cu12 or nvidia-nccl-cu13) and add its folder to LD_LIBRARY_PATH"));
  TW_RETURN_IF_ERROR(library.find("ncclGetErrorString", &table->GetErrorString));
  TW_RETURN_IF_ERROR(library.find("ncclGetUniqueId", &table->GetUniqueId));
  TW_RETURN_IF_ERROR(library.find("ncclCommInitRank", &table->CommInitRank));
  TW_RETURN_IF_ERROR(library.find("ncclCommAbort", &table->CommAbort));
  TW_RETURN_IF_ERROR(library.find("ncclCommGetAsyncError", &table->CommGetAsyncError));
  TW_RETURN_IF_ERROR(library.find("ncclAllReduce", &table->AllReduce));
  return library.find("ncclAllGather", &table->AllGather);
}

Status nccl_status(const NcclTable& table, NcclResult result, const char* call) {
  if (result == kNcclSuccess) return {};
  return error(TW_CUDA_ERROR, std::string(call) + " failed: " + table.GetErrorString(result) + " (" +
                                  std::to_string(static_cast<int>(result)) + ")");
}

}  // namespace tokenweave::reference
