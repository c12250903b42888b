#include "all_reduce_rms_norm.cuh"

namespace tokenweave {

KernelEntry find_kernel_bf16(Fabric fabric, Loader loader, int size) {
  return find_kernel_of<__nv_bfloat16>(fabric, loader, size);
}

}  // namespace tokenweave
