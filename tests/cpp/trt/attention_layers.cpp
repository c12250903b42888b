#include "attention_layers.h"

#include <fstream>
#include <numeric>

#include "fake_tensorrt.h"

namespace tokenweave::test {

using nlohmann::json;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginTensorDesc;

const json& attention_vectors() {
  static const json document = json::parse(std::ifstream(TOKENWEAVE_ATTENTION_VECTORS));
  return document;
}

std::vector<uint8_t> pack(const std::vector<std::pair<std::string, int32_t>>& fields) {
  std::vector<uint8_t> bytes{'T', 'W', 'P', 'F', 1, 0, static_cast<uint8_t>(fields.size()), 0};
  for (const auto& [name, value] : fields) {
    bytes.insert(bytes.end(), {static_cast<uint8_t>(name.size()), 0, 5, 0, 1, 0, 0, 0});
    bytes.insert(bytes.end(), name.begin(), name.end());
    const auto* data = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), data, data + sizeof value);
  }
  return bytes;
}

FieldList attention_fields(int half) {
  const std::string name = "GPTAttention", version = "1", name_space = "tensorrt_llm";
  FieldList fields;
  fields.set("half", half).set("num_heads", 4).set("head_size", 8);
  fields.bytes("inner_name", {name.begin(), name.end()}).bytes("inner_version", {version.begin(), version.end()});
  fields.bytes("inner_namespace", {name_space.begin(), name_space.end()});
  fields.bytes("inner", pack({{"layer_idx", 3}, {"num_heads", 4}}));
  fields.set("roles", {1, 2, 3, 11, 12, 4, 5, 6, 7, 8, 0, 0, 0, 0, 9, 0, 10});
  return fields;
}

std::vector<PluginTensorDesc> attention_descs(int64_t rows, int64_t sequences) {
  const auto ints = [](std::vector<int64_t> sizes) { return desc(std::move(sizes), DataType::kINT32); };
  const auto longs = [](std::vector<int64_t> sizes) { return desc(std::move(sizes), DataType::kINT64); };
  const PluginTensorDesc batch = ints({sequences}), table = ints({kPools, sequences, 2, kBlocks});
  return {desc({rows, kWidth}),
          batch,
          batch,
          ints({kLayers}),
          ints({1}),
          batch,
          ints({sequences, 1, kMaxLength}),
          batch,
          table,
          table,
          longs({kPools, 2}),
          ints({kLayers, 2}),
          desc({4}, DataType::kFLOAT),
          desc({1, 512}, DataType::kFLOAT),
          batch,
          longs({16}),
          longs({1}),
          desc({rows, 32})};
}

std::vector<DynamicPluginTensorDesc> attention_bounds(int64_t rows, int64_t sequences) {
  const std::vector<PluginTensorDesc> min = attention_descs(0, 1), max = attention_descs(rows, sequences),
                                      opt = attention_descs(rows / 2, sequences / 2);
  std::vector<DynamicPluginTensorDesc> bounds(max.size());
  for (size_t i = 0; i < max.size(); ++i) {
    bounds[i] = {max[i], min[i].dims, max[i].dims, opt[i].dims};
    for (int32_t k = 0; k < max[i].dims.nbDims; ++k) {
      if (max[i].dims.d[k] != min[i].dims.d[k]) bounds[i].desc.dims.d[k] = -1;
    }
  }
  return bounds;
}

AttentionStep::AttentionStep(const json& step)
    : types(step["host_request_types"]),
      contexts(step["host_context_lengths"]),
      past(step["host_past_key_value_lengths"]),
      lengths(step["sequence_length"]),
      block_offsets(static_cast<size_t>(kPools * sequences() * 2 * kBlocks)),
      indirection(static_cast<size_t>(sequences() * kMaxLength)) {
  std::iota(block_offsets.begin(), block_offsets.end(), 1000);
  host_block_offsets = block_offsets;
  std::iota(indirection.begin(), indirection.end(), 500000);
}

int64_t AttentionStep::tokens() const {
  int64_t tokens = 0;
  for (size_t i = 0; i < types.size(); ++i) tokens += types[i] == 0 ? contexts[i] : 1;
  return tokens;
}

