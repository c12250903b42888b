#include "fake_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace tokenweave::test {
namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr int kMulticastOwner = 100;

struct Object {
  int owner = -1;
  size_t bytes = 0;
  // Of a multicast object.
  unsigned devices_wanted = 0;
  std::set<int> gpus;
  std::multiset<CUdevice> bound;  // as the ranks whose memory it is number them
};

struct Gpu {
  int number = -1;
  CUdevice device = -1;
};

struct State {
  FakeFailure failure;
  std::map<std::pair<int, std::string>, int> calls;
  std::map<CUdevice_attribute, int> attributes;
  std::map<int, Gpu> gpus;  // of ranks
  std::map<uint64_t, Object> objects;
  std::map<uint64_t, uint64_t> handles;  // handle -> object
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, uint64_t> mappings;  // address -> object
  uint64_t next = 1;
};

std::mutex mutex;
State state;
thread_local int this_rank = -1;

/// Counts the call; not CUDA_SUCCESS when it is the one that must fail.
CUresult enter(const char* call) {
  const int count = ++state.calls[{this_rank, call}];
  const FakeFailure& f = state.failure;
  return f.rank == this_rank && f.call == call && f.nth == count ? f.result : CUDA_SUCCESS;
}

Gpu this_gpu() {
  const auto it = state.gpus.find(this_rank);
  return it == state.gpus.end() ? Gpu{this_rank, this_rank} : it->second;
}

#define FAKE_ENTER(call)                         \
  const std::lock_guard<std::mutex> lock(mutex); \
  if (const CUresult result = enter(call); result != CUDA_SUCCESS) return result

Object* object_of(CUmemGenericAllocationHandle handle) {
  const auto it = state.handles.find(handle);
  return it == state.handles.end() ? nullptr : &state.objects[it->second];
}

CUresult new_handle(uint64_t object, CUmemGenericAllocationHandle* handle) {
  *handle = state.next++;
  state.handles[*handle] = object;
  return CUDA_SUCCESS;
}

CUresult GetErrorString(CUresult, const char** text) {
  *text = "made to fail";
  return CUDA_SUCCESS;
}
CUresult DeviceGet(CUdevice* device, int) {
  FAKE_ENTER("cuDeviceGet");
  *device = this_gpu().device;
  return CUDA_SUCCESS;
}
CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_ENTER("cuDeviceGetUuid");
  if (device != this_gpu().device) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = CUuuid{};
  uuid->bytes[sizeof uuid->bytes - 1] = static_cast<char>(this_gpu().number);
  return CUDA_SUCCESS;
}
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  FAKE_ENTER("cuDeviceGetAttribute");
  const auto it = state.attributes.find(attribute);
  *value = it == state.attributes.end() ? 1 : it->second;
  return CUDA_SUCCESS;
}
CUresult GetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  FAKE_ENTER("cuMemGetAllocationGranularity");
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult MemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  FAKE_ENTER("cuMemCreate");
  if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t object = state.next++;
  state.objects[object] = {this_rank, bytes, 0, {}, {}};
  return new_handle(object, handle);
}
CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_ENTER("cuMemRelease");
  return state.handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
