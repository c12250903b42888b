#include "batch.h"

#include <algorithm>
#include <string>

#include "batch_halves.h"

namespace tokenweave::reference {
namespace {

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

std::string sequence(int32_t row) { return "sequence " + std::to_string(row); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status check_blocks(const HostBatch& host, const Reach& reach, int32_t row) {
  const int32_t* keys = reach.blocks + int64_t{2} * row * reach.max_blocks;
  const int32_t* values = keys + reach.max_blocks;
  const auto used = static_cast<int32_t>(ceil_div(host.length(row), reach.tokens_per_block));
  for (int32_t i = 0; i < used; ++i) {
    if (keys[i] >= 0 && values[i] == keys[i] + 1) continue;
    return bad("block " + std::to_string(i) + " of " + sequence(row) + " has pages " + std::to_string(keys[i]) +
               " (K) and " + std::to_string(values[i]) +
               " (V) in host_kv_cache_block_offsets, expected a K page of the primary pool with its V page behind it");
  }
  return {};
}

}  // namespace

Status read_batch(const HostBatch& host, Batch* batch) {
  int64_t tokens = 0;
  TW_RETURN_IF_ERROR(trt::count_tokens({host.request_types, host.context_lengths, host.rows}, &tokens));
  if (tokens != host.tokens) {
    return bad("qkv has " + std::to_string(host.tokens) + " rows, the sequences have " + std::to_string(tokens) +
               " tokens");
  }
  *batch = {};
  int32_t first_token = 0;
  for (int32_t row = 0; row < host.rows; ++row) {
    const int32_t own = host.is_context(row) ? host.context_lengths[row] : 1;
    if (host.length(row) < own) {
      return bad("host_past_key_value_lengths of " + sequence(row) + " is " +
                 std::to_string(host.past_key_value_lengths[row]) + " with " + std::to_string(own) + " new tokens");
    }
    RowGroup& group = host.is_context(row) ? batch->context : batch->generation;
    if (group.rows++ == 0) {
      group.first_row = row;
      group.first_token = first_token;
    }
    first_token += own;
    group.tokens += own;
    group.longest = std::max(group.longest, host.length(row));
  }
  return {};
}

Status check_reach(const HostBatch& host, const Reach& reach) {
  const int64_t room = int64_t{reach.max_blocks} * reach.tokens_per_block;
  for (int32_t row = 0; row < host.rows; ++row) {
    const int32_t length = host.length(row);
    const auto beyond = [&](const std::string& what) {
      return bad(sequence(row) + " has " + std::to_string(length) + " tokens, more than " + what);
    };
    if (length > reach.window) {
      return beyond("the attention window " + std::to_string(reach.window) +
                    ". Fix: set host_max_attention_window_sizes to max_seq_len, sliding windows are not served");
    }
    if (length > room) return beyond("its " + std::to_string(reach.max_blocks) + " blocks hold");
    if (reach.positions > 0 && length > reach.positions) {
      return beyond("the " + std::to_string(reach.positions) + " positions of rotary_cos_sin");
    }
    TW_RETURN_IF_ERROR(check_blocks(host, reach, row));
  }
  return {};
}

int32_t cta_slots(int32_t sms, int32_t num_kv_heads) { return std::max(1, 2 * sms / num_kv_heads); }

Grid make_grid(const RowGroup& rows, const int32_t* context_lengths, int32_t group_size, int32_t slots,
               bool any_lengths) {
  Grid grid;
  if (rows.rows == 0) return grid;
  const bool small = int64_t{rows.tokens} * group_size <= int64_t{kSmallTile} * rows.rows;
  grid.tile = small ? kSmallTile : kLargeTile;
  int64_t tiles = 0;
  if (context_lengths == nullptr) {
    tiles = rows.rows * ceil_div(group_size, grid.tile);
  } else if (any_lengths) {  // the last tile of each row may be partly empty; no more than most_ctas() has memory for
    tiles = int64_t{rows.tokens} * group_size / grid.tile + rows.rows;
  } else {
    for (int32_t row = 0; row < rows.rows; ++row) {
      tiles += ceil_div(int64_t{context_lengths[row]} * group_size, grid.tile);
    }
  }
  // Partial results cost a second kernel: only where at least half of the GPU would have nothing to do. The tiles fit
  // `slots` then, in chunks that are long enough (find_chunk_tokens).
  grid.split = 2 * tiles <= slots && rows.longest > kSmallestChunk;
  grid.ctas = grid.split ? slots : static_cast<int32_t>(tiles);
  return grid;
}

}  // namespace tokenweave::reference
