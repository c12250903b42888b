#include "tensorrt_library.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <string>

namespace tokenweave::trt {
namespace {

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

/// Only libraries that are loaded already: a second TensorRT would have a registry of its own.
Library loaded(const char* name) { return Library(dlopen(name, RTLD_LAZY | RTLD_NOLOAD)); }

/// The library may be loaded with RTLD_LOCAL and beside others, so it is found by an address.
Library loaded_at(const void* address) {
  Dl_info info{};
  return Library(dladdr(address, &info) != 0 ? loaded(info.dli_fname).release() : nullptr);
}

int32_t version_of(const Library& library) {
  if (library == nullptr) return 0;
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library.get(), "getInferLibVersion"));
  return version != nullptr ? version() : 0;
}

std::atomic<const void*> tensorrt_address{nullptr};

Library find_tensorrt() {
  if (const void* const address = tensorrt_address.load(); address != nullptr) return loaded_at(address);
  if (const void* const function = dlsym(RTLD_DEFAULT, "getPluginRegistry"); function != nullptr)
    return loaded_at(function);
  return loaded(("libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR)).c_str());
}

}  // namespace

int32_t tensorrt_version_at(const void* address) { return version_of(loaded_at(address)); }

void set_tensorrt_at(const void* address) { tensorrt_address.store(address); }

Status plugin_registry(nvinfer1::IPluginRegistry** registry) {
  *registry = nullptr;
  const Library library = find_tensorrt();
  const int32_t version = version_of(library);
  if (version == 0) {
    return error(TW_UNSUPPORTED, "no TensorRT library is loaded. Fix: load this library through TensorRT's registry");
  }
  if (version / 10000 != NV_TENSORRT_MAJOR) {
    return error(TW_UNSUPPORTED, "TensorRT of version number " + std::to_string(version) +
                                     " is loaded; V2 plugins need TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
                                     ". Fix: run it, or weave with split_attention off");
  }
  const auto get = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library.get(), "getPluginRegistry"));
  if (get != nullptr) *registry = get();
  return *registry != nullptr ? Status{} : error(TW_INTERNAL, "TensorRT has no plugin registry");
}

}  // namespace tokenweave::trt
