#include "all_reduce_plugin.h"

#include <algorithm>
#include <map>
#include <string>

#include "add_rms_norm.h"
#include "cuda_status.h"
#include "data_type.h"

namespace tokenweave::reference {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kTensor = 0, kWorkspace = 1;
constexpr int32_t kSum = 0, kNormed = 0, kStored = 1;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

/// Older ones number strategies otherwise.
constexpr const char* kReleases = "TensorRT-LLM 0.20 to 1.2";

/// AllReduceStrategy values of those releases that are more than a sum.
const std::map<int8_t, const char*>& refused_strategies() {
  static const std::map<int8_t, const char*> names{{2, "UB"}, {6, "LOWPRECISION"}, {7, "MNNVL"}};
  return names;
}

constexpr int8_t kLastStrategy = kNcclSymmetric;

}  // namespace

void AllReduceFields::visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase phase) {
  constexpr auto kOptional = trt::Presence::kOptional;
  visitor.int32s("group", &group, 0);
  visitor.int32("type_id", &type_id, 0, trt::kNoLimit);
  visitor.int8("strategy", &strategy, 0, INT8_MAX);
  visitor.int8("config", &config, 0, INT8_MAX, kOptional);
  visitor.int8("fusion_op", &fusion_op, 0, INT8_MAX);
  visitor.int32("counter", &counter, 0, trt::kNoLimit, kOptional);
  visitor.float32("eps", &eps, 0.0f, 1.0f);
  visitor.flag("affine", &affine);
  visitor.flag("bias", &bias);
  visitor.flag("scale", &scale);
  if (phase == nvinfer1::TensorRTPhase::kRUNTIME) {
    visitor.flag("has_workspace", &has_workspace);
    visitor.int32("window_kib", &window_kib, 0, trt::kNoLimit, kOptional);
  }
}

Status AllReduceFields::check(nvinfer1::TensorRTPhase) {
  TW_RETURN_IF_ERROR(sort_group(&group));
  TW_RETURN_IF_ERROR(trt::check_type_id(type_id));
  const auto refused = refused_strategies().find(strategy);
  if (refused != refused_strategies().end() || strategy > kLastStrategy) {
    const std::string name = refused != refused_strategies().end() ? refused->second : "none";
    return bad("field 'strategy' = " + std::to_string(strategy) + " (" + name + " of " + kReleases +
               ", whose numbers are assumed) is not done here. Fix: NCCL (0) or AUTO (3)");
  }
  if (static_cast<FusionOp>(fusion_op) != FusionOp::kNone && !fused()) {
    return bad("field 'fusion_op' = " + std::to_string(fusion_op) +
               " is not done here. Fix: NONE (0) or RESIDUAL_RMS_NORM (1)");
  }
  return scale == 0 ? Status{} : bad("field 'scale' = 1 belongs to quantised outputs, which are not done here");
}

Status AllReducePlugin::start() {
  if (fields_.symmetric() && fields_.window_kib == 0) {
    return bad("field 'window_kib' is not in the engine, which an older library built. Fix: rebuild the engine");
  }
  if (communicator_ == nullptr) TW_RETURN_IF_ERROR(Communicator::acquire(fields_.group, &communicator_));
  if (!fields_.symmetric() || window_ != nullptr) return {};
  return communicator_->window(size_t{1024} * fields_.window_kib, &window_);
}

Status AllReducePlugin::check_counts(int32_t inputs, int32_t outputs) const {
  const bool workspace = inputs == num_tensors() + 1;
  if ((inputs == num_tensors() || workspace) && outputs == getNbOutputs()) return {};
  return bad("has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs, expected " +
             std::to_string(num_tensors()) + " inputs, or one more with a workspace, and " +
             std::to_string(getNbOutputs()) + " outputs");
}

Status AllReducePlugin::check_hidden(int64_t hidden) const {
  if (!fields_.fused() || (hidden > 0 && hidden % 8 == 0 && hidden <= kMaxHidden)) return {};
  return bad("hidden size " + std::to_string(hidden) + " is not a multiple of 8 from 8 to " +
             std::to_string(kMaxHidden));
}

