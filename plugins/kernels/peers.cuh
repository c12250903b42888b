// Reading all ranks' rows through peer pointers.
//
// A Reader gives a team the rank sum and the residual of its rows, one row after the other:
//   start_own(cursor)     begins to load what no other rank writes; may run before the start barrier
//   start_others(cursor)  begins the rest, after the barrier; or
//   abandon()             after a failed barrier: nothing may be in flight when the CTA exits
//   begin_row()           waits for the row, as far as it must be whole
//   sum(v, x)             the rank sum of this thread's v-th vector, in fp32; exists for v < thread_vectors
//   residual(v)           its residual
//   end_vector(cursor, v) after the reads of vector v
//   end_row(cursor)       after the team's barrier: all of its threads have read the row
#pragma once

#include "kernel_args.h"
#include "ptx.cuh"
#include "rows.cuh"
#include "vector.cuh"

namespace tokenweave {

/// The i-th other rank: each rank starts with another one, so that not all load one link at once.
__device__ __forceinline__ int other_rank(int rank, int i, int size) {
  const int r = rank + i;
  return r < size ? r : r - size;
}

// kRanks is the number of ranks, or 0 where it is known at run time only; loops over many ranks are not unrolled, for
// registers are short.

/// Adds the ranks' vectors in rank order, so that the result does not depend on which rank computes it. load(r) gives
/// rank r's. kRound rounds the sum to T as NVSwitch does.
template <typename T, int kRanks, bool kRound, class Load>
__device__ __forceinline__ void sum_ranks(int size, float (&x)[kLanes<T>], Load load) {
  unpack<T>(load(0), x);
#pragma unroll(kRanks != 0 ? kRanks : 1)
  for (int r = 1; r < (kRanks != 0 ? kRanks : size); ++r) add<T>(load(r), x);
  if constexpr (kRound) unpack<T>(pack<T>(x), x);
}

/// Each thread copies its own vectors to shared memory: [warp][source][lane]. It reads only what it copied itself, so
/// no barrier is needed, and a slot is filled again as soon as it was read: with the same vector of the next row, or
/// the next vector of this one.
template <typename T, bool kRound>
class CpAsyncReader {
 public:
  using Element = T;
  static constexpr Loader kLoader = Loader::kCpAsync;
  static constexpr int kMaxThreads = kMostThreads;

  __device__ CpAsyncReader(const KernelArgs& args, int rank, void* memory)
      : args_(args), rank_(rank), vectors_(thread_vectors(args)), rows_(owned_rows(args, rank)) {
    const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    slots_ = ptx::shared_address(memory) + warp * (args.size + 1) * kSlotBytes + threadIdx.x % 32 * 16;
  }

  __device__ void start_own(const Cursor& cursor) { load_own(cursor, 0); }
  __device__ void start_others(const Cursor& cursor) { load_others(cursor, 0); }
  __device__ void abandon() { ptx::cp_async_wait_all(); }
  __device__ void begin_row() {}

  __device__ void sum(int, float (&x)[kLanes<T>]) {
    ptx::cp_async_wait_all();
    sum_ranks<T, 0, kRound>(args_.size, x, [&](int r) { return ptx::load_shared16(slot(r)); });
  }
  __device__ uint4 residual(int) const { return ptx::load_shared16(slot(args_.size)); }

  __device__ void end_vector(const Cursor& cursor, int v) {
    const bool same_row = v + 1 < kVectorsPerThread;
    const Cursor next = same_row ? cursor : cursor.after(args_);
    load_own(next, same_row ? v + 1 : 0);
    load_others(next, same_row ? v + 1 : 0);
  }
  __device__ void end_row(const Cursor&) {}

 private:
  static constexpr int kSlotBytes = 32 * 16;
  __device__ uint32_t slot(int source) const { return slots_ + source * kSlotBytes; }

  __device__ void load_own(const Cursor& cursor, int v) const {
    if (cursor.row >= rows_ || v >= vectors_) return;
    ptx::cp_async16(slot(rank_), vector_at(args_.local[blockIdx.y].input, cursor.at(v)));
    ptx::cp_async16(slot(args_.size), vector_at(args_.local[blockIdx.y].residual, cursor.at(v)));
  }
  __device__ void load_others(const Cursor& cursor, int v) const {
    if (cursor.row >= rows_ || v >= vectors_) return;
#pragma unroll 1
    for (int i = 1; i < args_.size; ++i) {
      const int r = other_rank(rank_, i, args_.size);
      ptx::cp_async16(slot(r), vector_at(args_.input.of_rank[r], cursor.at(v)));
    }
  }

  const KernelArgs& args_;
  int rank_, vectors_, rows_;
  uint32_t slots_;
};

/// The copy engine moves whole rows to shared memory, [team][stage][source][row]: no registers, no L1, and the load
/// units stay free for the stores. One thread of a team asks for them, as many rows ahead as there are stages.
template <typename T, int kRanks>
class BulkReader {
 public:
  using Element = T;
  static constexpr Loader kLoader = Loader::kBulk;
  // More ranks need more registers, and shared memory does not hold their rows for more threads.
  static constexpr int kMaxThreads = kRanks == 2 ? kMostThreads : 768;

