/// C++: the inputs of one step of a decoder: names, dtypes and meanings are those of TensorRT-LLM's engines with packed
/// tokens and a paged KV cache, for beam width 1.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tokenweave/kv_cache.h"
#include "tokenweave/status.h"

namespace tokenweave {

/// What one sequence does in a step.
struct SequenceStep {
  int32_t sequence = 0;
  std::vector<int32_t> tokens;  ///< new ones: a chunk of the prompt, or the one token generated last
  int32_t start = 0;            ///< tokens of the sequence before these
  int32_t prompt_length = 0;
  bool is_context = false;  ///< a chunk of the prompt, not a generation row

  int32_t end() const { return start + static_cast<int32_t>(tokens.size()); }
  /// Whether this step's logits choose the next token.
  bool samples() const { return end() >= prompt_length; }
};

/// A tensor of integers in the host's memory.
struct HostTensor {
  nvinfer1::DataType dtype = nvinfer1::DataType::kINT32;
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  HostTensor() = default;
  HostTensor(std::vector<int64_t> dims, const std::vector<int32_t>& values) : shape(std::move(dims)) { copy(values); }
  HostTensor(std::vector<int64_t> dims, const std::vector<int64_t>& values)
      : dtype(nvinfer1::DataType::kINT64), shape(std::move(dims)) {
    copy(values);
  }

 private:
  template <typename T>
  void copy(const std::vector<T>& values) {
    bytes.resize(values.size() * sizeof(T));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  }
};

using HostTensors = std::map<std::string, HostTensor>;

/// Sizes that the inputs of an engine follow; `pool` is this rank's pages of the KV cache.
struct StepLayout {
  int32_t tp_size = 1;
  int32_t max_seq_len = 0;
  const void* pool = nullptr;
};

/// Whether an input is bound to the host's memory: only plugins read it.
inline bool is_host_input(const std::string& name) {
  return name.rfind("host_", 0) == 0 || name == "all_reduce_workspace";
}

/// Every input of one step: context chunks first, then generation rows, at least one, with room in their blocks. An
/// engine may not have all of them.
inline HostTensors step_inputs(const std::vector<SequenceStep>& steps, const BlockManager& blocks,
                               const StepLayout& layout) {
  std::vector<int32_t> ids, positions, last, ends, lengths, types, past, table;
  for (const SequenceStep& step : steps) {
    for (size_t i = 0; i < step.tokens.size(); ++i) {
      ids.push_back(step.tokens[i]);
      positions.push_back(step.start + static_cast<int32_t>(i));
    }
    last.push_back(static_cast<int32_t>(ids.size()));
    ends.push_back(step.end());
    lengths.push_back(step.is_context ? static_cast<int32_t>(step.tokens.size()) : step.prompt_length);
    types.push_back(step.is_context ? 0 : 1);
    // A context chunk counts itself, a generation row does not.
    past.push_back(step.is_context ? step.end() : step.end() - 1);
    blocks.append_offsets(step.sequence, &table);
  }
  std::vector<int32_t> host_lengths = lengths, host_table = table;
  if (!steps.front().is_context) {
    // The same as Python's runner gives, so that attention runs the same kernels: for generation rows plugins take only
    // the longest length from the host.
    const int32_t longest = (*std::max_element(past.begin(), past.end()) + 256) / 256 * 256;
    std::fill(past.begin(), past.end(), std::min(longest, layout.max_seq_len) - 1);
    std::fill(host_lengths.begin(), host_lengths.end(), 1);
    const int32_t row = blocks.config().max_blocks_per_seq;
    for (size_t i = 0; i < host_table.size(); ++i) host_table[i] = static_cast<int32_t>(i / row % 2);
  }
  const auto tokens = static_cast<int64_t>(ids.size()), batch = static_cast<int64_t>(steps.size());
  const int64_t layers = blocks.config().num_layers;
  std::vector<int32_t> mapping;
  for (int32_t layer = 0; layer < layers; ++layer) mapping.insert(mapping.end(), {0, layer});
  std::vector<int64_t> knobs(16, -1);
  knobs[0] = 1;  // multi_block_mode
  const std::vector<int64_t> table_shape{1, batch, 2, blocks.config().max_blocks_per_seq};
  const auto zeros = [](int64_t count) { return std::vector<int32_t>(static_cast<size_t>(count), 0); };
  const auto long_zeros = [](int64_t count) { return std::vector<int64_t>(static_cast<size_t>(count), 0); };
  HostTensors inputs{
      {"input_ids", {{tokens}, ids}},
      {"position_ids", {{tokens}, positions}},
      {"last_token_ids", {{batch}, last}},
      {"sequence_length", {{batch}, ends}},
      {"context_lengths", {{batch}, lengths}},
      {"host_context_lengths", {{batch}, host_lengths}},
      {"host_request_types", {{batch}, types}},
      {"host_past_key_value_lengths", {{batch}, past}},
      {"host_max_attention_window_sizes", {{layers}, std::vector<int32_t>(layers, layout.max_seq_len)}},
      {"host_sink_token_length", {{1}, zeros(1)}},
      {"cache_indirection", {{batch, 1, layout.max_seq_len}, zeros(batch * layout.max_seq_len)}},
      {"kv_cache_block_offsets", {table_shape, table}},
      {"host_kv_cache_block_offsets", {table_shape, host_table}},
      {"host_kv_cache_pool_pointers",
       {{1, 2}, std::vector<int64_t>{static_cast<int64_t>(reinterpret_cast<uintptr_t>(layout.pool)), 0}}},
      {"host_kv_cache_pool_mapping", {{layers, 2}, mapping}},
      {"host_runtime_perf_knobs", {{16}, knobs}},
      {"host_context_progress", {{1}, long_zeros(1)}},
  };
  if (layout.tp_size > 1)
    inputs["all_reduce_workspace"] = {{7 * layout.tp_size + 3}, long_zeros(7 * layout.tp_size + 3)};
  return inputs;
}

}  // namespace tokenweave
