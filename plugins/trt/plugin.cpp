#include "plugin.h"

#include "counters.h"
#include "cuda_status.h"

namespace tokenweave::trt {

using nvinfer1::DataType;

Status check_counts(const TensorCounts& given, const TensorCounts& expected) {
  if (given.inputs == expected.inputs && given.outputs == expected.outputs) return {};
  return error(TW_INVALID_ARGUMENT, "has " + std::to_string(given.inputs) + " inputs and " +
                                        std::to_string(given.outputs) + " outputs, expected " +
                                        std::to_string(expected.inputs) + " and " + std::to_string(expected.outputs));
}

size_t bytes_of(const nvinfer1::PluginTensorDesc& desc) {
  size_t bytes = 1;
  switch (desc.type) {
    case DataType::kINT64:
      bytes = 8;
      break;
    case DataType::kFLOAT:
    case DataType::kINT32:
      bytes = 4;
      break;
    case DataType::kHALF:
    case DataType::kBF16:
      bytes = 2;
      break;
    default:
      break;
  }
  for (int32_t i = 0; i < desc.dims.nbDims; ++i) bytes *= static_cast<size_t>(desc.dims.d[i]);
  return bytes;
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

bool Plugin::inert() const {
  if (building_ && counters().while_building++ == 0) warn_of_skipping(where_);
  return building_;
}

Status copy_unaliased(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs, void* const* outputs,
                      int32_t count, cudaStream_t stream) {
  for (int32_t i = 0; i < count; ++i) {
    if (outputs[i] == inputs[i]) continue;
    if (counters().alias_copies++ == 0) {
      log(Severity::kWARNING,
          "an output of StreamJoin is not aliased to its input and is copied in every step. Fix: build the engine with "
          "the preview feature kALIASED_PLUGIN_IO_10_03");
    }
    if (const size_t bytes = bytes_of(descs[i]); bytes > 0) {
      TW_RETURN_IF_ERROR(cuda_status(cudaMemcpyAsync(outputs[i], inputs[i], bytes, cudaMemcpyDeviceToDevice, stream),
                                     "copying an output that is not aliased"));
    }
  }
  return {};
}

}  // namespace tokenweave::trt
