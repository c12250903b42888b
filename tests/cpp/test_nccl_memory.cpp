// Symmetric memory that NCCL owns: what it gives, and that all ranks fall back to the driver's where one lacks it.
#include <gtest/gtest.h>

#include <algorithm>

#include "fake_nccl_table.h"
#include "nccl_memory.h"
#include "symmetric_buffers.h"

namespace tokenweave::test {
namespace {

std::vector<Outcome> create_by_nccl(int size, bool allow_multicast = true) {
  return create_buffers(size, fake_driver(), allow_multicast, &fake_nccl());
}

void expect_nccl(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message;
    EXPECT_TRUE(outcome.buffer->is_nccl());
    EXPECT_EQ(outcome.buffer->nccl_reason(), "");
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      EXPECT_EQ(fake_nccl_owner_of(outcome.buffer->of_rank(static_cast<int>(rank))), static_cast<int>(rank));
    }
  }
  EXPECT_EQ(fake_live(), FakeLive{});
}

void expect_driver(const std::vector<Outcome>& outcomes, const std::string& reason) {
  expect_peers(outcomes);
  for (const Outcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.buffer->is_nccl());
    EXPECT_EQ(outcome.buffer->nccl_reason().find(reason), 0u) << outcome.buffer->nccl_reason();
  }
  EXPECT_EQ(fake_nccl_live(), FakeNcclLive{});
}

int count(int rank, const std::string& call) {
  const auto calls = fake_nccl_calls(rank);
  return static_cast<int>(std::count(calls.begin(), calls.end(), call));
}

TEST(NcclMemory, GivesEveryRanksMemoryAndMulticastAndIsLetGoOfInOrder) {
  for (const int size : {1, 2, 8}) {
    fake_reset();
    fake_nccl_reset();
    const int files = open_files();
    auto outcomes = create_by_nccl(size);
    expect_nccl(outcomes);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(fake_nccl_owner_of(outcome.buffer->multicast()), size == 1 ? -1 : 100);
      EXPECT_EQ(outcome.buffer->multicast_reason().empty(), size > 1);
    }
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(count(rank, "ncclGetUniqueId"), rank == 0);
      fake_be_rank(rank);
      outcomes[rank].buffer.reset();
      const auto calls = fake_nccl_calls(rank);
      ASSERT_GE(calls.size(), 3u);
      EXPECT_EQ(std::vector<std::string>(calls.end() - 3, calls.end()),
                (std::vector<std::string>{"ncclCommWindowDeregister", "ncclMemFree", "ncclCommAbort"}));
    }
    EXPECT_EQ(fake_nccl_live(), FakeNcclLive{});
    EXPECT_EQ(open_files(), files);
  }
}

TEST(NcclMemory, AnyFailingCallFallsBackToTheDriversOnEveryRank) {
  for (const char* call :
       {"ncclGetUniqueId", "ncclCommInitRank", "ncclMemAlloc", "ncclCommWindowRegister", "ncclGetPeerDevicePointer"}) {
    for (int rank = 0; rank < 2; ++rank) {
      if (rank == 1 && call == std::string("ncclGetUniqueId")) continue;  // rank 0 alone makes the id
      SCOPED_TRACE(std::string(call) + " on rank " + std::to_string(rank));
      fake_reset();
      fake_nccl_reset({rank, call});
      const int files = open_files();
      auto outcomes = create_by_nccl(2);
      // Rank 0 waits for rank 1 to register, until that gives up.
      const bool waits = rank == 1 && call == std::string("ncclCommWindowRegister");
      expect_driver(outcomes, waits ? "rank 0: ncclCommWindowRegister failed: a rank is gone (6)"
                                    : "rank " + std::to_string(rank) + ": " + call + " failed: made to fail (1)");
      const bool allocated =
          call == std::string("ncclCommWindowRegister") || call == std::string("ncclGetPeerDevicePointer");
      EXPECT_EQ(count(rank, "ncclMemFree"), allocated ? 1 : 0);
      // What NCCL could not do does not keep the driver from it.
      for (const Outcome& outcome : outcomes) EXPECT_EQ(fake_owner_of(outcome.buffer->multicast()), 100);
      outcomes.clear();
      EXPECT_EQ(fake_live(), FakeLive{});
      EXPECT_EQ(open_files(), files);
    }
  }
}

TEST(NcclMemory, ACommunicatorThatIsStillStartingIsLetGoOf) {
  fake_reset();
  fake_nccl_reset({1, "ncclCommInitRank", kNcclInProgress});
  expect_driver(create_by_nccl(2), "rank 1: ncclCommInitRank failed: ");
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(count(rank, "ncclCommAbort"), 1);
}

TEST(NcclMemory, FallsBackWhereNcclHasNoWindowsOrReachesNotAllRanks) {
  fake_reset();
  FakeNcclMachine machine;
  machine.windows = false;
  fake_nccl_reset({}, machine);
  expect_driver(create_by_nccl(2), "rank 0: NCCL gives no window");

  fake_reset();
  machine = {};
  machine.unreachable = 0;
  fake_nccl_reset({}, machine);
  expect_driver(create_by_nccl(2), "rank 1: NCCL does not map the memory of rank 0");
}

TEST(NcclMemory, NothingIsKeptWhereTheDriverFailsAsWell) {
  fake_reset({1, "cuMemCreate"});
  fake_nccl_reset({0, "ncclMemAlloc"});
  for (const Outcome& outcome : create_by_nccl(2)) {
    EXPECT_EQ(outcome.status.message.find("rank 1: cuMemCreate failed"), 0u) << outcome.status.message;
    EXPECT_EQ(outcome.buffer, nullptr);
  }
  EXPECT_EQ(fake_live(), FakeLive{});
  EXPECT_EQ(fake_nccl_live(), FakeNcclLive{});
}

