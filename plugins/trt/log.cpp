#include "log.h"

#include <atomic>
#include <cstdio>
#include <mutex>

#include "tensorrt_version.h"

namespace tokenweave::trt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

struct LastError {
  std::mutex mutex;
  Status status;
};

LastError& kept() {
  static auto* error = new LastError;  // never freed: plugins may fail while the process ends
  return *error;
}

void write(Severity severity, const char* message) {
  if (nvinfer1::ILoggerFinder* const finder = logger_finder.load(); finder != nullptr) {
    if (nvinfer1::ILogger* const logger = finder->findLogger(); logger != nullptr)
      return logger->log(severity, message);
  }
  // Without a logger nobody sets a level, so only what needs attention is written.
  if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", message);
}

}  // namespace

bool has_our_logger(int32_t version) { return version / 10000 == NV_TENSORRT_MAJOR; }

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
  const bool usable = finder != nullptr && has_our_logger(tensorrt_version_at(address_inside(finder)));
  logger_finder.store(usable ? finder : nullptr);
}

void log(Severity severity, const std::string& message) noexcept {
  try {
    write(severity, ("[TokenWeave] " + message).c_str());
  } catch (...) {  // a logger that throws, or no memory: a message is not worth a process
  }
}

void log_error(const std::string& where, const Status& status) noexcept {
  try {
    const std::string text = where + ": " + status.message;
    {
      const std::lock_guard<std::mutex> lock(kept().mutex);
      kept().status = {status.code, text};
    }
    log(Severity::kERROR, text);
  } catch (...) {
  }
}

Status last_error() {
  const std::lock_guard<std::mutex> lock(kept().mutex);
  return kept().status;
}

}  // namespace tokenweave::trt
