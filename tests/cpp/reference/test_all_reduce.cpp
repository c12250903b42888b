// TensorRT-LLM's AllReduce: its attributes, its inputs for each of them, and what a run queues.
#include <cstdlib>
#include <tuple>

#include "../trt/fake_exprs.h"
#include "fake_nccl.h"
#include "packed_fields.h"
#include "v2_layers.h"

namespace tokenweave::test {

std::vector<reference::AddRmsNorm>& asked_norms() {
  static std::vector<reference::AddRmsNorm> asked;
  return asked;
}

}  // namespace tokenweave::test

namespace tokenweave::reference {

Status add_rms_norm(const AddRmsNorm& call, cudaStream_t stream) {
  if (stream != test::kMain) return error(TW_INTERNAL, "on another stream");
  test::asked_norms().push_back(call);
  return {};
}

}  // namespace tokenweave::reference

namespace tokenweave::test {
namespace {

constexpr const char* kName = "AllReduce";
constexpr int kNccl = 0, kUb = 2, kAuto = 3, kOneShot = 4, kSymmetric = 8, kFused = 1;

/// The only rank of the running test's group: communicators live as long as the process.
int32_t own_rank = 0;

/// What TensorRT-LLM 1.x gives, for one rank.
FieldList fields(int strategy = kNccl, int fusion_op = 0) {
  FieldList list;
  list.set("group", {own_rank})
      .set("type_id", 7)
      .flag("strategy", strategy)
      .flag("fusion_op", fusion_op)
      .set("eps", 1e-5f);
  return list.flag("affine", fusion_op).flag("bias", 0).flag("scale", 0);
}

std::string creation_error(const FieldList& list) {
  return create(kName, list) != nullptr ? "" : trt::last_error().message;
}

using Descs = std::vector<nvinfer1::PluginTensorDesc>;

const nvinfer1::PluginTensorDesc kTensor = desc({6, 64}), kVector = desc({64}), kSpace = desc({10}, DataType::kINT64);

class AllReduceTest : public testing::Test {
 protected:
  AllReduceTest() {
    gpu() = FakeGpu{};
    nccl() = FakeNccl{};
    asked_norms().clear();
    own_rank += 10;
  }
  ~AllReduceTest() override { EXPECT_EQ(nccl().destroys, 0); }

  /// From network to engine to a context's copy.
  static PluginV2Ptr started(const FieldList& list, const Descs& inputs) {
    const PluginV2Ptr built = create(kName, list);
    configure(built, inputs);
    const PluginV2Ptr loaded = load(kName, store(built));
    EXPECT_EQ(loaded->initialize(), 0);
    PluginV2Ptr copy(loaded->clone());
    copy->attachToContext(nullptr, nullptr, nullptr);
    return copy;
  }

  int32_t run(const PluginV2Ptr& plugin, const Descs& inputs) {
    const void* in[] = {memory_[0], memory_[1], memory_[2], memory_[3], memory_[4]};
    return plugin->enqueue(inputs.data(), nullptr, in, outputs_, nullptr, kMain);
  }

