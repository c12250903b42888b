// What the plugins tell TensorRT's builder: output types and shapes, formats, aliases; and what they learn from it.
#include "fake_exprs.h"
#include "layers.h"

namespace tokenweave::test {
namespace {

using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::TensorFormat;

constexpr int64_t kUnknown = -1;
constexpr auto kBuild = TensorRTPhase::kBUILD;
using Shapes = std::vector<std::vector<int64_t>>;

/// The shapes of the outputs, or the error.
std::vector<std::string> shapes(const PluginPtr& plugin, const Shapes& inputs) {
  FakeExprs exprs;
  std::vector<DimsExprs> in;
  for (const auto& shape : inputs) in.push_back(exprs.dims(shape));
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  std::vector<DimsExprs> out(static_cast<size_t>(build.getNbOutputs()));
  if (build.getOutputShapes(in.data(), static_cast<int32_t>(in.size()), nullptr, 0, out.data(),
                            static_cast<int32_t>(out.size()), exprs) != 0) {
    return {last_error().message};
  }
  std::vector<std::string> texts;
  for (const DimsExprs& dims : out) texts.push_back(FakeExprs::text(dims));
  return texts;
}

/// The types of the outputs; none: refused.
std::vector<DataType> types(const PluginPtr& plugin, const std::vector<DataType>& inputs) {
  auto& build = capability<IPluginV3OneBuildV2>(plugin);
  std::vector<DataType> out(static_cast<size_t>(build.getNbOutputs()));
  const int32_t failed = build.getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), inputs.data(),
                                                  static_cast<int32_t>(inputs.size()));
  return failed != 0 ? std::vector<DataType>{} : out;
}

const Shapes kStart{{kUnknown, 64}, {kUnknown, 64}, {64}, {kUnknown}, {kUnknown}, {1}};
const std::vector<DataType> kStartTypes{DataType::kBF16,  DataType::kBF16,  DataType::kBF16,
                                        DataType::kINT32, DataType::kINT32, DataType::kINT32};

TEST(Build, ShapesOfAStart) {
  const PluginPtr sharded = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  EXPECT_EQ(shapes(sharded, kStart), (std::vector<std::string>{"m, 64", "m ceil/ 2, 64", "1"}));
  const PluginPtr gathered = create("AllReduceRmsNorm", start_fields(kBuild).flag("gather_residual", 1), kBuild);
  EXPECT_EQ(shapes(gathered, kStart), (std::vector<std::string>{"m, 64", "m, 64", "1"}));
  const PluginPtr biased = create("AllReduceRmsNorm", start_fields(kBuild).flag("has_bias", 1), kBuild);
  EXPECT_EQ(shapes(biased, {{8, 64}, {8, 64}, {64}, {64}, {9}, {1}, {1}})[0], "8, 64");
  EXPECT_NE(shapes(biased, kStart)[0].find("has 6 inputs and 3 outputs, expected 7 and 3"), std::string::npos);
}

TEST(Build, ShapesThatAStartRefuses) {
  const PluginPtr plugin = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  const auto error = [&](size_t input, std::vector<int64_t> shape) {
    Shapes inputs = kStart;
    inputs[input] = std::move(shape);
    return shapes(plugin, inputs)[0];
  };
  EXPECT_EQ(error(0, {kUnknown}), "AllReduceRmsNorm site 0 prefix: input and residual are not [tokens, hidden]");
  EXPECT_NE(error(0, {kUnknown, kUnknown}).find("is not known when building"), std::string::npos);
  EXPECT_NE(error(0, {kUnknown, 60}).find("hidden size 60 is not a multiple of 8"), std::string::npos);
  EXPECT_NE(error(1, {kUnknown, 72}).find("residual has another hidden size"), std::string::npos);
  EXPECT_NE(error(2, {72}).find("norm_weight or bias is not [hidden]"), std::string::npos);
  EXPECT_NE(error(2, {1, 64}).find("norm_weight or bias is not [hidden]"), std::string::npos);
  EXPECT_NE(error(5, {2}).find("the chain is not [1]"), std::string::npos);
}

TEST(Build, TypesOfAStart) {
  const PluginPtr plugin = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  EXPECT_EQ(types(plugin, kStartTypes), (std::vector<DataType>{DataType::kBF16, DataType::kBF16, DataType::kINT32}));
  for (const size_t input : {0, 1, 2, 5}) {
    std::vector<DataType> inputs = kStartTypes;
    inputs[input] = DataType::kHALF;
    EXPECT_TRUE(types(plugin, inputs).empty()) << input;
  }
}

