#include "batch_split_plugin.h"

#include <algorithm>

#include "cuda_status.h"

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kPrefixRef = 0, kNumTokensRef = 1, kHostRequestTypes = 2, kHostContextLengths = 3,
                  kSequenceLength = 4, kContextLengths = 5, kNumInputs = 6, kNumOutputs = 4;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

Status check_counts(int32_t inputs, int32_t outputs) {
  return trt::check_counts({inputs, outputs}, {kNumInputs, kNumOutputs});
}

Status check_batch(const PluginTensorDesc* descs) {
  const int64_t sequences = descs[kHostRequestTypes].dims.d[0];
  for (int32_t i = kHostContextLengths; i < kNumInputs; ++i) {
    const int64_t given = descs[i].dims.d[0];
    if (given == sequences) continue;
    return bad("input " + std::to_string(i) + " has " + std::to_string(given) + " sequences, host_request_types " +
               std::to_string(sequences) + " (beam width 1 is needed)");
  }
  return {};
}

/// Cuts the step of these inputs at the one place where the halves' attention cuts it, too.
Status cut_step(const PluginTensorDesc* descs, const void* const* inputs, int64_t max_num_tokens, BatchCut* cut) {
  TW_RETURN_IF_ERROR(check_batch(descs));
  const Batch batch{static_cast<const int32_t*>(inputs[kHostRequestTypes]),
                    static_cast<const int32_t*>(inputs[kHostContextLengths]), descs[kHostRequestTypes].dims.d[0]};
  TW_RETURN_IF_ERROR(cut_batch(batch, descs[kPrefixRef].dims.d[0], cut));
  const int64_t counted = cut->prefix.rows + cut->suffix.rows, tokens = descs[kNumTokensRef].dims.d[0];
  const auto refuse = [tokens](const std::string& why) {
    return bad("the step has " + std::to_string(tokens) + " tokens, " + why);
  };
  if (counted != tokens) {
    return refuse("host_request_types and host_context_lengths count " + std::to_string(counted) +
                  ". Fix: give both for the tokens of input_ids");
  }
  if (tokens > max_num_tokens) {
    return refuse("the network was woven for " + std::to_string(max_num_tokens) +
                  ". Fix: weave with the max_num_tokens of the engine's profile");
  }
  return {};
}

}  // namespace

int32_t BatchSplitPlugin::getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                                             int32_t num_inputs) const noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    for (int32_t i = kHostRequestTypes; i < kNumInputs; ++i) {
      if (inputs[i] != DataType::kINT32) return bad("input " + std::to_string(i) + " is not INT32");
    }
    std::fill_n(types, num_outputs, DataType::kINT32);
    return {};
  });
}

int32_t BatchSplitPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                          DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept {
  return run([&]() -> Status {
    TW_RETURN_IF_ERROR(check_counts(num_inputs, num_outputs));
    for (int32_t i = kHostRequestTypes; i < kNumInputs; ++i) {
      if (inputs[i].nbDims == 1) continue;
      return bad("input " + std::to_string(i) + " has " + std::to_string(inputs[i].nbDims) + " dimensions, expected 1");
    }
    for (DimsExprs* half : {outputs, outputs + 2}) std::copy_n(inputs + kSequenceLength, 2, half);
    return {};
  });
}

bool BatchSplitPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                 int32_t num_inputs, int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  return position <= kNumTokensRef || desc.type == DataType::kINT32;  // only the shapes of the references are read
}

int32_t BatchSplitPlugin::configurePlugin(const DynamicPluginTensorDesc*, int32_t num_inputs,
                                          const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  return run([&] { return check_counts(num_inputs, num_outputs); });
}

int32_t BatchSplitPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                  const void* const* inputs, void* const* outputs, void*,
                                  cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    BatchCut cut;
    TW_RETURN_IF_ERROR(cut_step(input_descs, inputs, fields_.max_num_tokens, &cut));
    BatchSplitArgs lengths;
    lengths.sequence_length = static_cast<const int32_t*>(inputs[kSequenceLength]);
    lengths.context_lengths = static_cast<const int32_t*>(inputs[kContextLengths]);
    lengths.halves[0] = {cut.prefix.sequences, static_cast<int32_t*>(outputs[0]), static_cast<int32_t*>(outputs[1])};
    lengths.halves[1] = {cut.suffix.sequences, static_cast<int32_t*>(outputs[2]), static_cast<int32_t*>(outputs[3])};
    return cuda_status(launch_batch_split(lengths, stream), "launching batch_split");
  });
}

}  // namespace tokenweave::trt
