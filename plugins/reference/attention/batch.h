// What the host arrays of a step say about its rows, and how the kernels' work is cut. No GPU is touched.
#pragma once

#include <cstdint>

#include "status.h"

namespace tokenweave::reference {

/// The rows of one kind. They stand together, and so do their tokens.
struct RowGroup {
  int32_t first_row = 0, rows = 0;
  int32_t first_token = 0, tokens = 0;
  int32_t longest = 0;  ///< most tokens that a row has after this step
};

/// Host inputs of a GPTAttention, [rows] each.
struct HostBatch {
  int32_t rows = 0;
  int32_t tokens = 0;                               ///< rows of qkv
  const int32_t* request_types = nullptr;           ///< 0 context chunk, 1 generation; context chunks come first
  const int32_t* context_lengths = nullptr;         ///< tokens of a context chunk; of the prompt for a generation row
  const int32_t* past_key_value_lengths = nullptr;  ///< a context chunk counts itself, a generation row does not

  bool is_context(int32_t row) const { return request_types[row] == 0; }
  /// Tokens of a row after this step.
  int32_t length(int32_t row) const { return past_key_value_lengths[row] + (is_context(row) ? 0 : 1); }
};

struct Batch {
  RowGroup context, generation;
};

/// Checks what TensorRT-LLM asserts: the order of the rows, and that their tokens are those of qkv.
Status read_batch(const HostBatch& host, Batch* batch);

/// How far a row may reach, and its blocks in the cache.
struct Reach {
  int32_t window = 0;      ///< host_max_attention_window_sizes of the layer
  int32_t positions = 0;   ///< of rotary_cos_sin; 0: there is none
  int32_t max_blocks = 0;  ///< of a row
  int32_t tokens_per_block = 0;
  const int32_t* blocks = nullptr;  ///< host_kv_cache_block_offsets of the layer's pool, [rows, 2, max_blocks]
};

/// Checks what TensorRT-LLM does not assert and the kernels do not have: windows shorter than a sequence, positions
/// past the table, blocks of the secondary pool.
Status check_reach(const HostBatch& host, const Reach& reach);

constexpr int32_t kSmallTile = 16;
constexpr int32_t kLargeTile = 128;
/// Fewest keys that are worth a CTA of their own.
constexpr int32_t kSmallestChunk = 128;

/// How one launch of the attention kernel is cut. A CTA has `tile` query rows (a token's heads of one KV head count as
/// rows) of one sequence, and with `split` only a part of its keys.
struct Grid {
  int32_t tile = 0;  ///< kSmallTile or kLargeTile; FlashInfer has one between them, which isn't worth its compile time
  int32_t ctas = 0;  ///< of each KV head
  bool split = false;
};

/// Most CTAs of a KV head that run at once: two on each SM.
int32_t cta_slots(int32_t sms, int32_t num_kv_heads);

/// `context_lengths`: of the group's rows; null: every row has one token. `group_size`: query heads of a KV head.
/// `any_lengths`: the grid is large enough for all context lengths of the same sum, as a captured graph may find them.
Grid make_grid(const RowGroup& rows, const int32_t* context_lengths, int32_t group_size, int32_t slots,
               bool any_lengths = false);

}  // namespace tokenweave::reference
