// TokenWeaveBatchSplit: the device's lengths of both halves.
#include "attention_layers.h"
#include "fake_exprs.h"

namespace tokenweave::test {
namespace {

using nlohmann::json;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginTensorDesc;

constexpr const char* kName = "TokenWeaveBatchSplit";
class BatchSplit : public PluginTest {
 protected:
  const BatchSplitLayer split_;
};

/// The half's rows come first, the rest is as it was.
void expect_half(const HalfLengths& half, const json& expected) {
  const auto count = expected["host_request_types"].size();
  for (size_t i = 0; i < half.sequence_length.size(); ++i) {
    SCOPED_TRACE(i);
    const auto wanted = [&](const char* name) {
      return i < count ? expected[name][i].get<int32_t>() : HalfLengths::kUntouched;
    };
    EXPECT_EQ(half.sequence_length[i], wanted("sequence_length"));
    EXPECT_EQ(half.context_lengths[i], wanted("host_context_lengths"));
  }
}

TEST_F(BatchSplit, WritesTheHalvesOfTheVectors) {
  for (const json& one : attention_vectors()["cuts"]) {
    SCOPED_TRACE(one);
    const AttentionStep step(one["step"]);
    HalfLengths prefix(step), suffix(step);
    ASSERT_EQ(split_.run(step, BatchSplitLayer::descs(step, one["prefix_rows"]), &prefix, &suffix), 0)
        << last_error().message;
    expect_half(prefix, one["prefix"]);
    expect_half(suffix, one["suffix"]);
    if (HasFailure()) break;
  }
}

const json& mixed() {
  for (const json& one : attention_vectors()["cuts"]) {
    if (one["name"] == "mixed" && one["prefix_rows"] == 12) return one;
  }
  throw std::out_of_range("mixed");
}

TEST_F(BatchSplit, QueuesOneKernelOnTheStream) {
  const AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  ASSERT_EQ(split_.run(step, BatchSplitLayer::descs(step, 12), &prefix, &suffix), 0);
  EXPECT_EQ(gpu().take(), std::vector<std::string>{"split 2 3 main"});
}

TEST_F(BatchSplit, AnEmptyHalfIsNotTouched) {
  const AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  ASSERT_EQ(split_.run(step, BatchSplitLayer::descs(step, 16), &prefix, &suffix), 0);
  EXPECT_EQ(gpu().take(), std::vector<std::string>{"split 4 0 main"});
  EXPECT_EQ(prefix.sequence_length, step.lengths);
  EXPECT_EQ(suffix.sequence_length, HalfLengths(step).sequence_length);
}

TEST_F(BatchSplit, RefusesBatchesThatAreNone) {
  AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  const auto error = [&](const std::vector<PluginTensorDesc>& descs) {
    EXPECT_NE(split_.run(step, descs, &prefix, &suffix), 0);
    return std::string(last_error().message);
  };
  EXPECT_EQ(error(BatchSplitLayer::descs(step, 17)), "TokenWeaveBatchSplit: the prefix has 17 tokens, the step 16");
  auto beams = BatchSplitLayer::descs(step, 12);
  beams[5].dims.d[0] = 2;
  EXPECT_EQ(error(beams),
            "TokenWeaveBatchSplit: input 5 has 2 sequences, host_request_types 4 (beam width 1 is needed)");
  step.types = {0, 1, 0, 1};
  EXPECT_NE(error(BatchSplitLayer::descs(step, 12)).find("context sequence 2 comes after"), std::string::npos);
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(BatchSplit, RefusesLengthsThatCountOtherTokens) {
  const AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  auto descs = BatchSplitLayer::descs(step, 12);
  for (const int64_t tokens : {12, 15, 17}) {
    descs[1].dims.d[0] = tokens;
    EXPECT_NE(split_.run(step, descs, &prefix, &suffix), 0) << tokens;
    EXPECT_EQ(last_error().message,
              "TokenWeaveBatchSplit: the step has " + std::to_string(tokens) +
                  " tokens, host_request_types and host_context_lengths count 16. Fix: give both for the tokens of "
                  "input_ids");
  }
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(BatchSplit, RefusesMoreTokensThanTheNetworkIsWovenFor) {
  json one = mixed()["step"];
  HalfLengths lengths{AttentionStep(one)};
  one["host_context_lengths"][0] = kMaxTokens - 6;
  EXPECT_EQ(split_.run(AttentionStep(one), BatchSplitLayer::descs(AttentionStep(one), 12), &lengths, &lengths), 0);
  gpu().take();
  one["host_context_lengths"][0] = kMaxTokens - 5;
  EXPECT_NE(split_.run(AttentionStep(one), BatchSplitLayer::descs(AttentionStep(one), 12), &lengths, &lengths), 0);
  EXPECT_STREQ(last_error().message,
               "TokenWeaveBatchSplit: the step has 8193 tokens, the network was woven for 8192. Fix: weave with the "
               "max_num_tokens of the engine's profile");
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(BatchSplit, FailsWithTheGpu) {
  const AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  gpu().failing = "launch_batch_split";
  EXPECT_NE(split_.run(step, BatchSplitLayer::descs(step, 12), &prefix, &suffix), 0);
  EXPECT_EQ(last_error().code, TW_CUDA_ERROR);
}

TEST_F(BatchSplit, DoesNothingInABuild) {
  const AttentionStep step(mixed()["step"]);
  HalfLengths prefix(step), suffix(step);
  EXPECT_EQ(BatchSplitLayer(TensorRTPhase::kBUILD).run(step, BatchSplitLayer::descs(step, 12), &prefix, &suffix), 0);
  EXPECT_TRUE(gpu().take().empty());
  EXPECT_EQ(counters().while_building, 1u);
}

TEST_F(BatchSplit, HasTheShapesAndTypesOfItsInputs) {
  auto& build = capability<IPluginV3OneBuildV2>(split_.plugin());
  FakeExprs exprs;
  std::vector<nvinfer1::DimsExprs> inputs;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{-1, 64}, {-1}, {-1}, {-1}, {-1}, {8}})
    inputs.push_back(exprs.dims(sizes));
  std::vector<nvinfer1::DimsExprs> outputs(4);
  ASSERT_EQ(build.getNbOutputs(), 4);
  ASSERT_EQ(build.getOutputShapes(inputs.data(), 6, nullptr, 0, outputs.data(), 4, exprs), 0);
  for (const size_t half : {0, 2}) {
    EXPECT_EQ(FakeExprs::text(outputs[half + 0]), "m");
    EXPECT_EQ(FakeExprs::text(outputs[half + 1]), "8");
  }
  std::vector<DataType> types(6, DataType::kINT32), made(4);
  types[0] = types[1] = DataType::kBF16;
  EXPECT_EQ(build.getOutputDataTypes(made.data(), 4, types.data(), 6), 0);
  EXPECT_EQ(made, std::vector<DataType>(4, DataType::kINT32));
  types[5] = DataType::kINT64;
  EXPECT_NE(build.getOutputDataTypes(made.data(), 4, types.data(), 6), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: input 5 is not INT32");
  inputs[5] = exprs.dims({2, -1, 3});
  EXPECT_NE(build.getOutputShapes(inputs.data(), 6, nullptr, 0, outputs.data(), 4, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: input 5 has 3 dimensions, expected 1");
}

TEST_F(BatchSplit, OtherNumbersOfTensorsAreRefused) {
  auto& build = capability<IPluginV3OneBuildV2>(split_.plugin());
  FakeExprs exprs;
  EXPECT_NE(build.getOutputShapes(nullptr, 7, nullptr, 0, nullptr, 8, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveBatchSplit: has 7 inputs and 8 outputs, expected 6 and 4");
  EXPECT_EQ(build.configurePlugin(nullptr, 6, nullptr, 4), 0);
  EXPECT_NE(build.configurePlugin(nullptr, 6, nullptr, 8), 0);
}

TEST_F(BatchSplit, TakesLinearInt32) {
  auto& build = capability<IPluginV3OneBuildV2>(split_.plugin());
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(10);
  for (int32_t position = 0; position < 10; ++position) {
    for (auto& one : descs) one.desc = desc({1}, DataType::kINT32);
    EXPECT_TRUE(build.supportsFormatCombination(position, descs.data(), 6, 4)) << position;
    descs[static_cast<size_t>(position)].desc.type = DataType::kHALF;
    EXPECT_EQ(build.supportsFormatCombination(position, descs.data(), 6, 4), position <= 1) << position;
    descs[static_cast<size_t>(position)].desc = {dims({1}), DataType::kINT32, nvinfer1::TensorFormat::kCHW32, 1};
    EXPECT_FALSE(build.supportsFormatCombination(position, descs.data(), 6, 4)) << position;
  }
  EXPECT_FALSE(build.supportsFormatCombination(0, descs.data(), 6, 3));
}

TEST(BatchSplitFields, AreChecked) {
  ASSERT_EQ(creator(kName).getFieldNames()->nbFields, 1);
  EXPECT_STREQ(creator(kName).getFieldNames()->fields[0].name, "max_num_tokens");
  const auto error = [](const FieldList& fields) {
    EXPECT_EQ(create(kName, fields), nullptr);
    return std::string(last_error().message);
  };
  // As an engine of a release has it whose layers had other inputs.
  EXPECT_EQ(error(FieldList()), "TokenWeaveBatchSplit: layer 'layer': field 'max_num_tokens' is missing");
  EXPECT_EQ(error(FieldList().set("max_num_tokens", 0)),
            "TokenWeaveBatchSplit: layer 'layer': field 'max_num_tokens' = 0 is below 1");
  EXPECT_EQ(error(FieldList().set("max_num_tokens", 8).set("half", 0)),
            "TokenWeaveBatchSplit: layer 'layer': field 'half' is unknown");
  const PluginPtr plugin = create(kName, FieldList().set("max_num_tokens", 8), TensorRTPhase::kBUILD);
  const auto& stored = *capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize();
  ASSERT_EQ(stored.nbFields, 1);
  EXPECT_EQ(*static_cast<const int32_t*>(stored.fields[0].data), 8);
}

}  // namespace
}  // namespace tokenweave::test
