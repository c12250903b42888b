#include "fake_gpu.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "../kernels/batch_split.h"
#include "cuda_status.h"

namespace tokenweave {

Status cuda_status(int result, const char* call) {
  return result == cudaSuccess ? Status{} : error(TW_CUDA_ERROR, std::string(call) + " failed");
}

namespace test {
namespace {

std::map<const void*, std::string> names;

std::string name_of(const void* object) {
  if (object == kMain) return "main";
  if (object == kOther) return "other";
  return object == nullptr ? "none" : names.at(object);
}

template <typename Handle>
void create(Handle* handle, const std::string& name) {
  auto* object = new char;
  names[object] = name;
  *handle = reinterpret_cast<Handle>(object);
}

template <typename Handle>
void destroy(Handle handle) {
  names.erase(handle);
  delete reinterpret_cast<char*>(handle);
}

cudaError_t answer(const char* function) { return gpu().failing == function ? cudaErrorUnknown : cudaSuccess; }

TwCode answer(const char* function, TwStatus* status) {
  *status = TwStatus{};
  if (gpu().failing != function) return TW_OK;
  *status = {TW_TIMEOUT, "rank 1 did not come"};
  return TW_TIMEOUT;
}

}  // namespace

FakeGpu& gpu() {
  static FakeGpu fake;
  return fake;
}

}  // namespace test

/// Works on the host's memory.
cudaError_t launch_batch_split(const BatchSplitArgs& args, cudaStream_t stream) {
  using test::gpu;
  const int32_t counts[] = {args.halves[0].sequences.count, args.halves[1].sequences.count};
  gpu().calls.push_back("split " + std::to_string(counts[0]) + " " + std::to_string(counts[1]) + " " +
                        test::name_of(stream));
  for (int half = 0; half < 2; ++half) {
    for (int32_t i = 0; i < counts[half]; ++i) split_lengths(args, args.halves[half], i);
  }
  return test::answer("launch_batch_split");
}

}  // namespace tokenweave

using namespace tokenweave::test;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = gpu().device;
  return answer("cudaGetDevice");
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? gpu().sm_count : gpu().compute_major;
  return answer("cudaDeviceGetAttribute");
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return answer("cudaDeviceGetStreamPriorityRange");
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking || priority != -5) return cudaErrorInvalidValue;
  if (const cudaError_t result = answer("cudaStreamCreateWithPriority"); result != cudaSuccess) return result;
  ++gpu().streams;
  create(stream, "side" + std::to_string(gpu().created_streams++));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  --gpu().streams;
  destroy(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (flags != cudaEventDisableTiming) return cudaErrorInvalidValue;
  if (const cudaError_t result = answer("cudaEventCreateWithFlags"); result != cudaSuccess) return result;
  ++gpu().events;
  create(event, "e" + std::to_string(gpu().created_events++));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --gpu().events;
  destroy(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  gpu().calls.push_back("record " + name_of(event) + " " + name_of(stream));
  return answer("cudaEventRecord");
}

cudaError_t cudaEventQuery(cudaEvent_t) { return gpu().work_is_over ? cudaSuccess : cudaErrorNotReady; }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  gpu().calls.push_back(name_of(stream) + " waits " + name_of(event));
  return answer("cudaStreamWaitEvent");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = gpu().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return answer("cudaStreamIsCapturing");
}

cudaError_t cudaMemcpyAsync(void*, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  gpu().copied_from = source;
  gpu().calls.push_back("copy " + std::to_string(bytes) + " " + name_of(stream));
  return answer("cudaMemcpyAsync");
}

const char* twVersion(void) { return "0.1.0"; }

TwCode twGroupCreate(const TwGroupConfig* config, TwGroup** group, TwStatus* status) {
  *group = nullptr;
  if (const TwCode code = answer("twGroupCreate", status); code != TW_OK) return code;
  gpu().groups.push_back(*config);
  gpu().members.assign(config->mpi_ranks, config->mpi_ranks + config->size);
  ++gpu().live_groups;
  *group = reinterpret_cast<TwGroup*>(&gpu());
  return TW_OK;
}

TwCode twGroupDestroy(TwGroup*, TwStatus* status) {
  --gpu().live_groups;
  return answer("twGroupDestroy", status);
}

TwCode twGroupGetInfo(const TwGroup*, TwGroupInfo* info, TwStatus* status) {
  if (info->struct_bytes != sizeof *info) return TW_INVALID_ARGUMENT;
  info->fabric = gpu().fabric;
  std::strcpy(info->multicast_reason, gpu().fabric == TW_FABRIC_MULTIMEM ? "" : "switched off");
  std::strcpy(info->memory_reason, gpu().memory_reason.c_str());
  return answer("twGroupGetInfo", status);
}

TwCode twGroupTensorMemory(const TwGroup*, int32_t, void** data, size_t* bytes, TwStatus* status) {
  *data = gpu().tensor_memory;
  *bytes = gpu().groups.back().tensor_bytes;
  return answer("twGroupTensorMemory", status);
}

TwCode twGroupCheck(const TwGroup*, TwStatus* status) { return answer("twGroupCheck", status); }

TwCode twGroupAllGather(TwGroup*, const void* mine, void* all, size_t bytes, TwStatus* status) {
  gpu().calls.push_back("compare " + std::to_string(bytes) + " bytes");
  if (const TwCode code = answer("twGroupAllGather", status); code != TW_OK) return code;
  const TwGroupConfig& group = gpu().groups.back();
  const size_t count = bytes / sizeof(int64_t);
  for (int32_t rank = 0; rank < group.size; ++rank) {
    auto* const offsets = static_cast<int64_t*>(all) + rank * count;
    std::memcpy(offsets, mine, bytes);
    if (rank != group.rank && gpu().peer_offset) std::transform(offsets, offsets + count, offsets, gpu().peer_offset);
  }
  return TW_OK;
}

TwCode twAllReduceRmsNorm(TwGroup*, const TwAllReduceRmsNorm* op, const TwAllReduceRmsNormTensors* tensors,
                          const TwLaunchConfig* launch, void* stream, TwStatus* status) {
  if (const TwCode code = answer("twAllReduceRmsNorm", status); code != TW_OK) return code;
  gpu().op = *op;
  gpu().launch = *launch;
  gpu().tensors = *tensors;
  gpu().calls.push_back("collective " + std::to_string(op->num_tokens) + " " + name_of(stream) + " started " +
                        name_of(launch->launch_completion));
  return TW_OK;
}

}  // extern "C"