  __device__ BulkReader(const KernelArgs& args, int, void* memory) : args_(args) {
    slots_ = ptx::shared_address(memory) + Team::index() * stages() * stage_bytes();
    if (leads()) {
#pragma unroll 1
      for (int stage = 0; stage < stages(); ++stage) ptx::mbarrier_init(barrier(stage));
      ptx::fence_barrier_init();
    }
  }

  __device__ void start_own(Cursor cursor) {
    if (!leads()) return;
#pragma unroll 1
    for (int stage = 0; stage < stages(); ++stage, cursor = cursor.after(args_)) load_own(cursor, stage);
  }
  __device__ void start_others(Cursor cursor) {
    if (!leads()) return;
    if (args_.stage_input) ptx::fence_copy_engine();  // the others staged their rows with ordinary stores
#pragma unroll 1
    for (int stage = 0; stage < stages(); ++stage, cursor = cursor.after(args_)) load_others(cursor, stage);
  }
  __device__ void abandon() {
    if (!leads()) return;
#pragma unroll 1
    for (int stage = 0; stage < stages(); ++stage) {
      ptx::mbarrier_arrive(barrier(stage));
      ptx::mbarrier_wait(barrier(stage), 0);
    }
  }
  __device__ void begin_row() { ptx::mbarrier_wait(barrier(stage()), row_ >> args_.stage_bits & 1); }

  __device__ void sum(int v, float (&x)[kLanes<T>]) const {
    sum_ranks<T, kRanks, /*kRound=*/false>(ranks(), x,
                                           [&](int r) { return ptx::load_shared16(slot(stage(), r) + in_row(v)); });
  }
  __device__ uint4 residual(int v) const { return ptx::load_shared16(slot(stage(), ranks()) + in_row(v)); }
  __device__ void end_vector(const Cursor&, int) {}

  __device__ void end_row(const Cursor& cursor) {
    if (leads()) {
      const Cursor refill = cursor.after(args_, stages());
      load_own(refill, stage());
      load_others(refill, stage());
    }
    ++row_;
  }

 private:
  __device__ static bool leads() { return Team::thread() == 0; }
  __device__ int rank() const { return args_.rank + blockIdx.y; }
  __device__ int ranks() const { return kRanks != 0 ? kRanks : args_.size; }
  __device__ uint32_t row_bytes() const { return args_.vectors_per_row * 16; }
  __device__ uint32_t stage_bytes() const { return (ranks() + 1) * row_bytes(); }
  __device__ int stages() const { return 1 << args_.stage_bits; }
  __device__ int stage() const { return row_ & (stages() - 1); }
  __device__ uint32_t slot(int stage, int source) const {
    return slots_ + stage * stage_bytes() + source * row_bytes();
  }
  __device__ static uint32_t barrier(int stage) {
    __shared__ uint64_t barriers[kMaxTeams][kMaxStages];
    return ptx::shared_address(&barriers[Team::index()][stage]);
  }
  __device__ static uint32_t in_row(int v) { return (Team::thread() + v * Team::threads()) * 16; }

  // cursor.first is the row's first vector here, because thread 0 leads.
  __device__ void load_own(const Cursor& cursor, int stage) const {
    if (cursor.row >= owned_rows(args_, rank())) return;
    ptx::mbarrier_expect(barrier(stage), 2 * row_bytes());
    const LocalTensors& local = args_.local[blockIdx.y];
    ptx::bulk_load(slot(stage, rank()), vector_at(local.input, cursor.first), row_bytes(), barrier(stage));
    ptx::bulk_load(slot(stage, ranks()), vector_at(local.residual, cursor.first), row_bytes(), barrier(stage));
  }
  __device__ void load_others(const Cursor& cursor, int stage) const {
    if (cursor.row >= owned_rows(args_, rank())) return;
    ptx::mbarrier_expect(barrier(stage), (ranks() - 1) * row_bytes());
    for (int i = 1; i < ranks(); ++i) {
      const int r = other_rank(rank(), i, ranks());
      ptx::bulk_load(slot(stage, r), vector_at(args_.input.of_rank[r], cursor.first), row_bytes(), barrier(stage));
    }
    ptx::mbarrier_arrive(barrier(stage));
  }

  const KernelArgs& args_;
  uint32_t slots_;
  int row_ = 0;  ///< how many rows the team has finished
};

/// A tensor that every rank gets: `own` is this rank's copy of it.
struct Destination {
  const SymmetricTensor& everywhere;
  uint8_t* own;
  bool staged;  ///< `own` is not in the symmetric buffer
};

/// Stores to every rank through its own pointer.
template <int kRanks>
struct PeerWriter {
  static constexpr bool kSwitchReadsOwnRows = false;

  __device__ static void broadcast(const KernelArgs& args, int rank, const Destination& to, uint32_t at, uint4 v) {
    const int size = kRanks != 0 ? kRanks : args.size;
#pragma unroll(kRanks != 0 ? kRanks : 1)
    for (int i = 1; i < size; ++i) ptx::store16(vector_at(to.everywhere.of_rank[other_rank(rank, i, size)], at), v);
    ptx::store16(vector_at(to.own, at), v);
  }
  __device__ static void fence() {}
};

}  // namespace tokenweave
