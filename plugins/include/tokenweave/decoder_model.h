/// C++: what the folder of a decoder's engine says of it: what `trtllm-tokenweave build` writes into config.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "tokenweave/kv_cache.h"
#include "tokenweave/manifest.h"

namespace tokenweave {

/// What config.json says of a decoder.
struct DecoderModel {
  int32_t vocab_size = 0;
  int32_t max_batch_size = 0, max_num_tokens = 0, max_seq_len = 0;
  KvCacheConfig cache;  ///< one rank's, with room for max_batch_size sequences of max_seq_len tokens
};

inline Result<DecoderModel> decoder_model(const EngineConfig& config, const std::string& where = "config.json: model") {
  if (config.model.empty()) return detail::refuse(where, "is empty", "build the engine with trtllm-tokenweave build");
  DecoderModel model;
  int32_t heads = 0, kv_heads = 0;
  std::string dtype;
  TW_RETURN_IF_ERROR(detail::parse(where, [&] {
    const nlohmann::json& whole = config.model.at("config");
    for (const auto& [name, field] : {std::pair<const char*, int32_t*>{"max_batch_size", &model.max_batch_size},
                                      {"max_num_tokens", &model.max_num_tokens},
                                      {"max_seq_len", &model.max_seq_len},
                                      {"tokens_per_block", &model.cache.tokens_per_block}}) {
      config.model.at(name).get_to(*field);
    }
    for (const auto& [name, field] : {std::pair<const char*, int32_t*>{"vocab_size", &model.vocab_size},
                                      {"num_hidden_layers", &model.cache.num_layers},
                                      {"num_attention_heads", &heads},
                                      {"num_key_value_heads", &kv_heads},
                                      {"head_size", &model.cache.head_size}}) {
      whole.at(name).get_to(*field);
    }
    whole.at("dtype").get_to(dtype);
  }));
  for (const int32_t count : {model.vocab_size, model.max_batch_size, model.max_num_tokens, model.max_seq_len,
                              model.cache.tokens_per_block, model.cache.num_layers, kv_heads, model.cache.head_size}) {
    if (count < 1) return detail::refuse(where, "holds a size below 1", detail::kRebuild);
  }
  if (model.max_num_tokens < std::max(model.max_batch_size, model.cache.tokens_per_block)) {
    return detail::refuse(where, "max_num_tokens is less than max_batch_size or tokens_per_block",
                          "a step must hold one token of every sequence, and a block of a prompt");
  }
  // KV heads are copied where ranks share them as TensorRT-LLM's do, else padded.
  const bool copied = config.tp_size > kv_heads && config.tp_size % kv_heads == 0 && heads % config.tp_size == 0;
  model.cache.num_kv_heads = copied ? 1 : (kv_heads + config.tp_size - 1) / config.tp_size;
  model.cache.value_bytes = dtype == "float32" ? 4 : 2;
  model.cache.max_blocks_per_seq = model.cache.blocks_for(model.max_seq_len);
  model.cache.num_blocks = model.cache.max_blocks_per_seq * model.max_batch_size;
  return model;
}

}  // namespace tokenweave
