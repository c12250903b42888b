// The PTX that C++ has no spelling for. System scope ("sys") reaches other GPUs.
#pragma once

#include <cstdint>

namespace tokenweave::ptx {

/// Copies 16 bytes from global memory to a shared address without a register in between; bypasses L1.
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if __CUDA_ARCH__ >= 900

/// Makes the barrier for one arrival a phase. Visible to the copy engine after fence_barrier_init.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// The phase ends once `bytes` more have arrived, and the arrival.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Waits for the end of the phase of this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// The copy engine moves a multiple of 16 bytes to shared memory and counts them at the barrier.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Orders ordinary accesses and those of the copy engine.
__device__ __forceinline__ void fence_copy_engine() { asm volatile("fence.proxy.async;" ::: "memory"); }

#else

// The host picks kernels with the copy engine from sm_90 on only; a wrong pick must not pass silently.
__device__ __forceinline__ void mbarrier_init(uint32_t) { __trap(); }
__device__ __forceinline__ void fence_barrier_init() {}
__device__ __forceinline__ void mbarrier_expect(uint32_t, uint32_t) {}
__device__ __forceinline__ void mbarrier_arrive(uint32_t) {}
__device__ __forceinline__ void mbarrier_wait(uint32_t, uint32_t) { __trap(); }
__device__ __forceinline__ void bulk_load(uint32_t, const void*, uint32_t, uint32_t) { __trap(); }
__device__ __forceinline__ void fence_copy_engine() {}

#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint4 load_shared16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 load16(const void* global) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

/// Of memory that no one writes meanwhile; may stay in L1.
__device__ __forceinline__ uint4 load_constant16(const void* global) {
  return __ldg(static_cast<const uint4*>(global));
}

/// Not kept in L1: what shared memory leaves of it is small, and stored rows would drive norm_weight out, which every
/// row reads. That took few CTAs a sixth of their time.
__device__ __forceinline__ void store16(void* global, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// Each of the four words by itself is as another GPU stored it, or was before.
__device__ __forceinline__ uint4 load_relaxed_sys16(const void* global) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed_sys16(void* global, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Orders accesses to one memory through two addresses (its own and the multicast one).
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

/// Barrier among `threads` threads (whole warps) that name the same id.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Hides from the compiler where v came from. Else it keeps a second, widened copy of v in registers.
__device__ __forceinline__ void forget_origin(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
/// The same: values derived from v are then computed again in each row, where they would else fill the registers.
__device__ __forceinline__ void forget_origin(uint32_t& v) { asm volatile("" : "+r"(v)); }

/// Nanoseconds; advances in steps of up to a microsecond.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace tokenweave::ptx
