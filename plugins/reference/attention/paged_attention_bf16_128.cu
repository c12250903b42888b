#include "paged_attention.cuh"

namespace tokenweave::reference {

template Status queue_attention<__nv_bfloat16, 128>(const Launch&, const Heads&, const LayerCache&, const Workspace&,
                                                    float, __nv_bfloat16*, __nv_bfloat16*, cudaStream_t);

}  // namespace tokenweave::reference
