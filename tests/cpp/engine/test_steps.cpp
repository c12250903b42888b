// What EngineContext::step asks of TensorRT, with a context that notes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "tokenweave/engine_context.h"

namespace tokenweave::test {
namespace {

std::string newest_plugin_error;

}  // namespace
}  // namespace tokenweave::test

// The plugin library's is not linked.
TwCode twPluginLastError(TwStatus* status) {
  const std::string& message = tokenweave::test::newest_plugin_error;
  status->code = message.empty() ? TW_OK : TW_INTERNAL;
  std::snprintf(status->message, sizeof status->message, "%s", message.c_str());
  return status->code;
}

namespace tokenweave::test {
namespace {

using nvinfer1::DataType;
using Calls = std::vector<std::string>;
using Shape = std::vector<int64_t>;

/// Context and engine of a network that puts out four logits for each of `ids`.
struct FakeContext {
  const FakeContext& getEngine() const { return *this; }
  DataType getTensorDataType(const char* name) const {
    return name == std::string("logits") ? DataType::kFLOAT : DataType::kINT32;
  }
  bool isShapeInferenceIO(const char* name) const { return name == shape_input; }

  bool setInputShape(const char* name, const nvinfer1::Dims& dims) {
    if (!works(std::string("shape ") + name) || dims.d[0] > 16) return false;
    shapes[name] = Shape(dims.d, dims.d + dims.nbDims);
    return true;
  }
  bool setTensorAddress(const char* name, void* data) {
    if (!works(std::string("address ") + name)) return false;
    addresses[name] = data;
    return true;
  }
  int32_t inferShapes(int32_t, const char** names) {
    if (!works("infer")) {
      names[0] = "ids";
      return 1;
    }
    shapes["logits"] = {shapes["ids"][0] + added_rows, 4};
    return 0;
  }
  nvinfer1::Dims getTensorShape(const char* name) const { return detail::to_dims(shapes.at(name)); }
  bool enqueueV3(cudaStream_t) {
    const bool runs = works("enqueue");
    if (!runs && allocator != nullptr) allocator->allocateAsync(64, 0, 0, nullptr);
    if (!runs) newest_plugin_error = plugin_error_of_enqueue;
    return runs;
  }

  bool works(const std::string& call) {
    calls.push_back(call);
    return call != failing;
  }
  Calls taken() { return std::exchange(calls, {}); }

  Calls calls;
  std::string failing;      ///< the call that fails
  std::string shape_input;  ///< the input on whose values shapes depend
  int64_t added_rows = 0;   ///< stands for what these values add
  std::string plugin_error_of_enqueue;
  nvinfer1::IGpuAsyncAllocator* allocator = nullptr;
  std::map<std::string, void*> addresses;
  std::map<std::string, Shape> shapes;
};

const Calls kAll{
    "shape host_lengths", "address host_lengths", "shape ids", "address ids", "address logits", "infer", "enqueue"};
const Calls kEnqueue{"enqueue"};

Manifest manifest() {
  Manifest made;
  made.tensors = {{"ids", "INPUT", "INT32", {-1}, {{Shape{1}, Shape{8}, Shape{16}}}},
                  {"host_lengths", "INPUT", "INT32", {2}, {}},
                  {"logits", "OUTPUT", "FLOAT", {-1, 4}, {}}};
  return made;
}

class StepsTest : public testing::Test {
 protected:
  void SetUp() override { newest_plugin_error.clear(); }

  void* memory(size_t index) { return &memory_[index]; }
  void resize(int64_t tokens) {
    inputs["ids"].shape = {tokens};
    outputs["logits"].shape = {tokens, 4};
  }

  /// What a step says that fails; "" when it does not.
  std::string refusal() { return steps.run(context, inputs, outputs, nullptr).message; }
  /// The calls of a step that has to succeed.
  Calls calls_of_step() {
    context.calls.clear();
    EXPECT_EQ(refusal(), "");
    return context.taken();
  }
  /// Whether TensorRT has what was given.
  bool is_bound_as_given() const {
    bool same = true;
    for (const Tensors* const tensors : {&inputs, &outputs}) {
      for (const auto& [name, tensor] : *tensors)
        same = same && context.addresses.at(name) == tensor.data && context.shapes.at(name) == tensor.shape;
    }
    return same;
  }

