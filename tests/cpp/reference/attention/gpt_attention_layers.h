// GPTAttention layers as an engine has them, with steps in host memory to run. Nothing is queued: what the kernels were
// asked for is kept.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../v2_layers.h"
#include "attention.h"
#include "gpt_attention_inputs.h"

namespace tokenweave::test {

using reference::AttentionCall;
using reference::Input;

constexpr int32_t kLayers = 4, kLayer = 2, kPools = 2, kBlocks = 6, kTokensPerBlock = 32, kPositions = 512;
constexpr int32_t kHeads = 8, kKvHeads = 1, kHeadSize = 128, kWidth = (kHeads + 2 * kKvHeads) * kHeadSize;

/// tests/vectors/gpt_attention.json.
const nlohmann::json& gpt_attention_vectors();
/// Of layer kLayer.
FieldList gpt_attention_fields();

/// What the newest enqueue asked of the kernels; none: it did not get that far.
std::optional<AttentionCall>& asked_call();
/// Memory that cudaPointerGetAttributes says is on device 0. All other memory is the host's.
struct DeviceMemory {
  uint8_t pool[64] = {}, host_input[64] = {};
  int32_t device = 0;
};
DeviceMemory& device_memory();

/// A step's inputs.
class AttentionStep {
 public:
  struct Row {
    int32_t type, tokens, past;  ///< tokens of a generation row: of its prompt
  };
  explicit AttentionStep(const std::vector<Row>& rows);
  AttentionStep(const AttentionStep&) = delete;

  int32_t tokens = 0;
  std::vector<int32_t> types, contexts, past, lengths;
  std::vector<int32_t> windows = std::vector<int32_t>(kLayers, 1024), sink{0};
  std::vector<int32_t> blocks;  ///< [kPools, rows, 2, kBlocks], the host's and the device's
  std::vector<int32_t> indirection;
  std::vector<int64_t> pools{0, 0, 0, 0}, knobs = std::vector<int64_t>(16, -1), progress{0};
  std::vector<int32_t> mapping;  ///< layer kLayer is layer 1 of pool 1
  std::vector<float> table = std::vector<float>(size_t{kPositions} * kHeadSize);

  /// Of all inputs; both may be changed before the step is run.
  std::vector<nvinfer1::PluginTensorDesc> descs;
  std::vector<const void*> inputs;

  nvinfer1::PluginTensorDesc& desc(Input input) { return descs[static_cast<size_t>(input)]; }
  const void*& data(Input input) { return inputs[static_cast<size_t>(input)]; }
  /// Where a block's page number stands in `blocks`; `value`: the V page's.
  int32_t& page(int32_t row, int32_t block, bool value);
};

/// A layer of an engine, attached to a context.
class AttentionLayer {
 public:
  explicit AttentionLayer(const FieldList& fields = gpt_attention_fields());
  /// "" when the step was queued, else the error.
  std::string run(AttentionStep& step) const;
  /// As TensorRT does when shapes change.
  void configure_again() const;
  size_t workspace_bytes(AttentionStep& step) const;

 private:
  PluginV2Ptr plugin_;
};

}  // namespace tokenweave::test
