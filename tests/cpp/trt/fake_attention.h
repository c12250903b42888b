// An IPluginV2DynamicExt that writes down what is done to it, and a creator of such: the inner plugin of the tests.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace tokenweave::test {

/// The int32 values of one of enqueue's inputs.
struct SeenInput {
  std::vector<int64_t> dims;
  const void* data = nullptr;
};

/// What all fake plugins did, in order, and what they shall do.
struct FakeAttention {
  std::vector<std::string> calls;  ///< for example "initialize 0": by the plugin of that number
  int alive = 0, made = 0;
  std::string failing;  ///< "createPlugin", "deserializePlugin", "initialize", "enqueue", "clone"
  int32_t outputs = 1;  ///< of every plugin
  int32_t kind = 3;     ///< upper byte of getTensorRTVersion; 3: IPluginV2DynamicExt
  int64_t width = 32;   ///< of the output
  int64_t output_rank = 2;

  std::vector<std::string> fields;  ///< of the newest createPlugin: "layer_idx INT32 3"
  std::vector<int64_t> configured_min;
  std::vector<int64_t> configured_max;  ///< of the newest configurePlugin: dimension 0 of each input's bound
  std::vector<std::vector<int64_t>> configured_desc;  ///< and the dimensions of all descriptions, the output's last
  std::vector<std::vector<int64_t>> sized;            ///< dimensions of the newest getWorkspaceSize
  std::vector<SeenInput> inputs;                      ///< of the newest enqueue
  void* output = nullptr;
  void* workspace = nullptr;

  std::vector<std::string> take() {
    std::vector<std::string> taken;
    taken.swap(calls);
    return taken;
  }
};

FakeAttention& fake_attention();
/// Named GPTAttention, version 1, and to be registered in the namespace tensorrt_llm.
nvinfer1::IPluginCreatorInterface* fake_attention_creator();

}  // namespace tokenweave::test
