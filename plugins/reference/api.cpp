// The library's entry points, which TensorRT looks for.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <string>
#include <vector>

#include "all_gather_plugin.h"
#include "all_reduce_plugin.h"
#include "gemm_plugin_v2.h"
#include "guard.h"
#include "log.h"
#include "plugin_v2.h"
#ifdef TOKENWEAVE_REFERENCE_ATTENTION
#include "attention/gpt_attention_creator.h"
#endif

namespace tokenweave::reference {
namespace {

/// TensorRT-LLM's own plugins. Two creators of one name would make it chance which of them an engine is built with.
constexpr const char* kTensorRtLlm = "libnvinfer_plugin_tensorrt_llm.so";

bool is_loaded(const char* library) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

using Creators = std::vector<nvinfer1::IPluginCreatorInterface*>;

const Creators& all_creators() {
  static CreatorV2<AllGatherPlugin> all_gather;
  static CreatorV2<AllReducePlugin> all_reduce;
  static CreatorV2<GemmV2Plugin> gemm;
#ifdef TOKENWEAVE_REFERENCE_ATTENTION
  static GptAttentionCreator gpt_attention;
#endif
  static const Creators creators{
      &all_gather,
      &all_reduce,
      &gemm,
#ifdef TOKENWEAVE_REFERENCE_ATTENTION
      &gpt_attention,
#endif
  };
  return creators;
}

}  // namespace
}  // namespace tokenweave::reference

extern "C" {

TW_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace tokenweave::reference;
  count = 0;
  nvinfer1::IPluginCreatorInterface* const* first = nullptr;
  tokenweave::trt::succeeds("the reference plugins", [&]() -> tokenweave::Status {
    const Creators& creators = all_creators();
    first = creators.data();
    if (is_loaded(kTensorRtLlm)) {
      tokenweave::trt::log(
          tokenweave::trt::Severity::kWARNING,
          std::string("the reference plugins are left out: ") + kTensorRtLlm + " is loaded, and its own plugins serve");
    } else {
      count = static_cast<int32_t>(creators.size());
    }
    return {};
  });
  return first;
}

TW_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { tokenweave::trt::set_logger_finder(finder); }

}  // extern "C"
