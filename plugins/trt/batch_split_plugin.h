// TokenWeaveBatchSplit: the batch's device tensors for either half, once a step for all attention layers.
#pragma once

#include "batch_halves.h"
#include "fields.h"
#include "plugin.h"

namespace tokenweave::trt {

struct BatchSplitFields {
  int32_t max_num_tokens = 0;  ///< of a step that the network was woven for

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase) {
    visitor.int32("max_num_tokens", &max_num_tokens, 1, kNoLimit);
  }
  Status check(nvinfer1::TensorRTPhase) const { return {}; }
};

/// Inputs:  prefix_ref (dim 0: tokens of the prefix), num_tokens_ref (dim 0: tokens of the step), of which only the
///          shapes are read; host_request_types [B], host_context_lengths [B], both of the host; sequence_length [B],
///          context_lengths [B]. All others INT32.
/// Outputs: the last two, for the prefix, then for the suffix, in the shapes of the inputs. A half's sequences come
///          first; what lies behind them is not written.
///
/// The halves' attention cuts the host's lengths by the rows that it gets: the suffix at their tokens less its rows. So
/// a step would be cut at two places when the lengths count other tokens than it has, or when it has more than the
/// network was woven for, because the suffix has no rows for these. Both are refused.
class BatchSplitPlugin final : public PluginWithFields<BatchSplitPlugin, BatchSplitFields> {
 public:
  static constexpr const char* kName = "TokenWeaveBatchSplit";

  BatchSplitPlugin(Fields fields, nvinfer1::TensorRTPhase phase) : PluginWithFields(kName, std::move(fields), phase) {}

  int32_t getNbOutputs() const noexcept override { return 4; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;

  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;
};

}  // namespace tokenweave::trt
