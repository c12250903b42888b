// TokenWeaveSuffixRows: the rows behind the prefix's.
#include "fake_exprs.h"
#include "layers.h"

namespace tokenweave::test {
namespace {

using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;

constexpr const char* kName = "TokenWeaveSuffixRows";
constexpr int32_t kMaxRows = 100;

FieldList fields() { return FieldList().set("site", 3).set("max_rows", kMaxRows); }

class SuffixRows : public PluginTest {
 protected:
  /// One run on a tensor [tokens, 64]; the source of a copy is an offset into it.
  int32_t run(int64_t tokens, int64_t prefix, int64_t rows, DataType type = DataType::kBF16,
              TensorRTPhase phase = TensorRTPhase::kRUNTIME) {
    const PluginPtr plugin = create(kName, fields(), phase);
    const std::vector<nvinfer1::PluginTensorDesc> in{desc({tokens, kHidden}, type), desc({prefix, 8})},
        out{desc({rows, kHidden}, type)};
    const std::vector<const void*> inputs{tensor_, nullptr};
    const std::vector<void*> outputs{tensor_};
    return capability<IPluginV3OneRuntime>(plugin).enqueue(in.data(), out.data(), inputs.data(), outputs.data(),
                                                           nullptr, kMain);
  }
  int64_t offset() const { return static_cast<const uint8_t*>(gpu().copied_from) - tensor_; }

  uint8_t tensor_[1] = {};
};

TEST_F(SuffixRows, CopiesWhatIsBehindThePrefix) {
  ASSERT_EQ(run(10, 7, 3), 0) << last_error().message;
  EXPECT_EQ(gpu().take(), std::vector<std::string>{"copy 384 main"});
  EXPECT_EQ(offset(), 7 * kHidden * 2);
  ASSERT_EQ(run(10, 0, 10, DataType::kFLOAT), 0);
  EXPECT_EQ(gpu().take(), std::vector<std::string>{"copy 2560 main"});
  EXPECT_EQ(offset(), 0);
}

TEST_F(SuffixRows, CopiesNothingOfAnEmptySuffixOrStep) {
  EXPECT_EQ(run(10, 10, 0), 0);
  EXPECT_EQ(run(0, 0, 0), 0);
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(SuffixRows, RefusesAStepThatTheHalvesDoNotHold) {
  for (const int64_t rows : {2, 4}) {
    EXPECT_NE(run(10, 7, rows), 0);
    EXPECT_EQ(last_error().message, "TokenWeaveSuffixRows site 3: the step has 10 tokens, the halves 7 and " +
                                        std::to_string(rows) +
                                        ". Fix: weave with the max_num_tokens of the engine's profile");
  }
  EXPECT_TRUE(gpu().take().empty());
}

TEST_F(SuffixRows, FailsWithTheGpu) {
  gpu().failing = "cudaMemcpyAsync";
  EXPECT_NE(run(10, 7, 3), 0);
  EXPECT_EQ(last_error().code, TW_CUDA_ERROR);
}

TEST_F(SuffixRows, DoesNothingInABuild) {
  EXPECT_EQ(run(10, 7, 3, DataType::kBF16, TensorRTPhase::kBUILD), 0);
  EXPECT_TRUE(gpu().take().empty());
  EXPECT_EQ(counters().while_building, 1u);
}

TEST_F(SuffixRows, HasAtMostMaxRows) {
  const PluginPtr plugin = create(kName, fields());
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  FakeExprs exprs;
  std::vector<nvinfer1::DimsExprs> inputs{exprs.dims({-1, kHidden}), exprs.dims({7, 8})};
  nvinfer1::DimsExprs output{};
  ASSERT_EQ(build.getNbOutputs(), 1);
  ASSERT_EQ(build.getOutputShapes(inputs.data(), 2, nullptr, 0, &output, 1, exprs), 0);
  EXPECT_EQ(FakeExprs::text(output), "m - 7 min 100, 64");
  const DataType types[] = {DataType::kHALF, DataType::kINT32};
  DataType type{};
  ASSERT_EQ(build.getOutputDataTypes(&type, 1, types, 2), 0);
  EXPECT_EQ(type, DataType::kHALF);
  inputs[0] = exprs.dims({-1, 8, 8});
  EXPECT_NE(build.getOutputShapes(inputs.data(), 2, nullptr, 0, &output, 1, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveSuffixRows site 3: the tensor is not [tokens, width]");
  inputs = {exprs.dims({-1, 8}), exprs.dims({})};
  EXPECT_NE(build.getOutputShapes(inputs.data(), 2, nullptr, 0, &output, 1, exprs), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveSuffixRows site 3: the prefix's reference has no dimension");
}

TEST_F(SuffixRows, TakesLinearTensorsOfOneType) {
  const PluginPtr plugin = create(kName, fields());
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(3);
  for (int32_t position = 0; position < 3; ++position) {
    for (auto& one : descs) one.desc = desc({1, 8});
    EXPECT_TRUE(build.supportsFormatCombination(position, descs.data(), 2, 1)) << position;
    descs[static_cast<size_t>(position)].desc.type = DataType::kFLOAT;
    EXPECT_EQ(build.supportsFormatCombination(position, descs.data(), 2, 1), position != 2) << position;
    descs[static_cast<size_t>(position)].desc.format = nvinfer1::TensorFormat::kCHW32;
    EXPECT_FALSE(build.supportsFormatCombination(position, descs.data(), 2, 1)) << position;
  }
  EXPECT_FALSE(build.supportsFormatCombination(0, descs.data(), 3, 1));
  EXPECT_EQ(build.configurePlugin(nullptr, 2, nullptr, 1), 0);
  EXPECT_NE(build.configurePlugin(nullptr, 3, nullptr, 1), 0);
  EXPECT_STREQ(last_error().message, "TokenWeaveSuffixRows site 3: has 3 inputs and 1 outputs, expected 2 and 1");
}

TEST_F(SuffixRows, TakesElementsOfWholeBytes) {
  const PluginPtr plugin = create(kName, fields());
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(3);
  for (const auto& [type, served] :
       {std::pair{DataType::kFP8, true}, {DataType::kINT64, true}, {DataType::kINT4, false}}) {
    for (auto& one : descs) one.desc = desc({1, 8}, type);
    for (const int32_t position : {0, 2})
      EXPECT_EQ(build.supportsFormatCombination(position, descs.data(), 2, 1), served) << position;
    EXPECT_TRUE(build.supportsFormatCombination(1, descs.data(), 2, 1));
  }
}

TEST(SuffixRowsFields, AreCheckedAndStored) {
  EXPECT_EQ(create(kName, FieldList().set("site", 0)), nullptr);
  EXPECT_STREQ(last_error().message, "TokenWeaveSuffixRows: layer 'layer': field 'max_rows' is missing");
  EXPECT_EQ(create(kName, FieldList().set("site", 0).set("max_rows", 0)), nullptr);
  EXPECT_EQ(create(kName, FieldList().set("site", -2).set("max_rows", kMaxRows)), nullptr);
  const PluginPtr plugin = create(kName, fields(), TensorRTPhase::kBUILD);
  const auto& stored = *capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize();
  ASSERT_EQ(stored.nbFields, 2);
  EXPECT_EQ(*static_cast<const int32_t*>(stored.fields[0].data), 3);
  EXPECT_EQ(*static_cast<const int32_t*>(stored.fields[1].data), kMaxRows);
}

}  // namespace
}  // namespace tokenweave::test
