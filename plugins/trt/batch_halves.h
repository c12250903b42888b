// Cutting one step's batch in two at any token: the rule of trtllm_tokenweave/batch_split.py, which explains it.
#pragma once

#include <cstdint>

#include "../kernels/batch_split.h"
#include "status.h"

namespace tokenweave::trt {

/// Values of host_request_types.
inline constexpr int32_t kContext = 0, kGeneration = 1;

/// The sequences of a step in the order of its tokens: context chunks first, then generation rows of one token each.
struct Batch {
  const int32_t* request_types = nullptr;    ///< [size]
  const int32_t* context_lengths = nullptr;  ///< [size]
  int64_t size = 0;
};

struct HalfBatch {
  int64_t rows = 0;          ///< tokens
  int32_t num_contexts = 0;  ///< of its sequences; they come first
  HalfSequences sequences;
};

struct BatchCut {
  HalfBatch prefix, suffix;
};

/// Tokens of a step. Refuses batches of another order, of unknown types and of empty context chunks.
Status count_tokens(const Batch& batch, int64_t* tokens);

/// Cuts a batch after `prefix_rows` of its tokens.
Status cut_batch(const Batch& batch, int64_t prefix_rows, BatchCut* cut);

/// Writes host_context_lengths of one half, from those of the step.
void rewrite_context_lengths(const int32_t* step, const HalfSequences& half, int32_t* own);

/// Writes host_past_key_value_lengths of one half, from those of the step.
void rewrite_past_lengths(const int32_t* step, const HalfSequences& half, int32_t* own);

}  // namespace tokenweave::trt
