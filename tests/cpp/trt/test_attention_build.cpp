// TokenWeaveAttention in a network: its fields, its inner plugin's life, and what it forwards.
#include "attention_layers.h"
#include "fake_exprs.h"
#include "fake_tensorrt.h"

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);

namespace tokenweave::test {
namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;

using Calls = std::vector<std::string>;

/// The creator's error; "" when a plugin came out.
std::string creation_error(const FieldList& fields) { return built(fields) != nullptr ? "" : last_error().message; }

void expect_error(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find("TokenWeaveAttention: layer 'layer': " + part), std::string::npos) << message;
}

class AttentionBuild : public AttentionTest {};

TEST_F(AttentionBuild, FieldsAreChecked) {
  const auto fields = [] { return attention_fields(1); };
  EXPECT_EQ(creation_error(fields()), "");
  EXPECT_EQ(creation_error(fields().remove("inner_version")), creation_error(fields().bytes("inner_version", {})));
  expect_error(creation_error(fields().set("half", 2)), "field 'half' = 2 is outside 0..1");
  expect_error(creation_error(fields().set("num_heads", 0)), "field 'num_heads' = 0 is below 1");
  expect_error(creation_error(fields().remove("head_size")), "field 'head_size' is missing");
  expect_error(creation_error(fields().remove("inner_name")), "field 'inner_name' is missing");
  expect_error(creation_error(fields().set("layer_idx", 3)), "field 'layer_idx' is unknown");
  expect_error(creation_error(fields().set("roles", {1, 2, 3, 4, 5, 6, 7, 8})), "field 'roles' has role 9 0 times");
  expect_error(creation_error(fields().set("roles", {1, 2, 3, 4, 5, 6, 7, 8, 9, 9})),
               "field 'roles' has role 9 2 times");
  expect_error(creation_error(fields().set("roles", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10})),
               "field 'roles' has role 10 2");
  expect_error(creation_error(fields().set("roles", {1, 2, 3, 4, 5, 6, 7, 8, 9, 13})), "field 'roles' = 13 is outside");
  expect_error(creation_error(fields().bytes("inner", {1, 2})),
               "field 'inner': packed plugin fields have a wrong magic");
  EXPECT_EQ(creation_error(fields().set("roles", {0, 1, 2, 3, 4, 5, 6, 7, 8, 9})), "");
}

TEST_F(AttentionBuild, InnerFieldsKeepTheirTypes) {
  for (const nlohmann::json& one : attention_vectors()["packed"]) {
    if (one["name"] != "every type") continue;
    EXPECT_NE(built(attention_fields(0).bytes("inner", bytes_of(one["packed_hex"]))), nullptr);
    EXPECT_EQ(fake_attention().fields[0], "flag INT8 -1");
    EXPECT_EQ(fake_attention().fields[1], "count INT32 1073741824");
    EXPECT_EQ(fake_attention().fields[2], "large INT64 -1099511627776");
    EXPECT_EQ(fake_attention().fields[3], "eps FLOAT32 0.000010");
    return;
  }
  FAIL() << "no such vector";
}

TEST_F(AttentionBuild, NeedsTheInnerCreator) {
  set_fake_creator(nullptr, "");
  expect_error(creation_error(attention_fields(0)),
               "no library has registered plugin 'GPTAttention' version '1' of namespace 'tensorrt_llm'. Fix: load its "
               "library first");
  set_fake_creator(fake_attention_creator(), "other");
  EXPECT_NE(creation_error(attention_fields(0)), "");
  set_fake_creator(&creator("StreamJoin"), "tokenweave");
  const std::string name = "StreamJoin", name_space = "tokenweave";
  expect_error(creation_error(attention_fields(0)
                                  .bytes("inner_name", {name.begin(), name.end()})
                                  .bytes("inner_namespace", {name_space.begin(), name_space.end()})),
               "plugin 'StreamJoin' version '1' of namespace 'tokenweave' is no V2 plugin");
}

