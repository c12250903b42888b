// What a server loads: makes a runtime, and says which of our plugins TensorRT knows then.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>

namespace {

struct Silent final : nvinfer1::ILogger {
  void log(Severity, const char*) noexcept override {}
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void backend_run() {
  static Silent logger;
  // Never destroyed: the stand-in's is no object.
  const bool runtime = nvinfer1::createInferRuntime(logger) != nullptr;
  void* const tensorrt = dlopen("libnvinfer.so.10", RTLD_LAZY | RTLD_NOLOAD);
  const auto registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(tensorrt, "getPluginRegistry"));
  const bool known = registry()->getCreator("StreamJoin", "1", "tokenweave") != nullptr;
  std::printf("runtime %d, plugins %d\n", runtime, known);
}
