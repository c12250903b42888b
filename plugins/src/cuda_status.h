// Errors of the CUDA runtime as values.
#pragma once

#include "status.h"

namespace tokenweave {

/// OK for cudaSuccess; else names the call and the reason, and clears the runtime's last error.
Status cuda_status(int result, const char* call);

}  // namespace tokenweave
