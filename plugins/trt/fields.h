// A plugin's attributes: each plugin lists its own once (`visit`), and that list reads, checks, writes and names them.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "status.h"

namespace tokenweave::trt {

inline constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();

/// Whether a field 'type_id' is the number of a DataType that kernels compute in.
Status check_type_id(int32_t type_id);

/// An attribute that is optional keeps its value when it is not given.
enum class Presence { kRequired, kOptional };

/// The types of attributes that plugins have. Ranges are inclusive.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void int8(const char* name, int8_t* value, int8_t low, int8_t high,
                    Presence presence = Presence::kRequired) = 0;
  virtual void int32(const char* name, int32_t* value, int32_t low, int32_t high,
                     Presence presence = Presence::kRequired) = 0;
  /// A list, which may be empty only where it is optional: what is stored of an empty one is nothing.
  virtual void int32s(const char* name, std::vector<int32_t>* values, int32_t low,
                      Presence presence = Presence::kRequired) = 0;
  virtual void float32(const char* name, float* value, float low, float high,
                       Presence presence = Presence::kRequired) = 0;
  /// Bytes. May be absent: none.
  virtual void chars(const char* name, std::vector<uint8_t>* bytes) = 0;

  /// INT8, 0 or 1. May be absent: 0.
  void flag(const char* name, int8_t* value) { int8(name, value, 0, 1, Presence::kOptional); }
};

/// Takes the values from what TensorRT hands to a creator.
class FieldReader final : public FieldVisitor {
 public:
  explicit FieldReader(const nvinfer1::PluginFieldCollection* fields);

  void int8(const char* name, int8_t* value, int8_t low, int8_t high, Presence presence) override;
  void int32(const char* name, int32_t* value, int32_t low, int32_t high, Presence presence) override;
  void int32s(const char* name, std::vector<int32_t>* values, int32_t low, Presence presence) override;
  void float32(const char* name, float* value, float low, float high, Presence presence) override;
  void chars(const char* name, std::vector<uint8_t>* bytes) override;

  /// The first thing that was wrong: a field that is missing, unknown, given twice, of another type, or out of range.
  Status status() const;

 private:
  struct Given {
    nvinfer1::PluginField field;
    bool used = false;
  };
  /// Null when there is none, or it is no good; then the error is noted.
  const nvinfer1::PluginField* find(const char* name, nvinfer1::PluginFieldType type, Presence presence, bool scalar);
  void fail(const std::string& what);

  std::vector<Given> given_;
  Status status_;
};

/// Points into the values that it visits, which have to outlive it.
class FieldWriter final : public FieldVisitor {
 public:
  void int8(const char* name, int8_t* value, int8_t low, int8_t high, Presence presence) override;
  void int32(const char* name, int32_t* value, int32_t low, int32_t high, Presence presence) override;
  void int32s(const char* name, std::vector<int32_t>* values, int32_t low, Presence presence) override;
  void float32(const char* name, float* value, float low, float high, Presence presence) override;
  void chars(const char* name, std::vector<uint8_t>* bytes) override;

  /// For serialisation. Lists and bytes that are empty are left out: TensorRT need not carry a field without data.
  const nvinfer1::PluginFieldCollection* values();
  /// Names and types alone, for a creator.
  const nvinfer1::PluginFieldCollection* names();

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace tokenweave::trt
