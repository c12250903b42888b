#include "suffix_rows_plugin.h"

#include "cuda_status.h"

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kTensor = 0, kPrefixRef = 1, kNumInputs = 2, kNumOutputs = 1;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

Status check_counts(int32_t inputs, int32_t outputs) {
  return trt::check_counts({inputs, outputs}, {kNumInputs, kNumOutputs});
}

std::string layer_name(const SuffixRowsFields& fields) {
  const std::string name = SuffixRowsPlugin::kName;
  return fields.site < 0 ? name : name + " site " + std::to_string(fields.site);
}

/// What activations have: a whole number of bytes an element.
bool is_served(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
    case DataType::kHALF:
    case DataType::kBF16:
    case DataType::kFP8:
    case DataType::kINT8:
    case DataType::kINT32:
    case DataType::kINT64:
      return true;
    default:
      return false;
  }
}

}  // namespace

SuffixRowsPlugin::SuffixRowsPlugin(Fields fields, nvinfer1::TensorRTPhase phase)
    : PluginWithFields(layer_name(fields), std::move(fields), phase) {}

int32_t SuffixRowsPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                             int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    types[0] = inputs[kTensor];
    return {};
  });
}

int32_t SuffixRowsPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                          DimsExprs* outputs, int32_t num_outputs,
                                          nvinfer1::IExprBuilder& builder) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    if (inputs[kTensor].nbDims != 2) return bad("the tensor is not [tokens, width]");
    if (inputs[kPrefixRef].nbDims < 1) return bad("the prefix's reference has no dimension");
    const auto* const behind =
        builder.operation(DimensionOperation::kSUB, *inputs[kTensor].d[0], *inputs[kPrefixRef].d[0]);
    outputs[0] = inputs[kTensor];
    outputs[0].d[0] = builder.operation(DimensionOperation::kMIN, *behind, *builder.constant(fields_.max_rows));
    return {};
  });
}

bool SuffixRowsPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                 int32_t num_inputs, int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  if (position == kPrefixRef) return true;  // only its shape is read
  return is_served(desc.type) && (position == kTensor || desc.type == descs[kTensor].desc.type);
}

int32_t SuffixRowsPlugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t num_inputs,
                                          const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  return run([&] { return check_counts(num_inputs, num_outputs); });
}

int32_t SuffixRowsPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                                  const void* const* inputs, void* const* outputs, void*,
                                  cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    const int64_t tokens = input_descs[kTensor].dims.d[0], rows = output_descs[0].dims.d[0];
    if (tokens == 0 || rows == 0) return {};
    const int64_t prefix = input_descs[kPrefixRef].dims.d[0];
    if (prefix + rows != tokens) {
      return bad("the step has " + std::to_string(tokens) + " tokens, the halves " + std::to_string(prefix) + " and " +
                 std::to_string(rows) + ". Fix: weave with the max_num_tokens of the engine's profile");
    }
    const size_t row_bytes = bytes_of(input_descs[kTensor]) / static_cast<size_t>(tokens);
    const auto* const first = static_cast<const char*>(inputs[kTensor]) + static_cast<size_t>(prefix) * row_bytes;
    return cuda_status(
        cudaMemcpyAsync(outputs[0], first, static_cast<size_t>(rows) * row_bytes, cudaMemcpyDeviceToDevice, stream),
        "copying the suffix's rows");
  });
}

}  // namespace tokenweave::trt
