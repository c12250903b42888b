// Owners of the CUDA driver's virtual-memory objects.
#pragma once

#include <cstdint>
#include <utility>

#include "driver.h"
#include "unique_fd.h"

namespace tokenweave {

/// Physical memory of one device, or a multicast object; shared between processes as a file descriptor.
class MemoryHandle {
 public:
  MemoryHandle() = default;
  MemoryHandle(const DriverTable& driver, CUmemGenericAllocationHandle handle) : driver_(&driver), handle_(handle) {}
  MemoryHandle(MemoryHandle&& other) noexcept { swap(other); }
  MemoryHandle& operator=(MemoryHandle&& other) noexcept {
    swap(other);
    return *this;
  }
  ~MemoryHandle() {
    if (driver_ != nullptr) (void)driver_->MemRelease(handle_);
  }

  static Status allocate(const DriverTable& driver, CUdevice device, size_t bytes, MemoryHandle* memory);
  static Status import(const DriverTable& driver, const UniqueFd& fd, MemoryHandle* memory);
  Status export_to(UniqueFd* fd) const;

  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  void swap(MemoryHandle& other) {
    std::swap(driver_, other.driver_);
    std::swap(handle_, other.handle_);
  }

  const DriverTable* driver_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
};

/// What cuMemCreate is asked for.
CUmemAllocationProp allocation_properties(CUdevice device);

/// Where a device addresses a MemoryHandle. Keeps the physical memory alive by itself.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  /// `bytes` is a multiple of `alignment`.
  static Status map(const DriverTable& driver, CUdevice device, const MemoryHandle& memory, size_t bytes,
                    size_t alignment, Mapping* mapping);

  uint8_t* get() const { return reinterpret_cast<uint8_t*>(address_); }

 private:
  void swap(Mapping& other) {
    std::swap(driver_, other.driver_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }

  const DriverTable* driver_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace tokenweave
