// A shared library that stands in for cuBLASLt (it has its file name and functions): it writes down what it is asked,
// and multiplies fp32 matrices in host memory.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tokenweave::test {

/// One question for an algorithm.
struct AskedAlgorithm {
  cudaDataType_t type;
  int64_t m, n, k;  ///< of the column-major product
  bool transa;
  int32_t sm_target;
  uint64_t workspace_limit;
  uint32_t reduction_schemes;
  uint32_t alignment;
};

/// One product.
struct RunProduct {
  const void *weight, *x;
  void* out;
  void* workspace;
  uint64_t workspace_bytes;
  uint64_t algorithm;  ///< the index of the question that it answers
  float alpha;
  cudaStream_t stream;
};

struct FakeCublasLt {
  std::string failing;  ///< the function that fails, for example "cublasLtMatmul"
  int found = 1;        ///< algorithms that there are
  int state = 0;        ///< of the algorithm
  std::vector<AskedAlgorithm> asked;
  std::vector<RunProduct> ran;
  int handles = 0;  ///< alive
  int objects = 0;  ///< alive: descriptors, layouts, preferences
};

__attribute__((visibility("default"))) FakeCublasLt& cublaslt();

}  // namespace tokenweave::test
