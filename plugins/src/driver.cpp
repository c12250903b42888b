#include "driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda_status.h"

namespace tokenweave {
namespace {

constexpr unsigned kInterfaceVersion = 12010;  // CUDA 12.1: the first with multicast

template <typename Function>
bool load(const char* name, Function* function) {
  cudaDriverEntryPointQueryResult found{};
  void* address = nullptr;
  const bool ok =
      cudaGetDriverEntryPointByVersion(name, &address, kInterfaceVersion, cudaEnableDefault, &found) == cudaSuccess &&
      found == cudaDriverEntryPointSuccess;
  (void)cudaGetLastError();
  *function = ok ? reinterpret_cast<Function>(address) : nullptr;
  return ok;
}

}  // namespace

Status find_driver() {
  int version = 0;
  // 0 where the runtime cannot load libcuda; a driver that fails in another way is each rank's own affair.
  if (cudaDriverGetVersion(&version) != cudaSuccess || version != 0) return {};
  return error(TW_UNSUPPORTED,
               "no NVIDIA driver can be loaded (libcuda.so.1). Fix: run this on a machine with an NVIDIA GPU and its "
               "driver; a container has to be started with them (docker run --gpus all)");
}

Status find_device(int device) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (counted != cudaErrorNoDevice) TW_RETURN_IF_ERROR(cuda_status(counted, "cudaGetDeviceCount"));
  if (device >= 0 && device < count) return {};
  return error(TW_UNSUPPORTED, "there is no device " + std::to_string(device) + ": this process sees " +
                                   std::to_string(count) +
                                   " GPUs. Fix: let CUDA_VISIBLE_DEVICES name a GPU of this rank, or unset it; "
                                   "nvidia-smi lists those of the machine");
}

Status load_driver(DriverTable* driver) {
  const char* missing = nullptr;
  const auto need = [&missing](const char* name, auto* function) {
    if (!load(name, function) && missing == nullptr) missing = name;
  };
  need("cuGetErrorString", &driver->GetErrorString);
  need("cuDeviceGet", &driver->DeviceGet);
  need("cuDeviceGetAttribute", &driver->DeviceGetAttribute);
  need("cuDeviceGetUuid", &driver->DeviceGetUuid);
  need("cuMemGetAllocationGranularity", &driver->MemGetAllocationGranularity);
  need("cuMemCreate", &driver->MemCreate);
  need("cuMemRelease", &driver->MemRelease);
  need("cuMemExportToShareableHandle", &driver->MemExportToShareableHandle);
  need("cuMemImportFromShareableHandle", &driver->MemImportFromShareableHandle);
  need("cuMemAddressReserve", &driver->MemAddressReserve);
  need("cuMemAddressFree", &driver->MemAddressFree);
  need("cuMemMap", &driver->MemMap);
  need("cuMemUnmap", &driver->MemUnmap);
  need("cuMemSetAccess", &driver->MemSetAccess);
  load("cuMulticastCreate", &driver->MulticastCreate);
  load("cuMulticastAddDevice", &driver->MulticastAddDevice);
  load("cuMulticastBindMem", &driver->MulticastBindMem);
  load("cuMulticastUnbind", &driver->MulticastUnbind);
  load("cuMulticastGetGranularity", &driver->MulticastGetGranularity);
  if (missing == nullptr) return {};
  return error(TW_UNSUPPORTED, std::string("the CUDA driver has no ") + missing +
                                   ". Fix: install the NVIDIA driver of CUDA 12.1 or later (530)");
}

Status driver_status(const DriverTable& driver, CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return {};
  const char* reason = nullptr;
  if (driver.GetErrorString(result, &reason) != CUDA_SUCCESS || reason == nullptr) reason = "unknown error";
  const TwCode code = result == CUDA_ERROR_OUT_OF_MEMORY   ? TW_OUT_OF_MEMORY
                      : result == CUDA_ERROR_NOT_SUPPORTED ? TW_UNSUPPORTED
                                                           : TW_CUDA_ERROR;
  return error(code, std::string(call) + " failed: " + reason + " (" + std::to_string(result) + ")");
}

}  // namespace tokenweave
