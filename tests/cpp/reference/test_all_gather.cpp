// TensorRT-LLM's AllGather: its attributes, its shapes, and what a run queues.
#include <utility>

#include "../trt/fake_exprs.h"
#include "fake_nccl.h"
#include "v2_layers.h"

namespace tokenweave::test {
namespace {

constexpr const char* kName = "AllGather";

/// The only rank of the running test's group: communicators live as long as the process.
int32_t own_rank = 5;

/// What TensorRT-LLM gives, for one rank.
FieldList fields() {
  FieldList list;
  return list.set("group", {own_rank}).set("type_id", 7);
}

std::string creation_error(const FieldList& list) {
  return create(kName, list) != nullptr ? "" : trt::last_error().message;
}

class AllGatherTest : public testing::Test {
 protected:
  AllGatherTest() {
    gpu() = FakeGpu{};
    nccl() = FakeNccl{};
    own_rank += 10;
  }

  static PluginV2Ptr started(const FieldList& list) {
    PluginV2Ptr loaded = load(kName, store(create(kName, list)));
    EXPECT_EQ(loaded->initialize(), 0) << trt::last_error().message;
    return loaded;
  }

  int32_t run(const PluginV2Ptr& plugin, const nvinfer1::PluginTensorDesc& tensor) {
    const void* const inputs[] = {memory_[0]};
    void* const outputs[] = {memory_[1]};
    return plugin->enqueue(&tensor, nullptr, inputs, outputs, nullptr, kMain);
  }

