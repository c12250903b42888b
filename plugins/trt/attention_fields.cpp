#include "attention_fields.h"

#include <algorithm>

namespace tokenweave::trt {

using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::TensorRTPhase;

namespace {

/// Every role from kQkv to this one is needed.
constexpr auto kLastNeeded = AttentionRole::kHostContextLengths;
constexpr auto kLastRole = AttentionRole::kHostSinkTokenLength;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

std::string text(const std::vector<uint8_t>& chars) { return std::string(chars.begin(), chars.end()); }

void append(const TensorBounds& one, std::vector<int32_t>* bounds) {
  bounds->push_back(one.max.nbDims);
  for (const Dims& dims : {one.min, one.max}) bounds->insert(bounds->end(), dims.d, dims.d + dims.nbDims);
}

Status widen_one(const DynamicPluginTensorDesc& given, bool first, TensorBounds* one) {
  if (given.max.nbDims < 0 || given.max.nbDims > Dims::MAX_DIMS || given.min.nbDims != given.max.nbDims ||
      (!first && one->max.nbDims != given.max.nbDims)) {
    return bad("a tensor has " + std::to_string(given.max.nbDims) + " dimensions, or not as many in all profiles");
  }
  if (first) *one = {given.min, given.max};
  for (int32_t i = 0; i < given.max.nbDims; ++i) {
    // TensorRT bounds a half's rows by interval arithmetic, so the least difference of two sizes may be negative.
    one->min.d[i] = std::max<int64_t>(std::min(one->min.d[i], given.min.d[i]), 0);
    one->max.d[i] = std::max(one->max.d[i], given.max.d[i]);
    if (one->max.d[i] < one->min.d[i] || one->max.d[i] > kNoLimit) {
      return bad("the profile does not bound a dimension");
    }
  }
  return {};
}

}  // namespace

void AttentionFields::visit(FieldVisitor& visitor, TensorRTPhase phase) {
  const bool of_engine = phase == TensorRTPhase::kRUNTIME;
  visitor.int32("half", &half, 0, 1);
  visitor.int32("num_heads", &num_heads, 1, kNoLimit);
  visitor.int32("head_size", &head_size, 1, kNoLimit);
  visitor.chars("inner_name", &inner_name);
  visitor.chars("inner_version", &inner_version);
  visitor.chars("inner_namespace", &inner_namespace);
  visitor.chars("inner", of_engine ? &inner_bytes : &inner_fields);
  visitor.int32s("roles", &roles, 0);
  if (of_engine) {
    visitor.int32("layer_idx", &layer_idx, -1, kNoLimit);
    visitor.int32s("bounds", &bounds, 0);
  }
}

Status AttentionFields::check(TensorRTPhase phase) {
  if (inner_name.empty()) return bad("field 'inner_name' is missing");
  std::vector<int32_t> times(static_cast<size_t>(kLastRole) + 1);
  for (const int32_t role : roles) {
    if (role > static_cast<int32_t>(kLastRole)) {
      return bad("field 'roles' = " + std::to_string(role) + " is outside 0.." +
                 std::to_string(static_cast<int32_t>(kLastRole)) + ". Fix: weave with the library's own release");
    }
    ++times[static_cast<size_t>(role)];
  }
  for (size_t role = 1; role < times.size(); ++role) {
    if (times[role] == 1 || (times[role] == 0 && role > static_cast<size_t>(kLastNeeded))) continue;
    return bad("field 'roles' has role " + std::to_string(role) + " " + std::to_string(times[role]) +
               " times, expected 1");
  }
  if (phase == TensorRTPhase::kRUNTIME) {
    if (inner_bytes.empty()) return bad("field 'inner' is missing: the layer was never configured");
    std::vector<TensorBounds> read;
    return read_bounds(&read);
  }
  const Status status = PackedFields::read(inner_fields, &inner);
  if (!status.ok()) return bad("field 'inner': " + status.message + ". Fix: weave the network again");
  layer_idx = std::max(-1, inner.int32("layer_idx", -1));
  return {};
}

PluginId AttentionFields::inner_id() const { return {text(inner_name), text(inner_version), text(inner_namespace)}; }

int32_t AttentionFields::place(AttentionRole role) const {
  const auto found = std::find(roles.begin(), roles.end(), static_cast<int32_t>(role));
  return found == roles.end() ? -1 : static_cast<int32_t>(found - roles.begin());
}

Status AttentionFields::widen(const DynamicPluginTensorDesc* inputs, const DynamicPluginTensorDesc& output) {
  std::vector<TensorBounds> all(roles.size() + 1);
  const bool first = bounds.empty();
  if (!first) TW_RETURN_IF_ERROR(read_bounds(&all));
  bounds.clear();
  for (size_t i = 0; i < all.size(); ++i) {
    TW_RETURN_IF_ERROR(widen_one(i < roles.size() ? inputs[i] : output, first, &all[i]));
    append(all[i], &bounds);
  }
  return {};
}

Status AttentionFields::read_bounds(std::vector<TensorBounds>* read) const {
  read->assign(roles.size() + 1, {});
  size_t at = 0;
  for (TensorBounds& one : *read) {
    const int32_t rank = at < bounds.size() ? bounds[at++] : -1;
    if (rank < 0 || rank > Dims::MAX_DIMS || bounds.size() - at < 2 * static_cast<size_t>(rank)) {
      return bad("field 'bounds' is cut short. Fix: build the engine again");
    }
    for (Dims* dims : {&one.min, &one.max}) {
      dims->nbDims = rank;
      for (int32_t i = 0; i < rank; ++i) dims->d[i] = bounds[at++];
    }
  }
  return at == bounds.size() ? Status{} : bad("field 'bounds' is too long. Fix: build the engine again");
}

}  // namespace tokenweave::trt
