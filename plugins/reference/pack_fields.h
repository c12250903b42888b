// Attributes as bytes, and back: what TensorRT stores of an IPluginV2.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"

namespace tokenweave::reference {

/// Name, type and values of every field, behind a magic number.
std::vector<uint8_t> pack_fields(const nvinfer1::PluginFieldCollection& fields);

/// Attributes that were read from bytes, which have to outlive them.
class UnpackedFields {
 public:
  /// TW_INVALID_ARGUMENT: the bytes are not those of pack_fields, or incomplete.
  Status read(const void* data, size_t bytes);
  const nvinfer1::PluginFieldCollection* collection() const { return &collection_; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace tokenweave::reference
