// The TensorRT library that the process runs. This one does not link it, and several may be loaded: it is found by the
// address of what it handed to us, and asked by the names of its C functions.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#include "status.h"

namespace tokenweave::trt {

/// getInferLibVersion of the library that holds `address`; 0 when it can't be told.
int32_t tensorrt_version_at(const void* address);

/// From now on plugin_registry asks the library that holds `address`.
void set_tensorrt_at(const void* address);

/// Where other plugins' creators are found, V2 plugins' among them. Of the library that set_tensorrt_at named; else of
/// the one whose symbols everybody sees, or of the libnvinfer of our major version that is loaded. Refused from
/// TensorRT 11 on: it has no V2 plugins, and its registry is another.
Status plugin_registry(nvinfer1::IPluginRegistry** registry);

}  // namespace tokenweave::trt
