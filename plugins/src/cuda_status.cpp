#include "cuda_status.h"

#include <cuda_runtime_api.h>

namespace tokenweave {

Status cuda_status(int result, const char* call) {
  const auto code = static_cast<cudaError_t>(result);
  if (code == cudaSuccess) return {};
  (void)cudaGetLastError();
  const TwCode kind = code == cudaErrorMemoryAllocation ? TW_OUT_OF_MEMORY : TW_CUDA_ERROR;
  return error(kind, std::string(call) + " failed: " + cudaGetErrorString(code) + " (" + std::to_string(result) + ")");
}

}  // namespace tokenweave
