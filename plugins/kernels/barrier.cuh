// The barrier between the CTAs of equal index on all ranks, with a timeout, and what happens after one.
#pragma once

#include "kernel_args.h"
#include "ptx.cuh"

namespace tokenweave {

/// What a wait saw when it gave up.
struct FaultSite {
  FaultCode code;
  int rank, peer;
  Phase phase;
  uint32_t expected;
  uint64_t signal;
};

/// The first report wins; the host reads it from mapped memory while the device goes on.
__device__ __forceinline__ void report_fault(const KernelArgs& args, FaultSite site) {
  if (atomicCAS(args.fault_flag, 0u, 1u) == 0u) {
    FaultRecord* fault = args.fault;
    fault->rank = site.rank;
    fault->peer = site.peer;
    fault->cta = blockIdx.x;
    fault->phase = site.phase;
    fault->expected = site.expected;
    fault->seen = static_cast<uint32_t>(site.signal);
    fault->expected_signature = args.signature;
    fault->seen_signature = static_cast<uint32_t>(site.signal >> 32);
    __threadfence_system();
    *reinterpret_cast<volatile FaultCode*>(&fault->code) = site.code;
    __threadfence_system();
  }
  if (args.trap_on_fault) __trap();
}

/// For a wait, now and then: whether it took too long, which it reports as `site`, or another wait of this process did.
/// `start` is 0 at first.
__device__ __forceinline__ bool gives_up(const KernelArgs& args, const FaultSite& site, uint64_t& start) {
  const uint64_t now = ptx::global_timer();
  if (start == 0) start = now;
  if (now - start > args.timeout_ns) {
    report_fault(args, site);
    return true;
  }
  return ptx::load_relaxed_gpu(args.fault_flag) != 0;
}

/// Thread p of a CTA's last warp exchanges signals with rank p; the first warp begins to load rows meanwhile. Epochs
/// live in device memory, so they advance in replayed graphs, and each CTA has its own, so a call with fewer CTAs
/// leaves the others' valid: every rank launches the same number.
class RankBarrier {
 public:
  __device__ RankBarrier(const KernelArgs& args, int rank) : args_(args), rank_(rank) {
    if (waits()) {
      const uint32_t epoch = args.pads[rank]->epochs[blockIdx.x];
      const uint32_t faulty = ptx::load_relaxed_gpu(args.fault_flag);
      mine() = {epoch + 1, faulty};
    }
  }

  /// Before a rank's rows are read. Returns on all threads whether all ranks arrived. With `staged`, what this CTA
  /// wrote before is visible to the CTAs of the others afterwards; else the input must come from an earlier kernel.
  __device__ bool start(bool staged) {
    if (staged) __syncthreads();
    announce(staged);
    return started();
  }

  /// The first half of start(): tells the others that this rank makes the call.
  __device__ void announce(bool staged) {
    // After a fault this rank's epochs are behind, so no later call may take the others' signals for its own.
    if (waits() && mine().faulty == 0) signal(mine().epoch, staged);
  }
  /// The second half: whether they do, and all threads of the CTA are `ready`.
  __device__ bool started(bool ready = true) {
    bool failed = !ready;
    if (waits()) failed |= mine().faulty != 0 || !wait_for(peer(), Phase::kStart, mine().epoch);
    return !__syncthreads_or(failed);
  }

  /// Instead of end(), where this rank has what it needs and the others need no more than was sent.
  __device__ void leave() {
    if (waits() && peer() == 0) args_.pads[rank_]->epochs[blockIdx.x] = mine().epoch;
  }

  /// After all rows were read and stored: what the ranks stored here is visible, and they have read what they need.
  __device__ bool end() {
    __syncthreads();
    bool failed = false;
    if (waits()) {
      const uint32_t epoch = mine().epoch + 1;
      signal(epoch, /*release=*/true);
      failed = !wait_for(peer(), Phase::kEnd, epoch);
      if (peer() == 0) args_.pads[rank_]->epochs[blockIdx.x] = epoch;
    }
    return !__syncthreads_or(failed);
  }

 private:
  __device__ static int peer() { return threadIdx.x + 32 - blockDim.x; }
  __device__ bool waits() const {
    return threadIdx.y + 1 == blockDim.y && threadIdx.x + 32 >= blockDim.x && peer() < args_.size;
  }

  /// Without `release` the signal orders nothing by itself: what an earlier kernel of the stream wrote was performed
  /// when this one began, so there is nothing left to order. PTX's model says so for this GPU's threads only; that the
  /// others see it too is what every kernel boundary with peer access relies on.
  __device__ void signal(uint32_t epoch, bool release) const {
    const uint64_t signal = static_cast<uint64_t>(args_.signature) << 32 | epoch;
    uint64_t* signal_to_peer = &args_.pads[peer()]->signals[blockIdx.x][rank_];
    if (release) {
      ptx::store_release_sys(signal_to_peer, signal);
    } else {
      ptx::store_relaxed_sys(signal_to_peer, signal);
    }
  }

  __device__ bool wait_for(int peer, Phase phase, uint32_t epoch) const {
    const uint64_t* slot = &args_.pads[rank_]->signals[blockIdx.x][peer];
    uint64_t start = 0;
    for (uint32_t spins = 1;; ++spins) {
      const uint64_t signal = ptx::load_acquire_sys(slot);
      const auto seen = static_cast<uint32_t>(signal);
      if (static_cast<int32_t>(seen - epoch) >= 0) {
        // A peer may be one signal ahead, at this call's end or in the next call: it has seen that the calls are one.
        const auto signature = static_cast<uint32_t>(signal >> 32);
        if (phase == Phase::kEnd || seen != epoch || signature == args_.signature) return true;
        report_fault(args_, {FaultCode::kRanksDisagree, rank_, peer, phase, epoch, signal});
        return false;
      }
      if (spins % 256 == 0 && gives_up(args_, {FaultCode::kTimeout, rank_, peer, phase, epoch, signal}, start)) {
        return false;
      }
    }
  }

  struct State {
    uint32_t epoch;  ///< of this call's start
    uint32_t faulty;
  };
  /// In shared memory, because registers are short; a waiting thread uses only its own entry.
  __device__ static State& mine() {
    __shared__ State memory[kMaxRanks];
    return memory[peer()];
  }

  const KernelArgs& args_;
  int rank_;
};

}  // namespace tokenweave
