// A shared library that stands in for libnvinfer: it has a version, and a logger that remembers.
#pragma once

#include <NvInferRuntime.h>

namespace tokenweave::test {

nvinfer1::ILoggerFinder* fake_logger_finder();
/// The newest message, "" when there is none; forgets it.
const char* take_logged();
/// What getInferLibVersion says.
void set_fake_version(int32_t version);

}  // namespace tokenweave::test
