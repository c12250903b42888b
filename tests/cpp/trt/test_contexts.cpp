// Several steps, contexts and threads on one side stream; plugins in a build; and what fails.
#include <cstdlib>
#include <thread>

#include "layers.h"

namespace tokenweave::test {
namespace {

using Calls = std::vector<std::string>;
using nvinfer1::IPluginV3OneRuntime;

FieldList whole_fields(int32_t site) { return start_fields().set("half", 2).set("site", site).flag("side_stream", 0); }

/// A context of an engine of two sites without split: a step begins with the first and ends with the second.
struct Context {
  Start first{whole_fields(0)}, last{whole_fields(1)};
  Context() { EXPECT_EQ(first.change_shape() + last.change_shape(), 0); }
  int32_t step(cudaStream_t stream = kMain) { return first.run({8, 8}, stream) + last.run({8, 8}, stream); }
};

template <typename Body>
void in_another_thread(Body body) {
  std::thread(body).join();
}

class Contexts : public PluginTest {};

const char* const kTwoContexts = "two execution contexts of one engine run at once";

TEST_F(Contexts, TakeTurnsOnOneStream) {
  Context a, b;
  EXPECT_EQ(gpu().groups.size(), 1u);
  EXPECT_EQ(a.step() + b.step() + a.step(), 0);
  in_another_thread([&] { EXPECT_EQ(b.step(), 0); });
  EXPECT_EQ(counters().in_line, 8u);
  EXPECT_EQ(counters().refused_steps, 0u);
}

TEST_F(Contexts, AreOrderedWhenOneThreadChangesStreams) {
  Context a, b;
  EXPECT_EQ(a.step(kMain), 0);
  gpu().take();
  gpu().work_is_over = false;
  EXPECT_EQ(b.step(kOther), 0);
  EXPECT_EQ(gpu().take(), (Calls{"other waits e0", "collective 8 other started none", "collective 8 other started none",
                                 "record e0 other"}));
}

TEST_F(Contexts, ACaptureIsNotOrderedAgainstWhatRan) {
  Context a;
  EXPECT_EQ(a.step(kMain), 0);
  gpu().capturing = true;
  gpu().take();
  EXPECT_EQ(a.step(kOther), 0);
  EXPECT_EQ(gpu().take(), (Calls{"collective 8 other started none", "collective 8 other started none"}));
  gpu().capturing = false;
  EXPECT_EQ(a.step(kOther), 0);
  EXPECT_EQ(gpu().take()[0], "other waits e0");
}

TEST_F(Contexts, AreRefusedWhileAnotherThreadQueuesAStep) {
  Context a, b;
  EXPECT_EQ(a.first.run({8, 8}), 0);
  in_another_thread([&] { EXPECT_NE(b.first.run({8, 8}), 0); });
  EXPECT_NE(std::string(last_error().message).find(kTwoContexts), std::string::npos);
  EXPECT_EQ(counters().refused_steps, 1u);
  // The ranks may be at different steps now: nothing works until all contexts are gone.
  EXPECT_NE(a.last.run({8, 8}), 0);
  EXPECT_NE(a.step(), 0);
  EXPECT_EQ(counters().refused_steps, 1u);
}

TEST_F(Contexts, AreRefusedWhileAnotherStreamIsBusy) {
  Context a, b;
  EXPECT_EQ(a.step(kMain), 0);
  gpu().work_is_over = false;
  in_another_thread([&] { EXPECT_NE(b.step(kOther), 0); });
  EXPECT_EQ(counters().refused_steps, 1u);
}

TEST_F(Contexts, MayComeBackAfterARefusal) {
  {
    Context a, b;
    EXPECT_EQ(a.first.run({8, 8}), 0);
    in_another_thread([&] { EXPECT_NE(b.step(), 0); });
  }
  EXPECT_EQ(gpu().live_groups, 0);
  Context fresh;
  EXPECT_EQ(fresh.step(), 0);
  EXPECT_EQ(gpu().groups.size(), 2u);
}

TEST_F(Contexts, AStepThatFailedIsGivenUp) {
  Context a;
  gpu().failing = "twAllReduceRmsNorm";
  EXPECT_NE(a.first.run({8, 8}), 0);
  EXPECT_EQ(last_error().code, TW_TIMEOUT);
  EXPECT_EQ(std::string(last_error().message), "AllReduceRmsNorm site 0 whole: rank 1 did not come");
  gpu().failing.clear();
  gpu().take();
  EXPECT_EQ(a.step(), 0);
  EXPECT_EQ(counters().unfinished_steps, 1u);
  // What it may have left on the communication stream comes first.
  EXPECT_EQ(gpu().take(), (Calls{"record e0 side0", "main waits e0", "collective 8 main started none",
                                 "collective 8 main started none", "record e0 main"}));
}

TEST_F(Contexts, AnyThreadMayGoOnAfterAStepThatFailed) {
  Context a;
  gpu().failing = "twAllReduceRmsNorm";
  EXPECT_EQ(a.first.run({0, 8}), 0);  // no rows, nothing to fail
  EXPECT_NE(a.last.run({8, 8}), 0);
  gpu().failing.clear();
  in_another_thread([&] { EXPECT_EQ(a.step(), 0); });
  EXPECT_EQ(counters().refused_steps, 0u);
  EXPECT_EQ(counters().unfinished_steps, 1u);
}

TEST_F(Contexts, WhatAFailedStepLeftComesFirstAlsoAfterACapture) {
  Context a;
  gpu().failing = "twAllReduceRmsNorm";
  EXPECT_NE(a.first.run({8, 8}), 0);
  gpu().failing.clear();
  gpu().capturing = true;
  gpu().take();
  EXPECT_EQ(a.step(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"collective 8 main started none", "collective 8 main started none"}));
  gpu().capturing = false;
  EXPECT_EQ(a.step(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"record e0 side0", "main waits e0", "collective 8 main started none",
                                 "collective 8 main started none", "record e0 main"}));
  EXPECT_EQ(counters().unfinished_steps, 1u);
}

