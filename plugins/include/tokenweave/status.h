/// C++: errors as values. Every function of these headers that can fail returns a Status or a Result.
#pragma once

#include <optional>
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

/// A value, or the error that there is instead of it.
template <typename T>
class [[nodiscard]] Result {
 public:
  // Not explicit: a function returns either.
  Result(T&& value) : value_(std::move(value)) {}
  Result(Status failure) : status_(std::move(failure)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  /// Only when ok.
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace tokenweave

#define TW_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    if (auto tw_status = (expression); !tw_status.ok()) return tw_status; \
  } while (0)
