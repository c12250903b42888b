// Attributes of a GPTAttention layer.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "fields.h"
#include "kernels.h"
#include "status.h"

namespace tokenweave::reference {

class GptAttentionFields {
 public:
  /// Every attribute that TensorRT-LLM 1.x passes, in its order.
  void visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  /// Refuses what the kernels do not have, by the field's name. Sets the members below.
  Status check(nvinfer1::TensorRTPhase phase);

  /// Columns of qkv.
  int32_t qkv_width() const { return (heads.q + 2 * heads.kv) * heads.size; }

  int32_t layer_idx = 0;
  nvinfer1::DataType dtype = nvinfer1::DataType::kHALF;
  Heads heads;
  int32_t rotary_dims = 0;  ///< 0: no rotary embedding, and no tables of it among the inputs
  int32_t tokens_per_block = 0;
  float scale = 0;  ///< of the scores
  /// Of the device that the engine was built for: its workspace follows from it. Learnt by configurePlugin.
  int32_t sms = 0;

 private:
  static constexpr size_t kCount = 58;

  /// Of one attribute; the member of its type is used.
  struct Value {
    int32_t integer = 0;
    int8_t byte = 0;
    float real = 0;
  };

  /// The value of an INT32 or INT8 attribute, and of a FLOAT32 one.
  int32_t integer(const char* name) const;
  float real(const char* name) const;
  Status check_features() const;
  Status check_heads();
  Status check_rotation();

  std::array<Value, kCount> values_{};
  std::vector<int32_t> cp_group_;  // of a network without context parallelism: one rank, or none
};

}  // namespace tokenweave::reference
