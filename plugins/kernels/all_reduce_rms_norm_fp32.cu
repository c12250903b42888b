#include "all_reduce_rms_norm.cuh"

namespace tokenweave {

KernelEntry find_kernel_fp32(Fabric fabric, Loader loader, int size) {
  return find_kernel_of<float>(fabric, loader, size);
}

}  // namespace tokenweave
