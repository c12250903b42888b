// Plugins of TensorRT's older kind as TensorRT handles them: made by the library's creators, stored, loaded and run.
#pragma once

#include <NvInferRuntime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../trt/fake_gpu.h"
#include "../trt/field_list.h"
#include "add_rms_norm.h"
#include "log.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace tokenweave::test {

using nvinfer1::DataType;
using nvinfer1::IPluginV2DynamicExt;

struct DestroyPlugin {
  void operator()(IPluginV2DynamicExt* plugin) const { plugin->destroy(); }
};
using PluginV2Ptr = std::unique_ptr<IPluginV2DynamicExt, DestroyPlugin>;

inline nvinfer1::IPluginCreator& creator(const std::string& name) {
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const all = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const one = static_cast<nvinfer1::IPluginCreator*>(all[i]);
    if (one->getPluginName() == name) return *one;
  }
  throw std::out_of_range(name);
}

/// As a network makes it; null when it is refused.
inline PluginV2Ptr create(const std::string& name, const FieldList& fields) {
  return PluginV2Ptr(static_cast<IPluginV2DynamicExt*>(creator(name).createPlugin("layer", fields.collection())));
}

/// As an engine brings it.
inline PluginV2Ptr load(const std::string& name, const std::vector<uint8_t>& stored) {
  return PluginV2Ptr(
      static_cast<IPluginV2DynamicExt*>(creator(name).deserializePlugin("layer", stored.data(), stored.size())));
}

inline std::vector<uint8_t> store(const PluginV2Ptr& plugin) {
  std::vector<uint8_t> bytes(plugin->getSerializationSize());
  plugin->serialize(bytes.data());
  return bytes;
}

inline nvinfer1::PluginTensorDesc desc(const std::vector<int64_t>& sizes, DataType type = DataType::kBF16) {
  nvinfer1::PluginTensorDesc result{{}, type, nvinfer1::TensorFormat::kLINEAR, 1.0f};
  result.dims.nbDims = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.dims.d);
  return result;
}

/// Tells a plugin the largest shapes of its inputs.
inline void configure(const PluginV2Ptr& plugin, const std::vector<nvinfer1::PluginTensorDesc>& inputs) {
  std::vector<nvinfer1::DynamicPluginTensorDesc> in;
  for (const nvinfer1::PluginTensorDesc& input : inputs) in.push_back({input, input.dims, input.dims, {}});
  plugin->configurePlugin(in.data(), static_cast<int32_t>(in.size()), nullptr, plugin->getNbOutputs());
}

/// What add_rms_norm, which is not linked, was asked.
std::vector<reference::AddRmsNorm>& asked_norms();

}  // namespace tokenweave::test
