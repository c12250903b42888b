#include "tensorrt_version.h"

#include <dlfcn.h>

namespace tokenweave::trt {

void CloseLibrary::operator()(void* library) const { dlclose(library); }

Library loaded_library(const char* name) { return Library(dlopen(name, RTLD_LAZY | RTLD_NOLOAD)); }

Library library_at(const void* address) {
  Dl_info info{};
  return Library(dladdr(address, &info) != 0 ? loaded_library(info.dli_fname).release() : nullptr);
}

int32_t tensorrt_version(const Library& library) {
  if (library == nullptr) return 0;
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library.get(), "getInferLibVersion"));
  return version != nullptr ? version() : 0;
}

int32_t tensorrt_version_at(const void* address) { return tensorrt_version(library_at(address)); }

const void* address_inside(const nvinfer1::ILoggerFinder* finder) {
  // Its virtual functions lie in TensorRT's library.
  return finder != nullptr ? *reinterpret_cast<void* const*>(finder) : nullptr;
}

}  // namespace tokenweave::trt
