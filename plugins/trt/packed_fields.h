// The fields of one plugin as bytes: inside a field of another, or in an engine. Layout:
// trtllm_tokenweave/recorder/packed_fields.py.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace tokenweave::trt {

class PackedFields {
 public:
  /// Fields of INT8, INT32, INT64, FLOAT32 and CHAR; their names and number fit 16 bits.
  static std::vector<uint8_t> write(const nvinfer1::PluginFieldCollection& fields);
  /// TW_INVALID_ARGUMENT: not what write() makes, or only a part of it. Says what is wrong, not how to fix it.
  static Status read(const std::vector<uint8_t>& packed, PackedFields* fields);

  /// For a creator; valid as long as this object.
  const nvinfer1::PluginFieldCollection* collection();
  /// The value of an INT32 field of one value, else `absent`.
  int32_t int32(const char* name, int32_t absent) const;

 private:
  struct Field {
    std::string name;
    nvinfer1::PluginFieldType type{};
    int32_t length = 0;
    std::vector<uint64_t> data;  // words, because creators read values where they lie
  };

  std::vector<Field> fields_;
  std::vector<nvinfer1::PluginField> given_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace tokenweave::trt
