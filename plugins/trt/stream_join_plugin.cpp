#include "stream_join_plugin.h"

#include <algorithm>

#include "side_stream.h"

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

std::string layer_name(const StreamJoinFields& fields) {
  const std::string name = StreamJoinPlugin::kName;
  if (fields.site < 0) return name + " gate";
  return name + " site " + std::to_string(fields.site) + " " + name_of(static_cast<Half>(fields.half));
}

/// Far more than a join ever passes on; keeps the count of outputs from overflowing.
constexpr int32_t kMaxAliased = 1024;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

}  // namespace

void StreamJoinFields::visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase phase) {
  visitor.int32("num_aliased", &num_aliased, 0, kMaxAliased);
  visitor.int32("site", &site, -1, kNoLimit);
  visitor.int32("half", &half, 0, 2);
  visitor.flag("waits", &waits);
  if (phase == nvinfer1::TensorRTPhase::kRUNTIME) visitor.int32("num_inputs", &num_inputs, 1, kNoLimit);
}

Status StreamJoinFields::check(nvinfer1::TensorRTPhase) const {
  return waits != 0 && site < 0 ? bad("field 'waits' = 1 needs a site to wait for, and field 'site' is -1") : Status{};
}

StreamJoinPlugin::StreamJoinPlugin(Fields fields, nvinfer1::TensorRTPhase phase)
    : PluginWithFields(layer_name(fields), std::move(fields), phase) {}

Status StreamJoinPlugin::check_counts(int32_t inputs, int32_t outputs) const {
  if (inputs > fields_.num_aliased && outputs == fields_.num_aliased + 1) return {};
  return bad("has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs for " +
             std::to_string(fields_.num_aliased) + " aliased tensors and a chain");
}

int32_t StreamJoinPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                             int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    if (inputs[num_inputs - 1] != DataType::kINT32) return bad("the chain is not INT32");
    std::copy_n(inputs, fields_.num_aliased, types);
    types[fields_.num_aliased] = DataType::kINT32;
    return {};
  });
}

int32_t StreamJoinPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                          DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    const DimsExprs& chain = inputs[num_inputs - 1];
    if (chain.nbDims != 1 || !chain.d[0]->isConstant() || chain.d[0]->getConstantValue() != 1) {
      return bad("the chain is not [1]");
    }
    std::copy_n(inputs, fields_.num_aliased, outputs);
    outputs[fields_.num_aliased] = chain;
    return {};
  });
}

bool StreamJoinPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                 int32_t num_inputs, int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const int32_t output = position - num_inputs;
  if (position == num_inputs - 1 || output == fields_.num_aliased) return desc.type == DataType::kINT32;
  return output < 0 || desc.type == descs[output].desc.type;
}

int32_t StreamJoinPlugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t num_inputs,
                                          const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  return run([&]() -> Status {
    fields_.num_inputs = num_inputs;
    return check_counts(num_inputs, num_outputs);
  });
}

int32_t StreamJoinPlugin::enqueue(const PluginTensorDesc*, const PluginTensorDesc* output_descs,
                                  const void* const* inputs, void* const* outputs, void*,
                                  cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (fields_.waits != 0) {
      const std::shared_ptr<SideStream> side_stream = SideStream::of_this_thread();
      if (side_stream == nullptr) return error(TW_INTERNAL, "was run before any AllReduceRmsNorm");
      const SiteHalf at{fields_.site, static_cast<Half>(fields_.half)};
      TW_RETURN_IF_ERROR(side_stream->join({at, inputs, fields_.num_inputs}, stream));
    }
    return copy_unaliased(output_descs, inputs, outputs, fields_.num_aliased, stream);
  });
}

}  // namespace tokenweave::trt
