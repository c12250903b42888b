// What a creator is given.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tokenweave::test {

using nvinfer1::PluginFieldType;

/// A creator's arguments; keeps the values alive.
class FieldList {
 public:
  FieldList& set(const std::string& name, std::vector<int32_t> values) {
    return put(name, PluginFieldType::kINT32, values);
  }
  FieldList& set(const std::string& name, int32_t value) { return set(name, std::vector<int32_t>{value}); }
  FieldList& set(const std::string& name, float value) {
    return put(name, PluginFieldType::kFLOAT32, std::vector<float>{value});
  }
  FieldList& flag(const std::string& name, int value) {
    return put(name, PluginFieldType::kINT8, std::vector<int8_t>{static_cast<int8_t>(value)});
  }
  FieldList& bytes(const std::string& name, std::vector<uint8_t> value) {
    return put(name, PluginFieldType::kCHAR, value);
  }
  FieldList& remove(const std::string& name) {
    entries_.erase(std::remove_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.name == name; }),
                   entries_.end());
    return *this;
  }
  bool is_set(const std::string& flag) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const Entry& e) { return e.name == flag && e.data[0] != 0; });
  }

  const nvinfer1::PluginFieldCollection* collection() const {
    fields_.clear();
    for (const Entry& e : entries_) fields_.emplace_back(e.name.c_str(), e.data.data(), e.type, e.length);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  }

 private:
  struct Entry {
    std::string name;
    PluginFieldType type;
    std::vector<uint8_t> data;
    int32_t length;
  };
  template <typename T>
  FieldList& put(const std::string& name, PluginFieldType type, const std::vector<T>& values) {
    const auto* data = reinterpret_cast<const uint8_t*>(values.data());
    return put(Entry{name, type, {data, data + values.size() * sizeof(T)}, static_cast<int32_t>(values.size())});
  }
  FieldList& put(Entry entry) {
    remove(entry.name);
    entries_.push_back(std::move(entry));
    return *this;
  }

  std::vector<Entry> entries_;
  mutable std::vector<nvinfer1::PluginField> fields_;
  mutable nvinfer1::PluginFieldCollection collection_;
};

}  // namespace tokenweave::test
