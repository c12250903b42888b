// The attributes of a Gemm layer.
#pragma once

#include <memory>

#include "fields.h"
#include "layer_step.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave::trt {

struct GemmFields {
  // trtllm_tokenweave/plugin_specs.py describes them.
  int32_t type_id = 0;
  int8_t transb = 0;
  int32_t kind = 0;
  std::vector<uint8_t> table;

  /// Derived by check().
  std::shared_ptr<const TuningTable> tuning_table;

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase);
};

}  // namespace tokenweave::trt
