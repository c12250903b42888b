// Which TensorRT a pointer belongs to. This library does not link TensorRT, and several may be loaded.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>

namespace tokenweave::trt {

struct CloseLibrary {
  void operator()(void* library) const;
};
using Library = std::unique_ptr<void, CloseLibrary>;

/// A library that is loaded already, by name; else null. It stays loaded as long as the handle lives.
Library loaded_library(const char* name);

/// The library that holds `address`, which may be loaded with RTLD_LOCAL and beside others; null for none.
Library library_at(const void* address);

/// getInferLibVersion of a library; 0 when it has none.
int32_t tensorrt_version(const Library& library);

/// The same of the library that holds `address`.
int32_t tensorrt_version_at(const void* address);

/// An address inside of the TensorRT that handed `finder` out; null for null.
const void* address_inside(const nvinfer1::ILoggerFinder* finder);

}  // namespace tokenweave::trt
