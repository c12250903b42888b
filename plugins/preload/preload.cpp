// For LD_PRELOAD: gives our plugins to a program that knows nothing of them, when it makes its first TensorRT runtime.
//
// Libraries of LD_PRELOAD come first in the global scope, so a caller of createInferRuntime finds the function below,
// also when the caller and libnvinfer are loaded later and with RTLD_LOCAL. Not found by it: who takes the function's
// address from libnvinfer with dlsym.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <string>

#include "env.h"
#include "status.h"
#include "tensorrt_version.h"

namespace tokenweave::preload {
namespace {

constexpr const char* kFunction = "createInferRuntime_INTERNAL";
constexpr const char* kPlugins = "libtokenweave_trt.so";

using CreateRuntime = void* (*)(void* logger, int32_t version);

CreateRuntime function_in(const trt::Library& library) {
  if (library == nullptr) return nullptr;
  const auto found = reinterpret_cast<CreateRuntime>(dlsym(library.get(), kFunction));
  // The scope of a library that was loaded at the start, or with RTLD_GLOBAL, may begin with this one.
  return found != &createInferRuntime_INTERNAL ? found : nullptr;
}

/// The function that `caller` would have called without us: that of the libnvinfer that it links; else that of the
/// libraries loaded at the start; else that of a libnvinfer of the caller's headers, loaded by whoever loaded the
/// caller.
CreateRuntime real_function(const void* caller, int32_t version) {
  if (const auto linked = function_in(trt::library_at(caller)); linked != nullptr) return linked;
  if (void* const next = dlsym(RTLD_NEXT, kFunction); next != nullptr) return reinterpret_cast<CreateRuntime>(next);
  const std::string major = std::to_string(version / 10000);
  for (const std::string& name : {"libnvinfer.so." + major, std::string("libnvinfer.so"), "libnvinfer_lean.so." + major,
                                  "libnvinfer_dispatch.so." + major}) {
    if (const auto found = function_in(trt::loaded_library(name.c_str())); found != nullptr) return found;
  }
  return nullptr;
}

/// Beside this library, unless TOKENWEAVE_TRT_LIBRARY names another.
std::string plugins_file() {
  const std::string named = environment().trt_library;
  if (!named.empty()) return named;
  Dl_info info{};
  const int found = dladdr(reinterpret_cast<const void*>(&createInferRuntime_INTERNAL), &info);
  const std::string self = found != 0 ? info.dli_fname : "";
  return self.substr(0, self.rfind('/') + 1) + kPlugins;
}

Status register_plugins(const void* tensorrt) {
  const int32_t version = trt::tensorrt_version_at(tensorrt);
  if (version / 10000 != NV_TENSORRT_MAJOR) {
    return error(TW_UNSUPPORTED, "the plugins are for TensorRT " + std::to_string(NV_TENSORRT_MAJOR) +
                                     ", the process runs one of version number " + std::to_string(version) +
                                     ". Fix: preload a build for its headers");
  }
  const trt::Library library = trt::library_at(tensorrt);
  const auto get = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library.get(), "getPluginRegistry"));
  nvinfer1::IPluginRegistry* const registry = get != nullptr ? get() : nullptr;
  if (registry == nullptr) return error(TW_INTERNAL, "TensorRT has no plugin registry");
  // The program may have loaded them by itself.
  if (registry->getCreator("AllReduceRmsNorm", "1", "tokenweave") != nullptr) return {};
  const std::string file = plugins_file();
  // First by ourselves: TensorRT does not say why the loader refuses a file.
  if (dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    return error(TW_UNSUPPORTED,
                 std::string(dlerror()) + ". Fix: set TOKENWEAVE_TRT_LIBRARY to the absolute path of " + kPlugins);
  }
  if (registry->loadLibrary(file.c_str()) == nullptr) {
    return error(TW_UNSUPPORTED, file + ": TensorRT does not take its plugins. Fix: see what TensorRT's logger says");
  }
  return {};
}

/// Reports an error; the program goes on without our plugins, and TensorRT refuses the engines that need them.
void prepare(CreateRuntime real) noexcept {
  try {
    const Status status = register_plugins(reinterpret_cast<const void*>(real));
    if (!status.ok()) std::fprintf(stderr, "[TokenWeave] preload: %s\n", status.message.c_str());
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "[TokenWeave] preload: %s\n", exception.what());
  }
}

CreateRuntime find(const void* caller, int32_t version) noexcept {
  try {
    return real_function(caller, version);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace
}  // namespace tokenweave::preload

extern "C" __attribute__((visibility("default"))) void* createInferRuntime_INTERNAL(void* logger,
                                                                                    int32_t version) noexcept {
  using namespace tokenweave::preload;
  const CreateRuntime real = find(__builtin_return_address(0), version);
  if (real == nullptr) {
    static const int once =
        std::fprintf(stderr,
                     "[TokenWeave] preload: no loaded library has the %s that was called. Fix: report the "
                     "program that calls it, and run it without LD_PRELOAD\n",
                     kFunction);
    static_cast<void>(once);
    return nullptr;
  }
  static const bool prepared = (prepare(real), true);
  static_cast<void>(prepared);
  return real(logger, version);
}
