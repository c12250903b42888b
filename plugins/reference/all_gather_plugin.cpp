#include "all_gather_plugin.h"

#include <string>

namespace tokenweave::reference {

using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kTensor = 0, kNumInputs = 1;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

}  // namespace

void AllGatherFields::visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase) {
  visitor.int32s("group", &group, 0);
  visitor.int32("type_id", &type_id, 0, trt::kNoLimit);
}

Status AllGatherFields::check(nvinfer1::TensorRTPhase) {
  TW_RETURN_IF_ERROR(sort_group(&group));
  return trt::check_type_id(type_id);
}

Status AllGatherPlugin::start() {
  return communicator_ != nullptr ? Status{} : Communicator::acquire(fields_.group, &communicator_);
}

DimsExprs AllGatherPlugin::getOutputDimensions(int32_t, const DimsExprs* inputs, int32_t num_inputs,
                                               nvinfer1::IExprBuilder& builder) noexcept {
  DimsExprs output{};
  output.nbDims = -1;  // how an IPluginV2 says that it has none
  run([&]() -> Status {
    if (num_inputs != kNumInputs) return bad("has " + std::to_string(num_inputs) + " inputs, expected 1");
    const DimsExprs& tensor = inputs[kTensor];
    if (tensor.nbDims < 1) return bad("the tensor has no dimensions");
    output = tensor;
    output.d[0] = builder.operation(nvinfer1::DimensionOperation::kPROD, *tensor.d[0],
                                    *builder.constant(static_cast<int64_t>(fields_.group.size())));
    return {};
  });
  return output;
}

bool AllGatherPlugin::supportsFormatCombination(int32_t position, const PluginTensorDesc* descs, int32_t num_inputs,
                                                int32_t) noexcept {
  return num_inputs == kNumInputs && descs[position].format == nvinfer1::TensorFormat::kLINEAR &&
         descs[position].type == static_cast<nvinfer1::DataType>(fields_.type_id);
}

int32_t AllGatherPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                 const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (communicator_ == nullptr) return error(TW_INTERNAL, "was run without being initialised");
    return communicator_->all_gather(inputs[kTensor], outputs[0], elements(input_descs[kTensor].dims),
                                     static_cast<TwDataType>(fields_.type_id), stream);
  });
}

}  // namespace tokenweave::reference
