/// C++: which blocks of the paged KV cache a sequence owns. All ranks use the same block tables, each has its own pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tokenweave/status.h"

namespace tokenweave {

/// Sizes of one rank's pool, pages of [num_kv_heads, tokens_per_block, head_size]: for each block those of all layers,
/// keys and values in turn.
struct KvCacheConfig {
  int32_t num_layers = 0, num_kv_heads = 0, head_size = 0;
  int32_t value_bytes = 2;
  int32_t num_blocks = 0;
  int32_t tokens_per_block = 32;
  int32_t max_blocks_per_seq = 0;

  int32_t blocks_for(int64_t tokens) const {
    return static_cast<int32_t>((tokens + tokens_per_block - 1) / tokens_per_block);
  }
  size_t pool_bytes() const {
    return size_t{2} * num_blocks * num_layers * num_kv_heads * tokens_per_block * head_size * value_bytes;
  }
};

/// Hands blocks out as sequences grow and takes them back when they end; the last one freed is the next one used.
class BlockManager {
 public:
  explicit BlockManager(const KvCacheConfig& config) : config_(config), free_(config.num_blocks) {
    std::iota(free_.rbegin(), free_.rend(), 0);
  }

  const KvCacheConfig& config() const { return config_; }
  size_t num_free() const { return free_.size(); }

  /// Makes room for the first `tokens` tokens of a sequence, which may be new. Nothing changes when there is none.
  Status grow(int32_t sequence, int64_t tokens) {
    const int32_t needed = config_.blocks_for(tokens);
    const std::string where = "KV cache, sequence " + std::to_string(sequence) + ": ";
    if (needed > config_.max_blocks_per_seq) {
      return error(TW_INVALID_ARGUMENT, where + std::to_string(tokens) + " tokens need " + std::to_string(needed) +
                                            " blocks, the block table has " +
                                            std::to_string(config_.max_blocks_per_seq) +
                                            ". Fix: shorten the prompt or raise max_seq_len");
    }
    const auto known = owned_.find(sequence);
    const int64_t more = needed - (known != owned_.end() ? static_cast<int64_t>(known->second.size()) : 0);
    if (more > static_cast<int64_t>(free_.size())) {
      return error(TW_INVALID_ARGUMENT, where + "needs " + std::to_string(more) + " more blocks, " +
                                            std::to_string(free_.size()) + " of " + std::to_string(config_.num_blocks) +
                                            " are free. Fix: raise num_blocks or lower max_batch_size");
    }
    std::vector<int32_t>& blocks = owned_[sequence];
    for (int64_t i = 0; i < more; ++i) {
      blocks.push_back(free_.back());
      free_.pop_back();
    }
    return {};
  }

  /// Takes back all blocks of a sequence; one that has none is ignored.
  void free(int32_t sequence) {
    const auto known = owned_.find(sequence);
    if (known == owned_.end()) return;
    free_.insert(free_.end(), known->second.rbegin(), known->second.rend());
    owned_.erase(known);
  }

  /// Appends a row of kv_cache_block_offsets [2, max_blocks_per_seq]: page numbers of keys, then of values; 0 past
  /// them.
  void append_offsets(int32_t sequence, std::vector<int32_t>* rows) const {
    const auto known = owned_.find(sequence);
    for (const int32_t value : {0, 1}) {
      const size_t begin = rows->size();
      rows->resize(begin + config_.max_blocks_per_seq, 0);
      if (known == owned_.end()) continue;
      for (size_t i = 0; i < known->second.size(); ++i) {
        (*rows)[begin + i] = known->second[i] * 2 * config_.num_layers + value;
      }
    }
  }

 private:
  KvCacheConfig config_;
  std::vector<int32_t> free_;
  std::map<int32_t, std::vector<int32_t>> owned_;
};

}  // namespace tokenweave
