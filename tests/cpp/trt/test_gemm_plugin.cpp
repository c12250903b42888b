// The Gemm layer: shapes and types in a build, and the SMs that each step of a table gives it.
#include <cstdlib>

#include "fake_cublaslt.h"
#include "fake_exprs.h"
#include "layers.h"
#include "table.h"
#include "table_vectors.h"

namespace tokenweave::test {
namespace {

using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;

constexpr int64_t kIn = 128, kOut = 256, kUnknown = -1;

FieldList fields(int32_t kind = 0) {
  return FieldList().set("type_id", 7).flag("transb", 1).set("kind", kind).bytes("table", packed("batches"));
}

PluginPtr attach(const PluginPtr& plugin) {
  return PluginPtr(capability<IPluginV3OneRuntime>(plugin).attachToContext(nullptr));
}

/// One run of a layer with a weight [kOut, kIn], or [kIn, kOut] without transb.
int32_t run(const PluginPtr& plugin, int64_t rows, int64_t tokens, int64_t sequences, bool transb = true) {
  static uint8_t x[16], weight[16], out[16], refs[16], workspace[16];
  const std::vector<nvinfer1::PluginTensorDesc> descs{
      desc({rows, kIn}), desc(transb ? std::vector{kOut, kIn} : std::vector{kIn, kOut}),
      desc({tokens}, DataType::kINT32), desc({sequences}, DataType::kINT32)};
  const std::vector<const void*> inputs{x, weight, refs, refs};
  const std::vector<void*> outputs{out};
  return capability<IPluginV3OneRuntime>(plugin).enqueue(descs.data(), nullptr, inputs.data(), outputs.data(),
                                                         workspace, kMain);
}

class GemmPluginTest : public PluginTest {
 protected:
  GemmPluginTest() { cublaslt() = FakeCublasLt{}; }
  ~GemmPluginTest() override {
    EXPECT_EQ(cublaslt().handles, 0);
    EXPECT_EQ(cublaslt().objects, 0);
  }
};

TEST_F(GemmPluginTest, LeavesTheSmsOfTheStepsRowWhereTheStepIsSplit) {
  struct Case {
    int32_t kind;
    int64_t rows, tokens, sequences;
    int32_t sm_target;
  };
  // In the table "batches" attention has 128 SMs for up to 1024 tokens of up to 4 sequences; mlp for more tokens. Where
  // a row has no number it is the SMs that the CTAs leave, and a step that is not split has all.
  for (const Case& c : {Case{0, 300, 1000, 4, 128},
                        {1, 301, 1000, 4, 116},
                        {0, 302, 2000, 4, 116},
                        {1, 303, 2000, 4, 128},
                        {1, 304, 1000, 5, 128},
                        {0, 1000, 1000, 4, 0},
                        {1, 2000, 2000, 4, 0},
                        {1, 1, 4000, 1, 124}}) {
    const PluginPtr plugin = attach(create("Gemm", fields(c.kind)));
    ASSERT_EQ(run(plugin, c.rows, c.tokens, c.sequences), 0) << last_error().message;
    EXPECT_EQ(cublaslt().asked.back().m, c.rows);
    EXPECT_EQ(cublaslt().asked.back().sm_target, c.sm_target) << c.rows << " of " << c.tokens;
  }
}

TEST_F(GemmPluginTest, WithoutATableItKeepsOffTheDefaultCtas) {
  const PluginPtr plugin = attach(create("Gemm", fields().remove("table")));
  ASSERT_EQ(run(plugin, 300, 1000, 4), 0);
  EXPECT_EQ(cublaslt().asked.at(0).sm_target, gpu().sm_count - tokenweave::TableLaunch{}.ctas);
}

TEST_F(GemmPluginTest, MultipliesByEitherLayoutOfTheWeight) {
  for (const bool transb : {true, false}) {
    const PluginPtr plugin = attach(create("Gemm", fields().flag("transb", transb)));
    ASSERT_EQ(run(plugin, 300, 300, 4, transb), 0);
    const AskedAlgorithm& asked = cublaslt().asked.back();
    EXPECT_EQ(asked.transa, transb);
    EXPECT_EQ(asked.n, kOut);
    EXPECT_EQ(asked.k, kIn);
    EXPECT_EQ(asked.type, CUDA_R_16BF);
    EXPECT_EQ(cublaslt().ran.back().stream, kMain);
    EXPECT_EQ(cublaslt().ran.back().alpha, 1.0f);
  }
}

TEST_F(GemmPluginTest, LayersShareTheirAlgorithms) {
  const PluginPtr one = attach(create("Gemm", fields(0))), other = attach(create("Gemm", fields(1)));
  for (const PluginPtr* plugin : {&one, &other, &one}) ASSERT_EQ(run(*plugin, 300, 300, 4), 0);
  EXPECT_EQ(cublaslt().asked.size(), 1u);
  EXPECT_EQ(cublaslt().ran.size(), 3u);
  EXPECT_EQ(cublaslt().handles, 1);
}

TEST_F(GemmPluginTest, AHalfWithoutRowsQueuesNothing) {
  const PluginPtr plugin = attach(create("Gemm", fields()));
  EXPECT_EQ(run(plugin, 0, 1000, 4), 0);
  EXPECT_TRUE(cublaslt().ran.empty());
}

TEST_F(GemmPluginTest, IsInertInABuild) {
  testing::internal::CaptureStderr();
  const PluginPtr building = attach(create("Gemm", fields(), TensorRTPhase::kBUILD));
  EXPECT_EQ(run(building, 300, 1000, 4), 0);
  setenv("IS_BUILDING", "1", 1);
  const PluginPtr in_a_build = attach(create("Gemm", fields()));
  unsetenv("IS_BUILDING");
  EXPECT_EQ(run(in_a_build, 300, 1000, 4), 0);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("Gemm attention is skipped, as always in a build"),
            std::string::npos);
  EXPECT_EQ(cublaslt().handles, 0);
  EXPECT_TRUE(cublaslt().ran.empty());
  EXPECT_EQ(counters().while_building, 2u);
}

TEST_F(GemmPluginTest, FailsWithTheReason) {
  const PluginPtr unattached = create("Gemm", fields(1));
  EXPECT_NE(run(unattached, 300, 1000, 4), 0);
  EXPECT_STREQ(last_error().message, "Gemm mlp: was run without being attached to an execution context");
  const PluginPtr plugin = attach(unattached);
  cublaslt().failing = "cublasLtMatmul";
  EXPECT_NE(run(plugin, 300, 1000, 4), 0);
  EXPECT_STREQ(last_error().message, "Gemm mlp: cublasLtMatmul failed: CUBLAS_STATUS_INTERNAL_ERROR (14)");
  gpu().failing = "cudaGetDevice";
  EXPECT_EQ(attach(unattached), nullptr);
  EXPECT_STREQ(last_error().message, "Gemm mlp: cudaGetDevice failed");
}

TEST_F(GemmPluginTest, WhatIsSerializedMakesTheSamePlugin) {
  const PluginPtr built = create("Gemm", fields(1).flag("transb", 0), TensorRTPhase::kBUILD);
  const auto* stored = capability<IPluginV3OneRuntime>(built).getFieldsToSerialize();
  const PluginPtr loaded(creator("Gemm").createPlugin("loaded", stored, TensorRTPhase::kRUNTIME));
  ASSERT_NE(loaded, nullptr) << last_error().message;
  const PluginPtr plugin = attach(PluginPtr(loaded->clone()));
  ASSERT_EQ(run(plugin, 300, 2000, 4, false), 0);
  EXPECT_EQ(cublaslt().asked.at(0).sm_target, 128);
  EXPECT_FALSE(cublaslt().asked.at(0).transa);
}

/// The output's shape, or the error.
std::string shape(const FieldList& of, const std::vector<int64_t>& x, const std::vector<int64_t>& weight) {
  const PluginPtr plugin = create("Gemm", of, TensorRTPhase::kBUILD);
  FakeExprs exprs;
  const std::vector<DimsExprs> inputs{exprs.dims(x), exprs.dims(weight), exprs.dims({kUnknown}),
                                      exprs.dims({kUnknown})};
  DimsExprs output{};
  const int32_t failed =
      capability<IPluginV3OneBuildV2>(plugin).getOutputShapes(inputs.data(), 4, nullptr, 0, &output, 1, exprs);
  return failed != 0 ? last_error().message : FakeExprs::text(output);
}

TEST_F(GemmPluginTest, ShapesOfABuild) {
  EXPECT_EQ(shape(fields(), {kUnknown, 128}, {256, 128}), "m, 256");
  EXPECT_EQ(shape(fields().flag("transb", 0), {kUnknown, 128}, {128, 256}), "m, 256");
  EXPECT_EQ(shape(fields(), {kUnknown, 128}, {128, 256}),
            "Gemm attention: x does not have the 256 columns that weight has rows for");
  EXPECT_EQ(shape(fields(), {kUnknown, kUnknown}, {256, 128}),
            "Gemm attention: x does not have the 128 columns that weight has rows for");
  EXPECT_EQ(shape(fields(), {kUnknown, 128}, {kUnknown, 128}),
            "Gemm attention: the shape of weight is not known when building");
  EXPECT_EQ(shape(fields(), {2, kUnknown, 128}, {256, 128}), "Gemm attention: x and weight are not matrices");
}

TEST_F(GemmPluginTest, TypesAndFormatsOfABuild) {
  const PluginPtr plugin = create("Gemm", fields(), TensorRTPhase::kBUILD);
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  std::vector<DataType> inputs{DataType::kBF16, DataType::kBF16, DataType::kINT32, DataType::kINT64};
  DataType output{};
  EXPECT_EQ(build.getOutputDataTypes(&output, 1, inputs.data(), 4), 0);
  EXPECT_EQ(output, DataType::kBF16);
  EXPECT_NE(build.getOutputDataTypes(&output, 1, inputs.data(), 3), 0);
  EXPECT_STREQ(last_error().message, "Gemm attention: has 3 inputs and 1 outputs, expected 4 and 1");
  for (const size_t i : {0, 1}) {
    std::vector<DataType> mixed = inputs;
    mixed[i] = DataType::kHALF;
    EXPECT_NE(build.getOutputDataTypes(&output, 1, mixed.data(), 4), 0) << i;
  }
  for (int32_t position = 0; position < 5; ++position) {
    const bool reference = position == 2 || position == 3;
    DynamicPluginTensorDesc descs[5]{};
    const auto takes = [&](DataType type, nvinfer1::TensorFormat format) {
      descs[position].desc.type = type;
      descs[position].desc.format = format;
      return build.supportsFormatCombination(position, descs, 4, 1);
    };
    EXPECT_EQ(takes(DataType::kBF16, nvinfer1::TensorFormat::kLINEAR), true) << position;
    EXPECT_EQ(takes(DataType::kHALF, nvinfer1::TensorFormat::kLINEAR), reference) << position;
    EXPECT_FALSE(takes(DataType::kBF16, nvinfer1::TensorFormat::kHWC8)) << position;
  }
  EXPECT_EQ(build.configurePlugin(nullptr, 4, nullptr, 1), 0);
  EXPECT_NE(build.configurePlugin(nullptr, 2, nullptr, 1), 0);
  EXPECT_EQ(build.getWorkspaceSize(nullptr, 4, nullptr, 1), size_t{32} << 20);
  EXPECT_EQ(build.getNbOutputs(), 1);
}

}  // namespace
}  // namespace tokenweave::test
