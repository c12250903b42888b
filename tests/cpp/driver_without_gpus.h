// A driver that sees no GPU, on any machine: what CUDA_VISIBLE_DEVICES makes of a real one.
#pragma once

#include <dlfcn.h>

namespace tokenweave::test {

/// Gives the calling process that driver; before its first CUDA call, so in a process of its own (run_processes).
inline bool hide_gpus() { return dlopen(DRIVER_WITHOUT_GPUS, RTLD_NOW) != nullptr; }

/// Whether CUDA finds a driver on this machine; also in a process of its own, in which the driver then stays.
inline bool has_driver() { return dlopen("libcuda.so.1", RTLD_LAZY) != nullptr; }

}  // namespace tokenweave::test
