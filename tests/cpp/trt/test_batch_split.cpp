// TokenWeaveBatchSplit: the device's metadata of both halves.
#include "attention_layers.h"
#include "fake_exprs.h"

namespace tokenweave::test {
namespace {

using nlohmann::json;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginTensorDesc;

constexpr const char* kName = "TokenWeaveBatchSplit";
constexpr int32_t kUntouched = -(1 << 30);

/// A half's four outputs, in host memory.
struct Half {
  std::vector<int32_t> lengths, contexts, block_offsets, indirection;

  explicit Half(const AttentionStep& like)
      : lengths(like.lengths.size(), kUntouched),
        contexts(like.contexts.size(), kUntouched),
        block_offsets(like.block_offsets.size(), kUntouched),
        indirection(like.indirection.size(), kUntouched) {}
};

std::vector<PluginTensorDesc> descs_of(int64_t prefix_rows, const AttentionStep& step) {
  const auto all = attention_descs(prefix_rows, step.sequences());
  return {all[kQkv],          all[kHostTypes],       all[kHostContexts], all[kSequenceLength], all[kContextLengths],
          all[kBlockOffsets], all[kCacheIndirection]};
}

class BatchSplit : public PluginTest {
 protected:
  BatchSplit() {
    const PluginPtr engine = create(kName, FieldList());
    plugin_.reset(capability<IPluginV3OneRuntime>(engine).attachToContext(nullptr));
  }

  int32_t run(const AttentionStep& step, const std::vector<PluginTensorDesc>& descs, Half* prefix, Half* suffix) {
    const std::vector<const void*> inputs{&step,
                                          step.types.data(),
                                          step.contexts.data(),
                                          step.lengths.data(),
                                          step.contexts.data(),
                                          step.block_offsets.data(),
                                          step.indirection.data()};
    std::vector<void*> outputs;
    for (Half* half : {prefix, suffix}) {
      outputs.insert(outputs.end(), {half->lengths.data(), half->contexts.data(), half->block_offsets.data(),
                                     half->indirection.data()});
    }
    return capability<IPluginV3OneRuntime>(plugin_).enqueue(descs.data(), nullptr, inputs.data(), outputs.data(),
                                                            nullptr, kMain);
  }

