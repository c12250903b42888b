// Packed fields: reading and writing them, against the vectors of the Python side.
#include "attention_layers.h"
#include "packed_fields.h"

namespace tokenweave::trt {
namespace {

using nlohmann::json;
using test::attention_vectors;

size_t bytes_of_type(nvinfer1::PluginFieldType type) {
  using nvinfer1::PluginFieldType;
  if (type == PluginFieldType::kINT64) return 8;
  return type == PluginFieldType::kINT8 || type == PluginFieldType::kCHAR ? 1 : 4;
}

/// A value of a field as JSON has it.
json value_of(const nvinfer1::PluginField& field, int32_t index) {
  using nvinfer1::PluginFieldType;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(field.data) % bytes_of_type(field.type), 0u);
  switch (field.type) {
    case PluginFieldType::kINT8:
      return static_cast<const int8_t*>(field.data)[index];
    case PluginFieldType::kCHAR:
      return static_cast<const uint8_t*>(field.data)[index];
    case PluginFieldType::kINT32:
      return static_cast<const int32_t*>(field.data)[index];
    case PluginFieldType::kINT64:
      return static_cast<const int64_t*>(field.data)[index];
    default:
      return static_cast<const float*>(field.data)[index];
  }
}

TEST(PackedFields, AreThoseOfTheVectors) {
  ASSERT_EQ(attention_vectors()["packed"].size(), 3u);
  for (const json& one : attention_vectors()["packed"]) {
    PackedFields fields;
    const Status status = PackedFields::read(test::bytes_of(one["packed_hex"]), &fields);
    ASSERT_TRUE(status.ok()) << status.message;
    PackedFields moved = std::move(fields);
    const nvinfer1::PluginFieldCollection& given = *moved.collection();
    EXPECT_EQ(PackedFields::write(given), test::bytes_of(one["packed_hex"]));
    ASSERT_EQ(given.nbFields, static_cast<int32_t>(one["fields"].size()));
    for (int32_t i = 0; i < given.nbFields; ++i) {
      const json& expected = one["fields"][static_cast<size_t>(i)];
      EXPECT_EQ(given.fields[i].name, expected["name"]);
      EXPECT_EQ(static_cast<int32_t>(given.fields[i].type), expected["type"]);
      json values = json::array();
      for (int32_t k = 0; k < given.fields[i].length; ++k) values.push_back(value_of(given.fields[i], k));
      EXPECT_EQ(values, expected["values"]) << expected["name"];
    }
  }
}

TEST(PackedFields, FindNumbersByName) {
  for (const json& one : attention_vectors()["packed"]) {
    PackedFields fields;
    ASSERT_TRUE(PackedFields::read(test::bytes_of(one["packed_hex"]), &fields).ok());
    EXPECT_EQ(fields.int32("layer_idx", -1), one["name"] == "lists" ? 17 : -1);
    EXPECT_EQ(fields.int32("group", -1), -1);  // a list
    EXPECT_EQ(fields.int32("flag", -7), -7);   // INT8
  }
}

TEST(PackedFields, RefuseWhatTheVectorsRefuse) {
  EXPECT_EQ(attention_vectors()["refused_packed"].size(), 13u);
  for (const json& one : attention_vectors()["refused_packed"]) {
    PackedFields fields;
    const Status status = PackedFields::read(test::bytes_of(one["packed_hex"]), &fields);
    EXPECT_EQ(status.code, TW_INVALID_ARGUMENT) << one["name"];
    EXPECT_EQ(status.message, one["message"]);
    EXPECT_EQ(fields.collection()->nbFields, 0);
  }
}

TEST(PackedFields, AreRefusedAtEveryTruncation) {
  const std::vector<uint8_t> packed = PackedFields::write(
      *test::FieldList().set("group", {3, 1}).set("eps", 0.5f).flag("bias", 1).bytes("table", {9, 8, 7}).collection());
  PackedFields fields;
  ASSERT_TRUE(PackedFields::read(packed, &fields).ok());
  EXPECT_EQ(fields.collection()->nbFields, 4);
  for (size_t size = 0; size < packed.size(); ++size) {  // also between two fields
    EXPECT_EQ(PackedFields::read({packed.data(), packed.data() + size}, &fields).code, TW_INVALID_ARGUMENT) << size;
    EXPECT_EQ(fields.collection()->nbFields, 0);
  }
}

TEST(PackedFields, OfNoFieldsAreAHeader) {
  PackedFields fields;
  const std::vector<uint8_t> packed = PackedFields::write({0, nullptr});
  EXPECT_EQ(packed.size(), 8u);
  EXPECT_TRUE(PackedFields::read(packed, &fields).ok());
  EXPECT_EQ(fields.collection()->nbFields, 0);
}

}  // namespace
}  // namespace tokenweave::trt
