#include "all_reduce_rms_norm.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "data_type.h"

namespace tokenweave {
namespace {

constexpr size_t kVectorBytes = 16;

Status check_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) return error(TW_INVALID_ARGUMENT, std::string(name) + " is null");
  if (reinterpret_cast<uintptr_t>(pointer) % kVectorBytes != 0) {
    return error(TW_INVALID_ARGUMENT, std::string(name) + " is not aligned to 16 bytes");
  }
  return {};
}

/// Where the whole tensor of one call lies in the symmetric buffers: where the caller put it, or in staging memory.
struct Placement {
  size_t offset = 0;
  bool staged = false;
};

/// Hands out staging memory; counts what is asked for, so that the error can name the total.
class Staging {
 public:
  explicit Staging(const Group& group) : group_(group) {}

  size_t take(size_t bytes) {
    const size_t offset = group_.staging_offset() + used_;
    used_ += bytes;
    return offset;
  }
  Status check() const {
    if (used_ <= group_.staging_bytes()) return {};
    return error(TW_INVALID_ARGUMENT, "tensors outside the group's tensor memory need " + std::to_string(used_) +
                                          " bytes of staging, and the group has " +
                                          std::to_string(group_.staging_bytes()) +
                                          ". Fix: raise TwGroupConfig.staging_bytes or use twGroupTensorMemory");
  }

 private:
  const Group& group_;
  size_t used_ = 0;
};

/// The whole tensors of one call.
struct WholeTensors {
  const Group& group;
  const TwAllReduceRmsNormTensors* of_local;  ///< of every local rank
  size_t bytes;                               ///< of each
  bool staged;                                ///< wherever they lie
};

/// Symmetric when it lies in tensor memory, at one offset for all local ranks.
Status place(const WholeTensors& tensors, const char* name, const void* (*get)(const TwAllReduceRmsNormTensors&),
             Placement* placement) {
  const Group& group = tensors.group;
  for (int local = 0; local < group.local_ranks(); ++local) {
    const auto* pointer = static_cast<const uint8_t*>(get(tensors.of_local[local]));
    TW_RETURN_IF_ERROR(check_pointer(pointer, name));
    const uint8_t* begin = group.buffer(group.rank() + local) + group.tensor_offset();
    const bool inside = !tensors.staged && pointer >= begin && pointer < begin + group.tensor_bytes();
    const size_t offset = inside ? static_cast<size_t>(pointer - begin) : 0;
    if (inside && offset + tensors.bytes > group.tensor_bytes()) {
      return error(TW_INVALID_ARGUMENT, std::string(name) + " reaches past the end of the group's tensor memory");
    }
    const Placement here{inside ? group.tensor_offset() + offset : 0, !inside};
    if (local > 0 && (here.offset != placement->offset || here.staged != placement->staged)) {
      return error(TW_RANKS_DISAGREE, std::string(name) + " lies at different offsets on the virtual ranks");
    }
    *placement = here;
  }
  return {};
}

SymmetricTensor symmetric_tensor(const Group& group, size_t offset) {
  SymmetricTensor tensor{};
  for (int rank = 0; rank < group.size(); ++rank) tensor.of_rank[rank] = group.buffer(rank) + offset;
  if (group.has_multicast()) tensor.multicast = group.multicast() + offset;
  return tensor;
}

/// FNV-1a over what must be equal on all ranks for a call to be one call.
template <typename... Values>
uint32_t signature_of(const Values&... values) {
  uint32_t hash = 2166136261u;
  const auto add = [&hash](const auto& value) {
    unsigned char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 16777619u;
  };
  (add(values), ...);
  return hash;
}

Status pick_fabric(const Group& group, TwFabric wanted, Fabric* fabric) {
  if (wanted == TW_FABRIC_AUTO) wanted = group.has_multicast() ? TW_FABRIC_MULTIMEM : TW_FABRIC_PEER;
  if (wanted < TW_FABRIC_PEER || wanted > TW_FABRIC_SOFT_MULTICAST) {
    return error(TW_INVALID_ARGUMENT, "unknown fabric " + std::to_string(wanted));
  }
  if (wanted == TW_FABRIC_MULTIMEM && !group.has_multicast()) {
    return error(TW_UNSUPPORTED, "no multimem here: " + group.multicast_reason());
  }
  *fabric = static_cast<Fabric>(wanted);
  return {};
}

