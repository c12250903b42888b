// AllReduceRmsNorm: starts one half's collective, on the communication stream where the other half computes beside it.
#pragma once

#include <memory>

#include "all_reduce_rms_norm_fields.h"
#include "side_stream.h"

namespace tokenweave::trt {

/// Inputs:  input [m, hidden], residual [m, hidden] or [ceil(m / tp), hidden], norm_weight [hidden], bias [hidden] if
/// any,
///          num_tokens_ref (dim 0: tokens of the step), batch_ref (dim 0: its sequences), chain INT32 [1].
/// Outputs: normed [m, hidden], residual_out [ceil(m / tp), hidden] or [m, hidden], chain INT32 [1].
/// Only the shapes of the two references are read. The chain orders the collectives; its value is never written or
/// read.
class AllReduceRmsNormPlugin final : public PluginWithFields<AllReduceRmsNormPlugin, AllReduceRmsNormFields> {
 public:
  static constexpr const char* kName = "AllReduceRmsNorm";

  AllReduceRmsNormPlugin(Fields fields, nvinfer1::TensorRTPhase phase);

  int32_t getNbOutputs() const noexcept override { return 3; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept override;

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                        int32_t) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;

 private:
  /// Positions of the inputs behind the optional bias.
  int32_t tokens_ref() const { return 3 + fields_.has_bias; }
  int32_t batch_ref() const { return tokens_ref() + 1; }
  int32_t chain() const { return tokens_ref() + 2; }
  int32_t num_inputs() const { return tokens_ref() + 3; }

  Status check_counts(int32_t num_inputs, int32_t num_outputs) const;
  Status check_shapes(const nvinfer1::DimsExprs* inputs) const;
  Status attach();
  Status check_residual(const nvinfer1::PluginTensorDesc* descs) const;
  Collective collective(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs, void* const* outputs) const;

  std::shared_ptr<SideStream> side_stream_;  // of an attached plugin that is not building
};

}  // namespace tokenweave::trt
