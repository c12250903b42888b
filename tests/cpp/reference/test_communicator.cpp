// Ranks that meet, one process each.
#include <cstdlib>

#include "../ranks.h"
#include "communicator.h"
#include "fake_nccl.h"
#include "v2_layers.h"

namespace tokenweave::test {
namespace {

using reference::Communicator;

/// What one rank of the group got: the calls of its NCCL, or why it has no communicator.
std::string meet(const std::string& address, const char* rank, const std::vector<int32_t>& group,
                 const char* failing = "") {
  setenv("TOKENWEAVE_BOOTSTRAP", address.c_str(), 1);
  setenv("TOKENWEAVE_TIMEOUT_MS", "5000", 1);
  rank != nullptr ? setenv("TOKENWEAVE_RANK", rank, 1) : unsetenv("TOKENWEAVE_RANK");
  nccl() = FakeNccl{};
  nccl().id = "the id of process " + std::string(rank != nullptr ? rank : "?");
  nccl().failing = failing;
  Communicator* communicator = nullptr;
  const Status status = Communicator::acquire(group, &communicator);
  std::string text = status.message;
  for (const std::string& call : nccl().calls) text += (text.empty() ? "" : "; ") + call;
  return text + (status.ok() == (communicator != nullptr) && status.ok() == (nccl().communicators == 1) ? "" : " LEFT");
}

TEST(Communicator, RanksShareTheIdOfTheFirst) {
  const std::string address = fresh_address();
  const char* const world_ranks[] = {"4", "6", "7"};
  const auto texts = run_processes(3, [&](int rank) { return meet(address, world_ranks[rank], {4, 6, 7}); });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(texts[rank], "init 3 ranks as " + std::to_string(rank) + " by the id of process 4");
  }
}

TEST(Communicator, AllRanksFailWhereOneDoes) {
  const std::string why = "failed: unhandled system error (2)";
  {
    const std::string address = fresh_address();
    const auto texts = run_processes(
        2, [&](int rank) { return meet(address, rank == 0 ? "0" : "1", {0, 1}, rank == 1 ? "ncclCommInitRank" : ""); });
    // Both got to NCCL; what one rank has of it is taken down again.
    const std::string message = "rank 1: ncclCommInitRank " + why;
    EXPECT_EQ(texts[0], message + "; init 2 ranks as 0 by the id of process 0; abort");
    EXPECT_EQ(texts[1], message + "; init 2 ranks as 1 by the id of process 0");
  }
  {
    const std::string address = fresh_address();
    const auto texts = run_processes(
        2, [&](int rank) { return meet(address, rank == 0 ? "0" : "1", {0, 1}, rank == 0 ? "ncclGetUniqueId" : ""); });
    // Nobody gets to NCCL, where the others would wait.
    for (const std::string& text : texts) EXPECT_EQ(text, "rank 0: ncclGetUniqueId " + why);
  }
}

TEST(Communicator, NeedsToKnowItsRank) {
  const auto texts = run_processes(1, [&](int) { return meet(fresh_address(), nullptr, {0, 1}); });
  EXPECT_EQ(texts[0], "no way to tell this process's rank: TOKENWEAVE_RANK is not set and Open MPI is not initialised");
  for (const char* rank : {"-1", "one", "1x", "99999999999"}) {
    EXPECT_EQ(run_processes(1, [&](int) { return meet(fresh_address(), rank, {0, 1}); })[0], texts[0]) << rank;
  }
  const auto outside = run_processes(1, [&](int) { return meet(fresh_address(), "2", {0, 1}); });
  EXPECT_EQ(outside[0], "this process is rank 2, which is not in field 'group'. Fix: load the engine of this rank");
}

TEST(Communicator, AGroupOfOneNeedsNothing) {
  EXPECT_EQ(run_processes(1, [](int) { return meet("", nullptr, {9}); })[0],
            "init 1 ranks as 0 by the id of process ?");
}

TEST(Communicator, MeetsOnce) {
  const auto texts = run_processes(1, [](int) {
    const std::string first = meet("", nullptr, {9});
    Communicator *again = nullptr, *of_a_thread = nullptr, *other = nullptr;
    Status status = Communicator::acquire({9}, &again);
    std::thread([&] { status = Communicator::acquire({9}, &of_a_thread); }).join();
    if (!status.ok() || !Communicator::acquire({8}, &other).ok()) return status.message + " FAILED";
    return std::to_string(nccl().calls.size()) + " inits, " + std::to_string(nccl().destroys) + " destroys" +
           (again == of_a_thread && again != other ? "" : ", not one of a group");
  });
  EXPECT_EQ(texts[0], "2 inits, 0 destroys");
}

TEST(Communicator, FailsForGoodWhereARankStaysAway) {
  const std::string address = fresh_address();
  const auto texts = run_processes(1, [&](int) {
    setenv("TOKENWEAVE_BOOTSTRAP", address.c_str(), 1);
    setenv("TOKENWEAVE_TIMEOUT_MS", "50", 1);
    setenv("TOKENWEAVE_RANK", "0", 1);
    Communicator* communicator = nullptr;
    const std::string first = Communicator::acquire({0, 1}, &communicator).message;
    // Another meeting would be at another place, and say so.
    setenv("TOKENWEAVE_BOOTSTRAP", (address + "-again").c_str(), 1);
    const std::string second = Communicator::acquire({0, 1}, &communicator).message;
    return first + (second == first && communicator == nullptr ? "" : " THEN " + second);
  });
  EXPECT_EQ(texts[0].find("bootstrap at " + address + ": missing rank 1: "), 0u) << texts[0];
  EXPECT_EQ(texts[0].find("THEN"), std::string::npos) << texts[0];
}

TEST(Communicator, QueuesTheSumsOfThreadsOneByOne) {
  const auto texts = run_processes(1, [](int) {
    meet("", nullptr, {9});
    run_threads(2, [](int) {
      Communicator* communicator = nullptr;
      bool ok = Communicator::acquire({9}, &communicator).ok();
      for (int i = 0; ok && i < 200; ++i) ok = communicator->all_reduce(nullptr, nullptr, 1, TW_HALF, nullptr).ok();
    });
    return std::to_string(nccl().calls.size()) + " calls, " + std::to_string(nccl().at_once) + " at once";
  });
  EXPECT_EQ(texts[0], "401 calls, 0 at once");
}

/// What each of two ranks got of a window: the error, NCCL's calls, and the error of a sum afterwards.
std::vector<std::string> open_windows(const std::string& failing_on_one, const std::vector<size_t>& bytes) {
  const std::string address = fresh_address();
  return run_processes(2, [&](int rank) {
    meet(address, rank == 0 ? "0" : "1", {0, 1});
    Communicator* communicator = nullptr;
    if (!Communicator::acquire({0, 1}, &communicator).ok()) return std::string("no communicator");
    nccl().calls.clear();
    nccl().failing = rank == 1 ? failing_on_one : "";
    const reference::Window* window = nullptr;
    std::string text = communicator->window(bytes[rank], &window).message;
    for (const std::string& call : nccl().calls) text += "; " + call;
    if (window != nullptr) text += " OPEN";
    nccl().failing.clear();
    return text + "; then " + communicator->all_reduce(nullptr, nullptr, 1, TW_HALF, nullptr).message;
  });
}

TEST(Communicator, NoRankOpensAWindowWhereOneHasNoMemory) {
  const auto texts = open_windows("ncclMemAlloc", {4096, 4096});
  const std::string message = "rank 1: ncclMemAlloc failed: unhandled system error (2); allocate 8192";
  EXPECT_EQ(texts[0], message + "; free; then ");
  EXPECT_EQ(texts[1], message + "; then ");
}

TEST(Communicator, AllRanksAbortWhereOneCannotRegister) {
  const auto texts = open_windows("ncclCommWindowRegister", {4096, 4096});
  const std::string message = "rank 1: ncclCommWindowRegister failed: unhandled system error (2)";
  const std::string begin = message + "; allocate 8192; register 8192; ";
  EXPECT_EQ(texts[0], begin + "deregister; free; abort; then " + message);
  EXPECT_EQ(texts[1], begin + "free; abort; then " + message);
}

TEST(Communicator, OpensNoWindowsOfDifferentSizes) {
  for (const std::string& text : open_windows("", {4096, 8192})) {
    EXPECT_EQ(text,
              "a layer of strategy NCCL_SYMMETRIC sums up to 4096 bytes on rank 0 and 8192 on rank 1. Fix: build the "
              "engines of all ranks together; then ");
  }
}

TEST(Window, NeedsAnNcclThatHasThem) {
  std::unique_ptr<Bootstrap> bootstrap;
  ASSERT_TRUE(connect_bootstrap({0, 1, std::chrono::milliseconds(1000), "", {0}}, &bootstrap).ok());
  NcclTable old{};
  old.GetVersion = [](int* version) {
    *version = 22602;
    return kNcclSuccess;
  };
  std::unique_ptr<reference::Window> window;
  NcclComm communicator = nullptr;
  const Status status = reference::Window::open(old, &communicator, *bootstrap, 4096, &window);
  EXPECT_EQ(status.code, TW_UNSUPPORTED);
  EXPECT_EQ(status.message,
            "rank 0: NCCL 2.26.2 has no windows. Fix: install NCCL 2.27 or later and load it before any other");
}

TEST(LoadNccl, NamesWhatItTried) {
  NcclTable table{};
  const Status status = load_nccl(&table, {"libnot-there.so.2"});
  EXPECT_EQ(status.code, TW_UNSUPPORTED);
  EXPECT_EQ(status.message.find("cannot load libnot-there.so.2: "), 0u) << status.message;
  EXPECT_NE(status.message.find("Fix: install NCCL 2"), std::string::npos) << status.message;
  EXPECT_EQ(load_nccl(&table, {"libm.so.6"}).message.find("libm.so.6 has no ncclGetErrorString. Fix: "), 0u);
}

}  // namespace
}  // namespace tokenweave::test