  PluginPtr plugin_;
};

/// The half's rows come first, the rest is as it was.
void expect_half(const AttentionStep& step, const Half& half, const json& expected) {
  const auto sequences = static_cast<size_t>(step.sequences()), first = expected["first"].get<size_t>();
  const auto count = expected["host_request_types"].size();
  for (size_t i = 0; i < sequences; ++i) {
    SCOPED_TRACE(i);
    const bool own = i < count;
    EXPECT_EQ(half.lengths[i], own ? expected["sequence_length"][i].get<int32_t>() : kUntouched);
    EXPECT_EQ(half.contexts[i], own ? expected["host_context_lengths"][i].get<int32_t>() : kUntouched);
    for (const int k : {0, kMaxLength - 1}) {
      EXPECT_EQ(half.indirection[i * kMaxLength + k],
                own ? step.indirection[(first + i) * kMaxLength + k] : kUntouched);
    }
    for (size_t pool = 0; pool < kPools; ++pool) {
      for (size_t k = 0; k < 2 * kBlocks; ++k) {
        const auto at = [&](size_t row) { return (pool * sequences + row) * 2 * kBlocks + k; };
        EXPECT_EQ(half.block_offsets[at(i)], own ? step.block_offsets[at(first + i)] : kUntouched);
      }
    }
  }
}

TEST_F(BatchSplit, WritesTheHalvesOfTheVectors) {
  for (const json& one : attention_vectors()["cuts"]) {
    SCOPED_TRACE(one);
    const AttentionStep step(one["step"]);
    Half prefix(step), suffix(step);
    ASSERT_EQ(run(step, descs_of(one["prefix_rows"], step), &prefix, &suffix), 0) << last_error().message;
    expect_half(step, prefix, one["prefix"]);
    expect_half(step, suffix, one["suffix"]);
    if (HasFailure()) break;
  }
}

const json& mixed() {
  for (const json& one : attention_vectors()["cuts"]) {
    if (one["name"] == "mixed" && one["prefix_rows"] == 12) return one;
  }
  throw std::out_of_range("mixed");
}

TEST_F(BatchSplit, QueuesItAllOnTheStream) {
  const AttentionStep step(mixed()["step"]);
  Half prefix(step), suffix(step);
  ASSERT_EQ(run(step, descs_of(12, step), &prefix, &suffix), 0);
  EXPECT_EQ(gpu().take(), (std::vector<std::string>{"copy 2 x 48 main", "copy 2 x 256 main", "copy 2 x 72 main",
                                                    "copy 3 x 256 main", "split 2 3 main"}));
}

TEST_F(BatchSplit, AnEmptyHalfIsNotTouched) {
  const AttentionStep step(mixed()["step"]);
  Half prefix(step), suffix(step);
  ASSERT_EQ(run(step, descs_of(16, step), &prefix, &suffix), 0);
  EXPECT_EQ(gpu().take(), (std::vector<std::string>{"copy 2 x 96 main", "copy 4 x 256 main", "split 4 0 main"}));
  EXPECT_EQ(prefix.lengths, step.lengths);
}

TEST_F(BatchSplit, RefusesBatchesThatAreNone) {
  AttentionStep step(mixed()["step"]);
  Half prefix(step), suffix(step);
  EXPECT_NE(run(step, descs_of(17, step), &prefix, &suffix), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: the prefix has 17 tokens, the step 16");
  auto beams = descs_of(12, step);
  beams[6].dims.d[0] = 2;
  EXPECT_NE(run(step, beams, &prefix, &suffix), 0);
  EXPECT_STREQ(last_error().message,
               "TokenWeaveBatchSplit: input 6 has 2 sequences, host_request_types 4 (beam width 1 is needed)");
  step.types = {0, 1, 0, 1};
  EXPECT_NE(run(step, descs_of(12, step), &prefix, &suffix), 0);
  EXPECT_NE(std::string(last_error().message).find("context sequence 2 comes after"), std::string::npos);
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(BatchSplit, FailsWithTheGpu) {
  const AttentionStep step(mixed()["step"]);
  Half prefix(step), suffix(step);
  for (const char* function : {"cudaMemcpy2DAsync", "launch_batch_split"}) {
    gpu().failing = function;
    EXPECT_NE(run(step, descs_of(12, step), &prefix, &suffix), 0) << function;
    EXPECT_EQ(last_error().code, TW_CUDA_ERROR);
  }
}

TEST_F(BatchSplit, DoesNothingInABuild) {
  plugin_ = create(kName, FieldList(), TensorRTPhase::kBUILD);
  const AttentionStep step(mixed()["step"]);
  Half prefix(step), suffix(step);
  EXPECT_EQ(run(step, descs_of(12, step), &prefix, &suffix), 0);
  EXPECT_TRUE(gpu().take().empty());
  EXPECT_EQ(counters().while_building, 1u);
}

TEST_F(BatchSplit, HasTheShapesAndTypesOfItsInputs) {
  auto& build = capability<IPluginV3OneBuildV2>(plugin_);
  FakeExprs exprs;
  std::vector<nvinfer1::DimsExprs> inputs;
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{-1, 64}, {-1}, {-1}, {-1}, {8}, {2, -1, 2, 3}, {-1, 1, 9}})
    inputs.push_back(exprs.dims(sizes));
  std::vector<nvinfer1::DimsExprs> outputs(8);
  ASSERT_EQ(build.getOutputShapes(inputs.data(), 7, nullptr, 0, outputs.data(), 8, exprs), 0);
  for (const size_t half : {0, 4}) {
    EXPECT_EQ(FakeExprs::text(outputs[half + 0]), "m");
    EXPECT_EQ(FakeExprs::text(outputs[half + 1]), "8");
    EXPECT_EQ(FakeExprs::text(outputs[half + 2]), "2, m, 2, 3");
    EXPECT_EQ(FakeExprs::text(outputs[half + 3]), "m, 1, 9");
  }
  std::vector<DataType> types(7, DataType::kINT32), made(8);
  types[0] = DataType::kBF16;
  EXPECT_EQ(build.getOutputDataTypes(made.data(), 8, types.data(), 7), 0);
  EXPECT_EQ(made, std::vector<DataType>(8, DataType::kINT32));
  types[5] = DataType::kINT64;
  EXPECT_NE(build.getOutputDataTypes(made.data(), 8, types.data(), 7), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: input 5 is not INT32");
  inputs[5] = exprs.dims({2, -1, 3});
  EXPECT_NE(build.getOutputShapes(inputs.data(), 7, nullptr, 0, outputs.data(), 8, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: input 5 has 3 dimensions, expected 4");
  EXPECT_NE(build.getOutputShapes(inputs.data(), 6, nullptr, 0, outputs.data(), 8, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: has 6 inputs and 8 outputs, expected 7 and 8");
  EXPECT_EQ(build.configurePlugin(nullptr, 7, nullptr, 8), 0);
  EXPECT_NE(build.configurePlugin(nullptr, 7, nullptr, 7), 0);
}

TEST_F(BatchSplit, TakesLinearInt32) {
  auto& build = capability<IPluginV3OneBuildV2>(plugin_);
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(15);
  for (int32_t position = 0; position < 15; ++position) {
    for (auto& one : descs) one.desc = desc({1}, DataType::kINT32);
    EXPECT_TRUE(build.supportsFormatCombination(position, descs.data(), 7, 8)) << position;
    descs[static_cast<size_t>(position)].desc.type = DataType::kHALF;
    EXPECT_EQ(build.supportsFormatCombination(position, descs.data(), 7, 8), position == 0) << position;
    descs[static_cast<size_t>(position)].desc = {dims({1}), DataType::kINT32, nvinfer1::TensorFormat::kCHW32, 1};
    EXPECT_FALSE(build.supportsFormatCombination(position, descs.data(), 7, 8)) << position;
  }
  EXPECT_FALSE(build.supportsFormatCombination(0, descs.data(), 7, 7));
}

TEST(BatchSplitFields, AreNone) {
  EXPECT_EQ(creator(kName).getFieldNames()->nbFields, 0);
  EXPECT_EQ(create(kName, FieldList().set("half", 0), TensorRTPhase::kBUILD), nullptr);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: layer 'layer': field 'half' is unknown");
  const PluginPtr plugin = create(kName, FieldList(), TensorRTPhase::kBUILD);
  EXPECT_EQ(capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize()->nbFields, 0);
}

}  // namespace
}  // namespace tokenweave::test
