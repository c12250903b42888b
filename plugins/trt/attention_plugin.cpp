#include "attention_plugin.h"

#include <algorithm>

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

namespace {

constexpr const char* kLeaveWhole = ". Fix: weave with split_attention off";

/// What the first of two halves that both record a layer's progress gets as host_context_progress: nothing to record.
constexpr int64_t kNoProgress = 0;

std::string layer_name(const AttentionFields& fields) {
  const std::string layer = fields.layer_idx < 0 ? "" : " layer " + std::to_string(fields.layer_idx);
  return AttentionPlugin::kName + layer + " " + name_of(static_cast<Half>(fields.half));
}

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

PluginTensorDesc largest(const DynamicPluginTensorDesc& given) {
  PluginTensorDesc desc = given.desc;
  desc.dims = given.max;
  return desc;
}

/// For a V2 plugin that is initialized, which is told of dimensions that a step can have, not of -1: the profile's
/// optimum, or its bound where TensorRT knows no optimum.
DynamicPluginTensorDesc typical(const DynamicPluginTensorDesc& given) {
  DynamicPluginTensorDesc desc = given;
  const Dims &opt = given.opt, &max = given.max;
  const bool known = opt.nbDims == max.nbDims && std::equal(opt.d, opt.d + opt.nbDims, max.d,
                                                            [](int64_t a, int64_t b) { return 0 <= a && a <= b; });
  desc.desc.dims = known ? opt : max;
  for (int32_t i = 0; i < desc.min.nbDims; ++i) desc.min.d[i] = std::max<int64_t>(desc.min.d[i], 0);  // as in widen()
  return desc;
}

}  // namespace

AttentionPlugin::AttentionPlugin(Fields fields, TensorRTPhase phase)
    : PluginWithFields(layer_name(fields), std::move(fields), phase) {}

/// An inner plugin that is attached, and scratch memory, are of one context alone.
AttentionPlugin::AttentionPlugin(const AttentionPlugin& other)
    : PluginWithFields(other), inner_(other.building() ? other.inner_.clone() : InnerPlugin()) {}

Status AttentionPlugin::created() {
  // An engine's inner plugin is made for each context; here only what would fail then fails already.
  if (!fields_.inner_bytes.empty()) return check_creator(fields_.inner_id());
  TW_RETURN_IF_ERROR(InnerPlugin::create(fields_.inner_id(), *fields_.inner.collection(), &inner_));
  const int32_t outputs = inner_->getNbOutputs();
  return outputs == 1 ? Status{} : bad("its inner plugin has " + std::to_string(outputs) + " outputs" + kLeaveWhole);
}

Status AttentionPlugin::check_counts(int32_t inputs, int32_t outputs) const {
  if (inputs == fields_.num_inputs() && outputs == 1) return {};
  return bad("has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs, expected " +
             std::to_string(fields_.num_inputs()) + " (field 'roles') and 1");
}

Status AttentionPlugin::check_inner() const {
  return inner_ ? Status{} : error(TW_INTERNAL, "has no inner plugin: it did not clone itself, or was never attached");
}

int32_t AttentionPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                            int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_inner());
    types[0] = inner_->getOutputDataType(0, inputs, num_inputs);
    return {};
  });
}

int32_t AttentionPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                         DimsExprs* outputs, int32_t num_outputs,
                                         nvinfer1::IExprBuilder& builder) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_inner());
    outputs[0] = inner_->getOutputDimensions(0, inputs, num_inputs, builder);
    if (outputs[0].nbDims != 2) {
      return bad("its inner plugin's output has " + std::to_string(outputs[0].nbDims) +
                 " dimensions, expected [tokens, width]");
    }
    const nvinfer1::IDimensionExpr& width = *outputs[0].d[1];
    const int64_t expected = int64_t{fields_.num_heads} * fields_.head_size;
    if (!width.isConstant() || width.getConstantValue() == expected) return {};
    return bad("its inner plugin's output is " + std::to_string(width.getConstantValue()) +
               " wide, fields 'num_heads' "
               "and 'head_size' make " +
               std::to_string(expected));
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                int32_t num_inputs, int32_t num_outputs) noexcept {
  bool supported = false;
  const int32_t failed = run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_inner());
    std::vector<PluginTensorDesc> plain(static_cast<size_t>(num_inputs + num_outputs));
    for (size_t i = 0; i < plain.size(); ++i) plain[i] = descs[i].desc;
    supported = plain[static_cast<size_t>(position)].format == nvinfer1::TensorFormat::kLINEAR &&
                inner_->supportsFormatCombination(position, plain.data(), num_inputs, num_outputs);
    return {};
  });
  return failed == 0 && supported;
}

