#include "batch_split.h"

namespace tokenweave {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) batch_split(const __grid_constant__ BatchSplitArgs args) {
  const SplitLengths& half = args.halves[blockIdx.y];
  const int32_t index = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (index < half.sequences.count) split_lengths(args, half, index);
}

}  // namespace

cudaError_t launch_batch_split(const BatchSplitArgs& args, cudaStream_t stream) {
  const int32_t prefix = args.halves[0].sequences.count, suffix = args.halves[1].sequences.count;
  const int32_t most = prefix > suffix ? prefix : suffix;
  if (most == 0) return cudaSuccess;
  batch_split<<<dim3(static_cast<unsigned>((most + kThreads - 1) / kThreads), 2), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tokenweave
