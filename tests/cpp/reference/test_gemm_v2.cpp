// TensorRT-LLM's Gemm, and which creators the library offers.
#include <dlfcn.h>

#include <cstdlib>
#include <new>
#include <utility>

#include "../trt/fake_cublaslt.h"
#include "../trt/fake_exprs.h"
#include "v2_layers.h"

static bool next_allocation_fails = false;

// Not inlined: GCC would take the pairs for mismatched.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = std::exchange(next_allocation_fails, false) ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace tokenweave::test {
namespace {

constexpr const char* kName = "Gemm";

FieldList fields() {
  FieldList list;
  list.set("transa", 0).set("transb", 1).set("pad_lda", 0).set("pad_ldb", 0).set("type_id", 7).set("use_fp8", 0);
  return list.set("alpha", 1.0f);
}

class GemmV2Test : public testing::Test {
 protected:
  GemmV2Test() {
    gpu() = FakeGpu{};
    cublaslt() = FakeCublasLt{};
  }
  ~GemmV2Test() override { EXPECT_EQ(cublaslt().handles, 0); }

  static int32_t run(const PluginV2Ptr& plugin, const std::vector<int64_t>& x, const std::vector<int64_t>& weight) {
    static uint8_t memory[4][16];
    const nvinfer1::PluginTensorDesc descs[] = {desc(x), desc(weight)};
    const void* inputs[] = {memory[0], memory[1]};
    void* outputs[] = {memory[2]};
    return plugin->enqueue(descs, nullptr, inputs, outputs, memory[3], kMain);
  }
};

TEST_F(GemmV2Test, Multiplies) {
  const PluginV2Ptr loaded = load(kName, store(create(kName, fields().set("alpha", 0.5f))));
  ASSERT_EQ(loaded->initialize(), 0);
  const PluginV2Ptr plugin(loaded->clone());
  ASSERT_EQ(run(plugin, {3, 5, 64}, {32, 64}), 0) << trt::last_error().message;
  EXPECT_EQ(cublaslt().asked.at(0).m, 15);
  EXPECT_EQ(cublaslt().asked.at(0).n, 32);
  EXPECT_EQ(cublaslt().asked.at(0).k, 64);
  EXPECT_EQ(cublaslt().asked.at(0).sm_target, 0);
  EXPECT_TRUE(cublaslt().asked.at(0).transa);
  EXPECT_EQ(cublaslt().ran.at(0).alpha, 0.5f);
  EXPECT_EQ(run(plugin, {0, 64}, {32, 64}), 0);
  EXPECT_EQ(cublaslt().ran.size(), 1u);

  const PluginV2Ptr plain = load(kName, store(create(kName, fields().set("transb", 0).remove("alpha"))));
  ASSERT_EQ(plain->initialize(), 0);
  ASSERT_EQ(run(plain, {15, 64}, {64, 32}), 0);
  EXPECT_FALSE(cublaslt().asked.at(1).transa);
  EXPECT_EQ(cublaslt().asked.at(1).n, 32);
  EXPECT_EQ(cublaslt().ran.at(1).alpha, 1.0f);
  EXPECT_EQ(plain->getWorkspaceSize(nullptr, 2, nullptr, 1), size_t{32} << 20);
}

TEST_F(GemmV2Test, RefusesWhatItDoesNotDo) {
  const auto error = [](const FieldList& list) {
    return create(kName, list) != nullptr ? "" : trt::last_error().message;
  };
  EXPECT_EQ(error(fields()), "");
  EXPECT_EQ(error(fields().set("pad_ldc", 0)), "");
  EXPECT_EQ(error(fields().remove("pad_lda").remove("pad_ldb").remove("use_fp8")), "");
  const std::string layer = "Gemm: layer 'layer': ";
  for (const char* field : {"transa", "pad_lda", "pad_ldb", "pad_ldc", "use_fp8"}) {
    EXPECT_EQ(error(fields().set(field, 1)), layer + "field '" + field + "' = 1 is not done here");
  }
  EXPECT_EQ(error(fields().remove("transb")), layer + "field 'transb' is missing");
  EXPECT_EQ(error(fields().set("transb", 2)), layer + "field 'transb' = 2 is outside 0..1");
  EXPECT_EQ(error(fields().set("alpha", std::numeric_limits<float>::infinity())).find(layer + "field 'alpha' = inf"),
            0u);
  EXPECT_EQ(error(fields().set("type_id", 6)).find(layer + "field 'type_id' = 6 is not one of"), 0u);
  EXPECT_EQ(error(fields().set("kind", 0)), layer + "field 'kind' is unknown");
}

TEST_F(GemmV2Test, ShapesAndFormatsOfABuild) {
  FakeExprs exprs;
  const auto shape = [&](const FieldList& list, const std::vector<int64_t>& x, const std::vector<int64_t>& weight) {
    const nvinfer1::DimsExprs inputs[] = {exprs.dims(x), exprs.dims(weight)};
    const nvinfer1::DimsExprs output = create(kName, list)->getOutputDimensions(0, inputs, 2, exprs);
    return output.nbDims < 0 ? trt::last_error().message : FakeExprs::text(output);
  };
  EXPECT_EQ(shape(fields(), {-1, 64}, {32, 64}), "m, 32");
  EXPECT_EQ(shape(fields(), {2, -1, 64}, {32, 64}), "2, m, 32");
  EXPECT_EQ(shape(fields().set("transb", 0), {-1, 64}, {64, 32}), "m, 32");
  EXPECT_EQ(shape(fields(), {-1, 64}, {64, 32}), "Gemm: x has 64 columns, weight is for 32");
  EXPECT_EQ(shape(fields(), {64}, {32, 64}), "Gemm: x has less than 2 dimensions, or weight is no matrix");
  const PluginV2Ptr plugin = create(kName, fields());
  for (int32_t position = 0; position < 3; ++position) {
    nvinfer1::PluginTensorDesc descs[3]{};
    descs[position] = desc({1, 1});
    EXPECT_TRUE(plugin->supportsFormatCombination(position, descs, 2, 1));
    EXPECT_FALSE(plugin->supportsFormatCombination(position, descs, 3, 1));
    descs[position].type = DataType::kFP8;
    EXPECT_FALSE(plugin->supportsFormatCombination(position, descs, 2, 1));
  }
}

TEST_F(GemmV2Test, FailsWithTheReason) {
  const PluginV2Ptr loaded = load(kName, store(create(kName, fields())));
  EXPECT_NE(run(loaded, {15, 64}, {32, 64}), 0);
  EXPECT_EQ(trt::last_error().message, "Gemm: was run without being initialised");
  cublaslt().failing = "cublasLtCreate";
  EXPECT_NE(loaded->initialize(), 0);
  EXPECT_EQ(trt::last_error().message, "Gemm: cublasLtCreate failed: CUBLAS_STATUS_INTERNAL_ERROR (14)");
}

TEST(Creators, AreLeftOutBesideTensorRtLlm) {
  int32_t before = 0, beside = -1, after = 0;
  ASSERT_NE(getCreators(before), nullptr);
  EXPECT_GE(before, 2);
  void* const tensorrt_llm = dlopen(TOKENWEAVE_FAKE_TENSORRT_LLM, RTLD_NOW);
  ASSERT_NE(tensorrt_llm, nullptr) << dlerror();
  testing::internal::CaptureStderr();
  EXPECT_NE(getCreators(beside), nullptr);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[TokenWeave] the reference plugins are left out: libnvinfer_plugin_tensorrt_llm.so is loaded, and its own "
            "plugins serve\n");
  dlclose(tensorrt_llm);
  getCreators(after);
  EXPECT_EQ(beside, 0);
  EXPECT_EQ(after, before);
}

TEST(Creators, AreNoneWithoutMemory) {
  void* const tensorrt_llm = dlopen(TOKENWEAVE_FAKE_TENSORRT_LLM, RTLD_NOW);  // a long message is written
  ASSERT_NE(tensorrt_llm, nullptr) << dlerror();
  int32_t count = 7;
  next_allocation_fails = true;
  EXPECT_NO_THROW((void)getCreators(count));
  EXPECT_FALSE(next_allocation_fails);
  dlclose(tensorrt_llm);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(trt::last_error().code, TW_OUT_OF_MEMORY);
}

}  // namespace
}  // namespace tokenweave::test
