// Cutting batches, against the vectors of the Python oracle.
#include "attention_layers.h"
#include "batch_halves.h"

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

}  // namespace
}  // namespace tokenweave::trt
