// What is queued where, in which order, for each kind of step.

#include <cstddef>

#include "layers.h"

namespace tokenweave::test {
namespace {

using Calls = std::vector<std::string>;

FieldList whole_fields() { return start_fields().set("half", 2).flag("side_stream", 0); }

class SideStreamTest : public PluginTest {};

/// The two layers of one site in two halves, attached and ready.
struct OneSite {
  Start prefix{start_fields()};
  Start suffix{start_fields().set("half", 1)};
  WaitFor join_prefix{prefix};
  WaitFor join_suffix{suffix, join_fields().set("half", 1)};
  OneSite() {
    EXPECT_EQ(prefix.change_shape(), 0);
    EXPECT_EQ(suffix.change_shape(), 0);
  }
};

TEST_F(SideStreamTest, EagerForkHoldsTheMainStreamUntilTheCollectiveHasStarted) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(gpu().take(), (Calls{"record e1 main", "side0 waits e1", "collective 6 side0 started e2", "main waits e2",
                                 "record e3 side0"}));
  EXPECT_EQ(site.suffix.run({4, 10}), 0);
  EXPECT_EQ(gpu().take(), (Calls{"record e4 main", "side0 waits e4", "collective 4 side0 started e5", "main waits e5",
                                 "record e6 side0"}));
  EXPECT_EQ(site.join_prefix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"main waits e3"}));
  EXPECT_EQ(site.join_suffix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"main waits e6", "record e0 main"}));
  EXPECT_EQ(counters().overlapped, 2u);
  EXPECT_EQ(counters().joins, 2u);
  EXPECT_EQ(counters().captured, 0u);
  EXPECT_EQ(counters().unfinished_steps, 0u);
}

TEST_F(SideStreamTest, AWovenStepOverlapsEachHalfWithTheOther) {
  OneSite first;
  Start prefix{start_fields().set("site", 1)}, suffix{start_fields().set("site", 1).set("half", 1)};
  WaitFor join_prefix{prefix, join_fields().set("site", 1)};
  WaitFor join_suffix{suffix, join_fields().set("site", 1).set("half", 1)};
  gpu().capturing = true;  // fewer calls to read
  for (int step = 0; step < 2; ++step) {
    gpu().take();
    EXPECT_EQ(first.prefix.run({6, 10}) + first.suffix.run({4, 10}) + first.join_prefix.run(), 0);
    EXPECT_EQ(prefix.run({6, 10}) + first.join_suffix.run() + suffix.run({4, 10}), 0);
    EXPECT_EQ(join_prefix.run() + join_suffix.run(), 0);
    EXPECT_EQ(gpu().take(), (Calls{"record e1 main",
                                   "side0 waits e1",
                                   "collective 6 side0 started none",
                                   "record e3 side0",
                                   "record e4 main",
                                   "side0 waits e4",
                                   "collective 4 side0 started none",
                                   "record e6 side0",
                                   "main waits e3",
                                   "record e7 main",
                                   "side0 waits e7",
                                   "collective 6 side0 started none",
                                   "record e9 side0",
                                   "main waits e6",
                                   "record e10 main",
                                   "side0 waits e10",
                                   "collective 4 side0 started none",
                                   "record e12 side0",
                                   "main waits e9",
                                   "main waits e12"}));
  }
  EXPECT_EQ(counters().unfinished_steps, 0u);
}

TEST_F(SideStreamTest, CapturedForkIsPlain) {
  OneSite site;
  gpu().capturing = true;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(gpu().take(),
            (Calls{"record e1 main", "side0 waits e1", "collective 6 side0 started none", "record e3 side0"}));
  EXPECT_EQ(site.suffix.run({4, 10}) + site.join_prefix.run(), 0);
  gpu().take();
  EXPECT_EQ(site.join_suffix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"main waits e6"}));
  EXPECT_EQ(counters().captured, 2u);
}

