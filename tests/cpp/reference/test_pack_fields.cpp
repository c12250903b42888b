// Attributes as bytes: what is stored comes back, and nothing else is taken for it.
#include "pack_fields.h"
#include "v2_layers.h"

namespace tokenweave::test {
namespace {

std::vector<uint8_t> sample() {
  const FieldList fields = FieldList().set("group", {3, 1}).set("eps", 0.5f).flag("bias", 1).bytes("table", {9, 8, 7});
  return reference::pack_fields(*fields.collection());
}

TEST(PackFields, ComeBack) {
  const std::vector<uint8_t> bytes = sample();
  reference::UnpackedFields unpacked;
  const Status status = unpacked.read(bytes.data(), bytes.size());
  ASSERT_TRUE(status.ok()) << status.message;
  const nvinfer1::PluginFieldCollection& fields = *unpacked.collection();
  ASSERT_EQ(fields.nbFields, 4);
  const char* const names[] = {"group", "eps", "bias", "table"};
  const PluginFieldType types[] = {PluginFieldType::kINT32, PluginFieldType::kFLOAT32, PluginFieldType::kINT8,
                                   PluginFieldType::kCHAR};
  const int32_t lengths[] = {2, 1, 1, 3};
  for (int i = 0; i < 4; ++i) {
    EXPECT_STREQ(fields.fields[i].name, names[i]);
    EXPECT_EQ(fields.fields[i].type, types[i]);
    EXPECT_EQ(fields.fields[i].length, lengths[i]);
  }
  int32_t group[2];
  std::memcpy(group, fields.fields[0].data, sizeof group);
  EXPECT_EQ(group[0], 3);
  EXPECT_EQ(group[1], 1);
  EXPECT_EQ(static_cast<const uint8_t*>(fields.fields[3].data)[2], 7);
}

TEST(PackFields, AreRefusedAtEveryTruncation) {
  const std::vector<uint8_t> bytes = sample();
  size_t whole_fields = 0;
  for (size_t size = 0; size < bytes.size(); ++size) {
    reference::UnpackedFields unpacked;
    const Status status = unpacked.read(bytes.data(), size);
    if (status.ok()) {  // cut between two fields: the creator misses the rest
      ++whole_fields;
      EXPECT_LT(unpacked.collection()->nbFields, 4);
    } else {
      EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
      EXPECT_EQ(unpacked.collection()->nbFields, 0);
    }
  }
  EXPECT_EQ(whole_fields, 4u);  // before each of the fields
}

TEST(PackFields, AreRefusedWhenCorrupt) {
  reference::UnpackedFields unpacked;
  EXPECT_NE(unpacked.read(nullptr, 16).message.find("not those of this plugin library. Fix: rebuild the engine"),
            std::string::npos);
  for (const auto& [at, value, expected] :
       {std::tuple{0, 0, "not those of"}, {8, 77, "corrupt"}, {4, 200, "truncated"}, {15, 0x80, "truncated"}}) {
    std::vector<uint8_t> bytes = sample();
    bytes[static_cast<size_t>(at)] = static_cast<uint8_t>(value);
    EXPECT_NE(unpacked.read(bytes.data(), bytes.size()).message.find(expected), std::string::npos) << at;
  }
}

}  // namespace
}  // namespace tokenweave::test
