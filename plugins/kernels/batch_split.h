// The device's side of cutting a batch in two: which sequences a half has, and the tensors that say so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#ifdef __CUDACC__
#define TW_HOST_DEVICE __host__ __device__
#else
#define TW_HOST_DEVICE
#endif

namespace tokenweave {

/// One half's sequences: a contiguous range of the step's, of which the other half may share one.
struct HalfSequences {
  int32_t first = 0;  ///< in the step
  int32_t count = 0;
  int32_t shared = -1;          ///< counted from `first`; -1: none
  int32_t context_change = 0;   ///< of the shared sequence: to add to context_lengths; 0 or less
  int32_t sequence_change = 0;  ///< of the shared sequence: to add to sequence_length and host_past_key_value_lengths
};

struct SplitLengths {
  HalfSequences sequences;
  int32_t* sequence_length = nullptr;  ///< [batch], of which `count` are written
  int32_t* context_lengths = nullptr;
};

struct BatchSplitArgs {
  const int32_t* sequence_length = nullptr;  ///< [batch], of the whole step
  const int32_t* context_lengths = nullptr;
  SplitLengths halves[2];
};

/// Writes sequence `index` of one half.
TW_HOST_DEVICE inline void split_lengths(const BatchSplitArgs& args, const SplitLengths& half, int32_t index) {
  const HalfSequences& own = half.sequences;
  const bool shared = index == own.shared;
  half.sequence_length[index] = args.sequence_length[own.first + index] + (shared ? own.sequence_change : 0);
  half.context_lengths[index] = args.context_lengths[own.first + index] + (shared ? own.context_change : 0);
}

/// Queues the lengths of both halves.
cudaError_t launch_batch_split(const BatchSplitArgs& args, cudaStream_t stream);

}  // namespace tokenweave
