// What a GPTAttention of an engine asks of the kernels, and which steps it refuses.
#include "gpt_attention_layers.h"

namespace tokenweave::test {
namespace {

/// Before a layer is made.
struct NewGpu {
  NewGpu() {
    gpu() = FakeGpu{};
    device_memory().device = 0;
    asked_call().reset();
  }
};

class GptAttentionRun : public testing::Test, NewGpu {
 protected:
  /// The error of a step that is changed in some way; it must not reach the kernels.
  template <typename Change>
  std::string refused(Change change) {
    AttentionStep step({{0, 40, 60}, {0, 8, 0}, {1, 5, 9}});
    change(step);
    const std::string message = layer_.run(step);
    EXPECT_FALSE(asked_call().has_value());
    return message;
  }
  const AttentionLayer layer_;
};

#define EXPECT_SAYS(message, part) EXPECT_PRED2(says, message, part)
bool says(const std::string& message, const std::string& part) {
  return message.find("GPTAttention layer 2: " + part) != std::string::npos;
}

TEST_F(GptAttentionRun, HandsTheStepToTheKernels) {
  AttentionStep step({{0, 40, 60}, {0, 8, 0}, {1, 5, 150}});
  ASSERT_EQ(layer_.run(step), "");
  ASSERT_TRUE(asked_call().has_value());
  const AttentionCall& call = *asked_call();
  EXPECT_EQ(call.dtype, DataType::kBF16);
  EXPECT_EQ(call.heads.q, kHeads);
  EXPECT_EQ(call.heads.kv, kKvHeads);
  EXPECT_EQ(call.heads.size, kHeadSize);
  EXPECT_FLOAT_EQ(call.scale, 1 / std::sqrt(128.0f));
  EXPECT_EQ(call.rotation.cos_sin, step.table.data());
  EXPECT_EQ(call.rotation.dims, kHeadSize);
  EXPECT_EQ(call.qkv, device_memory().host_input);

  // Layer 1 of pool 1; a block has a K and a V page of each layer.
  constexpr int64_t kPageBytes = 2 * kKvHeads * kTokensPerBlock * kHeadSize;
  EXPECT_EQ(static_cast<uint8_t*>(call.cache.pages) - device_memory().pool, 2 * kPageBytes);
  EXPECT_EQ(call.cache.blocks, &step.page(0, 0, false));
  EXPECT_EQ(call.cache.max_blocks, kBlocks);
  EXPECT_EQ(call.cache.tokens_per_block, kTokensPerBlock);
  EXPECT_EQ(call.cache.lengths, step.lengths.data());
  EXPECT_EQ(call.cache.context_lengths, step.contexts.data());

  EXPECT_EQ(call.batch.context.rows, 2);
  EXPECT_EQ(call.batch.context.tokens, 48);
  EXPECT_EQ(call.batch.context.longest, 100);
  EXPECT_EQ(call.batch.generation.first_row, 2);
  EXPECT_EQ(call.batch.generation.first_token, 48);
  EXPECT_EQ(call.batch.generation.longest, 151);
  EXPECT_EQ(call.context_grid.tile, reference::kLargeTile);
  EXPECT_EQ(call.context_grid.ctas, 3 + 1);
  EXPECT_FALSE(call.context_grid.split);
  EXPECT_EQ(call.generation_grid.tile, reference::kSmallTile);
  EXPECT_TRUE(call.generation_grid.split);
  EXPECT_EQ(call.generation_grid.ctas, 2 * 132);
  EXPECT_NE(call.workspace.generation.q_starts, nullptr);
}

TEST_F(GptAttentionRun, UsesTheSmsOfTheDeviceThatTheEngineWasBuiltFor) {
  gpu().sm_count = 10;  // now; when layer_ was built there were 132
  layer_.configure_again();
  AttentionStep step({{1, 5, 150}});
  ASSERT_EQ(layer_.run(step), "");
  EXPECT_EQ(asked_call()->generation_grid.ctas, 264);
}

TEST_F(GptAttentionRun, ReadsTheHostsBlocksWhereTheirOwnShapeSaysTheyAre) {
  AttentionStep step({{1, 5, 9}});
  // Of one half of a step: the host's table still has the rows of both.
  std::vector<int32_t> whole(size_t{kPools} * 2 * 2 * kBlocks, -7);
  std::copy_n(&step.page(0, 0, false), 2 * kBlocks, whole.begin() + 2 * 2 * kBlocks);
  step.data(Input::kHostKvCacheBlockOffsets) = whole.data();
  step.desc(Input::kHostKvCacheBlockOffsets).dims.d[1] = 2;
  EXPECT_EQ(layer_.run(step), "");
  step.desc(Input::kHostKvCacheBlockOffsets).dims.d[1] = 1;
  EXPECT_SAYS(layer_.run(step), "block 0 of sequence 0 has pages -7 (K)");
}

TEST_F(GptAttentionRun, NeedsMemoryForTheLargestStep) {
  AttentionStep small({{0, 8, 0}}), large({{0, 4096, 0}}), rows({{0, 4, 0}, {0, 3, 0}, {1, 2, 3}});
  EXPECT_GT(layer_.workspace_bytes(small), 1u << 20);
  EXPECT_LE(layer_.workspace_bytes(small), layer_.workspace_bytes(rows));
  EXPECT_LT(layer_.workspace_bytes(small), layer_.workspace_bytes(large));
}

TEST_F(GptAttentionRun, HasNothingToDoWithoutTokens) {
  AttentionStep step({});
  EXPECT_EQ(layer_.run(step), "");
  EXPECT_FALSE(asked_call().has_value());
}

TEST_F(GptAttentionRun, WithoutRotationHasTwoInputsLess) {
  const AttentionLayer plain(gpt_attention_fields().flag("position_embedding_type", 0));
  AttentionStep step({{0, 8, 100}});
  const auto first = static_cast<int64_t>(Input::kRotaryInvFreq);
  step.inputs.erase(step.inputs.begin() + first, step.inputs.begin() + first + 2);
  step.descs.erase(step.descs.begin() + first, step.descs.begin() + first + 2);
  ASSERT_EQ(plain.run(step), "");
  EXPECT_EQ(asked_call()->rotation.dims, 0);
}

TEST_F(GptAttentionRun, DoesNothingInABuild) {
  const PluginV2Ptr built = create("GPTAttention", gpt_attention_fields());
  AttentionStep step({{0, 8, 0}});
  void* outputs[] = {nullptr};
  EXPECT_EQ(built->enqueue(step.descs.data(), nullptr, nullptr, outputs, nullptr, kMain), 0);
  EXPECT_FALSE(asked_call().has_value());
}

TEST_F(GptAttentionRun, RefusesAnotherWidthTypeOrRank) {
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kQkv).dims.d[1] = 1152; }),
              "qkv has shape [49, 1152], expected [tokens, 1280]");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kQkv).type = DataType::kHALF; }),
              "qkv has DataType 1, expected 7");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kSequenceLength).type = DataType::kINT64; }),
              "sequence_length has DataType 8, expected 3");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kContextLengths).dims.nbDims = 2; }),
              "context_lengths has shape [3, 0], expected rank 1");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kHostRequestTypes).dims.d[0] = 2; }),
              "host_request_types has shape [2], expected [3]");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kCacheIndirection).dims.d[1] = 4; }),
              "cache_indirection has shape [3, 4, 1], expected [sequences, 1, max_seq_len]: a beam width above 1");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kKvCacheBlockOffsets).dims.d[1] = 2; }),
              "kv_cache_block_offsets has shape [2, 2, 2, 6], expected [pools, 3 or more, 2, blocks]");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kHostKvCacheBlockOffsets).dims.d[3] = 5; }),
              "host_kv_cache_block_offsets has shape [2, 3, 2, 5]");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kHostMaxAttentionWindowSizes).dims.d[0] = 2; }),
              "host_max_attention_window_sizes has shape [2], expected an entry of layer 2");
}

