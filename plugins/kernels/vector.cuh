// 16-byte vectors of bf16, fp16 and fp32, widened to fp32 for arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tokenweave {

template <typename T>
inline constexpr int kLanes = 16 / static_cast<int>(sizeof(T));

/// The vector at an index of a tensor. 32-bit indices: a tensor has fewer than 2^31 vectors, and registers are short.
__device__ __forceinline__ uint8_t* vector_at(uint8_t* tensor, uint32_t index) { return tensor + index * size_t{16}; }
__device__ __forceinline__ const uint8_t* vector_at(const uint8_t* tensor, uint32_t index) {
  return tensor + index * size_t{16};
}

/// Bits of a NaN in every dtype.
__device__ __forceinline__ uint4 nan_vector() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

namespace detail {

// Bit arithmetic and PTX on whole words: with the 16-bit types the compiler keeps the halves apart, in two registers.
__device__ __forceinline__ float2 widen(uint32_t bits, __nv_bfloat16) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ float2 widen(uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ uint32_t narrow(float2 v, __nv_bfloat16) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v.y), "f"(v.x));
  return bits;
}
__device__ __forceinline__ uint32_t narrow(float2 v, __half) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v.y), "f"(v.x));
  return bits;
}

}  // namespace detail

template <typename T>
__device__ __forceinline__ void unpack(uint4 bits, float (&x)[kLanes<T>]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = detail::widen(words[i], T{});
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

/// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&x)[kLanes<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = detail::narrow(make_float2(x[2 * i], x[2 * i + 1]), T{});
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ void add(uint4 bits, float (&x)[kLanes<T>]) {
  float y[kLanes<T>];
  unpack<T>(bits, y);
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) x[i] += y[i];
}

}  // namespace tokenweave
