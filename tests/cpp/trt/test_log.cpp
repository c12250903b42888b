// Where messages go, and the C interface.
#include "fake_tensorrt.h"
#include "layers.h"

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);

namespace tokenweave::test {
namespace {

class Log : public PluginTest {
 protected:
  ~Log() override { setLoggerFinder(nullptr); }

  static std::string on_stderr() {
    testing::internal::CaptureStderr();
    EXPECT_EQ(create("StreamJoin", join_fields().set("half", 9)), nullptr);
    return testing::internal::GetCapturedStderr();
  }
  static constexpr const char* kMessage = "[TokenWeave] StreamJoin: layer 'layer': field 'half' = 9 is outside 0..2";
};

TEST_F(Log, GoesToTensorRtsLogger) {
  set_fake_version(100600);
  setLoggerFinder(fake_logger_finder());
  EXPECT_EQ(on_stderr(), "");
  EXPECT_EQ(take_logged(), "1 " + std::string(kMessage));
  gpu().fabric = TW_FABRIC_PEER;
  EXPECT_EQ(Start().change_shape(), 0);
  EXPECT_EQ(std::string(take_logged()).find("3 [TokenWeave] no NVSwitch multicast: "), 0u);
}

TEST_F(Log, GoesToStderrWithoutOne) {
  EXPECT_EQ(on_stderr(), std::string(kMessage) + "\n");
  testing::internal::CaptureStderr();
  gpu().fabric = TW_FABRIC_PEER;
  EXPECT_EQ(Start().change_shape(), 0);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(Log, MemoryThatIsNotWhatWasAskedForIsAWarning) {
  for (const std::string reason : {"rank 1: it is too old", ""}) {
    testing::internal::CaptureStderr();
    gpu().memory_reason = reason;
    EXPECT_EQ(Start().change_shape(), 0);
    EXPECT_EQ(testing::internal::GetCapturedStderr(),
              reason.empty() ? "" : "[TokenWeave] symmetric memory is not NCCL's: " + reason + "\n");
  }
}

TEST_F(Log, LeavesALoggerOfAnotherMajorVersionAlone) {
  set_fake_version(110200);
  setLoggerFinder(fake_logger_finder());
  EXPECT_NE(on_stderr(), "");
  EXPECT_STREQ(take_logged(), "");
}

TEST_F(Log, LeavingAGroupInTroubleIsAWarning) {
  testing::internal::CaptureStderr();
  {
    Start start;
    EXPECT_EQ(start.change_shape(), 0);
    gpu().failing = "twGroupDestroy";
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("leaving the group of ranks: rank 1 did not come"),
            std::string::npos);
}

TEST_F(Log, TheLastErrorStays) {
  EXPECT_EQ(create("StreamJoin", join_fields().set("half", 9)), nullptr);
  EXPECT_NE(create("StreamJoin", join_fields()), nullptr);
  TwStatus status{};
  EXPECT_EQ(twPluginLastError(&status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
  EXPECT_EQ(std::string("[TokenWeave] ") + status.message, kMessage);
  EXPECT_EQ(twPluginLastError(nullptr), TW_INVALID_ARGUMENT);
}

TEST_F(Log, WhatGaveUpOnTheGpuIsAnError) {
  testing::internal::CaptureStderr();
  Start start;
  EXPECT_EQ(start.change_shape() + start.run({4, 10}), 0);
  const std::string before = last_error().message;
  gpu().failing = "twGroupCheck";
  EXPECT_EQ(last_error().code, TW_TIMEOUT);
  EXPECT_STREQ(last_error().message, "AllReduceRmsNorm: rank 1 did not come");
  EXPECT_NE(last_error().message, before);
  // Once: newer errors are not hidden.
  EXPECT_EQ(create("StreamJoin", join_fields().set("half", 9)), nullptr);
  EXPECT_EQ(std::string("[TokenWeave] ") + last_error().message, kMessage);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[TokenWeave] AllReduceRmsNorm: rank 1 did not come\n" + std::string(kMessage) + "\n");
}

TEST_F(Log, CountersAreCheckedAndReset) {
  Start start{start_fields().set("half", 2).flag("side_stream", 0)};
  EXPECT_EQ(start.change_shape() + start.run({8, 8}), 0);
  EXPECT_EQ(counters().in_line, 1u);
  twPluginResetCounters();
  EXPECT_EQ(counters().in_line, 0u);
  TwStatus status{};
  EXPECT_EQ(twPluginGetCounters(nullptr, &status), TW_INVALID_ARGUMENT);
  TwPluginCounters old{};
  old.struct_bytes = 8;
  EXPECT_EQ(twPluginGetCounters(&old, &status), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(status.message).find("struct_bytes"), std::string::npos);
}

}  // namespace
}  // namespace tokenweave::test
