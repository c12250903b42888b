#include "gpt_attention_fields.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

namespace tokenweave::reference {
namespace {

using nvinfer1::DataType;
using nvinfer1::TensorRTPhase;

constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
constexpr int32_t kPositionNone = 0, kPositionRopeGptNeox = 2;         // PositionEmbeddingType
constexpr int32_t kScaleNone = 0, kScaleLinear = 1, kScaleLlama3 = 4;  // RotaryScalingType

/// Of a number; without trailing zeros.
template <typename Number>
Status bad(const char* field, Number value, const std::string& why) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return error(TW_INVALID_ARGUMENT, std::string("field '") + field + "' = " + text + " " + why);
}

struct Attribute {
  enum Type { kInt32, kInt8, kFloat32, kInt32List };

  const char* name;
  Type type = kInt32;
  const char* feature = nullptr;  ///< what it asks for with any value but `off`; null: served, or without effect here
  int32_t off = 0;
};

// Without effect: what only belongs to features that are refused; what the tables of rotary_cos_sin hold already; how
// context attention accumulates (always in fp32), and whether it may read the cache (it always does).
constexpr Attribute kAttributes[] = {
    {"layer_idx"},
    {"num_heads"},
    {"vision_start", Attribute::kInt32, "vision tokens", -1},
    {"vision_length", Attribute::kInt32, "vision tokens", -1},
    {"num_kv_heads"},
    {"num_kv_heads_origin"},
    {"head_size"},
    {"unidirectional", Attribute::kInt32, "bidirectional attention", 1},
    {"q_scaling", Attribute::kFloat32},
    {"attn_logit_softcapping_scale", Attribute::kFloat32, "soft capping of scores"},
    {"position_embedding_type", Attribute::kInt8},
    {"rotary_embedding_dim"},
    {"rotary_embedding_base", Attribute::kFloat32},
    {"rotary_embedding_scale_type", Attribute::kInt8},
    {"rotary_embedding_scale", Attribute::kFloat32},
    {"rotary_embedding_short_m_scale", Attribute::kFloat32},
    {"rotary_embedding_long_m_scale", Attribute::kFloat32},
    {"rotary_embedding_max_positions"},
    {"rotary_embedding_original_max_positions"},
    {"tp_size"},
    {"tp_rank"},
    {"unfuse_qkv_gemm", Attribute::kInt8, "separate inputs for Q, K and V"},
    {"context_fmha_type", Attribute::kInt8},
    {"kv_cache_quant_mode", Attribute::kInt32, "a quantised model or KV cache"},
    {"remove_input_padding", Attribute::kInt8, "padded tokens", 1},
    {"mask_type", Attribute::kInt32, "a mask that is not causal", 1},
    {"block_sparse_block_size"},
    {"block_sparse_homo_head_pattern", Attribute::kInt8},
    {"block_sparse_num_local_blocks"},
    {"block_sparse_vertical_stride"},
    {"paged_kv_cache", Attribute::kInt32, "a KV cache that is not paged", 1},
    {"tokens_per_block"},
    {"type_id"},
    {"max_context_length"},
    {"qkv_bias_enabled", Attribute::kInt8, "a QKV bias inside the plugin"},
    {"do_cross_attention", Attribute::kInt8, "cross attention"},
    {"max_distance", Attribute::kInt32, "a relative attention bias"},
    {"pos_shift_enabled", Attribute::kInt8, "shifted positions (StreamingLLM)"},
    {"dense_context_fmha", Attribute::kInt8},
    {"use_paged_context_fmha", Attribute::kInt8},
    {"use_fp8_context_fmha", Attribute::kInt8, "FP8 attention"},
    {"has_full_attention_mask", Attribute::kInt8, "a mask as an input"},
    {"use_cache", Attribute::kInt32, "attention without a KV cache", 1},
    {"is_spec_decoding_enabled", Attribute::kInt8, "speculative decoding"},
    {"spec_decoding_is_generation_length_variable", Attribute::kInt8},
    {"spec_decoding_max_generation_length"},
    {"is_mla_enabled", Attribute::kInt8, "multi-head latent attention"},
    {"q_lora_rank"},
    {"kv_lora_rank"},
    {"qk_nope_head_dim"},
    {"qk_rope_head_dim"},
    {"v_head_dim"},
    {"fuse_fp4_quant", Attribute::kInt8, "an FP4 output"},
    {"skip_attn", Attribute::kInt8, "attention that is skipped at run time"},
    {"cp_size", Attribute::kInt32, "context parallelism", 1},
    {"cp_rank"},
    {"cp_group", Attribute::kInt32List},
    {"use_logn_scaling", Attribute::kInt8, "log-n scaling"},
};

/// Throws std::out_of_range for a name that is none of the attributes'.
size_t index_of(const char* name) {
  const auto* const found = std::find_if(std::begin(kAttributes), std::end(kAttributes),
                                         [name](const Attribute& one) { return std::strcmp(one.name, name) == 0; });
  if (found == std::end(kAttributes)) throw std::out_of_range(std::string("GPTAttention has no attribute ") + name);
  return static_cast<size_t>(found - std::begin(kAttributes));
}

}  // namespace

