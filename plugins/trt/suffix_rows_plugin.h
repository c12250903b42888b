// TokenWeaveSuffixRows: the rows of a tensor that belong to the suffix half.
#pragma once

#include "fields.h"
#include "plugin.h"

namespace tokenweave::trt {

struct SuffixRowsFields {
  int32_t site = -1;     ///< that comes next; -1: this is the region's entry
  int32_t max_rows = 0;  ///< of any step; TensorRT sizes the suffix half by it

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase) {
    visitor.int32("site", &site, -1, kNoLimit);
    visitor.int32("max_rows", &max_rows, 1, kNoLimit);
  }
  Status check(nvinfer1::TensorRTPhase) const { return {}; }
};

/// Inputs: tensor [tokens, width]; prefix_ref (dim 0: tokens of the prefix), of which only the shape is read.
/// Output: the rows behind the prefix's, [min(tokens - prefix, max_rows), width].
///
/// A slice layer would do, but for this: one that stands alone between tensors of plugins becomes, in TensorRT 10.6, a
/// copy that starts at row 0 (seen behind attention that is left whole; tests/gpu/test_small_llama.py).
class SuffixRowsPlugin final : public PluginWithFields<SuffixRowsPlugin, SuffixRowsFields> {
 public:
  static constexpr const char* kName = "TokenWeaveSuffixRows";

  SuffixRowsPlugin(Fields fields, nvinfer1::TensorRTPhase phase);

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;

  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;
};

}  // namespace tokenweave::trt
