// The C interface on a machine without a GPU: every mistake is a code and a message.
#include <gtest/gtest.h>

#include "driver_without_gpus.h"
#include "ranks.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave::test {
namespace {

TwGroupConfig config(int rank = 0, int size = 2) {
  TwGroupConfig config{};
  config.struct_bytes = sizeof config;
  config.rank = rank;
  config.size = size;
  config.timeout_ms = 3000;
  return config;
}

std::string creation_error(const TwGroupConfig* config, TwCode code) {
  TwGroup* group = reinterpret_cast<TwGroup*>(1);
  TwStatus status{};
  EXPECT_EQ(twGroupCreate(config, &group, &status), code);
  EXPECT_EQ(status.code, code);
  EXPECT_EQ(group, nullptr);
  return status.message;
}

TEST(Api, HasAVersion) { EXPECT_STREQ(twVersion(), "0.1.0"); }

TEST(Api, RefusesBadConfigurations) {
  EXPECT_EQ(creation_error(nullptr, TW_INVALID_ARGUMENT), "config is null");
  TwGroupConfig bad = config();
  bad.struct_bytes = 8;
  EXPECT_NE(creation_error(&bad, TW_INVALID_ARGUMENT).find("build with the header of library 0.1.0"),
            std::string::npos);
  bad = config(0, 9);
  EXPECT_EQ(creation_error(&bad, TW_INVALID_ARGUMENT), "size is 9, not 1 to 8");
  bad = config(2, 2);
  EXPECT_EQ(creation_error(&bad, TW_INVALID_ARGUMENT), "rank is 2, not 0 to size - 1 = 1");
  EXPECT_EQ(twGroupCreate(&bad, nullptr, nullptr), TW_INVALID_ARGUMENT);
}

TEST(Api, RefusesAnOwnerOfMemoryThatItDoesNotKnow) {
  const TwGroupConfig good = config();
  setenv("TOKENWEAVE_SYMMETRIC_MEMORY", "NCCL", 1);
  EXPECT_EQ(creation_error(&good, TW_INVALID_ARGUMENT),
            "TOKENWEAVE_SYMMETRIC_MEMORY is 'NCCL'. Fix: set it to vmm or nccl, or not at all");
  unsetenv("TOKENWEAVE_SYMMETRIC_MEMORY");
}

TEST(Api, RefusesNullGroups) {
  TwStatus status{};
  TwGroupInfo info{};
  info.struct_bytes = sizeof info;
  void* data = nullptr;
  size_t bytes = 0;
  const TwAllReduceRmsNorm op{};
  EXPECT_EQ(twGroupDestroy(nullptr, &status), TW_OK);
  EXPECT_EQ(twGroupGetInfo(nullptr, &info, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(twGroupTensorMemory(nullptr, 0, &data, &bytes, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(twGroupAllGather(nullptr, &bytes, data, sizeof bytes, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(twGroupCheck(nullptr, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(twAllReduceRmsNorm(nullptr, &op, nullptr, nullptr, nullptr, &status), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(status.message, "group is null");
}

TEST(Api, WritesNoInfoOfAnotherSize) {
  TwStatus status{};
  TwGroupInfo info{};
  EXPECT_EQ(twGroupGetInfo(nullptr, nullptr, &status), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(status.message, "info is null");
  info.struct_bytes = sizeof info - TW_MESSAGE_BYTES;
  EXPECT_EQ(twGroupGetInfo(nullptr, &info, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message).find("info.struct_bytes is "), 0u) << status.message;
}

TEST(Api, RanksThatDisagreeAllGetTheError) {
  const std::string address = fresh_address();
  const auto texts = run_processes(2, [&](int rank) {
    if (!hide_gpus()) return std::string("no driver");
    TwGroupConfig mine = config(rank);
    mine.bootstrap = address.c_str();
    mine.config_hash = rank;
    return creation_error(&mine, TW_RANKS_DISAGREE);
  });
  for (const std::string& text : texts) {
    EXPECT_NE(text.find("config_hash (model, dtype, tuning table or engine) is 0 on rank 0 and 1 on rank 1"),
              std::string::npos)
        << text;
  }
}

/// Runs where creation_error's own checks are lost with the process: a wrong code is another text.
std::string creation_text(const TwGroupConfig& config, TwCode code) {
  const std::string text = creation_error(&config, code);
  return ::testing::Test::HasFailure() ? "not code " + std::to_string(code) + ": " + text : text;
}

TEST(Api, ARankWithoutAGpuIsNamedOnEveryRank) {
  const std::string address = fresh_address();
  const auto texts = run_processes(2, [&](int rank) {
    if (!hide_gpus()) return std::string("no driver");
    TwGroupConfig mine = config(rank);
    mine.bootstrap = address.c_str();
    mine.device = 3;
    return creation_text(mine, TW_UNSUPPORTED);
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text.find("rank 0: there is no device 3: this process sees 0 GPUs. Fix: "), 0u) << text;
  }
}

TEST(Api, InLoopbackTheMissingGpuIsNamedToo) {
  const auto texts = run_processes(1, [&](int) {
    if (!hide_gpus()) return std::string("no driver");
    TwGroupConfig loopback = config();
    loopback.loopback = 1;
    return creation_text(loopback, TW_UNSUPPORTED);
  });
  EXPECT_EQ(texts[0].find("there is no device 0: this process sees 0 GPUs. Fix: "), 0u) << texts[0];
}

TEST(Api, WithoutADriverNoRankWaitsForTheOthers) {
  const std::string address = fresh_address();
  for (const int loopback : {0, 1}) {
    for (const int rank : {0, 1}) {
      const auto texts = run_processes(1, [&](int) {
        if (has_driver()) return std::string();
        TwGroupConfig alone = config(rank);
        alone.bootstrap = address.c_str();
        alone.loopback = loopback;
        return creation_text(alone, TW_UNSUPPORTED);
      });
      if (texts[0].empty()) GTEST_SKIP() << "this machine has a driver";
      EXPECT_EQ(texts[0].find("no NVIDIA driver can be loaded (libcuda.so.1). Fix: "), 0u) << texts[0];
    }
  }
}

}  // namespace
}  // namespace tokenweave::test
