// No exception past TensorRT's interface, and nothing on the GPU while it builds: for every kind of plugin.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <new>

#include "log.h"
#include "status.h"

namespace tokenweave::trt {

/// Runs `body`, which returns a Status, and reports what goes wrong as `where`'s error.
template <typename Body>
bool succeeds(const char* where, Body body) noexcept {
  try {
    const Status status = body();
    if (!status.ok()) log_error(where, status);
    return status.ok();
  } catch (const std::bad_alloc&) {
    log_error(where, {TW_OUT_OF_MEMORY, {}});
  } catch (const std::exception& exception) {
    log_error(where, {TW_INTERNAL, exception.what()});
  } catch (...) {
    log_error(where, {TW_INTERNAL, {}});
  }
  return false;
}

/// Whether a plugin created in this phase must not touch the GPU or other ranks: TensorRT may run plugins while it
/// builds, and no other rank takes part in that.
bool is_building(nvinfer1::TensorRTPhase phase);

/// Says that a plugin's enqueue did nothing because it is building.
void warn_of_skipping(const std::string& where);

}  // namespace tokenweave::trt
