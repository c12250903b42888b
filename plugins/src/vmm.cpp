#include "vmm.h"

namespace tokenweave {

CUmemAllocationProp allocation_properties(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

Status MemoryHandle::allocate(const DriverTable& driver, CUdevice device, size_t bytes, MemoryHandle* memory) {
  const CUmemAllocationProp properties = allocation_properties(device);
  CUmemGenericAllocationHandle handle = 0;
  TW_RETURN_IF_ERROR(driver_status(driver, driver.MemCreate(&handle, bytes, &properties, 0), "cuMemCreate"));
  *memory = MemoryHandle(driver, handle);
  return {};
}

Status MemoryHandle::import(const DriverTable& driver, const UniqueFd& fd, MemoryHandle* memory) {
  CUmemGenericAllocationHandle handle = 0;
  void* const value = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  TW_RETURN_IF_ERROR(driver_status(
      driver, driver.MemImportFromShareableHandle(&handle, value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      "cuMemImportFromShareableHandle"));
  *memory = MemoryHandle(driver, handle);
  return {};
}

Status MemoryHandle::export_to(UniqueFd* fd) const {
  int value = -1;
  TW_RETURN_IF_ERROR(driver_status(
      *driver_, driver_->MemExportToShareableHandle(&value, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle"));
  *fd = UniqueFd(value);
  return {};
}

Status Mapping::map(const DriverTable& driver, CUdevice device, const MemoryHandle& memory, size_t bytes,
                    size_t alignment, Mapping* mapping) {
  Mapping made;
  CUdeviceptr address = 0;
  TW_RETURN_IF_ERROR(
      driver_status(driver, driver.MemAddressReserve(&address, bytes, alignment, 0, 0), "cuMemAddressReserve"));
  made.driver_ = &driver;
  made.address_ = address;
  made.bytes_ = bytes;
  TW_RETURN_IF_ERROR(driver_status(driver, driver.MemMap(address, bytes, 0, memory.get(), 0), "cuMemMap"));
  made.mapped_ = true;
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  TW_RETURN_IF_ERROR(driver_status(driver, driver.MemSetAccess(address, bytes, &access, 1), "cuMemSetAccess"));
  *mapping = std::move(made);
  return {};
}

Mapping::~Mapping() {
  if (driver_ == nullptr) return;
  if (mapped_) (void)driver_->MemUnmap(address_, bytes_);
  (void)driver_->MemAddressFree(address_, bytes_);
}

}  // namespace tokenweave
