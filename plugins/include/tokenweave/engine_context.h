/// C++: one execution context of an engine, and a step of it; included by engine.h.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/manifest.h"
#include "tokenweave/plugin_library.h"
#include "tokenweave/status.h"

namespace tokenweave {

/// Where a tensor of a step is: in device memory, or for an input that plugins read (host_*) in the host's.
struct Tensor {
  void* data = nullptr;
  nvinfer1::DataType dtype = nvinfer1::DataType::kFLOAT;
  std::vector<int64_t> shape;
};

using Tensors = std::map<std::string, Tensor>;  ///< by name

struct ContextOptions {
  /// Activations in symmetric memory: collectives need no copies then. The same on all ranks; their engines have to
  /// need the same number of bytes (build_on_all_ranks).
  bool symmetric = false;
  int32_t profile = 0;
};

namespace detail {

/// Destroyed in reverse order: the runtime last.
struct LoadedEngine {
  EngineConfig config;
  Manifest manifest;
  std::unique_ptr<nvinfer1::IRuntime> runtime;
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
};

/// A call of TensorRT that may fail: made before it, so that its error carries what a plugin said since.
class Attempt {
 public:
  Attempt() { twPluginLastError(&before_); }

  Status failed(const std::string& what) const {
    const std::string newest = plugin_error().message;
    return error(TW_INTERNAL, what + (newest == before_.message || newest.empty() ? "" : ": " + newest) +
                                  ". Fix: see the errors in TensorRT's log");
  }

 private:
  TwStatus before_{};  // no std::string: steps that succeed should not pay for one
};

inline Status cuda_status(cudaError_t code, const std::string& call) {
  return code == cudaSuccess ? Status{} : error(TW_CUDA_ERROR, call + ": " + cudaGetErrorString(code));
}

struct FreeDevice {
  void operator()(void* data) const { cudaFree(data); }
};
using DeviceMemory = std::unique_ptr<void, FreeDevice>;

/// On the current device.
inline Result<DeviceMemory> allocate(size_t bytes) {
  void* data = nullptr;
  TW_RETURN_IF_ERROR(
      cuda_status(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "cudaMalloc of " + std::to_string(bytes)));
  return DeviceMemory(data);
}

/// Gives nothing, and notes what was wanted: a woven network whose sizes depend on data computes wrong splits.
class RefusingAllocator final : public nvinfer1::IGpuAsyncAllocator {
 public:
  void* allocateAsync(uint64_t const size, uint64_t const, nvinfer1::AllocatorFlags const,
                      cudaStream_t) noexcept override {
    refused_bytes += size;
    return nullptr;
  }
  bool deallocateAsync(void* const, cudaStream_t) noexcept override { return true; }

  uint64_t refused_bytes = 0;
};

inline std::string to_string(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

inline nvinfer1::Dims to_dims(const std::vector<int64_t>& shape) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<int32_t>(shape.size());
  std::copy_n(shape.begin(), std::min<size_t>(shape.size(), nvinfer1::Dims::MAX_DIMS), dims.d);
  return dims;
}

/// The steps of an execution context. What the last one bound is remembered, and only what differs is set: all of it,
/// with inferring shapes, took 61 us a step, 2.6 % of one that decodes with 30 layers on an H200. The context is a
/// template parameter so that tests can count calls.
class Steps {
 public:
  /// The manifest has to stay.
  Steps(const Manifest& manifest, int32_t profile) : profile_(profile) {
    for (const TensorSpec& spec : manifest.tensors) specs_[spec.name] = &spec;
  }

  RefusingAllocator& allocator() const { return *allocator_; }

  /// The next step sets everything.
  void forget() { is_bound_ = false; }

  template <typename Context>
  Status run(Context& context, const Tensors& inputs, const Tensors& outputs, cudaStream_t stream) {
    const Attempt attempt;
    TW_RETURN_IF_ERROR(bind(context, inputs, outputs, attempt));
    allocator_->refused_bytes = 0;
    if (context.enqueueV3(stream)) return {};
    forget();
    if (allocator_->refused_bytes == 0) return attempt.failed("TensorRT does not run the step");
    return error(TW_UNSUPPORTED, "the engine wants to allocate " + std::to_string(allocator_->refused_bytes) +
                                     " bytes inside a step: TensorRT computes sizes on the GPU, and a split that "
                                     "depends on them is wrong. Fix: build it again with trtllm-tokenweave");
  }

