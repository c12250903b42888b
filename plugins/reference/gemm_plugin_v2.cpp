#include "gemm_plugin_v2.h"

#include <limits>
#include <string>
#include <utility>

namespace tokenweave::reference {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kX = 0, kWeight = 1, kNumInputs = 2;

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

}  // namespace

void GemmV2Fields::visit(trt::FieldVisitor& visitor, nvinfer1::TensorRTPhase) {
  constexpr auto kOptional = trt::Presence::kOptional;
  constexpr float kLargest = std::numeric_limits<float>::max();
  visitor.int32("transa", &transa, 0, 1);
  visitor.int32("transb", &transb, 0, 1);
  visitor.int32("pad_lda", &pad_lda, 0, trt::kNoLimit, kOptional);
  visitor.int32("pad_ldb", &pad_ldb, 0, trt::kNoLimit, kOptional);
  visitor.int32("pad_ldc", &pad_ldc, 0, trt::kNoLimit, kOptional);
  visitor.int32("type_id", &type_id, 0, trt::kNoLimit);
  visitor.int32("use_fp8", &use_fp8, 0, 1, kOptional);
  visitor.float32("alpha", &alpha, -kLargest, kLargest, kOptional);
}

Status GemmV2Fields::check(nvinfer1::TensorRTPhase) const {
  for (const auto& [name, value] : {std::pair{"transa", transa},
                                    {"pad_lda", pad_lda},
                                    {"pad_ldb", pad_ldb},
                                    {"pad_ldc", pad_ldc},
                                    {"use_fp8", use_fp8}}) {
    if (value != 0) return bad(std::string("field '") + name + "' = " + std::to_string(value) + " is not done here");
  }
  return trt::check_type_id(type_id);
}

DimsExprs GemmV2Plugin::getOutputDimensions(int32_t, const DimsExprs* inputs, int32_t num_inputs,
                                            nvinfer1::IExprBuilder&) noexcept {
  DimsExprs output{};
  output.nbDims = -1;  // how an IPluginV2 says that it has none
  run([&]() -> Status {
    if (num_inputs != kNumInputs) return bad("has " + std::to_string(num_inputs) + " inputs, expected 2");
    const DimsExprs &x = inputs[kX], &weight = inputs[kWeight];
    if (x.nbDims < 2 || weight.nbDims != 2) return bad("x has less than 2 dimensions, or weight is no matrix");
    const auto* const k = weight.d[fields_.transb != 0 ? 1 : 0];
    const auto* const columns = x.d[x.nbDims - 1];
    if (columns->isConstant() && k->isConstant() && columns->getConstantValue() != k->getConstantValue()) {
      return bad("x has " + std::to_string(columns->getConstantValue()) + " columns, weight is for " +
                 std::to_string(k->getConstantValue()));
    }
    output = x;
    output.d[x.nbDims - 1] = weight.d[fields_.transb != 0 ? 0 : 1];
    return {};
  });
  return output;
}

bool GemmV2Plugin::supportsFormatCombination(int32_t position, const PluginTensorDesc* descs, int32_t num_inputs,
                                             int32_t) noexcept {
  return num_inputs == kNumInputs && descs[position].format == nvinfer1::TensorFormat::kLINEAR &&
         descs[position].type == static_cast<DataType>(fields_.type_id);
}

int32_t GemmV2Plugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                              void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return run([&]() -> Status {
    if (inert()) return {};
    if (runner_ == nullptr) return error(TW_INTERNAL, "was run without being initialised");
    const nvinfer1::Dims& x = input_descs[kX].dims;
    Gemm gemm;
    gemm.m = 1;
    for (int32_t i = 0; i + 1 < x.nbDims; ++i) gemm.m *= x.d[i];
    gemm.k = x.d[x.nbDims - 1];
    gemm.n = input_descs[kWeight].dims.d[fields_.transb != 0 ? 0 : 1];
    gemm.dtype = static_cast<TwDataType>(fields_.type_id);
    gemm.transb = fields_.transb != 0;
    gemm.alpha = fields_.alpha;
    return runner_->queue(gemm, {inputs[kX], inputs[kWeight], outputs[0]}, workspace, stream);
  });
}

}  // namespace tokenweave::reference
