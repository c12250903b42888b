// A shared library that stands in for NCCL (it has its file name and functions): it writes down what it is asked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tokenweave::test {

struct FakeNccl {
  std::string failing;             ///< the function that fails, for example "ncclCommInitRank"
  std::string id = "made here";    ///< of the communicators that start in this process
  int async_error = 0;             ///< what ncclCommGetAsyncError finds
  std::vector<std::string> calls;  ///< for example "init 2 ranks as 1 by id"
  const void* input = nullptr;     ///< of the newest collective
  void* output = nullptr;          ///< the same
  int communicators = 0;           ///< alive
  int destroys = 0;
  uint8_t memory[1] = {};  ///< what ncclMemAlloc gives: its address
  bool windows = true;     ///< else registering succeeds and gives none
  int at_once = 0;         ///< threads that were in a collective beside another
};

__attribute__((visibility("default"))) FakeNccl& nccl();

}  // namespace tokenweave::test