std::vector<const void*> AttentionStep::inputs() const {
  std::vector<const void*> all(kNumInputs, this);  // addresses that nobody reads
  all[kSequenceLength] = lengths.data();
  all[kHostPast] = past.data();
  all[kHostWindows] = windows.data();
  all[kHostSink] = sink.data();
  all[kContextLengths] = contexts.data();
  all[kCacheIndirection] = indirection.data();
  all[kHostTypes] = types.data();
  all[kBlockOffsets] = block_offsets.data();
  all[kHostBlockOffsets] = host_block_offsets.data();
  all[kHostContexts] = contexts.data();
  all[kHostProgress] = &progress;
  return all;
}

PluginPtr built(const FieldList& fields) { return create("TokenWeaveAttention", fields, TensorRTPhase::kBUILD); }

int32_t configure(const PluginPtr& plugin, const std::vector<DynamicPluginTensorDesc>& bounds) {
  return capability<IPluginV3OneBuildV2>(plugin).configurePlugin(bounds.data(), kNumInputs, &bounds.back(), 1);
}

PluginPtr loaded(const PluginPtr& built) {
  const auto* stored = capability<IPluginV3OneRuntime>(built).getFieldsToSerialize();
  return PluginPtr(creator("TokenWeaveAttention").createPlugin("layer", stored, TensorRTPhase::kRUNTIME));
}

AttentionLayer::AttentionLayer(int half) {
  const PluginPtr network = built(attention_fields(half));
  EXPECT_EQ(configure(network, attention_bounds(kMaxTokens)), 0);
  const PluginPtr engine = loaded(network);
  if (engine == nullptr) throw std::invalid_argument(last_error().message);
  plugin_.reset(capability<IPluginV3OneRuntime>(engine).attachToContext(nullptr));
}

int32_t AttentionLayer::change_shape(const AttentionStep& step, int64_t rows) const {
  const auto descs = attention_descs(rows, step.sequences());
  return capability<IPluginV3OneRuntime>(plugin_).onShapeChange(descs.data(), kNumInputs, &descs.back(), 1);
}

int32_t AttentionLayer::run(const AttentionStep& step, int64_t rows, const std::vector<const void*>& inputs) const {
  auto descs = attention_descs(rows, step.sequences());
  descs[kCacheIndirection].dims.d[1] = step.beams;
  uint8_t output[1], workspace[1];
  void* const outputs[] = {output};
  return capability<IPluginV3OneRuntime>(plugin_).enqueue(descs.data(), &descs.back(), inputs.data(), outputs,
                                                          workspace, kMain);
}

BatchSplitLayer::BatchSplitLayer(TensorRTPhase phase) {
  const PluginPtr engine = create("TokenWeaveBatchSplit", FieldList().set("max_num_tokens", kMaxTokens), phase);
  plugin_.reset(capability<IPluginV3OneRuntime>(engine).attachToContext(nullptr));
}

std::vector<PluginTensorDesc> BatchSplitLayer::descs(const AttentionStep& step, int64_t prefix_rows) {
  const PluginTensorDesc batch = desc({step.sequences()}, DataType::kINT32);
  return {desc({prefix_rows, kWidth}), desc({step.tokens()}, DataType::kINT32), batch, batch, batch, batch};
}

int32_t BatchSplitLayer::run(const AttentionStep& step, const std::vector<PluginTensorDesc>& descs, HalfLengths* prefix,
                             HalfLengths* suffix) const {
  const void* const inputs[] = {
      &step,  // addresses of references, which nobody reads
      &step, step.types.data(), step.contexts.data(), step.lengths.data(), step.contexts.data()};
  void* const outputs[] = {prefix->sequence_length.data(), prefix->context_lengths.data(),
                           suffix->sequence_length.data(), suffix->context_lengths.data()};
  return capability<IPluginV3OneRuntime>(plugin_).enqueue(descs.data(), nullptr, inputs, outputs, nullptr, kMain);
}

AttentionTest::AttentionTest() {
  fake_attention() = FakeAttention{};
  set_fake_version(100600);
  set_fake_creator(fake_attention_creator(), "tensorrt_llm");
}

AttentionTest::~AttentionTest() {
  EXPECT_EQ(fake_attention().alive, 0);
  set_fake_creator(nullptr, "");
}

}  // namespace tokenweave::test
