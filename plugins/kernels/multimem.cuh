// NVSwitch multicast: one load sums all ranks, one store reaches all. sm_90 and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tokenweave::multimem {

#if __CUDA_ARCH__ >= 900

/// The sum over all ranks of 16 bytes, accumulated in fp32 and rounded to T by the switch.
template <typename T>
__device__ __forceinline__ uint4 load_sum(const void* multicast) {
  uint4 v;
  if constexpr (sizeof(T) == 4) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(multicast)
                 : "memory");
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(multicast)
                 : "memory");
  } else {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(multicast)
                 : "memory");
  }
  return v;
}

/// Stores 16 bytes to all ranks. Only the width matters, so one form serves every dtype.
__device__ __forceinline__ void store(void* multicast, uint4 v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

#else

// The host never picks the multimem kernel on these; a wrong pick must not pass silently.
template <typename T>
__device__ __forceinline__ uint4 load_sum(const void*) {
  __trap();
  return uint4{};
}
__device__ __forceinline__ void store(void*, uint4) { __trap(); }

#endif

}  // namespace tokenweave::multimem