TEST(Build, JoinsPassShapesAndTypesOn) {
  const PluginPtr plugin = create("StreamJoin", join_fields(kBuild), kBuild);
  EXPECT_EQ(shapes(plugin, {{kUnknown, 64}, {5, 64}, {kUnknown, 8}, {1}}),
            (std::vector<std::string>{"m, 64", "5, 64", "1"}));
  EXPECT_EQ(shapes(plugin, {{kUnknown, 64}, {5, 64}, {2}})[0], "StreamJoin site 0 prefix: the chain is not [1]");
  EXPECT_NE(shapes(plugin, {{kUnknown, 64}, {1}})[0].find("has 2 inputs and 3 outputs for 2 aliased"),
            std::string::npos);
  EXPECT_EQ(types(plugin, {DataType::kBF16, DataType::kHALF, DataType::kINT64, DataType::kINT32}),
            (std::vector<DataType>{DataType::kBF16, DataType::kHALF, DataType::kINT32}));
  EXPECT_TRUE(types(plugin, {DataType::kBF16, DataType::kHALF, DataType::kINT64}).empty());
}

TEST(Build, OnlyJoinsAlias) {
  const PluginPtr join = create("StreamJoin", join_fields(kBuild), kBuild);
  for (const auto& [output, input] : {std::pair{0, 0}, {1, 1}, {2, -1}}) {
    EXPECT_EQ(capability<IPluginV3OneBuildV2>(join).getAliasedInput(output), input);
  }
  const PluginPtr start = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  for (const int output : {0, 1, 2}) EXPECT_EQ(capability<IPluginV3OneBuildV2>(start).getAliasedInput(output), -1);
  EXPECT_STREQ(capability<IPluginV3OneBuildV2>(start).getMetadataString(), "AllReduceRmsNorm site 0 prefix");
}

/// Whether the plugin takes `wanted` at `position`, all else being as in `descs`.
bool takes(const PluginPtr& plugin, const std::vector<DataType>& all, size_t position, DataType wanted,
           int32_t num_outputs, TensorFormat format = TensorFormat::kLINEAR) {
  std::vector<DynamicPluginTensorDesc> descs(all.size());
  for (size_t i = 0; i < all.size(); ++i) descs[i].desc = desc({1}, all[i]);
  descs[position].desc.type = wanted;
  descs[position].desc.format = format;
  return capability<IPluginV3OneBuildV2>(plugin).supportsFormatCombination(
      static_cast<int32_t>(position), descs.data(), static_cast<int32_t>(all.size()) - num_outputs, num_outputs);
}

TEST(Build, FormatsOfAStart) {
  const PluginPtr plugin = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  std::vector<DataType> all = kStartTypes;
  all.insert(all.end(), {DataType::kBF16, DataType::kBF16, DataType::kINT32});
  for (size_t position = 0; position < all.size(); ++position) {
    const bool reference = position == 3 || position == 4;
    EXPECT_TRUE(takes(plugin, all, position, all[position], 3)) << position;
    EXPECT_EQ(takes(plugin, all, position, DataType::kHALF, 3), reference) << position;
    EXPECT_EQ(takes(plugin, all, position, DataType::kINT64, 3), reference) << position;
    EXPECT_FALSE(takes(plugin, all, position, all[position], 3, TensorFormat::kCHW32)) << position;
  }
  all.pop_back();
  EXPECT_FALSE(takes(plugin, all, 0, DataType::kBF16, 2));
}

TEST(Build, FormatsOfAJoin) {
  const PluginPtr plugin = create("StreamJoin", join_fields(kBuild), kBuild);
  const std::vector<DataType> all{DataType::kBF16, DataType::kHALF, DataType::kFLOAT, DataType::kINT32,
                                  DataType::kBF16, DataType::kHALF, DataType::kINT32};
  for (size_t position = 0; position < all.size(); ++position) {
    EXPECT_TRUE(takes(plugin, all, position, all[position], 3)) << position;
    EXPECT_EQ(takes(plugin, all, position, DataType::kINT64, 3), position < 3) << position;
    EXPECT_FALSE(takes(plugin, all, position, all[position], 3, TensorFormat::kHWC8)) << position;
  }
}

