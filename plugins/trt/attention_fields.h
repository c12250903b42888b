// The attributes of a TokenWeaveAttention layer.
#pragma once

#include <vector>

#include "fields.h"
#include "inner_plugin.h"
#include "packed_fields.h"

namespace tokenweave::trt {

/// What an input of the inner plugin is: trtllm_tokenweave/plugin_specs.py.
enum class AttentionRole : int32_t {
  kOther = 0,
  kQkv,
  kSequenceLength,
  kHostPastKeyValueLengths,
  kContextLengths,
  kCacheIndirection,
  kHostRequestTypes,
  kKvCacheBlockOffsets,
  kHostKvCacheBlockOffsets,
  kHostContextLengths,
  kHostContextProgress,
  kHostMaxAttentionWindowSizes,
  kHostSinkTokenLength,
};

/// The smallest and largest dimensions of one input or output, over all profiles.
struct TensorBounds {
  nvinfer1::Dims min{}, max{};
};

struct AttentionFields {
  // Given by the network; trtllm_tokenweave/plugin_specs.py describes them.
  int32_t half = 0;
  int32_t num_heads = 0;
  int32_t head_size = 0;
  std::vector<uint8_t> inner_name, inner_version, inner_namespace;
  /// In a network: the inner plugin's fields (packed_fields.h). Not part of the engine.
  std::vector<uint8_t> inner_fields;
  std::vector<int32_t> roles;

  // Learnt while building, and part of the engine.
  std::vector<uint8_t> inner_bytes;  ///< what the configured inner plugin serialised; there the field is `inner`, too
  int32_t layer_idx = -1;            ///< the inner plugin's; -1: it has none
  std::vector<int32_t> bounds;       ///< see read_bounds

  /// Derived by check().
  PackedFields inner;

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase);

  PluginId inner_id() const;
  int32_t num_inputs() const { return static_cast<int32_t>(roles.size()); }
  /// The input of that role, -1 when the layer has none.
  int32_t place(AttentionRole role) const;

  /// Widens `bounds` by those of one profile: of all inputs, then of the output.
  Status widen(const nvinfer1::DynamicPluginTensorDesc* inputs, const nvinfer1::DynamicPluginTensorDesc& output);
  /// The bounds of all inputs, then of the output.
  Status read_bounds(std::vector<TensorBounds>* read) const;
};

}  // namespace tokenweave::trt
