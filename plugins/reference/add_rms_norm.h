// The part of a fused AllReduce that follows the sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "status.h"

namespace tokenweave::reference {

/// stored = input + bias + residual, rounded to the dtype; normed = stored / sqrt(mean(stored^2) + eps) * norm_weight.
/// Computed in fp32. Tensors are [rows, hidden], bias and norm_weight [hidden]; all begin at multiples of 16 bytes.
struct AddRmsNorm {
  TwDataType dtype = TW_FLOAT;
  int64_t rows = 0;
  int32_t hidden = 0;
  float eps = 0.0f;
  const void* input = nullptr;
  const void* residual = nullptr;
  const void* bias = nullptr;         ///< null: none
  const void* norm_weight = nullptr;  ///< null: none
  void* normed = nullptr;
  void* stored = nullptr;  ///< may be `input`
};

/// Multiples of 8 up to this.
inline constexpr int32_t kMaxHidden = 16384;

Status add_rms_norm(const AddRmsNorm& call, cudaStream_t stream);

}  // namespace tokenweave::reference
