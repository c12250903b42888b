// The library's entry points: TensorRT's two, and the C interface.
#include <NvInferRuntime.h>

#include <iterator>

#include "all_reduce_rms_norm_plugin.h"
#include "attention_plugin.h"
#include "batch_split_plugin.h"
#include "c_api.h"
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

}  // namespace tokenweave::trt

using tokenweave::check_struct;
using tokenweave::error;
using tokenweave::guarded;
using tokenweave::Status;
using tokenweave::trt::counters;

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
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_struct(out, "counters"));
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
    return {};
  });
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
  return guarded(status, [] {
    tokenweave::trt::SideStream::log_faults();
    return tokenweave::trt::last_error();
  });
}

TwCode twPluginOverrideLaunch(const TwPluginLaunch* launch, TwStatus* status) {
  using namespace tokenweave;
  return guarded(status, [launch]() -> Status {
    if (launch == nullptr) return trt::override_launch(nullptr);
    TW_RETURN_IF_ERROR(check_struct(launch, "launch"));
    const TableLaunch given{TableFabric::kAuto, launch->ctas, launch->threads, launch->gemm_sms};
    return trt::override_launch(&given);
  });
}

TwCode twPluginTensorMemory(int32_t device, uint64_t bytes, void** data, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    if (data == nullptr) return error(TW_INVALID_ARGUMENT, "data is null");
    *data = nullptr;
    return tokenweave::trt::SideStream::tensor_memory(device, bytes, data);
  });
}

}  // extern "C"
