// The same operation for few tokens, where the link's latency counts and not its bandwidth: nobody waits for a signal
// or fetches anything. A rank stores its parts of the others' rows in their owners' mailboxes, and a row's owner stores
// the result in everybody's; a store takes one trip. Neither input nor outputs need to be symmetric.
//
// A receiver knows that a 32-bit word has come because it no longer holds kEmpty, a NaN in every dtype that no sender
// stores: it sends another NaN in its place. Any bits may be data otherwise, and no store needs to be wider than a word
// to be seen at once.
//
// Three calls use the mailbox in turn. Call k empties what call k - 1 used, and call k + 2 uses that again. A rank that
// is in call k + 2 has ended call k + 1, so it got the first row of it, for which the owner had to get everybody's
// part: everybody was in call k + 1 and had ended call k, emptying included.
#pragma once

#include "barrier.cuh"
#include "peers.cuh"
#include "rows.cuh"
#include "team_sum.cuh"

namespace tokenweave {

/// Where things lie in the mailboxes in one call: parts of the owner's rows, [other rank][row], then results of the
/// others' rows, [other rank][row], then their residuals where these are gathered.
class Mailbox {
 public:
  static constexpr uint32_t kEmpty = ~0u;

  __device__ Mailbox(const KernelArgs& args, int rank)
      : args_(args), rank_(rank), turn_(ptx::load_relaxed_gpu(&state().turn)) {}

  /// Always so. A barrier that all threads enter with this tells that they have the turn, not just asked for it.
  __device__ bool knows_turn() const { return turn_ < kMailboxTurns; }

  /// Rank `from`'s part of row `row` of those that `owner` owns; element 0, in vectors of 16 bytes.
  __device__ uint8_t* part(int owner, int from, int row) const { return place(owner, 0, from, row); }
  /// The normalised row in the mailbox of rank `at`.
  __device__ uint8_t* normed(int at, int owner, int row) const { return place(at, 1, owner, row); }
  /// Its residual, where that is gathered.
  __device__ uint8_t* residual(int at, int owner, int row) const { return place(at, 2, owner, row); }

  /// Empties, together with the other CTAs, what the last call used.
  __device__ void empty_last() const {
    // Away from the CTAs that have rows to send.
    const uint32_t grid = gridDim.x, shift = 2 * args_.rows_per_rank % grid;
    const uint32_t first = ((blockIdx.x + grid - shift) % grid) * blockDim.x + threadIdx.x, step = grid * blockDim.x;
    const uint4 empty = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
    const uint32_t end = ptx::load_relaxed_gpu(&state().last_vectors);
    uint8_t* last = turn(rank_, (turn_ + kMailboxTurns - 1) % kMailboxTurns);
    for (uint32_t i = first; i < end; i += step) ptx::store16(vector_at(last, i), empty);
  }
  /// On one thread of each CTA, after a barrier that all of its threads entered with knows_turn() after empty_last():
  /// they have read all of the state, so the last CTA changes it.
  __device__ void end_turn() const {
    MailboxState& last = state();
    if (atomicAdd(&last.readers, 1) != gridDim.x - 1) return;
    const uint32_t sections = args_.gather_residual ? 3 : 2;
    last = {(turn_ + 1) % kMailboxTurns, 0, sections * (args_.size - 1) * args_.rows_per_rank * args_.vectors_per_row};
  }

  __device__ static void send(uint8_t* to, uint4 v) {
    uint32_t* words[4] = {&v.x, &v.y, &v.z, &v.w};
#pragma unroll
    for (uint32_t* word : words) *word = *word == kEmpty ? kEmpty >> 1 : *word;
    ptx::store_relaxed_sys16(to, v);
  }
  /// Whether all of v has come.
  __device__ static bool came(uint4 v) { return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty; }

 private:
  __device__ MailboxState& state() const { return args_.pads[rank_]->mailbox; }
  __device__ uint8_t* turn(int rank, uint32_t turn) const {
    return reinterpret_cast<uint8_t*>(args_.pads[rank]) + kSignalPadBytes + turn * kMailboxTurnBytes;
  }
  /// In the mailbox of rank `at`, which has no place for anything of its own.
  __device__ uint8_t* place(int at, int section, int other, int row) const {
    const uint32_t block = section * (args_.size - 1) + other - (other > at ? 1 : 0);
    return turn(at, turn_) + size_t{16} * args_.vectors_per_row * (block * args_.rows_per_rank + row);
  }