TEST_F(SideStreamTest, AStepWithoutSuffixStaysOnTheMainStream) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({10, 10}), 0);
  EXPECT_EQ(site.suffix.run({0, 10}), 0);
  EXPECT_EQ(site.join_prefix.run() + site.join_suffix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"collective 10 main started none", "record e0 main"}));
  EXPECT_EQ(gpu().launch.cluster_size, 1);
  EXPECT_EQ(counters().in_line, 1u);
  EXPECT_EQ(counters().empty, 1u);
  EXPECT_EQ(counters().joins, 0u);
}

TEST_F(SideStreamTest, AnEmptyStepQueuesNothing) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({0, 0}) + site.suffix.run({0, 0}) + site.join_prefix.run() + site.join_suffix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"record e0 main"}));
  EXPECT_EQ(counters().empty, 2u);
}

TEST_F(SideStreamTest, WithoutSplitNoEventsAreMade) {
  Start first{whole_fields()}, second{whole_fields().set("site", 1)};
  EXPECT_EQ(first.change_shape(), 0);
  EXPECT_EQ(gpu().created_events, 1);
  EXPECT_EQ(first.run({10, 10}), 0);
  EXPECT_EQ(second.run({10, 10}), 0);
  EXPECT_EQ(gpu().take(),
            (Calls{"collective 10 main started none", "collective 10 main started none", "record e0 main"}));
}

TEST_F(SideStreamTest, GatesQueueNothing) {
  OneSite site;
  WaitFor gate{site.prefix, join_fields().set("site", -1).set("num_aliased", 1).set("num_inputs", 2).flag("waits", 0)};
  EXPECT_EQ(gate.run(), 0);
  EXPECT_EQ(gpu().take(), Calls{});
  EXPECT_EQ(counters().alias_copies, 0u);
}

TEST_F(SideStreamTest, OutputsThatAreNotAliasedAreCopiedAfterTheWait) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  gpu().take();
  alignas(16) uint8_t elsewhere[16];
  site.join_prefix.outputs[1] = elsewhere;
  EXPECT_EQ(site.join_prefix.run(), 0);
  EXPECT_EQ(gpu().take(), (Calls{"main waits e3", "copy 256 main"}));  // 2 rows of kHidden bfloat16
  EXPECT_EQ(counters().alias_copies, 1u);
}

TEST_F(SideStreamTest, AResultThatWasCopiedBeforeTheJoinIsAnError) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  uint8_t copy[16];
  const void* copies[] = {copy};
  std::swap(site.join_prefix.inputs[1], copies[0]);
  EXPECT_NE(site.join_prefix.run(), 0);
  std::swap(site.join_prefix.inputs[1], copies[0]);
  site.join_prefix.inputs[0] = copies[0];
  EXPECT_NE(site.join_prefix.run(), 0);
  EXPECT_NE(std::string(last_error().message).find("StreamJoin site 0 prefix: does not get the tensors"),
            std::string::npos);
}

TEST_F(SideStreamTest, MissingKeepAliveInputsAreCounted) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  site.join_prefix.inputs[2] = site.join_prefix.inputs[3] = nullptr;
  EXPECT_EQ(site.join_prefix.run(), 0);
  EXPECT_EQ(counters().unkept_inputs, 2u);
}

TEST_F(SideStreamTest, AJoinBeforeItsCollectiveIsAnError) {
  OneSite site;
  EXPECT_NE(site.join_prefix.run(), 0);
  EXPECT_EQ(std::string(last_error().message), "StreamJoin site 0 prefix: was run before any AllReduceRmsNorm");
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_NE(site.join_suffix.run(), 0);
  EXPECT_EQ(std::string(last_error().message),
            "StreamJoin site 0 suffix: was run before the collective of site 0 suffix");
  // That of the step before does not count.
  EXPECT_EQ(site.suffix.run({4, 10}) + site.join_prefix.run() + site.join_suffix.run() + site.prefix.run({6, 10}), 0);
  EXPECT_NE(site.join_suffix.run(), 0);
}

