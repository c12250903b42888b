#include "gemm_plugin.h"

#include <algorithm>
#include <string>

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kX = 0, kWeight = 1, kTokensRef = 2, kBatchRef = 3, kNumInputs = 4, kNumOutputs = 1;

std::string layer_name(const GemmFields& fields) {
  const bool attention = static_cast<SiteKind>(fields.kind) == SiteKind::kAttention;
  return std::string(GemmPlugin::kName) + (attention ? " attention" : " mlp");
}

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

}  // namespace

GemmPlugin::GemmPlugin(Fields fields, nvinfer1::TensorRTPhase phase)
    : PluginWithFields(layer_name(fields), std::move(fields), phase) {}

Status GemmPlugin::check_counts(int32_t inputs, int32_t outputs) const {
  return trt::check_counts({inputs, outputs}, {kNumInputs, kNumOutputs});
}

int32_t GemmPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                       int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    const auto dtype = static_cast<DataType>(fields_.type_id);
    for (const int32_t i : {kX, kWeight}) {
      if (inputs[i] == dtype) continue;
      return bad("input " + std::to_string(i) + " has DataType " + std::to_string(static_cast<int32_t>(inputs[i])) +
                 ", field 'type_id' is " + std::to_string(fields_.type_id));
    }
    types[0] = dtype;
    return {};
  });
}

int32_t GemmPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                    DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    const DimsExprs &x = inputs[kX], &weight = inputs[kWeight];
    if (x.nbDims != 2 || weight.nbDims != 2) return bad("x and weight are not matrices");
    const auto* const n = weight.d[fields_.transb != 0 ? 0 : 1];
    const auto* const k = weight.d[fields_.transb != 0 ? 1 : 0];
    if (!n->isConstant() || !k->isConstant()) return bad("the shape of weight is not known when building");
    if (!x.d[1]->isConstant() || x.d[1]->getConstantValue() != k->getConstantValue()) {
      return bad("x does not have the " + std::to_string(k->getConstantValue()) + " columns that weight has rows for");
    }
    outputs[0] = x;
    outputs[0].d[1] = n;
    return {};
  });
}

bool GemmPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs, int32_t num_inputs,
                                           int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  if (position == kTokensRef || position == kBatchRef) return true;  // only their shapes are read
  return desc.type == static_cast<DataType>(fields_.type_id);
}

int32_t GemmPlugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t num_inputs, const DynamicPluginTensorDesc*,
                                    int32_t num_outputs) noexcept {
  return run([&] { return check_counts(num_inputs, num_outputs); });
}

nvinfer1::IPluginV3* GemmPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  std::unique_ptr<GemmPlugin> copy;
  const int32_t failed = run([&]() -> Status {
    copy = std::make_unique<GemmPlugin>(*this);
    return copy->building() ? Status{} : GemmRunner::acquire(&copy->runner_);
  });
  return failed != 0 ? nullptr : copy.release();
}

int32_t GemmPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                            void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (runner_ == nullptr) return error(TW_INTERNAL, "was run without being attached to an execution context");
    const LayerStep step = layer_step(input_descs[kX], input_descs[kTokensRef], input_descs[kBatchRef]);
    const TableLaunch launch = launch_of(*fields_.tuning_table, step, static_cast<SiteKind>(fields_.kind));
    Gemm gemm;
    gemm.m = step.rows;
    gemm.n = input_descs[kWeight].dims.d[fields_.transb != 0 ? 0 : 1];
    gemm.k = input_descs[kX].dims.d[1];
    gemm.dtype = static_cast<TwDataType>(fields_.type_id);
    gemm.transb = fields_.transb != 0;
    const int32_t left = launch.gemm_sms != 0 ? launch.gemm_sms : runner_->sm_count() - launch.ctas;
    gemm.sm_target = step.split() ? std::max(left, 0) : 0;
    return runner_->queue(gemm, {inputs[kX], inputs[kWeight], outputs[0]}, workspace, stream);
  });
}

}  // namespace tokenweave::trt
