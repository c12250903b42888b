// With ../trt/fake_tensorrt.cpp: a libnvinfer that makes runtimes. STAND_IN_VERSION is what it says that it is.
#include <cstdlib>

#include "fake_tensorrt.h"

extern "C" void* createInferRuntime_INTERNAL(void* /*logger*/, int32_t /*version*/) noexcept {
  static int runtime = 0;
  return &runtime;
}

extern "C" int32_t getInferLibBuildVersion() noexcept { return 0; }

namespace {

__attribute__((constructor)) void read_version() {
  if (const char* const version = std::getenv("STAND_IN_VERSION"); version != nullptr)
    tokenweave::test::set_fake_version(std::atoi(version));
}

}  // namespace
