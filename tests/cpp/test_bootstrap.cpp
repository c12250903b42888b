#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdlib>

#include "bootstrap.h"
#include "env.h"
#include "group.h"
#include "ranks.h"
#include "socket.h"

namespace tokenweave::test {
namespace {

BootstrapOptions options(int rank, int size, const std::string& address, int timeout_ms = 5000) {
  return {rank, size, std::chrono::milliseconds(timeout_ms), address, {}};
}

/// A rank that connects and then runs `body`; the text is the error of whatever failed first, or what `body` returned.
std::string connected(const BootstrapOptions& how, const std::function<std::string(Bootstrap&)>& body) {
  std::unique_ptr<Bootstrap> bootstrap;
  const Status status = connect_bootstrap(how, &bootstrap);
  return status.ok() ? body(*bootstrap) : status.message;
}

std::string gathered_squares(Bootstrap& bootstrap) {
  std::string text;
  for (int round = 0; round < 3; ++round) {
    std::vector<int> all;
    const Status status = all_gather(bootstrap, "squares", bootstrap.rank() * bootstrap.rank() + round, &all);
    if (!status.ok()) return status.message;
    for (const int value : all) text += std::to_string(value) + " ";
  }
  return text;
}

/// A path that neither another test nor another process uses.
std::string fresh_path(const std::string& what) {
  return ::testing::TempDir() + "tokenweave-" + what + "-" + std::to_string(getpid());
}

TEST(Bootstrap, GathersAmongProcessesByFileAndByName) {
  const std::string file = fresh_path("socket");
  for (const std::string& address : {file, fresh_address()}) {
    const auto texts =
        run_processes(4, [&](int rank) { return connected(options(rank, 4, address), gathered_squares); });
    for (const std::string& text : texts) EXPECT_EQ(text, "0 1 4 9 1 2 5 10 2 3 6 11 ");
  }
  EXPECT_NE(access(file.c_str(), F_OK), 0) << "the socket file stays behind";
}

TEST(Bootstrap, ReplacesTheSocketFileOfADeadProcess) {
  const std::string file = fresh_path("stale");
  run_processes(1, [&](int) { return connected(options(0, 2, file, 50), gathered_squares); });
  EXPECT_EQ(access(file.c_str(), F_OK), 0);
  const auto texts = run_processes(2, [&](int rank) { return connected(options(rank, 2, file), gathered_squares); });
  for (const std::string& text : texts) EXPECT_EQ(text, "0 1 1 2 2 3 ");
}

TEST(Bootstrap, PassesDescriptorsOfTheRanksThatHaveOne) {
  const std::string address = fresh_address();
  const auto texts = run_processes(3, [&](int rank) {
    return connected(options(rank, 3, address), [&](Bootstrap& bootstrap) -> std::string {
      UniqueFd mine;
      if (rank != 1) {
        mine = UniqueFd(memfd_create("fd", 0));
        if (write(mine.get(), &rank, sizeof rank) != sizeof rank) return "write";
      }
      std::vector<UniqueFd> all;
      if (const Status status = bootstrap.share_fds("files", mine.get(), &all); !status.ok()) return status.message;
      std::string text;
      for (const UniqueFd& fd : all) {
        int owner = -1;
        if (fd && pread(fd.get(), &owner, sizeof owner, 0) != sizeof owner) return "read";
        text += std::to_string(owner) + " ";
      }
      return text;
    });
  });
  EXPECT_EQ(texts, (std::vector<std::string>{"-1 -1 2 ", "0 -1 2 ", "0 -1 -1 "}));
}

TEST(Bootstrap, NamesTheRankThatDoesNotCome) {
  const std::string address = fresh_address();
  const auto texts = run_processes(
      3, [&](int rank) { return rank == 2 ? "absent" : connected(options(rank, 3, address, 300), gathered_squares); });
  EXPECT_NE(texts[0].find("missing rank 2"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[1], texts[0]);
}

TEST(Bootstrap, SaysThatRankZeroIsMissing) {
  const std::string text = connected(options(1, 2, fresh_address(), 100), gathered_squares);
  EXPECT_NE(text.find("rank 0 does not listen"), std::string::npos) << text;
}

TEST(Bootstrap, NothingIsSentToAProcessOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr uid_t kNobody = 65534;
  for (const int stranger : {0, 1}) {
    const std::string address = fresh_address();
    const auto texts = run_processes(2, [&](int rank) {
      if (rank == stranger && setresuid(kNobody, kNobody, kNobody) != 0) return std::string("setresuid");
      return connected(options(rank, 2, address, 300), gathered_squares);
    });
    EXPECT_NE(texts[0].find("missing rank 1"), std::string::npos) << texts[0];
    EXPECT_EQ(texts[1], "a process of another user listens at " + address + ". Fix: run all ranks as one user");
  }
}

TEST(Bootstrap, AKilledRankIsAnErrorOnAllOthers) {
  for (const int victim : {0, 2}) {
    const std::string address = fresh_address();
    const auto texts = run_processes(3, [&](int rank) {
      return connected(options(rank, 3, address, 2000), [&](Bootstrap& bootstrap) {
        const std::string first = gathered_squares(bootstrap);
        if (rank == victim) raise(SIGKILL);
        const std::string second = gathered_squares(bootstrap);
        const std::string third = gathered_squares(bootstrap);
        return third == second ? second : second + " THEN " + third;
      });
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_NE(texts[rank].find("rank " + std::to_string(victim)), std::string::npos) << texts[rank];
      EXPECT_EQ(texts[rank].find("THEN"), std::string::npos) << texts[rank];
    }
  }
}

/// Lets one process wait for another; made before they fork.
class Gate {
 public:
  Gate() { EXPECT_EQ(pipe(ends_), 0); }
  ~Gate() {
    for (const int end : ends_) close(end);
  }
  bool open() const { return write(ends_[1], "", 1) == 1; }
  bool wait() const {
    pollfd entry{ends_[0], POLLIN, 0};
    return poll(&entry, 1, 5000) == 1;
  }

 private:
  int ends_[2];
};

TEST(Bootstrap, RanksThatComeBeforeAndAfterTheEndSayTheSame) {
  constexpr int kLate = 3;
  for (const int victim : {0, 1}) {
    const std::string address = fresh_address();
    const int witness = victim == 0 ? 1 : 0;  // of the end of all connections
    const Gate end;
    const auto texts = run_processes(4, [&](int rank) {
      return connected(options(rank, 4, address, 2000), [&](Bootstrap& bootstrap) {
        (void)gathered_squares(bootstrap);
        if (rank == victim) {
          usleep(100000);  // most likely the others have sent what nobody is going to read
          raise(SIGKILL);
        }
        if (rank == kLate && !end.wait()) return std::string("too early");
        const std::string text = gathered_squares(bootstrap);
        return rank != witness || end.open() ? text : "nobody knows";
      });
    });
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(texts[rank],
                rank == victim ? "died" : "squares: rank " + std::to_string(victim) + ": the process is gone");
    }
  }
}

TEST(Bootstrap, RanksOfDifferentGroupSizesAllGetTheError) {
  const std::string address = fresh_address();
  const auto texts = run_processes(
      2, [&](int rank) { return connected(options(rank, rank == 0 ? 2 : 3, address, 1000), gathered_squares); });
  for (const std::string& text : texts) {
    EXPECT_EQ(text, "bootstrap: rank 1: was started with size 3, this rank with 2");
  }
}

TEST(Bootstrap, TwoProcessesWithOneRankAllGetTheError) {
  const std::string address = fresh_address();
  const auto texts = run_processes(
      3, [&](int rank) { return connected(options(rank == 2 ? 1 : rank, 3, address, 1000), gathered_squares); });
  for (const std::string& text : texts)
    EXPECT_NE(text.find("two processes say that they are rank 1"), std::string::npos) << text;
}

/// What rank 0 says of an address that another job's rank 0 has.
std::string is_taken(const std::string& address) {
  return address +
         " is taken: the rank 0 of another job listens there. Fix: choose another TOKENWEAVE_BOOTSTRAP or "
         "TwGroupConfig.bootstrap for all ranks, or end that job";
}

TEST(Bootstrap, AnAddressThatAnotherJobUsesIsTakenWhileItDoes) {
  const std::string file = fresh_path("taken");
  for (const std::string& address : {fresh_address(), file}) {
    UniqueFd of_another_job;
    ASSERT_TRUE(listen_at(address, 1, &of_another_job).ok());
    for (int attempt = 0; attempt < 3; ++attempt) {  // more than its backlog holds
      EXPECT_EQ(connected(options(0, 2, address), gathered_squares), is_taken(address));
    }
    of_another_job = UniqueFd();
    const auto texts =
        run_processes(2, [&](int rank) { return connected(options(rank, 2, address), gathered_squares); });
    for (const std::string& text : texts) EXPECT_EQ(text, "0 1 1 2 2 3 ");
  }
}

TEST(Bootstrap, AJobWhosePathAnotherOneWantsDoesNotNoticeIt) {
  const std::string file = fresh_path("wanted");
  constexpr int kIntruder = 2;
  const Gate refused;
  const auto texts = run_processes(3, [&](int process) {
    if (process == kIntruder) {
      for (int left = 500; access(file.c_str(), F_OK) != 0 && left > 0; --left) usleep(10000);
      const std::string text = connected(options(0, 2, file, 300), gathered_squares);
      return refused.open() ? text : "nobody knows";
    }
    if (process == 1 && !refused.wait()) return std::string("too early");  // a late rank of the first job
    return connected(options(process, 2, file), gathered_squares);
  });
  EXPECT_EQ(texts, (std::vector<std::string>{"0 1 1 2 2 3 ", "0 1 1 2 2 3 ", is_taken(file)}));
}

TEST(Bootstrap, WhatCannotBeRemovedIsInTheWay) {
  const std::string folder = fresh_path("folder");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  const std::string text = connected(options(0, 2, folder), gathered_squares);
  EXPECT_EQ(text, folder +
                      " is in the way and cannot be removed: Is a directory. Fix: choose another TOKENWEAVE_BOOTSTRAP "
                      "or TwGroupConfig.bootstrap for all ranks, or remove it");
  EXPECT_EQ(rmdir(folder.c_str()), 0);
}

TEST(Bootstrap, AnAddressThatCannotBeMadeIsNotTaken) {
  const std::string text = connected(options(0, 2, "/nowhere/socket"), gathered_squares);
  EXPECT_EQ(text, "binding /nowhere/socket failed: No such file or directory");
}

TEST(Bootstrap, RefusesAddressesThatAreNoSocketNames) {
  for (const std::string& address : {std::string(), std::string("host:1"), "/" + std::string(200, 'x')}) {
    const std::string text = connected(options(0, 2, address), gathered_squares);
    EXPECT_NE(text.find("is not '/path' or '@name'"), std::string::npos) << text;
  }
}

TEST(Bootstrap, WithoutMpiItSaysHowToFindTheOthers) {
  std::string address;
  const Status status = exchange_address_by_mpi(options(0, 2, ""), &address);
  EXPECT_EQ(status.code, TW_BOOTSTRAP_ERROR);
  EXPECT_NE(status.message.find("TOKENWEAVE_BOOTSTRAP is not set"), std::string::npos);
}

TEST(Agree, GivesTheFirstFailingRanksErrorToAll) {
  const std::string address = fresh_address();
  const auto texts = run_processes(3, [&](int rank) {
    return connected(options(rank, 3, address), [&](Bootstrap& bootstrap) {
      return agree(bootstrap, "step", rank == 0 ? Status{} : error(TW_CUDA_ERROR, "no " + std::to_string(rank)))
          .message;
    });
  });
  for (const std::string& text : texts) EXPECT_EQ(text, "rank 1: no 1");
}

TEST(CompareConfigurations, NamesTheFieldAndTheRankOnEveryRank) {
  struct Case {
    std::function<void(TwGroupConfig*)> change;
    const char* field;
  };
  const std::vector<Case> cases{
      {[](TwGroupConfig* c) { c->config_hash = 8; }, "config_hash"},
      {[](TwGroupConfig* c) { c->staging_bytes = 256; }, "staging_bytes is 0 on rank 0 and 256"},
      {[](TwGroupConfig* c) { c->allow_multicast = 1; }, "allow_multicast"}};
  for (const Case& differing : cases) {
    const std::string address = fresh_address();
    const auto texts = run_processes(3, [&](int rank) {
      return connected(options(rank, 3, address), [&](Bootstrap& bootstrap) {
        TwGroupConfig config{};
        config.size = 3;
        config.config_hash = 7;
        if (rank == 2) differing.change(&config);
        return compare_configurations(bootstrap, config).message;
      });
    });
    for (const std::string& text : texts) {
      EXPECT_NE(text.find(differing.field), std::string::npos) << text;
      EXPECT_NE(text.find("on rank 2"), std::string::npos) << text;
    }
  }
}

TEST(Environment, ReadsItsVariables) {
  for (const char* name : {"TOKENWEAVE_BOOTSTRAP", "TOKENWEAVE_TIMEOUT_MS", "TOKENWEAVE_MULTICAST", "NCCL_NVLS_ENABLE",
                           "TOKENWEAVE_SYMMETRIC_MEMORY"}) {
    unsetenv(name);
  }
  EXPECT_EQ(environment().bootstrap, "");
  EXPECT_EQ(environment().timeout_ms, 30000u);
  EXPECT_TRUE(environment().multicast);
  EXPECT_EQ(environment().symmetric_memory, "vmm");
  setenv("TOKENWEAVE_SYMMETRIC_MEMORY", "nccl", 1);
  EXPECT_EQ(environment().symmetric_memory, "nccl");
  setenv("TOKENWEAVE_BOOTSTRAP", "@x", 1);
  setenv("TOKENWEAVE_TIMEOUT_MS", "70", 1);
  EXPECT_EQ(environment().bootstrap, "@x");
  EXPECT_EQ(environment().timeout_ms, 70u);
  // 2^32 must not become 0, which is no time at all.
  for (const char* timeout : {"soon", "0", "-1", "7s", "4294967296"}) {
    setenv("TOKENWEAVE_TIMEOUT_MS", timeout, 1);
    EXPECT_EQ(environment().timeout_ms, 30000u) << timeout;
  }
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  EXPECT_FALSE(environment().multicast);
  unsetenv("NCCL_NVLS_ENABLE");
  setenv("TOKENWEAVE_MULTICAST", "0", 1);
  EXPECT_FALSE(environment().multicast);
  for (const char* name :
       {"TOKENWEAVE_BOOTSTRAP", "TOKENWEAVE_TIMEOUT_MS", "TOKENWEAVE_MULTICAST", "TOKENWEAVE_SYMMETRIC_MEMORY"}) {
    unsetenv(name);
  }
}

}  // namespace
}  // namespace tokenweave::test
