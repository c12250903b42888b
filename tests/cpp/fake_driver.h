// A CUDA driver of maps and counters: one machine, several ranks as threads, any call of any rank made to fail.
#pragma once

#include <string>

#include "driver.h"

namespace tokenweave::test {

struct FakeFailure {
  int rank = -1;
  std::string call;  ///< for example "cuMemMap"
  int nth = 1;       ///< which of the rank's calls fails, counted from 1
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
};

/// What is alive. All zero when nothing leaked.
struct FakeLive {
  int handles = 0;
  int reservations = 0;
  int mappings = 0;
  int bindings = 0;
  bool operator==(const FakeLive& o) const {
    return handles == o.handles && reservations == o.reservations && mappings == o.mappings && bindings == o.bindings;
  }
};

/// Forgets everything and arms one failure.
void fake_reset(const FakeFailure& failure = {});
/// Which rank the calling thread is.
void fake_be_rank(int rank);
int fake_rank();
/// Puts a rank on a GPU that it knows as `device`. Other ranks have the GPU and the device of their own number.
void fake_set_gpu(int rank, int gpu, CUdevice device);
/// Attributes that all devices report.
void fake_set_attribute(CUdevice_attribute attribute, int value);

FakeLive fake_live();
/// The rank whose cuMemCreate made the memory mapped at the address; 100 for a multicast object; -1: nothing is mapped.
int fake_owner_of(const void* address);
/// How often the rank made the call.
int fake_calls(int rank, const std::string& call);

const DriverTable& fake_driver();

}  // namespace tokenweave::test