void GptAttentionFields::visit(trt::FieldVisitor& visitor, TensorRTPhase phase) {
  static_assert(std::size(kAttributes) == kCount);
  constexpr float kMost = std::numeric_limits<float>::max();
  size_t i = 0;
  for (const Attribute& attribute : kAttributes) {
    switch (attribute.type) {
      case Attribute::kInt32:
        visitor.int32(attribute.name, &values_[i].integer, kLeast, trt::kNoLimit);
        break;
      case Attribute::kInt8:
        visitor.int8(attribute.name, &values_[i].byte, std::numeric_limits<int8_t>::min(),
                     std::numeric_limits<int8_t>::max());
        break;
      case Attribute::kFloat32:
        visitor.float32(attribute.name, &values_[i].real, -kMost, kMost);
        break;
      case Attribute::kInt32List:
        visitor.int32s(attribute.name, &cp_group_, 0, trt::Presence::kOptional);
        break;
    }
    ++i;
  }
  if (phase == TensorRTPhase::kRUNTIME) visitor.int32("sms", &sms, 1, trt::kNoLimit);
}

int32_t GptAttentionFields::integer(const char* name) const {
  const size_t i = index_of(name);
  return kAttributes[i].type == Attribute::kInt8 ? values_[i].byte : values_[i].integer;
}

float GptAttentionFields::real(const char* name) const { return values_[index_of(name)].real; }

Status GptAttentionFields::check(TensorRTPhase) {
  TW_RETURN_IF_ERROR(check_features());
  TW_RETURN_IF_ERROR(check_heads());
  TW_RETURN_IF_ERROR(check_rotation());
  layer_idx = integer("layer_idx");
  if (layer_idx < 0) return bad("layer_idx", layer_idx, "is below 0");
  dtype = static_cast<DataType>(integer("type_id"));
  if (dtype != DataType::kHALF && dtype != DataType::kBF16) {
    return bad("type_id", integer("type_id"), "is not served, expected 1 (HALF) or 7 (BF16)");
  }
  tokens_per_block = integer("tokens_per_block");
  if (tokens_per_block < 1 || (tokens_per_block & (tokens_per_block - 1)) != 0) {
    return bad("tokens_per_block", tokens_per_block, "is not a power of two");
  }
  return {};
}

Status GptAttentionFields::check_features() const {
  for (const Attribute& attribute : kAttributes) {
    if (attribute.feature == nullptr) continue;
    const bool is_real = attribute.type == Attribute::kFloat32;
    const float value = is_real ? real(attribute.name) : static_cast<float>(integer(attribute.name));
    if (value == static_cast<float>(attribute.off)) continue;
    return bad(attribute.name, value,
               std::string("asks for ") + attribute.feature + ", which is not served; expected " +
                   std::to_string(attribute.off));
  }
  return {};
}

Status GptAttentionFields::check_heads() {
  heads = {integer("num_heads"), integer("num_kv_heads"), integer("head_size")};
  if (heads.kv < 1) return bad("num_kv_heads", heads.kv, "is below 1");
  if (heads.q < 1 || heads.q % heads.kv != 0) {
    return bad("num_heads", heads.q, "is not a multiple of num_kv_heads " + std::to_string(heads.kv));
  }
  if (heads.size != 64 && heads.size != 128) return bad("head_size", heads.size, "is not served, expected 64 or 128");
  const float scaling = real("q_scaling");
  if (!(scaling > 0)) return bad("q_scaling", scaling, "is not above 0");
  scale = 1 / (scaling * std::sqrt(static_cast<float>(heads.size)));
  return {};
}

Status GptAttentionFields::check_rotation() {
  const int32_t position = integer("position_embedding_type");
  rotary_dims = 0;
  if (position == kPositionNone) return {};
  if (position != kPositionRopeGptNeox) {
    return bad("position_embedding_type", position, "is not served, expected 0 (none) or 2 (RoPE, GPT-NeoX order)");
  }
  const int32_t scaling = integer("rotary_embedding_scale_type");
  if (scaling != kScaleNone && scaling != kScaleLinear && scaling != kScaleLlama3) {
    return bad("rotary_embedding_scale_type", scaling, "is not served, expected 0 (none), 1 (linear) or 4 (llama3)");
  }
  rotary_dims = integer("rotary_embedding_dim");
  if (rotary_dims < 16 || rotary_dims > heads.size || rotary_dims % 16 != 0) {
    return bad("rotary_embedding_dim", rotary_dims,
               "is not served, expected a multiple of 16 up to head_size " + std::to_string(heads.size));
  }
  return {};
}

}  // namespace tokenweave::reference
