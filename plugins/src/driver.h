// The CUDA driver's memory calls, as a table: the library links no libcuda, and tests put a fake in.
#pragma once

#include <cuda.h>

#include "status.h"

namespace tokenweave {

struct DriverTable {
  decltype(&cuGetErrorString) GetErrorString;
  decltype(&cuDeviceGet) DeviceGet;
  decltype(&cuDeviceGetAttribute) DeviceGetAttribute;
  decltype(&cuDeviceGetUuid) DeviceGetUuid;
  decltype(&cuMemGetAllocationGranularity) MemGetAllocationGranularity;
  decltype(&cuMemCreate) MemCreate;
  decltype(&cuMemRelease) MemRelease;
  decltype(&cuMemExportToShareableHandle) MemExportToShareableHandle;
  decltype(&cuMemImportFromShareableHandle) MemImportFromShareableHandle;
  decltype(&cuMemAddressReserve) MemAddressReserve;
  decltype(&cuMemAddressFree) MemAddressFree;
  decltype(&cuMemMap) MemMap;
  decltype(&cuMemUnmap) MemUnmap;
  decltype(&cuMemSetAccess) MemSetAccess;
  // Null on drivers before CUDA 12.1.
  decltype(&cuMulticastCreate) MulticastCreate;
  decltype(&cuMulticastAddDevice) MulticastAddDevice;
  decltype(&cuMulticastBindMem) MulticastBindMem;
  decltype(&cuMulticastUnbind) MulticastUnbind;
  decltype(&cuMulticastGetGranularity) MulticastGetGranularity;

  bool has_multicast() const {
    return MulticastCreate && MulticastAddDevice && MulticastBindMem && MulticastUnbind && MulticastGetGranularity;
  }
};

/// OK where a driver can be loaded, whether or not it sees a GPU. Else TW_UNSUPPORTED.
Status find_driver();

/// TW_UNSUPPORTED when this process sees no such GPU.
Status find_device(int device);

/// The table of the installed driver. TW_UNSUPPORTED names the first call that it lacks, multicast excepted.
Status load_driver(DriverTable* driver);

/// OK for CUDA_SUCCESS; else names the call and the driver's reason.
Status driver_status(const DriverTable& driver, CUresult result, const char* call);

}  // namespace tokenweave
