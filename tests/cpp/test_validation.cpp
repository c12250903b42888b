#include <gtest/gtest.h>

#include "all_reduce_rms_norm.h"

namespace tokenweave {
namespace {

alignas(16) char weight[64];

TwAllReduceRmsNorm op() {
  TwAllReduceRmsNorm op{};
  op.struct_bytes = sizeof op;
  op.dtype = TW_BFLOAT16;
  op.num_tokens = 64;
  op.hidden = 8192;
  op.eps = 1e-5f;
  op.norm_weight = weight;
  return op;
}

void expect_refused(const TwAllReduceRmsNorm& bad, const char* words) {
  const Status status = validate(bad);
  EXPECT_EQ(status.code, TW_INVALID_ARGUMENT);
  EXPECT_NE(status.message.find(words), std::string::npos) << status.message;
}

TEST(Validate, AcceptsWhatTheKernelServes) {
  for (const int hidden : {8, 576, 4096, 5120, 16384}) {
    for (const TwDataType dtype : {TW_FLOAT, TW_HALF, TW_BFLOAT16}) {
      for (const int tokens : {0, 1, 8192}) {
        TwAllReduceRmsNorm good = op();
        good.hidden = hidden;
        good.dtype = dtype;
        good.num_tokens = tokens;
        EXPECT_TRUE(validate(good).ok());
      }
    }
  }
}

TEST(Validate, RefusesSizesAndTypes) {
  for (const int hidden : {0, -8, 4, 100, 16392}) {
    TwAllReduceRmsNorm bad = op();
    bad.hidden = hidden;
    expect_refused(bad, "not a multiple of 8");
  }
  TwAllReduceRmsNorm bad = op();
  bad.dtype = static_cast<TwDataType>(2);
  expect_refused(bad, "dtype 2 is not");
  bad = op();
  bad.num_tokens = -1;
  expect_refused(bad, "num_tokens is -1");
  bad.num_tokens = 1 << 22;
  expect_refused(bad, "below 32 GiB");
}

TEST(Validate, RefusesPointers) {
  TwAllReduceRmsNorm bad = op();
  bad.norm_weight = nullptr;
  expect_refused(bad, "norm_weight is null");
  bad = op();
  bad.norm_weight = weight + 8;
  expect_refused(bad, "norm_weight is not aligned to 16 bytes");
  bad = op();
  bad.bias = weight + 2;
  expect_refused(bad, "bias is not aligned");
}

}  // namespace
}  // namespace tokenweave
