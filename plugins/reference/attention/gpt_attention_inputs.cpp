#include "gpt_attention_inputs.h"

#include <cuda_runtime_api.h>

#include <iterator>
#include <limits>
#include <string>

#include "cuda_status.h"

namespace tokenweave::reference {
namespace {

using nvinfer1::DataType;

constexpr InputInfo kInputs[] = {
    {"qkv", DataType::kHALF, 2, false},
    {"sequence_length", DataType::kINT32, 1, false},
    {"host_past_key_value_lengths", DataType::kINT32, 1, true},
    {"host_max_attention_window_sizes", DataType::kINT32, 1, true},
    {"host_sink_token_length", DataType::kINT32, 1, true},
    {"context_lengths", DataType::kINT32, 1, false},
    {"cache_indirection", DataType::kINT32, 3, false},
    {"host_request_types", DataType::kINT32, 1, true},
    {"kv_cache_block_offsets", DataType::kINT32, 4, false},
    {"host_kv_cache_block_offsets", DataType::kINT32, 4, true},
    {"host_kv_cache_pool_pointers", DataType::kINT64, 2, true},
    {"host_kv_cache_pool_mapping", DataType::kINT32, 2, true},
    {"rotary_inv_freq", DataType::kFLOAT, 0, false},
    {"rotary_cos_sin", DataType::kFLOAT, 0, false},
    {"host_context_lengths", DataType::kINT32, 1, true},
    {"host_runtime_perf_knobs", DataType::kINT64, 1, true},
    {"host_context_progress", DataType::kINT64, 1, true},
};
static_assert(std::size(kInputs) == static_cast<size_t>(Input::kCount));

Status bad(Input input, const std::string& what) {
  return error(TW_INVALID_ARGUMENT, std::string(info_of(input).name) + " " + what);
}

/// "[4, 2]".
std::string text(const nvinfer1::Dims& dims) {
  std::string all = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) all += (i > 0 ? ", " : "") + std::to_string(dims.d[i]);
  return all + "]";
}

Status expect(bool holds, const Inputs& inputs, Input input, const std::string& expected) {
  return holds ? Status{} : bad(input, "has shape " + text(inputs.desc(input).dims) + ", expected " + expected);
}

Status attributes_of(const void* pointer, cudaPointerAttributes* attributes) {
  return cuda_status(cudaPointerGetAttributes(attributes, pointer), "cudaPointerGetAttributes");
}

Status check_block_tables(const Inputs& inputs, int64_t rows, int32_t tokens_per_block) {
  const auto& device = inputs.desc(Input::kKvCacheBlockOffsets).dims;
  for (const Input table : {Input::kKvCacheBlockOffsets, Input::kHostKvCacheBlockOffsets}) {
    const auto& dims = inputs.desc(table).dims;
    TW_RETURN_IF_ERROR(
        expect(dims.d[0] == device.d[0] && dims.d[1] >= rows && dims.d[2] == 2 && dims.d[3] == device.d[3], inputs,
               table, "[pools, " + std::to_string(rows) + " or more, 2, blocks], one for both"));
  }
  // FlashInfer numbers the tokens of the table, from its first K page on, in 32 bits.
  const int64_t numbered = rows * 2 * device.d[3] * tokens_per_block;
  if (numbered > std::numeric_limits<uint32_t>::max()) {
    return bad(Input::kKvCacheBlockOffsets, "has room for " + std::to_string(numbered) + " tokens (" +
                                                std::to_string(rows) + " sequences, 2, " + std::to_string(device.d[3]) +
                                                " blocks, " + std::to_string(tokens_per_block) +
                                                " tokens each), expected fewer than 2^32");
  }
  return expect(inputs.desc(Input::kHostKvCachePoolPointers).dims.d[1] == 2, inputs, Input::kHostKvCachePoolPointers,
                "[pools, 2]");
}

}  // namespace

const InputInfo& info_of(Input input) { return kInputs[static_cast<int32_t>(input)]; }

