#include "side_stream.h"

#include <algorithm>

#include "counters.h"

namespace tokenweave::trt {
namespace {

/// Clusters of 2 pack beside GEMMs that come in clusters of 2 themselves.
constexpr int kClusterSize = 2;
constexpr int kFirstMajorWithClusters = 9;

struct Registry {
  std::mutex mutex;
  std::map<SideStreamKey, std::weak_ptr<SideStream>> side_streams;
};

Registry& registry() {
  static auto* all = new Registry;  // never freed: plugins may be destroyed while the process ends
  return *all;
}

std::vector<std::shared_ptr<SideStream>> alive() {
  std::vector<std::shared_ptr<SideStream>> found;
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [key, known] : all.side_streams) {
    if (std::shared_ptr<SideStream> one = known.lock(); one != nullptr) found.push_back(std::move(one));
  }
  return found;
}

thread_local std::weak_ptr<SideStream> this_threads_step;

std::string name_of(const SiteHalf& at) { return "site " + std::to_string(at.site) + " " + name_of(at.half); }

}  // namespace

Status SideStream::acquire(const SideStreamKey& key, std::shared_ptr<SideStream>* side_stream) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::weak_ptr<SideStream>& known = all.side_streams[key];
  *side_stream = known.lock();
  if (*side_stream != nullptr) return {};

  auto made = std::make_shared<SideStream>(key);
  int major = 0;
  TW_RETURN_IF_ERROR(cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, key.device),
                                 "cudaDeviceGetAttribute"));
  if (major >= kFirstMajorWithClusters) made->cluster_size_ = kClusterSize;
  TW_RETURN_IF_ERROR(make_stream(&made->stream_));
  TW_RETURN_IF_ERROR(make_event(&made->end_.event));
  known = made;
  *side_stream = std::move(made);
  return {};
}

std::shared_ptr<SideStream> SideStream::of_this_thread() { return this_threads_step.lock(); }

Status SideStream::add_site(const SiteHalf& at, bool overlaps, uint64_t staging_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  staging_bytes_ = std::max(staging_bytes_, staging_bytes);
  last_site_ = std::max(last_site_, at.site);
  Site& site = sites_[at];
  if (!overlaps || site.done != nullptr) return {};
  TW_RETURN_IF_ERROR(make_event(&site.fork));
  TW_RETURN_IF_ERROR(make_event(&site.started));
  return make_event(&site.done);
}

Status SideStream::prepare(uint64_t tensor_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group_ == nullptr) {
    return RankGroup::create({key_.device, key_.rank, key_.group, key_.engine_hash, tensor_bytes, staging_bytes_},
                             &group_);
  }
  if (group_->holds(tensor_bytes, staging_bytes_)) return {};
  return error(TW_INVALID_ARGUMENT, "needs " + std::to_string(staging_bytes_) + " bytes of staging and " +
                                        std::to_string(tensor_bytes) +
                                        " of tensor memory, and the group of ranks was made with " + group_->sizes() +
                                        ". Fix: create all execution contexts, then ask for tensor memory, then run");
}

bool SideStream::has_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return group_ != nullptr;
}

Status SideStream::tensor_memory(int device, uint64_t bytes, void** data) {
  std::vector<std::shared_ptr<SideStream>> engines = alive();
  engines.erase(
      std::remove_if(engines.begin(), engines.end(), [device](const auto& one) { return one->key_.device != device; }),
      engines.end());
  const std::string where = "device " + std::to_string(device);
  if (engines.empty()) {
    return error(TW_INVALID_ARGUMENT, where + " runs no engine of ours. Fix: create the execution contexts first");
  }
  // Those that have met their ranks have the memory that they asked for.
  if (engines.size() > 1) {
    engines.erase(std::remove_if(engines.begin(), engines.end(), [](const auto& one) { return one->has_group(); }),
                  engines.end());
    if (engines.size() != 1) {
      return error(TW_UNSUPPORTED, where + " has " + std::to_string(engines.size()) +
                                       " engines that have not run yet, so it is not clear whose memory this is. Fix: "
                                       "create the contexts of one, ask for its memory, then go on to the next");
    }
  }
  TW_RETURN_IF_ERROR(engines.front()->prepare(bytes));
  *data = engines.front()->group_->tensor_memory();
  return {};
}

void SideStream::log_faults() {
  for (const std::shared_ptr<SideStream>& one : alive()) {
    const std::unique_lock<std::mutex> lock(one->mutex_, std::try_to_lock);
    if (!lock.owns_lock() || one->group_ == nullptr) continue;
    if (const Status fault = one->group_->take_fault(); !fault.ok()) log_error("AllReduceRmsNorm", fault);
  }
}

Status SideStream::refuse() {
  ++counters().refused_steps;
  // Another rank may have started the other step first. From here on no step is safe, so all fail the same way.
  refusal_ =
      error(TW_INVALID_ARGUMENT,
            "two execution contexts of one engine run at once, and their collectives would mix. Fix: run one step at a "
            "time; to start over, destroy these contexts on all ranks");
  return refusal_;
}

Status SideStream::check_thread() {
  if (!refusal_.ok()) return refusal_;
  const bool busy = step_.open && !step_.failed;
  return busy && step_.thread != std::this_thread::get_id() ? refuse() : Status{};
}

Status SideStream::enter(const SiteHalf& at, cudaStream_t main) {
  TW_RETURN_IF_ERROR(check_thread());
  if (at.site == 0 && at.half != Half::kSuffix) return begin_step(main);
  if (step_.open) return {};
  return error(TW_INTERNAL, name_of(at) + " was run before site 0: the layers are out of order");
}

