// From what TensorRT hands to a creator to a plugin.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <utility>

#include "fields.h"
#include "status.h"

namespace tokenweave::trt {

/// An error with the layer's name, unless that is null or "".
inline Status named(const char* layer, Status status) {
  if (!status.ok() && layer != nullptr && *layer != '\0') {
    status.message = "layer '" + std::string(layer) + "': " + status.message;
  }
  return status;
}

/// `PluginType` has kName, a constructor from Fields and TensorRTPhase, and a default constructible type Fields with
///   void visit(FieldVisitor&, TensorRTPhase)   lists the attributes of a phase
///   Status check(TensorRTPhase)                 checks them against one another, and derives what they imply
/// The error names the layer.
template <typename PluginType>
Status make_plugin(const char* layer, const nvinfer1::PluginFieldCollection* given, nvinfer1::TensorRTPhase phase,
                   std::unique_ptr<PluginType>* plugin) {
  typename PluginType::Fields fields;
  FieldReader reader(given);
  fields.visit(reader, phase);
  TW_RETURN_IF_ERROR(named(layer, reader.status()));
  TW_RETURN_IF_ERROR(named(layer, fields.check(phase)));
  *plugin = std::make_unique<PluginType>(std::move(fields), phase);
  return {};
}

}  // namespace tokenweave::trt
