// The C++ object over a group: every error of the C functions arrives, on every rank, and null groups are no trap.
#include <gtest/gtest.h>

#include "driver_without_gpus.h"
#include "ranks.h"
#include "tokenweave/communicator.h"

namespace tokenweave::test {
namespace {

CommunicatorOptions options(int rank = 0, int size = 2) {
  CommunicatorOptions made;
  made.rank = rank;
  made.size = size;
  made.timeout = std::chrono::milliseconds(3000);
  return made;
}

TEST(Communicator, RefusesBadOptions) {
  Status status = Communicator::create(options(2)).status();
  EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
  EXPECT_EQ(status.message, "rank is 2, not 0 to size - 1 = 1");
  CommunicatorOptions bad = options();
  bad.mpi_ranks = {4};
  status = Communicator::create(bad).status();
  EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
  EXPECT_EQ(status.message.rfind("mpi_ranks has 1 ranks, size is 2. Fix: ", 0), 0u) << status.message;
}

TEST(Communicator, RanksMeetAtTheAddressAndCompareWhatTheyWereGiven) {
  const std::string address = fresh_address();
  const auto texts = run_processes(2, [&](int rank) {
    if (!hide_gpus()) return std::string("no driver");
    CommunicatorOptions mine = options(rank);
    mine.bootstrap = address;
    mine.config_hash = static_cast<uint64_t>(rank);
    return Communicator::create(mine).status().message;
  });
  for (const std::string& text : texts)
    EXPECT_NE(text.find("is 0 on rank 0 and 1 on rank 1"), std::string::npos) << text;
}

TEST(Communicator, ARankThatIsAloneGetsAnErrorInTime) {
  const std::string address = fresh_address();
  const auto texts = run_processes(1, [&](int) {
    if (!hide_gpus()) return std::string("no driver");
    CommunicatorOptions mine = options();
    mine.bootstrap = address;
    mine.timeout = std::chrono::milliseconds(50);
    const Status status = Communicator::create(mine).status();
    return status.code == TW_BOOTSTRAP_ERROR ? status.message : "another code: " + status.message;
  });
  EXPECT_EQ(texts[0].find("bootstrap at " + address + ": missing rank 1: "), 0u) << texts[0];
}

TEST(Communicator, NullGroupsAreErrors) {
  Communicator nothing = Communicator::adopt(nullptr);
  EXPECT_EQ(nothing.get(), nullptr);
  EXPECT_EQ(nothing.info().status().message, "group is null");
  EXPECT_EQ(nothing.tensor_memory(0).status().message, "group is null");
  EXPECT_EQ(nothing.check().message, "group is null");
  EXPECT_EQ(nothing.all_gather(nullptr, nullptr, 0).message, "group is null");
  EXPECT_EQ(nothing.all_reduce_rms_norm({}, {}, nullptr).message, "group is null");
  EXPECT_TRUE(nothing.destroy().ok());
  Communicator moved = std::move(nothing);
  moved = Communicator::adopt(nullptr);
  EXPECT_EQ(moved.release(), nullptr);
}

}  // namespace
}  // namespace tokenweave::test