TEST_F(AttentionBuild, NeedsATensorRtWithV2Plugins) {
  set_fake_version(110000);
  expect_error(creation_error(attention_fields(0)), "TensorRT of version number 110000 is loaded; V2 plugins need");
  set_fake_version(0);
  expect_error(creation_error(attention_fields(0)), "no TensorRT library is loaded");
}

TEST_F(AttentionBuild, AsksTheLibraryThatLoadedIt) {
  setLoggerFinder(fake_logger_finder());
  EXPECT_EQ(creation_error(attention_fields(0)), "");
  set_fake_version(110000);
  setLoggerFinder(fake_logger_finder());
  EXPECT_NE(creation_error(attention_fields(0)), "");
  setLoggerFinder(nullptr);
}

TEST_F(AttentionBuild, RefusesInnerPluginsThatItCannotServe) {
  fake_attention().failing = "createPlugin";
  expect_error(creation_error(attention_fields(0)),
               "plugin 'GPTAttention' version '1' of namespace 'tensorrt_llm' was "
               "refused by its own library");
  fake_attention().failing = "";
  fake_attention().outputs = 2;
  expect_error(creation_error(attention_fields(0)), "its inner plugin has 2 outputs. Fix: weave with split_attention");
  fake_attention().outputs = 1;
  fake_attention().kind = 1;
  expect_error(creation_error(attention_fields(0)),
               "plugin 'GPTAttention' version '1' of namespace 'tensorrt_llm' is "
               "no IPluginV2DynamicExt");
  EXPECT_EQ(fake_attention().alive, 0);
}

/// The shape of the output, or the error.
std::string shape(const PluginPtr& plugin, int32_t inputs = kNumInputs) {
  FakeExprs exprs;
  const std::vector<nvinfer1::DimsExprs> in(kNumInputs, exprs.dims({-1, kWidth}));
  nvinfer1::DimsExprs out{};
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  return build.getOutputShapes(in.data(), inputs, nullptr, 0, &out, 1, exprs) == 0 ? FakeExprs::text(out)
                                                                                   : last_error().message;
}

TEST_F(AttentionBuild, ForwardsShapesAndTypes) {
  const PluginPtr plugin = built(attention_fields(1));
  EXPECT_EQ(shape(plugin), "m, 32");
  EXPECT_EQ(shape(plugin, 3),
            "TokenWeaveAttention layer 3 suffix: has 3 inputs and 1 outputs, expected 17 (field 'roles') and 1");
  fake_attention().width = 33;
  EXPECT_EQ(shape(plugin),
            "TokenWeaveAttention layer 3 suffix: its inner plugin's output is 33 wide, fields "
            "'num_heads' and 'head_size' make 32");
  fake_attention().output_rank = 1;
  EXPECT_EQ(shape(plugin),
            "TokenWeaveAttention layer 3 suffix: its inner plugin's output has 1 dimensions, expected "
            "[tokens, width]");
  const std::vector<DataType> types(kNumInputs, DataType::kHALF);
  DataType made{};
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  EXPECT_EQ(build.getOutputDataTypes(&made, 1, types.data(), kNumInputs), 0);
  EXPECT_EQ(made, DataType::kHALF);
  EXPECT_EQ(build.getNbOutputs(), 1);
}

TEST_F(AttentionBuild, ForwardsFormats) {
  const PluginPtr plugin = built(attention_fields(0));
  std::vector<DynamicPluginTensorDesc> descs = attention_bounds(8);
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  const auto takes = [&](int32_t position) {
    return build.supportsFormatCombination(position, descs.data(), kNumInputs, 1);
  };
  for (int32_t position = 0; position <= kNumInputs; ++position) EXPECT_TRUE(takes(position));
  descs[kBlockOffsets].desc.format = nvinfer1::TensorFormat::kCHW32;
  EXPECT_FALSE(takes(kBlockOffsets));
  EXPECT_TRUE(takes(kContextLengths));
  descs[kQkv].desc.type = DataType::kFP8;  // the fake plugin has no such kernels
  EXPECT_FALSE(takes(kQkv));
}

