/// C++ over plugins.h: the TensorRT plugin library in a process that links it (libtokenweave_trt.so) and TensorRT.
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <string>

#include "tokenweave/plugins.h"
#include "tokenweave/status.h"

namespace tokenweave {

/// The file of the library of our plugins that this process has loaded.
inline std::string plugin_library_file() {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(&twPluginLastError), &info) != 0 ? info.dli_fname : "";
}

/// libtokenweave_reference.so beside our plugins: TensorRT-LLM's plugins, for machines without TensorRT-LLM.
inline std::string reference_library_file() {
  const std::string ours = plugin_library_file();
  return ours.substr(0, ours.rfind('/') + 1) + "libtokenweave_reference.so";
}

/// Makes the plugins of a library known to TensorRT.
inline Status register_plugins_of(const std::string& file) {
  // First by ourselves: TensorRT does not say why the loader refuses a file.
  if (dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    return error(TW_INVALID_ARGUMENT, std::string("cannot be loaded: ") + dlerror());
  }
  nvinfer1::IPluginRegistry* const registry = getPluginRegistry();
  if (registry == nullptr || registry->loadLibrary(file.c_str()) == nullptr) {
    return error(TW_UNSUPPORTED, file +
                                     ": TensorRT does not take its plugins. Fix: see TensorRT's log; load one library "
                                     "of a plugin only, built for TensorRT " +
                                     std::to_string(NV_TENSORRT_MAJOR));
  }
  return {};
}

/// Makes our plugins known to TensorRT, unless they are.
inline Status register_plugins() {
  nvinfer1::IPluginRegistry* const registry = getPluginRegistry();
  if (registry != nullptr && registry->getCreator("AllReduceRmsNorm", "1", "tokenweave") != nullptr) return {};
  return register_plugins_of(plugin_library_file());
}

/// What the plugins of this process did since it started, or since twPluginResetCounters.
inline Result<TwPluginCounters> plugin_counters() {
  TwPluginCounters counters{};
  counters.struct_bytes = sizeof counters;
  TwStatus status{};
  if (twPluginGetCounters(&counters, &status) != TW_OK) return error(status.code, status.message);
  return counters;
}

/// The newest error of any plugin of this process.
inline Status plugin_error() {
  TwStatus status{};
  const TwCode code = twPluginLastError(&status);
  return {code, status.message};
}

/// Collective. Symmetric memory for the contexts of the engine that `device` runs; see twPluginTensorMemory.
inline Result<void*> symmetric_memory(int32_t device, uint64_t bytes) {
  void* data = nullptr;
  TwStatus status{};
  if (twPluginTensorMemory(device, bytes, &data, &status) != TW_OK) return error(status.code, status.message);
  return data;
}

}  // namespace tokenweave