  uint8_t memory_[7][16];
  void* const outputs_[2] = {memory_[5], memory_[6]};
};

TEST_F(AllReduceTest, TakesWhatTensorRtLlmGives) {
  for (const int strategy : {0, 1, 3, 4, 5, 8}) EXPECT_EQ(creation_error(fields(strategy)), "") << strategy;
  for (const int type : {0, 1, 7}) EXPECT_EQ(creation_error(fields().set("type_id", type)), "") << type;
  EXPECT_EQ(creation_error(fields(kAuto, kFused).flag("bias", 1)), "");
  EXPECT_EQ(creation_error(fields(kAuto, kFused).flag("affine", 0)), "");
  EXPECT_EQ(creation_error(fields().set("group", {3, 1, 2})), "");
  // Attributes that older releases have as well.
  EXPECT_EQ(creation_error(fields().flag("config", 3).set("counter", 7)), "");
  EXPECT_EQ(creation_error(fields().remove("affine").remove("bias").remove("scale")), "");
}

TEST_F(AllReduceTest, RefusesTheRest) {
  const auto refused = [](const FieldList& list, const std::string& expected) {
    EXPECT_EQ(creation_error(list).find("AllReduce: layer 'layer': " + expected), 0u) << trt::last_error().message;
  };
  refused(fields().remove("group"), "field 'group' is missing");
  refused(fields().set("group", std::vector<int32_t>{}), "field 'group' has no values");
  refused(fields().set("group", {1, 0, 1}), "field 'group' has a rank twice");
  refused(fields().set("group", {-1}), "field 'group' = -1 is below 0");
  refused(fields().set("type_id", 2), "field 'type_id' = 2 is not one of");
  refused(
      fields(kUb),
      "field 'strategy' = 2 (UB of TensorRT-LLM 0.20 to 1.2, whose numbers are assumed) is not done here. Fix: NCCL "
      "(0) or AUTO (3)");
  refused(fields(6), "field 'strategy' = 6 (LOWPRECISION of");
  refused(fields(7), "field 'strategy' = 7 (MNNVL of");
  refused(fields(9), "field 'strategy' = 9 (none of TensorRT-LLM 0.20 to 1.2, whose numbers are assumed)");
  refused(fields(-1), "field 'strategy' = -1 is outside 0..127");
  refused(fields().set("strategy", 0), "field 'strategy' has type INT32, expected INT8");
  for (const int op : {2, 3, 4, 8}) {
    refused(fields(kNccl, op).flag("affine", 1), "field 'fusion_op' = " + std::to_string(op) + " is not done here");
  }
  refused(fields().set("eps", 2.0f), "field 'eps' = 2 is outside 0..1");
  refused(fields().flag("affine", 2), "field 'affine' = 2 is outside 0..1");
  refused(fields(kNccl, kFused).flag("scale", 1), "field 'scale' = 1 belongs to quantised outputs");
  refused(fields().set("site", 1), "field 'site' is unknown");
  refused(fields().flag("has_workspace", 1), "field 'has_workspace' is unknown");  // an engine's alone
}

TEST_F(AllReduceTest, CreatorNamesItsFields) {
  nvinfer1::IPluginCreator& one = creator(kName);
  EXPECT_STREQ(one.getPluginVersion(), "1");
  EXPECT_STREQ(one.getPluginNamespace(), "tensorrt_llm");
  std::vector<std::string> names;
  for (int32_t i = 0; i < one.getFieldNames()->nbFields; ++i) names.push_back(one.getFieldNames()->fields[i].name);
  EXPECT_EQ(names, (std::vector<std::string>{"group", "type_id", "strategy", "config", "fusion_op", "counter", "eps",
                                             "affine", "bias", "scale"}));
}

TEST_F(AllReduceTest, Sums) {
  const PluginV2Ptr plugin = started(fields(), {kTensor});
  EXPECT_EQ(plugin->getNbOutputs(), 1);
  EXPECT_EQ(run(plugin, {kTensor}), 0);
  EXPECT_EQ(run(plugin, {desc({0, 64})}), 0);
  EXPECT_EQ(nccl().calls, (std::vector<std::string>{"init 1 ranks as 0 by made here", "sum 384 of type 9"}));
  EXPECT_TRUE(asked_norms().empty());
}

TEST_F(AllReduceTest, SumsEveryType) {
  for (const auto& [type_id, nccl_type] : {std::pair{0, 7}, {1, 6}, {7, 9}}) {
    const nvinfer1::PluginTensorDesc tensor = desc({6, 64}, static_cast<DataType>(type_id));
    const PluginV2Ptr plugin = started(fields().set("type_id", type_id), {tensor});
    EXPECT_EQ(plugin->getOutputDataType(0, nullptr, 1), static_cast<DataType>(type_id));
    EXPECT_EQ(run(plugin, {tensor}), 0);
    EXPECT_EQ(nccl().calls.back(), "sum 384 of type " + std::to_string(nccl_type));
  }
}

TEST_F(AllReduceTest, NormalisesWhatItStores) {
  for (const int workspace : {0, 1}) {
    for (const int bias : {0, 1}) {
      for (const int affine : {0, 1}) {
        Descs inputs{kTensor};
        if (workspace != 0) inputs.push_back(kSpace);
        if (bias != 0) inputs.push_back(kVector);
        inputs.push_back(kTensor);
        if (affine != 0) inputs.push_back(kVector);
        const FieldList list = fields(workspace != 0 ? kOneShot : kNccl, kFused).flag("bias", bias);
        const PluginV2Ptr plugin = started(FieldList(list).flag("affine", affine), inputs);
        EXPECT_EQ(plugin->getNbOutputs(), 2);
        ASSERT_EQ(run(plugin, inputs), 0) << trt::last_error().message;
        EXPECT_EQ(nccl().calls.back(), "sum 384 of type 9");
        const reference::AddRmsNorm& norm = asked_norms().back();
        EXPECT_EQ(norm.rows, 6);
        EXPECT_EQ(norm.hidden, 64);
        EXPECT_EQ(norm.dtype, TW_BFLOAT16);
        EXPECT_EQ(norm.eps, 1e-5f);
        EXPECT_EQ(norm.input, outputs_[1]);
        EXPECT_EQ(norm.stored, outputs_[1]);
        EXPECT_EQ(norm.normed, outputs_[0]);
        const uint8_t* next = memory_[1 + workspace];
        const uint8_t* const none = nullptr;
        EXPECT_EQ(norm.bias, bias != 0 ? next : none);
        next += 16 * bias;
        EXPECT_EQ(norm.residual, next);
        EXPECT_EQ(norm.norm_weight, affine != 0 ? next + 16 : none);
      }
    }
  }
}

/// A window holds [6, 64] in bfloat16, in pages of 4096 bytes.
TEST_F(AllReduceTest, SumsInAWindowOfNccl) {
  const PluginV2Ptr plugin = started(fields(kSymmetric), {kTensor});
  EXPECT_EQ(nccl().calls,
            (std::vector<std::string>{"init 1 ranks as 0 by made here", "allocate 8192", "register 8192"}));
  ASSERT_EQ(run(plugin, {kTensor}), 0) << trt::last_error().message;
  EXPECT_EQ(nccl().calls.back(), "sum 384 of type 9");
  EXPECT_EQ(nccl().input, nccl().memory);
  EXPECT_EQ(nccl().output, nccl().memory + 4096);
  EXPECT_EQ(gpu().calls, (std::vector<std::string>{"copy 768 main", "copy 768 main"}));  // in, and out
  ASSERT_EQ(run(plugin, {desc({0, 64})}), 0);
  EXPECT_EQ(gpu().calls.size(), 2u);
}

TEST_F(AllReduceTest, NormalisesFromTheWindow) {
  const Descs inputs{kTensor, kTensor, kVector};
  const PluginV2Ptr plugin = started(fields(kSymmetric, kFused), inputs);
  ASSERT_EQ(run(plugin, inputs), 0) << trt::last_error().message;
  EXPECT_EQ(gpu().calls, (std::vector<std::string>{"copy 768 main"}));
  EXPECT_EQ(asked_norms().back().input, nccl().memory + 4096);
  EXPECT_EQ(asked_norms().back().stored, outputs_[1]);
}

TEST_F(AllReduceTest, LayersShareAWindowThatIsLargeEnough) {
  const PluginV2Ptr one = started(fields(kSymmetric), {desc({60, 64})}), other = started(fields(kSymmetric), {kTensor});
  EXPECT_EQ(nccl().calls,
            (std::vector<std::string>{"init 1 ranks as 0 by made here", "allocate 16384", "register 16384"}));
  const PluginV2Ptr larger = started(fields(kSymmetric), {desc({600, 64})});
  EXPECT_EQ(nccl().calls.back(), "register 155648");
  EXPECT_NE(run(one, {desc({600, 64})}), 0);
  EXPECT_EQ(trt::last_error().message, "AllReduce: a tensor of 76800 bytes does not fit a window of 8192");
}

TEST_F(AllReduceTest, HasNoWindowWhereAStepFails) {
  const auto loaded = [&] {
    const PluginV2Ptr built = create(kName, fields(kSymmetric));
    configure(built, {kTensor});
    return load(kName, store(built));
  };
  for (const auto& [function, windows, expected] :
       {std::tuple{"ncclMemAlloc", true, "ncclMemAlloc failed: unhandled system error (2)"},
        {"ncclCommWindowRegister", true, "ncclCommWindowRegister failed: unhandled system error (2)"},
        {"", false, "NCCL gives no window"}}) {
    ++own_rank;
    nccl() = FakeNccl{};
    nccl().failing = function;
    nccl().windows = windows;
    const PluginV2Ptr plugin = loaded();
    EXPECT_NE(plugin->initialize(), 0);
    const std::string message = trt::last_error().message;
    EXPECT_EQ(message.find(std::string("AllReduce: rank 0: ") + expected), 0u) << message;
    EXPECT_NE(run(plugin, {kTensor}), 0);
    EXPECT_EQ(trt::last_error().message, "AllReduce: was run without being initialised");

    // Without memory the communicator serves other layers; where it was aborted, they hear why.
    const bool aborted = function != std::string("ncclMemAlloc");
    EXPECT_EQ(nccl().communicators, aborted ? 0 : 1);
    const std::vector<std::string> end{nccl().calls.end() - 2, nccl().calls.end()};
    EXPECT_EQ(end == (std::vector<std::string>{"free", "abort"}), aborted);
    nccl().failing.clear();
    const PluginV2Ptr other = load(kName, store(create(kName, fields())));
    EXPECT_EQ(other->initialize() == 0, !aborted);
    if (aborted) {
      EXPECT_EQ(trt::last_error().message, message);
    }
  }
}

TEST_F(AllReduceTest, SumsNoMoreWithoutItsInputInTheWindow) {
  const PluginV2Ptr plugin = started(fields(kSymmetric), {kTensor}), other = started(fields(), {kTensor});
  gpu().failing = "cudaMemcpyAsync";
  const size_t calls = nccl().calls.size();
  EXPECT_NE(run(plugin, {kTensor}), 0);
  gpu().failing.clear();
  EXPECT_NE(run(other, {kTensor}), 0);  // its sum would meet the other ranks' sum of `plugin`
  EXPECT_EQ(trt::last_error().message, "AllReduce: cudaMemcpyAsync failed");
  EXPECT_EQ(nccl().calls.size(), calls);
}

/// Libraries of before there were windows stored no size, and summed without.
TEST_F(AllReduceTest, RefusesAnEngineWithoutTheSizeOfItsWindow) {
  for (const int strategy : {kSymmetric, kNccl}) {
    const PluginV2Ptr loaded =
        load(kName, trt::PackedFields::write(*fields(strategy).flag("has_workspace", 0).collection()));
    ASSERT_NE(loaded, nullptr) << trt::last_error().message;
    nccl() = FakeNccl{};
    EXPECT_EQ(loaded->initialize() == 0, strategy == kNccl);
    EXPECT_EQ(nccl().calls.size(), strategy == kNccl ? 1u : 0u);
    if (strategy == kNccl) continue;
    EXPECT_EQ(
        trt::last_error().message,
        "AllReduce: field 'window_kib' is not in the engine, which an older library built. Fix: rebuild the engine");
  }
}

TEST_F(AllReduceTest, AWindowIsForTheLargestOfAllProfiles) {
  const PluginV2Ptr built = create(kName, fields(kSymmetric));
  for (const int64_t tokens : {600, 6}) configure(built, {desc({tokens, 64})});
  const PluginV2Ptr loaded = load(kName, store(built));
  ASSERT_EQ(loaded->initialize(), 0);
  EXPECT_EQ(nccl().calls.back(), "register 155648");
  EXPECT_EQ(run(loaded, {desc({600, 64})}), 0) << trt::last_error().message;
}

TEST_F(AllReduceTest, FormatsOfABuild) {
  const PluginV2Ptr plugin = create(kName, fields(kAuto, kFused));
  const auto takes = [&](int32_t position, int32_t inputs, nvinfer1::PluginTensorDesc one) {
    nvinfer1::PluginTensorDesc all[6]{};
    all[position] = one;
    return plugin->supportsFormatCombination(position, all, inputs, 2);
  };
  for (int32_t position = 0; position < 6; ++position) {
    EXPECT_EQ(takes(position, 4, kTensor), position != 1) << position;
    EXPECT_EQ(takes(position, 4, kSpace), position == 1) << position;
  }
  EXPECT_TRUE(takes(1, 3, kTensor));  // without a workspace
  EXPECT_FALSE(takes(1, 3, kSpace));
  EXPECT_FALSE(takes(0, 3, desc({6, 64}, DataType::kHALF)));
  nvinfer1::PluginTensorDesc vectorised = kTensor;
  vectorised.format = nvinfer1::TensorFormat::kHWC8;
  EXPECT_FALSE(takes(0, 3, vectorised));
  EXPECT_FALSE(takes(0, 5, kTensor));
  EXPECT_FALSE(takes(0, 2, kTensor));
  EXPECT_EQ(trt::last_error().message.find("AllReduce: has 2 inputs and 2 outputs, expected 3 inputs, or one more"),
            0u);
}

TEST_F(AllReduceTest, ShapesOfABuild) {
  FakeExprs exprs;
  const auto shape = [&](int fusion_op, const std::vector<int64_t>& sizes) {
    const nvinfer1::DimsExprs inputs[] = {exprs.dims(sizes), exprs.dims(sizes), exprs.dims({sizes.back()})};
    const PluginV2Ptr plugin = create(kName, fields(kNccl, fusion_op));
    const nvinfer1::DimsExprs output = plugin->getOutputDimensions(0, inputs, fusion_op != 0 ? 3 : 1, exprs);
    return output.nbDims < 0 ? trt::last_error().message : FakeExprs::text(output);
  };
  EXPECT_EQ(shape(0, {-1, 60}), "m, 60");
  EXPECT_EQ(shape(kFused, {-1, 64}), "m, 64");
  EXPECT_EQ(shape(kFused, {2, -1, 16384}), "2, m, 16384");
  for (const int64_t hidden : {60, 16392}) {
    EXPECT_EQ(shape(kFused, {-1, hidden}),
              "AllReduce: hidden size " + std::to_string(hidden) + " is not a multiple of 8 from 8 to 16384");
  }
}

TEST_F(AllReduceTest, RefusesToRunOnAHiddenSizeThatWillNotDo) {
  const Descs inputs{desc({6, 60}), desc({6, 60}), desc({60})};
  const PluginV2Ptr plugin = started(fields(kNccl, kFused), inputs);
  EXPECT_NE(run(plugin, inputs), 0);
  EXPECT_EQ(trt::last_error().message, "AllReduce: hidden size 60 is not a multiple of 8 from 8 to 16384");
  EXPECT_TRUE(asked_norms().empty());
}

TEST_F(AllReduceTest, IsInertInABuild) {
  testing::internal::CaptureStderr();
  const PluginV2Ptr building = create(kName, fields());
  EXPECT_EQ(building->initialize(), 0);
  EXPECT_EQ(run(building, {kTensor}), 0);
  setenv("IS_BUILDING", "1", 1);
  const PluginV2Ptr in_a_build = load(kName, store(building));
  unsetenv("IS_BUILDING");
  EXPECT_EQ(in_a_build->initialize(), 0);
  EXPECT_EQ(run(in_a_build, {kTensor}), 0);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("AllReduce is skipped, as always in a build"),
            std::string::npos);
  EXPECT_TRUE(nccl().calls.empty());
}

TEST_F(AllReduceTest, LayersShareOneCommunicator) {
  const PluginV2Ptr one = started(fields(), {kTensor}), other = started(fields(kAuto), {kTensor, kSpace});
  EXPECT_EQ(nccl().calls.size(), 1u);
  EXPECT_EQ(nccl().communicators, 1);
  const PluginV2Ptr of_another_group = started(fields().set("group", {own_rank + 1}), {kTensor});
  gpu().device = 1;
  const PluginV2Ptr on_another_device = started(fields(), {kTensor});
  EXPECT_EQ(nccl().communicators, 3);
}

TEST_F(AllReduceTest, LayersOfALaterEngineNeedNoMeeting) {
  started(fields(), {kTensor}).reset();
  EXPECT_EQ(run(started(fields(), {kTensor}), {kTensor}), 0);
  EXPECT_EQ(nccl().calls.size(), 2u);  // one init, one sum
  EXPECT_EQ(nccl().communicators, 1);
}

TEST_F(AllReduceTest, FailsWithTheReason) {
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRank"}) {
    ++own_rank;
    const PluginV2Ptr loaded = load(kName, store(create(kName, fields())));
    EXPECT_NE(run(loaded, {kTensor}), 0);
    EXPECT_EQ(trt::last_error().message, "AllReduce: was run without being initialised");
    nccl().failing = function;
    EXPECT_NE(loaded->initialize(), 0);
    const std::string message = trt::last_error().message;
    EXPECT_NE(message.find(std::string(function) + " failed: unhandled system error (2)"), std::string::npos)
        << message;
    // Nobody meets again: another layer, and a context that TensorRT attaches, hear the same at once.
    nccl().failing.clear();
    const size_t calls = nccl().calls.size();
    const PluginV2Ptr other = load(kName, store(create(kName, fields(kAuto))));
    other->attachToContext(nullptr, nullptr, nullptr);
    EXPECT_EQ(trt::last_error().message, message);
    EXPECT_NE(other->initialize(), 0);
    EXPECT_EQ(nccl().calls.size(), calls);
  }
}