TEST_F(AttentionBuild, AsksForTheLargestWorkspace) {
  const PluginPtr plugin = built(attention_fields(0));
  const std::vector<DynamicPluginTensorDesc> bounds = attention_bounds(4096);
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  EXPECT_EQ(build.getWorkspaceSize(bounds.data(), kNumInputs, &bounds.back(), 1), 12345u);
  EXPECT_EQ(fake_attention().sized[kQkv], (std::vector<int64_t>{4096, kWidth}));
  EXPECT_EQ(fake_attention().sized[kBlockOffsets], (std::vector<int64_t>{kPools, kMaxSequences, 2, kBlocks}));
  EXPECT_EQ(fake_attention().sized.back(), (std::vector<int64_t>{4096, 32}));
}

TEST_F(AttentionBuild, ConfiguresBeforeItTakesTheBytes) {
  const PluginPtr plugin = built(attention_fields(0));
  EXPECT_EQ(fake_attention().take(), Calls{});
  EXPECT_EQ(configure(plugin, attention_bounds(4096)), 0);
  EXPECT_EQ(fake_attention().take(), (Calls{"initialize 0", "configure 0"}));
  EXPECT_EQ(fake_attention().configured_max[kQkv], 4096);
  EXPECT_EQ(fake_attention().configured_max[kContextLengths], kMaxSequences);
  // Of a plugin that is initialized, dimensions are known: the optimum's.
  const auto& descs = fake_attention().configured_desc;
  EXPECT_EQ(descs[kQkv], (std::vector<int64_t>{2048, kWidth}));
  EXPECT_EQ(descs[kCacheIndirection], (std::vector<int64_t>{kMaxSequences / 2, 1, kMaxLength}));
  EXPECT_EQ(descs[kBlockOffsets], (std::vector<int64_t>{kPools, kMaxSequences / 2, 2, kBlocks}));
  EXPECT_EQ(descs.back(), (std::vector<int64_t>{2048, 32}));
  EXPECT_EQ(configure(plugin, attention_bounds(128)), 0);  // of another profile
  EXPECT_EQ(fake_attention().take(), Calls{"configure 0"});

  const auto* stored = capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize();
  bool found = false;
  for (int32_t i = 0; i < stored->nbFields; ++i) {
    if (std::string(stored->fields[i].name) != "inner") continue;
    found = true;
    ASSERT_EQ(stored->fields[i].length, 4);
    EXPECT_EQ(*static_cast<const int32_t*>(stored->fields[i].data), 2);  // configured twice
  }
  EXPECT_TRUE(found);
}

TEST_F(AttentionBuild, LeastRowsMayBeNegative) {
  const PluginPtr plugin = built(attention_fields(1));
  std::vector<DynamicPluginTensorDesc> bounds = attention_bounds(4096);
  bounds[kQkv].min.d[0] = bounds.back().min.d[0] = -4095;  // min(1 - 4096, 2048), as TensorRT bounds the suffix
  EXPECT_EQ(configure(plugin, bounds), 0) << last_error().message;
  EXPECT_EQ(fake_attention().configured_min[kQkv], 0);
  EXPECT_EQ(configure(plugin, bounds), 0) << last_error().message;  // of another profile
}

TEST_F(AttentionBuild, WithoutAnOptimumItConfiguresForTheBounds) {
  const PluginPtr plugin = built(attention_fields(0));
  std::vector<DynamicPluginTensorDesc> bounds = attention_bounds(4096);
  bounds.back().opt.nbDims = -1;
  bounds[kQkv].opt.d[0] = -1;
  bounds[kContextLengths].opt.d[0] = kMaxSequences + 1;
  EXPECT_EQ(configure(plugin, bounds), 0);
  const auto& descs = fake_attention().configured_desc;
  EXPECT_EQ(descs.back(), (std::vector<int64_t>{4096, 32}));
  EXPECT_EQ(descs[kQkv], (std::vector<int64_t>{4096, kWidth}));
  EXPECT_EQ(descs[kContextLengths], std::vector<int64_t>{kMaxSequences});
  EXPECT_EQ(descs[kSequenceLength], std::vector<int64_t>{kMaxSequences / 2});
}

