#include <gtest/gtest.h>

#include "launch_plan.h"

namespace tokenweave {
namespace {

const DeviceLimits kH200{132, 232448, 90};
const DeviceLimits kL40{142, 101376, 89};

KernelEntry bulk(int size) { return {nullptr, Loader::kBulk, size + 1, size == 2 ? 1024 : 768}; }
KernelEntry cp_async(int size) { return {nullptr, Loader::kCpAsync, size + 1, 1024}; }

KernelEntry push(int size) { return {nullptr, Loader::kPush, 0, push_threads(size)}; }

/// hidden 8192 in bf16, two ranks, 4096 tokens.
LaunchRequest request() {
  LaunchRequest r;
  r.kernel = bulk(2);
  r.size = 2;
  r.rows_per_rank = 2048;
  r.vectors_per_row = 1024;
  return r;
}

LaunchPlan planned(const LaunchRequest& r, const DeviceLimits& limits = kH200) {
  LaunchPlan plan;
  const Status status = plan_launch(r, limits, &plan);
  EXPECT_TRUE(status.ok()) << status.message;
  return plan;
}

TEST(LaunchPlan, FillsTheBlockWithTeamsOfOneRow) {
  const LaunchPlan plan = planned(request());
  EXPECT_EQ(plan.ctas, 132);
  EXPECT_EQ(plan.team_threads, 256);
  EXPECT_EQ(plan.teams, 4);
  EXPECT_EQ(plan.stage_bits, 0);
  EXPECT_EQ(plan.shared_bytes, 4u * 3 * 16384);

  LaunchRequest r = request();
  r.kernel = cp_async(2);
  EXPECT_EQ(planned(r).teams, 4);
  EXPECT_EQ(planned(r).shared_bytes, 1024u * 3 * 16);
}

TEST(LaunchPlan, FewerTeamsHaveMoreRowsInFlight) {
  LaunchRequest r = request();
  r.threads = 600;
  EXPECT_EQ(planned(r).teams, 2);
  EXPECT_EQ(planned(r).stage_bits, 1);
  r.threads = 256;
  EXPECT_EQ(planned(r).teams, 1);
  EXPECT_EQ(planned(r).stage_bits, 2);
  EXPECT_EQ(planned(r).shared_bytes, 4u * 3 * 16384);
}

TEST(LaunchPlan, LeavesRoomForStaticSharedMemory) {
  // team_sum.cuh, BulkReader's barriers, RankBarrier's state; what the system takes of a CTA from sm_90 on.
  const size_t sums = sizeof(float) * kMaxTeams * 2 * (kMostThreads / 32), barriers = 8 * kMaxTeams * kMaxStages;
  const size_t used = sums + barriers + 8 * kMaxRanks, taken = (used + 127) / 128 * 128 + 1024;
  EXPECT_LE(taken, kStaticSharedBytes);
  for (int vectors = 1; vectors <= 2048; ++vectors) {
    LaunchRequest r = request();
    r.vectors_per_row = vectors;
    for (const int rows : {100, 2048}) {  // one team of many stages, and many teams
      r.rows_per_rank = rows;
      EXPECT_LE(planned(r).shared_bytes + taken, kH200.shared_bytes) << vectors << " vectors, " << rows << " rows";
    }
  }
}

TEST(LaunchPlan, KeepsWithinSharedMemory) {
  LaunchRequest r = request();
  r.kernel = cp_async(2);
  EXPECT_EQ(planned(r, kL40).teams, 4);
  r.kernel = cp_async(8);
  r.size = 8;
  EXPECT_EQ(planned(r).teams, 4);
  EXPECT_EQ(planned(r, kL40).teams, 2);
  r.vectors_per_row = 4096;  // hidden 16384 in fp32
  EXPECT_EQ(planned(r).teams, 1);
  LaunchPlan plan;
  EXPECT_EQ(plan_launch(r, kL40, &plan).code, TW_UNSUPPORTED);
  r.kernel = bulk(8);
  r.vectors_per_row = 1024;
  EXPECT_EQ(planned(r).teams, 1);
}

TEST(LaunchPlan, PushesAVectorAThreadWhileThereAreThreads) {
  LaunchRequest r = request();
  r.kernel = push(2);
  r.rows_per_rank = 32;
  EXPECT_EQ(planned(r).team_threads, 1024);
  EXPECT_EQ(planned(r).teams, 1);
  EXPECT_EQ(planned(r).shared_bytes, 0u);
  r.threads = 600;
  EXPECT_EQ(planned(r).team_threads, 576);
  r.threads = 255;
  LaunchPlan plan;
  EXPECT_EQ(plan_launch(r, kH200, &plan).code, TW_INVALID_ARGUMENT);
  r.threads = 0;
  r.vectors_per_row = 72;
  EXPECT_EQ(planned(r, kL40).team_threads, 96);
}

TEST(LaunchPlan, PushesWithACtaForEachOwnRow) {
  LaunchRequest r = request();
  r.kernel = push(2);
  const auto ctas = [&r](int rows) {
    r.rows_per_rank = rows;
    return planned(r).ctas;
  };
  EXPECT_EQ(ctas(1), 64);
  EXPECT_EQ(ctas(32), 64);
  EXPECT_EQ(ctas(64), 64);
  EXPECT_EQ(ctas(65), 132);
  EXPECT_EQ(ctas(128), 132);
  r.ctas = 96;
  EXPECT_EQ(ctas(64), 96);
  r.ctas = 0;
  r.loopback = true;
  EXPECT_EQ(ctas(64), 64);
  EXPECT_EQ(ctas(65), 66);
}

TEST(PickLoader, PushesWhereItCan) {
  const auto code = [](const LaunchRequest& r, const DeviceLimits& limits = kH200) {
    Loader loader{};
    const TwCode found = pick_loader(r, bulk(r.size), limits, TW_LOADER_PUSH, &loader).code;
    EXPECT_TRUE(found != TW_OK || loader == Loader::kPush);
    return found;
  };
  LaunchRequest r = request();
  EXPECT_EQ(code(r), TW_UNSUPPORTED);  // 64 MiB to receive
  r.rows_per_rank = 128;               // 2 MiB of parts, 2 MiB of results
  EXPECT_EQ(code(r), TW_OK);
  EXPECT_EQ(code(r, kL40), TW_OK);
  r.rows_per_rank = 129;
  EXPECT_EQ(code(r), TW_UNSUPPORTED);
  r.gather_residual = true;
  r.rows_per_rank = 85;  // and residuals
  EXPECT_EQ(code(r), TW_OK);
  r.rows_per_rank = 86;
  EXPECT_EQ(code(r), TW_UNSUPPORTED);
  r.gather_residual = false;
  r.size = 8;
  r.rows_per_rank = 18;  // of seven others
  EXPECT_EQ(code(r), TW_OK);
  r.rows_per_rank = 19;
  EXPECT_EQ(code(r), TW_UNSUPPORTED);
  r.rows_per_rank = 1;
  r.vectors_per_row = 4096;            // hidden 16384 in fp32
  EXPECT_EQ(code(r), TW_UNSUPPORTED);  // more registers, so fewer threads
  r.size = 2;
  EXPECT_EQ(code(r), TW_OK);
  r.size = 1;
  EXPECT_EQ(code(r), TW_UNSUPPORTED);
  r.size = 2;
  r.fabric = Fabric::kSoftMulticast;
  EXPECT_EQ(code(r), TW_UNSUPPORTED);
}

TEST(PickLoader, PushesByItselfWhereItIsFaster) {
  const auto pushes = [](const LaunchRequest& r, const DeviceLimits& limits = kH200, TwLoader wanted = TW_LOADER_AUTO) {
    Loader loader{};
    EXPECT_EQ(pick_loader(r, bulk(r.size), limits, wanted, &loader).code, TW_OK);
    return loader == Loader::kPush;
  };
  LaunchRequest r = request();
  EXPECT_FALSE(pushes(r));
  r.rows_per_rank = 128;
  EXPECT_TRUE(pushes(r));
  EXPECT_FALSE(pushes(r, kH200, TW_LOADER_BULK));
  EXPECT_FALSE(pushes(r, kH200, TW_LOADER_CP_ASYNC));
  EXPECT_FALSE(pushes(r, {108, 166912, 80}));  // two rows for some CTAs
  r.ctas = 64;
  EXPECT_FALSE(pushes(r));
  r.rows_per_rank = 64;
  EXPECT_TRUE(pushes(r));
  r.rows_per_rank = 1;
  EXPECT_TRUE(pushes(r));
  r.ctas = 63;
  EXPECT_FALSE(pushes(r));
  r.ctas = 0;
  EXPECT_TRUE(pushes(r));
  EXPECT_TRUE(pushes(r, kL40));
  r.rows_per_rank = 129;
  EXPECT_FALSE(pushes(r));  // more than the mailbox holds
  r.vectors_per_row = 512;
  EXPECT_TRUE(pushes(r));
  r.rows_per_rank = 133;
  EXPECT_FALSE(pushes(r));
  r.rows_per_rank = 16;
  r.loopback = true;
  EXPECT_TRUE(pushes(r));
  r.size = 8;
  EXPECT_FALSE(pushes(r));  // 16 CTAs for each rank
  r.loopback = false;
  EXPECT_TRUE(pushes(r));
  r.fabric = Fabric::kMultimem;
  EXPECT_FALSE(pushes(r));
  r.fabric = Fabric::kPeer;
  r.size = 1;
  EXPECT_FALSE(pushes(r));
}

TEST(PickLoader, TakesTheCopyEngineWhereItCanBeAndIsFaster) {
  const auto picked = [](const LaunchRequest& r, const DeviceLimits& limits, TwLoader wanted = TW_LOADER_AUTO) {
    Loader loader{};
    const Status status = pick_loader(r, bulk(r.size), limits, wanted, &loader);
    EXPECT_TRUE(status.ok()) << status.message;
    return loader;
  };
  LaunchRequest r = request();
  EXPECT_EQ(picked(r, kH200), Loader::kCpAsync);
  EXPECT_EQ(picked(r, kH200, TW_LOADER_BULK), Loader::kBulk);
  r.ctas = 16;
  EXPECT_EQ(picked(r, kH200), Loader::kBulk);
  EXPECT_EQ(picked(r, kH200, TW_LOADER_CP_ASYNC), Loader::kCpAsync);
  r.size = 4;
  EXPECT_EQ(picked(r, kH200), Loader::kBulk);
  r.size = 8;  // one row of nine sources takes 144 KiB
  EXPECT_EQ(picked(r, kH200), Loader::kCpAsync);
  EXPECT_EQ(picked(r, kH200, TW_LOADER_BULK), Loader::kBulk);
  r.rows_per_rank = 32;
  EXPECT_EQ(picked(r, kH200), Loader::kBulk);
  r.rows_per_rank = 33;
  EXPECT_EQ(picked(r, kH200), Loader::kCpAsync);
  r.vectors_per_row = 512;
  EXPECT_EQ(picked(r, kH200), Loader::kBulk);
  r = request();
  r.rows_per_rank = 129;
  EXPECT_EQ(picked(r, kH200), Loader::kBulk);

  const auto impossible = [](const LaunchRequest& bad, const DeviceLimits& limits) {
    Loader loader{};
    EXPECT_EQ(pick_loader(bad, bulk(bad.size), limits, TW_LOADER_AUTO, &loader).code, TW_OK);
    EXPECT_EQ(loader, Loader::kCpAsync);
    EXPECT_EQ(pick_loader(bad, bulk(bad.size), limits, TW_LOADER_BULK, &loader).code, TW_UNSUPPORTED);
    EXPECT_EQ(pick_loader(bad, bulk(bad.size), limits, static_cast<TwLoader>(7), &loader).code, TW_INVALID_ARGUMENT);
  };
  impossible(r, kL40);
  r.fabric = Fabric::kMultimem;
  impossible(r, kH200);
  r.fabric = Fabric::kPeer;
  r.size = 8;
  r.vectors_per_row = 2048;
  impossible(r, kH200);
}

TEST(LaunchPlan, ServesEveryHiddenSizeWithWholeWarps) {
  for (int vectors = 1; vectors <= 4096; ++vectors) {
    LaunchRequest r = request();
    r.vectors_per_row = vectors;
    r.kernel = cp_async(2);
    const LaunchPlan plan = planned(r);
    EXPECT_EQ(plan.team_threads % 32, 0);
    EXPECT_GE(plan.team_threads * kVectorsPerThread, vectors);
    EXPECT_LE(plan.team_threads * plan.teams, kMostThreads);
    EXPECT_LE(plan.teams, kMaxTeams);
  }
}

TEST(LaunchPlan, LaunchesNoMoreThanHasWork) {
  LaunchRequest few = request();
  few.rows_per_rank = 32;
  EXPECT_EQ(planned(few).ctas, 32);
  EXPECT_EQ(planned(few).teams, 1);
  few.rows_per_rank = 100;
  EXPECT_EQ(planned(few).ctas, 64);
  few.ctas = 8;
  EXPECT_EQ(planned(few).ctas, 8);
  few.rows_per_rank = 1;
  EXPECT_EQ(planned(few).ctas, 8);
}

TEST(LaunchPlan, LoopbackRanksShareTheDevice) {
  LaunchRequest loopback = request();
  loopback.loopback = true;
  loopback.size = 8;
  EXPECT_EQ(planned(loopback).ctas, 16);
  loopback.ctas = 17;
  LaunchPlan plan;
  const Status status = plan_launch(loopback, kH200, &plan);
  EXPECT_EQ(status.code, TW_UNSUPPORTED);
  EXPECT_NE(status.message.find("at most 16 ctas"), std::string::npos);
}

TEST(LaunchPlan, RefusesWhatCannotBe) {
  struct Case {
    int ctas, threads, cluster_size;
    Fabric fabric;
    const DeviceLimits& limits;
    TwCode code;
  };
  for (const Case& c :
       {Case{-1, 0, 1, Fabric::kPeer, kH200, TW_INVALID_ARGUMENT},
        Case{257, 0, 1, Fabric::kPeer, kH200, TW_INVALID_ARGUMENT},
        Case{133, 0, 1, Fabric::kPeer, kH200, TW_UNSUPPORTED}, Case{9, 0, 2, Fabric::kPeer, kH200, TW_INVALID_ARGUMENT},
        Case{8, 0, 16, Fabric::kPeer, kH200, TW_INVALID_ARGUMENT}, Case{8, 0, 2, Fabric::kPeer, kL40, TW_UNSUPPORTED},
        Case{8, 0, 1, Fabric::kMultimem, kL40, TW_UNSUPPORTED},
        Case{8, 255, 1, Fabric::kPeer, kH200, TW_INVALID_ARGUMENT}}) {
    LaunchRequest r = request();
    r.ctas = c.ctas;
    r.threads = c.threads;
    r.cluster_size = c.cluster_size;
    r.fabric = c.fabric;
    LaunchPlan plan;
    EXPECT_EQ(plan_launch(r, c.limits, &plan).code, c.code);
  }
}

TEST(LaunchPlan, PairsCtasWhereTheDeviceCan) {
  LaunchRequest r = request();
  EXPECT_EQ(planned(r).cluster_size, 2);
  EXPECT_EQ(planned(r, {108, 166912, 80}).cluster_size, 1);
  r.ctas = 7;
  EXPECT_EQ(planned(r).cluster_size, 1);
  r.ctas = 8;
  r.cluster_size = 1;
  EXPECT_EQ(planned(r).cluster_size, 1);
  r.cluster_size = 0;
  r.loopback = true;
  EXPECT_EQ(planned(r).cluster_size, 1);
}

TEST(LaunchPlan, DefaultsAreWholeClusters) {
  LaunchRequest r = request();
  r.cluster_size = 2;
  r.rows_per_rank = 7;
  EXPECT_EQ(planned(r).ctas, 6);
  r.rows_per_rank = 1;
  EXPECT_EQ(planned(r).ctas, 2);
}

}  // namespace
}  // namespace tokenweave
