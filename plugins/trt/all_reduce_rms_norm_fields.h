// The attributes of an AllReduceRmsNorm layer.
#pragma once

#include <memory>

#include "fields.h"
#include "layer_step.h"
#include "plugin.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave::trt {

struct AllReduceRmsNormFields {
  // Given by the network; trtllm_tokenweave/plugin_specs.py describes them.
  std::vector<int32_t> group;
  int32_t tp_rank = 0;
  int32_t type_id = 0;
  float eps = 0;
  int32_t kind = 0;
  int32_t site = 0;
  int32_t half = 0;
  int8_t residual_sharded = 0;
  int8_t gather_residual = 0;
  int8_t has_bias = 0;
  int8_t side_stream = 0;
  int8_t last = 0;         ///< of the last site: nothing runs beside the suffix half's collective
  int32_t weave_hash = 0;  ///< of the network's weave: tells the engines of a process apart
  std::vector<uint8_t> table;

  // Learnt by configurePlugin, and part of the engine. 0: not known yet. TensorRT configures a plugin for each profile,
  // so those of one engine may differ in max_rows.
  int32_t hidden = 0;
  int32_t max_rows = 0;  ///< of this layer's half

  /// Derived by check().
  std::shared_ptr<const TuningTable> tuning_table;

  void visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase);
  Status check(nvinfer1::TensorRTPhase phase);

  int32_t tp_size() const { return static_cast<int32_t>(group.size()); }
  TwDataType dtype() const { return static_cast<TwDataType>(type_id); }

  /// What a hidden size has to be: the kernel's limits, and the table's.
  Status check_hidden(int64_t value) const;
  /// Staging memory for the largest step: input and normed share one piece, a gathered residual needs another.
  uint64_t staging_bytes() const;
  /// Of everything that has to be equal on all ranks and in all layers of an engine, whatever their profile.
  uint64_t engine_hash() const;
};

}  // namespace tokenweave::trt
