// Row-major matrix products by cuBLASLt, on a limited number of SMs where that is asked for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "cublaslt.h"
#include "status.h"

namespace tokenweave {

/// out[m, n] = alpha * x[m, k] * weight; accumulated in fp32.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  TwDataType dtype = TW_FLOAT;  ///< of all three tensors
  bool transb = false;          ///< weight is [n, k], else [k, n]
  int32_t sm_target = 0;        ///< SMs that the kernel should fit on; 0: all of the device
  float alpha = 1.0f;
};

struct GemmTensors {
  const void* x = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
};

/// What one device computes matrix products with: a cuBLASLt handle, and which algorithm serves which product.
///
/// Asking cuBLASLt for an algorithm is work of the host alone, so it is done when a product is first queued, also while
/// a graph is captured; how long it takes was not measured. Layers of one shape share the answer, because they share
/// the device's runner. Rows are not rounded to buckets: an algorithm is only known to suit the size that it was asked
/// for.
class GemmRunner {
 public:
  /// Memory that queue() needs on the device.
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
  static constexpr size_t kMaxPlans = 1024;

  /// The process's runner of the current device; made if need be, by the cuBLASLt that load_cublaslt finds.
  static Status acquire(std::shared_ptr<GemmRunner>* runner);
  /// A runner of the current device, which has `sm_count` SMs.
  static Status create(const CublasLtTable& table, int sm_count, std::shared_ptr<GemmRunner>* runner);

  /// Queues a product; nothing for one without rows. Any thread may call it.
  Status queue(const Gemm& gemm, const GemmTensors& tensors, void* workspace, cudaStream_t stream);

  int sm_count() const { return sm_count_; }
  size_t num_plans() const;

 private:
  template <typename Opaque>
  struct Destroy {
    CublasStatus (*function)(Opaque);
    void operator()(Opaque object) const { (void)function(object); }
  };
  template <typename Opaque>
  using Owner = std::unique_ptr<std::remove_pointer_t<Opaque>, Destroy<Opaque>>;

  /// What a plan depends on.
  struct Key {
    int64_t m, n, k;
    int32_t dtype, transb, sm_target;
    uint32_t alignment;  ///< of every tensor, in bytes
    bool operator<(const Key& o) const {
      return std::tie(m, n, k, dtype, transb, sm_target, alignment) <
             std::tie(o.m, o.n, o.k, o.dtype, o.transb, o.sm_target, o.alignment);
    }
  };
  struct Plan {
    Owner<CublasLtMatmulDesc> desc;
    Owner<CublasLtLayout> weight, x, out;
    CublasLtHeuristic chosen{};
  };
  struct Known {
    std::shared_ptr<const Plan> plan;
    uint64_t last_use = 0;
  };

  GemmRunner(const CublasLtTable& table, int sm_count) : table_(table), sm_count_(sm_count) {}

  Status find_plan(const Key& key, std::shared_ptr<const Plan>* plan);
  Status make_plan(const Key& key, Plan* plan) const;
  Status choose_algorithm(const Key& key, Plan* plan) const;
  Status make_layout(const Key& key, int64_t rows, int64_t cols, Owner<CublasLtLayout>* layout) const;
  Status check(CublasStatus status, const char* call) const { return cublaslt_status(table_, status, call); }

  const CublasLtTable table_;
  const int sm_count_;
  Owner<CublasLtHandle> handle_;
  mutable std::mutex mutex_;
  std::map<Key, Known> plans_;
  uint64_t uses_ = 0;
};

}  // namespace tokenweave
