#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "table.h"
#include "vectors.h"

namespace tokenweave {
namespace {

using nlohmann::json;
using test::bytes_of;

const json& vectors() {
  static const json document = json::parse(std::ifstream(TOKENWEAVE_TABLE_VECTORS));
  return document;
}

Status read(const json& packed, TuningTable* table) {
  const std::vector<uint8_t> bytes = bytes_of(packed["packed_hex"]);
  return TuningTable::read(bytes.data(), bytes.size(), table);
}

void expect_launch(const TableLaunch& launch, const json& expected) {
  static const char* const fabrics[] = {"auto", "multimem", "peer", "loopback"};
  EXPECT_EQ(fabrics[static_cast<int>(launch.fabric)], expected["fabric"]);
  EXPECT_EQ(launch.ctas, expected["ctas"]);
  EXPECT_EQ(launch.threads, expected["threads"]);
  EXPECT_EQ(launch.gemm_sms, expected["gemm_sms"]);
}

TEST(Table, PlansEveryStepOfTheVectors) {
  size_t cases = 0;
  for (const json& document : vectors()["tables"]) {
    SCOPED_TRACE(document["name"]);
    TuningTable table;
    const Status status = read(document, &table);
    ASSERT_TRUE(status.ok()) << status.message;
    const json& key = document["table"]["key"];
    EXPECT_EQ(table.tp_size(), key["tp_size"]);
    EXPECT_EQ(table.hidden_size(), key["hidden_size"]);
    static const char* const dtypes[] = {"float32", "float16", "bfloat16"};
    EXPECT_EQ(dtypes[static_cast<int>(table.dtype())], key["dtype"]);
    for (const json& step : document["cases"]) {
      SCOPED_TRACE(step);
      const StepPlan plan = table.plan_step(step["batch"], step["num_tokens"]);
      EXPECT_EQ(plan.split, step["split"]);
      EXPECT_EQ(plan.weave ? "weave" : "fuse", step["mode"]);
      EXPECT_EQ(plan.from_row ? "table" : "default", step["source"]);
      expect_launch(plan.attention, step["attention"]);
      expect_launch(plan.mlp, step["mlp"]);
      ++cases;
    }
  }
  EXPECT_GT(cases, 300u);
}

TEST(Table, RefusesWhatEveryReaderMustRefuse) {
  EXPECT_GE(vectors()["refused"].size(), 15u);
  for (const json& form : vectors()["refused"]) {
    TuningTable table;
    const Status status = read(form, &table);
    EXPECT_EQ(status.code, TW_INVALID_ARGUMENT) << form["name"];
    EXPECT_EQ(status.message.find("tuning table "), 0u) << status.message;
    EXPECT_TRUE(table.rows().empty()) << form["name"];
  }
}

TEST(Table, SaysWhatIsWrong) {
  const auto message = [](const char* name) {
    for (const json& form : vectors()["refused"]) {
      TuningTable table;
      if (form["name"] == name) return read(form, &table).message;
    }
    return std::string("no such form");
  };
  EXPECT_NE(message("flipped bit").find("checksum"), std::string::npos);
  EXPECT_NE(message("newer layout").find("upgrade"), std::string::npos);
  EXPECT_NE(message("row count too large").find("expected"), std::string::npos);
  EXPECT_NE(message("odd ctas").find("rows[0].attention.ctas 7, not 2 to 132 in steps of 2"), std::string::npos);
  EXPECT_NE(message("bucket upside down").find("rows[0].tokens.hi 1024, not 4097 to"), std::string::npos);
}

TEST(Table, WithoutRowsIsTheDefaultRule) {
  const StepPlan plan = TuningTable().plan_step(1, 2000);
  EXPECT_TRUE(plan.weave);
  EXPECT_EQ(plan.split, 1024);
  EXPECT_EQ(plan.mlp.ctas, 8);
}

}  // namespace
}  // namespace tokenweave
