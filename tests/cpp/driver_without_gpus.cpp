// A libcuda.so.1 as it is where CUDA_VISIBLE_DEVICES hides every GPU: there, and with no device.
#include <cuda.h>

#include <cstring>

namespace {

CUresult no_device() { return CUDA_ERROR_NO_DEVICE; }

}  // namespace

// The runtime asks cuGetProcAddress for every other function.
extern "C" {

__attribute__((visibility("default"))) CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                                                    CUdriverProcAddressQueryResult* found) {
  *function = reinterpret_cast<void*>(&no_device);
  if (std::strcmp(name, "cuDriverGetVersion") == 0) *function = reinterpret_cast<void*>(&cuDriverGetVersion);
  if (std::strcmp(name, "cuGetProcAddress") == 0) *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  if (found != nullptr) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
}
