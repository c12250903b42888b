#include "gpt_attention_plugin.h"

#include <string>
#include <utility>

#include "cuda_objects.h"
#include "cuda_status.h"

namespace tokenweave::reference {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

std::string layer_name(const GptAttentionFields& fields) {
  return std::string(GptAttentionPlugin::kName) + " layer " + std::to_string(fields.layer_idx);
}

HostBatch host_batch(const Inputs& inputs) {
  return {inputs.dim(Input::kContextLengths, 0), inputs.dim(Input::kQkv, 0),
          inputs.data<int32_t>(Input::kHostRequestTypes), inputs.data<int32_t>(Input::kHostContextLengths),
          inputs.data<int32_t>(Input::kHostPastKeyValueLengths)};
}

/// Of one pool: [sequences, 2, blocks].
const int32_t* block_table(const Inputs& inputs, Input table, int32_t pool) {
  const int64_t of_a_pool = int64_t{2} * inputs.dim(table, 1) * inputs.dim(table, 3);
  return inputs.data<int32_t>(table) + pool * of_a_pool;
}

}  // namespace

GptAttentionPlugin::GptAttentionPlugin(Fields fields, nvinfer1::TensorRTPhase phase)
    : PluginV2(layer_name(fields), std::move(fields), phase) {}

DataType GptAttentionPlugin::getOutputDataType(int32_t, const DataType*, int32_t) const noexcept {
  return fields_.dtype;
}

DimsExprs GptAttentionPlugin::getOutputDimensions(int32_t, const DimsExprs* inputs, int32_t,
                                                  nvinfer1::IExprBuilder& builder) noexcept {
  DimsExprs out{};
  out.nbDims = -1;  // how an IPluginV2 says that it has none
  run([&]() -> Status {
    const DimsExprs& qkv = inputs[0];
    const int32_t width = fields_.qkv_width();
    if (qkv.nbDims != 2 || (qkv.d[1]->isConstant() && qkv.d[1]->getConstantValue() != width)) {
      return bad("qkv is not [tokens, " + std::to_string(width) + "]");
    }
    out = qkv;
    out.d[1] = builder.constant(fields_.heads.q * fields_.heads.size);
    return {};
  });
  return out;
}

bool GptAttentionPlugin::supportsFormatCombination(int32_t position, const PluginTensorDesc* descs, int32_t num_inputs,
                                                   int32_t num_outputs) noexcept {
  const InputList list(fields_);
  const int32_t failed = run([&]() -> Status {
    if (num_inputs == list.size() && num_outputs == 1) return {};
    return bad("has " + std::to_string(num_inputs) + " inputs and " + std::to_string(num_outputs) +
               " outputs, expected " + std::to_string(list.size()) + " and 1");
  });
  if (failed != 0) return false;
  const DataType expected = position == num_inputs ? fields_.dtype : list.type_of(list.at(position));
  return descs[position].format == nvinfer1::TensorFormat::kLINEAR && descs[position].type == expected;
}

void GptAttentionPlugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                                         int32_t) noexcept {
  run([&]() -> Status {
    if (fields_.sms > 0) return {};  // TensorRT comes again at run time, when shapes change
    int device = 0;
    TW_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
    return cuda_status(cudaDeviceGetAttribute(&fields_.sms, cudaDevAttrMultiProcessorCount, device),
                       "cudaDeviceGetAttribute");
  });
}

WorkspaceSizes GptAttentionPlugin::sizes(const Inputs& inputs) const {
  const Heads& heads = fields_.heads;
  return {inputs.dim(Input::kQkv, 0),      inputs.dim(Input::kContextLengths, 0), heads.q, heads.kv, heads.size,
          cta_slots(fields_.sms, heads.kv)};
}

size_t GptAttentionPlugin::getWorkspaceSize(const PluginTensorDesc* inputs, int32_t, const PluginTensorDesc*,
                                            int32_t) const noexcept {
  const InputList list(fields_);
  return lay_out(sizes(Inputs(list, inputs, nullptr)), nullptr, nullptr);
}

int32_t GptAttentionPlugin::positions(const Inputs& inputs) const {
  if (fields_.rotary_dims == 0) return 0;
  return static_cast<int32_t>(inputs.volume(Input::kRotaryCosSin) / fields_.rotary_dims);
}

