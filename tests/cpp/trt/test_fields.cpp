// Each attribute of each plugin, good and bad.
#include "layers.h"

namespace tokenweave::test {
namespace {

/// The creators' errors; "" when a plugin came out.
std::string creation_error(const std::string& name, const FieldList& fields,
                           TensorRTPhase phase = TensorRTPhase::kBUILD) {
  const PluginPtr plugin = create(name, fields, phase);
  return plugin != nullptr ? "" : last_error().message;
}

struct Change {
  const char* name;
  FieldList& (*apply)(FieldList&);
  const char* expected;  ///< part of the message; "" when it is fine
};

std::ostream& operator<<(std::ostream& out, const Change& change) { return out << change.name; }

class StartFields : public testing::TestWithParam<Change> {};
class JoinFields : public testing::TestWithParam<Change> {};
class GemmFields : public testing::TestWithParam<Change> {};

void check(const char* plugin, FieldList fields, const Change& change) {
  const std::string message = creation_error(plugin, change.apply(fields));
  if (*change.expected == '\0') {
    EXPECT_EQ(message, "");
  } else {
    EXPECT_NE(message.find(std::string(plugin) + ": layer 'layer': " + change.expected), std::string::npos) << message;
  }
}

TEST_P(StartFields, AreChecked) { check("AllReduceRmsNorm", start_fields(TensorRTPhase::kBUILD), GetParam()); }
TEST_P(JoinFields, AreChecked) { check("StreamJoin", join_fields(TensorRTPhase::kBUILD), GetParam()); }
TEST_P(GemmFields, AreChecked) {
  check("Gemm", FieldList().set("type_id", 7).flag("transb", 1).set("kind", 1), GetParam());
}

#define CHANGE(name, expression, expected)                                  \
  Change {                                                                  \
    name, [](FieldList& f) -> FieldList& { return f expression; }, expected \
  }

INSTANTIATE_TEST_SUITE_P(
    Good, StartFields,
    testing::Values(CHANGE("AsTheyAre", , ""), CHANGE("OneRank", .set("group", {0}).set("tp_rank", 0), ""),
                    CHANGE("EightRanks", .set("group", {7, 6, 5, 4, 3, 2, 1, 0}).set("tp_rank", 7), ""),
                    CHANGE("Float", .set("type_id", 0), ""), CHANGE("Half", .set("type_id", 1), ""),
                    CHANGE("EpsZero", .set("eps", 0.0f), ""), CHANGE("Mlp", .set("kind", 1), ""),
                    CHANGE("Whole", .set("half", 2), ""),
                    CHANGE("NoFlags", .remove("has_bias").remove("side_stream"), ""),
                    CHANGE("EmptyTable", .bytes("table", {}), "")),
    testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(
    Bad, StartFields,
    testing::Values(CHANGE("NoGroup", .remove("group"), "field 'group' is missing"),
                    CHANGE("EmptyGroup", .set("group", std::vector<int32_t>{}), "field 'group' has no values"),
                    CHANGE("NineRanks", .set("group", {0, 1, 2, 3, 4, 5, 6, 7, 8}), "field 'group' has 9 ranks"),
                    CHANGE("RankTwice", .set("group", {1, 1}), "field 'group' has a rank twice"),
                    CHANGE("NegativeRank", .set("group", {0, -1}), "field 'group' = -1 is below 0"),
                    CHANGE("TpRank", .set("tp_rank", 2), "field 'tp_rank' = 2 is outside the group of 2"),
                    CHANGE("NegativeTpRank", .set("tp_rank", -1), "field 'tp_rank' = -1 is below 0"),
                    CHANGE("Int8Type", .set("type_id", 2), "field 'type_id' = 2 is not one of"),
                    CHANGE("Eps", .set("eps", 1.5f), "field 'eps' = 1.5 is outside 0..1"),
                    CHANGE("EpsNan", .set("eps", std::numeric_limits<float>::quiet_NaN()),
                           "field 'eps' = nan is outside"),
                    CHANGE("EpsInt", .set("eps", 1), "field 'eps' has type INT32, expected FLOAT32"),
                    CHANGE("Kind", .set("kind", 2), "field 'kind' = 2 is outside 0..1"),
                    CHANGE("Site", .set("site", -1), "field 'site' = -1 is below 0"),
                    CHANGE("TwoSites", .set("site", {0, 1}), "field 'site' has 2 values, expected 1"),
                    CHANGE("HalfOf", .set("half", 3), "field 'half' = 3 is outside 0..2"),
                    CHANGE("Sharded", .flag("residual_sharded", 2), "field 'residual_sharded' = 2 is outside 0..1"),
                    CHANGE("Gather", .flag("gather_residual", -1), "field 'gather_residual' = -1 is outside 0..1"),
                    CHANGE("BiasInt32", .set("has_bias", 1), "field 'has_bias' has type INT32, expected INT8"),
                    CHANGE("SideStream", .flag("side_stream", 7), "field 'side_stream' = 7 is outside 0..1"),
                    CHANGE("Table", .bytes("table", {1, 2, 3}), "field 'table': tuning table has a wrong magic"),
                    CHANGE("Unknown", .set("strategy", 1), "field 'strategy' is unknown"),
                    CHANGE("OfAnEngine", .set("hidden", 64), "field 'hidden' is unknown")),
    testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(Good, JoinFields,
                         testing::Values(CHANGE("AsTheyAre", , ""),
                                         CHANGE("NothingAliased", .set("num_aliased", 0), ""),
                                         CHANGE("Gate", .set("site", -1).flag("waits", 0), ""),
                                         CHANGE("NoFlag", .remove("waits"), "")),
                         testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(
    Bad, JoinFields,
    testing::Values(CHANGE("NoCount", .remove("num_aliased"), "field 'num_aliased' is missing"),
                    CHANGE("Count", .set("num_aliased", -1), "field 'num_aliased' = -1 is outside 0..1024"),
                    CHANGE("Site", .set("site", -2).flag("waits", 0), "field 'site' = -2 is below -1"),
                    CHANGE("HalfOf", .set("half", 3), "field 'half' = 3 is outside 0..2"),
                    CHANGE("Waits", .flag("waits", 2), "field 'waits' = 2 is outside 0..1"),
                    CHANGE("WaitsForNothing", .set("site", -1), "field 'waits' = 1 needs a site"),
                    CHANGE("Unknown", .set("group", {0}), "field 'group' is unknown")),
    testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(Good, GemmFields,
                         testing::Values(CHANGE("AsTheyAre", , ""), CHANGE("Attention", .set("kind", 0), ""),
                                         CHANGE("Float", .set("type_id", 0), ""),
                                         CHANGE("Half", .set("type_id", 1), ""),
                                         CHANGE("NoFlag", .remove("transb"), ""),
                                         CHANGE("EmptyTable", .bytes("table", {}), "")),
                         testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(
    Bad, GemmFields,
    testing::Values(CHANGE("NoType", .remove("type_id"), "field 'type_id' is missing"),
                    CHANGE("Int8Type", .set("type_id", 2), "field 'type_id' = 2 is not one of"),
                    CHANGE("Transb", .flag("transb", 2), "field 'transb' = 2 is outside 0..1"),
                    CHANGE("TransbInt32", .set("transb", 1), "field 'transb' has type INT32, expected INT8"),
                    CHANGE("Kind", .set("kind", 2), "field 'kind' = 2 is outside 0..1"),
                    CHANGE("Table", .bytes("table", {1, 2, 3}), "field 'table': tuning table has a wrong magic"),
                    CHANGE("OfTensorRtLlm", .set("transa", 0), "field 'transa' is unknown")),
    testing::PrintToStringParamName());

TEST(Fields, OfAnEngineAreChecked) {
  const auto error = [](FieldList fields) {
    return creation_error("AllReduceRmsNorm", fields, TensorRTPhase::kRUNTIME);
  };
  EXPECT_EQ(error(start_fields()), "");
  EXPECT_NE(error(start_fields().remove("hidden")).find("field 'hidden' is missing"), std::string::npos);
  EXPECT_NE(error(start_fields().set("hidden", 20)).find("hidden size 20 is not a multiple of 8"), std::string::npos);
  EXPECT_NE(error(start_fields().set("hidden", 16392)).find("from 8 to 16384"), std::string::npos);
}

TEST(Fields, MayNotCarryNonsense) {
  const int32_t one = 1;
  const nvinfer1::PluginField twice[] = {{"site", &one, PluginFieldType::kINT32, 1},
                                         {"site", &one, PluginFieldType::kINT32, 1}};
  const nvinfer1::PluginField nameless[] = {{nullptr, &one, PluginFieldType::kINT32, 1}};
  const nvinfer1::PluginField empty[] = {{"site", nullptr, PluginFieldType::kINT32, 1}};
  for (const auto& [fields, count, expected] :
       {std::tuple{twice, 2, "field 'site' is given twice"}, std::tuple{nameless, 1, "a field has no name"},
        std::tuple{empty, 1, "field 'num_aliased' is missing"}}) {
    const nvinfer1::PluginFieldCollection collection{count, fields};
    EXPECT_EQ(creator("StreamJoin").createPlugin(nullptr, &collection, TensorRTPhase::kBUILD), nullptr);
    EXPECT_EQ(last_error().message, std::string("StreamJoin: ") + expected);
    EXPECT_EQ(last_error().code, TW_INVALID_ARGUMENT);
  }
  EXPECT_EQ(creator("StreamJoin").createPlugin("gate", nullptr, TensorRTPhase::kBUILD), nullptr);
}

TEST(Fields, AreNamedByTheCreators) {
  const nvinfer1::PluginFieldCollection& start = *creator("AllReduceRmsNorm").getFieldNames();
  ASSERT_EQ(start.nbFields, 14);
  EXPECT_STREQ(start.fields[0].name, "group");
  EXPECT_STREQ(start.fields[13].name, "table");
  EXPECT_EQ(start.fields[13].type, PluginFieldType::kCHAR);
  EXPECT_EQ(creator("StreamJoin").getFieldNames()->nbFields, 4);
  EXPECT_STREQ(creator("StreamJoin").getPluginNamespace(), "tokenweave");
  EXPECT_STREQ(creator("StreamJoin").getPluginVersion(), "1");
}

}  // namespace
}  // namespace tokenweave::test
