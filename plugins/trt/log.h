// Where messages go: TensorRT's logger when it gave us one, else stderr.
#pragma once

#include <NvInferRuntime.h>

#include <string>

#include "status.h"

namespace tokenweave::trt {

using Severity = nvinfer1::ILogger::Severity;

void log(Severity severity, const std::string& message) noexcept;

/// Logs an error and keeps it for twPluginLastError. `where` names the plugin.
void log_error(const std::string& where, const Status& status) noexcept;
Status last_error();

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

/// Whether a TensorRT of this version (getInferLibVersion) has the ILogger that this library was compiled with.
/// TensorRT 11 has another; everything else that the plugins use is the same there.
bool has_our_logger(int32_t version);

}  // namespace tokenweave::trt