TEST_F(GptAttentionRun, RefusesBlockTablesThatFlashInferCannotNumber) {
  reference::GptAttentionFields fields;
  fields.heads = {kHeads, kKvHeads, kHeadSize};
  fields.dtype = DataType::kBF16;
  fields.rotary_dims = kHeadSize;
  fields.tokens_per_block = kTokensPerBlock;
  const reference::InputList list(fields);
  AttentionStep step({{1, 5, 9}, {1, 5, 9}});
  const auto error_of = [&](int64_t blocks) {
    step.desc(Input::kKvCacheBlockOffsets).dims.d[3] = step.desc(Input::kHostKvCacheBlockOffsets).dims.d[3] = blocks;
    return check_shapes(reference::Inputs(list, step.descs.data(), step.inputs.data()), fields).message;
  };
  constexpr int64_t kTooMany = (int64_t{1} << 32) / (2 * 2 * kTokensPerBlock);
  EXPECT_EQ(error_of(kTooMany - 1), "");
  EXPECT_EQ(error_of(kTooMany).find("kv_cache_block_offsets has room for 4294967296 tokens (2 sequences, 2, 33554432 "),
            0u);
}

TEST_F(GptAttentionRun, RefusesWhatTheHostArraysSay) {
  EXPECT_SAYS(refused([](AttentionStep& s) { s.types[0] = 1; }), "host_request_types: context sequence 1 comes after");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.contexts[1] = 9; }), "qkv has 49 rows, the sequences have 50 tokens");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.windows[kLayer] = 99; }),
              "sequence 0 has 100 tokens, more than the attention window 99");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.sink[0] = 4; }), "host_sink_token_length is 4");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.progress[0] = 1; }), "host_context_progress is set");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.desc(Input::kRotaryCosSin).dims.d[1] = 64 * kHeadSize; }),
              "sequence 0 has 100 tokens, more than the 64 positions of rotary_cos_sin");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.page(1, 0, true) += 1; }), "block 0 of sequence 1 has pages");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.mapping[2 * kLayer] = 2; }),
              "host_kv_cache_pool_mapping says pool 2, layer 1 in it; there are 2 pools");
}