Status GptAttentionPlugin::find_cache(const Inputs& inputs, AttentionCall* call, Reach* reach) {
  const int32_t* const mapping = inputs.data<int32_t>(Input::kHostKvCachePoolMapping) + int64_t{2} * fields_.layer_idx;
  const int32_t pool = mapping[0], layer_in_pool = mapping[1];
  const int32_t pools = inputs.dim(Input::kHostKvCachePoolPointers, 0);
  if (pool < 0 || pool >= pools || pool >= inputs.dim(Input::kKvCacheBlockOffsets, 0) || layer_in_pool < 0) {
    return bad("host_kv_cache_pool_mapping says pool " + std::to_string(pool) + ", layer " +
               std::to_string(layer_in_pool) + " in it; there are " + std::to_string(pools) + " pools");
  }
  // [pools, 2]: the primary pool, and a secondary one in CPU memory.
  const int64_t address = inputs.data<int64_t>(Input::kHostKvCachePoolPointers)[2 * pool];
  auto* const pages = reinterpret_cast<uint8_t*>(address);
  TW_RETURN_IF_ERROR(memory_.check_pool(pages));

  LayerCache& cache = call->cache;
  constexpr int64_t kBytesOfElement = 2, kPagesOfBlock = 2;
  const int64_t page_bytes = kBytesOfElement * fields_.heads.kv * fields_.tokens_per_block * fields_.heads.size;
  cache.pages = pages + kPagesOfBlock * layer_in_pool * page_bytes;
  cache.tokens_per_block = fields_.tokens_per_block;
  cache.max_blocks = inputs.dim(Input::kKvCacheBlockOffsets, 3);
  cache.blocks = block_table(inputs, Input::kKvCacheBlockOffsets, pool);
  cache.lengths = inputs.data<int32_t>(Input::kSequenceLength);
  cache.context_lengths = inputs.data<int32_t>(Input::kContextLengths);
  *reach = {inputs.data<int32_t>(Input::kHostMaxAttentionWindowSizes)[fields_.layer_idx], positions(inputs),
            cache.max_blocks, cache.tokens_per_block, block_table(inputs, Input::kHostKvCacheBlockOffsets, pool)};
  return {};
}

Status GptAttentionPlugin::read_step(const Inputs& inputs, bool capturing, AttentionCall* call) const {
  const HostBatch host = host_batch(inputs);
  const int32_t sink = *inputs.data<int32_t>(Input::kHostSinkTokenLength);
  if (sink != 0) return bad("host_sink_token_length is " + std::to_string(sink) + ", sink tokens are not served");
  if (*inputs.data<int64_t>(Input::kHostContextProgress) != 0) {
    return bad("host_context_progress is set, and progress of a context is not reported. Fix: pass 0");
  }
  TW_RETURN_IF_ERROR(read_batch(host, &call->batch));
  const int32_t group = fields_.heads.group_size(), slots = cta_slots(fields_.sms, fields_.heads.kv);
  call->context_grid = make_grid(call->batch.context, host.context_lengths, group, slots, capturing);
  call->generation_grid = make_grid(call->batch.generation, nullptr, group, slots);
  return {};
}

int32_t GptAttentionPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                    const void* const* data, void* const* outputs, void* workspace,
                                    cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    const InputList list(fields_);
    const Inputs inputs(list, input_descs, data);
    TW_RETURN_IF_ERROR(check_shapes(inputs, fields_));
    if (inputs.dim(Input::kQkv, 0) == 0) return {};
    TW_RETURN_IF_ERROR(memory_.check_host(inputs));

    AttentionCall call;
    Reach reach;
    TW_RETURN_IF_ERROR(find_cache(inputs, &call, &reach));
    bool capturing = false;
    TW_RETURN_IF_ERROR(trt::is_capturing(stream, &capturing));
    TW_RETURN_IF_ERROR(read_step(inputs, capturing, &call));
    // A graph is captured with lengths that are rounded up.
    if (!capturing) TW_RETURN_IF_ERROR(check_reach(host_batch(inputs), reach));
    call.dtype = fields_.dtype;
    call.heads = fields_.heads;
    call.scale = fields_.scale;
    if (fields_.rotary_dims > 0) call.rotation = {inputs.data<float>(Input::kRotaryCosSin), fields_.rotary_dims};
    call.qkv = inputs.data<void>(Input::kQkv);
    call.out = outputs[0];
    lay_out(sizes(inputs), workspace, &call.workspace);
    return queue_attention_call(call, stream);
  });
}

}  // namespace tokenweave::reference