  char memory_[8] = {};
  FakeContext context;
  const Manifest manifest_ = manifest();
  detail::Steps steps{manifest_, 0};
  Tensors inputs{{"ids", {memory(0), DataType::kINT32, {3}}}, {"host_lengths", {memory(1), DataType::kINT32, {2}}}};
  Tensors outputs{{"logits", {memory(2), DataType::kFLOAT, {3, 4}}}};
};

TEST_F(StepsTest, ARepeatedStepIsOnlyQueued) {
  EXPECT_EQ(calls_of_step(), kAll);
  EXPECT_TRUE(is_bound_as_given());
  EXPECT_EQ(calls_of_step(), kEnqueue);
  const Tensors copy = inputs;  // equal is enough
  EXPECT_TRUE(steps.run(context, copy, outputs, nullptr).ok());
  EXPECT_EQ(context.taken(), kEnqueue);
}

TEST_F(StepsTest, EverythingIsSetAfterForgetting) {
  calls_of_step();
  context.addresses["ids"] = nullptr;  // through execution_context()
  EXPECT_EQ(calls_of_step(), kEnqueue);
  EXPECT_FALSE(is_bound_as_given());
  steps.forget();
  EXPECT_EQ(calls_of_step(), kAll);
  EXPECT_TRUE(is_bound_as_given());
}

TEST_F(StepsTest, AMoveKeepsWhatIsBoundAndWhereItsAllocatorIs) {
  calls_of_step();
  const detail::RefusingAllocator* const allocator = &steps.allocator();
  detail::Steps moved = std::move(steps);
  EXPECT_EQ(&moved.allocator(), allocator);
  EXPECT_TRUE(moved.run(context, inputs, outputs, nullptr).ok());
  EXPECT_EQ(context.taken(), kEnqueue);
}

TEST_F(StepsTest, AChangedAddressIsSetAlone) {
  calls_of_step();
  inputs["ids"].data = memory(3);
  EXPECT_EQ(calls_of_step(), (Calls{"address ids", "enqueue"}));
  inputs["host_lengths"].data = memory(4);
  outputs["logits"].data = memory(5);
  EXPECT_EQ(calls_of_step(), (Calls{"address host_lengths", "address logits", "enqueue"}));
  EXPECT_TRUE(is_bound_as_given());
  EXPECT_EQ(calls_of_step(), kEnqueue);
}

TEST_F(StepsTest, AChangedShapeIsSetAndInferredAtTheSameAddress) {
  calls_of_step();
  for (const int64_t tokens : {5, 3}) {
    resize(tokens);
    EXPECT_EQ(calls_of_step(), (Calls{"shape ids", "infer", "enqueue"}));
    EXPECT_TRUE(is_bound_as_given());
    EXPECT_EQ(calls_of_step(), kEnqueue);
  }
}

TEST_F(StepsTest, AWrongOutputShapeIsRefusedAfterAValidStep) {
  calls_of_step();
  outputs["logits"].shape = {2, 4};
  const std::string wrong = "tensor logits: has shape (2, 4), the engine puts out (3, 4)";
  EXPECT_EQ(refusal(), wrong);
  EXPECT_EQ(context.taken(), (Calls{"infer"}));
  EXPECT_EQ(refusal(), wrong);  // again, though it is no change now
  outputs["logits"].shape = {3, 4};
  EXPECT_EQ(calls_of_step(), kAll);

  inputs["ids"].shape = {5};
  EXPECT_EQ(refusal(), "tensor logits: has shape (3, 4), the engine puts out (5, 4)");
  outputs["logits"].shape = {5, 4};
  EXPECT_EQ(calls_of_step(), kAll);
}

TEST_F(StepsTest, EverythingIsSetAfterAFailure) {
  const std::map<std::string, std::string> failures{
      {"shape ids", "tensor ids: shape (5,) does not fit the engine: (1,) to (16,)"},
      {"address ids", "TensorRT does not take the address of tensor ids. Fix: see the errors in TensorRT's log"},
      {"address logits", "TensorRT does not take the address of tensor logits. Fix: see the errors in TensorRT's log"},
      {"infer", "TensorRT cannot tell the shapes of ids. Fix: see the errors in TensorRT's log"},
      {"enqueue", "TensorRT does not run the step. Fix: see the errors in TensorRT's log"}};
  for (const auto& [call, message] : failures) {
    calls_of_step();
    EXPECT_EQ(calls_of_step(), kEnqueue) << call;
    const Tensors good_inputs = inputs, good_outputs = outputs;
    resize(5);
    inputs["ids"].data = memory(3), inputs["host_lengths"].data = memory(4), outputs["logits"].data = memory(5);
    context.failing = call;
    EXPECT_EQ(refusal(), message);
    EXPECT_EQ(context.taken().back(), call);  // nothing is called after it
    context.failing.clear();
    inputs = good_inputs, outputs = good_outputs;  // bound before the failure, not after it
    EXPECT_EQ(calls_of_step(), kAll) << call;
    EXPECT_TRUE(is_bound_as_given()) << call;
  }
}

TEST_F(StepsTest, TensorsThatDoNotFitAreRefusedAfterAValidStep) {
  const auto refused = [&](const auto& damage) {
    calls_of_step();
    const Tensors good_inputs = inputs, good_outputs = outputs;
    damage();
    const std::string message = refusal();
    EXPECT_EQ(std::count(context.calls.begin(), context.calls.end(), "enqueue"), 0) << message;
    inputs = good_inputs, outputs = good_outputs;
    EXPECT_EQ(calls_of_step(), kAll) << message;
    return message;
  };
  EXPECT_EQ(refused([&] { inputs["ids"].dtype = DataType::kINT64; }), "tensor ids: has another dtype, expected INT32");
  EXPECT_EQ(refused([&] { outputs["logits"].dtype = DataType::kHALF; }),
            "tensor logits: has another dtype, expected FLOAT");
  EXPECT_EQ(refused([&] { resize(17); }), "tensor ids: shape (17,) does not fit the engine: (1,) to (16,)");
  EXPECT_EQ(refused([&] { inputs.erase("ids"); }),
            "step: input 'ids' is not given. Fix: give all of the engine's inputs");
  EXPECT_EQ(refused([&] { inputs["mask"] = inputs["ids"]; }),
            "step: the engine has no input 'mask'. Fix: leave it out");
  EXPECT_EQ(refused([&] { outputs["hidden"] = outputs["logits"], outputs.erase("logits"); }),
            "step: output 'logits' is not given. Fix: give all of the engine's outputs");
  EXPECT_EQ(refused([&] { inputs["logits"] = outputs["logits"]; }),
            "step: the engine has no input 'logits'. Fix: leave it out");
}

TEST_F(StepsTest, ShapesThatDependOnValuesAreInferredEveryStep) {
  context.shape_input = "host_lengths";
  EXPECT_EQ(calls_of_step(), kAll);
  EXPECT_EQ(calls_of_step(), (Calls{"infer", "enqueue"}));
  context.added_rows = 1;  // as another value at the same address does
  EXPECT_EQ(refusal(), "tensor logits: has shape (3, 4), the engine puts out (4, 4)");
}

TEST_F(StepsTest, AFailureCarriesWhatAPluginSaidDuringTheStep) {
  newest_plugin_error = "an old one";
  context.failing = "enqueue";
  context.plugin_error_of_enqueue = "an old one";
  EXPECT_EQ(refusal(), "TensorRT does not run the step. Fix: see the errors in TensorRT's log");
  context.plugin_error_of_enqueue = "GPU 1 does not answer";
  EXPECT_EQ(refusal(), "TensorRT does not run the step: GPU 1 does not answer. Fix: see the errors in TensorRT's log");
  EXPECT_EQ(refusal(), "TensorRT does not run the step. Fix: see the errors in TensorRT's log");
}

TEST_F(StepsTest, AStepThatWantsMemoryIsRefused) {
  context.allocator = &steps.allocator();
  context.failing = "enqueue";
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(refusal().rfind("the engine wants to allocate 64 bytes inside a step: ", 0), 0u) << refusal();
}

TEST_F(StepsTest, AnyOrderOfStepsAndFailuresRunsOnWhatIsGiven) {
  std::mt19937 random(1);
  const Calls failing{"", "", "", "", "shape ids", "address ids", "address logits", "infer", "enqueue"};
  int queued = 0, refused = 0, cheap = 0;
  for (int i = 0; i < 2000; ++i) {
    if (random() % 4 == 0) resize(1 + static_cast<int64_t>(random() % 3));
    for (Tensor* const tensor : {&inputs["ids"], &inputs["host_lengths"], &outputs["logits"]})
      if (random() % 4 == 0) tensor->data = memory(random() % 3);
    const bool wrong = random() % 8 == 0;
    if (wrong) outputs["logits"].shape[0] += 1;
    context.failing = failing[random() % failing.size()];
    context.calls.clear();
    const Status status = steps.run(context, inputs, outputs, nullptr);
    if (wrong) {
      EXPECT_FALSE(status.ok());
      outputs["logits"].shape[0] -= 1;
    }
    ++(status.ok() ? queued : refused);
    if (!status.ok()) continue;
    cheap += context.calls == kEnqueue ? 1 : 0;
    ASSERT_TRUE(is_bound_as_given()) << "step " << i;
  }
  EXPECT_GT(std::min({queued, refused, cheap}), 100);
}

}  // namespace
}  // namespace tokenweave::test
