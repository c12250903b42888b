// The part of NCCL that the plugins need, as a table: NCCL is needed neither to build nor to load this library, and
// tests put a fake in. Names and values are those of NVIDIA's nccl.h, the same in all of NCCL 2.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "status.h"

namespace tokenweave::reference {

enum NcclResult : int { kNcclSuccess = 0 };                                         // ncclResult_t
enum NcclDataType : int { kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclBfloat16 = 9 };  // ncclDataType_t
enum NcclOp : int { kNcclSum = 0 };                                                 // ncclRedOp_t

using NcclComm = struct NcclCommOpaque*;

/// ncclUniqueId.
struct NcclUniqueId {
  char internal[128];
};

struct NcclTable {
  const char* (*GetErrorString)(NcclResult);
  NcclResult (*GetUniqueId)(NcclUniqueId*);
  NcclResult (*CommInitRank)(NcclComm*, int size, NcclUniqueId, int rank);
  NcclResult (*CommAbort)(NcclComm);
  NcclResult (*CommGetAsyncError)(NcclComm, NcclResult* error);
  NcclResult (*AllReduce)(const void* input, void* output, size_t count, NcclDataType, NcclOp, NcclComm, cudaStream_t);
  NcclResult (*AllGather)(const void* input, void* output, size_t count, NcclDataType, NcclComm, cudaStream_t);
};

/// The table of the NCCL that the process has loaded, else of an installed one. TW_UNSUPPORTED says what was tried.
Status load_nccl(NcclTable* table, const std::vector<std::string>& names = {"libnccl.so.2"});

/// OK for success; else names the call and NCCL's reason.
Status nccl_status(const NcclTable& table, NcclResult result, const char* call);

}  // namespace tokenweave::reference