Status SideStream::begin_step(cudaStream_t main) {
  bool capturing = false;
  TW_RETURN_IF_ERROR(is_capturing(main, &capturing));
  left_over_ = left_over_ || step_.open;
  if (!capturing) TW_RETURN_IF_ERROR(follow_previous_step(main));
  if (step_.open) ++counters().unfinished_steps;
  step_ = {step_.number + 1, std::this_thread::get_id(), main, true};
  this_threads_step = weak_from_this();
  return {};
}

/// Kernels of a group must not run concurrently.
Status SideStream::follow_previous_step(cudaStream_t main) {
  if (left_over_) {
    TW_RETURN_IF_ERROR(record(end_.event, stream_.get()));
    TW_RETURN_IF_ERROR(wait_for(main, end_.event));
    left_over_ = false;
  } else if (end_.recorded && end_.main != main) {
    // One thread that changes streams is put in order; two threads that each keep a stream busy are two contexts at
    // once.
    if (end_.thread != std::this_thread::get_id()) {
      const cudaError_t ended = cudaEventQuery(end_.event.get());
      if (ended == cudaErrorNotReady) return refuse();
      TW_RETURN_IF_ERROR(cuda_status(ended, "cudaEventQuery"));
    }
    TW_RETURN_IF_ERROR(wait_for(main, end_.event));
  }
  return {};
}

Status SideStream::finish_step() {
  step_.open = false;
  bool capturing = false;
  TW_RETURN_IF_ERROR(is_capturing(step_.main, &capturing));
  if (capturing) return {};
  end_.thread = step_.thread;
  end_.main = step_.main;
  end_.recorded = true;
  return record(end_.event, step_.main);
}

/// TensorRT ends a step whose layer fails, so that any thread may begin the next one.
Status SideStream::failed_or(Status status) {
  step_.failed = step_.failed || !status.ok();
  return status;
}

Status SideStream::enqueue(const Collective& collective, cudaStream_t main) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_or(run(collective, main));
}

Status SideStream::run(const Collective& collective, cudaStream_t main) {
  const auto found = sites_.find(collective.at);
  if (group_ == nullptr || found == sites_.end()) return error(TW_INTERNAL, "was run before its shapes were set");
  TW_RETURN_IF_ERROR(enter(collective.at, main));
  Site& site = found->second;
  site.step = step_.number;
  site.overlapped = false;
  site.tensors = collective.call.tensors;
  // All ranks have the same layers with rows in the same order, so all of them compare, or none. Nobody's kernel waits
  // for what a host holds back meanwhile: what came before is queued.
  if (collective.call.op.num_tokens != 0 && !site.compared) {
    TW_RETURN_IF_ERROR(group_->compare_offsets(collective.call, name_of(collective.at)));
    site.compared = true;
  }
  if (collective.call.op.num_tokens == 0) {
    ++counters().empty;
  } else if (collective.overlap) {
    TW_RETURN_IF_ERROR(fork(collective, site, main));
  } else {
    TW_RETURN_IF_ERROR(group_->queue(collective.call, {main, 1, nullptr}));
    ++counters().in_line;
  }
  return collective.at.half == Half::kWhole && collective.at.site == last_site_ ? finish_step() : Status{};
}

Status SideStream::fork(const Collective& collective, Site& site, cudaStream_t main) {
  bool capturing = false;
  TW_RETURN_IF_ERROR(is_capturing(main, &capturing));
  TW_RETURN_IF_ERROR(record(site.fork, main));
  TW_RETURN_IF_ERROR(wait_for(stream_.get(), site.fork));
  const KernelQueue queue{stream_.get(), cluster_size_, capturing ? nullptr : site.started.get()};
  TW_RETURN_IF_ERROR(group_->queue(collective.call, queue));
  if (!capturing) TW_RETURN_IF_ERROR(wait_for(main, site.started));
  TW_RETURN_IF_ERROR(record(site.done, stream_.get()));
  site.overlapped = true;
  ++counters().overlapped;
  if (capturing) ++counters().captured;
  return {};
}

Status SideStream::check_inputs(const Join& join, const TwAllReduceRmsNormTensors& tensors) {
  const auto holds = [&join](const void* tensor) {
    return std::find(join.inputs, join.inputs + join.num_inputs, tensor) != join.inputs + join.num_inputs;
  };
  if (!holds(tensors.normed) || !holds(tensors.residual_out)) {
    return error(TW_INTERNAL, "does not get the tensors that the collective of " + name_of(join.at) +
                                  " writes: TensorRT copied them too early. Fix: build with the preview feature "
                                  "kALIASED_PLUGIN_IO_10_03 and without auxiliary streams");
  }
  for (const void* read : {tensors.input, tensors.residual}) {
    if (!holds(read) && counters().unkept_inputs++ == 0) {
      log(Severity::kWARNING, "StreamJoin does not keep alive what the collective of " + name_of(join.at) +
                                  " reads: results may be wrong. Fix: make it an input of the join");
    }
  }
  return {};
}

Status SideStream::join(const Join& join, cudaStream_t main) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_or(run(join, main));
}

Status SideStream::run(const Join& join, cudaStream_t main) {
  TW_RETURN_IF_ERROR(check_thread());
  const auto found = sites_.find(join.at);
  if (!step_.open || found == sites_.end() || found->second.step != step_.number) {
    return error(TW_INTERNAL, "was run before the collective of " + name_of(join.at));
  }
  const Site& site = found->second;
  if (site.overlapped) {
    TW_RETURN_IF_ERROR(check_inputs(join, site.tensors));
    TW_RETURN_IF_ERROR(wait_for(main, site.done));
    ++counters().joins;
  }
  return join.at.half == Half::kSuffix && join.at.site == last_site_ ? finish_step() : Status{};
}

}  // namespace tokenweave::trt