Status AttentionPlugin::check_beams(const Dims& cache_indirection) const {
  if (cache_indirection.nbDims != 3) return bad("cache_indirection is not [sequences, beams, max_seq_len]");
  if (cache_indirection.d[1] == 1) return {};
  return bad("the beam width of cache_indirection is " + std::to_string(cache_indirection.d[1]) + ", expected 1" +
             kLeaveWhole);
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                         const DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_inner());
    TW_RETURN_IF_ERROR(check_beams(inputs[fields_.place(AttentionRole::kCacheIndirection)].max));
    TW_RETURN_IF_ERROR(fields_.widen(inputs, outputs[0]));
    // What it prepares here, such as kernels compiled for these bounds, is part of its bytes.
    TW_RETURN_IF_ERROR(inner_.initialize());
    std::vector<DynamicPluginTensorDesc> in(static_cast<size_t>(num_inputs));
    std::transform(inputs, inputs + num_inputs, in.begin(), typical);
    const DynamicPluginTensorDesc out = typical(outputs[0]);
    inner_->configurePlugin(in.data(), num_inputs, &out, num_outputs);
    fields_.inner_bytes = inner_.serialized();
    return {};
  });
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                         const DynamicPluginTensorDesc* outputs, int32_t num_outputs) const noexcept {
  size_t bytes = 0;
  run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    TW_RETURN_IF_ERROR(check_inner());
    std::vector<PluginTensorDesc> in(static_cast<size_t>(num_inputs));
    std::transform(inputs, inputs + num_inputs, in.begin(), largest);
    const PluginTensorDesc out = largest(outputs[0]);
    bytes = inner_->getWorkspaceSize(in.data(), num_inputs, &out, num_outputs);
    return {};
  });
  return bytes;
}

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  std::unique_ptr<AttentionPlugin> copy;
  const int32_t failed = run([&]() -> Status {
    copy = std::make_unique<AttentionPlugin>(*this);
    return copy->building() ? Status{} : copy->attach();
  });
  return failed != 0 ? nullptr : copy.release();
}

Status AttentionPlugin::attach() {
  TW_RETURN_IF_ERROR(InnerPlugin::deserialize(fields_.inner_id(), fields_.inner_bytes, &inner_));
  TW_RETURN_IF_ERROR(inner_.initialize());
  inner_.attach();

  TW_RETURN_IF_ERROR(fields_.read_bounds(&scratch_.bounds));
  const Dims& batch = scratch_.bounds[static_cast<size_t>(fields_.place(AttentionRole::kHostContextLengths))].max;
  if (batch.nbDims != 1) return bad("host_context_lengths is not [sequences]");
  const auto sequences = static_cast<size_t>(batch.d[0]);
  scratch_.dynamic_descs.resize(scratch_.bounds.size());
  scratch_.descs.resize(fields_.roles.size());
  scratch_.inputs.resize(fields_.roles.size());
  scratch_.context_lengths.resize(sequences);
  scratch_.past_key_value_lengths.resize(sequences);
  return {};
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t num_inputs,
                                       const PluginTensorDesc* outputs, int32_t num_outputs) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    if (building()) return {};
    TW_RETURN_IF_ERROR(check_inner());
    // TensorRT configures V2 plugins again whenever shapes change.
    for (size_t i = 0; i < scratch_.bounds.size(); ++i) {
      const PluginTensorDesc& desc = i < fields_.roles.size() ? inputs[i] : outputs[0];
      const TensorBounds& bounds = scratch_.bounds[i];
      scratch_.dynamic_descs[i] = {desc, bounds.min, bounds.max, desc.dims};
    }
    inner_->configurePlugin(scratch_.dynamic_descs.data(), num_inputs, &scratch_.dynamic_descs.back(), num_outputs);
    return {};
  });
}

Status AttentionPlugin::find_half(const PluginTensorDesc* descs, const void* const* inputs, BatchCut* cut) const {
  const Dims& sequences = descs[fields_.place(AttentionRole::kHostContextLengths)].dims;
  const Batch batch{host(inputs, AttentionRole::kHostRequestTypes), host(inputs, AttentionRole::kHostContextLengths),
                    sequences.d[0]};
  if (batch.size > static_cast<int64_t>(scratch_.context_lengths.size())) {
    return bad("the step has " + std::to_string(batch.size) + " sequences, the engine is built for " +
               std::to_string(scratch_.context_lengths.size()));
  }
  int64_t tokens = 0;
  TW_RETURN_IF_ERROR(count_tokens(batch, &tokens));
  const int64_t rows = descs[fields_.place(AttentionRole::kQkv)].dims.d[0];
  if (rows > tokens) {
    return bad("this half has " + std::to_string(rows) + " tokens, the step " + std::to_string(tokens));
  }
  return cut_batch(batch, is_prefix() ? rows : tokens - rows, cut);
}

