// What twPluginGetCounters reports. Process-wide, because the C interface has no handle for one engine.
#pragma once

#include <atomic>
#include <cstdint>

namespace tokenweave::trt {

struct Counters {
  using Count = std::atomic<uint64_t>;
  Count overlapped{0}, captured{0}, in_line{0}, empty{0}, joins{0}, staged{0}, alias_copies{0}, unkept_inputs{0},
      fabric_fallbacks{0}, offset_fallbacks{0}, refused_steps{0}, unfinished_steps{0}, while_building{0};
};

Counters& counters();

}  // namespace tokenweave::trt