 private:
  /// What of a tensor differs from what is bound.
  struct Change {
    bool dtype, shape, address;
  };

  template <typename Context>
  Status bind(Context& context, const Tensors& inputs, const Tensors& outputs, const Attempt& attempt) {
    // Nothing counts as bound until all is: after a failure the next step sets everything.
    const bool keeps = std::exchange(is_bound_, false) && same_names(inputs, inputs_) && same_names(outputs, outputs_);
    if (!keeps) {
      TW_RETURN_IF_ERROR(check_names("INPUT", "input", inputs));
      TW_RETURN_IF_ERROR(check_names("OUTPUT", "output", outputs));
      inputs_ = inputs;
      outputs_ = outputs;
      values_decide_ = any_value_decides(context);
    }
    bool infer = values_decide_;
    for (const auto& [given, bound] : {std::pair{&inputs, &inputs_}, std::pair{&outputs, &outputs_}}) {
      auto last = bound->begin();
      for (const auto& [name, tensor] : *given) {
        Tensor& was = (last++)->second;
        const Change change{!keeps || tensor.dtype != was.dtype, !keeps || tensor.shape != was.shape,
                            !keeps || tensor.data != was.data};
        TW_RETURN_IF_ERROR(set(context, name, tensor, change, given == &inputs, attempt));
        infer = infer || change.shape;
        was = tensor;
      }
    }
    if (infer) TW_RETURN_IF_ERROR(infer_shapes(context, outputs, attempt));
    is_bound_ = true;
    return {};
  }

  template <typename Context>
  Status set(Context& context, const std::string& name, const Tensor& tensor, const Change& change, bool is_input,
             const Attempt& attempt) const {
    if (change.dtype && tensor.dtype != context.getEngine().getTensorDataType(name.c_str()))
      return error(TW_INVALID_ARGUMENT, "tensor " + name + ": has another dtype, expected " + specs_.at(name)->dtype);
    if (is_input && change.shape && !context.setInputShape(name.c_str(), to_dims(tensor.shape))) {
      const TensorSpec& spec = *specs_.at(name);
      const bool ranged = static_cast<size_t>(profile_) < spec.profiles.size();
      const std::string fits =
          ranged ? to_string(spec.profiles[profile_][0]) + " to " + to_string(spec.profiles[profile_][2])
                 : to_string(spec.shape);
      return error(TW_INVALID_ARGUMENT,
                   "tensor " + name + ": shape " + to_string(tensor.shape) + " does not fit the engine: " + fits);
    }
    if (!change.address || context.setTensorAddress(name.c_str(), tensor.data)) return {};
    return attempt.failed("TensorRT does not take the address of tensor " + name);
  }

  template <typename Context>
  static Status infer_shapes(Context& context, const Tensors& outputs, const Attempt& attempt) {
    std::array<const char*, 8> missing{};
    if (context.inferShapes(static_cast<int32_t>(missing.size()), missing.data()) != 0) {
      return attempt.failed(std::string("TensorRT cannot tell the shapes") +
                            (missing[0] != nullptr ? std::string(" of ") + missing[0] : ""));
    }
    for (const auto& [name, tensor] : outputs) {
      const nvinfer1::Dims dims = context.getTensorShape(name.c_str());
      const std::vector<int64_t> shape(dims.d, dims.d + std::max(dims.nbDims, 0));
      if (shape == tensor.shape) continue;
      return error(TW_INVALID_ARGUMENT, "tensor " + name + ": has shape " + to_string(tensor.shape) +
                                            ", the engine puts out " + to_string(shape));
    }
    return {};
  }

  /// Whether shapes follow from values in memory: these may change where no shape and no address does.
  template <typename Context>
  bool any_value_decides(const Context& context) const {
    return std::any_of(specs_.begin(), specs_.end(),
                       [&](const auto& named) { return context.getEngine().isShapeInferenceIO(named.first.c_str()); });
  }

  static bool same_names(const Tensors& left, const Tensors& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](const auto& a, const auto& b) { return a.first == b.first; });
  }

  Status check_names(const std::string& mode, const std::string& word, const Tensors& given) const {
    for (const auto& [name, spec] : specs_) {
      if (spec->mode == mode && given.count(name) == 0)
        return refuse("step", word + " '" + name + "' is not given", "give all of the engine's " + word + "s");
    }
    for (const auto& [name, tensor] : given) {
      const auto spec = specs_.find(name);
      if (spec == specs_.end() || spec->second->mode != mode)
        return refuse("step", "the engine has no " + word + " '" + name + "'", "leave it out");
    }
    return {};
  }