nvinfer1::DimsExprs AllReducePlugin::getOutputDimensions(int32_t, const nvinfer1::DimsExprs* inputs, int32_t,
                                                         nvinfer1::IExprBuilder&) noexcept {
  nvinfer1::DimsExprs output{};
  output.nbDims = -1;  // how an IPluginV2 says that it has none
  run([&]() -> Status {
    const nvinfer1::DimsExprs& tensor = inputs[kTensor];
    if (tensor.nbDims < 1) return bad("the tensor has no dimensions");
    const auto* const hidden = tensor.d[tensor.nbDims - 1];
    if (hidden->isConstant()) TW_RETURN_IF_ERROR(check_hidden(hidden->getConstantValue()));
    output = tensor;
    return {};
  });
  return output;
}

bool AllReducePlugin::supportsFormatCombination(int32_t position, const PluginTensorDesc* descs, int32_t num_inputs,
                                                int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  if (descs[position].format != nvinfer1::TensorFormat::kLINEAR) return false;
  const bool workspace = position == kWorkspace && num_inputs > num_tensors();
  return descs[position].type == (workspace ? DataType::kINT64 : static_cast<DataType>(fields_.type_id));
}

void AllReducePlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                      const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    fields_.has_workspace = num_inputs > num_tensors() ? 1 : 0;
    if (!fields_.symmetric()) return {};
    const size_t kib =
        (elements(inputs[kTensor].max) * element_bytes(static_cast<TwDataType>(fields_.type_id)) + 1023) / 1024;
    // TensorRT may configure a plugin for one profile after another.
    fields_.window_kib = std::max(fields_.window_kib, static_cast<int32_t>(std::min<size_t>(kib, trt::kNoLimit)));
    return {};
  });
}

/// `where`: where the sum lies, which is `output` or, when the plugin is fused, the window.
Status AllReducePlugin::sum(const void* input, size_t count, void* output, const void** where,
                            cudaStream_t stream) const {
  const auto dtype = static_cast<TwDataType>(fields_.type_id);
  *where = output;
  if (!fields_.symmetric()) return communicator_->all_reduce(input, output, count, dtype, stream);
  TW_RETURN_IF_ERROR(communicator_->sum_in_window(*window_, input, count, dtype, stream));
  *where = window_->sum();
  if (fields_.fused() || count == 0) return {};
  return cuda_status(
      cudaMemcpyAsync(output, window_->sum(), count * element_bytes(dtype), cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
}

Status AllReducePlugin::add_and_normalise(const nvinfer1::Dims& dims, const void* sum, const void* const* rest,
                                          void* const* outputs, cudaStream_t stream) const {
  TW_RETURN_IF_ERROR(check_hidden(dims.d[dims.nbDims - 1]));
  AddRmsNorm call;
  call.dtype = static_cast<TwDataType>(fields_.type_id);
  call.hidden = static_cast<int32_t>(dims.d[dims.nbDims - 1]);
  call.rows = static_cast<int64_t>(elements(dims)) / call.hidden;
  call.eps = fields_.eps;
  call.input = sum;
  call.bias = fields_.bias != 0 ? *rest++ : nullptr;
  call.residual = *rest++;
  call.norm_weight = fields_.affine != 0 ? *rest : nullptr;
  call.normed = outputs[kNormed];
  call.stored = outputs[kStored];
  return add_rms_norm(call, stream);
}

int32_t AllReducePlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                 const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (communicator_ == nullptr || (fields_.symmetric() && window_ == nullptr))
      return error(TW_INTERNAL, "was run without being initialised");
    const nvinfer1::Dims& dims = input_descs[kTensor].dims;
    const void* where = nullptr;
    TW_RETURN_IF_ERROR(sum(inputs[kTensor], elements(dims), outputs[fields_.fused() ? kStored : kSum], &where, stream));
    if (!fields_.fused()) return {};
    return add_and_normalise(dims, where, inputs + 1 + fields_.has_workspace, outputs, stream);
  });
}

}  // namespace tokenweave::reference
