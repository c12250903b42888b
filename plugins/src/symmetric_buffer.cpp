#include "symmetric_buffer.h"

#include <algorithm>
#include <cstring>

namespace tokenweave {
namespace {

/// What a rank can do; gathered, so that all ranks decide alike.
struct Capabilities {
  CUdevice device = 0;
  CUuuid gpu{};  ///< the same on all ranks that share it, unlike the device's number: CUDA_VISIBLE_DEVICES may differ
  size_t granularity = 0;
  bool multicast = false;
};

Status query(const DriverTable& driver, int ordinal, Capabilities* capabilities) {
  TW_RETURN_IF_ERROR(driver_status(driver, driver.DeviceGet(&capabilities->device, ordinal), "cuDeviceGet"));
  TW_RETURN_IF_ERROR(
      driver_status(driver, driver.DeviceGetUuid(&capabilities->gpu, capabilities->device), "cuDeviceGetUuid"));
  const auto has = [&](CUdevice_attribute attribute, bool* value) {
    int number = 0;
    TW_RETURN_IF_ERROR(driver_status(driver, driver.DeviceGetAttribute(&number, attribute, capabilities->device),
                                     "cuDeviceGetAttribute"));
    *value = number != 0;
    return Status{};
  };
  bool virtual_memory = false;
  bool descriptors = false;
  TW_RETURN_IF_ERROR(has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &virtual_memory));
  TW_RETURN_IF_ERROR(has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, &descriptors));
  if (!virtual_memory || !descriptors) {
    return error(TW_UNSUPPORTED, "the device cannot share virtual memory between processes by file descriptor");
  }
  // A driver that does not know the attribute has no multicast.
  if (!driver.has_multicast() || !has(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, &capabilities->multicast).ok()) {
    capabilities->multicast = false;
  }
  const CUmemAllocationProp properties = allocation_properties(capabilities->device);
  return driver_status(
      driver,
      driver.MemGetAllocationGranularity(&capabilities->granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "cuMemGetAllocationGranularity");
}

/// Why there is no multicast; empty where there may be.
std::string refuse_multicast(const std::vector<Capabilities>& all, bool allowed) {
  if (!allowed) return "multicast is not allowed by the configuration";
  if (all.size() == 1) return "a group of one rank has nobody to multicast to";
  // A multicast object takes a device once, and what binds memory to it may wait for ever for the missing ones.
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t other = rank + 1; other < all.size(); ++other) {
      if (std::memcmp(all[rank].gpu.bytes, all[other].gpu.bytes, sizeof(CUuuid::bytes)) != 0) continue;
      return "ranks " + std::to_string(rank) + " and " + std::to_string(other) + " share a GPU";
    }
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].multicast) return "the device or driver of rank " + std::to_string(rank) + " has no multicast";
  }
  return "";
}

size_t round_up(size_t bytes, size_t granularity) { return (bytes + granularity - 1) / granularity * granularity; }

}  // namespace

Status SymmetricBuffer::create(const DriverTable& driver, Bootstrap& bootstrap, const Options& options,
                               std::unique_ptr<SymmetricBuffer>* buffer) {
  auto made = std::make_unique<SymmetricBuffer>();
  Capabilities mine;
  TW_RETURN_IF_ERROR(agree(bootstrap, "querying the devices", query(driver, options.device, &mine)));
  std::vector<Capabilities> all;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, "comparing the devices", mine, &all));
  size_t granularity = 1;
  for (const Capabilities& rank : all) granularity = std::max(granularity, rank.granularity);

  made->multicast_reason_ = refuse_multicast(all, options.allow_multicast);
  if (options.nccl != nullptr) {
    const Status owned = made->create_by_nccl(*options.nccl, bootstrap, round_up(options.bytes, granularity));
    if (owned.ok()) {
      *buffer = std::move(made);
      return {};
    }
    made->nccl_reason_ = owned.message;
  }
  if (made->multicast_reason_.empty()) {
    const Status size = Multicast::granularity(driver, bootstrap, options.bytes, &granularity);
    if (!size.ok()) made->multicast_reason_ = size.message;
  }
  const size_t bytes = round_up(options.bytes, granularity);

  UniqueFd fd;
  Status step = MemoryHandle::allocate(driver, mine.device, bytes, &made->memory_);
  if (step.ok()) step = made->memory_.export_to(&fd);
  TW_RETURN_IF_ERROR(agree(bootstrap, "allocating symmetric memory", step));

  std::vector<UniqueFd> fds;
  TW_RETURN_IF_ERROR(bootstrap.share_fds("sharing symmetric memory", fd.get(), &fds));
  made->mappings_.resize(bootstrap.size());
  for (int rank = 0; rank < bootstrap.size() && step.ok(); ++rank) {
    MemoryHandle imported;
    if (rank != bootstrap.rank()) step = MemoryHandle::import(driver, fds[rank], &imported);
    const MemoryHandle& memory = rank == bootstrap.rank() ? made->memory_ : imported;
    if (step.ok()) step = Mapping::map(driver, mine.device, memory, bytes, granularity, &made->mappings_[rank]);
    if (!step.ok()) {
      step.message = "mapping the memory of rank " + std::to_string(rank) + ": " + step.message +
                     ". Do the two GPUs reach each other over NVLink or PCIe peer access?";
    }
  }
  TW_RETURN_IF_ERROR(agree(bootstrap, "mapping symmetric memory", step));

  if (made->multicast_reason_.empty()) {
    const Multicast::Member member{mine.device, &made->memory_, bytes, granularity};
    const Status multicast = Multicast::create(driver, bootstrap, member, &made->multicast_);
    if (!multicast.ok()) made->multicast_reason_ = multicast.message;
  }
  *buffer = std::move(made);
  return {};
}

Status SymmetricBuffer::create_by_nccl(const NcclTable& nccl, Bootstrap& bootstrap, size_t bytes) {
  TW_RETURN_IF_ERROR(NcclMemory::create(nccl, bootstrap, bytes, &nccl_));
  if (multicast_reason_.empty()) {
    const Status multicast = nccl_->set_up_multicast(bootstrap);
    if (!multicast.ok()) multicast_reason_ = multicast.message;
  }
  return {};
}

}  // namespace tokenweave
