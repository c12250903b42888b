// Cuts the two launches of a step into CTAs, on the device: see Schedule.
#include <climits>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda_status.h"
#include "kernels.h"
#include "search.cuh"

namespace tokenweave::reference {
namespace {

constexpr int kThreads = 512;

struct ScheduleArgs {
  RowGroup rows;
  Grid grid;
  Schedule out;
  const int32_t* lengths;          ///< of the launch's rows
  const int32_t* context_lengths;  ///< null: every row has one token
  int32_t group_size;
  int32_t page_stride;

  __device__ int32_t tokens(int32_t row) const { return context_lengths != nullptr ? context_lengths[row] : 1; }
  __device__ int32_t tiles(int32_t row) const { return (tokens(row) * group_size + grid.tile - 1) / grid.tile; }
  __device__ int32_t chunks(int32_t row, int32_t chunk_tokens) const {
    return grid.split ? (lengths[row] + chunk_tokens - 1) / chunk_tokens : 1;
  }
};

struct TwoSchedules {
  ScheduleArgs of[2];
};

struct Sum {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};
struct Larger {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

struct Shared {
  union {
    cub::BlockScan<int32_t, kThreads>::TempStorage scan;
    cub::BlockReduce<int32_t, kThreads>::TempStorage reduce;
  };
  int32_t result;
};

/// The Sum of value(row) over all rows, or the Larger of 0 and any; in all threads.
template <typename Value, typename Operation>
__device__ int32_t reduce_rows(int32_t rows, Value value, Operation operation, Shared& shared) {
  int32_t mine = 0;
  for (int32_t row = threadIdx.x; row < rows; row += kThreads) mine = operation(mine, value(row));
  const int32_t all = cub::BlockReduce<int32_t, kThreads>(shared.reduce).Reduce(mine, operation);
  if (threadIdx.x == 0) shared.result = all;
  __syncthreads();
  const int32_t result = shared.result;
  __syncthreads();
  return result;
}

/// starts[row] = sum of value over the rows before; starts[rows] = the sum of all.
template <typename Value>
__device__ void scan_rows(int32_t rows, Value value, int32_t* starts, Shared& shared) {
  int32_t before = 0;
  for (int32_t first = 0; first < rows; first += kThreads) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x);
    int32_t start = 0, sum = 0;
    cub::BlockScan<int32_t, kThreads>(shared.scan).ExclusiveSum(row < rows ? value(row) : 0, start, sum);
    if (row < rows) starts[row] = before + start;
    before += sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[rows] = before;
}

/// Keys in a chunk: the fewest with which all tiles fit the grid. Not split, a chunk has no end.
__device__ int32_t find_chunk_tokens(const ScheduleArgs& args, Shared& shared) {
  if (!args.grid.split) return INT_MAX;
  const int32_t longest = reduce_rows(args.rows.rows, [&](int32_t row) { return args.lengths[row]; }, Larger{}, shared);
  int32_t low = 1, high = max(1, (longest + kSmallestChunk - 1) / kSmallestChunk);
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    const auto ctas = [&](int32_t row) { return args.tiles(row) * args.chunks(row, middle * kSmallestChunk); };
    if (reduce_rows(args.rows.rows, ctas, Sum{}, shared) > args.grid.ctas) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low * kSmallestChunk;
}

__global__ void __launch_bounds__(kThreads) make_schedule(const __grid_constant__ TwoSchedules both) {
  __shared__ Shared shared;
  const ScheduleArgs& args = both.of[blockIdx.x];
  const Schedule& out = args.out;
  const int32_t rows = args.rows.rows;
  if (rows == 0) return;

  const int32_t chunk_tokens = find_chunk_tokens(args, shared);
  const auto tokens = [&](int32_t row) { return args.tokens(row); };
  const auto chunks = [&](int32_t row) { return args.chunks(row, chunk_tokens); };
  scan_rows(rows, tokens, out.q_starts, shared);
  scan_rows(rows, [&](int32_t row) { return args.tiles(row) * chunks(row); }, out.cta_starts, shared);
  scan_rows(rows, [&](int32_t row) { return tokens(row) * chunks(row); }, out.partial_starts, shared);
  for (int32_t row = threadIdx.x; row <= rows; row += kThreads) out.page_starts[row] = row * args.page_stride;
  if (threadIdx.x == 0) *out.chunk_tokens = chunk_tokens;
  __syncthreads();

  const int32_t used = out.cta_starts[rows];
  for (int32_t cta = threadIdx.x; cta < args.grid.ctas; cta += kThreads) {
    out.cta_valid[cta] = cta < used;
    if (cta >= used) continue;
    const int32_t row = row_of(out.cta_starts, rows, cta);
    const int32_t at = cta - out.cta_starts[row];
    out.cta_rows[cta] = row;
    out.cta_tiles[cta] = at / chunks(row);
    out.cta_chunks[cta] = at % chunks(row);
  }
  if (!args.grid.split) return;
  for (int32_t token = threadIdx.x; token <= args.rows.tokens; token += kThreads) {
    const int32_t row = row_of(out.q_starts, rows, min(token, args.rows.tokens - 1));
    out.merge_starts[token] = out.partial_starts[row] + (token - out.q_starts[row]) * chunks(row);
  }
}

ScheduleArgs arguments(const Launch& launch, const Heads& heads, const LayerCache& cache) {
  const int32_t first = launch.rows.first_row;
  return {launch.rows,
          launch.grid,
          launch.schedule,
          cache.lengths + first,
          launch.is_context ? cache.context_lengths + first : nullptr,
          heads.group_size(),
          2 * cache.max_blocks};
}

}  // namespace

Status queue_schedules(const Launch& context, const Launch& generation, const Heads& heads, const LayerCache& cache,
                       cudaStream_t stream) {
  make_schedule<<<2, kThreads, 0, stream>>>(
      TwoSchedules{{arguments(context, heads, cache), arguments(generation, heads, cache)}});
  return cuda_status(cudaGetLastError(), "make_schedule");
}

}  // namespace tokenweave::reference
