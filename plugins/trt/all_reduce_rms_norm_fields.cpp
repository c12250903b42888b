#include "all_reduce_rms_norm_fields.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "../kernels/kernel_args.h"
#include "data_type.h"

namespace tokenweave::trt {
namespace {

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

/// FNV-1a.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  template <typename T>
  void add(const T& value) {
    add(&value, sizeof value);
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037u;
};

}  // namespace

void AllReduceRmsNormFields::visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase) {
  visitor.int32s("group", &group, 0);
  visitor.int32("tp_rank", &tp_rank, 0, kNoLimit);
  visitor.int32("type_id", &type_id, 0, kNoLimit);
  visitor.float32("eps", &eps, 0.0f, 1.0f);
  visitor.int32("kind", &kind, 0, 1);
  visitor.int32("site", &site, 0, kNoLimit);
  visitor.int32("half", &half, 0, 2);
  visitor.flag("residual_sharded", &residual_sharded);
  visitor.flag("gather_residual", &gather_residual);
  visitor.flag("has_bias", &has_bias);
  visitor.flag("side_stream", &side_stream);
  visitor.flag("last", &last);
  visitor.int32("weave_hash", &weave_hash, 0, kNoLimit);
  visitor.chars("table", &table);
  if (phase == nvinfer1::TensorRTPhase::kRUNTIME) {
    visitor.int32("hidden", &hidden, 1, kNoLimit);
    visitor.int32("max_rows", &max_rows, 0, kNoLimit);
  }
}

Status AllReduceRmsNormFields::check(nvinfer1::TensorRTPhase phase) {
  if (group.empty() || group.size() > TW_MAX_RANKS) {
    return bad("field 'group' has " + std::to_string(group.size()) + " ranks, expected 1 to " +
               std::to_string(TW_MAX_RANKS));
  }
  if (std::set<int32_t>(group.begin(), group.end()).size() != group.size())
    return bad("field 'group' has a rank twice");
  if (tp_rank >= tp_size()) {
    return bad("field 'tp_rank' = " + std::to_string(tp_rank) + " is outside the group of " +
               std::to_string(tp_size()));
  }
  TW_RETURN_IF_ERROR(read_table_field(table, type_id, &tuning_table));
  if (!table.empty() && tuning_table->tp_size() != tp_size()) {
    return bad("field 'table' is for " + std::to_string(tuning_table->tp_size()) + " ranks, the group has " +
               std::to_string(tp_size()));
  }
  return phase == nvinfer1::TensorRTPhase::kRUNTIME ? check_hidden(hidden) : Status{};
}

Status AllReduceRmsNormFields::check_hidden(int64_t value) const {
  if (value <= 0 || value % 8 != 0 || value > kMaxHidden) {
    return bad("hidden size " + std::to_string(value) + " is not a multiple of 8 from 8 to " +
               std::to_string(kMaxHidden));
  }
  if (!table.empty() && tuning_table->hidden_size() != value) {
    return bad("field 'table' is for hidden size " + std::to_string(tuning_table->hidden_size()) + ", this layer has " +
               std::to_string(value));
  }
  return {};
}

uint64_t AllReduceRmsNormFields::staging_bytes() const {
  return uint64_t(max_rows) * hidden * element_bytes(dtype()) * (gather_residual != 0 ? 2 : 1);
}

uint64_t AllReduceRmsNormFields::engine_hash() const {
  Hash hash;
  hash.add(twVersion(), std::strlen(twVersion()));
  hash.add(type_id);
  hash.add(side_stream);  // a split engine and a fused one of the same model are two
  hash.add(hidden);
  hash.add(weave_hash);
  hash.add(group.data(), group.size() * sizeof(int32_t));
  hash.add(table.data(), table.size());
  return hash.value();
}

}  // namespace tokenweave::trt
