#include "packed_fields.h"

#include <algorithm>
#include <cstring>

namespace tokenweave::trt {
namespace {

using nvinfer1::PluginFieldType;

constexpr char kMagic[4] = {'T', 'W', 'P', 'F'};
constexpr uint16_t kLayoutVersion = 1;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, "packed plugin fields " + what); }

void append(std::vector<uint8_t>* bytes, const void* data, size_t count) {
  const auto* const first = static_cast<const uint8_t*>(data);
  bytes->insert(bytes->end(), first, first + count);
}
template <typename T>
void append(std::vector<uint8_t>* bytes, T value) {
  append(bytes, &value, sizeof value);
}

/// Takes little-endian values, which this library's machines have, one after the other.
class Cursor {
 public:
  explicit Cursor(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}

  size_t left() const { return bytes_.size() - at_; }
  /// The next `count` bytes, null when there are fewer.
  const uint8_t* take(size_t count) {
    if (count > left()) return nullptr;
    const uint8_t* const data = bytes_.data() + at_;
    at_ += count;
    return data;
  }
  template <typename T>
  bool take(T* value) {
    const uint8_t* const data = take(sizeof(T));
    if (data != nullptr) std::memcpy(value, data, sizeof(T));
    return data != nullptr;
  }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

/// Bytes of one value, 0 for types that the layout does not have.
size_t size_of(PluginFieldType type) {
  switch (type) {
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

}  // namespace

std::vector<uint8_t> PackedFields::write(const nvinfer1::PluginFieldCollection& fields) {
  std::vector<uint8_t> packed;
  append(&packed, kMagic, sizeof kMagic);
  append(&packed, kLayoutVersion);
  append(&packed, static_cast<uint16_t>(fields.nbFields));
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const nvinfer1::PluginField& field = fields.fields[i];
    const size_t name_bytes = std::strlen(field.name);
    append(&packed, static_cast<uint16_t>(name_bytes));
    append(&packed, static_cast<uint8_t>(field.type));
    append(&packed, uint8_t{0});
    append(&packed, static_cast<uint32_t>(field.length));
    append(&packed, field.name, name_bytes);
    append(&packed, field.data, static_cast<size_t>(field.length) * size_of(field.type));
  }
  return packed;
}

Status PackedFields::read(const std::vector<uint8_t>& packed, PackedFields* fields) {
  *fields = {};
  Cursor cursor(packed);
  const uint8_t* const magic = cursor.take(sizeof kMagic);
  uint16_t version = 0, count = 0;
  if (magic == nullptr || std::memcmp(magic, kMagic, sizeof kMagic) != 0) return bad("have a wrong magic");
  if (!cursor.take(&version) || !cursor.take(&count)) return bad("are cut short");
  if (version != kLayoutVersion) return bad("have layout " + std::to_string(version) + ", expected 1");

  PackedFields result;
  for (int i = 0; i < count; ++i) {
    uint16_t name_bytes = 0;
    uint8_t type = 0, zero = 0;
    uint32_t length = 0;
    if (!cursor.take(&name_bytes) || !cursor.take(&type) || !cursor.take(&zero) || !cursor.take(&length)) {
      return bad("are cut short");
    }
    const size_t value_bytes = size_of(static_cast<PluginFieldType>(type));
    if (value_bytes == 0) return bad("have a field of type " + std::to_string(type));
    const auto* const name = reinterpret_cast<const char*>(cursor.take(name_bytes));
    const uint8_t* const data = cursor.take(length * value_bytes);
    if (name == nullptr || data == nullptr) return bad("are cut short");
    Field field{std::string(name, name_bytes), static_cast<PluginFieldType>(type), static_cast<int32_t>(length), {}};
    const auto same = [&field](const Field& other) { return other.name == field.name; };
    if (field.name.empty() || zero != 0 || std::any_of(result.fields_.begin(), result.fields_.end(), same)) {
      return bad("have a bad head of field '" + field.name + "'");
    }
    field.data.resize((length * value_bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    if (length > 0) std::memcpy(field.data.data(), data, length * value_bytes);
    result.fields_.push_back(std::move(field));
  }
  if (cursor.left() > 0) return bad("have " + std::to_string(cursor.left()) + " bytes too many");
  *fields = std::move(result);
  return {};
}

const nvinfer1::PluginFieldCollection* PackedFields::collection() {
  given_.clear();
  for (const Field& field : fields_)
    given_.emplace_back(field.name.c_str(), field.data.data(), field.type, field.length);
  collection_ = {static_cast<int32_t>(given_.size()), given_.data()};
  return &collection_;
}

int32_t PackedFields::int32(const char* name, int32_t absent) const {
  const auto found = std::find_if(fields_.begin(), fields_.end(), [name](const Field& field) {
    return field.name == name && field.type == PluginFieldType::kINT32 && field.length == 1;
  });
  if (found == fields_.end()) return absent;
  int32_t value = 0;
  std::memcpy(&value, found->data.data(), sizeof value);
  return value;
}

}  // namespace tokenweave::trt
