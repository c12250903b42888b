// For measurements only: what EngineContext::step costs over enqueueV3 alone, which it ends in.
//
//   mpirun -n 2 tokenweave_step_overhead FOLDER 8 100
//
// Arguments: an engine folder of `trtllm-tokenweave build`, sequences of a step, steps. Steps of one token
// a sequence are run in turn, by step() and by enqueueV3 on the same tensors; prints the medians of both, from the call
// to the end of the work on the GPU.
#include <mpi.h>
#include <tokenweave/decoder_model.h>
#include <tokenweave/engine.h>
#include <tokenweave/step_inputs.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using tokenweave::error;
using tokenweave::Status;

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", message);
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

Status measure(const char* folder, int rank, int size, int batch, int rounds) {
  static Logger logger;
  TW_RETURN_IF_ERROR(tokenweave::use_device_of_rank(rank));
  TW_RETURN_IF_ERROR(tokenweave::register_plugins_of(tokenweave::reference_library_file()));
  const auto engine = tokenweave::Engine::open(folder, rank, size, logger);
  if (!engine.ok()) return engine.status();
  const auto model = tokenweave::decoder_model(engine->config());
  if (!model.ok()) return model.status();
  auto context = engine->context({engine->manifest().mode != "stock"});
  if (!context.ok()) return context.status();

  // Generation rows behind prompts of one block, whose keys and values are whatever the memory holds.
  std::vector<tokenweave::detail::DeviceMemory> memory;
  const auto allocate = [&](size_t bytes) -> tokenweave::Result<void*> {
    auto made = tokenweave::detail::allocate(bytes);
    if (!made.ok()) return made.status();
    memory.push_back(std::move(*made));
    if (cudaMemset(memory.back().get(), 0, bytes) != cudaSuccess) return error(TW_CUDA_ERROR, "cudaMemset failed");
    return memory.back().get();
  };
  const auto pool = allocate(model->cache.pool_bytes());
  if (!pool.ok()) return pool.status();
  tokenweave::BlockManager blocks(model->cache);
  std::vector<tokenweave::SequenceStep> rows;
  const int32_t prompt = model->cache.tokens_per_block;
  for (int32_t i = 0; i < batch; ++i) {
    rows.push_back({i, {1}, prompt, prompt, false});
    TW_RETURN_IF_ERROR(blocks.grow(i, prompt + 1));
  }
  tokenweave::HostTensors host = step_inputs(rows, blocks, {size, model->max_seq_len, *pool});
  tokenweave::Tensors inputs, outputs;
  for (const tokenweave::TensorSpec& spec : engine->manifest().tensors) {
    if (!spec.is_input()) {
      const auto data = allocate(size_t{4} * batch * spec.shape.back());
      if (!data.ok()) return data.status();
      outputs[spec.name] = {*data, nvinfer1::DataType::kFLOAT, {batch, spec.shape.back()}};
      continue;
    }
    tokenweave::HostTensor& tensor = host[spec.name];
    void* data = tensor.bytes.data();
    if (!tokenweave::is_host_input(spec.name)) {
      const auto device = allocate(tensor.bytes.size());
      if (!device.ok()) return device.status();
      data = *device;
      if (cudaMemcpy(data, tensor.bytes.data(), tensor.bytes.size(), cudaMemcpyHostToDevice) != cudaSuccess)
        return error(TW_CUDA_ERROR, "cudaMemcpy failed");
    }
    inputs[spec.name] = {data, tensor.dtype, tensor.shape};
  }

  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    return error(TW_CUDA_ERROR, "cudaStreamCreateWithFlags failed");
  std::vector<double> milliseconds[2];
  for (int round = -10; round < 2 * rounds; ++round) {
    const bool alone = round % 2 != 0;
    const auto start = std::chrono::steady_clock::now();
    if (!alone) {
      TW_RETURN_IF_ERROR(context->step(inputs, outputs, stream));
    } else if (!context->execution_context().enqueueV3(stream)) {
      return error(TW_INTERNAL, "enqueueV3 failed");
    }
    if (cudaStreamSynchronize(stream) != cudaSuccess) return error(TW_CUDA_ERROR, "the step failed");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (round >= 0) milliseconds[alone].push_back(took.count());
  }
  cudaStreamDestroy(stream);
  if (rank == 0) {
    const double step = median(milliseconds[0]), alone = median(milliseconds[1]);
    std::printf("step %.4f ms, enqueueV3 alone %.4f ms, ratio %.4f\n", step, alone, step / alone);
  }
  return tokenweave::plugin_error();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s FOLDER SEQUENCES STEPS\n", argv[0]);
    return 2;
  }
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const Status status = measure(argv[1], rank, size, std::atoi(argv[2]), std::atoi(argv[3]));
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: error: %s\n", rank, status.message.c_str());
    return 1;  // without MPI_Finalize: mpirun ends the other ranks
  }
  MPI_Finalize();
  return 0;
}