  const KernelArgs& args_;
  int rank_;
  uint32_t turn_;
};

/// Waits for vectors from other ranks. After the first failure everything fails at once.
class Receiver {
 public:
  __device__ Receiver(const KernelArgs& args, int rank) : args_(args), rank_(rank) {}
  __device__ bool failed() const { return failed_; }

  /// v[i] from address(i) for i < count. `from` and `phase` are for the report.
  template <int kMost, class Address>
  __device__ void receive(uint4 (&v)[kMost], int count, Address address, int from, Phase phase) {
    uint64_t start = 0;
    for (uint32_t spins = 1; !failed_; ++spins) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < count) v[i] = ptx::load_relaxed_sys16(address(i));
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) all = all && (i >= count || Mailbox::came(v[i]));
      if (all) return;
      if (spins % 256 == 0) failed_ = gives_up(from, phase, start);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) v[i] = nan_vector();
  }

 private:
  __device__ bool gives_up(int from, Phase phase, uint64_t& start) const {
    const uint32_t epoch = args_.pads[rank_]->epochs[blockIdx.x] + 1;
    return tokenweave::gives_up(args_, {FaultCode::kTimeout, rank_, from, phase, epoch, epoch - 1}, start);
  }

  const KernelArgs& args_;
  int rank_;
  bool failed_ = false;
};

/// Calls visit(owner, row) for this CTA's share of all other ranks' rows. It starts after the CTAs that have own rows.
template <class Visit>
__device__ void for_other_rows(const KernelArgs& args, int rank, Visit visit) {
  const int grid = gridDim.x, rows = args.rows_per_rank;
  for (int q = (blockIdx.x + grid - rows % grid) % grid; q < (args.size - 1) * rows; q += grid) {
    const int owner = other_rank(rank, q / rows + 1, args.size), row = q % rows;
    if (row < owned_rows(args, owner)) visit(owner, row);
  }
}

/// Calls visit(vector) for the calling thread's vectors of a row.
template <class Visit>
__device__ __forceinline__ void for_vectors(const KernelArgs& args, Visit visit) {
#pragma unroll 1
  for (int vector = threadIdx.x; vector < args.vectors_per_row; vector += blockDim.x) visit(vector);
}

/// What poison_rows does, by this kernel's shares.
__device__ __forceinline__ void poison_shares(const KernelArgs& args, int rank) {
  const LocalTensors& local = args.local[blockIdx.y];
  const auto poison = [&](int token, bool residual) {
    for_vectors(args, [&](int vector) {
      const uint32_t at = token * args.vectors_per_row + vector;
      ptx::store16(vector_at(local.normed, at), nan_vector());
      if (residual) ptx::store16(vector_at(local.residual_out, at), nan_vector());
    });
  };
  for_other_rows(args, rank,
                 [&](int owner, int row) { poison(owner * args.rows_per_rank + row, args.gather_residual); });
  for (int row = blockIdx.x; row < owned_rows(args, rank); row += gridDim.x)
    poison(rank * args.rows_per_rank + row, true);
}

