// Dimension expressions as TensorRT's builder hands them to plugins: constants, one unknown, and operations spelled
// out.
#pragma once

#include <NvInferRuntime.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace tokenweave::test {

class FakeExpr final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  FakeExpr(std::string text, bool constant, int64_t value) : text(std::move(text)), constant_(constant), value_(value) {
    mImpl = this;
  }
  const std::string text;

 private:
  bool isConstant() const noexcept override { return constant_; }
  int64_t getConstantValue() const noexcept override { return value_; }
  bool isSizeTensor() const noexcept override { return false; }

  bool constant_;
  int64_t value_;
};

class FakeExprs final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  FakeExprs() { mImpl = this; }

  /// -1 is the unknown "m".
  nvinfer1::DimsExprs dims(const std::vector<int64_t>& sizes) {
    nvinfer1::DimsExprs result{};
    result.nbDims = static_cast<int32_t>(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      result.d[i] = sizes[i] < 0 ? make("m", false, std::numeric_limits<int64_t>::min()) : constant(sizes[i]);
    }
    return result;
  }

  static std::string text(const nvinfer1::DimsExprs& dims) {
    std::string result;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
      result += (i > 0 ? ", " : "") + static_cast<const FakeExpr*>(dims.d[i])->text;
    }
    return result;
  }

 private:
  const nvinfer1::IDimensionExpr* make(const std::string& text, bool constant, int64_t value) {
    made_.push_back(std::make_unique<FakeExpr>(text, constant, value));
    return made_.back().get();
  }
  const nvinfer1::IDimensionExpr* constant(int64_t value) noexcept override {
    return make(std::to_string(value), true, value);
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation op, const nvinfer1::IDimensionExpr& a,
                                            const nvinfer1::IDimensionExpr& b) noexcept override {
    const char* const sign = op == nvinfer1::DimensionOperation::kCEIL_DIV ? "ceil/"
                             : op == nvinfer1::DimensionOperation::kPROD   ? "*"
                             : op == nvinfer1::DimensionOperation::kSUB    ? "-"
                             : op == nvinfer1::DimensionOperation::kMIN    ? "min"
                                                                           : "?";
    return make(static_cast<const FakeExpr&>(a).text + " " + sign + " " + static_cast<const FakeExpr&>(b).text, false,
                0);
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }

  std::vector<std::unique_ptr<FakeExpr>> made_;
};

}  // namespace tokenweave::test