DynamicPluginTensorDesc bounded(std::vector<int64_t> max) {
  DynamicPluginTensorDesc result{};
  result.max = dims(std::move(max));
  return result;
}

int32_t configure(const PluginPtr& plugin, std::vector<int64_t> input, int64_t tokens) {
  const std::vector<DynamicPluginTensorDesc> inputs{bounded(input),    bounded(input), bounded({input.back()}),
                                                    bounded({tokens}), bounded({16}),  bounded({1})};
  return capability<IPluginV3OneBuildV2>(plugin).configurePlugin(inputs.data(), 6, nullptr, 3);
}

int32_t serialized(const PluginPtr& plugin, const std::string& name) {
  const auto* fields = capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize();
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    if (fields->fields[i].name == name) return *static_cast<const int32_t*>(fields->fields[i].data);
  }
  return -1;
}

TEST(Build, LearnsTheBoundsOfAllProfiles) {
  const PluginPtr plugin = create("AllReduceRmsNorm", start_fields(kBuild), kBuild);
  EXPECT_EQ(configure(plugin, {4096, 64}, 8192), 0);
  EXPECT_EQ(configure(plugin, {128, 64}, 8192), 0);
  EXPECT_EQ(serialized(plugin, "hidden"), 64);
  EXPECT_EQ(serialized(plugin, "max_rows"), 4096);
  EXPECT_NE(configure(plugin, {-1, 64}, 8192), 0);
  EXPECT_NE(configure(plugin, {4096, 60}, 8192), 0);
}

/// The values of a collection, by name.
std::vector<std::pair<std::string, std::vector<uint8_t>>> values(const nvinfer1::PluginFieldCollection& fields) {
  std::vector<std::pair<std::string, std::vector<uint8_t>>> result;
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const nvinfer1::PluginField& field = fields.fields[i];
    const int32_t size = field.type == PluginFieldType::kINT8 || field.type == PluginFieldType::kCHAR ? 1 : 4;
    const auto* data = static_cast<const uint8_t*>(field.data);
    result.emplace_back(field.name, std::vector<uint8_t>(data, data + field.length * size));
  }
  return result;
}

TEST(Build, WhatIsSerializedMakesTheSamePlugin) {
  FieldList start = start_fields(kBuild).set("site", 7).set("half", 1).set("kind", 1).flag("has_bias", 1);
  for (const auto& [name, fields] :
       {std::pair{"AllReduceRmsNorm", start}, std::pair{"StreamJoin", join_fields(kBuild)}}) {
    const PluginPtr built = create(name, fields, kBuild);
    if (built->getCapabilityInterface(nvinfer1::PluginCapabilityType::kBUILD) != nullptr &&
        std::string(name) == "StreamJoin") {
      EXPECT_EQ(capability<IPluginV3OneBuildV2>(built).configurePlugin(nullptr, 5, nullptr, 3), 0);
    } else {
      const std::vector<DynamicPluginTensorDesc> inputs(7, bounded({4096, 64}));
      EXPECT_EQ(capability<IPluginV3OneBuildV2>(built).configurePlugin(inputs.data(), 7, nullptr, 3), 0);
    }
    const auto* stored = capability<IPluginV3OneRuntime>(built).getFieldsToSerialize();
    const PluginPtr loaded(creator(name).createPlugin("loaded", stored, TensorRTPhase::kRUNTIME));
    ASSERT_NE(loaded, nullptr) << last_error().message;
    const PluginPtr cloned(loaded->clone());
    for (const PluginPtr* plugin : {&loaded, &cloned}) {
      EXPECT_EQ(values(*capability<IPluginV3OneRuntime>(*plugin).getFieldsToSerialize()), values(*stored));
      EXPECT_STREQ(capability<nvinfer1::IPluginV3OneCore>(*plugin).getPluginName(), name);
    }
  }
}

TEST(Build, AnEngineThatWasNeverConfiguredIsRefused) {
  const PluginPtr plugin = create("StreamJoin", join_fields(kBuild), kBuild);
  const auto* stored = capability<IPluginV3OneRuntime>(plugin).getFieldsToSerialize();
  EXPECT_EQ(creator("StreamJoin").createPlugin("join", stored, TensorRTPhase::kRUNTIME), nullptr);
  EXPECT_NE(std::string(last_error().message).find("field 'num_inputs' = 0 is below 1"), std::string::npos);
}

}  // namespace
}  // namespace tokenweave::test