/// Sums, normalises and sends this CTA's rows. kRanks as in peers.cuh.
template <typename T, int kRanks>
__device__ __forceinline__ void reduce_own_rows(const KernelArgs& args, int rank, const Mailbox& mailbox,
                                                Receiver& receiver) {
  constexpr int kAtOnce = kRanks == 2 ? 1 : 2;  // parts in flight for a thread
  const LocalTensors& local = args.local[blockIdx.y];
  const int size = kRanks != 0 ? kRanks : args.size;
  TeamSum<1> team_sum;
  for (int row = blockIdx.x; row < owned_rows(args, rank); row += gridDim.x) {
    const int token = rank * args.rows_per_rank + row;
    const uint32_t first = token * args.vectors_per_row + threadIdx.x;
    uint4 summed[kVectorsPerThread];  // the rounded sums
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const uint32_t in_row = threadIdx.x + v * blockDim.x;
      if (in_row < args.vectors_per_row) {
        const uint32_t at = first + v * blockDim.x;
        const uint4 own = ptx::load16(vector_at(local.input, at)),
                    residual = ptx::load16(vector_at(local.residual, at));
        float x[kLanes<T>];
#pragma unroll(kRanks != 0 ? kRanks : 1)
        for (int r = 0; r < size; r += kAtOnce) {
          uint4 parts[kAtOnce];
          const int count = min(kAtOnce, size - r);
          if (kAtOnce > 1 || r != rank) {
            // In place of its own part, which nobody sends, a rank asks for that of its neighbour twice.
            const auto address = [&](int i) {
              const int from = r + i != rank ? r + i : (rank == 0 ? 1 : rank - 1);
              return vector_at(mailbox.part(rank, from, row), in_row);
            };
            receiver.receive(parts, count, address, r != rank ? r : (rank == 0 ? 1 : rank - 1), Phase::kStart);
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (i < count) {
              const uint4 part = r + i == rank ? own : parts[i];
              if (r + i == 0) {
                unpack<T>(part, x);
              } else {
                add<T>(part, x);
              }
            }
          }
        }
        if (args.bias != nullptr) add<T>(ptx::load_constant16(vector_at(args.bias, in_row)), x);
        add<T>(residual, x);
        summed[v] = pack<T>(x);
        ptx::store16(vector_at(local.residual_out, at), summed[v]);
        unpack<T>(summed[v], x);
#pragma unroll
        for (int i = 0; i < kLanes<T>; ++i) square += x[i] * x[i];
      }
    }
    // A row that could not be summed must not look like one at the others': they give up as well.
    const float total = team_sum(receiver.failed() ? -INFINITY : square);
    const float scale = __frsqrt_rn(total * args.inverse_hidden + args.eps);
    if (total < 0.0f) continue;
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const uint32_t in_row = threadIdx.x + v * blockDim.x;
      if (in_row < args.vectors_per_row) {
        float x[kLanes<T>], gamma[kLanes<T>];
        unpack<T>(summed[v], x);
        unpack<T>(ptx::load_constant16(vector_at(args.norm_weight, in_row)), gamma);
#pragma unroll
        for (int i = 0; i < kLanes<T>; ++i) x[i] = x[i] * scale * gamma[i];
        const uint4 normed = pack<T>(x);
#pragma unroll(kRanks != 0 ? kRanks : 1)
        for (int i = 1; i < size; ++i) {
          const int to = other_rank(rank, i, size);
          Mailbox::send(vector_at(mailbox.normed(to, rank, row), in_row), normed);
          if (args.gather_residual) Mailbox::send(vector_at(mailbox.residual(to, rank, row), in_row), summed[v]);
        }
        ptx::store16(vector_at(local.normed, first + v * blockDim.x), normed);
      }
    }
  }
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(push_threads(kRanks), 1)
    all_reduce_rms_norm_push_kernel(const __grid_constant__ KernelArgs args) {
  const int rank = args.rank + blockIdx.y;
  const LocalTensors& local = args.local[blockIdx.y];
  RankBarrier barrier(args, rank);
  barrier.announce(/*staged=*/false);

  const Mailbox mailbox(args, rank);
  // After a fault the turn no longer moves on: parts of this call would replace those of the call that failed, which a
  // rank that comes late may still take.
  if (ptx::load_relaxed_gpu(args.fault_flag) == 0) {
    for_other_rows(args, rank, [&](int owner, int row) {
      const uint32_t first = (owner * args.rows_per_rank + row) * args.vectors_per_row;
      for_vectors(args, [&](int vector) {
        Mailbox::send(vector_at(mailbox.part(owner, rank, row), vector),
                      ptx::load16(vector_at(local.input, first + vector)));
      });
    });
  }
  mailbox.empty_last();
  if (!barrier.started(mailbox.knows_turn())) {
    poison_shares(args, rank);
    return;
  }

  Receiver receiver(args, rank);
  reduce_own_rows<T, kRanks>(args, rank, mailbox, receiver);
  if (threadIdx.x == 0) mailbox.end_turn();  // not earlier: own rows are urgent, and the others' are on their way
  for_other_rows(args, rank, [&](int owner, int row) {
    const uint32_t first = (owner * args.rows_per_rank + row) * args.vectors_per_row;
    const uint8_t *normed = mailbox.normed(rank, owner, row), *residual = mailbox.residual(rank, owner, row);
    for_vectors(args, [&](int vector) {
      uint4 v[1];
      receiver.receive(v, 1, [&](int) { return vector_at(normed, vector); }, owner, Phase::kEnd);
      ptx::store16(vector_at(local.normed, first + vector), v[0]);
      if (!args.gather_residual) return;
      receiver.receive(v, 1, [&](int) { return vector_at(residual, vector); }, owner, Phase::kEnd);
      ptx::store16(vector_at(local.residual_out, first + vector), v[0]);
    });
  });
  barrier.leave();
  if (__syncthreads_or(receiver.failed())) poison_shares(args, rank);
}

}  // namespace tokenweave
