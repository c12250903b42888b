#include "fake_attention.h"

#include <cstring>

// V2 plugins are deprecated.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace tokenweave::test {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr size_t kWorkspaceBytes = 12345;

std::vector<int64_t> list(const nvinfer1::Dims& dims) { return {dims.d, dims.d + dims.nbDims}; }

class Inner final : public nvinfer1::IPluginV2DynamicExt {
 public:
  /// `state` is what is serialised: how often configurePlugin was called on this plugin's ancestors.
  explicit Inner(int32_t state) : number_(fake_attention().made++), state_(state) { ++fake_attention().alive; }
  ~Inner() override { --fake_attention().alive; }

  const char* getPluginType() const noexcept override { return "GPTAttention"; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  int32_t getNbOutputs() const noexcept override { return fake_attention().outputs; }
  int32_t initialize() noexcept override { return note("initialize"); }
  void terminate() noexcept override { note("terminate"); }
  size_t getSerializationSize() const noexcept override { return sizeof state_; }
  void serialize(void* buffer) const noexcept override { std::memcpy(buffer, &state_, sizeof state_); }
  void destroy() noexcept override {
    note("destroy");
    delete this;
  }
  nvinfer1::IPluginV2DynamicExt* clone() const noexcept override {
    return note("clone") == 0 ? new Inner(state_) : nullptr;
  }
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return "tensorrt_llm"; }
  DataType getOutputDataType(int32_t, const DataType* types, int32_t) const noexcept override { return types[0]; }
  void attachToContext(cudnnContext*, cublasContext*, nvinfer1::IGpuAllocator*) noexcept override { note("attach"); }
  void detachFromContext() noexcept override { note("detach"); }

  DimsExprs getOutputDimensions(int32_t, const DimsExprs* inputs, int32_t,
                                nvinfer1::IExprBuilder& builder) noexcept override {
    DimsExprs output = inputs[0];
    output.nbDims = static_cast<int32_t>(fake_attention().output_rank);
    output.d[1] = builder.constant(fake_attention().width);
    return output;
  }
  bool supportsFormatCombination(int32_t position, const PluginTensorDesc* descs, int32_t, int32_t) noexcept override {
    return descs[position].type != DataType::kFP8;
  }
  void configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                       const DynamicPluginTensorDesc* outputs, int32_t) noexcept override {
    note("configure");
    ++state_;
    fake_attention().configured_max.clear();
    fake_attention().configured_min.clear();
    fake_attention().configured_desc.clear();
    for (int32_t i = 0; i < num_inputs; ++i) {
      fake_attention().configured_max.push_back(inputs[i].max.d[0]);
      fake_attention().configured_min.push_back(inputs[i].min.d[0]);
      fake_attention().configured_desc.push_back(list(inputs[i].desc.dims));
    }
    fake_attention().configured_desc.push_back(list(outputs[0].desc.dims));
  }
  size_t getWorkspaceSize(const PluginTensorDesc* inputs, int32_t num_inputs, const PluginTensorDesc* outputs,
                          int32_t) const noexcept override {
    fake_attention().sized.clear();
    for (int32_t i = 0; i < num_inputs; ++i) fake_attention().sized.push_back(list(inputs[i].dims));
    fake_attention().sized.push_back(list(outputs[0].dims));
    return kWorkspaceBytes;
  }
  int32_t enqueue(const PluginTensorDesc* descs, const PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t) noexcept override {
    fake_attention().inputs.clear();
    for (size_t i = 0; i < fake_attention().configured_max.size(); ++i) {
      fake_attention().inputs.push_back({list(descs[i].dims), inputs[i]});
    }
    fake_attention().output = outputs[0];
    fake_attention().workspace = workspace;
    return note("enqueue");
  }

 protected:
  int32_t getTensorRTVersion() const noexcept override {
    return fake_attention().kind << 24 | (NV_TENSORRT_VERSION & 0xffffff);
  }

 private:
  /// 7 when it shall fail.
  int32_t note(const std::string& what) const {
    fake_attention().calls.push_back(what + " " + std::to_string(number_));
    return fake_attention().failing == what ? 7 : 0;
  }

  const int number_;
  int32_t state_;
};

std::string text(const PluginField& field) {
  std::string result = field.name;
  for (int32_t i = 0; i < field.length; ++i) {
    switch (field.type) {
      case PluginFieldType::kINT8:
        result += " INT8 " + std::to_string(static_cast<const int8_t*>(field.data)[i]);
        break;
      case PluginFieldType::kINT32:
        result += " INT32 " + std::to_string(static_cast<const int32_t*>(field.data)[i]);
        break;
      case PluginFieldType::kINT64:
        result += " INT64 " + std::to_string(static_cast<const int64_t*>(field.data)[i]);
        break;
      case PluginFieldType::kFLOAT32:
        result += " FLOAT32 " + std::to_string(static_cast<const float*>(field.data)[i]);
        break;
      default:
        result += " ?";
    }
  }
  return result;
}

class Creator final : public nvinfer1::IPluginCreator {
 public:
  const char* getPluginName() const noexcept override { return "GPTAttention"; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  const PluginFieldCollection* getFieldNames() noexcept override { return nullptr; }
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return "tensorrt_llm"; }

  nvinfer1::IPluginV2* createPlugin(const char*, const PluginFieldCollection* fields) noexcept override {
    fake_attention().fields.clear();
    for (int32_t i = 0; i < fields->nbFields; ++i) fake_attention().fields.push_back(text(fields->fields[i]));
    return fake_attention().failing == "createPlugin" ? nullptr : new Inner(0);
  }
  nvinfer1::IPluginV2* deserializePlugin(const char*, const void* data, size_t bytes) noexcept override {
    int32_t state = 0;
    if (bytes != sizeof state || fake_attention().failing == "deserializePlugin") return nullptr;
    std::memcpy(&state, data, sizeof state);
    return new Inner(state);
  }
};

}  // namespace

FakeAttention& fake_attention() {
  static FakeAttention fake;
  return fake;
}

nvinfer1::IPluginCreatorInterface* fake_attention_creator() {
  static Creator creator;
  return &creator;
}

}  // namespace tokenweave::test
