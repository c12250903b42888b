#include "attention.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace tokenweave::reference {
namespace {

template <typename T>
Status queue(const AttentionCall& call, cudaStream_t stream) {
  const Launch context{call.batch.context, call.context_grid, call.workspace.context, true};
  const Launch generation{call.batch.generation, call.generation_grid, call.workspace.generation, false};
  T* const out = static_cast<T*>(call.out);
  TW_RETURN_IF_ERROR(queue_schedules(context, generation, call.heads, call.cache, stream));
  TW_RETURN_IF_ERROR(queue_rotate_and_append(context, generation, call.heads, call.cache, call.rotation,
                                             static_cast<const T*>(call.qkv), out, stream));
  const auto attend = call.heads.size == 64 ? queue_attention<T, 64> : queue_attention<T, 128>;
  for (const Launch& launch : {context, generation}) {
    if (launch.rows.rows == 0) continue;
    TW_RETURN_IF_ERROR(attend(launch, call.heads, call.cache, call.workspace, call.scale, out, out, stream));
  }
  return {};
}

}  // namespace

Status queue_attention_call(const AttentionCall& call, cudaStream_t stream) {
  return call.dtype == nvinfer1::DataType::kHALF ? queue<__half>(call, stream) : queue<__nv_bfloat16>(call, stream);
}

}  // namespace tokenweave::reference
