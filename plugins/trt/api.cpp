// The library's entry points: TensorRT's two, and the C interface.
#include <NvInferRuntime.h>

#include <cstring>
#include <exception>
#include <iterator>

#include "all_reduce_rms_norm_plugin.h"
#include "attention_plugin.h"
#include "batch_split_plugin.h"
#include "counters.h"
#include "creator.h"
#include "gemm_plugin.h"
#include "layer_step.h"
#include "log.h"
#include "stream_join_plugin.h"
#include "suffix_rows_plugin.h"
#include "tensorrt_library.h"
#include "tokenweave/plugins.h"

namespace tokenweave::trt {

Counters& counters() {
  static auto* all = new Counters;  // never freed: plugins may run while the process ends
  return *all;
}

namespace {

TwCode fill(TwStatus* status, TwCode code, const char* message) {
  if (status != nullptr) {
    status->code = code;
    std::strncpy(status->message, message, sizeof status->message - 1);
    status->message[sizeof status->message - 1] = '\0';
  }
  return code;
}

/// Hands the Status of `body` out, whatever it throws.
template <typename Body>
TwCode answer(TwStatus* out, Body body) {
  try {
    const Status status = body();
    return fill(out, status.code, status.message.c_str());
  } catch (const std::exception& exception) {
    return fill(out, TW_INTERNAL, exception.what());
  } catch (...) {
    return fill(out, TW_INTERNAL, "");
  }
}

}  // namespace
}  // namespace tokenweave::trt

using tokenweave::trt::answer;
using tokenweave::trt::counters;
using tokenweave::trt::fill;

extern "C" {

TW_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace tokenweave::trt;
  static Creator<AllReduceRmsNormPlugin> all_reduce_rms_norm;
  static Creator<AttentionPlugin> attention;
  static Creator<BatchSplitPlugin> batch_split;
  static Creator<GemmPlugin> gemm;
  static Creator<StreamJoinPlugin> stream_join;
  static Creator<SuffixRowsPlugin> suffix_rows;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&all_reduce_rms_norm, &attention,  &batch_split, &gemm,
                                                                &stream_join,         &suffix_rows};
  count = static_cast<int32_t>(std::size(creators));
  return creators;
}

TW_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  using namespace tokenweave::trt;
  set_tensorrt_at(address_inside(finder));
  set_logger_finder(finder);
}

TwCode twPluginGetCounters(TwPluginCounters* out, TwStatus* status) {
  if (out == nullptr) return fill(status, TW_INVALID_ARGUMENT, "counters is null");
  if (out->struct_bytes != sizeof *out) {
    return fill(status, TW_INVALID_ARGUMENT,
                "counters.struct_bytes is not that of this library. Fix: build with its header");
  }
  const tokenweave::trt::Counters& c = counters();
  *out = {sizeof *out,
          c.overlapped,
          c.captured,
          c.in_line,
          c.empty,
          c.joins,
          c.staged,
          c.alias_copies,
          c.unkept_inputs,
          c.fabric_fallbacks,
          c.offset_fallbacks,
          c.refused_steps,
          c.unfinished_steps,
          c.while_building};
  return fill(status, TW_OK, "");
}

void twPluginResetCounters(void) {
  tokenweave::trt::Counters& c = counters();
  for (auto* count :
       {&c.overlapped, &c.captured, &c.in_line, &c.empty, &c.joins, &c.staged, &c.alias_copies, &c.unkept_inputs,
        &c.fabric_fallbacks, &c.offset_fallbacks, &c.refused_steps, &c.unfinished_steps, &c.while_building}) {
    count->store(0);
  }
}

TwCode twPluginLastError(TwStatus* status) {
  return answer(status, [] {
    tokenweave::trt::SideStream::log_faults();
    return tokenweave::trt::last_error();
  });
}

TwCode twPluginOverrideLaunch(const TwPluginLaunch* launch, TwStatus* status) {
  using namespace tokenweave;
  if (launch == nullptr) return answer(status, [] { return trt::override_launch(nullptr); });
  if (launch->struct_bytes != sizeof *launch) {
    return fill(status, TW_INVALID_ARGUMENT,
                "launch.struct_bytes is not that of this library. Fix: build with its header");
  }
  return answer(status, [launch] {
    const TableLaunch given{TableFabric::kAuto, launch->ctas, launch->threads, launch->gemm_sms};
    return trt::override_launch(&given);
  });
}

TwCode twPluginTensorMemory(int32_t device, uint64_t bytes, void** data, TwStatus* status) {
  if (data == nullptr) return fill(status, TW_INVALID_ARGUMENT, "data is null");
  *data = nullptr;
  return answer(status, [&] { return tokenweave::trt::SideStream::tensor_memory(device, bytes, data); });
}

}  // extern "C"