Status queue(const Group& group, const LaunchPlan& plan, const LaunchRequest& request, const TwLaunchConfig& launch,
             KernelArgs* args, void* stream) {
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.ctas, group.local_ranks());
  config.blockDim = dim3(plan.team_threads, plan.teams);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (group.loopback()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (plan.cluster_size > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = plan.cluster_size;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  if (launch.launch_completion != nullptr) {
    attributes[config.numAttrs].id = cudaLaunchAttributeLaunchCompletionEvent;
    attributes[config.numAttrs].val.launchCompletionEvent.event = static_cast<cudaEvent_t>(launch.launch_completion);
    attributes[config.numAttrs++].val.launchCompletionEvent.flags = 0;
  }
  void* parameters[] = {args};
  return cuda_status(cudaLaunchKernelExC(&config, request.kernel.function, parameters), "launching AllReduceRmsNorm");
}

}  // namespace

Status validate(const TwAllReduceRmsNorm& op) {
  if (op.dtype != TW_FLOAT && op.dtype != TW_HALF && op.dtype != TW_BFLOAT16) {
    return error(TW_INVALID_ARGUMENT, "dtype " + std::to_string(op.dtype) + " is not float32, float16 or bfloat16");
  }
  if (op.hidden <= 0 || op.hidden % 8 != 0 || op.hidden > kMaxHidden) {
    return error(TW_INVALID_ARGUMENT, "hidden is " + std::to_string(op.hidden) + ", not a multiple of 8 from 8 to " +
                                          std::to_string(kMaxHidden));
  }
  const uint64_t vectors =
      uint64_t(op.num_tokens < 0 ? 0 : op.num_tokens) * op.hidden * element_bytes(op.dtype) / kVectorBytes;
  if (op.num_tokens < 0 || vectors >= (uint64_t{1} << 31)) {
    return error(TW_INVALID_ARGUMENT,
                 "num_tokens is " + std::to_string(op.num_tokens) + ", not 0 or more with a tensor below 32 GiB");
  }
  TW_RETURN_IF_ERROR(check_pointer(op.norm_weight, "norm_weight"));
  return op.bias == nullptr ? Status{} : check_pointer(op.bias, "bias");
}

