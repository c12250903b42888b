// Matrix products: row-major by a column-major library, one algorithm for each shape, and what fails.
#include <gtest/gtest.h>

#include "fake_cublaslt.h"
#include "fake_gpu.h"
#include "gemm.h"

namespace tokenweave::test {
namespace {

/// Where bf16 tensors lie; nothing is read or written there.
alignas(256) uint8_t memory[4][1024];

class GemmRunnerTest : public testing::Test {
 protected:
  GemmRunnerTest() {
    gpu() = FakeGpu{};
    cublaslt() = FakeCublasLt{};
  }
  ~GemmRunnerTest() override {
    runner_.reset();
    EXPECT_EQ(cublaslt().handles, 0);
    EXPECT_EQ(cublaslt().objects, 0);
  }

  GemmRunner& runner() {
    if (runner_ == nullptr) {
      const Status status = GemmRunner::acquire(&runner_);
      EXPECT_TRUE(status.ok()) << status.message;
    }
    return *runner_;
  }
  Status queue(const Gemm& gemm, const void* x = memory[0]) {
    return runner().queue(gemm, {x, memory[1], memory[2]}, memory[3], kMain);
  }
  static Gemm bf16(int64_t m, int32_t sm_target = 0) { return {m, 256, 128, TW_BFLOAT16, true, sm_target, 1.0f}; }

  std::shared_ptr<GemmRunner> runner_;
};

TEST_F(GemmRunnerTest, ComputesRowMajorProducts) {
  constexpr int64_t m = 3, n = 5, k = 7;
  std::vector<float> x(m * k), weight(k * n), transposed(n * k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 5) - 2;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      weight[i * n + j] = transposed[j * k + i] = static_cast<float>((3 * i + j) % 7) - 3;
    }
  }
  for (const bool transb : {false, true}) {
    std::vector<float> out(m * n, 99.0f);
    const Gemm gemm{m, n, k, TW_FLOAT, transb, 0, 0.5f};
    const Status status =
        runner().queue(gemm, {x.data(), transb ? transposed.data() : weight.data(), out.data()}, memory[3], kMain);
    ASSERT_TRUE(status.ok()) << status.message;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float expected = 0;
        for (int64_t l = 0; l < k; ++l) expected += x[i * k + l] * weight[l * n + j];
        EXPECT_EQ(out[i * n + j], 0.5f * expected) << i << " " << j << " transb " << transb;
      }
    }
  }
}

TEST_F(GemmRunnerTest, TellsCublasLtWhatTheProductIs) {
  ASSERT_TRUE(queue(bf16(40, 116)).ok());
  const AskedAlgorithm& asked = cublaslt().asked.at(0);
  EXPECT_EQ(asked.type, CUDA_R_16BF);
  EXPECT_EQ(asked.m, 40);
  EXPECT_EQ(asked.n, 256);
  EXPECT_EQ(asked.k, 128);
  EXPECT_TRUE(asked.transa);
  EXPECT_EQ(asked.sm_target, 116);
  EXPECT_EQ(asked.workspace_limit, uint64_t{32} << 20);
  EXPECT_EQ(asked.reduction_schemes, 2u);  // in fp32
  EXPECT_EQ(asked.alignment, 256u);
  const RunProduct& ran = cublaslt().ran.at(0);
  EXPECT_EQ(ran.x, memory[0]);
  EXPECT_EQ(ran.weight, memory[1]);
  EXPECT_EQ(ran.out, memory[2]);
  EXPECT_EQ(ran.workspace, memory[3]);
  EXPECT_EQ(ran.workspace_bytes, 4096u);
  EXPECT_EQ(ran.stream, kMain);

  Gemm half = bf16(40);
  half.dtype = TW_HALF;
  half.transb = false;
  ASSERT_TRUE(queue(half).ok());
  EXPECT_EQ(cublaslt().asked.at(1).type, CUDA_R_16F);
  EXPECT_FALSE(cublaslt().asked.at(1).transa);
  EXPECT_EQ(cublaslt().asked.at(1).sm_target, 0);
}

TEST_F(GemmRunnerTest, AsksOnceForEachRowsAndSmTarget) {
  for (int round = 0; round < 3; ++round) {
    for (const int64_t m : {1, 7, 4096}) {
      for (const int32_t sm_target : {0, 128, 116}) ASSERT_TRUE(queue(bf16(m, sm_target)).ok());
    }
  }
  EXPECT_EQ(cublaslt().asked.size(), 9u);
  EXPECT_EQ(runner().num_plans(), 9u);
  ASSERT_EQ(cublaslt().ran.size(), 27u);
  for (size_t i = 0; i < 27; ++i) EXPECT_EQ(cublaslt().ran[i].algorithm, i % 9);
}

TEST_F(GemmRunnerTest, AsksAgainForTensorsThatAreAlignedOtherwise) {
  for (const size_t offset : {0, 256, 512, 16, 48, 2}) ASSERT_TRUE(queue(bf16(8), memory[0] + offset).ok());
  ASSERT_EQ(cublaslt().asked.size(), 3u);
  EXPECT_EQ(cublaslt().asked[1].alignment, 16u);
  EXPECT_EQ(cublaslt().asked[2].alignment, 2u);
}

