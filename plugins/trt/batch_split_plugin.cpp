#include "batch_split_plugin.h"

#include <algorithm>

#include "cuda_status.h"

namespace tokenweave::trt {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kPrefixRef = 0, kHostRequestTypes = 1, kHostContextLengths = 2, kNumInputs = 7;
/// The device tensors, which are inputs from kDevice on, and outputs once for each half.
constexpr int32_t kDevice = 3, kNumDevice = 4;
constexpr int32_t kSequenceLength = 0, kContextLengths = 1, kBlockOffsets = 2, kCacheIndirection = 3;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

Status check_counts(int32_t inputs, int32_t outputs) {
  if (inputs == kNumInputs && outputs == 2 * kNumDevice) return {};
  return bad("has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs, expected 7 and 8");
}

Status check_ranks(const DimsExprs* inputs) {
  static constexpr int32_t ranks[] = {1, 1, 1, 1, 4, 3};  // of all inputs but the reference
  for (int32_t i = 0; i < kNumInputs - 1; ++i) {
    if (inputs[i + 1].nbDims == ranks[i]) continue;
    return bad("input " + std::to_string(i + 1) + " has " + std::to_string(inputs[i + 1].nbDims) +
               " dimensions, expected " + std::to_string(ranks[i]));
  }
  return {};
}

Status check_batch(const PluginTensorDesc* descs) {
  const int64_t sequences = descs[kHostRequestTypes].dims.d[0];
  for (int32_t i = kHostContextLengths; i < kNumInputs; ++i) {
    const int64_t given = descs[i].dims.d[i == kDevice + kBlockOffsets ? 1 : 0];
    if (given == sequences) continue;
    return bad("input " + std::to_string(i) + " has " + std::to_string(given) + " sequences, host_request_types " +
               std::to_string(sequences) + " (beam width 1 is needed)");
  }
  return {};
}

int64_t product(const Dims& dims, int32_t from) {
  int64_t result = 1;
  for (int32_t i = from; i < dims.nbDims; ++i) result *= dims.d[i];
  return result;
}

/// Copies a half's rows of a tensor [outer..., sequences, words...], `axis` being that of the sequences.
Status copy_rows(const Dims& dims, int32_t axis, const HalfSequences& half, const void* from, void* to,
                 cudaStream_t stream) {
  const size_t row = static_cast<size_t>(product(dims, axis + 1)) * sizeof(int32_t);
  const size_t pitch = row * static_cast<size_t>(dims.d[axis]), width = row * static_cast<size_t>(half.count);
  const size_t outer = axis == 0 ? 1 : static_cast<size_t>(dims.d[0]);
  if (width == 0 || outer == 0) return {};
  const auto* const first = static_cast<const uint8_t*>(from) + row * static_cast<size_t>(half.first);
  // Where nothing is skipped between rows, as rows of their own: a pitch has to stay below 2^31 bytes.
  const bool whole = outer == 1;
  return cuda_status(
      cudaMemcpy2DAsync(to, whole ? row : pitch, first, whole ? row : pitch, whole ? row : width,
                        whole ? static_cast<size_t>(half.count) : outer, cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpy2DAsync");
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
    TW_RETURN_IF_ERROR(check_ranks(inputs));
    for (DimsExprs* half : {outputs, outputs + kNumDevice}) std::copy_n(inputs + kDevice, kNumDevice, half);
    return {};
  });
}

bool BatchSplitPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* descs,
                                                 int32_t num_inputs, int32_t num_outputs) noexcept {
  if (run([&] { return check_counts(num_inputs, num_outputs); }) != 0) return false;
  const PluginTensorDesc& desc = descs[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  return position == kPrefixRef || desc.type == DataType::kINT32;  // only the shape of the reference is read
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
    TW_RETURN_IF_ERROR(check_batch(input_descs));
    BatchCut cut;
    const Batch batch{static_cast<const int32_t*>(inputs[kHostRequestTypes]),
                      static_cast<const int32_t*>(inputs[kHostContextLengths]),
                      input_descs[kHostRequestTypes].dims.d[0]};
    TW_RETURN_IF_ERROR(cut_batch(batch, input_descs[kPrefixRef].dims.d[0], &cut));

    BatchSplitArgs lengths;
    lengths.sequence_length = static_cast<const int32_t*>(inputs[kDevice + kSequenceLength]);
    lengths.context_lengths = static_cast<const int32_t*>(inputs[kDevice + kContextLengths]);
    const HalfSequences* const halves[] = {&cut.prefix.sequences, &cut.suffix.sequences};
    for (int32_t i = 0; i < 2; ++i) {
      void* const* const out = outputs + i * kNumDevice;
      lengths.halves[i] = {*halves[i], static_cast<int32_t*>(out[kSequenceLength]),
                           static_cast<int32_t*>(out[kContextLengths])};
      for (const int32_t tensor : {kBlockOffsets, kCacheIndirection}) {
        TW_RETURN_IF_ERROR(copy_rows(input_descs[kDevice + tensor].dims, tensor == kBlockOffsets ? 1 : 0, *halves[i],
                                     inputs[kDevice + tensor], out[tensor], stream));
      }
    }
    return cuda_status(launch_batch_split(lengths, stream), "launching batch_split");
  });
}

}  // namespace tokenweave::trt
