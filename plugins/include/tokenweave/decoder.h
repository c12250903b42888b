/// C++: greedy generation with a decoder that `trtllm-tokenweave build` has built. Prompts' chunks and generation rows
/// share steps as in Python's runner, so that both produce the same tokens. All ranks do the same steps: give every
/// rank the same prompts.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/decoder_model.h"
#include "tokenweave/engine.h"
#include "tokenweave/schedule.h"
#include "tokenweave/step_inputs.h"

namespace tokenweave {

class Decoder {
 public:
  /// How a step was.
  struct Step {
    int32_t num_tokens, batch, contexts;  ///< sequences, and those among them that ran a chunk of their prompt
    double milliseconds;                  ///< from the first copy to the logits on the host
  };

  /// Collective. The engine's context, KV cache and tensors, for the device that this thread uses.
  static Result<Decoder> create(const Engine& engine) {
    const auto model = decoder_model(engine.config());
    if (!model.ok()) return model.status();
    auto context = engine.context({engine.manifest().mode != "stock"});
    if (!context.ok()) return context.status();
    Decoder made(*model, std::move(*context));
    TW_RETURN_IF_ERROR(made.allocate());
    return made;
  }

  const DecoderModel& model() const { return model_; }

  /// The most likely tokens for each prompt. `on_step` is told of every step.
  /// TW_INVALID_ARGUMENT: a prompt that cannot be served; nothing was run.
  Result<std::vector<std::vector<int32_t>>> generate(const std::vector<std::vector<int32_t>>& prompts,
                                                     const GenerationOptions& options = {},
                                                     const std::function<void(const Step&)>& on_step = {}) {
    auto schedule = Schedule::create(model_, prompts, options);
    if (!schedule.ok()) return schedule.status();
    for (;;) {
      const auto steps = schedule->next();
      if (!steps.ok()) return steps.status();
      if (steps->empty()) return schedule->tokens();
      Step told{0, static_cast<int32_t>(steps->size()), 0, 0};
      const auto start = std::chrono::steady_clock::now();
      TW_RETURN_IF_ERROR(run(step_inputs(*steps, schedule->blocks(), layout_), told.batch));
      told.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      for (size_t row = 0; row < steps->size(); ++row) {
        const SequenceStep& step = (*steps)[row];
        told.num_tokens += static_cast<int32_t>(step.tokens.size());
        told.contexts += step.is_context ? 1 : 0;
        const auto token = step.samples() ? most_likely(row, step) : Result<int32_t>(0);
        if (!token.ok()) return token.status();
        schedule->ran(step, *token);
      }
      if (on_step) on_step(told);
    }
  }

 private:
  Decoder(const DecoderModel& model, EngineContext context) : model_(model), context_(std::move(context)) {}

  Status allocate() {
    auto pool = detail::allocate(model_.cache.pool_bytes());
    if (!pool.ok()) return pool.status();
    pool_ = std::move(*pool);
    // Pages are read whole, also where nothing was written yet.
    TW_RETURN_IF_ERROR(detail::cuda_status(cudaMemset(pool_.get(), 0, model_.cache.pool_bytes()), "cudaMemset"));
    layout_ = {context_.manifest().tp_size, model_.max_seq_len, pool_.get()};
    for (const TensorSpec& spec : context_.manifest().tensors) {
      if (!spec.is_input()) {
        if (spec.name != "logits" || spec.dtype != "FLOAT" || spec.shape.size() != 2 ||
            spec.shape[1] < model_.vocab_size)
          return error(TW_UNSUPPORTED, "output " + spec.name +
                                           ": is not float32 logits of the model's vocabulary. Fix: "
                                           "build the engine with trtllm-tokenweave build");
        logits_width_ = spec.shape[1];
        TW_RETURN_IF_ERROR(add(spec.name, size_t{4} * model_.max_batch_size * logits_width_));
      } else if (!is_host_input(spec.name)) {
        int64_t values = 1;
        for (const int64_t size : spec.profiles.empty() ? spec.shape : spec.profiles.front()[2]) values *= size;
        TW_RETURN_IF_ERROR(add(spec.name, static_cast<size_t>(values) * (spec.dtype == "INT64" ? 8 : 4)));
      }
    }
    logits_.resize(static_cast<size_t>(model_.max_batch_size) * logits_width_);
    cudaStream_t stream = nullptr;
    TW_RETURN_IF_ERROR(
        detail::cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
    stream_.reset(stream);
    return detail::cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  Status add(const std::string& name, size_t bytes) {
    auto memory = detail::allocate(bytes);
    if (!memory.ok()) return memory.status();
    device_[name] = std::move(*memory);
    return detail::cuda_status(cudaMemset(device_[name].get(), 0, bytes), "cudaMemset");
  }

  /// Runs a step and waits for its logits.
  Status run(HostTensors given, int64_t batch) {
    const std::string before = plugin_error().message;
    Tensors inputs;
    for (const TensorSpec& spec : context_.manifest().tensors) {
      const auto found = given.find(spec.name);
      if (!spec.is_input() || found == given.end()) continue;
      HostTensor& tensor = found->second;
      void* data = tensor.bytes.data();
      if (!is_host_input(spec.name)) {
        data = device_.at(spec.name).get();
        // With one beam that is all zeros, as it was made.
        if (spec.name != "cache_indirection") {
          TW_RETURN_IF_ERROR(detail::cuda_status(
              cudaMemcpyAsync(data, tensor.bytes.data(), tensor.bytes.size(), cudaMemcpyHostToDevice, stream_.get()),
              "copy of " + spec.name));
        }
      }
      inputs[spec.name] = {data, tensor.dtype, tensor.shape};
    }
    void* const logits = device_.at("logits").get();
    TW_RETURN_IF_ERROR(context_.step(inputs, {{"logits", {logits, nvinfer1::DataType::kFLOAT, {batch, logits_width_}}}},
                                     stream_.get()));
    TW_RETURN_IF_ERROR(detail::cuda_status(cudaMemcpyAsync(logits_.data(), logits, size_t{4} * batch * logits_width_,
                                                           cudaMemcpyDeviceToHost, stream_.get()),
                                           "copy of the logits"));
    TW_RETURN_IF_ERROR(detail::cuda_status(cudaStreamSynchronize(stream_.get()), "the step"));
    const Status newest = plugin_error();
    return newest.message == before ? Status{} : error(newest.code, "the step failed: " + newest.message);
  }

  Result<int32_t> most_likely(size_t row, const SequenceStep& step) const {
    const auto begin = logits_.begin() + static_cast<int64_t>(row) * logits_width_;
    const auto end = begin + model_.vocab_size;
    if (!std::all_of(begin, end, [](float value) { return std::isfinite(value); })) {
      return error(TW_INTERNAL, "logits of prompt " + std::to_string(step.sequence) + " at position " +
                                    std::to_string(step.end() - 1) +
                                    " are not finite: something read memory that was not written");
    }
    return static_cast<int32_t>(std::max_element(begin, end) - begin);
  }

  struct DestroyStream {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };

  DecoderModel model_;
  StepLayout layout_;
  detail::DeviceMemory pool_;
  std::map<std::string, detail::DeviceMemory> device_;
  std::vector<float> logits_;
  int64_t logits_width_ = 0;
  std::unique_ptr<CUstream_st, DestroyStream> stream_;
  EngineContext context_;  // goes first: it may name all the memory above
};

}  // namespace tokenweave
