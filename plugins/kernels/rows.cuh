// Which CTA and which team of threads serves which row, and the plain copies over those rows.
#pragma once

#include "kernel_args.h"
#include "ptx.cuh"
#include "vector.cuh"

namespace tokenweave {

/// The block is two-dimensional: threadIdx.y is a team, which serves one row at a time. CTA i of every rank serves rows
/// i, i + grid, ... of its rank's range, so that what CTA i stages or stores is read by CTAs of the same index only.
struct Team {
  __device__ static int index() { return threadIdx.y; }
  __device__ static int thread() { return threadIdx.x; }
  __device__ static int threads() { return blockDim.x; }  // a multiple of 32
  __device__ static int first_row() { return blockIdx.x + gridDim.x * threadIdx.y; }
  __device__ static int row_stride() { return gridDim.x * blockDim.y; }
};

/// Where a team is: the index of its row among the rank's own, and of the calling thread's first vector in the tensors.
/// The thread's further vectors of the row are Team::threads() apart.
struct Cursor {
  int row;
  uint32_t first;

  __device__ Cursor(const KernelArgs& args, int rank)
      : row(Team::first_row()), first((rank * args.rows_per_rank + row) * args.vectors_per_row + Team::thread()) {}
  __device__ Cursor(int row, uint32_t first) : row(row), first(first) {}

  __device__ Cursor after(const KernelArgs& args, int rows = 1) const {
    const int step = rows * Team::row_stride();
    return {row + step, first + step * args.vectors_per_row};
  }
  __device__ uint32_t at(int v) const { return first + v * Team::threads(); }
};

/// Vectors of each row that the calling thread serves.
__device__ __forceinline__ int thread_vectors(const KernelArgs& args) {
  return (args.vectors_per_row - Team::thread() + Team::threads() - 1) / Team::threads();
}

/// Rows that a rank owns: tokens rank * rows_per_rank and up.
__device__ __forceinline__ int owned_rows(const KernelArgs& args, int rank) {
  return min(max(args.num_tokens - rank * args.rows_per_rank, 0), args.rows_per_rank);
}

/// Calls visit(token) for this team's rows of `owner`.
template <class Visit>
__device__ void for_rows_of(const KernelArgs& args, int owner, Visit visit) {
  const int rows = owned_rows(args, owner);
  for (int row = Team::first_row(); row < rows; row += Team::row_stride()) visit(owner * args.rows_per_rank + row);
}

/// Copies this CTA's rows of all owners but `skip` (-1: none) between two whole tensors. A row's loads are all in
/// flight before its first store.
__device__ __forceinline__ void copy_rows(const KernelArgs& args, int skip, uint8_t* to, const uint8_t* from) {
  for (int owner = 0; owner < args.size; ++owner) {
    if (owner == skip) continue;
    for_rows_of(args, owner, [&](int token) {
      const uint32_t row = token * args.vectors_per_row;
      uint4 v[kVectorsPerThread];
#pragma unroll
      for (int i = 0; i < kVectorsPerThread; ++i) {
        const int vector = Team::thread() + i * Team::threads();
        if (vector < args.vectors_per_row) v[i] = ptx::load16(vector_at(from, row + vector));
      }
#pragma unroll
      for (int i = 0; i < kVectorsPerThread; ++i) {
        const int vector = Team::thread() + i * Team::threads();
        if (vector < args.vectors_per_row) ptx::store16(vector_at(to, row + vector), v[i]);
      }
    });
  }
}

/// Fills this CTA's rows of this rank's outputs with NaN: nobody may take them for a result.
__device__ __forceinline__ void poison_rows(const KernelArgs& args, int rank) {
  const LocalTensors& local = args.local[blockIdx.y];
  for (int owner = 0; owner < args.size; ++owner) {
    for_rows_of(args, owner, [&](int token) {
      for (int vector = Team::thread(); vector < args.vectors_per_row; vector += Team::threads()) {
        const uint32_t at = token * args.vectors_per_row + vector;
        ptx::store16(vector_at(local.normed, at), nan_vector());
        if (args.gather_residual || owner == rank) ptx::store16(vector_at(local.residual_out, at), nan_vector());
      }
    });
  }
}

}  // namespace tokenweave