TEST_F(GptAttentionRun, RefusesMemoryThatIsNotWhereItShouldBe) {
  EXPECT_SAYS(refused([](AttentionStep& s) { s.pools[2] = 0; }),
              "host_kv_cache_pool_pointers is 0 for the layer's pool");
  EXPECT_SAYS(refused([](AttentionStep& s) { s.pools[2] = reinterpret_cast<int64_t>(s.types.data()); }),
              "host_kv_cache_pool_pointers names a pool that is not, or no longer, in the memory of device 0");
  EXPECT_SAYS(refused([](AttentionStep&) { device_memory().device = 1; }),
              "host_kv_cache_pool_pointers names a pool that is not, or no longer, in the memory of device 0");
  device_memory().device = 0;
  for (const Input input : {Input::kHostRequestTypes, Input::kHostContextProgress, Input::kHostKvCacheBlockOffsets}) {
    const std::string name = reference::info_of(input).name;
    EXPECT_SAYS(refused([&](AttentionStep& s) { s.data(input) = device_memory().host_input; }),
                name + " is in device memory. Fix: bind an array in CPU memory");
    EXPECT_SAYS(refused([&](AttentionStep& s) { s.data(input) = nullptr; }), name + " has no address");
  }
}

TEST_F(GptAttentionRun, TakesLengthsThatAreRoundedUpWhileCapturing) {
  const auto round_up = [](AttentionStep& s) { s.past[0] = 1 << 20; };
  AttentionStep step({{1, 5, 9}});
  round_up(step);
  EXPECT_SAYS(layer_.run(step), "sequence 0 has 1048577 tokens");
  gpu().capturing = true;
  ASSERT_EQ(layer_.run(step), "");
  EXPECT_TRUE(asked_call()->generation_grid.split);
}

TEST_F(GptAttentionRun, IsCapturedForOtherContextLengths) {
  AttentionStep step({{0, 2048, 0}, {0, 2048, 0}});  // 128 tiles each; 2040 and 2056, as a replay may find, are 257
  gpu().capturing = true;
  ASSERT_EQ(layer_.run(step), "");
  EXPECT_FALSE(asked_call()->context_grid.split);
  EXPECT_EQ(asked_call()->context_grid.ctas, 2 * 128 + 2);
}

TEST_F(GptAttentionRun, SaysWhichCudaCallFailed) {
  AttentionStep step({{1, 5, 9}});
  gpu().failing = "cudaStreamIsCapturing";
  EXPECT_SAYS(layer_.run(step), "cudaStreamIsCapturing failed");
}

}  // namespace
}  // namespace tokenweave::test
