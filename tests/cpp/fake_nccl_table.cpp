#include "fake_nccl_table.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "fake_driver.h"

namespace tokenweave::test {
namespace {

constexpr auto kFailed = static_cast<NcclResult>(1);
constexpr auto kInvalid = static_cast<NcclResult>(4);
constexpr auto kRankIsGone = static_cast<NcclResult>(6);
constexpr int kMulticastOwner = 100;
constexpr const char* kId = "the id of rank 0";

struct State {
  FakeNcclFailure failure;
  FakeNcclMachine machine;
  std::map<int, std::vector<std::string>> calls;  // of a rank
  std::map<NcclComm, int> communicators;          // -> rank; as all below
  std::map<void*, int> allocations;
  std::map<NcclWindow, int> windows;
  size_t ranks = 0;       // that started a communicator
  size_t registered = 0;  // that came to the end of registering
  bool aborted = false;   // by any rank
};

std::mutex mutex;
std::condition_variable changed;
State state;

/// One of each kind a rank: enough for one group.
template <typename Pointer>
Pointer address_of(int kind, int rank) {
  return reinterpret_cast<Pointer>((uint64_t{static_cast<unsigned>(kind)} << 40) +
                                   (uint64_t{static_cast<unsigned>(rank)} << 32));
}
NcclComm communicator_of(int rank) { return address_of<NcclComm>(1, rank); }
void* memory_of(int rank) { return address_of<void*>(2, rank); }
NcclWindow window_of(int rank) { return address_of<NcclWindow>(3, rank); }
void* const kMulticast = address_of<void*>(4, 0);

template <typename Kind, typename Key>
bool is_mine(const Kind& kind, Key key) {
  const auto it = kind.find(key);
  return it != kind.end() && it->second == fake_rank();
}

/// Writes the call down; not kNcclSuccess when it is the one that must fail.
NcclResult enter(const char* call) {
  state.calls[fake_rank()].push_back(call);
  return state.failure.rank == fake_rank() && state.failure.call == call ? state.failure.result : kNcclSuccess;
}

#define FAKE_ENTER(call)                    \
  std::unique_lock<std::mutex> lock(mutex); \
  if (const NcclResult result = enter(call); result != kNcclSuccess) return result

const char* GetErrorString(NcclResult result) {
  return result == kFailed ? "made to fail" : result == kRankIsGone ? "a rank is gone" : "used in a wrong way";
}

NcclResult GetVersion(int* version) {
  FAKE_ENTER("ncclGetVersion");
  *version = state.machine.version;
  return kNcclSuccess;
}
NcclResult GetUniqueId(NcclUniqueId* id) {
  FAKE_ENTER("ncclGetUniqueId");
  std::strcpy(id->internal, kId);
  return kNcclSuccess;
}
NcclResult CommInitRank(NcclComm* communicator, int, NcclUniqueId id, int rank) {
  const std::lock_guard<std::mutex> lock(mutex);
  const NcclResult result = enter("ncclCommInitRank");
  if (result != kNcclSuccess && result != kNcclInProgress) return result;
  if (rank != fake_rank() || std::strcmp(id.internal, kId) != 0) return kInvalid;
  *communicator = communicator_of(rank);
  state.communicators[*communicator] = rank;
  ++state.ranks;
  return result;
}
NcclResult CommAbort(NcclComm communicator) {
  FAKE_ENTER("ncclCommAbort");
  if (!is_mine(state.communicators, communicator) || state.windows.count(window_of(fake_rank())) != 0) return kInvalid;
  state.communicators.erase(communicator);
  state.aborted = true;
  changed.notify_all();
  return kNcclSuccess;
}
NcclResult MemAlloc(void** memory, size_t bytes) {
  *memory = address_of<void*>(9, 9);  // of nothing, where the call fails
  FAKE_ENTER("ncclMemAlloc");
  if (bytes == 0) return kInvalid;
  *memory = memory_of(fake_rank());
  state.allocations[*memory] = fake_rank();
  return kNcclSuccess;
}
NcclResult MemFree(void* memory) {
  FAKE_ENTER("ncclMemFree");
  if (!is_mine(state.allocations, memory) || state.windows.count(window_of(fake_rank())) != 0) return kInvalid;
  state.allocations.erase(memory);
  return kNcclSuccess;
}
NcclResult CommWindowRegister(NcclComm communicator, void* memory, size_t, NcclWindow* window, NcclWindowFlags flags) {
  FAKE_ENTER("ncclCommWindowRegister");
  if (!is_mine(state.communicators, communicator) || !is_mine(state.allocations, memory) || flags != 0) return kInvalid;
  *window = nullptr;
  if (!state.machine.windows) return kNcclSuccess;
  // Like NCCL's: no rank returns before all have registered, unless one aborts.
  ++state.registered;
  changed.notify_all();
  const auto all_did = [] { return state.registered == state.ranks; };
  if (!changed.wait_for(lock, std::chrono::seconds(3), [&] { return all_did() || state.aborted; })) return kInvalid;
  if (!all_did()) return kRankIsGone;
  *window = window_of(fake_rank());
  state.windows[*window] = fake_rank();
  return kNcclSuccess;
}
NcclResult CommWindowDeregister(NcclComm communicator, NcclWindow window) {
  FAKE_ENTER("ncclCommWindowDeregister");
  if (!is_mine(state.communicators, communicator) || !is_mine(state.windows, window)) return kInvalid;
  state.windows.erase(window);
  return kNcclSuccess;
}
NcclResult GetPeerDevicePointer(NcclWindow window, size_t offset, int rank, void** address) {
  FAKE_ENTER("ncclGetPeerDevicePointer");
  if (!is_mine(state.windows, window) || state.windows.count(window_of(rank)) == 0 || offset != 0) return kInvalid;
  *address = rank == state.machine.unreachable ? nullptr : memory_of(rank);
  return kNcclSuccess;
}
NcclResult GetLsaMultimemDevicePointer(NcclWindow window, size_t offset, void** address) {
  FAKE_ENTER("ncclGetLsaMultimemDevicePointer");
  if (!is_mine(state.windows, window) || offset != 0) return kInvalid;
  *address = state.machine.multicast ? kMulticast : nullptr;
  return kNcclSuccess;
}

}  // namespace

void fake_nccl_reset(const FakeNcclFailure& failure, const FakeNcclMachine& machine) {
  const std::lock_guard<std::mutex> lock(mutex);
  state = State{};
  state.failure = failure;
  state.machine = machine;
}

FakeNcclLive fake_nccl_live() {
  const std::lock_guard<std::mutex> lock(mutex);
  return {static_cast<int>(state.communicators.size()), static_cast<int>(state.allocations.size()),
          static_cast<int>(state.windows.size())};
}

int fake_nccl_owner_of(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (address == kMulticast) return kMulticastOwner;
  const auto it = state.allocations.find(const_cast<void*>(address));
  return it == state.allocations.end() ? -1 : it->second;
}

std::vector<std::string> fake_nccl_calls(int rank) {
  const std::lock_guard<std::mutex> lock(mutex);
  return state.calls[rank];
}

const NcclTable& fake_nccl() {
  static const NcclTable table{GetErrorString,
                               GetVersion,
                               GetUniqueId,
                               CommInitRank,
                               CommAbort,
                               nullptr,
                               nullptr,
                               nullptr,
                               MemAlloc,
                               MemFree,
                               CommWindowRegister,
                               CommWindowDeregister,
                               GetPeerDevicePointer,
                               GetLsaMultimemDevicePointer};
  return table;
}

}  // namespace tokenweave::test
