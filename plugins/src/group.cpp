#include "group.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "env.h"

namespace tokenweave {
namespace {

constexpr size_t kAlignment = 256;

size_t align(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

Status validate(const TwGroupConfig& config) {
  if (config.size < 1 || config.size > kMaxRanks) {
    return error(TW_INVALID_ARGUMENT,
                 "size is " + std::to_string(config.size) + ", not 1 to " + std::to_string(kMaxRanks));
  }
  if (config.loopback == 0 && (config.rank < 0 || config.rank >= config.size)) {
    return error(TW_INVALID_ARGUMENT,
                 "rank is " + std::to_string(config.rank) + ", not 0 to size - 1 = " + std::to_string(config.size - 1));
  }
  return {};
}

Status validate(const Environment& env) {
  if (env.symmetric_memory == "vmm" || env.symmetric_memory == "nccl") return {};
  return error(TW_INVALID_ARGUMENT, "TOKENWEAVE_SYMMETRIC_MEMORY is '" + env.symmetric_memory +
                                        "'. Fix: set it to vmm or nccl, or not at all");
}

template <typename T, typename Deleter, typename Allocate>
Status allocate(size_t bytes, const char* call, Allocate allocate_bytes, std::unique_ptr<T, Deleter>* owner) {
  void* p = nullptr;
  TW_RETURN_IF_ERROR(cuda_status(allocate_bytes(&p, bytes), call));
  owner->reset(static_cast<T*>(p));
  return {};
}

/// The state in which the kernels expect a rank's buffer before their first call.
Status clear_buffer(uint8_t* buffer, size_t bytes) {
  TW_RETURN_IF_ERROR(cuda_status(cudaMemset(buffer, 0, bytes), "cudaMemset"));
  return cuda_status(cudaMemset(buffer + kSignalPadBytes, 0xff, kMailboxBytes), "cudaMemset");
}

}  // namespace

void DeviceFree::operator()(void* p) const { (void)cudaFree(p); }
void HostFree::operator()(void* p) const { (void)cudaFreeHost(p); }

DeviceScope::DeviceScope(int device) {
  int current = device;
  status_ = cuda_status(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;  // cudaSetDevice would replace the caller's context, were it not the primary one
  previous_ = current;
  status_ = cuda_status(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

Status Group::create(const TwGroupConfig& requested, std::unique_ptr<Group>* group) {
  TW_RETURN_IF_ERROR(validate(requested));
  const Environment env = environment();
  TW_RETURN_IF_ERROR(validate(env));
  TW_RETURN_IF_ERROR(find_driver());  // not agreed on: few machines have it for some ranks only
  TwGroupConfig config = requested;
  if (config.timeout_ms == 0) config.timeout_ms = env.timeout_ms;
  if (!env.multicast) config.allow_multicast = 0;
  config.tensor_bytes = align(config.tensor_bytes);
  config.staging_bytes = align(config.staging_bytes);
  std::unique_ptr<Group> made(new Group(config));

  if (made->loopback()) {
    TW_RETURN_IF_ERROR(made->prepare_device());
    const DeviceScope scope(config.device);
    TW_RETURN_IF_ERROR(made->make_loopback_buffers());
  } else {
    BootstrapOptions options{config.rank, config.size, std::chrono::milliseconds(config.timeout_ms), env.bootstrap, {}};
    if (requested.bootstrap != nullptr) options.address = requested.bootstrap;
    if (requested.mpi_ranks != nullptr)
      options.mpi_ranks.assign(requested.mpi_ranks, requested.mpi_ranks + config.size);
    if (options.address.empty() && options.size > 1) {
      TW_RETURN_IF_ERROR(exchange_address_by_mpi(options, &options.address));
    }
    TW_RETURN_IF_ERROR(connect_bootstrap(options, &made->bootstrap_));
    TW_RETURN_IF_ERROR(compare_configurations(*made->bootstrap_, config));
    TW_RETURN_IF_ERROR(agree(*made->bootstrap_, "preparing the device", made->prepare_device()));
    TW_RETURN_IF_ERROR(made->make_symmetric_buffers(*made->bootstrap_, env.symmetric_memory == "nccl"));
  }
  *group = std::move(made);
  return {};
}

Status Group::prepare_device() {
  TW_RETURN_IF_ERROR(find_device(config_.device));
  const DeviceScope scope(config_.device);
  TW_RETURN_IF_ERROR(scope.status());
  TW_RETURN_IF_ERROR(cuda_status(cudaFree(nullptr), "creating the CUDA context"));
  int shared = 0, major = 0, minor = 0;
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    return cuda_status(cudaDeviceGetAttribute(value, attribute, config_.device), "cudaDeviceGetAttribute");
  };
  TW_RETURN_IF_ERROR(get(&limits_.sm_count, cudaDevAttrMultiProcessorCount));
  TW_RETURN_IF_ERROR(get(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  TW_RETURN_IF_ERROR(get(&major, cudaDevAttrComputeCapabilityMajor));
  TW_RETURN_IF_ERROR(get(&minor, cudaDevAttrComputeCapabilityMinor));
  limits_.shared_bytes = static_cast<size_t>(shared);
  limits_.compute_capability = 10 * major + minor;
  TW_RETURN_IF_ERROR(prepare_kernels(config_.size, limits_));

  const auto host = [](void** p, size_t n) { return cudaHostAlloc(p, n, cudaHostAllocMapped | cudaHostAllocPortable); };
  TW_RETURN_IF_ERROR(allocate(sizeof(FaultRecord), "cudaHostAlloc", host, &fault_));
  *fault_ = FaultRecord{};
  const auto device = [](void** p, size_t n) { return cudaMalloc(p, n); };
  TW_RETURN_IF_ERROR(allocate(sizeof(uint32_t), "cudaMalloc", device, &fault_flag_));
  return cuda_status(cudaMemset(fault_flag_.get(), 0, sizeof(uint32_t)), "cudaMemset");
}

Status Group::make_loopback_buffers() {
  multicast_reason_ = "loopback has no switch";
  loopback_buffers_.resize(config_.size);
  for (auto& buffer : loopback_buffers_) {
    const auto device = [](void** p, size_t n) { return cudaMalloc(p, n); };
    TW_RETURN_IF_ERROR(allocate(buffer_bytes(), "cudaMalloc", device, &buffer));
    TW_RETURN_IF_ERROR(clear_buffer(buffer.get(), buffer_bytes()));
    buffers_.push_back(buffer.get());
  }
  return cuda_status(cudaDeviceSynchronize(), "clearing symmetric memory");
}

Status Group::make_symmetric_buffers(Bootstrap& bootstrap, bool nccl_asked) {
  const DeviceScope scope(config_.device);
  driver_ = std::make_unique<DriverTable>();
  TW_RETURN_IF_ERROR(agree(bootstrap, "loading the driver", load_driver(driver_.get())));
  const Status nccl = load_nccl_memory(bootstrap, nccl_asked, &nccl_);
  const SymmetricBuffer::Options options{config_.device, buffer_bytes(), config_.allow_multicast != 0,
                                         nccl.ok() ? &nccl_ : nullptr};
  TW_RETURN_IF_ERROR(SymmetricBuffer::create(*driver_, bootstrap, options, &symmetric_));
  if (nccl_asked) memory_reason_ = nccl.ok() ? symmetric_->nccl_reason() : nccl.message;
  multicast_reason_ = symmetric_->multicast_reason();
  for (int rank = 0; rank < config_.size; ++rank) buffers_.push_back(symmetric_->of_rank(rank));
  Status cleared = clear_buffer(buffers_[config_.rank], buffer_bytes());
  if (cleared.ok()) cleared = cuda_status(cudaDeviceSynchronize(), "clearing symmetric memory");
  return agree(bootstrap, "clearing symmetric memory", cleared);
}

Status Group::leave() {
  const DeviceScope scope(config_.device);
  const Status idle = cuda_status(cudaDeviceSynchronize(), "waiting for the device");
  if (!idle.ok() && symmetric_ != nullptr) symmetric_->abandon();
  if (bootstrap_ != nullptr) TW_RETURN_IF_ERROR(agree(*bootstrap_, "leaving the group", idle));
  return idle;
}

Status Group::all_gather(const void* mine, void* all, size_t bytes) {
  if (bootstrap_ != nullptr) return bootstrap_->all_gather("comparing what the ranks do", mine, all, bytes);
  for (int rank = 0; rank < config_.size; ++rank) std::memcpy(static_cast<uint8_t*>(all) + rank * bytes, mine, bytes);
  return {};
}

Status Group::check() const {
  const FaultCode code = *static_cast<volatile FaultCode*>(&fault_->code);
  if (code == FaultCode::kNone) return {};
  // The kernel wrote the rest before the code; a host with weak memory order (Grace) must not have read it before.
  std::atomic_thread_fence(std::memory_order_acquire);
  const FaultRecord& f = *fault_;
  const std::string where = "rank " + std::to_string(f.rank) + " with rank " + std::to_string(f.peer) + " at the " +
                            (f.phase == Phase::kStart ? "start" : "end") + " of a call (CTA " + std::to_string(f.cta) +
                            ")";
  const auto numbers = [](const char* what, uint32_t expected, uint32_t seen) {
    return std::string(": expected ") + what + " " + std::to_string(expected) + ", saw " + std::to_string(seen);
  };
  if (code == FaultCode::kRanksDisagree) {
    return error(TW_RANKS_DISAGREE, where + numbers("signature", f.expected_signature, f.seen_signature) +
                                        ". The ranks do not make the same call: same sizes, dtype, offsets and launch");
  }
  return error(TW_TIMEOUT, where + numbers("epoch", f.expected, f.seen) + " after " +
                               std::to_string(config_.timeout_ms) + " ms. Is that rank alive and at the same call?");
}

void Group::fill(KernelArgs* args) const {
  for (int rank = 0; rank < config_.size; ++rank) args->pads[rank] = reinterpret_cast<SignalPad*>(buffers_[rank]);
  args->rank = rank();
  args->size = config_.size;
  args->trap_on_fault = config_.trap_on_fault != 0;
  args->timeout_ns = uint64_t{config_.timeout_ms} * 1000000;
  args->fault_flag = fault_flag_.get();
  args->fault = fault_.get();
}

}  // namespace tokenweave
