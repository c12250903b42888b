#include "communicator.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "bootstrap.h"
#include "cuda_status.h"
#include "data_type.h"
#include "env.h"

namespace tokenweave::reference {
namespace {

using Key = std::pair<int, std::vector<int32_t>>;  // device, group

struct Registry {
  std::mutex mutex;
  std::map<Key, Communicator*> communicators;
};

Registry& registry() {
  static auto* all = new Registry;  // never freed, as what it holds
  return *all;
}

NcclDataType nccl_type(TwDataType dtype) {
  return dtype == TW_FLOAT ? kNcclFloat32 : dtype == TW_HALF ? kNcclFloat16 : kNcclBfloat16;
}

}  // namespace

Status sort_group(std::vector<int32_t>* group) {
  std::sort(group->begin(), group->end());
  if (std::adjacent_find(group->begin(), group->end()) == group->end()) return {};
  return error(TW_INVALID_ARGUMENT, "field 'group' has a rank twice");
}

Status Communicator::acquire(const std::vector<int32_t>& group, Communicator** communicator) {
  Key key{0, group};
  TW_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&key.first), "cudaGetDevice"));
  Communicator* found = nullptr;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    Communicator*& known = all.communicators[key];
    if (known == nullptr) known = new Communicator(group);
    found = known;
  }
  const std::lock_guard<std::mutex> lock(found->mutex_);
  if (!found->state_.has_value()) found->state_ = found->meet();
  TW_RETURN_IF_ERROR(*found->state_);
  *communicator = found;
  return {};
}

Status Communicator::find_rank(int* rank) const {
  *rank = 0;
  if (group_.size() == 1) return {};
  int in_world = 0;
  TW_RETURN_IF_ERROR(world_rank(&in_world));
  const auto found = std::find(group_.begin(), group_.end(), in_world);
  *rank = static_cast<int>(found - group_.begin());
  if (found != group_.end()) return {};
  return error(TW_INVALID_ARGUMENT, "this process is rank " + std::to_string(in_world) +
                                        ", which is not in field 'group'. Fix: load the engine of this rank");
}

Status Communicator::meet() {
  const Environment env = environment();
  BootstrapOptions options{0, static_cast<int>(group_.size()), std::chrono::milliseconds(env.timeout_ms), env.bootstrap,
                           group_};
  TW_RETURN_IF_ERROR(find_rank(&options.rank));
  if (options.address.empty() && options.size > 1) {
    TW_RETURN_IF_ERROR(exchange_address_by_mpi(options, &options.address));
  }
  TW_RETURN_IF_ERROR(connect_bootstrap(options, &bootstrap_));
  // What can fail on one rank alone comes before the calls in which NCCL waits for all.
  TW_RETURN_IF_ERROR(agree(*bootstrap_, "loading NCCL", load_nccl(&nccl_)));
  return start_nccl(nccl_, *bootstrap_, &comm_);
}

template <typename Call>
Status Communicator::queue(Call call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TW_RETURN_IF_ERROR(*state_);
  NcclResult since = kNcclSuccess;
  state_ = nccl_status(nccl_, nccl_.CommGetAsyncError(comm_, &since), "ncclCommGetAsyncError");
  if (state_->ok()) state_ = nccl_status(nccl_, since, "an earlier collective");
  if (state_->ok()) state_ = call();
  return *state_;
}

Status Communicator::queue_sum(const void* input, void* sum, size_t count, TwDataType dtype, cudaStream_t stream) {
  return nccl_status(nccl_, nccl_.AllReduce(input, sum, count, nccl_type(dtype), kNcclSum, comm_, stream),
                     "ncclAllReduce");
}

Status Communicator::all_reduce(const void* input, void* sum, size_t count, TwDataType dtype, cudaStream_t stream) {
  if (count == 0) return {};
  return queue([&] { return queue_sum(input, sum, count, dtype, stream); });
}

Status Communicator::window(size_t bytes, const Window** window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TW_RETURN_IF_ERROR(*state_);
  for (const std::unique_ptr<Window>& known : windows_) {
    if (known->bytes() < bytes) continue;
    *window = known.get();
    return {};
  }
  std::unique_ptr<Window> made;
  const Status opened = Window::open(nccl_, &comm_, *bootstrap_, bytes, &made);
  if (comm_ == nullptr) state_ = opened;
  TW_RETURN_IF_ERROR(opened);
  windows_.push_back(std::move(made));
  *window = windows_.back().get();
  return {};
}

Status Communicator::sum_in_window(const Window& window, const void* input, size_t count, TwDataType dtype,
                                   cudaStream_t stream) {
  const size_t bytes = count * element_bytes(dtype);
  if (bytes > window.bytes()) {
    return error(TW_INTERNAL, "a tensor of " + std::to_string(bytes) + " bytes does not fit a window of " +
                                  std::to_string(window.bytes()));
  }
  if (count == 0) return {};
  return queue([&]() -> Status {  // the copy as well: without it this rank would be out of step
    TW_RETURN_IF_ERROR(cuda_status(cudaMemcpyAsync(window.input(), input, bytes, cudaMemcpyDeviceToDevice, stream),
                                   "cudaMemcpyAsync"));
    return queue_sum(window.input(), window.sum(), count, dtype, stream);
  });
}

Status Communicator::all_gather(const void* input, void* gathered, size_t count, TwDataType dtype,
                                cudaStream_t stream) {
  if (count == 0) return {};
  return queue([&] {
    return nccl_status(nccl_, nccl_.AllGather(input, gathered, count, nccl_type(dtype), comm_, stream),
                       "ncclAllGather");
  });
}

}  // namespace tokenweave::reference
