// Checks one call, turns it into kernel arguments, and queues the kernel.
#pragma once

#include "group.h"

namespace tokenweave {

/// See twAllReduceRmsNorm.
Status all_reduce_rms_norm(Group& group, const TwAllReduceRmsNorm& op, const TwAllReduceRmsNormTensors* tensors,
                           const TwLaunchConfig& launch, void* stream);

/// The part of it that needs no device: everything that the caller can get wrong about the op itself.
Status validate(const TwAllReduceRmsNorm& op);

}  // namespace tokenweave
