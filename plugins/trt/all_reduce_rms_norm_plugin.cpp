#include "all_reduce_rms_norm_plugin.h"

#include <algorithm>

#include "cuda_status.h"

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kInput = 0, kResidual = 1, kNormWeight = 2, kBias = 3;
constexpr int32_t kNormed = 0, kResidualOut = 1, kChainOut = 2, kNumOutputs = 3;

std::string layer_name(const AllReduceRmsNormFields& fields) {
  return std::string(AllReduceRmsNormPlugin::kName) + " site " + std::to_string(fields.site) + " " +
         name_of(static_cast<Half>(fields.half));
}

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

}  // namespace

AllReduceRmsNormPlugin::AllReduceRmsNormPlugin(Fields fields, nvinfer1::TensorRTPhase phase)
    : PluginWithFields(layer_name(fields), std::move(fields), phase) {}

Status AllReduceRmsNormPlugin::check_counts(int32_t inputs, int32_t outputs) const {
  return trt::check_counts({inputs, outputs}, {num_inputs(), kNumOutputs});
}

int32_t AllReduceRmsNormPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                                   int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    const auto dtype = static_cast<DataType>(fields_.type_id);
    for (int32_t i = kInput; i < tokens_ref(); ++i) {
      if (inputs[i] == dtype) continue;
      return bad("input " + std::to_string(i) + " has DataType " + std::to_string(static_cast<int32_t>(inputs[i])) +
                 ", field 'type_id' is " + std::to_string(fields_.type_id));
    }
    if (inputs[chain()] != DataType::kINT32) return bad("the chain is not INT32");
    types[kNormed] = types[kResidualOut] = dtype;
    types[kChainOut] = DataType::kINT32;
    return {};
  });
}

Status AllReduceRmsNormPlugin::check_shapes(const DimsExprs* inputs) const {
  if (inputs[kInput].nbDims != 2 || inputs[kResidual].nbDims != 2)
    return bad("input and residual are not [tokens, hidden]");
  const nvinfer1::IDimensionExpr* hidden = inputs[kInput].d[1];
  if (!hidden->isConstant()) return bad("the hidden size of input is not known when building");
  TW_RETURN_IF_ERROR(fields_.check_hidden(hidden->getConstantValue()));
  const auto same = [hidden](const nvinfer1::IDimensionExpr* dim) {
    return dim->isConstant() && dim->getConstantValue() == hidden->getConstantValue();
  };
  if (!same(inputs[kResidual].d[1])) return bad("residual has another hidden size than input");
  for (int32_t i = kNormWeight; i < tokens_ref(); ++i) {
    if (inputs[i].nbDims != 1 || !same(inputs[i].d[0])) return bad("norm_weight or bias is not [hidden]");
  }
  const DimsExprs& link = inputs[chain()];
  if (link.nbDims != 1 || !link.d[0]->isConstant() || link.d[0]->getConstantValue() != 1)
    return bad("the chain is not [1]");
  return {};
}

int32_t AllReduceRmsNormPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                                DimsExprs* outputs, int32_t num_outputs,
                                                nvinfer1::IExprBuilder& builder) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_shapes(inputs));
    outputs[kNormed] = outputs[kResidualOut] = inputs[kInput];
    outputs[kChainOut] = inputs[chain()];
    if (fields_.gather_residual == 0) {
      outputs[kResidualOut].d[0] = builder.operation(nvinfer1::DimensionOperation::kCEIL_DIV, *inputs[kInput].d[0],
                                                     *builder.constant(fields_.tp_size()));
    }
    return {};
  });
}

bool AllReduceRmsNormPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                       int32_t num_inputs, int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  if (position == chain() || position == num_inputs + kChainOut) return desc.type == DataType::kINT32;
  if (position == tokens_ref() || position == batch_ref()) return true;  // only their shapes are read
  return desc.type == static_cast<DataType>(fields_.type_id);
}

