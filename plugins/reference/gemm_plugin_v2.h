// TensorRT-LLM's Gemm on cuBLASLt.
#pragma once

#include <cstdint>
#include <memory>

#include "gemm.h"
#include "plugin_v2.h"

namespace tokenweave::reference {

struct GemmV2Fields {
  // Given by the network, in the order of TensorRT-LLM's `gemm_plugin`.
  int32_t transa = 0;
  int32_t transb = 0;
  int32_t pad_lda = 0;
  int32_t pad_ldb = 0;
  int32_t pad_ldc = 0;
  int32_t type_id = 0;
  int32_t use_fp8 = 0;
  float alpha = 1.0f;

  void visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase) const;
};

/// Inputs:  x [..., k], weight [n, k] with transb, else [k, n].
/// Outputs: alpha * x * weight [..., n], accumulated in fp32.
class GemmV2Plugin final : public PluginV2<GemmV2Plugin, GemmV2Fields> {
 public:
  static constexpr const char* kName = "Gemm";

  GemmV2Plugin(Fields fields, nvinfer1::TensorRTPhase phase) : PluginV2(kName, std::move(fields), phase) {}

  Status start() { return runner_ != nullptr ? Status{} : GemmRunner::acquire(&runner_); }

  int32_t getNbOutputs() const noexcept override { return 1; }
  nvinfer1::DimsExprs getOutputDimensions(int32_t, const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                                          nvinfer1::IExprBuilder&) noexcept override;
  nvinfer1::DataType getOutputDataType(int32_t, const nvinfer1::DataType*, int32_t) const noexcept override {
    return static_cast<nvinfer1::DataType>(fields_.type_id);
  }
  bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                       int32_t) noexcept override {}
  size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                          int32_t) const noexcept override {
    return GemmRunner::kWorkspaceBytes;
  }
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  std::shared_ptr<GemmRunner> runner_;  // of a started plugin
};

}  // namespace tokenweave::reference