  std::map<std::string, const TensorSpec*> specs_;
  int32_t profile_;
  // On the heap: the context has its address.
  std::unique_ptr<RefusingAllocator> allocator_ = std::make_unique<RefusingAllocator>();
  // The tensors of the last step, valid where is_bound_.
  Tensors inputs_, outputs_;
  bool is_bound_ = false;
  bool values_decide_ = false;
};

}  // namespace detail

/// An execution context. One step at a time, and none when it is destroyed. It keeps its engine alive.
class EngineContext {
 public:
  EngineContext(EngineContext&&) = default;
  EngineContext& operator=(EngineContext&&) = delete;  // the memory would go before the context that uses it

  static Result<EngineContext> create(std::shared_ptr<const detail::LoadedEngine> loaded,
                                      const ContextOptions& options) {
    const nvinfer1::ICudaEngine& engine = *loaded->engine;
    if (options.profile < 0 || options.profile >= engine.getNbOptimizationProfiles()) {
      return detail::refuse("engine", "there is no profile " + std::to_string(options.profile),
                            "it has " + std::to_string(engine.getNbOptimizationProfiles()) + ", counted from 0");
    }
    EngineContext made(std::move(loaded), options.profile);
    const detail::Attempt attempt;
    made.context_.reset(
        made.loaded_->engine->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
    if (made.context_ == nullptr) return attempt.failed("TensorRT makes no execution context");
    made.context_->setTemporaryStorageAllocator(&made.steps_.allocator());
    if (options.profile != 0) {
      if (!made.context_->setOptimizationProfileAsync(options.profile, nullptr) ||
          cudaStreamSynchronize(nullptr) != cudaSuccess) {
        return attempt.failed("TensorRT does not take profile " + std::to_string(options.profile));
      }
    }
    TW_RETURN_IF_ERROR(made.bring_memory(options.symmetric));
    return made;
  }

  /// Queues one step; nothing is waited for. Tensors and the values of host inputs have to stay until it is done.
  /// TW_INVALID_ARGUMENT: tensors that do not fit the engine; nothing was queued.
  /// Only what differs from the last step is set: to reuse memory is cheaper, and to keep shapes cheaper still.
  /// Order: eager steps that one thread queues to several streams follow one another where the engine has collectives
  /// of ours, whose plugins see to it. No plugin sees what a CUDA graph replays: a replay and eager steps on another
  /// stream, or replays on two streams, are not ordered, and the caller has to let one wait for the other (one stream
  /// for all, or an event). Run at once they mix their collectives and activations.
  Status step(const Tensors& inputs, const Tensors& outputs, cudaStream_t stream) {
    return steps_.run(*context_, inputs, outputs, stream);
  }

  /// Makes the next step set every shape and address again: call it after setting any through execution_context().
  void forget_bindings() { steps_.forget(); }

  const EngineConfig& config() const { return loaded_->config; }
  const Manifest& manifest() const { return loaded_->manifest; }
  /// For what this class has not. step() does not notice shapes, addresses or a profile set here: forget_bindings().
  nvinfer1::IExecutionContext& execution_context() const { return *context_; }

 private:
  EngineContext(std::shared_ptr<const detail::LoadedEngine> loaded, int32_t profile)
      : loaded_(std::move(loaded)), steps_(loaded_->manifest, profile) {}

  Status bring_memory(bool symmetric) {
    const int64_t bytes = std::max<int64_t>(loaded_->engine->getDeviceMemorySizeV2(), 1);
    void* data = nullptr;
    if (symmetric) {
      int device = 0;
      TW_RETURN_IF_ERROR(detail::cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
      const auto memory = symmetric_memory(device, static_cast<uint64_t>(bytes));
      if (!memory.ok()) return memory.status();
      data = *memory;
    } else {
      auto memory = detail::allocate(static_cast<size_t>(bytes));
      if (!memory.ok()) return memory.status();
      data = memory->get();
      memory_ = std::move(*memory);
    }
    context_->setDeviceMemoryV2(data, bytes);
    return {};
  }

  // Destroyed in reverse order: the execution context first, the engine last.
  std::shared_ptr<const detail::LoadedEngine> loaded_;
  detail::Steps steps_;
  detail::DeviceMemory memory_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
};

}  // namespace tokenweave
