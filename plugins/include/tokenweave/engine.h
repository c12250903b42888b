/// C++: engines that `trtllm-tokenweave build` or Python's save_engine wrote, run with TensorRT alone. Link TensorRT,
/// the CUDA runtime, libtokenweave_trt.so and libcrypto; needs nlohmann-json.
///
///   auto engine = tokenweave::Engine::open(folder, rank, tp_size, logger);
///   auto context = engine->context({/*symmetric=*/true});
///   context->step(inputs, outputs, stream);
///
/// "Collective" means, as in tokenweave.h: every rank calls it, in the same order.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <string_view>

#include "tokenweave/engine_context.h"
#include "tokenweave/manifest.h"
#include "tokenweave/plan_file.h"
#include "tokenweave/plugin_library.h"
#include "tokenweave/status.h"

namespace tokenweave {

/// Lets this thread use a device. TW_INVALID_ARGUMENT: there are others only. Where there is none at all, Engine::open
/// says so.
inline Status use_device(int32_t index) {
  int count = 0;
  cudaError_t failure = cudaGetDeviceCount(&count);
  if (failure == cudaSuccess) failure = cudaSetDevice(index);
  if (failure == cudaSuccess || count == 0) return {};
  return error(TW_INVALID_ARGUMENT,
               "CUDA: device " + std::to_string(index) + " of " + std::to_string(count) + " cannot be used (" +
                   cudaGetErrorString(failure) +
                   "). Fix: start as many ranks as there are GPUs, and let CUDA_VISIBLE_DEVICES show them all");
}

/// The rank's own device, or, where NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share the GPUs (NCCL 2.30 or newer), one of
/// those there are: they take turns, slowly. Otherwise as use_device.
inline Status use_device_of_rank(int32_t rank) {
  const char* const shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  int count = 0;
  if (shared == nullptr || std::string_view(shared) != "1" || cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  return use_device(count > 0 ? rank % count : rank);
}

/// What a manifest is compared with. TW_UNSUPPORTED where there is no GPU: TensorRT is not to be called then, it ends
/// the process where there is no driver.
inline Result<ThisProcess> this_process(int32_t rank, int32_t tp_size) {
  int device = 0;
  cudaDeviceProp properties{};
  cudaError_t failure = cudaGetDevice(&device);
  if (failure == cudaSuccess) failure = cudaGetDeviceProperties(&properties, device);
  if (failure != cudaSuccess) {
    return error(TW_UNSUPPORTED, std::string("CUDA: no GPU can be used (") + cudaGetErrorString(failure) +
                                     "). Fix: run this on a machine with an NVIDIA GPU and its driver");
  }
  const int32_t version = getInferLibVersion();
  std::string tensorrt;
  for (const int32_t number : {version / 10000, version / 100 % 100, version % 100, getInferLibBuildVersion()}) {
    tensorrt += (tensorrt.empty() ? "" : ".") + std::to_string(number);
  }
  const std::string capability = std::to_string(properties.major) + "." + std::to_string(properties.minor);
  return ThisProcess{twVersion(), tensorrt, properties.name, capability, rank, tp_size};
}

class Engine {
 public:
  /// Opens this rank's engine of a folder, for the device that this thread uses.
  /// TW_INVALID_ARGUMENT: a file is missing, damaged, or of an engine that was built for something else.
  /// Other plugins that the network needs are registered before: register_plugins_of, initTrtLlmPlugins. TensorRT keeps
  /// the first logger that it gets as long as the process lives.
  static Result<Engine> open(const std::filesystem::path& folder, int32_t rank, int32_t tp_size,
                             nvinfer1::ILogger& logger) {
    auto config = read_config(folder, tp_size);
    if (!config.ok()) return config.status();
    auto manifest = read_manifest(folder, rank);
    if (!manifest.ok()) return manifest.status();
    const auto here = this_process(rank, tp_size);
    if (!here.ok()) return here.status();
    TW_RETURN_IF_ERROR(check_manifest(*manifest, *here, manifest_file(folder, rank).string()));
    TW_RETURN_IF_ERROR(check_ranks(folder, *manifest));
    const auto plan = PlanFile::open(folder, *manifest);
    if (!plan.ok()) return plan.status();
    if (manifest->mode != "stock") TW_RETURN_IF_ERROR(register_plugins());
    auto loaded = std::make_shared<detail::LoadedEngine>();
    const detail::Attempt attempt;
    loaded->runtime.reset(nvinfer1::createInferRuntime(logger));
    if (loaded->runtime != nullptr)
      loaded->engine.reset(loaded->runtime->deserializeCudaEngine(plan->data(), plan->size()));
    if (loaded->engine == nullptr) return attempt.failed("TensorRT cannot load " + plan_file(folder, rank).string());
    loaded->config = std::move(*config);
    loaded->manifest = std::move(*manifest);
    return Engine(std::move(loaded));
  }

  const EngineConfig& config() const { return loaded_->config; }
  const Manifest& manifest() const { return loaded_->manifest; }
  nvinfer1::ICudaEngine& cuda_engine() const { return *loaded_->engine; }

  /// Places of the network whose all-reduce, residual add and norm are one operation.
  int32_t sites() const {
    const std::unique_ptr<nvinfer1::IEngineInspector> inspector(loaded_->engine->createEngineInspector());
    const char* const text = inspector->getEngineInformation(nvinfer1::LayerInformationFormat::kONELINE);
    const std::string layers = text != nullptr ? text : "";
    const std::regex name("tokenweave/site_([0-9]+)/all_reduce_rms_norm/");
    std::set<std::string> found;
    for (std::sregex_iterator at(layers.begin(), layers.end(), name), end; at != end; ++at) found.insert((*at)[1]);
    return static_cast<int32_t>(found.size());
  }

  /// An execution context on memory that it brings. Collective when symmetric: all contexts first, then the first step.
  Result<EngineContext> context(const ContextOptions& options = {}) const {
    return EngineContext::create(loaded_, options);
  }

 private:
  explicit Engine(std::shared_ptr<const detail::LoadedEngine> loaded) : loaded_(std::move(loaded)) {}

  std::shared_ptr<const detail::LoadedEngine> loaded_;
};

}  // namespace tokenweave
