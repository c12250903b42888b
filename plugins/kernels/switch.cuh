// Reading and writing all ranks' rows through NVSwitch multicast. For the interface see peers.cuh.
#pragma once

#include "multimem.cuh"
#include "peers.cuh"

namespace tokenweave {

/// The switch adds; the sums of kStages vectors are in flight in registers, their residuals in shared memory.
template <typename T>
class MultimemReader {
 public:
  using Element = T;
  static constexpr Loader kLoader = Loader::kCpAsync;
  static constexpr int kStages = sizeof(T) == 4 ? 2 : 4;
  static constexpr int kMaxThreads = sizeof(T) == 4 ? kMostThreads : 768;
  static_assert(kVectorsPerThread % kStages == 0, "a vector's stage must be known at compile time");

  __device__ MultimemReader(const KernelArgs& args, int rank, void* memory)
      : args_(args), vectors_(thread_vectors(args)), rows_(owned_rows(args, rank)) {
    const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    slots_ = ptx::shared_address(memory) + warp * kStages * kSlotBytes + threadIdx.x % 32 * 16;
  }

  __device__ void start_own(const Cursor& cursor) {
#pragma unroll
    for (int v = 0; v < kStages; ++v) load_residual(cursor, v);
  }
  __device__ void start_others(const Cursor& cursor) {
#pragma unroll
    for (int v = 0; v < kStages; ++v) load_sum(cursor, v);
  }
  __device__ void abandon() { ptx::cp_async_wait<0>(); }
  __device__ void begin_row() {}

  __device__ void sum(int v, float (&x)[kLanes<T>]) const { unpack<T>(in_flight_[v % kStages], x); }
  __device__ uint4 residual(int v) const {
    ptx::cp_async_wait<kStages - 1>();
    return ptx::load_shared16(slot(v));
  }

  __device__ void end_vector(const Cursor& cursor, int v) {
    const bool same_row = v + kStages < kVectorsPerThread;
    const Cursor next = same_row ? cursor : cursor.after(args_);
    load_residual(next, (v + kStages) % kVectorsPerThread);
    load_sum(next, (v + kStages) % kVectorsPerThread);
  }
  __device__ void end_row(const Cursor&) {}

 private:
  static constexpr int kSlotBytes = 32 * 16;
  __device__ uint32_t slot(int v) const { return slots_ + v % kStages * kSlotBytes; }
  __device__ bool exists(const Cursor& cursor, int v) const { return cursor.row < rows_ && v < vectors_; }

  __device__ void load_residual(const Cursor& cursor, int v) const {
    if (exists(cursor, v)) ptx::cp_async16(slot(v), vector_at(args_.local[blockIdx.y].residual, cursor.at(v)));
    ptx::cp_async_commit();
  }
  __device__ void load_sum(const Cursor& cursor, int v) {
    if (exists(cursor, v))
      in_flight_[v % kStages] = multimem::load_sum<T>(vector_at(args_.input.multicast, cursor.at(v)));
  }

  const KernelArgs& args_;
  int vectors_, rows_;
  uint32_t slots_;
  uint4 in_flight_[kStages];
};

/// One store reaches all ranks. The switch reads this rank's rows too, so all of the input must be symmetric or staged.
struct MultimemWriter {
  static constexpr bool kSwitchReadsOwnRows = true;

  __device__ static void broadcast(const KernelArgs&, int, const Destination& to, uint32_t at, uint4 v) {
    multimem::store(vector_at(to.everywhere.multicast, at), v);
    if (to.staged) ptx::store16(vector_at(to.own, at), v);
  }
  /// Between accesses through the multicast address and through the ranks' own.
  __device__ static void fence() { ptx::fence_alias(); }
};

}  // namespace tokenweave
