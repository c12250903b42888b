// TensorRT-LLM's AllGather on NCCL.
#pragma once

#include <cstdint>
#include <vector>

#include "communicator.h"
#include "plugin_v2.h"

namespace tokenweave::reference {

struct AllGatherFields {
  // Given by the network, in the order of TensorRT-LLM's creator.
  std::vector<int32_t> group;
  int32_t type_id = 0;

  void visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase);
};

/// Inputs:  tensor [m, ...], of the same shape on all ranks.
/// Outputs: the tensors of the group's ranks, in the order of their numbers [m * ranks, ...].
class AllGatherPlugin final : public PluginV2<AllGatherPlugin, AllGatherFields> {
 public:
  static constexpr const char* kName = "AllGather";

  AllGatherPlugin(Fields fields, nvinfer1::TensorRTPhase phase) : PluginV2(kName, std::move(fields), phase) {}

  Status start();

  int32_t getNbOutputs() const noexcept override { return 1; }
  nvinfer1::DimsExprs getOutputDimensions(int32_t, const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                                          nvinfer1::IExprBuilder& builder) noexcept override;
  nvinfer1::DataType getOutputDataType(int32_t, const nvinfer1::DataType*, int32_t) const noexcept override {
    return static_cast<nvinfer1::DataType>(fields_.type_id);
  }
  bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t) noexcept override;
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                       int32_t) noexcept override {}
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;

 private:
  Communicator* communicator_ = nullptr;  // of a started plugin; the process's
};

}  // namespace tokenweave::reference