TEST_F(Contexts, AStepBeginsWithItsFirstSite) {
  Context a;
  EXPECT_NE(a.last.run({8, 8}), 0);
  EXPECT_NE(std::string(last_error().message).find("site 1 whole was run before site 0"), std::string::npos);
}

TEST_F(Contexts, EveryFailureOfAForkIsReported) {
  Start prefix{start_fields()};
  EXPECT_EQ(prefix.change_shape(), 0);
  for (const char* call : {"cudaStreamIsCapturing", "cudaEventRecord", "cudaStreamWaitEvent", "twAllReduceRmsNorm"}) {
    gpu().failing = call;
    EXPECT_NE(prefix.run({6, 10}), 0) << call;
  }
  gpu().failing.clear();
  EXPECT_EQ(prefix.run({6, 10}), 0);
}

TEST_F(Contexts, WhatCannotBeAttachedIsNoPlugin) {
  for (const char* call : {"cudaGetDevice", "cudaDeviceGetAttribute", "cudaDeviceGetStreamPriorityRange",
                           "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags"}) {
    gpu().failing = call;
    EXPECT_FALSE(Start().attached()) << call;
    EXPECT_NE(std::string(last_error().message).find(call), std::string::npos);
  }
  gpu().failing = "twGroupCreate";
  Start start;
  EXPECT_NE(start.change_shape(), 0);
  EXPECT_EQ(gpu().live_groups, 0);
  gpu().failing.clear();
  EXPECT_EQ(start.change_shape(), 0);
}

TEST_F(Contexts, ClonesOfAnAttachedPluginWork) {
  const PluginPtr loaded = create("AllReduceRmsNorm", whole_fields(0));
  const PluginPtr attached(capability<IPluginV3OneRuntime>(loaded).attachToContext(nullptr));
  const PluginPtr copy(attached->clone());
  EXPECT_EQ(capability<IPluginV3OneRuntime>(copy).onShapeChange(nullptr, 0, nullptr, 0), 0);
  EXPECT_EQ(gpu().live_groups, 1);
  // One that never saw a context has nothing to run on.
  const nvinfer1::PluginTensorDesc descs[6] = {desc({8, kHidden}), desc({8, kHidden}), desc({kHidden}),
                                               desc({8}),          desc({1}),          desc({1})};
  const void* inputs[6] = {};
  void* outputs[3] = {};
  EXPECT_NE(capability<IPluginV3OneRuntime>(loaded).enqueue(descs, nullptr, inputs, outputs, nullptr, kMain), 0);
}

/// Runs both plugins of a phase, as a builder that times its layers would.
void expect_inert(TensorRTPhase phase) {
  for (const auto& [name, fields] :
       {std::pair{"AllReduceRmsNorm", start_fields(phase)}, {"StreamJoin", join_fields(phase)}}) {
    const PluginPtr plugin = create(name, fields, phase);
    ASSERT_NE(plugin, nullptr) << last_error().message;
    const PluginPtr attached(capability<IPluginV3OneRuntime>(plugin).attachToContext(nullptr));
    ASSERT_NE(attached, nullptr);
    EXPECT_EQ(capability<IPluginV3OneRuntime>(attached).onShapeChange(nullptr, 0, nullptr, 0), 0);
    EXPECT_EQ(capability<IPluginV3OneRuntime>(attached).enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, kMain), 0);
  }
  EXPECT_EQ(gpu().calls, Calls{});
  EXPECT_EQ(gpu().created_streams + gpu().created_events, 0);
  EXPECT_TRUE(gpu().groups.empty());
  EXPECT_EQ(counters().while_building, 2u);
}

TEST_F(Contexts, ABuildTouchesNothing) { expect_inert(TensorRTPhase::kBUILD); }

TEST_F(Contexts, NeitherDoesAProcessThatOnlyBuilds) {
  setenv("IS_BUILDING", "1", 1);
  expect_inert(TensorRTPhase::kRUNTIME);
  unsetenv("IS_BUILDING");
}

}  // namespace
}  // namespace tokenweave::test
