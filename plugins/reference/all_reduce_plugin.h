// TensorRT-LLM's AllReduce on NCCL.
#pragma once

#include <cstdint>
#include <vector>

#include "communicator.h"
#include "plugin_v2.h"

namespace tokenweave::reference {

/// AllReduceStrategy NCCL_SYMMETRIC, as TensorRT-LLM 0.20 to 1.2 number it.
inline constexpr int8_t kNcclSymmetric = 8;

/// AllReduceFusionOp, as far as it is done here, as the same releases number it.
enum class FusionOp : int8_t { kNone = 0, kResidualRmsNorm = 1 };

struct AllReduceFields {
  // Given by the network, in the order of TensorRT-LLM's creator.
  std::vector<int32_t> group;
  int32_t type_id = 0;
  int8_t strategy = 0;
  int8_t config = 0;  ///< of TensorRT-LLM's own kernels: not used
  int8_t fusion_op = 0;
  int32_t counter = 0;  ///< the same
  float eps = 0;
  int8_t affine = 0;
  int8_t bias = 0;
  int8_t scale = 0;

  /// Learnt by configurePlugin: an input `all_reduce_workspace` comes second, as most strategies have it. Not used.
  int8_t has_workspace = 0;
  /// Learnt likewise: KiB of the largest tensor, where strategy is NCCL_SYMMETRIC.
  int32_t window_kib = 0;

  void visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase);

  bool symmetric() const { return strategy == kNcclSymmetric; }
  bool fused() const { return static_cast<FusionOp>(fusion_op) == FusionOp::kResidualRmsNorm; }
};

/// Inputs:  tensor, workspace INT64 if any, and when fused: bias [hidden] if any, residual, norm_weight [hidden] if
///          affine.
/// Outputs: the sum over the group's ranks; when fused, the sum plus bias and residual, normalised, and before that.
class AllReducePlugin final : public PluginV2<AllReducePlugin, AllReduceFields> {
 public:
  static constexpr const char* kName = "AllReduce";

  AllReducePlugin(Fields fields, nvinfer1::TensorRTPhase phase) : PluginV2(kName, std::move(fields), phase) {}

  Status start();

  int32_t getNbOutputs() const noexcept override { return fields_.fused() ? 2 : 1; }
  nvinfer1::DimsExprs getOutputDimensions(int32_t, const nvinfer1::DimsExprs* inputs, int32_t,
                                          nvinfer1::IExprBuilder&) noexcept override;
  nvinfer1::DataType getOutputDataType(int32_t, const nvinfer1::DataType*, int32_t) const noexcept override {
    return static_cast<nvinfer1::DataType>(fields_.type_id);
  }
  bool supportsFormatCombination(int32_t position, const nvinfer1::PluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                       const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;

 private:
  /// Inputs besides a workspace.
  int32_t num_tensors() const { return fields_.fused() ? 2 + fields_.bias + fields_.affine : 1; }
  Status check_counts(int32_t num_inputs, int32_t num_outputs) const;
  Status check_hidden(int64_t hidden) const;
  Status sum(const void* input, size_t count, void* output, const void** where, cudaStream_t stream) const;
  Status add_and_normalise(const nvinfer1::Dims& dims, const void* sum, const void* const* rest, void* const* outputs,
                           cudaStream_t stream) const;

  Communicator* communicator_ = nullptr;  // of a started plugin; the process's
  const Window* window_ = nullptr;        // the same, where strategy is NCCL_SYMMETRIC
};

}  // namespace tokenweave::reference
