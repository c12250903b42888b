// Cutting batches, against the vectors of the Python oracle; and reading packed fields, against theirs.
#include "attention_layers.h"
#include "batch_halves.h"
#include "packed_fields.h"

namespace tokenweave::trt {
namespace {

using nlohmann::json;
using test::attention_vectors;
using test::AttentionStep;

Batch batch_of(const AttentionStep& step) { return {step.types.data(), step.contexts.data(), step.sequences()}; }

void expect_half(const AttentionStep& step, const HalfBatch& half, const json& expected) {
  const HalfSequences& own = half.sequences;
  EXPECT_EQ(half.rows, expected["rows"]);
  EXPECT_EQ(half.num_contexts, expected["num_contexts"]);
  EXPECT_EQ(own.first, expected["first"]);
  const std::vector<int32_t> types(step.types.begin() + own.first, step.types.begin() + own.first + own.count);
  EXPECT_EQ(types, expected["host_request_types"].get<std::vector<int32_t>>());

  const auto size = static_cast<size_t>(own.count);
  std::vector<int32_t> contexts(size), past(size), lengths(size), device_contexts(size);
  rewrite_context_lengths(step.contexts.data(), own, contexts.data());
  rewrite_past_lengths(step.past.data(), own, past.data());
  EXPECT_EQ(contexts, expected["host_context_lengths"].get<std::vector<int32_t>>());
  EXPECT_EQ(past, expected["host_past_key_value_lengths"].get<std::vector<int32_t>>());

  BatchSplitArgs args;
  args.sequence_length = step.lengths.data();
  args.context_lengths = step.contexts.data();
  const SplitLengths out{own, lengths.data(), device_contexts.data()};
  for (int32_t i = 0; i < own.count; ++i) split_lengths(args, out, i);
  EXPECT_EQ(lengths, expected["sequence_length"].get<std::vector<int32_t>>());
  EXPECT_EQ(device_contexts, contexts);
}

TEST(BatchHalves, AreThoseOfTheVectors) {
  EXPECT_GT(attention_vectors()["cuts"].size(), 200u);
  for (const json& one : attention_vectors()["cuts"]) {
    SCOPED_TRACE(one);
    const AttentionStep step(one["step"]);
    BatchCut cut;
    const Status status = cut_batch(batch_of(step), one["prefix_rows"], &cut);
    ASSERT_TRUE(status.ok()) << status.message;
    expect_half(step, cut.prefix, one["prefix"]);
    expect_half(step, cut.suffix, one["suffix"]);
    int64_t tokens = 0;
    EXPECT_TRUE(count_tokens(batch_of(step), &tokens).ok());
    EXPECT_EQ(tokens, cut.prefix.rows + cut.suffix.rows);
  }
}

TEST(BatchHalves, RefuseWhatTheVectorsRefuse) {
  EXPECT_EQ(attention_vectors()["refused_cuts"].size(), 6u);
  for (const json& one : attention_vectors()["refused_cuts"]) {
    const AttentionStep step(one["step"]);
    BatchCut cut;
    const Status status = cut_batch(batch_of(step), one["prefix_rows"], &cut);
    EXPECT_EQ(status.code, TW_INVALID_ARGUMENT) << one["name"];
    EXPECT_NE(status.message.find(one["message"].get<std::string>()), std::string::npos) << status.message;
  }
}

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
    EXPECT_EQ(status.message, one["message"].get<std::string>() + ". Fix: weave the network again");
    EXPECT_EQ(fields.collection()->nbFields, 0);
  }
}

}  // namespace
}  // namespace tokenweave::trt
