// Attention by FlashInfer's FA2 prefill kernel over TensorRT-LLM's block table.
#pragma once

#include <exception>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
#include <string>

#include "cuda_status.h"
#include "kernels.h"

namespace tokenweave::reference {

/// What FlashInfer's kernel reads of its arguments; the names are FlashInfer's. It multiplies the starts of pages by
/// tokens_per_block in 32 bits: check_shapes() sees to it that they fit.
template <typename T>
struct PrefillParams {
  using DTypeQ = T;
  using DTypeKV = T;
  using DTypeO = T;
  using IdType = int32_t;

  T* q = nullptr;
  flashinfer::paged_kv_t<T, int32_t> paged_kv;
  T* o = nullptr;
  float* lse = nullptr;
  flashinfer::uint_fastdiv group_size;
  int32_t num_qo_heads = 0;
  int32_t q_stride_n = 0, q_stride_h = 0;
  int32_t window_left = -1;
  float sm_scale = 0;

  const int32_t* kv_lengths = nullptr;
  int32_t* q_indptr = nullptr;
  int32_t* o_indptr = nullptr;
  int32_t* merge_indptr = nullptr;
  int32_t* request_indices = nullptr;
  int32_t* qo_tile_indices = nullptr;
  int32_t* kv_tile_indices = nullptr;
  int32_t* kv_chunk_size_ptr = nullptr;
  bool* block_valid_mask = nullptr;
  uint32_t padded_batch_size = 0;
  uint32_t max_total_num_rows = 0;
  uint32_t* total_num_rows = nullptr;
  bool partition_kv = false;

  __host__ __device__ uint32_t get_qo_len(uint32_t row) const { return q_indptr[row + 1] - q_indptr[row]; }
  __host__ __device__ uint32_t get_kv_len(uint32_t row) const { return kv_lengths[row]; }
};

template <typename T>
PrefillParams<T> make_params(const Launch& launch, const Heads& heads, const LayerCache& cache, float scale) {
  const int32_t first = launch.rows.first_row;
  const Schedule& schedule = launch.schedule;
  T* const keys = static_cast<T*>(cache.pages);
  T* const values = keys + int64_t{heads.kv} * cache.tokens_per_block * heads.size;
  const int32_t* const blocks = cache.blocks + int64_t{2} * first * cache.max_blocks;

  PrefillParams<T> params;
  params.paged_kv = {static_cast<uint32_t>(heads.kv),
                     static_cast<uint32_t>(cache.tokens_per_block),
                     static_cast<uint32_t>(heads.size),
                     static_cast<uint32_t>(launch.rows.rows),
                     flashinfer::QKVLayout::kHND,
                     keys,
                     values,
                     const_cast<int32_t*>(blocks),  // only read
                     schedule.page_starts,
                     /*last_page_len=*/nullptr};  // lengths come from kv_lengths
  params.group_size = flashinfer::uint_fastdiv(heads.group_size());
  params.num_qo_heads = heads.q;
  params.q_stride_n = heads.q * heads.size;
  params.q_stride_h = heads.size;
  params.sm_scale = scale;
  params.kv_lengths = cache.lengths + first;
  params.q_indptr = schedule.q_starts;
  params.o_indptr = schedule.partial_starts;
  params.merge_indptr = schedule.merge_starts;
  params.request_indices = schedule.cta_rows;
  params.qo_tile_indices = schedule.cta_tiles;
  params.kv_tile_indices = schedule.cta_chunks;
  params.kv_chunk_size_ptr = schedule.chunk_tokens;
  params.block_valid_mask = schedule.cta_valid;
  params.padded_batch_size = launch.grid.ctas;
  params.max_total_num_rows = launch.rows.tokens;
  return params;
}

template <typename T, int kHeadSize, int kTile>
cudaError_t launch_prefill(const PrefillParams<T>& params, T* partial_out, float* partial_lse, cudaStream_t stream) {
  using Variant = flashinfer::DefaultAttention</*custom_mask=*/false, /*sliding_window=*/false, /*soft_cap=*/false,
                                               /*alibi=*/false>;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
      kTile, kHeadSize, kHeadSize, flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false,
      flashinfer::MaskMode::kCausal, Variant>(params, partial_out, partial_lse, /*enable_pdl=*/false, stream);
}

template <typename T, int kHeadSize>
Status queue_attention(const Launch& launch, const Heads& heads, const LayerCache& cache, const Workspace& workspace,
                       float scale, T* q, T* out, cudaStream_t stream) {
  PrefillParams<T> params = make_params<T>(launch, heads, cache, scale);
  const int64_t before = int64_t{launch.rows.first_token} * params.q_stride_n;
  params.q = q + before;
  params.o = out + before;
  T* const partial_out = launch.grid.split ? static_cast<T*>(workspace.partial_out) : nullptr;
  float* const partial_lse = launch.grid.split ? workspace.partial_lse : nullptr;
  try {
    const auto queue = launch.grid.tile == kSmallTile ? launch_prefill<T, kHeadSize, kSmallTile>
                                                      : launch_prefill<T, kHeadSize, kLargeTile>;
    return cuda_status(queue(params, partial_out, partial_lse, stream), "FlashInfer's BatchPrefillWithPagedKVCache");
  } catch (const std::exception& exception) {  // FlashInfer throws where it has no kernel
    return error(TW_UNSUPPORTED, std::string("FlashInfer: ") + exception.what());
  }
}

}  // namespace tokenweave::reference
