// TokenWeaveBatchSplit: the batch's device tensors for either half, once a step for all attention layers.
#pragma once

#include "batch_halves.h"
#include "fields.h"
#include "plugin.h"

namespace tokenweave::trt {

struct BatchSplitFields {
  void visit(FieldVisitor&, nvinfer1::TensorRTPhase) {}
  Status check(nvinfer1::TensorRTPhase) const { return {}; }
};

/// Inputs:  prefix_ref (dim 0: tokens of the prefix; only its shape is read), host_request_types [B],
///          host_context_lengths [B], both of the host; sequence_length [B], context_lengths [B],
///          kv_cache_block_offsets [pools, B, 2, blocks], cache_indirection [B, 1, max_seq_len]. All INT32.
/// Outputs: the last four, for the prefix, then for the suffix, in the shapes of the inputs. A half's sequences come
///          first; what lies behind them is not written.
class BatchSplitPlugin final : public PluginWithFields<BatchSplitPlugin, BatchSplitFields> {
 public:
  static constexpr const char* kName = "TokenWeaveBatchSplit";

  BatchSplitPlugin(Fields fields, nvinfer1::TensorRTPhase phase) : PluginWithFields(kName, std::move(fields), phase) {}

  int32_t getNbOutputs() const noexcept override { return 8; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                        int32_t) noexcept override {
    return 0;
  }
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;
};

}  // namespace tokenweave::trt
