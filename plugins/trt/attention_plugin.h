// TokenWeaveAttention: one half's attention, by another library's plugin that is told of that half only.
#pragma once

#include "attention_fields.h"
#include "batch_halves.h"
#include "plugin.h"

namespace tokenweave::trt {

/// Inputs:  those of the inner plugin in its order; field `roles` says what they are. qkv [m, width] has the half's
///          rows; sequence_length and context_lengths are TokenWeaveBatchSplit's, all others the whole step's.
/// Outputs: [m, num_heads * head_size].
///
/// The inner plugin sees the half as a step of its own: per-sequence tensors of the half's sequences, lengths that end
/// at the cut. Tensors with a row per sequence start at the half's first. Block tables keep the step's sequences in
/// their dimensions, because they are the strides of the pools: dimension 0 of context_lengths says how many are the
/// half's.
class AttentionPlugin final : public PluginWithFields<AttentionPlugin, AttentionFields> {
 public:
  static constexpr const char* kName = "TokenWeaveAttention";

  AttentionPlugin(Fields fields, nvinfer1::TensorRTPhase phase);
  AttentionPlugin(const AttentionPlugin& other);

  Status created();

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t num_outputs) const noexcept override;

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  /// What a step needs, made before the first one: enqueue allocates nothing.
  struct Scratch {
    std::vector<TensorBounds> bounds;
    std::vector<nvinfer1::DynamicPluginTensorDesc> dynamic_descs;
    std::vector<nvinfer1::PluginTensorDesc> descs;
    std::vector<const void*> inputs;
    std::vector<int32_t> context_lengths, past_key_value_lengths;
  };

  Status check_counts(int32_t num_inputs, int32_t num_outputs) const;
  Status check_inner() const;
  Status check_beams(const nvinfer1::Dims& cache_indirection) const;
  Status attach();
  /// The half of the step that these inputs belong to.
  Status find_half(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs, BatchCut* cut) const;
  /// What is known at run time only, and matters to a sequence that is cut: sliding windows and sink tokens.
  Status check_shared(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs,
                      const HalfSequences& half) const;
  /// Fills scratch_ with what the inner plugin gets.
  void narrow(const nvinfer1::PluginTensorDesc* descs, const void* const* inputs, const BatchCut& cut);

  const int32_t* host(const void* const* inputs, AttentionRole role) const {
    return static_cast<const int32_t*>(inputs[fields_.place(role)]);
  }
  bool is_prefix() const { return fields_.half == static_cast<int32_t>(Half::kPrefix); }

  InnerPlugin inner_;  // of a plugin in a network, or attached to a context
  Scratch scratch_;    // of an attached plugin
};

}  // namespace tokenweave::trt
