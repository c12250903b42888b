// Which launch configuration a step gets from the table in its engine.
#include "layers.h"
#include "table_vectors.h"

namespace tokenweave::test {
namespace {

/// Eight ranks, as the tables "batches" and "paper" are for; one site that is not split.
FieldList fields(const std::string& table, int32_t kind = 0) {
  FieldList result = start_fields().set("group", {0, 1, 2, 3, 4, 5, 6, 7}).set("half", 2).set("kind", kind);
  return result.set("hidden", 8192).flag("side_stream", 0).bytes("table", packed(table));
}

class Launch : public PluginTest {};

TEST_F(Launch, IsTheRowsOfTheStep) {
  for (const int32_t kind : {0, 1}) {
    Start start{fields("batches", kind)};
    ASSERT_EQ(start.change_shape(), 0);
    for (const nlohmann::json& step : document("batches")["cases"]) {
      const int64_t tokens = step["num_tokens"], batch = step["batch"];
      if (tokens < 2) continue;
      SCOPED_TRACE(step);
      ASSERT_EQ(start.run({tokens - 1, tokens, batch}), 0);
      const nlohmann::json& expected = step[kind == 0 ? "attention" : "mlp"];
      EXPECT_EQ(gpu().launch.ctas, expected["ctas"]);
      EXPECT_EQ(gpu().launch.threads, expected["threads"]);
      EXPECT_EQ(gpu().launch.fabric == TW_FABRIC_PEER, expected["fabric"] == "peer");
      EXPECT_EQ(gpu().launch.struct_bytes, sizeof(TwLaunchConfig));
    }
  }
}

TEST_F(Launch, ACollectiveAloneTakesAllTheCtasItWants) {
  Start start{fields("batches")};
  ASSERT_EQ(start.change_shape(), 0);
  for (const nlohmann::json& row : document("batches")["table"]["rows"]) {
    SCOPED_TRACE(row);
    const int64_t tokens = row["tokens"]["lo"], batch = row["batch"]["lo"];
    ASSERT_EQ(start.run({tokens, tokens, batch}), 0);
    // A fuse row was made for it.
    EXPECT_EQ(gpu().launch.ctas, row["mode"] == "fuse" ? row["attention"]["ctas"].get<int>() : 0);
    EXPECT_EQ(gpu().launch.threads, row["attention"]["threads"]);
  }
}

TEST_F(Launch, LooksTheWholeStepUp) {
  // A half of 100 of 1100 tokens: the row is that of 1100.
  Start half{fields("batches").set("half", 0).flag("side_stream", 1)};
  ASSERT_EQ(half.change_shape(), 0);
  EXPECT_EQ(half.run({100, 1100, 4}), 0);
  EXPECT_EQ(gpu().launch.ctas, 16);
  EXPECT_EQ(gpu().launch.fabric, TW_FABRIC_PEER);
  EXPECT_EQ(gpu().launch.cluster_size, 2);
  EXPECT_EQ(gpu().launch.loader, TW_LOADER_AUTO);
}

TEST_F(Launch, TheLastCollectiveHasAllSms) {
  const auto last = [](int half) { return fields("batches").set("half", half).flag("side_stream", 1).flag("last", 1); };
  Start prefix{last(0)}, suffix{last(1)};
  ASSERT_EQ(prefix.change_shape(), 0);
  ASSERT_EQ(suffix.change_shape(), 0);
  const TwPluginLaunch given{sizeof(TwPluginLaunch), 6, 512, 120};
  for (const int32_t ctas : {16, 6}) {
    EXPECT_EQ(prefix.run({1000, 1100, 4}), 0);
    EXPECT_EQ(gpu().launch.ctas, ctas);  // the suffix half computes beside it
    EXPECT_EQ(suffix.run({100, 1100, 4}), 0);
    EXPECT_EQ(gpu().launch.ctas, 0);
    ASSERT_EQ(twPluginOverrideLaunch(&given, nullptr), TW_OK);
  }
  ASSERT_EQ(twPluginOverrideLaunch(nullptr, nullptr), TW_OK);
}

TEST_F(Launch, AnOverrideReplacesWhatRunsBesideOtherWork) {
  Start half{fields("batches").set("half", 0).flag("side_stream", 1)};
  ASSERT_EQ(half.change_shape(), 0);
  const TwPluginLaunch given{sizeof(TwPluginLaunch), 6, 512, 120};
  ASSERT_EQ(twPluginOverrideLaunch(&given, nullptr), TW_OK);
  EXPECT_EQ(half.run({100, 1100, 4}), 0);
  EXPECT_EQ(gpu().launch.ctas, 6);
  EXPECT_EQ(gpu().launch.threads, 512);
  EXPECT_EQ(gpu().launch.fabric, TW_FABRIC_PEER);
  EXPECT_EQ(half.run({1100, 1100, 4}), 0);
  EXPECT_EQ(gpu().launch.ctas, 0);
  ASSERT_EQ(twPluginOverrideLaunch(nullptr, nullptr), TW_OK);
  EXPECT_EQ(half.run({100, 1100, 4}), 0);
  EXPECT_EQ(gpu().launch.ctas, 16);
}

TEST_F(Launch, RefusesABadOverride) {
  const auto refusal = [](const TwPluginLaunch& launch) {
    TwStatus status{};
    EXPECT_EQ(twPluginOverrideLaunch(&launch, &status), TW_INVALID_ARGUMENT);
    return std::string(status.message);
  };
  EXPECT_EQ(refusal({sizeof(TwPluginLaunch), 7, 512, 0}), "launch.ctas 7, not 2 to 132 in steps of 2");
  EXPECT_EQ(refusal({sizeof(TwPluginLaunch), -2, 512, 0}), "launch.ctas -2, not 2 to 132 in steps of 2");
  EXPECT_EQ(refusal({sizeof(TwPluginLaunch), 8, 0, 0}), "launch.threads 0, not 32 to 1024 in steps of 32");
  EXPECT_EQ(refusal({sizeof(TwPluginLaunch), 8, 512, -1}), "launch.gemm_sms -1, not 0 to 256 in steps of 2");
  EXPECT_NE(refusal({4, 8, 512, 0}).find("struct_bytes"), std::string::npos);
}

TEST_F(Launch, FallsBackFromMultimemOnEveryRank) {
  Start start{fields("batches")};
  ASSERT_EQ(start.change_shape(), 0);
  EXPECT_EQ(start.run({100, 100, 1}), 0);
  EXPECT_EQ(counters().fabric_fallbacks, 0u);

  gpu().fabric = TW_FABRIC_PEER;
  Start without{fields("batches").set("weave_hash", 2)};
  ASSERT_EQ(without.change_shape(), 0);
  testing::internal::CaptureStderr();
  EXPECT_EQ(without.run({100, 100, 1}) + without.run({100, 100, 1}), 0);
  EXPECT_EQ(
      testing::internal::GetCapturedStderr(),
      "[TokenWeave] the tuning table asks for multimem, which this group lacks (switched off): peer pointers serve "
      "instead. Fix: tune on this machine\n");
  EXPECT_EQ(gpu().launch.fabric, TW_FABRIC_AUTO);
  EXPECT_EQ(counters().fabric_fallbacks, 2u);
}

TEST_F(Launch, TheTableIsPartOfTheEngine) {
  const Start one{fields("batches")}, same{fields("batches")}, other{fields("paper")};
  EXPECT_EQ(gpu().streams, 2);
}

TEST_F(Launch, HasDefaultsWithoutATable) {
  Start start{fields("batches").remove("table")};
  ASSERT_EQ(start.change_shape(), 0);
  EXPECT_EQ(start.run({50, 100, 1}), 0);
  EXPECT_EQ(gpu().launch.fabric, TW_FABRIC_AUTO);
  EXPECT_EQ(gpu().launch.ctas, 8);
  EXPECT_EQ(gpu().launch.threads, 1024);
}

TEST_F(Launch, RefusesTheTableOfAnotherShape) {
  const auto refusal = [](const FieldList& bad) {
    EXPECT_EQ(create("AllReduceRmsNorm", bad), nullptr);
    return std::string(last_error().message);
  };
  EXPECT_NE(refusal(fields("batches").set("group", {0, 1})).find("is for 8 ranks, the group has 2"), std::string::npos);
  EXPECT_NE(refusal(fields("batches").set("type_id", 1)).find("is for another dtype"), std::string::npos);
  EXPECT_NE(refusal(fields("batches").set("hidden", 4096)).find("is for hidden size 8192, this layer has 4096"),
            std::string::npos);
  const FieldList loopback = fields("fine").set("group", {0, 1, 2}).set("type_id", 0).set("hidden", 576);
  EXPECT_NE(refusal(loopback).find("asks for the loopback fabric"), std::string::npos);
}

}  // namespace
}  // namespace tokenweave::test