int32_t AllReduceRmsNormPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                                const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    const int64_t rows = first_dim(inputs[kInput].max), tokens = first_dim(inputs[tokens_ref()].max);
    if (rows < 0 || rows > kNoLimit || tokens < 0 || tokens > kNoLimit) {
      return bad("the profile does not bound the tokens: " + std::to_string(rows) + " of " + std::to_string(tokens));
    }
    TW_RETURN_IF_ERROR(fields_.check_hidden(inputs[kInput].max.d[1]));
    fields_.hidden = static_cast<int32_t>(inputs[kInput].max.d[1]);
    fields_.max_rows = std::max(fields_.max_rows, static_cast<int32_t>(rows));
    return {};
  });
}

nvinfer1::IPluginV3* AllReduceRmsNormPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  std::unique_ptr<AllReduceRmsNormPlugin> copy;
  const int32_t failed = run([&]() -> Status {
    copy = std::make_unique<AllReduceRmsNormPlugin>(*this);
    return copy->building() ? Status{} : copy->attach();
  });
  return failed != 0 ? nullptr : copy.release();
}

Status AllReduceRmsNormPlugin::attach() {
  SideStreamKey key;
  TW_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&key.device), "cudaGetDevice"));
  key.group = fields_.group;
  key.rank = fields_.tp_rank;
  key.engine_hash = fields_.engine_hash();
  TW_RETURN_IF_ERROR(SideStream::acquire(key, &side_stream_));
  return side_stream_->add_site({fields_.site, static_cast<Half>(fields_.half)}, fields_.side_stream != 0,
                                fields_.staging_bytes());
}

int32_t AllReduceRmsNormPlugin::onShapeChange(const PluginTensorDesc*, int32_t, const PluginTensorDesc*,
                                              int32_t) noexcept {
  // All layers of the context are attached by now, and nothing is queued or captured yet: the time to meet the other
  // ranks.
  return run([&] { return side_stream_ != nullptr ? side_stream_->prepare() : Status{}; });
}

Status AllReduceRmsNormPlugin::check_residual(const PluginTensorDesc* descs) const {
  const int64_t rows = descs[kInput].dims.d[0], size = fields_.tp_size();
  const int64_t expected = fields_.residual_sharded != 0 ? (rows + size - 1) / size : rows;
  if (descs[kResidual].dims.d[0] == expected) return {};
  return bad("residual has " + std::to_string(descs[kResidual].dims.d[0]) + " rows for " + std::to_string(rows) +
             " of input, expected " + std::to_string(expected));
}

Collective AllReduceRmsNormPlugin::collective(const PluginTensorDesc* descs, const void* const* inputs,
                                              void* const* outputs) const {
  const LayerStep step = layer_step(descs[kInput], descs[tokens_ref()], descs[batch_ref()]);
  Collective c;
  c.at = {fields_.site, static_cast<Half>(fields_.half)};
  c.overlap = fields_.side_stream != 0 && step.split();
  c.call.launch = launch_of(*fields_.tuning_table, step, static_cast<SiteKind>(fields_.kind));
  // Few CTAs are for the sake of the GEMMs beside them; with none left the kernel may take what it likes.
  if (fields_.last != 0 && c.at.half == Half::kSuffix && step.split()) c.call.launch.ctas = 0;
  TwAllReduceRmsNorm& op = c.call.op;
  op.struct_bytes = sizeof op;
  op.dtype = fields_.dtype();
  op.num_tokens = static_cast<int32_t>(step.rows);
  op.hidden = static_cast<int32_t>(descs[kInput].dims.d[1]);
  op.residual_sharded = fields_.residual_sharded;
  op.gather_residual = fields_.gather_residual;
  op.eps = fields_.eps;
  op.norm_weight = inputs[kNormWeight];
  op.bias = fields_.has_bias != 0 ? inputs[kBias] : nullptr;
  c.call.tensors = {inputs[kInput], inputs[kResidual], outputs[kNormed], outputs[kResidualOut]};
  return c;
}

int32_t AllReduceRmsNormPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                        const void* const* inputs, void* const* outputs, void*,
                                        cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (side_stream_ == nullptr) return error(TW_INTERNAL, "was run without being attached to an execution context");
    TW_RETURN_IF_ERROR(check_residual(input_descs));
    return side_stream_->enqueue(collective(input_descs, inputs, outputs), stream);
  });
}

}  // namespace tokenweave::trt
