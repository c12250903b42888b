// An NCCL of maps, beside the CUDA driver of fake_driver.h: ranks as threads (fake_be_rank), any call of any rank made
// to fail.
#pragma once

#include <string>
#include <vector>

#include "nccl.h"

namespace tokenweave::test {

struct FakeNcclFailure {
  int rank = -1;
  std::string call;  ///< for example "ncclMemAlloc"
  NcclResult result = static_cast<NcclResult>(1);
};

/// What the library and the machine can do.
struct FakeNcclMachine {
  int version = 22902;
  bool windows = true;   ///< else registering succeeds and gives none
  int unreachable = -1;  ///< the rank whose memory the others do not reach
  bool multicast = true;
};

/// Forgets everything and arms one failure.
void fake_nccl_reset(const FakeNcclFailure& failure = {}, const FakeNcclMachine& machine = {});

/// What is alive. All zero when nothing leaked; what is let go of in the wrong order stays alive.
struct FakeNcclLive {
  int communicators = 0;
  int allocations = 0;
  int windows = 0;
  bool operator==(const FakeNcclLive& o) const {
    return communicators == o.communicators && allocations == o.allocations && windows == o.windows;
  }
};
FakeNcclLive fake_nccl_live();

/// The rank whose memory lies at the address; 100 for multicast; -1: nothing is there.
int fake_nccl_owner_of(const void* address);
/// The rank's calls, in their order.
std::vector<std::string> fake_nccl_calls(int rank);

const NcclTable& fake_nccl();

}  // namespace tokenweave::test