TEST_F(AttentionBuild, ConfiguringMayFail) {
  const PluginPtr plugin = built(attention_fields(0));
  const auto error = [&](const std::vector<DynamicPluginTensorDesc>& bounds) {
    EXPECT_NE(configure(plugin, bounds), 0);
    return std::string(last_error().message);
  };
  std::vector<DynamicPluginTensorDesc> bounds = attention_bounds(4096);
  bounds[kCacheIndirection].max.d[1] = 4;
  EXPECT_EQ(error(bounds),
            "TokenWeaveAttention layer 3 prefix: the beam width of cache_indirection is 4, expected 1. Fix: "
            "weave with split_attention off");
  bounds[kCacheIndirection].max.nbDims = 2;
  EXPECT_NE(error(bounds).find("cache_indirection is not [sequences, beams, max_seq_len]"), std::string::npos);
  bounds = attention_bounds(4096);
  bounds[kQkv].max.d[0] = -1;
  EXPECT_NE(error(bounds).find("the profile does not bound a dimension"), std::string::npos);
  fake_attention().failing = "initialize";
  EXPECT_NE(error(attention_bounds(4096)).find("its inner plugin's initialize returned 7"), std::string::npos);
}

TEST_F(AttentionBuild, ClonesOwnInnerPlugins) {
  {
    const PluginPtr plugin = built(attention_fields(0));
    const PluginPtr copy(plugin->clone());
    EXPECT_EQ(fake_attention().alive, 2);
    EXPECT_EQ(fake_attention().take(), Calls{"clone 0"});
    EXPECT_EQ(configure(copy, attention_bounds(4096)), 0);
    fake_attention().take();
  }
  EXPECT_EQ(fake_attention().take(), (Calls{"terminate 1", "destroy 1", "destroy 0"}));
}

TEST_F(AttentionBuild, AnInnerPluginThatDoesNotCloneItselfIsAnErrorLater) {
  const PluginPtr plugin = built(attention_fields(0));
  fake_attention().failing = "clone";
  const PluginPtr copy(plugin->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_NE(shape(copy).find("has no inner plugin: it did not clone itself"), std::string::npos);
  EXPECT_NE(configure(copy, attention_bounds(8)), 0);
}

TEST_F(AttentionBuild, DoesNothingWhenRun) {
  const PluginPtr plugin = built(attention_fields(0));
  const PluginPtr attached(capability<IPluginV3OneRuntime>(plugin).attachToContext(nullptr));
  ASSERT_NE(attached, nullptr);
  fake_attention().take();
  auto& runtime = capability<IPluginV3OneRuntime>(attached);
  const auto descs = attention_descs(4, 1);
  EXPECT_EQ(runtime.onShapeChange(descs.data(), kNumInputs, &descs.back(), 1), 0);
  EXPECT_EQ(runtime.enqueue(descs.data(), &descs.back(), nullptr, nullptr, nullptr, kMain), 0);
  EXPECT_EQ(fake_attention().take(), Calls{});
  EXPECT_EQ(counters().while_building, 1u);
}

TEST_F(AttentionBuild, NamesItsFields) {
  const nvinfer1::PluginFieldCollection& fields = *creator("TokenWeaveAttention").getFieldNames();
  std::vector<std::string> names;
  for (int32_t i = 0; i < fields.nbFields; ++i) names.emplace_back(fields.fields[i].name);
  EXPECT_EQ(names, (std::vector<std::string>{"half", "num_heads", "head_size", "inner_name", "inner_version",
                                             "inner_namespace", "inner", "roles"}));
}

}  // namespace
}  // namespace tokenweave::test
