// What the C functions of the libraries share: argument checks, and nothing thrown past them.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "status.h"
#include "tokenweave/tokenweave.h"

namespace tokenweave {

inline TwCode report(const Status& result, TwStatus* status) {
  if (status != nullptr) {
    status->code = result.code;
    std::strncpy(status->message, result.message.c_str(), sizeof status->message - 1);
    status->message[sizeof status->message - 1] = '\0';
  }
  return result.code;
}

/// Hands the Status of `body` out, whatever it throws.
template <typename Body>
TwCode guarded(TwStatus* status, Body body) noexcept {
  try {
    return report(body(), status);
  } catch (const std::bad_alloc&) {
    return report({TW_OUT_OF_MEMORY, {}}, status);
  } catch (const std::exception& exception) {
    return report({TW_INTERNAL, exception.what()}, status);
  } catch (...) {
    return report({TW_INTERNAL, {}}, status);
  }
}

/// Structs that callers fill say with which header they were compiled.
template <typename Struct>
Status check_struct(const Struct* value, const char* name) {
  if (value == nullptr) return error(TW_INVALID_ARGUMENT, std::string(name) + " is null");
  if (value->struct_bytes == sizeof(Struct)) return {};
  return error(TW_INVALID_ARGUMENT, std::string(name) + ".struct_bytes is " + std::to_string(value->struct_bytes) +
                                        ", not " + std::to_string(sizeof(Struct)) +
                                        ". Fix: build with the header of library " + twVersion());
}

}  // namespace tokenweave
