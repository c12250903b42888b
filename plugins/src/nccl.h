// The part of NCCL that we need, as a table: NCCL is needed neither to build nor to load our libraries, and tests put a
// fake in. Names and values are those of NVIDIA's nccl.h, the same in all of NCCL 2. No header of NCCL is compiled in,
// so none has to match the library.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "status.h"

namespace tokenweave {

enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };                      // ncclResult_t
enum NcclDataType : int { kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclBfloat16 = 9 };    // ncclDataType_t
enum NcclOp : int { kNcclSum = 0 };                                                   // ncclRedOp_t
enum NcclWindowFlags : int { kNcclWindowDefault = 0, kNcclWindowCollSymmetric = 1 };  // NCCL_WIN_*

using NcclComm = struct NcclCommOpaque*;
using NcclWindow = struct NcclWindowOpaque*;

/// ncclUniqueId.
struct NcclUniqueId {
  char internal[128];
};

struct NcclTable {
  const char* (*GetErrorString)(NcclResult);
  NcclResult (*GetVersion)(int* version);
  NcclResult (*GetUniqueId)(NcclUniqueId*);
  NcclResult (*CommInitRank)(NcclComm*, int size, NcclUniqueId, int rank);
  NcclResult (*CommAbort)(NcclComm);
  NcclResult (*CommGetAsyncError)(NcclComm, NcclResult* error);
  NcclResult (*AllReduce)(const void* input, void* output, size_t count, NcclDataType, NcclOp, NcclComm, cudaStream_t);
  NcclResult (*AllGather)(const void* input, void* output, size_t count, NcclDataType, NcclComm, cudaStream_t);
  // Null in a library that lacks them: check_windows(), check_nccl_memory().
  NcclResult (*MemAlloc)(void** memory, size_t bytes);
  NcclResult (*MemFree)(void* memory);
  NcclResult (*CommWindowRegister)(NcclComm, void* memory, size_t bytes, NcclWindow*, NcclWindowFlags);
  NcclResult (*CommWindowDeregister)(NcclComm, NcclWindow);
  NcclResult (*GetPeerDevicePointer)(NcclWindow, size_t offset, int rank, void** address);
  NcclResult (*GetLsaMultimemDevicePointer)(NcclWindow, size_t offset, void** address);
};

/// The table of the NCCL that the process has loaded, else of an installed one. TW_UNSUPPORTED says what was tried.
Status load_nccl(NcclTable* table, const std::vector<std::string>& names = {"libnccl.so.2"});

/// TW_UNSUPPORTED for an NCCL before 2.27, which registers no windows.
Status check_windows(const NcclTable& table);

/// TW_UNSUPPORTED for an NCCL that tells device code only, not the host, where the other ranks' memory is mapped.
Status check_nccl_memory(const NcclTable& table);

/// OK for success; else names the call and NCCL's reason.
Status nccl_status(const NcclTable& table, NcclResult result, const char* call);

/// Collective. A communicator of all ranks on the current device, by an id of rank 0. The same error on every rank when
/// any step fails on any rank; then no rank keeps one. NCCL's own waits for the other ranks have no limit.
Status start_nccl(const NcclTable& table, Bootstrap& bootstrap, NcclComm* comm);

}  // namespace tokenweave
