#include "multicast.h"

#include <algorithm>

namespace tokenweave {
namespace {

CUmulticastObjectProp object_properties(int devices, size_t bytes) {
  CUmulticastObjectProp properties{};
  properties.numDevices = static_cast<unsigned>(devices);
  properties.size = bytes;
  properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

/// On rank 0: makes the object that the others import.
Status make_object(const DriverTable& driver, int devices, size_t bytes, MemoryHandle* object, UniqueFd* fd) {
  const CUmulticastObjectProp properties = object_properties(devices, bytes);
  CUmemGenericAllocationHandle handle = 0;
  TW_RETURN_IF_ERROR(driver_status(driver, driver.MulticastCreate(&handle, &properties), "cuMulticastCreate"));
  *object = MemoryHandle(driver, handle);
  return object->export_to(fd);
}

}  // namespace

Status Multicast::granularity(const DriverTable& driver, Bootstrap& bootstrap, size_t bytes, size_t* granularity) {
  const CUmulticastObjectProp properties = object_properties(bootstrap.size(), bytes);
  size_t mine = 0;
  const Status query =
      driver_status(driver, driver.MulticastGetGranularity(&mine, &properties, CU_MULTICAST_GRANULARITY_RECOMMENDED),
                    "cuMulticastGetGranularity");
  TW_RETURN_IF_ERROR(agree(bootstrap, "querying multicast", query));
  std::vector<size_t> all;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, "comparing multicast", mine, &all));
  *granularity = std::max(*granularity, *std::max_element(all.begin(), all.end()));
  return {};
}

Status Multicast::create(const DriverTable& driver, Bootstrap& bootstrap, const Member& member,
                         std::unique_ptr<Multicast>* multicast) {
  std::unique_ptr<Multicast> made(new Multicast(driver, member));
  UniqueFd fd;
  Status step;
  if (bootstrap.rank() == 0) step = make_object(driver, bootstrap.size(), member.bytes, &made->object_, &fd);
  TW_RETURN_IF_ERROR(agree(bootstrap, "creating the multicast object", step));

  std::vector<UniqueFd> fds;
  TW_RETURN_IF_ERROR(bootstrap.share_fds("sharing the multicast object", fd.get(), &fds));
  if (bootstrap.rank() != 0) step = MemoryHandle::import(driver, fds[0], &made->object_);
  if (step.ok()) {
    step = driver_status(driver, driver.MulticastAddDevice(made->object_.get(), member.device), "cuMulticastAddDevice");
  }
  TW_RETURN_IF_ERROR(agree(bootstrap, "adding devices to the multicast object", step));

  TW_RETURN_IF_ERROR(agree(bootstrap, "binding memory to the multicast object", made->bind()));
  step = Mapping::map(driver, member.device, made->object_, member.bytes, member.granularity, &made->mapping_);
  TW_RETURN_IF_ERROR(agree(bootstrap, "mapping the multicast object", step));
  *multicast = std::move(made);
  return {};
}

Status Multicast::bind() {
  TW_RETURN_IF_ERROR(
      driver_status(driver_, driver_.MulticastBindMem(object_.get(), 0, member_.memory->get(), 0, member_.bytes, 0),
                    "cuMulticastBindMem"));
  bound_ = true;
  return {};
}

Multicast::~Multicast() {
  mapping_ = Mapping();
  if (bound_) (void)driver_.MulticastUnbind(object_.get(), member_.device, 0, member_.bytes);
}

}  // namespace tokenweave
