// StreamJoin: what reads a collective's result depends on it, and what the collective touches stays allocated until it.
#pragma once

#include <string>

#include "fields.h"
#include "plugin.h"

namespace tokenweave::trt {

struct StreamJoinFields {
  // trtllm_tokenweave/plugin_specs.py describes them.
  int32_t num_aliased = 0;
  int32_t site = -1;  ///< -1: no site, an ordering edge only
  int32_t half = 0;
  int8_t waits = 0;

  // Learnt by configurePlugin, and part of the engine. 0: not known yet.
  int32_t num_inputs = 0;

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase) const;
};

/// Inputs:  num_aliased tensors, any number of tensors that are only kept alive, chain INT32 [1].
/// Outputs: the aliased tensors under new names, chain. With `waits`, the stream waits for the collective of (site,
/// half).
class StreamJoinPlugin final : public PluginWithFields<StreamJoinPlugin, StreamJoinFields> {
 public:
  static constexpr const char* kName = "StreamJoin";

  StreamJoinPlugin(Fields fields, nvinfer1::TensorRTPhase phase);

  int32_t getNbOutputs() const noexcept override { return fields_.num_aliased + 1; }
  int32_t getAliasedInput(int32_t output) noexcept override { return output < fields_.num_aliased ? output : -1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override;

  int32_t enqueue(const nvinfer1::PluginTensorDesc*, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept override;

 private:
  Status check_counts(int32_t num_inputs, int32_t num_outputs) const;
};

}  // namespace tokenweave::trt
