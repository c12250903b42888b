// The sum over the threads of a team.
#pragma once

#include "kernel_args.h"
#include "ptx.cuh"
#include "rows.cuh"

namespace tokenweave {

/// Sums one float per thread over a team. The partials of two rows alternate, so one barrier a row is enough.
template <int kTeams>
class TeamSum {
 public:
  __device__ TeamSum() {
    // Warps that the team lacks count as zero. The first sum's barrier orders this before the first use.
    for (int i = Team::thread(); i < 2 * kMaxWarps; i += Team::threads()) {
      if (i % kMaxWarps >= Team::threads() / 32) partials()[Team::index()][i] = 0.0f;
    }
  }

  __device__ float operator()(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    float* row = partials()[Team::index()] + parity_;
    if (threadIdx.x % 32 == 0) row[Team::thread() / 32] = value;
    ptx::named_barrier(1 + Team::index(), Team::threads());
    float total = 0.0f;
#pragma unroll 1
    for (int warp = 0; warp < Team::threads() / 32; warp += 4) {
      const float4 p = *reinterpret_cast<const float4*>(row + warp);
      total += (p.x + p.y) + (p.z + p.w);
    }
    parity_ ^= kMaxWarps;
    return total;
  }

 private:
  static constexpr int kMaxWarps = kMostThreads / 32;
  __device__ static float (*partials())[2 * kMaxWarps] {
    __shared__ __align__(16) float memory[kTeams][2 * kMaxWarps];
    return memory;
  }
  int parity_ = 0;
};

}  // namespace tokenweave
