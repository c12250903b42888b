// The kernels of one GPTAttention call, in the order in which they are queued.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "batch.h"
#include "status.h"
#include "workspace.h"

namespace tokenweave::reference {

/// Of one rank.
struct Heads {
  int32_t q = 0, kv = 0, size = 0;
  int32_t group_size() const { return q / kv; }
};

/// The pages of one layer, and the rows of a step that own them. A page is [kv heads, tokens_per_block, head_size]; the
/// V page stands behind its K page. `blocks` numbers pages from `pages` on.
struct LayerCache {
  void* pages = nullptr;
  int32_t tokens_per_block = 0;
  int32_t max_blocks = 0;
  const int32_t* blocks = nullptr;           ///< [rows, 2, max_blocks] K pages, then V pages
  const int32_t* lengths = nullptr;          ///< [rows] tokens with those of this step (sequence_length)
  const int32_t* context_lengths = nullptr;  ///< [rows] tokens of a context chunk
};

/// Context chunks or generation rows, which are attended to by a launch each: the best tile follows the query lengths.
struct Launch {
  RowGroup rows;
  Grid grid;
  Schedule schedule;
  bool is_context = false;
};

/// Fills the schedules of both launches.
Status queue_schedules(const Launch& context, const Launch& generation, const Heads& heads, const LayerCache& cache,
                       cudaStream_t stream);

struct Rotation {
  const float* cos_sin = nullptr;  ///< device, [positions, dims / 2] pairs (cosine, sine)
  int32_t dims = 0;                ///< the first dimensions of a head turn, i with i + dims / 2; 0: none
};

/// Splits qkv [tokens, q + 2 kv, size]: rotated queries go to `q` [tokens, q, size], rotated keys and values to the
/// cache.
template <typename T>
Status queue_rotate_and_append(const Launch& context, const Launch& generation, const Heads& heads,
                               const LayerCache& cache, const Rotation& rotation, const T* qkv, T* q,
                               cudaStream_t stream);

/// out = softmax(scale q K^T) V, each token up to itself. `out` may be `q`: a CTA has read its queries before it, or
/// the kernel that merges its results, writes there, and no other CTA of the launch reads or writes the same ones.
template <typename T, int kHeadSize>
Status queue_attention(const Launch& launch, const Heads& heads, const LayerCache& cache, const Workspace& workspace,
                       float scale, T* q, T* out, cudaStream_t stream);

}  // namespace tokenweave::reference
