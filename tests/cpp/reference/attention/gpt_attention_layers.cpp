#include "gpt_attention_layers.h"

#include <fstream>

#include "gpt_attention_creator.h"

/// In the place of the library's.
nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static tokenweave::reference::GptAttentionCreator creator;
  static nvinfer1::IPluginCreatorInterface* const all[] = {&creator};
  count = 1;
  return all;
}

extern "C" cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  using tokenweave::test::device_memory;
  const auto& memory = device_memory();
  const auto* const address = static_cast<const uint8_t*>(pointer);
  const auto* const first = reinterpret_cast<const uint8_t*>(&memory);
  *attributes = {};
  const bool on_device = address >= first && address < first + sizeof memory;
  attributes->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->device = on_device ? memory.device : -1;
  return cudaSuccess;
}

namespace tokenweave {

Status reference::queue_attention_call(const AttentionCall& call, cudaStream_t stream) {
  EXPECT_EQ(stream, test::kMain);
  test::asked_call() = call;
  return {};
}

namespace test {

using nlohmann::json;
using nvinfer1::PluginTensorDesc;

const json& gpt_attention_vectors() {
  static const json document = json::parse(std::ifstream(TOKENWEAVE_GPT_ATTENTION_VECTORS));
  return document;
}

FieldList gpt_attention_fields() {
  FieldList fields;
  for (const json& field : gpt_attention_vectors()["fields"]) {
    const std::string name = field["name"];
    const json& values = field["values"];
    switch (static_cast<PluginFieldType>(field["type"].get<int32_t>())) {
      case PluginFieldType::kINT32:
        fields.set(name, values.get<std::vector<int32_t>>());
        break;
      case PluginFieldType::kINT8:
        fields.flag(name, values[0]);
        break;
      default:
        fields.set(name, values[0].get<float>());
    }
  }
  return fields.set("layer_idx", kLayer);
}

std::optional<AttentionCall>& asked_call() {
  static std::optional<AttentionCall> call;
  return call;
}

DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}

AttentionStep::AttentionStep(const std::vector<Row>& rows) : mapping{0, 0, 0, 1, 1, 1, 1, 0} {
  const auto count = static_cast<int64_t>(rows.size());
  for (const Row& row : rows) {
    const int32_t own = row.type == 0 ? row.tokens : 1;
    tokens += own;
    types.push_back(row.type);
    contexts.push_back(row.tokens);
    lengths.push_back(row.past + own);
    past.push_back(row.past + (row.type == 0 ? own : 0));
  }
  blocks.resize(size_t{kPools} * rows.size() * 2 * kBlocks);
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t block = 0; block < kBlocks; ++block) {
      page(row, block, false) = (row * kBlocks + block) * 2 * kLayers;
      page(row, block, true) = page(row, block, false) + 1;
    }
  }
  pools[2] = reinterpret_cast<int64_t>(device_memory().pool);
  indirection.resize(rows.size());

  const auto ints = [](const std::vector<int64_t>& sizes) { return test::desc(sizes, DataType::kINT32); };
  const auto longs = [](const std::vector<int64_t>& sizes) { return test::desc(sizes, DataType::kINT64); };
  const PluginTensorDesc batch = ints({count}), block_table = ints({kPools, count, 2, kBlocks});
  descs = {test::desc({tokens, kWidth}),
           batch,
           batch,
           ints({kLayers}),
           ints({1}),
           batch,
           ints({count, 1, 1}),
           batch,
           block_table,
           block_table,
           longs({kPools, 2}),
           ints({kLayers, 2}),
           test::desc({kHeadSize / 2}, DataType::kFLOAT),
           test::desc({1, kPositions * kHeadSize}, DataType::kFLOAT),
           batch,
           longs({16}),
           longs({1})};
  inputs = {device_memory().host_input,
            lengths.data(),
            past.data(),
            windows.data(),
            sink.data(),
            contexts.data(),
            indirection.data(),
            types.data(),
            blocks.data(),
            blocks.data(),
            pools.data(),
            mapping.data(),
            table.data(),
            table.data(),
            contexts.data(),
            knobs.data(),
            progress.data()};
}

int32_t& AttentionStep::page(int32_t row, int32_t block, bool value) {
  const auto rows = static_cast<int32_t>(types.size());
  return blocks[static_cast<size_t>(((rows + row) * 2 + (value ? 1 : 0)) * kBlocks + block)];  // of pool 1
}

AttentionLayer::AttentionLayer(const FieldList& fields) {
  const PluginV2Ptr built = create("GPTAttention", fields);
  if (built == nullptr) return;
  AttentionStep largest({{0, 4096, 0}});
  configure(built, largest.descs);
  const PluginV2Ptr of_engine = load("GPTAttention", store(built));
  if (of_engine == nullptr || of_engine->initialize() != 0) return;
  plugin_.reset(of_engine->clone());
  plugin_->attachToContext(nullptr, nullptr, nullptr);
}

std::string AttentionLayer::run(AttentionStep& step) const {
  asked_call().reset();
  static uint8_t output[16], workspace[256];
  void* outputs[] = {output};
  const int32_t status = plugin_->enqueue(step.descs.data(), nullptr, step.inputs.data(), outputs, workspace, kMain);
  return status == 0 ? "" : trt::last_error().message;
}

void AttentionLayer::configure_again() const { configure(plugin_, AttentionStep({{0, 4096, 0}}).descs); }

size_t AttentionLayer::workspace_bytes(AttentionStep& step) const {
  return plugin_->getWorkspaceSize(step.descs.data(), static_cast<int32_t>(step.descs.size()), nullptr, 1);
}

}  // namespace test
}  // namespace tokenweave
