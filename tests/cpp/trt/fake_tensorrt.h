// A shared library that stands in for libnvinfer: it has a version, a logger that remembers, and a plugin registry.
#pragma once

#include <NvInferRuntime.h>

namespace tokenweave::test {

nvinfer1::ILoggerFinder* fake_logger_finder();
/// The newest message, "" when there is none; forgets it.
const char* take_logged();
/// What getInferLibVersion says.
void set_fake_version(int32_t version);
/// The only creator of the registry, found by its own name, version and namespace; null: none.
void set_fake_creator(nvinfer1::IPluginCreatorInterface* creator, const char* name_space);

}  // namespace tokenweave::test