/// The descriptor is a file that holds the object's number.
CUresult Export(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  FAKE_ENTER("cuMemExportToShareableHandle");
  const uint64_t object = state.handles.at(handle);
  const int file = memfd_create("fake", MFD_CLOEXEC);
  if (write(file, &object, sizeof object) != sizeof object) return CUDA_ERROR_UNKNOWN;
  *static_cast<int*>(fd) = file;
  return CUDA_SUCCESS;
}
CUresult Import(CUmemGenericAllocationHandle* handle, void* fd, CUmemAllocationHandleType) {
  FAKE_ENTER("cuMemImportFromShareableHandle");
  uint64_t object = 0;
  if (pread(static_cast<int>(reinterpret_cast<intptr_t>(fd)), &object, sizeof object, 0) != sizeof object) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return new_handle(object, handle);
}
CUresult AddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  FAKE_ENTER("cuMemAddressReserve");
  *address = state.next++ << 32;
  state.reservations[*address] = bytes;
  return CUDA_SUCCESS;
}
CUresult AddressFree(CUdeviceptr address, size_t bytes) {
  FAKE_ENTER("cuMemAddressFree");
  const auto it = state.reservations.find(address);
  if (it == state.reservations.end() || it->second != bytes || state.mappings.count(address) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  state.reservations.erase(it);
  return CUDA_SUCCESS;
}
CUresult Map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  FAKE_ENTER("cuMemMap");
  const Object* object = object_of(handle);
  if (object == nullptr || object->bytes != bytes || state.reservations[address] != bytes)
    return CUDA_ERROR_INVALID_VALUE;
  state.mappings[address] = state.handles[handle];
  return CUDA_SUCCESS;
}
CUresult Unmap(CUdeviceptr address, size_t) {
  FAKE_ENTER("cuMemUnmap");
  return state.mappings.erase(address) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult SetAccess(CUdeviceptr address, size_t, const CUmemAccessDesc* access, size_t) {
  FAKE_ENTER("cuMemSetAccess");
  return state.mappings.count(address) == 1 && access->location.id == this_gpu().device ? CUDA_SUCCESS
                                                                                        : CUDA_ERROR_INVALID_VALUE;
}
CUresult MulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties) {
  FAKE_ENTER("cuMulticastCreate");
  const uint64_t object = state.next++;
  state.objects[object] = {kMulticastOwner, properties->size, properties->numDevices, {}, {}};
  return new_handle(object, handle);
}
CUresult MulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  FAKE_ENTER("cuMulticastAddDevice");
  Object* object = object_of(handle);
  if (object == nullptr || device != this_gpu().device) return CUDA_ERROR_INVALID_VALUE;
  return object->gpus.insert(this_gpu().number).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult MulticastBindMem(CUmemGenericAllocationHandle handle, size_t, CUmemGenericAllocationHandle memory, size_t,
                          size_t bytes, unsigned long long) {
  FAKE_ENTER("cuMulticastBindMem");
  Object* object = object_of(handle);
  // The real driver's rule: every device is added before any memory is bound.
  if (object->gpus.size() != object->devices_wanted || object_of(memory)->bytes != bytes)
    return CUDA_ERROR_INVALID_VALUE;
  object->bound.insert(this_gpu().device);
  return CUDA_SUCCESS;
}
CUresult MulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t, size_t) {
  FAKE_ENTER("cuMulticastUnbind");
  auto& bound = object_of(handle)->bound;
  const auto it = bound.find(device);
  if (it == bound.end()) return CUDA_ERROR_INVALID_VALUE;
  bound.erase(it);
  return CUDA_SUCCESS;
}
CUresult MulticastGetGranularity(size_t* bytes, const CUmulticastObjectProp*, CUmulticastGranularity_flags) {
  FAKE_ENTER("cuMulticastGetGranularity");
  *bytes = 4 * kGranularity;
  return CUDA_SUCCESS;
}

}  // namespace

void fake_reset(const FakeFailure& failure) {
  const std::lock_guard<std::mutex> lock(mutex);
  state = State{};
  state.failure = failure;
}

void fake_be_rank(int rank) { this_rank = rank; }

int fake_rank() { return this_rank; }

void fake_set_gpu(int rank, int gpu, CUdevice device) {
  const std::lock_guard<std::mutex> lock(mutex);
  state.gpus[rank] = {gpu, device};
}

void fake_set_attribute(CUdevice_attribute attribute, int value) {
  const std::lock_guard<std::mutex> lock(mutex);
  state.attributes[attribute] = value;
}

FakeLive fake_live() {
  const std::lock_guard<std::mutex> lock(mutex);
  FakeLive live;
  live.handles = static_cast<int>(state.handles.size());
  live.reservations = static_cast<int>(state.reservations.size());
  live.mappings = static_cast<int>(state.mappings.size());
  for (const auto& [number, object] : state.objects) live.bindings += static_cast<int>(object.bound.size());
  return live;
}

int fake_owner_of(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto it = state.mappings.find(reinterpret_cast<CUdeviceptr>(address));
  return it == state.mappings.end() ? -1 : state.objects[it->second].owner;
}

int fake_calls(int rank, const std::string& call) {
  const std::lock_guard<std::mutex> lock(mutex);
  return state.calls[{rank, call}];
}

const DriverTable& fake_driver() {
  static const DriverTable table{GetErrorString,
                                 DeviceGet,
                                 DeviceGetAttribute,
                                 DeviceGetUuid,
                                 GetAllocationGranularity,
                                 MemCreate,
                                 MemRelease,
                                 Export,
                                 Import,
                                 AddressReserve,
                                 AddressFree,
                                 Map,
                                 Unmap,
                                 SetAccess,
                                 MulticastCreate,
                                 MulticastAddDevice,
                                 MulticastBindMem,
                                 MulticastUnbind,
                                 MulticastGetGranularity};
  return table;
}

}  // namespace tokenweave::test