Status all_reduce_rms_norm(Group& group, const TwAllReduceRmsNorm& op, const TwAllReduceRmsNormTensors* tensors,
                           const TwLaunchConfig& launch, void* stream) {
  TW_RETURN_IF_ERROR(group.check());
  TW_RETURN_IF_ERROR(validate(op));
  if (op.num_tokens == 0) return {};

  const size_t row_bytes = op.hidden * element_bytes(op.dtype);
  const size_t bytes = op.num_tokens * row_bytes;
  LaunchRequest request;
  TW_RETURN_IF_ERROR(pick_fabric(group, launch.fabric, &request.fabric));
  request.size = group.size();
  request.loopback = group.loopback();
  request.gather_residual = op.gather_residual != 0;
  request.rows_per_rank = (op.num_tokens + group.size() - 1) / group.size();
  request.vectors_per_row = static_cast<int>(row_bytes / kVectorBytes);
  request.ctas = launch.ctas;
  request.threads = launch.threads;
  request.cluster_size = launch.cluster_size;
  const auto dtype = static_cast<DataType>(op.dtype);
  const KernelEntry bulk = find_kernel(dtype, request.fabric, Loader::kBulk, group.size());
  Loader loader{};
  TW_RETURN_IF_ERROR(pick_loader(request, bulk, group.limits(), launch.loader, &loader));
  request.kernel = find_kernel(dtype, request.fabric, loader, group.size());
  LaunchPlan plan;
  TW_RETURN_IF_ERROR(plan_launch(request, group.limits(), &plan));

  using Tensors = TwAllReduceRmsNormTensors;
  const WholeTensors whole{group, tensors, bytes, op.staged != 0};
  Placement input, normed, residual_out;
  TW_RETURN_IF_ERROR(place(whole, "input", [](const Tensors& t) { return t.input; }, &input));
  TW_RETURN_IF_ERROR(place(whole, "normed", [](const Tensors& t) -> const void* { return t.normed; }, &normed));
  Staging staging(group);
  // What is pushed is read and written by its own rank only, wherever it lies.
  const bool pushed = loader == Loader::kPush;
  if (pushed) input = normed = Placement{};
  // A row's owner reads it on every rank before it writes it there, so input and normed share one piece.
  if (input.staged || normed.staged) {
    const size_t offset = staging.take(bytes);
    if (input.staged) input.offset = offset;
    if (normed.staged) normed.offset = offset;
  }
  if (op.gather_residual != 0) {
    TW_RETURN_IF_ERROR(
        place(whole, "residual_out", [](const Tensors& t) -> const void* { return t.residual_out; }, &residual_out));
    if (pushed) residual_out = Placement{};
    if (residual_out.staged) residual_out.offset = staging.take(bytes);
  }
  TW_RETURN_IF_ERROR(staging.check());

  KernelArgs args{};
  group.fill(&args);
  args.input = symmetric_tensor(group, input.offset);
  args.normed = symmetric_tensor(group, normed.offset);
  args.residual_out = symmetric_tensor(group, residual_out.offset);
  args.stage_input = input.staged;
  args.stage_normed = normed.staged;
  args.stage_residual = residual_out.staged;
  args.gather_residual = op.gather_residual != 0;
  for (int local = 0; local < group.local_ranks(); ++local) {
    const Tensors& t = tensors[local];
    TW_RETURN_IF_ERROR(check_pointer(t.residual, "residual"));
    TW_RETURN_IF_ERROR(check_pointer(t.residual_out, "residual_out"));
    const size_t before = (group.rank() + local) * size_t(request.rows_per_rank) * row_bytes;
    args.local[local] = {static_cast<const uint8_t*>(t.input),
                         static_cast<const uint8_t*>(t.residual) - (op.residual_sharded != 0 ? before : 0),
                         static_cast<uint8_t*>(t.normed),
                         static_cast<uint8_t*>(t.residual_out) - (op.gather_residual != 0 ? 0 : before)};
  }
  args.norm_weight = static_cast<const uint8_t*>(op.norm_weight);
  args.bias = static_cast<const uint8_t*>(op.bias);
  args.num_tokens = op.num_tokens;
  args.rows_per_rank = request.rows_per_rank;
  args.vectors_per_row = request.vectors_per_row;
  args.stage_bits = plan.stage_bits;
  args.eps = op.eps;
  args.inverse_hidden = 1.0f / static_cast<float>(op.hidden);
  args.signature = signature_of(op.dtype, op.num_tokens, op.hidden, op.residual_sharded, op.gather_residual, op.eps,
                                op.bias != nullptr, request.fabric, plan.ctas, pushed, input.offset, normed.offset,
                                input.staged, normed.staged, residual_out.offset);
  const DeviceScope scope(group.device());
  TW_RETURN_IF_ERROR(scope.status());
  return queue(group, plan, request, launch, &args, stream);
}

Status prepare_kernels(int size, const DeviceLimits& limits) {
  for (const DataType dtype : {DataType::kBfloat16, DataType::kHalf, DataType::kFloat}) {
    for (const Fabric fabric : {Fabric::kPeer, Fabric::kMultimem, Fabric::kSoftMulticast}) {
      for (const Loader loader : {Loader::kCpAsync, Loader::kBulk, Loader::kPush}) {
        const void* kernel = find_kernel(dtype, fabric, loader, size).function;
        cudaFuncAttributes attributes{};
        TW_RETURN_IF_ERROR(cuda_status(cudaFuncGetAttributes(&attributes, kernel), "loading AllReduceRmsNorm"));
        const auto dynamic = static_cast<int>(limits.shared_bytes - attributes.sharedSizeBytes);
        TW_RETURN_IF_ERROR(
            cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
                        "cudaFuncSetAttribute"));
      }
    }
  }
  return {};
}

}  // namespace tokenweave