TEST_F(AllReduceTest, SumsNoMoreAfterAnError) {
  const auto error_of = [&](const PluginV2Ptr& plugin) {
    return run(plugin, {kTensor}) == 0 ? "" : trt::last_error().message;
  };
  for (const auto& [function, async_error, expected] : {std::tuple{"ncclAllReduce", 0, "ncclAllReduce failed"},
                                                        {"ncclCommGetAsyncError", 0, "ncclCommGetAsyncError failed"},
                                                        {"", 6, "an earlier collective failed"}}) {
    ++own_rank;
    nccl() = FakeNccl{};
    const PluginV2Ptr plugin = started(fields(), {kTensor}), other = started(fields(kAuto), {kTensor});
    EXPECT_EQ(error_of(plugin), "");
    nccl().failing = function;
    nccl().async_error = async_error;
    const std::string message = std::string("AllReduce: ") + expected + ": unhandled system error";
    EXPECT_EQ(error_of(plugin).find(message), 0u) << trt::last_error().message;
    nccl().failing.clear();
    nccl().async_error = 0;
    const size_t calls = nccl().calls.size();
    EXPECT_EQ(error_of(other).find(message), 0u) << trt::last_error().message;
    EXPECT_EQ(nccl().calls.size(), calls);
  }
}

TEST_F(AllReduceTest, RefusesWhatAnotherLibraryStored) {
  std::vector<uint8_t> stored = store(create(kName, fields()));
  stored[0] ^= 1;
  EXPECT_EQ(load(kName, stored), nullptr);
  EXPECT_EQ(trt::last_error().message,
            "AllReduce: layer 'layer': packed plugin fields have a wrong magic. Fix: rebuild the engine");
  EXPECT_EQ(load(kName, {}), nullptr);
  EXPECT_EQ(creator(kName).deserializePlugin("layer", nullptr, 16), nullptr);
  stored = store(create("Gemm", FieldList().set("transa", 0).set("transb", 1).set("type_id", 7)));
  EXPECT_EQ(load(kName, stored), nullptr);
  EXPECT_EQ(trt::last_error().message, "AllReduce: layer 'layer': field 'group' is missing");
}

}  // namespace
}  // namespace tokenweave::test
