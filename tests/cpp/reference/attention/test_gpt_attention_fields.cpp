// Every attribute of a GPTAttention, good and bad.
#include "../../trt/fake_exprs.h"
#include "gpt_attention_layers.h"

namespace tokenweave::test {
namespace {

using nlohmann::json;

std::string creation_error(const FieldList& fields) {
  const PluginV2Ptr plugin = create("GPTAttention", fields);
  return plugin != nullptr ? "" : trt::last_error().message;
}

struct Change {
  const char* name;
  FieldList& (*apply)(FieldList&);
  const char* expected;  ///< part of the message; "" when it is fine
};

std::ostream& operator<<(std::ostream& out, const Change& change) { return out << change.name; }

class GptAttentionFields : public testing::TestWithParam<Change> {};

TEST_P(GptAttentionFields, AreChecked) {
  FieldList fields = gpt_attention_fields();
  const std::string message = creation_error(GetParam().apply(fields));
  if (*GetParam().expected == '\0') {
    EXPECT_EQ(message, "");
  } else {
    EXPECT_NE(message.find(std::string("GPTAttention: layer 'layer': ") + GetParam().expected), std::string::npos)
        << message;
  }
}

#define CHANGE(name, expression, expected)                                  \
  Change {                                                                  \
    name, [](FieldList& f) -> FieldList& { return f expression; }, expected \
  }

INSTANTIATE_TEST_SUITE_P(Good, GptAttentionFields,
                         testing::Values(CHANGE("AsTheyAre", , ""), CHANGE("Half", .set("type_id", 1), ""),
                                         CHANGE("Head64", .set("head_size", 64).set("rotary_embedding_dim", 64), ""),
                                         CHANGE("ThreeQueriesOfAKey", .set("num_heads", 9).set("num_kv_heads", 3), ""),
                                         CHANGE("NoRotation",
                                                .flag("position_embedding_type", 0).set("rotary_embedding_dim", 0), ""),
                                         CHANGE("HalfRotated", .set("rotary_embedding_dim", 64), ""),
                                         CHANGE("LinearScaling", .flag("rotary_embedding_scale_type", 1), ""),
                                         CHANGE("NoPagedContextFmha", .flag("use_paged_context_fmha", 0), ""),
                                         CHANGE("AnyAccumulation", .flag("context_fmha_type", 2), ""),
                                         CHANGE("OfAnotherRank", .set("tp_rank", 7), ""),
                                         CHANGE("EmptyGroup", .set("cp_group", std::vector<int32_t>{}), ""),
                                         CHANGE("NoGroup", .remove("cp_group"), "")),
                         testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(
    Bad, GptAttentionFields,
    testing::Values(
        CHANGE("LayerIdx", .set("layer_idx", -1), "field 'layer_idx' = -1 is below 0"),
        CHANGE("Float", .set("type_id", 0), "field 'type_id' = 0 is not served"),
        CHANGE("HeadSize", .set("head_size", 96), "field 'head_size' = 96 is not served, expected 64 or 128"),
        CHANGE("NumHeads", .set("num_heads", 8).set("num_kv_heads", 3),
               "field 'num_heads' = 8 is not a multiple of num_kv_heads 3"),
        CHANGE("NoHeads", .set("num_heads", 0), "field 'num_heads' = 0 is not a multiple"),
        CHANGE("NoKvHeads", .set("num_kv_heads", 0), "field 'num_kv_heads' = 0 is below 1"),
        CHANGE("QScaling", .set("q_scaling", 0.0f), "field 'q_scaling' = 0 is not above 0"),
        CHANGE("TokensPerBlock", .set("tokens_per_block", 48), "field 'tokens_per_block' = 48 is not a power of two"),
        CHANGE("RotaryDim", .set("rotary_embedding_dim", 40), "field 'rotary_embedding_dim' = 40 is not served"),
        CHANGE("RotaryDimBeyond", .set("rotary_embedding_dim", 144), "field 'rotary_embedding_dim' = 144"),
        CHANGE("Dynamic", .flag("rotary_embedding_scale_type", 2), "field 'rotary_embedding_scale_type' = 2"),
        CHANGE("LongRope", .flag("rotary_embedding_scale_type", 3), "field 'rotary_embedding_scale_type' = 3"),
        CHANGE("GptJ", .flag("position_embedding_type", 1), "field 'position_embedding_type' = 1 is not served"),
        CHANGE("Alibi", .flag("position_embedding_type", 4), "field 'position_embedding_type' = 4 is not served"),
        CHANGE("Mrope", .flag("position_embedding_type", 9), "field 'position_embedding_type' = 9 is not served"),
        CHANGE("SoftCap", .set("attn_logit_softcapping_scale", 30.0f),
               "field 'attn_logit_softcapping_scale' = 30 asks for soft capping of scores, which is not served"),
        CHANGE("CrossAttention", .flag("do_cross_attention", 1), "field 'do_cross_attention' = 1 asks for cross"),
        CHANGE("QuantisedCache", .set("kv_cache_quant_mode", 128), "field 'kv_cache_quant_mode' = 128 asks for"),
        CHANGE("ContiguousCache", .set("paged_kv_cache", 0), "field 'paged_kv_cache' = 0 asks for"),
        CHANGE("NoCache", .set("use_cache", 0), "field 'use_cache' = 0 asks for"),
        CHANGE("Padding", .flag("remove_input_padding", 0), "field 'remove_input_padding' = 0 asks for padded tokens"),
        CHANGE("Mask", .set("mask_type", 2), "field 'mask_type' = 2 asks for a mask that is not causal"),
        CHANGE("FullMask", .flag("has_full_attention_mask", 1), "field 'has_full_attention_mask' = 1"),
        CHANGE("Bidirectional", .set("unidirectional", 0), "field 'unidirectional' = 0 asks for bidirectional"),
        CHANGE("SpecDecoding", .flag("is_spec_decoding_enabled", 1), "field 'is_spec_decoding_enabled' = 1 asks for"),
        CHANGE("Mla", .flag("is_mla_enabled", 1), "field 'is_mla_enabled' = 1 asks for multi-head latent attention"),
        CHANGE("Unfused", .flag("unfuse_qkv_gemm", 1), "field 'unfuse_qkv_gemm' = 1 asks for"),
        CHANGE("Bias", .flag("qkv_bias_enabled", 1), "field 'qkv_bias_enabled' = 1 asks for"),
        CHANGE("RelativeBias", .set("max_distance", 8), "field 'max_distance' = 8 asks for a relative attention bias"),
        CHANGE("PosShift", .flag("pos_shift_enabled", 1), "field 'pos_shift_enabled' = 1 asks for"),
        CHANGE("Fp8", .flag("use_fp8_context_fmha", 1), "field 'use_fp8_context_fmha' = 1 asks for FP8 attention"),
        CHANGE("Fp4", .flag("fuse_fp4_quant", 1), "field 'fuse_fp4_quant' = 1 asks for an FP4 output"),
        CHANGE("Skip", .flag("skip_attn", 1), "field 'skip_attn' = 1 asks for"),
        CHANGE("ContextParallel", .set("cp_size", 2), "field 'cp_size' = 2 asks for context parallelism"),
        CHANGE("LogN", .flag("use_logn_scaling", 1), "field 'use_logn_scaling' = 1 asks for"),
        CHANGE("Vision", .set("vision_start", 3),
               "field 'vision_start' = 3 asks for vision tokens, which is not served; expected -1"),
        CHANGE("Missing", .remove("head_size"), "field 'head_size' is missing"),
        CHANGE("WrongType", .set("skip_attn", 0), "field 'skip_attn' has type INT32, expected INT8"),
        CHANGE("Unknown", .set("attention_chunk_size", 0), "field 'attention_chunk_size' is unknown")),
    testing::PrintToStringParamName());

TEST(GptAttention, ComesBackFromAnEngineWithAnEmptyGroup) {
  const PluginV2Ptr built = create("GPTAttention", gpt_attention_fields().set("cp_group", std::vector<int32_t>{}));
  ASSERT_NE(built, nullptr);
  configure(built, AttentionStep({{0, 8, 0}}).descs);
  EXPECT_NE(load("GPTAttention", store(built)), nullptr) << trt::last_error().message;
}

TEST(GptAttention, HasTheFieldsOfOurNetworksInOrder) {
  const auto& names = *creator("GPTAttention").getFieldNames();
  const json& expected = gpt_attention_vectors()["fields"];
  ASSERT_EQ(names.nbFields, static_cast<int32_t>(expected.size()));
  for (int32_t i = 0; i < names.nbFields; ++i) {
    EXPECT_EQ(names.fields[i].name, expected[i]["name"]);
    EXPECT_EQ(static_cast<int32_t>(names.fields[i].type), expected[i]["type"]) << names.fields[i].name;
  }
}

TEST(GptAttention, HasTheInputsOfOurNetworksInOrder) {
  for (const auto& [list, rotary_dims] : {std::pair{"inputs", 128}, {"inputs_without_rope", 0}}) {
    reference::GptAttentionFields fields;
    fields.rotary_dims = rotary_dims;
    const reference::InputList inputs(fields);
    const json& expected = gpt_attention_vectors()[list];
    ASSERT_EQ(inputs.size(), static_cast<int32_t>(expected.size()));
    for (int32_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(reference::info_of(inputs.at(i)).name, expected[i]);
      EXPECT_EQ(inputs.place(inputs.at(i)), i);
      EXPECT_EQ(reference::info_of(inputs.at(i)).is_host, std::string(expected[i]).rfind("host_", 0) == 0);
    }
  }
}

TEST(GptAttention, IsNamedAsTensorRtLlmsIs) {
  nvinfer1::IPluginCreator& made = creator("GPTAttention");
  EXPECT_STREQ(made.getPluginName(), "GPTAttention");
  EXPECT_STREQ(made.getPluginVersion(), "1");
  EXPECT_STREQ(made.getPluginNamespace(), "tensorrt_llm");
  const PluginV2Ptr plugin = create("GPTAttention", gpt_attention_fields());
  EXPECT_STREQ(plugin->getPluginType(), "GPTAttention");
  EXPECT_EQ(plugin->getNbOutputs(), 1);
}

TEST(GptAttention, PutsOutWhatTheHeadsOfTheRankSee) {
  const PluginV2Ptr plugin = create("GPTAttention", gpt_attention_fields());
  FakeExprs exprs;
  const nvinfer1::DimsExprs qkv = exprs.dims({-1, kWidth});
  EXPECT_EQ(FakeExprs::text(plugin->getOutputDimensions(0, &qkv, 17, exprs)),
            "m, " + std::to_string(kHeads * kHeadSize));
  EXPECT_EQ(plugin->getOutputDataType(0, nullptr, 0), DataType::kBF16);
  const nvinfer1::DimsExprs narrow = exprs.dims({-1, kWidth - kHeadSize});
  EXPECT_EQ(plugin->getOutputDimensions(0, &narrow, 17, exprs).nbDims, -1);
  EXPECT_NE(trt::last_error().message.find("GPTAttention layer 2: qkv is not [tokens, 1280]"), std::string::npos);
}

TEST(GptAttention, TakesLinearTensorsOfItsTypesOnly) {
  const PluginV2Ptr plugin = create("GPTAttention", gpt_attention_fields());
  AttentionStep step({{0, 8, 0}});
  std::vector<nvinfer1::PluginTensorDesc> descs = step.descs;
  descs.push_back(desc({8, kHeads * kHeadSize}));
  const auto supported = [&](int32_t place) { return plugin->supportsFormatCombination(place, descs.data(), 17, 1); };
  for (int32_t place = 0; place < 18; ++place) {
    EXPECT_TRUE(supported(place)) << place;
    const nvinfer1::PluginTensorDesc good = descs[place];
    descs[place].type = good.type == DataType::kINT32 ? DataType::kINT64 : DataType::kINT32;
    EXPECT_FALSE(supported(place)) << place;
    descs[place] = good;
    descs[place].format = nvinfer1::TensorFormat::kCHW4;
    EXPECT_FALSE(supported(place)) << place;
    descs[place] = good;
  }
  EXPECT_FALSE(plugin->supportsFormatCombination(18, descs.data(), 20, 1));
  EXPECT_FALSE(plugin->supportsFormatCombination(0, descs.data(), 16, 1));
  EXPECT_NE(trt::last_error().message.find("has 16 inputs and 1 outputs, expected 17 and 1"), std::string::npos);
}

}  // namespace
}  // namespace tokenweave::test
