#include "fields.h"

#include <algorithm>
#include <cstring>

namespace tokenweave::trt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace {

const char* name_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kFLOAT32:
      return "FLOAT32";
    case PluginFieldType::kINT8:
      return "INT8";
    case PluginFieldType::kINT32:
      return "INT32";
    case PluginFieldType::kINT64:
      return "INT64";
    case PluginFieldType::kCHAR:
      return "CHAR";
    default:
      return "another type";
  }
}

/// Copied out, because nobody promises that serialised data is aligned.
template <typename T>
T value_of(const PluginField& field, int32_t index = 0) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(field.data) + index * sizeof(T), sizeof(T));
  return value;
}

std::string quoted(const char* name) { return std::string("field '") + name + "'"; }

std::string bound(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string outside(const char* name, const std::string& value, const std::string& low, const std::string& high) {
  return quoted(name) + " = " + value + " is outside " + low + ".." + high;
}

std::string outside(const char* name, int32_t value, int32_t low, int32_t high) {
  if (high != kNoLimit) return outside(name, std::to_string(value), std::to_string(low), std::to_string(high));
  return quoted(name) + " = " + std::to_string(value) + " is below " + std::to_string(low);
}

}  // namespace

Status check_type_id(int32_t type_id) {
  if (type_id == TW_FLOAT || type_id == TW_HALF || type_id == TW_BFLOAT16) return {};
  return error(TW_INVALID_ARGUMENT, "field 'type_id' = " + std::to_string(type_id) +
                                        " is not one of 0 (float32), 1 (float16), 7 (bfloat16)");
}

FieldReader::FieldReader(const PluginFieldCollection* fields) {
  for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
    const PluginField& field = fields->fields[i];
    const auto same = [&field](const Given& other) { return std::strcmp(other.field.name, field.name) == 0; };
    if (field.name == nullptr) {
      fail("a field has no name");
    } else if (std::any_of(given_.begin(), given_.end(), same)) {
      fail(quoted(field.name) + " is given twice");
    } else {
      given_.push_back({field});
    }
  }
}

void FieldReader::fail(const std::string& what) {
  if (status_.ok()) status_ = error(TW_INVALID_ARGUMENT, what);
}

const PluginField* FieldReader::find(const char* name, PluginFieldType type, Presence presence, bool scalar) {
  const auto found = std::find_if(given_.begin(), given_.end(),
                                  [name](const Given& given) { return std::strcmp(given.field.name, name) == 0; });
  if (found == given_.end()) {
    if (presence == Presence::kRequired) fail(quoted(name) + " is missing");
    return nullptr;
  }
  found->used = true;
  const PluginField& field = found->field;
  if (field.type != type) {
    fail(quoted(name) + " has type " + name_of(field.type) + ", expected " + name_of(type));
  } else if (scalar && field.length != 1) {
    fail(quoted(name) + " has " + std::to_string(field.length) + " values, expected 1");
  } else if (field.length < 0 || (field.length > 0 && field.data == nullptr)) {
    fail(quoted(name) + " has no data");
  } else {
    return &field;
  }
  return nullptr;
}

void FieldReader::int8(const char* name, int8_t* value, int8_t low, int8_t high, Presence presence) {
  const PluginField* field = find(name, PluginFieldType::kINT8, presence, true);
  if (field == nullptr) return;
  *value = value_of<int8_t>(*field);
  if (*value < low || *value > high) fail(outside(name, *value, low, high));
}

void FieldReader::int32(const char* name, int32_t* value, int32_t low, int32_t high, Presence presence) {
  const PluginField* field = find(name, PluginFieldType::kINT32, presence, true);
  if (field == nullptr) return;
  *value = value_of<int32_t>(*field);
  if (*value < low || *value > high) fail(outside(name, *value, low, high));
}

void FieldReader::int32s(const char* name, std::vector<int32_t>* values, int32_t low, Presence presence) {
  const PluginField* field = find(name, PluginFieldType::kINT32, presence, false);
  if (field == nullptr) return;
  if (field->length == 0 && presence == Presence::kRequired) return fail(quoted(name) + " has no values");
  values->clear();
  for (int32_t i = 0; i < field->length; ++i) {
    values->push_back(value_of<int32_t>(*field, i));
    if (values->back() < low) fail(outside(name, values->back(), low, kNoLimit));
  }
}

void FieldReader::float32(const char* name, float* value, float low, float high, Presence presence) {
  const PluginField* field = find(name, PluginFieldType::kFLOAT32, presence, true);
  if (field == nullptr) return;
  *value = value_of<float>(*field);
  if (!(*value >= low && *value <= high)) fail(outside(name, bound(*value), bound(low), bound(high)));  // NaN as well
}

void FieldReader::chars(const char* name, std::vector<uint8_t>* bytes) {
  const PluginField* field = find(name, PluginFieldType::kCHAR, Presence::kOptional, false);
  if (field == nullptr) return;
  const auto* data = static_cast<const uint8_t*>(field->data);
  bytes->assign(data, data + field->length);
}

Status FieldReader::status() const {
  if (!status_.ok()) return status_;
  const auto unknown = std::find_if(given_.begin(), given_.end(), [](const Given& given) { return !given.used; });
  return unknown == given_.end() ? Status{} : error(TW_INVALID_ARGUMENT, quoted(unknown->field.name) + " is unknown");
}

void FieldWriter::int8(const char* name, int8_t* value, int8_t, int8_t, Presence) {
  fields_.emplace_back(name, value, PluginFieldType::kINT8, 1);
}

void FieldWriter::int32(const char* name, int32_t* value, int32_t, int32_t, Presence) {
  fields_.emplace_back(name, value, PluginFieldType::kINT32, 1);
}

void FieldWriter::int32s(const char* name, std::vector<int32_t>* values, int32_t, Presence) {
  fields_.emplace_back(name, values->data(), PluginFieldType::kINT32, static_cast<int32_t>(values->size()));
}

void FieldWriter::float32(const char* name, float* value, float, float, Presence) {
  fields_.emplace_back(name, value, PluginFieldType::kFLOAT32, 1);
}

void FieldWriter::chars(const char* name, std::vector<uint8_t>* bytes) {
  fields_.emplace_back(name, bytes->data(), PluginFieldType::kCHAR, static_cast<int32_t>(bytes->size()));
}

const PluginFieldCollection* FieldWriter::values() {
  const auto empty = [](const PluginField& field) { return field.length == 0; };
  fields_.erase(std::remove_if(fields_.begin(), fields_.end(), empty), fields_.end());
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

const PluginFieldCollection* FieldWriter::names() {
  for (PluginField& field : fields_) field = {field.name, nullptr, field.type, 1};
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

}  // namespace tokenweave::trt
