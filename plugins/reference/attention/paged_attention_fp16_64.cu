#include "paged_attention.cuh"

namespace tokenweave::reference {

template Status queue_attention<__half, 64>(const Launch&, const Heads&, const LayerCache&, const Workspace&, float,
                                            __half*, __half*, cudaStream_t);

}  // namespace tokenweave::reference
