// How many CTAs, teams and threads serve one call. Pure arithmetic, equal on all ranks.
#pragma once

#include <cstddef>

#include "../kernels/kernel_args.h"
#include "status.h"

namespace tokenweave {

struct DeviceLimits {
  int sm_count = 0;
  size_t shared_bytes = 0;     ///< a CTA may have, static ones included
  int compute_capability = 0;  ///< 10 * major + minor
};

struct LaunchRequest {
  Fabric fabric = Fabric::kPeer;
  KernelEntry kernel{};   ///< for the loader that pick_loader() gave
  int size = 1;           ///< ranks
  bool loopback = false;  ///< all ranks share the device's SMs
  bool gather_residual = false;
  int rows_per_rank = 0;
  int vectors_per_row = 0;
  int ctas = 0;          ///< 0: default
  int threads = 0;       ///< 0: default
  int cluster_size = 0;  ///< 0: default
};

struct LaunchPlan {
  int ctas = 0;  ///< per rank
  int cluster_size = 1;
  int team_threads = 0;     ///< blockDim.x
  int teams = 0;            ///< blockDim.y
  int stage_bits = 0;       ///< the bulk loader has 1 << stage_bits rows in flight for a team
  size_t shared_bytes = 0;  ///< dynamic
};

/// Static shared memory of the largest kernel, the bulk loader's: 5504 bytes by cuobjdump -res-usage, rounded up. The
/// 1024 that a CTA leaves to the system from sm_90 on are in it.
constexpr size_t kStaticSharedBytes = 5632;

/// `wanted`, with auto resolved; TW_UNSUPPORTED when a loader is wanted where it cannot be. `bulk` is the bulk loader's
/// kernel.
Status pick_loader(const LaunchRequest& request, const KernelEntry& bulk, const DeviceLimits& limits, TwLoader wanted,
                   Loader* loader);

/// TW_INVALID_ARGUMENT for a launch configuration that no device could run, TW_UNSUPPORTED for one that this can't.
Status plan_launch(const LaunchRequest& request, const DeviceLimits& limits, LaunchPlan* plan);

}  // namespace tokenweave
