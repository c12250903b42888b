// Rotary embedding of queries and keys; keys and values go to the paged cache.
#include "../../kernels/vector.cuh"
#include "cuda_status.h"
#include "kernels.h"
#include "search.cuh"

namespace tokenweave::reference {
namespace {

constexpr int kThreads = 256;
constexpr int kPerVector = 8;  // elements of 16 bits in a vector
using Vector = float[kPerVector];

template <typename T>
struct AppendArgs {
  Heads heads;
  LayerCache cache;
  Rotation rotation;
  RowGroup context, generation;
  const int32_t* context_starts;  ///< tokens before each context row
  const T* qkv;
  T* q;
};

struct Place {
  int32_t row, position;
};

template <typename T>
__device__ Place place_of(const AppendArgs<T>& args, int32_t token) {
  if (token >= args.context.tokens) {
    const int32_t row = args.generation.first_row + token - args.context.tokens;
    return {row, args.cache.lengths[row] - 1};
  }
  const int32_t at = row_of(args.context_starts, args.context.rows, token), row = args.context.first_row + at;
  const int32_t chunk = args.context_starts[at + 1] - args.context_starts[at];
  return {row, args.cache.lengths[row] - chunk + token - args.context_starts[at]};
}

template <typename T>
__device__ void load(const T* from, Vector& x) {
  unpack<T>(*reinterpret_cast<const uint4*>(from), x);
}

/// Elements i.. of a head, rotated in GPT-NeoX order: (low, high) = (low cos - high sin, high cos + low sin).
template <typename T>
__device__ void load_rotated(const T* head, int32_t i, const Rotation& rotation, int32_t position, Vector& x) {
  load(head + i, x);
  if (i >= rotation.dims) return;
  const int32_t half = rotation.dims / 2;
  const bool low = i < half;
  Vector other;
  load(head + (low ? i + half : i - half), other);
  const float* turns = rotation.cos_sin + static_cast<int64_t>(position) * rotation.dims + 2 * (low ? i : i - half);
#pragma unroll
  for (int k = 0; k < kPerVector; ++k) {
    const float2 turn = reinterpret_cast<const float2*>(turns)[k];
    x[k] = x[k] * turn.x + (low ? -other[k] : other[k]) * turn.y;
  }
}

/// The place of one head's token in the cache; `value`: in the V page.
template <typename T>
__device__ T* cached(const AppendArgs<T>& args, const Place& place, int32_t head, bool value) {
  const LayerCache& cache = args.cache;
  const int64_t head_elements = int64_t{cache.tokens_per_block} * args.heads.size;
  const int32_t block = place.position / cache.tokens_per_block, slot = place.position % cache.tokens_per_block;
  const int64_t page = int64_t{cache.blocks[int64_t{2} * place.row * cache.max_blocks + block]} + (value ? 1 : 0);
  return static_cast<T*>(cache.pages) + (page * args.heads.kv + head) * head_elements + int64_t{slot} * args.heads.size;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_and_append(const __grid_constant__ AppendArgs<T> args) {
  const int32_t token = blockIdx.x, size = args.heads.size;
  __shared__ Place shared_place;
  if (threadIdx.x == 0) shared_place = place_of(args, token);
  __syncthreads();
  const Place place = shared_place;

  const int32_t num_heads = args.heads.q + 2 * args.heads.kv, vectors = size / kPerVector;
  const T* const in = args.qkv + int64_t{token} * num_heads * size;
  for (int32_t v = threadIdx.x; v < num_heads * vectors; v += blockDim.x) {
    const int32_t head = v / vectors, i = v % vectors * kPerVector;
    const bool is_query = head < args.heads.q, is_value = head >= args.heads.q + args.heads.kv;
    Vector x;
    T* out;
    if (is_value) {
      load(in + head * size + i, x);
      out = cached(args, place, head - args.heads.q - args.heads.kv, true);
    } else {
      load_rotated(in + head * size, i, args.rotation, place.position, x);
      out = is_query ? args.q + (int64_t{token} * args.heads.q + head) * size
                     : cached(args, place, head - args.heads.q, false);
    }
    *reinterpret_cast<uint4*>(out + i) = pack<T>(x);
  }
}

}  // namespace

template <typename T>
Status queue_rotate_and_append(const Launch& context, const Launch& generation, const Heads& heads,
                               const LayerCache& cache, const Rotation& rotation, const T* qkv, T* q,
                               cudaStream_t stream) {
  const int32_t tokens = context.rows.tokens + generation.rows.tokens;
  const AppendArgs<T> args{heads, cache, rotation, context.rows, generation.rows, context.schedule.q_starts, qkv, q};
  rotate_and_append<T><<<tokens, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "rotate_and_append");
}

template Status queue_rotate_and_append(const Launch&, const Launch&, const Heads&, const LayerCache&, const Rotation&,
                                        const __half*, __half*, cudaStream_t);
template Status queue_rotate_and_append(const Launch&, const Launch&, const Heads&, const LayerCache&, const Rotation&,
                                        const __nv_bfloat16*, __nv_bfloat16*, cudaStream_t);

}  // namespace tokenweave::reference