TEST(NcclMemory, ServesWithoutMulticastOnAllRanksWhereOneLacksIt) {
  for (int rank = 0; rank < 2; ++rank) {
    fake_reset();
    fake_nccl_reset({rank, "ncclGetLsaMultimemDevicePointer"});
    const auto outcomes = create_by_nccl(2);
    expect_nccl(outcomes);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.buffer->multicast(), nullptr);
      EXPECT_EQ(outcome.buffer->multicast_reason(),
                "rank " + std::to_string(rank) + ": ncclGetLsaMultimemDevicePointer failed: made to fail (1)");
    }
  }
  fake_reset();
  FakeNcclMachine machine;
  machine.multicast = false;
  fake_nccl_reset({}, machine);
  const auto outcomes = create_by_nccl(2);
  expect_nccl(outcomes);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.buffer->multicast(), nullptr);
    EXPECT_EQ(outcome.buffer->multicast_reason(), "rank 0: NCCL has no multicast");
  }
}

TEST(NcclMemory, NeverAsksForMulticastWhereItIsNotAllowedOrNotThere) {
  for (const bool allowed : {false, true}) {
    fake_reset();
    fake_nccl_reset();
    if (allowed) fake_set_attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0);
    const auto outcomes = create_by_nccl(2, allowed);
    expect_nccl(outcomes);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(outcomes[rank].buffer->multicast(), nullptr);
      EXPECT_NE(outcomes[rank].buffer->multicast_reason(), "");
      EXPECT_EQ(count(rank, "ncclGetLsaMultimemDevicePointer"), 0);
    }
  }
}

TEST(NcclMemory, NeverAsksForMulticastWhereRanksShareAGpu) {
  fake_reset();
  fake_nccl_reset();
  for (int rank = 0; rank < 3; ++rank) fake_set_gpu(rank, rank % 2, rank);
  const auto outcomes = create_by_nccl(3);
  expect_nccl(outcomes);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(outcomes[rank].buffer->multicast(), nullptr);
    EXPECT_EQ(outcomes[rank].buffer->multicast_reason(), "ranks 0 and 2 share a GPU");
    EXPECT_EQ(count(rank, "ncclGetLsaMultimemDevicePointer"), 0);
  }
}

TEST(NcclMemory, OfALostDeviceIsLeftAlone) {
  fake_reset();
  fake_nccl_reset();
  auto outcomes = create_by_nccl(2);
  expect_nccl(outcomes);
  const auto calls = fake_nccl_calls(0);
  for (Outcome& outcome : outcomes) outcome.buffer->abandon();
  outcomes.clear();
  EXPECT_EQ(fake_nccl_calls(0), calls);
  EXPECT_EQ(fake_nccl_live(), (FakeNcclLive{2, 2, 2}));
}

/// What the ranks get of load_nccl_memory; `asked` and `name` by rank.
std::vector<std::string> load(const std::vector<bool>& asked, const std::vector<std::string>& names) {
  std::vector<std::string> texts(asked.size());
  run_connected(static_cast<int>(asked.size()), [&](int rank, Bootstrap& bootstrap) {
    NcclTable table{};
    texts[rank] = load_nccl_memory(bootstrap, asked[rank], &table, {names[rank]}).message;
  });
  EXPECT_EQ(texts[0], texts[1]);
  return texts;
}

TEST(NcclMemory, IsChosenWhereAllRanksAskForItAndHaveIt) {
  EXPECT_EQ(load({false, false}, {"libnone.so", "libnone.so"})[0], "rank 0: TOKENWEAVE_SYMMETRIC_MEMORY is not nccl");
  const std::string missing = load({true, false}, {"libnone.so", "libnone.so"})[0];
  EXPECT_EQ(missing.find("rank 0: cannot load libnone.so: "), 0u) << missing;
  EXPECT_NE(missing.find("Fix: install NCCL 2"), std::string::npos) << missing;
  const std::string one = load({true, false}, {"libc.so.6", "libc.so.6"})[0];
  EXPECT_EQ(one.find("rank 0: libc.so.6 has no ncclGetErrorString"), 0u) << one;
}

TEST(NcclMemory, NeedsAnNcclThatTellsTheHostWhereMemoryIsMapped) {
  fake_nccl_reset();
  EXPECT_TRUE(check_nccl_memory(fake_nccl()).ok());
  NcclTable without = fake_nccl();
  without.GetPeerDevicePointer = nullptr;
  EXPECT_EQ(check_nccl_memory(without).code, TW_UNSUPPORTED);

  FakeNcclMachine machine;
  machine.version = 22809;
  fake_nccl_reset({}, machine);
  const Status old = check_nccl_memory(fake_nccl());
  EXPECT_EQ(old.code, TW_UNSUPPORTED);
  EXPECT_EQ(old.message.find("NCCL 2.28.9 does not tell the host"), 0u) << old.message;
  EXPECT_NE(old.message.find("Fix: install NCCL 2.29.2 or later"), std::string::npos) << old.message;

  fake_be_rank(0);
  fake_nccl_reset({0, "ncclGetVersion"});
  EXPECT_EQ(check_nccl_memory(fake_nccl()).message, "ncclGetVersion failed: made to fail (1)");
}

TEST(NcclMemory, AnInstalledLibraryHasWhatItsVersionSays) {
  NcclTable table{};
  if (!load_nccl(&table).ok()) GTEST_SKIP() << "no libnccl.so.2";
  int version = 0;
  EXPECT_EQ(table.GetVersion(&version), kNcclSuccess);
  EXPECT_EQ(check_nccl_memory(table).ok(), version >= 22902) << version;
}

}  // namespace
}  // namespace tokenweave::test