TEST_F(GemmRunnerTest, ForgetsThePlansThatWereNotUsedForLongest) {
  const auto rows = static_cast<int64_t>(GemmRunner::kMaxPlans);
  for (int64_t m = 1; m <= rows; ++m) ASSERT_TRUE(queue(bf16(m)).ok());
  ASSERT_TRUE(queue(bf16(1)).ok());  // now 2 is the oldest
  ASSERT_TRUE(queue(bf16(rows + 1)).ok());
  EXPECT_EQ(runner().num_plans(), GemmRunner::kMaxPlans);
  const size_t asked = cublaslt().asked.size();
  ASSERT_TRUE(queue(bf16(1)).ok());
  EXPECT_EQ(cublaslt().asked.size(), asked);
  ASSERT_TRUE(queue(bf16(2)).ok());
  EXPECT_EQ(cublaslt().asked.size(), asked + 1);
}

TEST_F(GemmRunnerTest, DoesNotLimitADeviceThatHasNoMoreSms) {
  gpu().sm_count = 128;
  for (const int32_t sm_target : {128, 132, 0}) ASSERT_TRUE(queue(bf16(8, sm_target)).ok());
  EXPECT_EQ(cublaslt().asked.size(), 1u);
  EXPECT_EQ(cublaslt().asked[0].sm_target, 0);
}

TEST_F(GemmRunnerTest, DoesNothingWithoutRows) {
  EXPECT_TRUE(queue(bf16(0, 116)).ok());
  EXPECT_TRUE(cublaslt().asked.empty());
  EXPECT_TRUE(cublaslt().ran.empty());
}

TEST_F(GemmRunnerTest, IsOnePerDevice) {
  std::shared_ptr<GemmRunner> first, second, other;
  ASSERT_TRUE(GemmRunner::acquire(&first).ok());
  ASSERT_TRUE(GemmRunner::acquire(&second).ok());
  gpu().device = 1;
  ASSERT_TRUE(GemmRunner::acquire(&other).ok());
  EXPECT_EQ(first, second);
  EXPECT_NE(first, other);
  EXPECT_EQ(cublaslt().handles, 2);
}

TEST_F(GemmRunnerTest, SaysWhatFails) {
  (void)runner();
  for (const char* function :
       {"cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute", "cublasLtMatrixLayoutCreate",
        "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceSetAttribute", "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmul"}) {
    cublaslt().failing = function;
    const Status status = queue(bf16(8, 116));
    EXPECT_EQ(status.code, TW_CUDA_ERROR);
    EXPECT_EQ(status.message, std::string(function) + " failed: CUBLAS_STATUS_INTERNAL_ERROR (14)");
  }
  cublaslt().failing.clear();
  cublaslt().found = 0;
  EXPECT_EQ(queue(bf16(9)).message,
            "cuBLASLt has no algorithm for [9, 128] x [128, 256] on tensors aligned to 256 bytes");
  cublaslt().found = 1;
  cublaslt().state = 15;
  EXPECT_EQ(queue(bf16(9)).code, TW_UNSUPPORTED);
  cublaslt().state = 0;
  EXPECT_TRUE(queue(bf16(9)).ok());  // what failed was not remembered
}

TEST_F(GemmRunnerTest, SaysWhyThereIsNone) {
  cublaslt().failing = "cublasLtCreate";
  std::shared_ptr<GemmRunner> none;
  EXPECT_EQ(GemmRunner::acquire(&none).message, "cublasLtCreate failed: CUBLAS_STATUS_INTERNAL_ERROR (14)");
  EXPECT_EQ(none, nullptr);
  for (const char* function : {"cudaGetDevice", "cudaDeviceGetAttribute"}) {
    gpu().failing = function;
    EXPECT_EQ(GemmRunner::acquire(&none).message, std::string(function) + " failed");
  }
}

TEST(LoadCublasLt, NamesWhatItTried) {
  CublasLtTable table{};
  const Status status = load_cublaslt(&table, {"libnot-there.so.13", "libnot-there.so.12"});
  EXPECT_EQ(status.code, TW_UNSUPPORTED);
  EXPECT_EQ(status.message.find("cannot load libnot-there.so.13: "), 0u) << status.message;
  EXPECT_NE(status.message.find("; libnot-there.so.12"), std::string::npos) << status.message;
  EXPECT_NE(status.message.find("Fix: install cuBLAS of CUDA 12 or 13"), std::string::npos) << status.message;
}

TEST(LoadCublasLt, RefusesAnotherLibrary) {
  CublasLtTable table{};
  const Status status = load_cublaslt(&table, {"libm.so.6"});
  EXPECT_EQ(status.code, TW_UNSUPPORTED);
  EXPECT_EQ(status.message.find("libm.so.6 has no cublasLtGetStatusName. Fix: "), 0u) << status.message;
}

TEST(LoadCublasLt, PrefersWhatIsLoaded) {
  // libresolv is installed but not loaded, and comes first.
  CublasLtTable table{};
  EXPECT_TRUE(load_cublaslt(&table, {"libresolv.so.2", "libcublasLt.so.13"}).ok());
}

}  // namespace
}  // namespace tokenweave::test
