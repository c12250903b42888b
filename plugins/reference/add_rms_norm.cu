#include "../kernels/vector.cuh"
#include "add_rms_norm.h"
#include "cuda_status.h"

namespace tokenweave::reference {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;     // enough of them are resident for the loads of one row to hide those of another
constexpr int kMaxThreads = 512;  // leaves a thread the registers for eight vectors of two tensors

/// Sum over the block, in every thread.
__device__ float block_sum(float value) {
  __shared__ float sums[kMaxThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) total += sums[i];
  return total;
}

/// One block a row; a thread has up to kVectors of its 16-byte vectors, blockDim.x apart.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_kernel(const AddRmsNorm call) {
  const int vectors = call.hidden / kLanes<T>;
  const size_t row = blockIdx.x * static_cast<size_t>(vectors);
  const auto* const input = static_cast<const uint4*>(call.input) + row;
  const auto* const residual = static_cast<const uint4*>(call.residual) + row;
  const auto* const bias = static_cast<const uint4*>(call.bias);
  const auto* const weight = static_cast<const uint4*>(call.norm_weight);

  uint4 kept[kVectors], added[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      kept[i] = input[at];
      added[i] = residual[at];
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      float x[kLanes<T>];
      unpack<T>(kept[i], x);
      if (bias != nullptr) add<T>(bias[at], x);
      add<T>(added[i], x);
      kept[i] = pack<T>(x);
      static_cast<uint4*>(call.stored)[row + at] = kept[i];
      unpack<T>(kept[i], x);
#pragma unroll
      for (int lane = 0; lane < kLanes<T>; ++lane) squares += x[lane] * x[lane];
    }
  }
  const float scale = 1.0f / sqrtf(block_sum(squares) / call.hidden + call.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      float x[kLanes<T>], gamma[kLanes<T>];
      unpack<T>(kept[i], x);
      if (weight != nullptr) unpack<T>(weight[at], gamma);
#pragma unroll
      for (int lane = 0; lane < kLanes<T>; ++lane) x[lane] *= weight != nullptr ? scale * gamma[lane] : scale;
      static_cast<uint4*>(call.normed)[row + at] = pack<T>(x);
    }
  }
}

template <typename T>
Status launch(const AddRmsNorm& call, cudaStream_t stream) {
  const int vectors = call.hidden / kLanes<T>;
  const auto threads = [vectors](int each) { return (vectors + each * kWarp - 1) / (each * kWarp) * kWarp; };
  const auto rows = static_cast<unsigned>(call.rows);
  if (threads(1) <= kThreads) {
    add_rms_norm_kernel<T, 1><<<rows, threads(1), 0, stream>>>(call);
  } else if (threads(2) <= kThreads) {
    add_rms_norm_kernel<T, 2><<<rows, threads(2), 0, stream>>>(call);
  } else if (threads(4) <= kThreads) {
    add_rms_norm_kernel<T, 4><<<rows, threads(4), 0, stream>>>(call);
  } else {
    static_assert(kMaxHidden / kLanes<T> <= 8 * kMaxThreads);
    add_rms_norm_kernel<T, 8><<<rows, threads(8), 0, stream>>>(call);
  }
  return cuda_status(cudaGetLastError(), "launching add_rms_norm");
}

}  // namespace

Status add_rms_norm(const AddRmsNorm& call, cudaStream_t stream) {
  if (call.rows == 0) return {};
  switch (call.dtype) {
    case TW_FLOAT:
      return launch<float>(call, stream);
    case TW_HALF:
      return launch<__half>(call, stream);
    default:
      return launch<__nv_bfloat16>(call, stream);
  }
}

}  // namespace tokenweave::reference