  uint8_t memory_[2][16];
};

TEST_F(AllGatherTest, TakesWhatTensorRtLlmGives) {
  for (const int type : {0, 1, 7}) EXPECT_EQ(creation_error(fields().set("type_id", type)), "") << type;
  EXPECT_EQ(creation_error(fields().set("group", {3, 1, 2})), "");
}

TEST_F(AllGatherTest, RefusesTheRest) {
  const auto refused = [](const FieldList& list, const std::string& expected) {
    EXPECT_EQ(creation_error(list).find("AllGather: layer 'layer': " + expected), 0u) << trt::last_error().message;
  };
  refused(fields().remove("group"), "field 'group' is missing");
  refused(fields().set("group", std::vector<int32_t>{}), "field 'group' has no values");
  refused(fields().set("group", {1, 0, 1}), "field 'group' has a rank twice");
  refused(fields().set("group", {-1}), "field 'group' = -1 is below 0");
  refused(fields().remove("type_id"), "field 'type_id' is missing");
  refused(fields().set("type_id", 3), "field 'type_id' = 3 is not one of");
  refused(fields().set("strategy", 0), "field 'strategy' is unknown");
}

TEST_F(AllGatherTest, CreatorNamesItsFields) {
  nvinfer1::IPluginCreator& one = creator(kName);
  EXPECT_STREQ(one.getPluginVersion(), "1");
  EXPECT_STREQ(one.getPluginNamespace(), "tensorrt_llm");
  ASSERT_EQ(one.getFieldNames()->nbFields, 2);
  EXPECT_STREQ(one.getFieldNames()->fields[0].name, "group");
  EXPECT_STREQ(one.getFieldNames()->fields[1].name, "type_id");
}

TEST_F(AllGatherTest, Gathers) {
  const PluginV2Ptr plugin = started(fields());
  const PluginV2Ptr copy(plugin->clone());
  copy->attachToContext(nullptr, nullptr, nullptr);
  EXPECT_EQ(run(copy, desc({6, 64})), 0) << trt::last_error().message;
  EXPECT_EQ(nccl().input, memory_[0]);
  EXPECT_EQ(nccl().output, memory_[1]);
  EXPECT_EQ(run(copy, desc({0, 64})), 0);
  EXPECT_EQ(nccl().calls, (std::vector<std::string>{"init 1 ranks as 0 by made here", "gather 384 of type 9"}));
}

TEST_F(AllGatherTest, GathersEveryType) {
  for (const auto& [type_id, nccl_type] : {std::pair{0, 7}, {1, 6}, {7, 9}}) {
    const PluginV2Ptr plugin = started(fields().set("type_id", type_id));
    EXPECT_EQ(plugin->getOutputDataType(0, nullptr, 1), static_cast<DataType>(type_id));
    EXPECT_EQ(run(plugin, desc({2, 3, 4}, static_cast<DataType>(type_id))), 0);
    EXPECT_EQ(nccl().calls.back(), "gather 24 of type " + std::to_string(nccl_type));
  }
}

TEST_F(AllGatherTest, ShapesAndFormatsOfABuild) {
  FakeExprs exprs;
  const PluginV2Ptr plugin = create(kName, fields().set("group", {0, 1, 2}));
  EXPECT_EQ(plugin->getNbOutputs(), 1);
  const auto shape = [&](const std::vector<int64_t>& sizes, int32_t num_inputs = 1) {
    const nvinfer1::DimsExprs inputs[] = {exprs.dims(sizes), exprs.dims(sizes)};
    const nvinfer1::DimsExprs output = plugin->getOutputDimensions(0, inputs, num_inputs, exprs);
    return output.nbDims < 0 ? trt::last_error().message : FakeExprs::text(output);
  };
  EXPECT_EQ(shape({-1, 64}), "m * 3, 64");
  EXPECT_EQ(shape({-1}), "m * 3");
  EXPECT_EQ(shape({}), "AllGather: the tensor has no dimensions");
  EXPECT_EQ(shape({-1, 64}, 2), "AllGather: has 2 inputs, expected 1");
  for (int32_t position = 0; position < 2; ++position) {
    nvinfer1::PluginTensorDesc descs[2]{};
    descs[position] = desc({6, 64});
    EXPECT_TRUE(plugin->supportsFormatCombination(position, descs, 1, 1));
    EXPECT_FALSE(plugin->supportsFormatCombination(position, descs, 2, 1));
    descs[position].format = nvinfer1::TensorFormat::kCHW4;
    EXPECT_FALSE(plugin->supportsFormatCombination(position, descs, 1, 1));
    descs[position] = desc({6, 64}, DataType::kHALF);
    EXPECT_FALSE(plugin->supportsFormatCombination(position, descs, 1, 1));
  }
}

TEST_F(AllGatherTest, IsInertInABuild) {
  const PluginV2Ptr building = create(kName, fields());
  EXPECT_EQ(building->initialize(), 0);
  EXPECT_EQ(run(building, desc({6, 64})), 0);
  EXPECT_TRUE(nccl().calls.empty());
}

TEST_F(AllGatherTest, SharesTheCommunicatorOfAllReduce) {
  FieldList sum = fields();
  sum.flag("strategy", 0).flag("fusion_op", 0).set("eps", 1e-5f);
  const PluginV2Ptr all_reduce = load("AllReduce", store(create("AllReduce", sum)));
  EXPECT_EQ(all_reduce->initialize(), 0) << trt::last_error().message;
  const PluginV2Ptr plugin = started(fields());
  EXPECT_EQ(nccl().communicators, 1);
  // What failed for one has failed for the other.
  EXPECT_EQ(run(plugin, desc({6, 64})), 0);
  nccl().failing = "ncclAllGather";
  EXPECT_NE(run(plugin, desc({6, 64})), 0);
  EXPECT_EQ(trt::last_error().message, "AllGather: ncclAllGather failed: unhandled system error (2)");
  nccl().failing.clear();
  const size_t calls = nccl().calls.size();
  EXPECT_NE(run(all_reduce, desc({6, 64})), 0);
  EXPECT_EQ(trt::last_error().message, "AllReduce: ncclAllGather failed: unhandled system error (2)");
  EXPECT_EQ(nccl().calls.size(), calls);
}

TEST_F(AllGatherTest, FailsWhereItWasNotInitialised) {
  const PluginV2Ptr loaded = load(kName, store(create(kName, fields())));
  EXPECT_NE(run(loaded, desc({6, 64})), 0);
  EXPECT_EQ(trt::last_error().message, "AllGather: was run without being initialised");
}

}  // namespace
}  // namespace tokenweave::test