Status AttentionPlugin::check_shared(const PluginTensorDesc* descs, const void* const* inputs,
                                     const HalfSequences& half) const {
  if (half.shared < 0) return {};
  const int32_t sequence = half.first + half.shared;
  const auto refuse = [sequence](const std::string& what) {
    return bad("sequence " + std::to_string(sequence) + " is cut in two, and " + what + kLeaveWhole);
  };
  if (const int32_t at = fields_.place(AttentionRole::kHostMaxAttentionWindowSizes); at >= 0) {
    const auto* const windows = static_cast<const int32_t*>(inputs[at]);
    const int64_t layers = descs[at].dims.d[0], layer = fields_.layer_idx;
    if (layers < 1 || layer >= layers) {
      return bad("host_max_attention_window_sizes has " + std::to_string(layers) + " layers");
    }
    const int32_t window = layer >= 0 ? windows[layer] : *std::min_element(windows, windows + layers);
    const int32_t length = host(inputs, AttentionRole::kHostPastKeyValueLengths)[sequence];
    if (length > window) {
      return refuse("its " + std::to_string(length) + " tokens do not fit the attention window of " +
                    std::to_string(window) + ": sliding windows are not served");
    }
  }
  const int32_t at = fields_.place(AttentionRole::kHostSinkTokenLength);
  const int32_t sink = at >= 0 ? *static_cast<const int32_t*>(inputs[at]) : 0;
  return sink == 0 ? Status{} : refuse("host_sink_token_length is " + std::to_string(sink) + ", expected 0");
}

void AttentionPlugin::narrow(const PluginTensorDesc* descs, const void* const* inputs, const BatchCut& cut) {
  const HalfSequences& half = (is_prefix() ? cut.prefix : cut.suffix).sequences;
  rewrite_context_lengths(host(inputs, AttentionRole::kHostContextLengths), half, scratch_.context_lengths.data());
  rewrite_past_lengths(host(inputs, AttentionRole::kHostPastKeyValueLengths), half,
                       scratch_.past_key_value_lengths.data());
  for (size_t i = 0; i < fields_.roles.size(); ++i) {
    PluginTensorDesc& desc = scratch_.descs[i] = descs[i];
    const void*& input = scratch_.inputs[i] = inputs[i];
    switch (static_cast<AttentionRole>(fields_.roles[i])) {
      case AttentionRole::kSequenceLength:
      case AttentionRole::kContextLengths:
        desc.dims.d[0] = half.count;
        break;
      case AttentionRole::kCacheIndirection:
        desc.dims.d[0] = half.count;
        input = static_cast<const int32_t*>(input) + half.first * desc.dims.d[1] * desc.dims.d[2];
        break;
      case AttentionRole::kHostRequestTypes:
        desc.dims.d[0] = half.count;
        input = static_cast<const int32_t*>(input) + half.first;
        break;
      case AttentionRole::kHostContextLengths:
        desc.dims.d[0] = half.count;
        input = scratch_.context_lengths.data();
        break;
      case AttentionRole::kHostPastKeyValueLengths:
        desc.dims.d[0] = half.count;
        input = scratch_.past_key_value_lengths.data();
        break;
      case AttentionRole::kKvCacheBlockOffsets:
      case AttentionRole::kHostKvCacheBlockOffsets:
        // [pools, sequences, 2, blocks]: the table of the half starts at its first sequence.
        input = static_cast<const int32_t*>(input) + half.first * desc.dims.d[2] * desc.dims.d[3];
        break;
      case AttentionRole::kHostContextProgress:
        // A layer records its progress after its last context chunk, once.
        if (is_prefix() && cut.suffix.num_contexts > 0) input = &kNoProgress;
        break;
      default:
        break;
    }
  }
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                                 const void* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    TW_RETURN_IF_ERROR(check_inner());
    BatchCut cut;
    TW_RETURN_IF_ERROR(find_half(input_descs, inputs, &cut));
    const HalfBatch& half = is_prefix() ? cut.prefix : cut.suffix;
    if (half.rows == 0) return {};
    TW_RETURN_IF_ERROR(check_beams(input_descs[fields_.place(AttentionRole::kCacheIndirection)].dims));
    TW_RETURN_IF_ERROR(check_shared(input_descs, inputs, half.sequences));
    narrow(input_descs, inputs, cut);
    const int32_t failed =
        inner_->enqueue(scratch_.descs.data(), output_descs, scratch_.inputs.data(), outputs, workspace, stream);
    if (failed == 0) return {};
    return error(TW_INTERNAL, "its inner plugin's enqueue returned " + std::to_string(failed) + " for " +
                                  std::to_string(half.rows) + " tokens of " + std::to_string(half.sequences.count) +
                                  " sequences; its library logs why");
  });
}

}  // namespace tokenweave::trt
