// For the benchmark only, no part of the library.
//
// The floor of a two-shot all-reduce: each rank pulls half of the rows from its peer and pushes half of them to it,
// with nothing computed and no barrier. And a separate add + RMSNorm, for all-reduces that lack it.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "ptx.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;

using tokenweave::ptx::load16;

__global__ void __launch_bounds__(kThreads, 1)
    pull_and_push(uint4* pulled, const uint4* peer_source, uint4* peer_target, const uint4* pushed, size_t vectors) {
  const size_t step = size_t{gridDim.x} * kThreads * kUnroll;
  for (size_t i = size_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; i < vectors; i += step) {
    uint4 in[kUnroll], out[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const size_t at = i + u * kThreads;
      if (at < vectors) in[u] = load16(peer_source + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const size_t at = i + u * kThreads;
      if (at < vectors) out[u] = load16(pushed + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const size_t at = i + u * kThreads;
      if (at < vectors) peer_target[at] = out[u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const size_t at = i + u * kThreads;
      if (at < vectors) pulled[at] = in[u];
    }
  }
}

__device__ __forceinline__ float2 widen(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ uint32_t narrow(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

struct AddNorm {
  const uint4 *x, *residual, *weight;
  uint4 *normed, *residual_out;
  int vectors;  // of 8 bf16, in a row
  float eps;
};

/// One block a row, at most two vectors a thread.
__global__ void __launch_bounds__(kThreads) add_norm(AddNorm p) {
  constexpr int kVectors = 2;
  __shared__ float partials[32];
  const size_t row = size_t{blockIdx.x} * p.vectors;
  float sums[kVectors][8];
  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= p.vectors) continue;
    const uint4 a = load16(p.x + row + at), b = load16(p.residual + row + at);
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    uint32_t stored[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 l = widen(left[i]), r = widen(right[i]);
      stored[i] = narrow(l.x + r.x, l.y + r.y);
      const float2 s = widen(stored[i]);
      sums[v][2 * i] = s.x;
      sums[v][2 * i + 1] = s.y;
      square += s.x * s.x + s.y * s.y;
    }
    p.residual_out[row + at] = make_uint4(stored[0], stored[1], stored[2], stored[3]);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = square;
  __syncthreads();
  float total = threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : 0.0f;
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
  const float scale = rsqrtf(total / (8.0f * p.vectors) + p.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= p.vectors) continue;
    const uint4 w = __ldg(p.weight + at);
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 gamma = widen(words[i]);
      out[i] = narrow(sums[v][2 * i] * scale * gamma.x, sums[v][2 * i + 1] * scale * gamma.y);
    }
    p.normed[row + at] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bench_pull_and_push(void* pulled, const void* peer_source,
                                                                          void* peer_target, const void* pushed,
                                                                          size_t bytes, int ctas, void* stream) {
  pull_and_push<<<ctas, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<uint4*>(pulled), static_cast<const uint4*>(peer_source), static_cast<uint4*>(peer_target),
      static_cast<const uint4*>(pushed), bytes / 16);
  return cudaGetLastError();
}

/// bf16, hidden a multiple of 256 up to 16384: residual_out = x + residual, normed = RMSNorm(residual_out) * weight.
extern "C" __attribute__((visibility("default"))) int bench_add_norm(const void* x, const void* residual, void* normed,
                                                                     void* residual_out, const void* weight, int tokens,
                                                                     int hidden, float eps, void* stream) {
  const int vectors = hidden / 8;
  const int threads = vectors <= kThreads ? vectors : kThreads;
  const AddNorm p{static_cast<const uint4*>(x),
                  static_cast<const uint4*>(residual),
                  static_cast<const uint4*>(weight),
                  static_cast<uint4*>(normed),
                  static_cast<uint4*>(residual_out),
                  vectors,
                  eps};
  add_norm<<<tokens, threads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}
