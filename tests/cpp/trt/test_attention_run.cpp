// TokenWeaveAttention in an engine: its inner plugin's life, and what that is told of a half.
#include <cstdlib>

#include "attention_layers.h"
#include "fake_tensorrt.h"

namespace tokenweave::test {
namespace {

using nlohmann::json;
using nvinfer1::IPluginV3OneRuntime;

using Calls = std::vector<std::string>;
constexpr int kPrefix = 0, kSuffix = 1;
constexpr const char* kHalves[] = {"prefix", "suffix"};

class AttentionRun : public AttentionTest {};

const int32_t* data(const SeenInput& seen) { return static_cast<const int32_t*>(seen.data); }

std::vector<int32_t> ints(const SeenInput& seen) { return {data(seen), data(seen) + seen.dims[0]}; }

/// Two contexts of 10 and 4 tokens, two generation rows: 16 tokens.
const json& mixed(int prefix_rows) {
  for (const json& one : attention_vectors()["cuts"]) {
    if (one["name"] == "mixed" && one["prefix_rows"] == prefix_rows) return one;
  }
  throw std::out_of_range("mixed");
}

/// What the inner plugin was told, against what it has to be told.
void expect_seen(const AttentionStep& step, const json& half) {
  const auto& seen = fake_attention().inputs;
  ASSERT_EQ(seen.size(), static_cast<size_t>(kNumInputs));
  EXPECT_EQ(ints(seen[kHostTypes]), half["host_request_types"].get<std::vector<int32_t>>());
  EXPECT_EQ(ints(seen[kHostContexts]), half["host_context_lengths"].get<std::vector<int32_t>>());
  EXPECT_EQ(ints(seen[kHostPast]), half["host_past_key_value_lengths"].get<std::vector<int32_t>>());
  EXPECT_EQ(seen[kQkv].dims, (std::vector<int64_t>{half["rows"], kWidth}));
  const auto count = static_cast<int64_t>(half["host_request_types"].size());
  for (const Input input : {kSequenceLength, kContextLengths}) {
    EXPECT_EQ(seen[input].dims, std::vector<int64_t>{count});
    EXPECT_EQ(seen[input].data, step.inputs()[input]);
  }
  const auto first = half["first"].get<int64_t>();
  EXPECT_EQ(seen[kCacheIndirection].dims, (std::vector<int64_t>{count, 1, kMaxLength}));
  EXPECT_EQ(data(seen[kCacheIndirection]), step.indirection.data() + first * kMaxLength);

  // Block tables keep the strides of the step, and start at the half's first sequence.
  for (const Input table : {kBlockOffsets, kHostBlockOffsets}) {
    EXPECT_EQ(seen[table].dims, (std::vector<int64_t>{kPools, step.sequences(), 2, kBlocks}));
    EXPECT_EQ(data(seen[table]), static_cast<const int32_t*>(step.inputs()[table]) + first * 2 * kBlocks);
  }

  for (const Input input : {kHostPools, kHostMapping, kRotaryCosSin, kHostKnobs, kHostWindows, kHostSink}) {
    EXPECT_EQ(seen[input].data, step.inputs()[input]);
  }
}

TEST_F(AttentionRun, TellsTheInnerPluginOfItsHalf) {
  const AttentionLayer layers[] = {AttentionLayer(kPrefix), AttentionLayer(kSuffix)};
  size_t calls = 0;
  for (const json& one : attention_vectors()["cuts"]) {
    SCOPED_TRACE(one);
    const AttentionStep step(one["step"]);
    for (const int half : {kPrefix, kSuffix}) {
      const json& expected = one[kHalves[half]];
      const int64_t rows = expected["rows"];
      fake_attention().take();
      ASSERT_EQ(layers[half].change_shape(step, rows), 0);
      EXPECT_EQ(fake_attention().take().size(), 1u);
      ASSERT_EQ(layers[half].run(step, rows), 0) << last_error().message;
      EXPECT_EQ(fake_attention().take().size(), rows > 0 ? 1u : 0u);
      if (rows == 0) continue;
      expect_seen(step, expected);
      ++calls;
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(calls, 300u);
}

/// What the inner plugin was told of one half by both plugins.
struct Told {
  std::vector<int32_t> types, contexts, lengths;
  int64_t rows = 0, first = 0;
};

/// Runs one half on what the batch split made for it; what it was told on the device and on the host has to agree.
Told told(const AttentionLayer& layer, const AttentionStep& step, int64_t rows, const HalfLengths& made) {
  auto inputs = step.inputs();
  inputs[kSequenceLength] = made.sequence_length.data();
  inputs[kContextLengths] = made.context_lengths.data();
  EXPECT_EQ(layer.change_shape(step, rows), 0);
  EXPECT_EQ(layer.run(step, rows, inputs), 0) << last_error().message;
  const auto& seen = fake_attention().inputs;
  Told half{ints(seen[kHostTypes]), ints(seen[kHostContexts]), ints(seen[kSequenceLength]), seen[kQkv].dims[0], 0};
  EXPECT_EQ(ints(seen[kContextLengths]), half.contexts);
  std::vector<int32_t> past = ints(seen[kHostPast]);
  for (size_t i = 0; i < past.size(); ++i) past[i] += half.types[i];  // a generation row does not count itself
  EXPECT_EQ(past, half.lengths);
  int64_t tokens = 0;
  for (size_t i = 0; i < past.size(); ++i) tokens += half.types[i] == 0 ? half.contexts[i] : 1;
  EXPECT_EQ(tokens, half.rows);

  half.first = (data(seen[kCacheIndirection]) - step.indirection.data()) / kMaxLength;
  EXPECT_EQ(data(seen[kBlockOffsets]) - step.block_offsets.data(), half.first * 2 * kBlocks);
  EXPECT_EQ(data(seen[kHostBlockOffsets]) - step.host_block_offsets.data(), half.first * 2 * kBlocks);
  return half;
}

std::vector<int32_t> joined(std::vector<int32_t> prefix, const std::vector<int32_t>& suffix) {
  prefix.insert(prefix.end(), suffix.begin(), suffix.end());
  return prefix;
}

/// The halves, put together again, are the step.
void expect_step(const AttentionStep& step, Told prefix, Told suffix) {
  EXPECT_EQ(prefix.rows + suffix.rows, step.tokens());
  if (prefix.types.size() + suffix.types.size() > step.types.size()) {  // a sequence is in both
    EXPECT_EQ(prefix.lengths.back() + suffix.contexts[0], suffix.lengths[0]);
    suffix.contexts[0] += prefix.contexts.back();
    for (auto* values : {&prefix.types, &prefix.contexts, &prefix.lengths}) values->pop_back();
  }
  EXPECT_EQ(prefix.first, 0);
  if (suffix.rows > 0) {
    EXPECT_EQ(suffix.first, static_cast<int64_t>(prefix.types.size()));
  }
  EXPECT_EQ(joined(prefix.types, suffix.types), step.types);
  EXPECT_EQ(joined(prefix.contexts, suffix.contexts), step.contexts);
  EXPECT_EQ(joined(prefix.lengths, suffix.lengths), step.lengths);
}

TEST_F(AttentionRun, SeesTheCutOfTheBatchSplit) {
  const BatchSplitLayer split;
  const AttentionLayer layers[] = {AttentionLayer(kPrefix), AttentionLayer(kSuffix)};
  for (const json& one : attention_vectors()["cuts"]) {
    SCOPED_TRACE(one);
    const AttentionStep step(one["step"]);
    const int64_t cut = one["prefix_rows"], rows[] = {cut, step.tokens() - cut};
    HalfLengths made[] = {HalfLengths(step), HalfLengths(step)};
    ASSERT_EQ(split.run(step, BatchSplitLayer::descs(step, cut), &made[kPrefix], &made[kSuffix]), 0);
    Told halves[2];
    for (const int half : {kPrefix, kSuffix}) {
      if (rows[half] > 0) halves[half] = told(layers[half], step, rows[half], made[half]);
    }
    expect_step(step, halves[kPrefix], halves[kSuffix]);
    if (HasFailure()) break;
  }
}

TEST_F(AttentionRun, RewritesFromTheOriginalsInEveryStep) {
  const AttentionLayer prefix(kPrefix);
  const AttentionStep first(mixed(4)["step"]), second(mixed(12)["step"]);
  ASSERT_EQ(prefix.change_shape(first, 4), 0);
  ASSERT_EQ(prefix.run(first, 4), 0);
  expect_seen(first, mixed(4)["prefix"]);
  const std::vector<SeenInput> before = fake_attention().inputs;
  ASSERT_EQ(prefix.run(second, 12), 0);
  expect_seen(second, mixed(12)["prefix"]);
  for (const Input input : {kHostContexts, kHostPast}) {  // in memory of their own, made once
    EXPECT_EQ(fake_attention().inputs[input].data, before[input].data);
    EXPECT_NE(before[input].data, first.inputs()[input]);
  }
  EXPECT_EQ(first.contexts, second.contexts);  // and the originals are as they were
  EXPECT_EQ(first.past, AttentionStep(mixed(4)["step"]).past);
}

TEST_F(AttentionRun, ProgressGoesToTheLastHalfWithAContext) {
  const AttentionLayer layers[] = {AttentionLayer(kPrefix), AttentionLayer(kSuffix)};
  const auto progress = [&](int half, int prefix_rows) {
    const AttentionStep step(mixed(prefix_rows)["step"]);
    const int64_t rows = mixed(prefix_rows)[kHalves[half]]["rows"];
    EXPECT_EQ(layers[half].change_shape(step, rows), 0);
    EXPECT_EQ(layers[half].run(step, rows), 0);
    return *static_cast<const int64_t*>(fake_attention().inputs[kHostProgress].data);
  };
  EXPECT_EQ(progress(kPrefix, 4), 0);  // inside the first context
  EXPECT_EQ(progress(kSuffix, 4), 99);
  EXPECT_EQ(progress(kPrefix, 12), 0);   // inside the last one
  EXPECT_EQ(progress(kPrefix, 14), 99);  // the suffix has generation rows alone, which record nothing
  EXPECT_EQ(progress(kSuffix, 14), 99);
  EXPECT_EQ(progress(kPrefix, 16), 99);
  EXPECT_EQ(progress(kSuffix, 0), 99);
}

TEST_F(AttentionRun, TheInnerPluginLivesAsLongAsItsContext) {
  const PluginPtr network = built(attention_fields(kSuffix));
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  const PluginPtr engine = loaded(network);
  ASSERT_NE(engine, nullptr) << last_error().message;
  EXPECT_EQ(fake_attention().alive, 1);  // the network's
  fake_attention().take();
  auto& runtime = capability<IPluginV3OneRuntime>(engine);
  PluginPtr one(runtime.attachToContext(nullptr)), two(runtime.attachToContext(nullptr));
  ASSERT_NE(one, nullptr);
  ASSERT_NE(two, nullptr);
  EXPECT_EQ(fake_attention().take(), (Calls{"initialize 1", "attach 1", "initialize 2", "attach 2"}));
  one.reset();
  EXPECT_EQ(fake_attention().take(), (Calls{"detach 1", "terminate 1", "destroy 1"}));

  const AttentionStep step(mixed(12)["step"]);
  const auto descs = attention_descs(4, 4);
  auto& second = capability<IPluginV3OneRuntime>(two);
  EXPECT_EQ(second.onShapeChange(descs.data(), kNumInputs, &descs.back(), 1), 0);
  EXPECT_EQ(fake_attention().configured_max[kQkv], 4096);
  EXPECT_EQ(fake_attention().configured_max[kContextLengths], kMaxSequences);
  EXPECT_EQ(fake_attention().configured_desc[kQkv], (std::vector<int64_t>{4, kWidth}));
  EXPECT_EQ(fake_attention().configured_desc[kContextLengths], std::vector<int64_t>{4});
  uint8_t output[1], workspace[1];
  void* const outputs[] = {output};
  EXPECT_EQ(second.enqueue(descs.data(), &descs.back(), step.inputs().data(), outputs, workspace, kMain), 0);
  EXPECT_EQ(fake_attention().output, output);
  EXPECT_EQ(fake_attention().workspace, workspace);
  EXPECT_EQ(fake_attention().take(), (Calls{"configure 2", "enqueue 2"}));
  two.reset();
  EXPECT_EQ(fake_attention().take(), (Calls{"detach 2", "terminate 2", "destroy 2"}));
}

TEST_F(AttentionRun, AFailedAttachLeavesNothingBehind) {
  const PluginPtr network = built(attention_fields(kPrefix));
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  const PluginPtr engine = loaded(network);
  ASSERT_NE(engine, nullptr);
  fake_attention().take();
  auto& runtime = capability<IPluginV3OneRuntime>(engine);
  fake_attention().failing = "initialize";
  EXPECT_EQ(runtime.attachToContext(nullptr), nullptr);
  EXPECT_STREQ(last_error().message, "TokenWeaveAttention layer 3 prefix: its inner plugin's initialize returned 7");
  EXPECT_EQ(fake_attention().take(), (Calls{"initialize 1", "destroy 1"}));
  fake_attention().failing = "deserializePlugin";
  EXPECT_EQ(runtime.attachToContext(nullptr), nullptr);
  EXPECT_NE(std::string(last_error().message).find("was refused by its own library"), std::string::npos);
  EXPECT_EQ(fake_attention().alive, 1);  // the network's
}

TEST_F(AttentionRun, AnEngineNeedsTheInnerCreatorAndItsBytes) {
  const PluginPtr network = built(attention_fields(kPrefix));
  EXPECT_EQ(loaded(network), nullptr);
  EXPECT_STREQ(last_error().message, "TokenWeaveAttention: layer 'layer': field 'bounds' is missing");
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  set_fake_creator(nullptr, "");
  EXPECT_EQ(loaded(network), nullptr);
  EXPECT_NE(std::string(last_error().message).find("no library has registered plugin 'GPTAttention'"),
            std::string::npos);
}

TEST_F(AttentionRun, BoundsOfAnEngineAreChecked) {
  const auto error = [](std::vector<int32_t> bounds) {
    FieldList fields = attention_fields(kPrefix);
    fields.bytes("inner", {1, 0, 0, 0}).set("layer_idx", 3).set("bounds", std::move(bounds));
    EXPECT_EQ(create("TokenWeaveAttention", fields), nullptr);
    return std::string(last_error().message);
  };
  EXPECT_NE(error({1, 1, 1}).find("field 'bounds' is cut short"), std::string::npos);
  EXPECT_NE(error({9}).find("field 'bounds' is cut short"), std::string::npos);
  EXPECT_NE(error(std::vector<int32_t>(19)).find("field 'bounds' is too long"), std::string::npos);
}

TEST_F(AttentionRun, StepsThatCannotBeServedFailWithTheirLayer) {
  const AttentionLayer prefix(kPrefix);
  const AttentionStep step(mixed(12)["step"]);
  ASSERT_EQ(prefix.change_shape(step, 12), 0);
  fake_attention().take();
  const auto error = [&](const AttentionStep& wrong, int64_t rows = 12) {
    EXPECT_NE(prefix.run(wrong, rows), 0);
    EXPECT_EQ(fake_attention().take(), Calls{});
    const std::string message = last_error().message, layer = "TokenWeaveAttention layer 3 prefix: ";
    EXPECT_EQ(message.find(layer), 0u) << message;
    return message.substr(layer.size());
  };
  EXPECT_EQ(error(step, 17), "this half has 17 tokens, the step 16");
  AttentionStep wrong = step;
  wrong.types[1] = 5;
  EXPECT_EQ(error(wrong), "host_request_types: sequence 1 has type 5, expected 0 or 1");
  wrong = step;
  wrong.windows[3] = 3;
  EXPECT_EQ(error(wrong),
            "sequence 1 is cut in two, and its 4 tokens do not fit the attention window of 3: sliding windows "
            "are not served. Fix: weave with split_attention off");
  wrong = step;
  wrong.sink[0] = 4;
  EXPECT_EQ(
      error(wrong),
      "sequence 1 is cut in two, and host_sink_token_length is 4, expected 0. Fix: weave with split_attention off");
  wrong = step;
  wrong.beams = 2;
  EXPECT_NE(error(wrong).find("the beam width of cache_indirection is 2, expected 1"), std::string::npos);
  json many = mixed(12)["step"];
  for (auto& [name, values] : many.items()) values = std::vector<int32_t>(kMaxSequences + 1, 1);
  EXPECT_EQ(error(AttentionStep(many), 1), "the step has 17 sequences, the engine is built for 16");

  fake_attention().failing = "enqueue";
  EXPECT_NE(prefix.run(step, 12), 0);
  EXPECT_STREQ(last_error().message,
               "TokenWeaveAttention layer 3 prefix: its inner plugin's enqueue returned 7 for 12 "
               "tokens of 2 sequences; its library logs why");
}

/// Every sequence has its attention for itself: only one that is in both halves minds.
TEST_F(AttentionRun, WindowsAndSinkTokensMatterToACutSequenceAlone) {
  const AttentionLayer layers[] = {AttentionLayer(kPrefix), AttentionLayer(kSuffix)};
  for (const int cut : {0, 10, 14, 16}) {  // between sequences, or at an end
    AttentionStep step(mixed(cut)["step"]);
    step.windows.assign(kLayers, 2);
    step.sink[0] = 4;
    for (const int half : {kPrefix, kSuffix}) {
      const int64_t rows = mixed(cut)[kHalves[half]]["rows"];
      ASSERT_EQ(layers[half].change_shape(step, rows), 0);
      EXPECT_EQ(layers[half].run(step, rows), 0) << last_error().message;
    }
  }
  AttentionStep step(mixed(12)["step"]);
  step.windows.assign(kLayers, 2);
  step.windows[3] = 4;  // the layer's own is large enough
  EXPECT_EQ(layers[kPrefix].run(step, 12), 0);
  EXPECT_EQ(layers[kSuffix].run(step, 4), 0);
  step.windows[3] = 3;
  EXPECT_NE(layers[kPrefix].run(step, 12), 0);
  EXPECT_NE(layers[kSuffix].run(step, 4), 0);
}

TEST_F(AttentionRun, WithoutALayerIndexTheSmallestWindowCounts) {
  const PluginPtr network = built(attention_fields(kPrefix).bytes("inner", pack({})));
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  const PluginPtr engine = loaded(network);
  const PluginPtr plugin(capability<IPluginV3OneRuntime>(engine).attachToContext(nullptr));
  AttentionStep step(mixed(12)["step"]);
  step.windows[0] = 2;
  const auto descs = attention_descs(12, 4);
  EXPECT_NE(capability<IPluginV3OneRuntime>(plugin).enqueue(descs.data(), &descs.back(), step.inputs().data(), nullptr,
                                                            nullptr, kMain),
            0);
  EXPECT_EQ(std::string(last_error().message).find("TokenWeaveAttention prefix: sequence 1 is cut in two, and its 4 "),
            0u);
}

TEST_F(AttentionRun, IsInertWhileBuilding) {
  const PluginPtr network = built(attention_fields(kPrefix));
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  setenv("IS_BUILDING", "1", 1);
  const PluginPtr engine = loaded(network);
  fake_attention().take();
  const PluginPtr plugin(capability<IPluginV3OneRuntime>(engine).attachToContext(nullptr));
  unsetenv("IS_BUILDING");
  ASSERT_NE(plugin, nullptr);
  EXPECT_EQ(capability<IPluginV3OneRuntime>(plugin).enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, kMain), 0);
  EXPECT_EQ(fake_attention().take(), Calls{});
}

TEST_F(AttentionRun, MustBeAttached) {
  const PluginPtr network = built(attention_fields(kPrefix));
  ASSERT_EQ(configure(network, attention_bounds(4096)), 0);
  const PluginPtr engine = loaded(network);
  EXPECT_NE(capability<IPluginV3OneRuntime>(engine).enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, kMain), 0);
  EXPECT_NE(std::string(last_error().message).find("was never attached"), std::string::npos);
}

}  // namespace
}  // namespace tokenweave::test
