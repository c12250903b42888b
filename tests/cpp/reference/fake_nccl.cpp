#include "fake_nccl.h"

#include <atomic>
#include <cstring>
#include <thread>

namespace tokenweave::test {

FakeNccl& nccl() {
  static FakeNccl fake;
  return fake;
}

namespace {

struct UniqueId {
  char internal[128];
};

int answer(const char* function) { return nccl().failing == function ? 2 : 0; }

void write_down(const std::string& call) { nccl().calls.push_back(call); }

void write_down_collective(const std::string& call, const void* input, void* output) {
  static std::atomic<int> inside{0};
  if (++inside > 1) {  // a communicator's calls may not overlap
    nccl().at_once = inside;
  } else {
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    write_down(call);
    nccl().input = input;
    nccl().output = output;
  }
  --inside;
}

}  // namespace
}  // namespace tokenweave::test

using namespace tokenweave::test;

#pragma GCC visibility push(default)
extern "C" {

const char* ncclGetErrorString(int) { return "unhandled system error"; }

int ncclGetVersion(int* version) {
  *version = 22809;
  return answer("ncclGetVersion");
}

int ncclGetUniqueId(UniqueId* id) {
  std::strncpy(id->internal, nccl().id.c_str(), sizeof id->internal - 1);
  return answer("ncclGetUniqueId");
}

int ncclCommInitRank(void** communicator, int size, UniqueId id, int rank) {
  write_down("init " + std::to_string(size) + " ranks as " + std::to_string(rank) + " by " + id.internal);
  const int result = answer("ncclCommInitRank");
  if (result == 0) {
    *communicator = &nccl();
    ++nccl().communicators;
  }
  return result;
}

int ncclCommDestroy(void*) {
  --nccl().communicators;
  ++nccl().destroys;
  return 0;
}

int ncclCommAbort(void*) {
  write_down("abort");
  --nccl().communicators;
  return 0;
}

int ncclCommGetAsyncError(void*, int* error) {
  *error = nccl().async_error;
  return answer("ncclCommGetAsyncError");
}

int ncclMemAlloc(void** memory, size_t bytes) {
  write_down("allocate " + std::to_string(bytes));
  *memory = nccl().memory;
  return answer("ncclMemAlloc");
}

int ncclMemFree(void*) {
  write_down("free");
  return 0;
}

int ncclCommWindowRegister(void*, void* memory, size_t bytes, void** window, int flags) {
  write_down("register " + std::to_string(bytes) + (flags == 1 ? "" : ", not symmetric"));
  const int result = answer("ncclCommWindowRegister");
  *window = result == 0 && nccl().windows ? memory : nullptr;
  return result;
}

int ncclCommWindowDeregister(void*, void*) {
  write_down("deregister");
  return 0;
}

int ncclAllReduce(const void* input, void* output, size_t count, int type, int op, void*, cudaStream_t) {
  write_down_collective(
      "sum " + std::to_string(count) + " of type " + std::to_string(type) + (op == 0 ? "" : ", not a sum"), input,
      output);
  return answer("ncclAllReduce");
}

int ncclAllGather(const void* input, void* output, size_t count, int type, void*, cudaStream_t) {
  write_down_collective("gather " + std::to_string(count) + " of type " + std::to_string(type), input, output);
  return answer("ncclAllGather");
}

}  // extern "C"
#pragma GCC visibility pop
