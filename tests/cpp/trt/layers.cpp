#include "layers.h"

#include <algorithm>

namespace tokenweave::test {

FieldList start_fields(TensorRTPhase phase) {
  FieldList fields;
  fields.set("group", {2, 3}).set("tp_rank", 1).set("type_id", 7).set("eps", 1e-5f);
  fields.set("kind", 0).set("site", 0).set("half", 0);
  fields.flag("residual_sharded", 0).flag("gather_residual", 0).flag("has_bias", 0).flag("side_stream", 1);
  fields.set("weave_hash", 1);
  if (phase == TensorRTPhase::kRUNTIME) fields.set("hidden", kHidden).set("max_rows", 4096);
  return fields;
}

FieldList join_fields(TensorRTPhase phase) {
  FieldList fields;
  fields.set("num_aliased", 2).set("site", 0).set("half", 0).flag("waits", 1);
  if (phase == TensorRTPhase::kRUNTIME) fields.set("num_inputs", 5);
  return fields;
}

nvinfer1::IPluginCreatorV3One& creator(const std::string& name) {
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const all = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const one = static_cast<nvinfer1::IPluginCreatorV3One*>(all[i]);
    if (one->getPluginName() == name) return *one;
  }
  throw std::out_of_range(name);
}

PluginPtr create(const std::string& name, const FieldList& fields, TensorRTPhase phase) {
  return PluginPtr(creator(name).createPlugin("layer", fields.collection(), phase));
}

template <>
nvinfer1::IPluginV3OneCore& capability(const PluginPtr& plugin) {
  return *static_cast<nvinfer1::IPluginV3OneCore*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kCORE));
}

template <>
nvinfer1::IPluginV3OneBuildV2& capability(const PluginPtr& plugin) {
  return *static_cast<nvinfer1::IPluginV3OneBuildV2*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kBUILD));
}

template <>
nvinfer1::IPluginV3OneRuntime& capability(const PluginPtr& plugin) {
  return *static_cast<nvinfer1::IPluginV3OneRuntime*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
}

nvinfer1::Dims dims(std::vector<int64_t> sizes) {
  nvinfer1::Dims result{};
  result.nbDims = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.d);
  return result;
}

nvinfer1::PluginTensorDesc desc(std::vector<int64_t> sizes, DataType type) {
  return {dims(std::move(sizes)), type, nvinfer1::TensorFormat::kLINEAR, 1.0f};
}

namespace {

PluginPtr attach(const std::string& name, const FieldList& fields, TensorRTPhase phase = TensorRTPhase::kRUNTIME) {
  const PluginPtr plugin = create(name, fields, phase);
  if (plugin == nullptr) throw std::invalid_argument(last_error().message);
  return PluginPtr(capability<nvinfer1::IPluginV3OneRuntime>(plugin).attachToContext(nullptr));
}

}  // namespace

Start::Start(const FieldList& fields)
    : plugin_(attach("AllReduceRmsNorm", fields)),
      has_bias_(fields.is_set("has_bias")),
      sharded_(fields.is_set("residual_sharded")) {}

int32_t Start::change_shape() const {
  return capability<nvinfer1::IPluginV3OneRuntime>(plugin_).onShapeChange(nullptr, 0, nullptr, 0);
}

int32_t Start::run(const Sizes& sizes, cudaStream_t stream) const {
  const nvinfer1::PluginTensorDesc vector = desc({kHidden});
  const int64_t proper = sharded_ ? (sizes.rows + 1) / 2 : sizes.rows;
  const nvinfer1::PluginTensorDesc residual = desc({sizes.residual_rows < 0 ? proper : sizes.residual_rows, kHidden});
  std::vector<nvinfer1::PluginTensorDesc> descs{desc({sizes.rows, kHidden}), residual, vector};
  Tensors& t = *tensors_;
  std::vector<const void*> inputs{t.input, t.residual, t.norm_weight};
  if (has_bias_) {
    descs.push_back(vector);
    inputs.push_back(t.bias);
  }
  for (const int64_t size : {sizes.tokens, sizes.batch, int64_t{1}}) descs.push_back(desc({size}, DataType::kINT32));
  inputs.insert(inputs.end(), {t.refs, t.refs, t.chain});
  const std::vector<void*> outputs{t.normed, t.residual_out, t.chain};
  return capability<nvinfer1::IPluginV3OneRuntime>(plugin_).enqueue(descs.data(), nullptr, inputs.data(),
                                                                    outputs.data(), nullptr, stream);
}

WaitFor::WaitFor(const Start& start, const FieldList& fields) : plugin_(attach("StreamJoin", fields)) {
  Tensors& t = start.tensors();
  inputs = {t.normed, t.residual_out, t.input, t.residual, t.chain};
  outputs = {t.normed, t.residual_out, t.chain};
}

int32_t WaitFor::run(cudaStream_t stream) {
  const std::vector<nvinfer1::PluginTensorDesc> descs{desc({4, kHidden}), desc({2, kHidden}),
                                                      desc({1}, DataType::kINT32)};
  return capability<nvinfer1::IPluginV3OneRuntime>(plugin_).enqueue(nullptr, descs.data(), inputs.data(),
                                                                    outputs.data(), nullptr, stream);
}

TwPluginCounters counters() {
  TwPluginCounters result{};
  result.struct_bytes = sizeof result;
  EXPECT_EQ(twPluginGetCounters(&result, nullptr), TW_OK);
  return result;
}

TwStatus last_error() {
  TwStatus status{};
  twPluginLastError(&status);
  return status;
}

PluginTest::PluginTest() {
  gpu() = FakeGpu{};
  twPluginResetCounters();
}

PluginTest::~PluginTest() {
  EXPECT_EQ(gpu().streams, 0);
  EXPECT_EQ(gpu().events, 0);
  EXPECT_EQ(gpu().live_groups, 0);
}

}  // namespace tokenweave::test
