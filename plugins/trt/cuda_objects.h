// Owners of CUDA streams and events.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "cuda_status.h"

namespace tokenweave::trt {

struct StreamDeleter {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
};
struct EventDeleter {
  void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, StreamDeleter>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventDeleter>;

/// A stream of the current device that goes before all others and does not wait for the legacy default stream.
inline Status make_stream(Stream* stream) {
  int least = 0, greatest = 0;
  TW_RETURN_IF_ERROR(
      cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
  cudaStream_t made = nullptr;
  TW_RETURN_IF_ERROR(cuda_status(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest),
                                 "cudaStreamCreateWithPriority"));
  stream->reset(made);
  return {};
}

inline Status make_event(Event* event) {
  cudaEvent_t made = nullptr;
  TW_RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
  event->reset(made);
  return {};
}

inline Status record(const Event& event, cudaStream_t stream) {
  return cuda_status(cudaEventRecord(event.get(), stream), "cudaEventRecord");
}

inline Status wait_for(cudaStream_t stream, const Event& event) {
  return cuda_status(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
}

inline Status is_capturing(cudaStream_t stream, bool* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TW_RETURN_IF_ERROR(cuda_status(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing"));
  *capturing = status != cudaStreamCaptureStatusNone;
  return {};
}

}  // namespace tokenweave::trt
