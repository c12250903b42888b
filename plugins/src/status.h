// Errors as values.
#pragma once

#include <string>
#include <utility>

#include "tokenweave/tokenweave.h"

namespace tokenweave {

struct [[nodiscard]] Status {
  TwCode code = TW_OK;
  std::string message;

  bool ok() const { return code == TW_OK; }
};

inline Status error(TwCode code, std::string message) { return {code, std::move(message)}; }

}  // namespace tokenweave

#define TW_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    if (auto tw_status = (expression); !tw_status.ok()) return tw_status; \
  } while (0)
