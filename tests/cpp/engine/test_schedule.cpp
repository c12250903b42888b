// Prompts are run in the steps, and with the inputs, that Python's runner makes.
#include <gtest/gtest.h>

#include <cstring>

#include "folder.h"
#include "tokenweave/schedule.h"

namespace tokenweave::test {
namespace {

EngineConfig config_of(const nlohmann::json& generation) {
  EngineConfig config;
  config.tp_size = generation["tp_size"];
  config.model = generation["model"];
  return config;
}

std::vector<int64_t> values_of(const HostTensor& tensor) {
  std::vector<int64_t> values;
  const size_t size = tensor.dtype == nvinfer1::DataType::kINT64 ? 8 : 4;
  for (size_t at = 0; at < tensor.bytes.size(); at += size) {
    int64_t wide = 0;
    int32_t narrow = 0;
    std::memcpy(size == 8 ? static_cast<void*>(&wide) : &narrow, tensor.bytes.data() + at, size);
    values.push_back(size == 8 ? wide : narrow);
  }
  return values;
}

/// What stands for a model in make_engine_vectors.py.
int32_t next_token(const SequenceStep& step, int32_t vocab_size) {
  return (step.tokens.back() * 31 + step.end()) % vocab_size;
}

TEST(Schedule, StepsAndInputsArePythons) {
  for (const nlohmann::json& expected : vectors()["generations"]) {
    const auto model = decoder_model(config_of(expected));
    ASSERT_TRUE(model.ok()) << model.status().message;
    EXPECT_EQ(model->cache.num_kv_heads, expected["cache"]["num_kv_heads"]);
    GenerationOptions options{expected["max_new_tokens"], expected["eos"]};
    auto schedule = Schedule::create(*model, expected["prompts"], options);
    ASSERT_TRUE(schedule.ok()) << schedule.status().message;
    const auto pool = vectors()["here"]["pool"].get<uintptr_t>();
    const StepLayout layout{expected["tp_size"], model->max_seq_len, reinterpret_cast<const void*>(pool)};
    for (const nlohmann::json& inputs : expected["steps"]) {
      const auto steps = schedule->next();
      ASSERT_TRUE(steps.ok()) << steps.status().message;
      ASSERT_FALSE(steps->empty());
      const HostTensors made = step_inputs(*steps, schedule->blocks(), layout);
      EXPECT_EQ(made.size(), inputs.size());
      for (const auto& [name, tensor] : made) {
        ASSERT_TRUE(inputs.contains(name)) << name;
        EXPECT_EQ(tensor.shape, inputs[name]["shape"].get<std::vector<int64_t>>()) << name;
        EXPECT_EQ(tensor.dtype == nvinfer1::DataType::kINT64 ? "int64" : "int32", inputs[name]["dtype"]) << name;
        EXPECT_EQ(values_of(tensor), inputs[name]["values"].get<std::vector<int64_t>>()) << name;
      }
      for (const SequenceStep& step : *steps) schedule->ran(step, next_token(step, model->vocab_size));
    }
    EXPECT_TRUE(schedule->next()->empty());
    EXPECT_EQ(schedule->tokens(), expected["tokens"].get<std::vector<std::vector<int32_t>>>());
    EXPECT_EQ(schedule->blocks().num_free(), static_cast<size_t>(model->cache.num_blocks));
  }
}

TEST(Schedule, RefusesPromptsThatCannotBeServed) {
  const auto model = decoder_model(config_of(vectors()["generations"][0]));
  const auto refusal = [&](std::vector<int32_t> prompt, int32_t max_new_tokens) {
    return Schedule::create(*model, {{1}, std::move(prompt)}, {max_new_tokens, {}}).status().message;
  };
  EXPECT_EQ(refusal({1}, 1), "");
  EXPECT_EQ(refusal({}, 1), "prompt 1: is empty");
  EXPECT_EQ(refusal({1, 101}, 1), "prompt 1: token 101 is outside the vocabulary of 101");
  EXPECT_EQ(refusal({1, -1}, 1), "prompt 1: token -1 is outside the vocabulary of 101");
  EXPECT_EQ(refusal({1}, 32).rfind("prompt 0: 1 tokens and 32 new ones exceed max_seq_len 32. Fix: ", 0), 0u);
  EXPECT_EQ(refusal({1}, 0), "prompt 0: max_new_tokens is 0, expected at least 1");
}

TEST(Schedule, BlocksRunOutWithAnError) {
  KvCacheConfig config;
  config.num_layers = 2;
  config.num_blocks = 3;
  config.tokens_per_block = 4;
  config.max_blocks_per_seq = 2;
  BlockManager blocks(config);
  EXPECT_TRUE(blocks.grow(0, 8).ok());
  EXPECT_EQ(
      blocks.grow(1, 8).message,
      "KV cache, sequence 1: needs 2 more blocks, 1 of 3 are free. Fix: raise num_blocks or lower max_batch_size");
  EXPECT_EQ(blocks.num_free(), 1u);
  EXPECT_EQ(blocks.grow(1, 9).message,
            "KV cache, sequence 1: 9 tokens need 3 blocks, the block table has 2. Fix: shorten the prompt or raise "
            "max_seq_len");
  blocks.free(1);  // has none
  blocks.free(0);
  EXPECT_EQ(blocks.num_free(), 3u);
}

TEST(Schedule, ModelsThatAreNotThereAreRefused) {
  EngineConfig config = config_of(vectors()["generations"][0]);
  config.model["max_num_tokens"] = 7;
  EXPECT_NE(decoder_model(config).status().message.find("max_num_tokens is less than"), std::string::npos);
  config.model["tokens_per_block"] = 0;
  EXPECT_EQ(decoder_model(config).status().code, TW_INVALID_ARGUMENT);
  config.model.erase("config");
  EXPECT_NE(decoder_model(config).status().message.find("'config' not found"), std::string::npos);
  config.model = nlohmann::json::object();
  EXPECT_EQ(decoder_model(config).status().message,
            "config.json: model: is empty. Fix: build the engine with trtllm-tokenweave build");
}

}  // namespace
}  // namespace tokenweave::test
