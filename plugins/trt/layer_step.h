// The step that a layer runs in, and what the engine's tuning table says about it.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "status.h"
#include "table.h"

namespace tokenweave::trt {

/// What computed the tensor that a fusion site reduces: it has a launch configuration of its own.
enum class SiteKind : int32_t { kAttention = 0, kMlp = 1 };

/// Sizes of one run of a layer.
struct LayerStep {
  int64_t rows = 0;       ///< of the layer
  int64_t tokens = 0;     ///< of the step
  int64_t sequences = 0;  ///< of the step

  /// The other half has rows as well.
  bool split() const { return rows < tokens; }
};

/// Of a tensor, or of a profile's bounds; 1 for a scalar.
int64_t first_dim(const nvinfer1::Dims& dims);

/// From a tensor of the layer's rows and the two references, of which only the shapes are read.
LayerStep layer_step(const nvinfer1::PluginTensorDesc& rows, const nvinfer1::PluginTensorDesc& num_tokens_ref,
                     const nvinfer1::PluginTensorDesc& batch_ref);

/// The launch configuration of the step's row; the default without one. A collective that runs alone leaves no SMs to
/// anybody: it takes the kernel's own number of CTAs (0), unless the row was made for such steps. An override replaces
/// the CTAs, threads and GEMM budget of split steps.
TableLaunch launch_of(const TuningTable& table, const LayerStep& step, SiteKind kind);

/// See twPluginOverrideLaunch; null: the tables' again.
Status override_launch(const TableLaunch* launch);

/// Checks the field 'type_id' and reads the field 'table', which may be empty: the default rule.
Status read_table_field(const std::vector<uint8_t>& bytes, int32_t type_id, std::shared_ptr<const TuningTable>* table);

}  // namespace tokenweave::trt
