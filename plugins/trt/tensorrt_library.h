// The TensorRT library that the process runs: found by the address of what it handed to us, and asked by the names of
// its C functions.
#pragma once

#include <NvInferRuntime.h>

#include "status.h"
#include "tensorrt_version.h"

namespace tokenweave::trt {

/// From now on plugin_registry asks the library that holds `address`.
void set_tensorrt_at(const void* address);

/// Where other plugins' creators are found, V2 plugins' among them. Of the library that set_tensorrt_at named; else of
/// the one whose symbols everybody sees, or of the libnvinfer of our major version that is loaded. Refused from
/// TensorRT 11 on: it has no V2 plugins, and its registry is another.
Status plugin_registry(nvinfer1::IPluginRegistry** registry);

}  // namespace tokenweave::trt
