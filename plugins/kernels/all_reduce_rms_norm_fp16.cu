#include "all_reduce_rms_norm.cuh"

namespace tokenweave {

KernelEntry find_kernel_fp16(Fabric fabric, Loader loader, int size) {
  return find_kernel_of<__half>(fabric, loader, size);
}

}  // namespace tokenweave