int64_t Inputs::volume(Input input) const {
  const auto& dims = desc(input).dims;
  int64_t volume = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) volume *= dims.d[i];
  return volume;
}

Status check_shapes(const Inputs& inputs, const GptAttentionFields& fields) {
  for (int32_t i = 0; i < inputs.list().size(); ++i) {
    const Input input = inputs.list().at(i);
    const InputInfo& info = info_of(input);
    const nvinfer1::PluginTensorDesc& desc = inputs.desc(input);
    if (desc.type != inputs.list().type_of(input)) {
      return bad(input, "has DataType " + std::to_string(static_cast<int32_t>(desc.type)) + ", expected " +
                            std::to_string(static_cast<int32_t>(inputs.list().type_of(input))));
    }
    TW_RETURN_IF_ERROR(
        expect(info.rank == 0 || desc.dims.nbDims == info.rank, inputs, input, "rank " + std::to_string(info.rank)));
  }
  const int32_t width = fields.qkv_width();
  TW_RETURN_IF_ERROR(
      expect(inputs.dim(Input::kQkv, 1) == width, inputs, Input::kQkv, "[tokens, " + std::to_string(width) + "]"));
  const int64_t rows = inputs.dim(Input::kContextLengths, 0);
  for (const Input of_rows : {Input::kSequenceLength, Input::kHostPastKeyValueLengths, Input::kHostRequestTypes,
                              Input::kHostContextLengths}) {
    TW_RETURN_IF_ERROR(
        expect(inputs.dim(of_rows, 0) >= rows, inputs, of_rows, "[" + std::to_string(rows) + "] as context_lengths"));
  }
  TW_RETURN_IF_ERROR(expect(inputs.dim(Input::kCacheIndirection, 1) == 1, inputs, Input::kCacheIndirection,
                            "[sequences, 1, max_seq_len]: a beam width above 1 is not served"));
  TW_RETURN_IF_ERROR(check_block_tables(inputs, rows, fields.tokens_per_block));
  const int32_t layer = fields.layer_idx;
  for (const Input of_layers : {Input::kHostMaxAttentionWindowSizes, Input::kHostKvCachePoolMapping}) {
    TW_RETURN_IF_ERROR(
        expect(inputs.dim(of_layers, 0) > layer, inputs, of_layers, "an entry of layer " + std::to_string(layer)));
  }
  return expect(inputs.dim(Input::kHostKvCachePoolMapping, 1) == 2, inputs, Input::kHostKvCachePoolMapping,
                "[layers, 2]");
}

Status MemoryCheck::check_host(const Inputs& inputs) {
  for (int32_t i = 0; i < inputs.list().size(); ++i) {
    const Input input = inputs.list().at(i);
    const void* const data = inputs.data<void>(input);
    if (!info_of(input).is_host || (data != nullptr && data == known_host_[i])) continue;
    cudaPointerAttributes attributes{};
    if (data != nullptr) TW_RETURN_IF_ERROR(attributes_of(data, &attributes));
    if (data == nullptr || attributes.type == cudaMemoryTypeDevice) {
      return bad(input, std::string(data == nullptr ? "has no address" : "is in device memory") +
                            ". Fix: bind an array in CPU memory, as TensorRT-LLM's runtime does");
    }
    known_host_[i] = data;
  }
  return {};
}

Status MemoryCheck::check_pool(const void* pool) {
  if (pool == nullptr) return bad(Input::kHostKvCachePoolPointers, "is 0 for the layer's pool: there is no KV cache");
  if (pool == known_pool_) return {};
  int device = 0;
  TW_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
  cudaPointerAttributes attributes{};
  TW_RETURN_IF_ERROR(attributes_of(pool, &attributes));
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != device) {
    return bad(Input::kHostKvCachePoolPointers,
               "names a pool that is not, or no longer, in the memory of device " + std::to_string(device));
  }
  known_pool_ = pool;
  return {};
}

}  // namespace tokenweave::reference
