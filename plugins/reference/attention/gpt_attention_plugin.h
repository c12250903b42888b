// The plugin GPTAttention.
#pragma once

#include "attention.h"
#include "gpt_attention_fields.h"
#include "gpt_attention_inputs.h"
#include "plugin_v2.h"

namespace tokenweave::reference {

class GptAttentionPlugin final : public PluginV2<GptAttentionPlugin, GptAttentionFields> {
 public:
  static constexpr const char* kName = "GPTAttention";

  GptAttentionPlugin(Fields fields, nvinfer1::TensorRTPhase phase);

  int32_t getNbOutputs() const noexcept override { return 1; }
  nvinfer1::DataType getOutputDataType(int32_t index, const nvinfer1::DataType* types,
                                       int32_t num_inputs) const noexcept override;
  nvinfer1::DimsExprs getOutputDimensions(int32_t index, const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                       const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::PluginTensorDesc* outputs, int32_t num_outputs) const noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  WorkspaceSizes sizes(const Inputs& inputs) const;
  /// That the table of the rotary embedding has; 0: there is none.
  int32_t positions(const Inputs& inputs) const;
  Status find_cache(const Inputs& inputs, AttentionCall* call, Reach* reach);
  Status read_step(const Inputs& inputs, bool capturing, AttentionCall* call) const;

  MemoryCheck memory_;
};

}  // namespace tokenweave::reference
