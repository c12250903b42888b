// The one communication stream of an engine on a device, shared by all plugins of its execution contexts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "cuda_objects.h"
#include "plugin.h"
#include "rank_group.h"

namespace tokenweave::trt {

/// One half's collective of one fusion site.
struct SiteHalf {
  int32_t site = 0;
  Half half = Half::kWhole;
  bool operator<(const SiteHalf& o) const { return std::tie(site, half) < std::tie(o.site, o.half); }
};

struct SideStreamKey {
  int device = 0;
  std::vector<int32_t> group;  ///< ranks in MPI_COMM_WORLD
  int32_t rank = 0;            ///< in the group
  uint64_t engine_hash = 0;
  bool operator<(const SideStreamKey& o) const {
    return std::tie(device, group, rank, engine_hash) < std::tie(o.device, o.group, o.rank, o.engine_hash);
  }
};

/// One run of an AllReduceRmsNorm layer.
struct Collective {
  SiteHalf at;
  bool overlap = false;  ///< the other half has work beside it
  KernelCall call;
};

/// One run of a StreamJoin layer that waits.
struct Join {
  SiteHalf at;
  const void* const* inputs = nullptr;
  int32_t num_inputs = 0;
};

/// Owns the communication stream, the events of every (site, half), and the group of ranks.
///
/// TensorRT's own place for what plugins share, IPluginRegistry::acquirePluginResource, is not used: IPluginRegistry
/// changed between TensorRT 10 and 11, and who does not call it serves both. The registry here is keyed,
/// because such resources belong to the process: two engines, or two devices, must not share one. An entry lives as
/// long as an attached plugin.
///
/// A StreamJoin has no attributes of a group or an engine. It finds its SideStream as the one whose step the calling
/// thread is queueing: TensorRT queues all layers of a step from the thread that called enqueueV3.
///
/// A step is one run of the network: it opens with the collective of site 0 and closes with the last site's join (or
/// its collective, where nothing is split), or where a layer of ours fails. Contexts may take turns. A thread that
/// comes while another thread's step is open, or while the GPU still works on another thread's step on another stream,
/// runs two contexts at once: refused.
class SideStream : public std::enable_shared_from_this<SideStream> {
 public:
  /// The process's resource of that key, made if need be, on the current device.
  static Status acquire(const SideStreamKey& key, std::shared_ptr<SideStream>* side_stream);
  /// The one whose step the calling thread is queueing; null when there is none.
  static std::shared_ptr<SideStream> of_this_thread();
  /// See twPluginTensorMemory.
  static Status tensor_memory(int device, uint64_t bytes, void** data);
  /// Logs every fault that a kernel reported, once. Nobody else does after an engine's last enqueue, or where graphs
  /// are replayed. A group that another thread is using is left out: that thread finds the fault by itself.
  static void log_faults();

  explicit SideStream(SideStreamKey key) : key_(std::move(key)) {}

  /// Announces a layer; every context announces the same ones. `overlaps`: it may use the communication stream.
  Status add_site(const SiteHalf& at, bool overlaps, uint64_t staging_bytes);

  /// Collective the first time: meets the other ranks. Later calls only check that the group is large enough.
  Status prepare(uint64_t tensor_bytes = 0);

  /// Queues a collective. The first one of a layer that has rows is collective on the host as well, where the group has
  /// tensor memory: the ranks compare where their tensors lie.
  ///
  /// With overlap, and not capturing: the collective goes to the communication stream, and `main` goes on once all its
  /// CTAs have started, or the next GEMM would take every SM before it. While `main` is being captured into a graph: a
  /// plain fork, because a captured launch-completion edge makes `main` wait for the end. Without overlap: on `main`.
  Status enqueue(const Collective& collective, cudaStream_t main);

  /// Makes `main` wait for the collective of (site, half), if that went to the communication stream in this step.
  Status join(const Join& join, cudaStream_t main);

 private:
  bool has_group();

  struct Site {
    Event fork, started, done;
    uint64_t step = 0;        ///< the step that ran it last
    bool overlapped = false;  ///< in that step: on the communication stream
    bool compared = false;    ///< see RankGroup::compare_offsets
    TwAllReduceRmsNormTensors tensors{};
  };
  /// The newest step.
  struct Step {
    uint64_t number = 0;
    std::thread::id thread;
    cudaStream_t main = nullptr;
    bool open = false;
    bool failed = false;
  };
  /// The end of the newest step that was not captured into a graph.
  struct End {
    Event event;
    std::thread::id thread;
    cudaStream_t main = nullptr;
    bool recorded = false;
  };

  Status check_thread();
  Status refuse();
  Status enter(const SiteHalf& at, cudaStream_t main);
  Status begin_step(cudaStream_t main);
  Status follow_previous_step(cudaStream_t main);
  Status finish_step();
  Status failed_or(Status status);
  Status run(const Collective& collective, cudaStream_t main);
  Status run(const Join& join, cudaStream_t main);
  Status fork(const Collective& collective, Site& site, cudaStream_t main);
  static Status check_inputs(const Join& join, const TwAllReduceRmsNormTensors& tensors);

  const SideStreamKey key_;
  std::mutex mutex_;  // held for whole calls: one thread at a time is what a group of ranks asks for
  Stream stream_;
  int32_t cluster_size_ = 1;
  std::map<SiteHalf, Site> sites_;
  int32_t last_site_ = 0;
  uint64_t staging_bytes_ = 0;
  Step step_;
  End end_;
  bool left_over_ = false;  // a step failed and may have left work on the communication stream that nothing waits for
  Status refusal_;          // sticky

  std::unique_ptr<RankGroup> group_;  // goes first: it waits for the work that uses the rest
};

}  // namespace tokenweave::trt
