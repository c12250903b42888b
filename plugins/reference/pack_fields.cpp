#include "pack_fields.h"

#include <cstring>
#include <string>

namespace tokenweave::reference {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

constexpr uint32_t kMagic = 0x32505754;  // "TWP2": changes with the layout

/// Before every field; its name, with a '\0', and its values follow.
struct Header {
  uint32_t name_bytes = 0;
  int32_t type = 0;
  int32_t length = 0;
};

/// 0 for a type that no plugin here has.
size_t element_bytes(int32_t type) {
  switch (static_cast<PluginFieldType>(type)) {
    case PluginFieldType::kINT8:
    case PluginFieldType::kCHAR:
      return 1;
    case PluginFieldType::kINT32:
    case PluginFieldType::kFLOAT32:
      return 4;
    case PluginFieldType::kINT64:
      return 8;
    default:
      return 0;
  }
}

void append(std::vector<uint8_t>* bytes, const void* data, size_t count) {
  if (count == 0) return;
  const auto* first = static_cast<const uint8_t*>(data);
  bytes->insert(bytes->end(), first, first + count);
}

/// Takes pieces off the front of the bytes; null when they are too few.
class Cutter {
 public:
  Cutter(const void* data, size_t bytes) : next_(static_cast<const uint8_t*>(data)), left_(bytes) {}

  const uint8_t* take(size_t count) {
    if (count > left_) return nullptr;
    const uint8_t* const piece = next_;
    next_ += count;
    left_ -= count;
    return piece;
  }
  template <typename T>
  bool take(T* value) {
    const uint8_t* const piece = take(sizeof *value);
    if (piece != nullptr) std::memcpy(value, piece, sizeof *value);
    return piece != nullptr;
  }
  bool empty() const { return left_ == 0; }

 private:
  const uint8_t* next_;
  size_t left_;
};

Status bad(const std::string& what) {
  return error(TW_INVALID_ARGUMENT, "the stored attributes are " + what + ". Fix: rebuild the engine");
}

}  // namespace

std::vector<uint8_t> pack_fields(const nvinfer1::PluginFieldCollection& fields) {
  std::vector<uint8_t> bytes;
  append(&bytes, &kMagic, sizeof kMagic);
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& field = fields.fields[i];
    const Header header{static_cast<uint32_t>(std::strlen(field.name) + 1), static_cast<int32_t>(field.type),
                        field.length};
    append(&bytes, &header, sizeof header);
    append(&bytes, field.name, header.name_bytes);
    append(&bytes, field.data, static_cast<size_t>(field.length) * element_bytes(header.type));
  }
  return bytes;
}

Status UnpackedFields::read(const void* data, size_t bytes) {
  fields_.clear();
  collection_ = {};
  Cutter cutter(data, data != nullptr ? bytes : 0);
  uint32_t magic = 0;
  if (!cutter.take(&magic) || magic != kMagic) return bad("not those of this plugin library");
  while (!cutter.empty()) {
    Header header;
    if (!cutter.take(&header)) return bad("truncated");
    const uint8_t* const name = cutter.take(header.name_bytes);
    if (name == nullptr || header.length < 0) return bad("truncated");
    const size_t size = element_bytes(header.type);
    if (size == 0 || header.name_bytes == 0 || name[header.name_bytes - 1] != '\0') return bad("corrupt");
    const uint8_t* const values = cutter.take(static_cast<size_t>(header.length) * size);
    if (values == nullptr) return bad("truncated");
    fields_.emplace_back(reinterpret_cast<const char*>(name), values, static_cast<PluginFieldType>(header.type),
                         header.length);
  }
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return {};
}

}  // namespace tokenweave::reference
