// One GPTAttention call on the GPU, whatever its dtype and head size.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include "batch.h"
#include "kernels.h"
#include "status.h"

namespace tokenweave::reference {

struct AttentionCall {
  nvinfer1::DataType dtype = nvinfer1::DataType::kHALF;  ///< kHALF or kBF16
  Heads heads;                                           ///< of size 64 or 128
  float scale = 0;                                       ///< of the scores
  Rotation rotation;
  LayerCache cache;
  Batch batch;
  Grid context_grid, generation_grid;
  const void* qkv = nullptr;
  void* out = nullptr;
  Workspace workspace;
};

/// Queues the call's kernels. Nothing is allocated, copied from the host or waited for, so it may be captured.
Status queue_attention_call(const AttentionCall& call, cudaStream_t stream);

}  // namespace tokenweave::reference
