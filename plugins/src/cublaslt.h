// The part of cuBLASLt that a GEMM needs, as a table: neither its headers nor the library are needed to build or to
// load ours, and tests put a fake in.
//
// Names and values are those of NVIDIA's cublasLt.h and cublas_api.h, the same in CUDA 12 and 13.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace tokenweave {

enum CublasStatus : int { kCublasSuccess = 0 };                 // cublasStatus_t
enum CublasComputeType : int { kCublasCompute32F = 68 };        // cublasComputeType_t
enum CublasOperation : int32_t { kCublasN = 0, kCublasT = 1 };  // cublasOperation_t

enum CublasLtMatmulDescAttribute : int {  // cublasLtMatmulDescAttributes_t
  kCublasLtTransA = 3,                    // int32_t, a CublasOperation
  kCublasLtSmCountTarget = 15,            // int32_t; 0: all SMs
};

enum CublasLtPreferenceAttribute : int {  // cublasLtMatmulPreferenceAttributes_t
  kCublasLtMaxWorkspaceBytes = 1,         // uint64_t
  kCublasLtReductionSchemes = 3,          // uint32_t, the sum of CublasLtReductionSchemes that may be chosen
  kCublasLtMinAlignmentA = 5,             // uint32_t bytes, and so for the others
  kCublasLtMinAlignmentB = 6,
  kCublasLtMinAlignmentC = 7,
  kCublasLtMinAlignmentD = 8,
};

/// How parts of a sum over k are added up (cublasLtReductionScheme_t); a sum in one piece is always allowed.
enum CublasLtReductionScheme : uint32_t { kCublasLtReduceInComputeType = 2 };

using CublasLtHandle = struct CublasLtContext*;
using CublasLtMatmulDesc = struct CublasLtMatmulDescOpaque*;
using CublasLtLayout = struct CublasLtLayoutOpaque*;
using CublasLtPreference = struct CublasLtPreferenceOpaque*;

/// cublasLtMatmulAlgo_t.
struct CublasLtAlgo {
  uint64_t data[8];
};

/// cublasLtMatmulHeuristicResult_t.
struct CublasLtHeuristic {
  CublasLtAlgo algo;
  size_t workspace_bytes;
  CublasStatus state;
  float waves;
  int reserved[4];
};

struct CublasLtTable {
  const char* (*GetStatusName)(CublasStatus);
  CublasStatus (*Create)(CublasLtHandle*);
  CublasStatus (*Destroy)(CublasLtHandle);
  CublasStatus (*MatmulDescCreate)(CublasLtMatmulDesc*, CublasComputeType, cudaDataType_t scale_type);
  CublasStatus (*MatmulDescDestroy)(CublasLtMatmulDesc);
  CublasStatus (*MatmulDescSetAttribute)(CublasLtMatmulDesc, CublasLtMatmulDescAttribute, const void*, size_t);
  CublasStatus (*MatrixLayoutCreate)(CublasLtLayout*, cudaDataType_t, uint64_t rows, uint64_t cols, int64_t ld);
  CublasStatus (*MatrixLayoutDestroy)(CublasLtLayout);
  CublasStatus (*MatmulPreferenceCreate)(CublasLtPreference*);
  CublasStatus (*MatmulPreferenceDestroy)(CublasLtPreference);
  CublasStatus (*MatmulPreferenceSetAttribute)(CublasLtPreference, CublasLtPreferenceAttribute, const void*, size_t);
  CublasStatus (*MatmulAlgoGetHeuristic)(CublasLtHandle, CublasLtMatmulDesc, CublasLtLayout a, CublasLtLayout b,
                                         CublasLtLayout c, CublasLtLayout d, CublasLtPreference, int requested,
                                         CublasLtHeuristic*, int* found);
  CublasStatus (*Matmul)(CublasLtHandle, CublasLtMatmulDesc, const void* alpha, const void* a, CublasLtLayout,
                         const void* b, CublasLtLayout, const void* beta, const void* c, CublasLtLayout, void* d,
                         CublasLtLayout, const CublasLtAlgo*, void* workspace, size_t workspace_bytes, cudaStream_t);
};

/// The table of the cuBLASLt that the process has loaded (CUDA 13's, else CUDA 12's), else of an installed one.
/// TW_UNSUPPORTED says which names were tried.
Status load_cublaslt(CublasLtTable* table,
                     const std::vector<std::string>& names = {"libcublasLt.so.13", "libcublasLt.so.12"});

/// OK for success; else names the call and cuBLASLt's reason.
Status cublaslt_status(const CublasLtTable& table, CublasStatus status, const char* call);

}  // namespace tokenweave
