#include "guard.h"

#include "env.h"

namespace tokenweave::trt {

bool is_building(nvinfer1::TensorRTPhase phase) {
  return phase == nvinfer1::TensorRTPhase::kBUILD || environment().building;
}

void warn_of_skipping(const std::string& where) {
  log(Severity::kWARNING, where +
                              " is skipped, as always in a build. If this is none: load the engine from its serialized "
                              "form, with IS_BUILDING unset");
}

}  // namespace tokenweave::trt
