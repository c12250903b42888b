// What is asked of a TwDataType.
#pragma once

#include <cstddef>

#include "tokenweave/tokenweave.h"

namespace tokenweave {

inline size_t element_bytes(TwDataType dtype) { return dtype == TW_FLOAT ? 4 : 2; }

}  // namespace tokenweave
