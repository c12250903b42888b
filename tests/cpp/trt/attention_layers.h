// TokenWeaveAttention layers with a fake inner plugin, and steps for them to run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fake_attention.h"
#include "layers.h"
#include "vectors.h"

namespace tokenweave::test {

/// tests/vectors/attention.json.
const nlohmann::json& attention_vectors();

/// As TensorRT-LLM's attention has its inputs, with paged cache and rotary embedding.
enum Input {
  kQkv,
  kSequenceLength,
  kHostPast,
  kHostWindows,
  kHostSink,
  kContextLengths,
  kCacheIndirection,
  kHostTypes,
  kBlockOffsets,
  kHostBlockOffsets,
  kHostPools,
  kHostMapping,
  kRotaryInvFreq,
  kRotaryCosSin,
  kHostContexts,
  kHostKnobs,
  kHostProgress,
  kNumInputs
};

constexpr int32_t kPools = 2, kBlocks = 3, kMaxSequences = 16, kMaxTokens = 8192, kMaxLength = 64, kWidth = 64,
                  kLayers = 5;

/// Of a layer whose inner plugin has layer_idx 3.
FieldList attention_fields(int half);
/// Bytes of INT32 fields of one value each.
std::vector<uint8_t> pack(const std::vector<std::pair<std::string, int32_t>>& fields);

/// Descriptions of all inputs and the output, for that many rows of the half and sequences of the step.
std::vector<nvinfer1::PluginTensorDesc> attention_descs(int64_t rows, int64_t sequences);
/// The same as the bounds of a profile, whose optimum is half of that.
std::vector<nvinfer1::DynamicPluginTensorDesc> attention_bounds(int64_t rows, int64_t sequences = kMaxSequences);

/// A step's inputs in host memory.
class AttentionStep {
 public:
  /// `step` of a case of the vectors.
  explicit AttentionStep(const nlohmann::json& step);

  std::vector<int32_t> types, contexts, past, lengths, block_offsets, host_block_offsets, indirection;
  std::vector<int32_t> windows = std::vector<int32_t>(kLayers, 1 << 20), sink{0};
  int64_t progress = 99;
  int64_t beams = 1;

  int64_t sequences() const { return static_cast<int64_t>(types.size()); }
  int64_t tokens() const;
  std::vector<const void*> inputs() const;
};

/// A layer in a network.
PluginPtr built(const FieldList& fields);
int32_t configure(const PluginPtr& plugin, const std::vector<nvinfer1::DynamicPluginTensorDesc>& bounds);
/// A layer of an engine, as the engine gives it to the creator; null: refused.
PluginPtr loaded(const PluginPtr& built);

/// A layer of an engine, attached to a context.
class AttentionLayer {
 public:
  explicit AttentionLayer(int half);
  bool attached() const { return plugin_ != nullptr; }
  int32_t change_shape(const AttentionStep& step, int64_t rows) const;
  int32_t run(const AttentionStep& step, int64_t rows) const { return run(step, rows, step.inputs()); }
  /// With inputs of which some are not the step's own.
  int32_t run(const AttentionStep& step, int64_t rows, const std::vector<const void*>& inputs) const;

 private:
  PluginPtr plugin_;
};

/// What TokenWeaveBatchSplit makes for one half, in host memory; it writes the first rows only.
struct HalfLengths {
  static constexpr int32_t kUntouched = -(1 << 30);

  explicit HalfLengths(const AttentionStep& step)
      : sequence_length(step.lengths.size(), kUntouched), context_lengths(step.contexts.size(), kUntouched) {}

  std::vector<int32_t> sequence_length, context_lengths;
};

/// A TokenWeaveBatchSplit layer, attached to a context.
class BatchSplitLayer {
 public:
  explicit BatchSplitLayer(TensorRTPhase phase = TensorRTPhase::kRUNTIME);
  /// Descriptions of its inputs for a step that has the tokens which its lengths count.
  static std::vector<nvinfer1::PluginTensorDesc> descs(const AttentionStep& step, int64_t prefix_rows);
  int32_t run(const AttentionStep& step, const std::vector<nvinfer1::PluginTensorDesc>& descs, HalfLengths* prefix,
              HalfLengths* suffix) const;
  const PluginPtr& plugin() const { return plugin_; }

 private:
  PluginPtr plugin_;
};

/// Every test starts with a registry that has the fake creator, and leaves no inner plugin behind.
class AttentionTest : public PluginTest {
 protected:
  AttentionTest();
  ~AttentionTest() override;
};

}  // namespace tokenweave::test
