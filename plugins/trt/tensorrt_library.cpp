#include "tensorrt_library.h"

#include <dlfcn.h>

#include <atomic>
#include <string>

namespace tokenweave::trt {
namespace {

std::atomic<const void*> tensorrt_address{nullptr};

/// Only libraries that are loaded already: a second TensorRT would have a registry of its own.
Library find_tensorrt() {
  if (const void* const address = tensorrt_address.load(); address != nullptr) return library_at(address);
  if (const void* const function = dlsym(RTLD_DEFAULT, "getPluginRegistry"); function != nullptr)
    return library_at(function);
  return loaded_library(("libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR)).c_str());
}

}  // namespace

void set_tensorrt_at(const void* address) { tensorrt_address.store(address); }

Status plugin_registry(nvinfer1::IPluginRegistry** registry) {
  *registry = nullptr;
  const Library library = find_tensorrt();
  const int32_t version = tensorrt_version(library);
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