TEST_F(SideStreamTest, TheGroupIsMadeOnceBeforeTheFirstStep) {
  Start prefix{start_fields()};
  EXPECT_TRUE(gpu().groups.empty());
  EXPECT_NE(prefix.run({6, 10}), 0);
  EXPECT_EQ(std::string(last_error().message), "AllReduceRmsNorm site 0 prefix: was run before its shapes were set");
  Start suffix{start_fields().set("half", 1).set("max_rows", 5000).flag("gather_residual", 1)};
  Start last{start_fields().set("site", 1)};
  EXPECT_EQ(prefix.change_shape() + suffix.change_shape() + prefix.change_shape(), 0);
  ASSERT_EQ(gpu().groups.size(), 1u);
  const TwGroupConfig& config = gpu().groups[0];
  EXPECT_EQ(config.struct_bytes, sizeof config);
  EXPECT_EQ(config.rank, 1);
  EXPECT_EQ(config.size, 2);
  EXPECT_EQ(gpu().members, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(config.allow_multicast, 1);
  EXPECT_EQ(config.staging_bytes, 5000u * kHidden * 2 * 2);
  EXPECT_NE(config.config_hash, 0u);
}

TEST_F(SideStreamTest, AGroupThatTurnsOutTooSmallIsAnError) {
  Start first{start_fields()};
  EXPECT_EQ(first.change_shape(), 0);
  Start larger{start_fields().set("half", 1).set("max_rows", 8192)};
  EXPECT_NE(larger.change_shape(), 0);
  EXPECT_NE(std::string(last_error().message).find("needs 1048576 bytes of staging"), std::string::npos);
}

TEST_F(SideStreamTest, EnginesDevicesAndGroupsDoNotShare) {
  const auto hash = [](const FieldList& fields) {
    Start start{fields};
    EXPECT_EQ(start.change_shape(), 0);
    return gpu().groups.back().config_hash;
  };
  const uint64_t base = hash(start_fields());
  EXPECT_EQ(hash(start_fields().set("site", 3).set("half", 1).set("max_rows", 9)), base);
  EXPECT_NE(hash(start_fields().set("type_id", 1)), base);
  EXPECT_NE(hash(start_fields().set("hidden", 128)), base);
  EXPECT_NE(hash(start_fields().set("weave_hash", 2)), base);
  EXPECT_NE(hash(start_fields().set("group", {0, 1})), base);

  gpu() = FakeGpu{};
  const Start one, again, wider{start_fields().set("hidden", 128)};
  EXPECT_EQ(gpu().streams, 2);
  gpu().device = 1;
  const Start elsewhere;
  EXPECT_EQ(gpu().streams, 3);
}

TEST_F(SideStreamTest, LayersOfAllProfilesShareMemory) {
  const Start large, small{start_fields().set("max_rows", 8)};
  void* memory = nullptr;
  EXPECT_EQ(twPluginTensorMemory(0, 512, &memory, nullptr), TW_OK) << last_error().message;
  EXPECT_EQ(memory, gpu().tensor_memory);
  EXPECT_EQ(gpu().streams, 1);
  EXPECT_EQ(gpu().groups.back().staging_bytes, uint64_t{4096} * kHidden * 2);
}

TEST_F(SideStreamTest, CountsTensorsThatAreStaged) {
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(counters().staged, 1u);
  EXPECT_EQ(gpu().tensors.input, site.prefix.tensors().input);
  EXPECT_EQ(gpu().tensors.residual_out, site.prefix.tensors().residual_out);
}

TEST_F(SideStreamTest, SymmetricTensorsAreNotStaged) {
  Start whole{whole_fields().flag("gather_residual", 1)};
  void* memory = nullptr;
  ASSERT_EQ(twPluginTensorMemory(0, sizeof(Tensors), &memory, nullptr), TW_OK);
  EXPECT_EQ(memory, gpu().tensor_memory);
  EXPECT_EQ(gpu().groups.back().tensor_bytes, sizeof(Tensors));
  EXPECT_EQ(whole.change_shape(), 0);
  EXPECT_EQ(gpu().groups.size(), 1u);
  whole.move_to(memory);
  EXPECT_EQ(whole.run({8, 8}), 0);
  EXPECT_EQ(counters().staged, 0u);
  // residual_out is the one that lies outside.
  whole.move_to(static_cast<uint8_t*>(memory) + sizeof(Tensors) - offsetof(Tensors, residual_out));
  EXPECT_EQ(whole.run({8, 8}), 0);
  EXPECT_EQ(counters().staged, 1u);
}

TEST_F(SideStreamTest, TensorMemoryIsOfOneEngine) {
  void* memory = nullptr;
  TwStatus status{};
  EXPECT_EQ(twPluginTensorMemory(0, 64, nullptr, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(twPluginTensorMemory(0, 64, &memory, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message), "device 0 runs no engine of ours. Fix: create the execution contexts first");
  Start one;
  EXPECT_EQ(twPluginTensorMemory(1, 64, &memory, &status), TW_INVALID_ARGUMENT);
  EXPECT_EQ(one.change_shape(), 0);
  EXPECT_EQ(twPluginTensorMemory(0, 64, &memory, &status), TW_INVALID_ARGUMENT);  // the group is made already
  EXPECT_NE(std::string(status.message).find("then ask for tensor memory, then run"), std::string::npos);
  EXPECT_EQ(memory, nullptr);
  {
    // Of two engines that have not run, either could be meant.
    Start second{start_fields().set("hidden", 128)}, third{start_fields().set("hidden", 192)};
    EXPECT_EQ(twPluginTensorMemory(0, 64, &memory, &status), TW_UNSUPPORTED);
    EXPECT_NE(std::string(status.message).find("has 2 engines that have not run yet"), std::string::npos);
    EXPECT_EQ(memory, nullptr);
  }
  Start next{start_fields().set("hidden", 128)};
  EXPECT_EQ(twPluginTensorMemory(0, 64, &memory, &status), TW_OK);
  EXPECT_EQ(memory, gpu().tensor_memory);
}

TEST_F(SideStreamTest, PassesTheAttributesOn) {
  Start start{whole_fields().set("eps", 0.5f).flag("residual_sharded", 1).flag("gather_residual", 1)};
  EXPECT_EQ(start.change_shape(), 0);
  EXPECT_EQ(start.run({7, 7}), 0);
  EXPECT_EQ(gpu().op.dtype, TW_BFLOAT16);
  EXPECT_EQ(gpu().op.num_tokens, 7);
  EXPECT_EQ(gpu().op.hidden, kHidden);
  EXPECT_EQ(gpu().op.eps, 0.5f);
  EXPECT_EQ(gpu().op.residual_sharded, 1);
  EXPECT_EQ(gpu().op.gather_residual, 1);
  EXPECT_EQ(gpu().op.norm_weight, start.tensors().norm_weight);
  EXPECT_EQ(gpu().op.bias, nullptr);

  Start biased{whole_fields().flag("has_bias", 1)};
  EXPECT_EQ(biased.run({7, 7}), 0);
  EXPECT_EQ(gpu().op.bias, biased.tensors().bias);
}

TEST_F(SideStreamTest, AResidualOfTheWrongSizeIsAnError) {
  for (const auto& [sharded, rows] : {std::pair{0, 4}, {1, 7}}) {
    Start start{whole_fields().flag("residual_sharded", sharded)};
    EXPECT_EQ(start.change_shape(), 0);
    EXPECT_NE(start.run({7, 7, 1, rows}), 0);
    EXPECT_EQ(gpu().take(), Calls{});
  }
  EXPECT_NE(std::string(last_error().message).find("residual has 7 rows for 7 of input, expected 4"),
            std::string::npos);
}

TEST_F(SideStreamTest, ClustersNeedADeviceThatHasThem) {
  gpu().compute_major = 8;
  OneSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(gpu().launch.cluster_size, 1);
}

}  // namespace
}  // namespace tokenweave::test
