#pragma once

#include <cstdint>

namespace tokenweave::reference {

/// The row that holds `item`: the last one that starts at or before it. `starts` ascends; item < starts[rows].
__device__ __forceinline__ int32_t row_of(const int32_t* starts, int32_t rows, int32_t item) {
  int32_t low = 0, high = rows - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (starts[middle] <= item) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace tokenweave::reference
