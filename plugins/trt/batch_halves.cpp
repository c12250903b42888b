#include "batch_halves.h"

#include <algorithm>
#include <string>

namespace tokenweave::trt {
namespace {

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

int32_t tokens_of(const Batch& batch, int64_t sequence) {
  return batch.request_types[sequence] == kContext ? batch.context_lengths[sequence] : 1;
}

}  // namespace

Status count_tokens(const Batch& batch, int64_t* tokens) {
  *tokens = 0;
  for (int64_t i = 0; i < batch.size; ++i) {
    const int32_t type = batch.request_types[i];
    if (type != kContext && type != kGeneration) {
      return bad("host_request_types: sequence " + std::to_string(i) + " has type " + std::to_string(type) +
                 ", expected 0 or 1");
    }
    if (type == kContext && i > 0 && batch.request_types[i - 1] == kGeneration) {
      return bad("host_request_types: context sequence " + std::to_string(i) + " comes after a generation sequence");
    }
    if (type == kContext && batch.context_lengths[i] < 1) {
      return bad("host_context_lengths: context sequence " + std::to_string(i) + " has " +
                 std::to_string(batch.context_lengths[i]) + " tokens, expected at least 1");
    }
    *tokens += tokens_of(batch, i);
  }
  return {};
}

Status cut_batch(const Batch& batch, int64_t prefix_rows, BatchCut* cut) {
  int64_t tokens = 0;
  TW_RETURN_IF_ERROR(count_tokens(batch, &tokens));
  if (prefix_rows < 0 || prefix_rows > tokens) {
    return bad("the prefix has " + std::to_string(prefix_rows) + " tokens, the step " + std::to_string(tokens));
  }
  int32_t whole = 0;             // sequences that lie in the prefix with all their tokens
  int64_t inside = prefix_rows;  // tokens of the next one that do
  while (whole < batch.size && inside >= tokens_of(batch, whole)) inside -= tokens_of(batch, whole++);

  *cut = {};
  HalfSequences &left = cut->prefix.sequences, &right = cut->suffix.sequences;
  left.count = whole + (inside > 0 ? 1 : 0);
  right.first = whole;
  right.count = static_cast<int32_t>(batch.size) - whole;
  if (inside > 0) {  // only a context chunk has more than one token
    left.shared = whole;
    left.context_change = left.sequence_change = static_cast<int32_t>(inside) - batch.context_lengths[whole];
    right.shared = 0;
    right.context_change = -static_cast<int32_t>(inside);
  }
  const auto contexts =
      static_cast<int32_t>(std::count(batch.request_types, batch.request_types + batch.size, kContext));
  cut->prefix.rows = prefix_rows;
  cut->prefix.num_contexts = std::min(left.count, contexts);
  cut->suffix.rows = tokens - prefix_rows;
  cut->suffix.num_contexts = std::max(0, contexts - whole);
  return {};
}

void rewrite_context_lengths(const int32_t* step, const HalfSequences& half, int32_t* own) {
  std::copy_n(step + half.first, half.count, own);
  if (half.shared >= 0) own[half.shared] += half.context_change;
}

void rewrite_past_lengths(const int32_t* step, const HalfSequences& half, int32_t* own) {
  std::copy_n(step + half.first, half.count, own);
  if (half.shared >= 0) own[half.shared] += half.sequence_change;
}

}  // namespace tokenweave::trt
