// Gemm: a matrix product that leaves SMs to the other half's collective.
#pragma once

#include <memory>

#include "gemm.h"
#include "gemm_fields.h"
#include "plugin.h"

namespace tokenweave::trt {

/// Inputs:  x [m, k], weight [n, k] with transb, else [k, n],
///          num_tokens_ref (dim 0: tokens of the step), batch_ref (dim 0: its sequences).
/// Outputs: x * weight [m, n], accumulated in fp32.
/// Only the shapes of the two references are read. Where the step is split the kernel fits on `gemm_sms` SMs of the
/// step's row in the tuning table; else it may take all.
class GemmPlugin final : public PluginWithFields<GemmPlugin, GemmFields> {
 public:
  static constexpr const char* kName = "Gemm";

  GemmPlugin(Fields fields, nvinfer1::TensorRTPhase phase);

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;
  /// TensorRT's workspace serves, because the product runs on the stream that TensorRT gives.
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return GemmRunner::kWorkspaceBytes;
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  Status check_counts(int32_t num_inputs, int32_t num_outputs) const;

  std::shared_ptr<GemmRunner> runner_;  // of an attached plugin that is not building
};

}  // namespace tokenweave::trt
