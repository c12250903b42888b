#include "kernel_args.h"

namespace tokenweave {

KernelEntry find_kernel_bf16(Fabric fabric, Loader loader, int size);
KernelEntry find_kernel_fp16(Fabric fabric, Loader loader, int size);
KernelEntry find_kernel_fp32(Fabric fabric, Loader loader, int size);

KernelEntry find_kernel(DataType dtype, Fabric fabric, Loader loader, int size) {
  switch (dtype) {
    case DataType::kBfloat16:
      return find_kernel_bf16(fabric, loader, size);
    case DataType::kHalf:
      return find_kernel_fp16(fabric, loader, size);
    case DataType::kFloat:
      return find_kernel_fp32(fabric, loader, size);
  }
  return {};
}

}  // namespace tokenweave
