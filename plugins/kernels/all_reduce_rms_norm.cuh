// AllReduce + bias + residual add + RMSNorm in one kernel.
//
// Each rank owns ceil(n / size) consecutive tokens. For its own rows it sums all ranks' inputs, adds bias and residual,
// rounds to the dtype (that is residual_out), normalises the rounded value in fp32, multiplies by gamma, rounds, and
// stores the row on every rank. A row costs one trip over the link in and one out; nothing is read twice.
//
// Per thread: up to kVectorsPerThread vectors of 16 bytes of a row stay in registers while the row's sum of squares is
// reduced. Meanwhile a Reader has the loads of what comes next in flight; see peers.cuh and switch.cuh.
#pragma once

#include "barrier.cuh"
#include "peers.cuh"
#include "push.cuh"
#include "rows.cuh"
#include "switch.cuh"
#include "team_sum.cuh"

namespace tokenweave {

template <class Reader, class Writer>
__global__ void __launch_bounds__(Reader::kMaxThreads, 1)
    all_reduce_rms_norm_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename Reader::Element;
  extern __shared__ __align__(128) uint8_t dynamic_memory[];
  const int rank = args.rank + blockIdx.y;
  // Read from the arguments at each use: registers are short.
  const auto local = [&]() -> const LocalTensors& { return args.local[blockIdx.y]; };
  RankBarrier barrier(args, rank);
  Reader reader(args, rank, dynamic_memory);

  // Own rows are final before the others arrive, so their loads start ahead of the barrier.
  Cursor cursor(args, rank);
  reader.start_own(cursor);
  TeamSum<kMaxTeams> team_sum;
  if (args.stage_input) {
    copy_rows(args, Writer::kSwitchReadsOwnRows ? -1 : rank, args.input.of_rank[rank], local().input);
    Writer::fence();
    ptx::fence_copy_engine();
  }
  bool arrived = barrier.start(args.stage_input);
  Writer::fence();
  if (!arrived) {
    reader.abandon();
    poison_rows(args, rank);
    return;
  }
  reader.start_others(cursor);

  const int rows = owned_rows(args, rank);
  const int vectors = thread_vectors(args);
  const auto normed = [&] { return Destination{args.normed, local().normed, args.stage_normed}; };
  const auto residual_out = [&] { return Destination{args.residual_out, local().residual_out, args.stage_residual}; };
  for (; cursor.row < rows; cursor = cursor.after(args)) {
    uint4 summed[kVectorsPerThread];  // the rounded sums: half the registers of fp32 values
    float square = 0.0f;
    uint32_t thread = Team::thread();
    ptx::forget_origin(thread);
    reader.begin_row();

#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (v < vectors) {
        float x[kLanes<T>];
        reader.sum(v, x);
        if (args.bias != nullptr) add<T>(ptx::load_constant16(vector_at(args.bias, thread + v * Team::threads())), x);
        add<T>(reader.residual(v), x);
        summed[v] = pack<T>(x);
        if (args.gather_residual) {
          Writer::broadcast(args, rank, residual_out(), cursor.at(v), summed[v]);
        } else {
          ptx::store16(vector_at(local().residual_out, cursor.at(v)), summed[v]);
        }
        unpack<T>(summed[v], x);
#pragma unroll
        for (int i = 0; i < kLanes<T>; ++i) square += x[i] * x[i];
        ptx::forget_origin(summed[v]);
      }
      reader.end_vector(cursor, v);
    }

    const float scale = __frsqrt_rn(team_sum(square) * args.inverse_hidden + args.eps);
    reader.end_row(cursor);

#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (v < vectors) {
        float x[kLanes<T>], gamma[kLanes<T>];
        unpack<T>(summed[v], x);
        unpack<T>(ptx::load_constant16(vector_at(args.norm_weight, thread + v * Team::threads())), gamma);
#pragma unroll
        for (int i = 0; i < kLanes<T>; ++i) x[i] = x[i] * scale * gamma[i];
        Writer::broadcast(args, rank, normed(), cursor.at(v), pack<T>(x));
      }
    }
  }

  Writer::fence();
  arrived = barrier.end();
  Writer::fence();
  if (!arrived) {
    poison_rows(args, rank);
    return;
  }
  if (args.stage_normed) copy_rows(args, rank, local().normed, args.normed.of_rank[rank]);
  if (args.stage_residual) copy_rows(args, rank, local().residual_out, args.residual_out.of_rank[rank]);
}

template <class Reader, class Writer>
KernelEntry kernel_entry(int sources) {
  const auto kernel = &all_reduce_rms_norm_kernel<Reader, Writer>;
  return {reinterpret_cast<const void*>(kernel), Reader::kLoader, sources, Reader::kMaxThreads};
}

template <typename T, int kRanks>
KernelEntry push_entry() {
  const auto kernel = &all_reduce_rms_norm_push_kernel<T, kRanks>;
  return {reinterpret_cast<const void*>(kernel), Loader::kPush, 0, push_threads(kRanks)};
}

/// The kernels of one dtype; each dtype is its own translation unit, so that they build in parallel.
template <typename T>
KernelEntry find_kernel_of(Fabric fabric, Loader loader, int size) {
  if (fabric == Fabric::kMultimem) return kernel_entry<MultimemReader<T>, MultimemWriter>(MultimemReader<T>::kStages);
  if (fabric == Fabric::kSoftMulticast) return kernel_entry<CpAsyncReader<T, true>, PeerWriter<0>>(size + 1);
  if (loader == Loader::kCpAsync) return kernel_entry<CpAsyncReader<T, false>, PeerWriter<0>>(size + 1);
  if (loader == Loader::kPush) return size == 2 ? push_entry<T, 2>() : push_entry<T, 0>();
  if (size == 2) return kernel_entry<BulkReader<T, 2>, PeerWriter<2>>(size + 1);
  return kernel_entry<BulkReader<T, 0>, PeerWriter<0>>(size + 1);
}

}  // namespace tokenweave
