// Plugins as TensorRT handles them: made by the library's creators, attached, and run with shapes and addresses.
#pragma once

#include <NvInferRuntime.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fake_gpu.h"
#include "field_list.h"
#include "tokenweave/plugins.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace tokenweave::test {

using nvinfer1::DataType;
using nvinfer1::TensorRTPhase;

constexpr int32_t kHidden = 64;

/// Two ranks, bfloat16, hidden size kHidden, at most 4096 of 8192 tokens, as the network or the engine (kRUNTIME) gives
/// them.
FieldList start_fields(TensorRTPhase phase = TensorRTPhase::kRUNTIME);
FieldList join_fields(TensorRTPhase phase = TensorRTPhase::kRUNTIME);

nvinfer1::IPluginCreatorV3One& creator(const std::string& name);
using PluginPtr = std::unique_ptr<nvinfer1::IPluginV3>;
PluginPtr create(const std::string& name, const FieldList& fields, TensorRTPhase phase = TensorRTPhase::kRUNTIME);

template <typename Capability>
Capability& capability(const PluginPtr& plugin);
template <>
nvinfer1::IPluginV3OneCore& capability(const PluginPtr& plugin);
template <>
nvinfer1::IPluginV3OneBuildV2& capability(const PluginPtr& plugin);
template <>
nvinfer1::IPluginV3OneRuntime& capability(const PluginPtr& plugin);

nvinfer1::Dims dims(std::vector<int64_t> sizes);
nvinfer1::PluginTensorDesc desc(std::vector<int64_t> sizes, DataType type = DataType::kBF16);

/// Where the tensors of one (site, half) lie. Nothing is ever read or written there.
struct Tensors {
  uint8_t input[16], residual[16], norm_weight[16], bias[16], normed[16], residual_out[16], refs[16], chain[16];
};

/// Rows of a half, tokens and sequences of its step.
struct Sizes {
  int64_t rows = 4, tokens = 10, batch = 1;
  int64_t residual_rows = -1;  ///< -1: what they should be for two ranks
};

/// An AllReduceRmsNorm layer attached to a context.
class Start {
 public:
  explicit Start(const FieldList& fields = start_fields());
  bool attached() const { return plugin_ != nullptr; }
  int32_t change_shape() const;
  int32_t run(const Sizes& sizes = {}, cudaStream_t stream = kMain) const;
  Tensors& tensors() const { return *tensors_; }
  /// From now on in memory of the caller.
  void move_to(void* memory) { tensors_ = static_cast<Tensors*>(memory); }

 private:
  PluginPtr plugin_;
  bool has_bias_ = false;
  bool sharded_ = false;
  std::unique_ptr<Tensors> own_ = std::make_unique<Tensors>();
  Tensors* tensors_ = own_.get();
};

/// A StreamJoin layer attached to a context. Its inputs are [normed, residual_out, input, residual, chain] of `start`.
class WaitFor {
 public:
  explicit WaitFor(const Start& start, const FieldList& fields = join_fields());
  int32_t run(cudaStream_t stream = kMain);

  std::vector<const void*> inputs;
  std::vector<void*> outputs;

 private:
  PluginPtr plugin_;
};

TwPluginCounters counters();
TwStatus last_error();

/// Every test starts with a new GPU and fresh counters, and leaves nothing behind.
class PluginTest : public testing::Test {
 protected:
  PluginTest();
  ~PluginTest() override;
};

}  // namespace tokenweave::test
