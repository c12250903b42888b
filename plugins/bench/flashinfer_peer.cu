// TensorRT-LLM's fused AllReduce + residual + RMSNorm as FlashInfer ports it, for the benchmark. Built by
// build_scripts/build_flashinfer_peer from the headers of the package flashinfer-python; no part of the library.
#include <cuda_bf16.h>

#include "flashinfer/comm/trtllm_allreduce_fusion.cuh"

namespace fusion = flashinfer::trtllm_allreduce_fusion;

extern "C" {

struct FlashinferCall {
  int rank, tokens, hidden, one_shot;
  float eps;
  void** workspace;  ///< device: comm, flag and lamport buffers of each rank, then the counters
  void *input, *residual, *residual_out, *normed, *weight;
  void* stream;
};

/// Two ranks, bf16. The CUDA error, or -1 when FlashInfer threw.
__attribute__((visibility("default"))) int flashinfer_all_reduce_norm(const FlashinferCall* call) try {
  fusion::AllReduceFusionParams<__nv_bfloat16> p{};
  p.nranks = 2;
  p.rank = call->rank;
  p.size = call->tokens * call->hidden;
  p.hidden_dim = call->hidden;
  p.workspace = call->workspace;
  p.allreduce_in = call->input;
  p.residual_in = call->residual;
  p.residual_out = call->residual_out;
  p.norm_out = call->normed;
  p.rms_gamma = call->weight;
  p.rms_eps = call->eps;
  p.use_oneshot = call->one_shot != 0;
  p.stream = static_cast<cudaStream_t>(call->stream);
  p.pattern = fusion::AllReduceFusionPattern::kARResidualRMSNorm;
  p.trigger_completion_at_end = true;
  constexpr auto kPattern = fusion::AllReduceFusionPattern::kARResidualRMSNorm;
  return fusion::allreduce_fusion_kernel_launcher<kPattern, __nv_bfloat16, 2, true>(p, /*launch_with_pdl=*/true);
} catch (...) {
  return -1;
}

}  // extern "C"
