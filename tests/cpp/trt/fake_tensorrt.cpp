#include "fake_tensorrt.h"

#include <string>

namespace tokenweave::test {
namespace {

int32_t version = 100600;
std::string logged, taken;

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    logged = std::to_string(static_cast<int>(severity)) + " " + message;
  }
};

struct Finder final : nvinfer1::ILoggerFinder {
  nvinfer1::ILogger* findLogger() override {
    static Logger logger;
    return &logger;
  }
};

}  // namespace

nvinfer1::ILoggerFinder* fake_logger_finder() {
  static Finder finder;
  return &finder;
}

const char* take_logged() {
  taken = std::move(logged);
  logged.clear();
  return taken.c_str();
}

void set_fake_version(int32_t value) { version = value; }

}  // namespace tokenweave::test

extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() noexcept {
  return tokenweave::test::version;
}
