// The inputs of a GPTAttention layer: which stands where, and what they have to be.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#include "gpt_attention_fields.h"
#include "status.h"

namespace tokenweave::reference {

/// In TensorRT-LLM's order. Those named host are in CPU memory, although TensorRT knows all of them as on the device.
enum class Input : int32_t {
  kQkv,
  kSequenceLength,
  kHostPastKeyValueLengths,
  kHostMaxAttentionWindowSizes,
  kHostSinkTokenLength,
  kContextLengths,
  kCacheIndirection,
  kHostRequestTypes,
  kKvCacheBlockOffsets,
  kHostKvCacheBlockOffsets,
  kHostKvCachePoolPointers,
  kHostKvCachePoolMapping,
  kRotaryInvFreq,  ///< with rotary embedding only, as the next
  kRotaryCosSin,
  kHostContextLengths,
  kHostRuntimePerfKnobs,
  kHostContextProgress,
  kCount
};

struct InputInfo {
  const char* name;
  nvinfer1::DataType type;  ///< of kQkv: the activations' instead
  int32_t rank;             ///< 0: any
  bool is_host;
};

const InputInfo& info_of(Input input);

/// The inputs of a layer with or without rotary embedding, by name.
class InputList {
 public:
  explicit InputList(const GptAttentionFields& fields) : dtype_(fields.dtype), has_rotation_(fields.rotary_dims > 0) {}

  int32_t size() const { return place(Input::kCount); }
  int32_t place(Input input) const {
    const auto at = static_cast<int32_t>(input);
    return input > Input::kRotaryCosSin && !has_rotation_ ? at - 2 : at;
  }
  /// The input at a place.
  Input at(int32_t place) const {
    return static_cast<Input>(place < static_cast<int32_t>(Input::kRotaryInvFreq) || has_rotation_ ? place : place + 2);
  }
  nvinfer1::DataType type_of(Input input) const { return input == Input::kQkv ? dtype_ : info_of(input).type; }

 private:
  nvinfer1::DataType dtype_;
  bool has_rotation_;
};

/// What enqueue gets.
class Inputs {
 public:
  Inputs(const InputList& list, const nvinfer1::PluginTensorDesc* descs, const void* const* data)
      : list_(list), descs_(descs), data_(data) {}

  const nvinfer1::PluginTensorDesc& desc(Input input) const { return descs_[list_.place(input)]; }
  int32_t dim(Input input, int32_t axis) const { return static_cast<int32_t>(desc(input).dims.d[axis]); }
  int64_t volume(Input input) const;
  template <typename T>
  const T* data(Input input) const {
    return static_cast<const T*>(data_[list_.place(input)]);
  }
  const InputList& list() const { return list_; }

 private:
  const InputList& list_;
  const nvinfer1::PluginTensorDesc* descs_;
  const void* const* data_;
};

/// Types and shapes against one another and the fields; also that beams are single.
Status check_shapes(const Inputs& inputs, const GptAttentionFields& fields);

/// Finds out once an address that host inputs are where the CPU can read them and that pools are the device's: a wrong
/// binding is an error then, and not the end of the process.
class MemoryCheck {
 public:
  Status check_host(const Inputs& inputs);
  Status check_pool(const void* pool);

 private:
  const void* known_host_[static_cast<int32_t>(Input::kCount)] = {};
  const void* known_pool_ = nullptr;
};

}  // namespace tokenweave::reference
