#include "gemm.h"

#include <algorithm>
#include <string>

#include "cuda_status.h"

namespace tokenweave {
namespace {

/// More than this no kernel asks for.
constexpr uintptr_t kMaxAlignment = 256;

struct Registry {
  std::mutex mutex;
  std::map<int, std::weak_ptr<GemmRunner>> runners;  // by device
};

Registry& registry() {
  static auto* all = new Registry;  // never freed: plugins may be destroyed while the process ends
  return *all;
}

cudaDataType_t cuda_type(int32_t dtype) {
  return dtype == TW_FLOAT ? CUDA_R_32F : dtype == TW_HALF ? CUDA_R_16F : CUDA_R_16BF;
}

uint32_t alignment_of(const GemmTensors& tensors) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(tensors.x) | reinterpret_cast<uintptr_t>(tensors.weight) |
                         reinterpret_cast<uintptr_t>(tensors.out) | kMaxAlignment;
  return static_cast<uint32_t>(bits & -bits);
}

}  // namespace

Status GemmRunner::acquire(std::shared_ptr<GemmRunner>* runner) {
  int device = 0, sm_count = 0;
  TW_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::weak_ptr<GemmRunner>& known = all.runners[device];
  *runner = known.lock();
  if (*runner != nullptr) return {};

  TW_RETURN_IF_ERROR(
      cuda_status(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute"));
  CublasLtTable table{};
  TW_RETURN_IF_ERROR(load_cublaslt(&table));
  TW_RETURN_IF_ERROR(create(table, sm_count, runner));
  known = *runner;
  return {};
}

Status GemmRunner::create(const CublasLtTable& table, int sm_count, std::shared_ptr<GemmRunner>* runner) {
  std::shared_ptr<GemmRunner> made(new GemmRunner(table, sm_count));
  CublasLtHandle handle = nullptr;
  TW_RETURN_IF_ERROR(made->check(table.Create(&handle), "cublasLtCreate"));
  made->handle_ = {handle, {table.Destroy}};
  *runner = std::move(made);
  return {};
}

Status GemmRunner::queue(const Gemm& gemm, const GemmTensors& tensors, void* workspace, cudaStream_t stream) {
  if (gemm.m == 0) return {};
  const int32_t sm_target = gemm.sm_target < sm_count_ ? gemm.sm_target : 0;
  const Key key{gemm.m, gemm.n, gemm.k, gemm.dtype, gemm.transb, sm_target, alignment_of(tensors)};
  std::shared_ptr<const Plan> plan;
  TW_RETURN_IF_ERROR(find_plan(key, &plan));
  const float beta = 0.0f;
  return check(table_.Matmul(handle_.get(), plan->desc.get(), &gemm.alpha, tensors.weight, plan->weight.get(),
                             tensors.x, plan->x.get(), &beta, tensors.out, plan->out.get(), tensors.out,
                             plan->out.get(), &plan->chosen.algo, workspace, plan->chosen.workspace_bytes, stream),
               "cublasLtMatmul");
}

size_t GemmRunner::num_plans() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plans_.size();
}

Status GemmRunner::find_plan(const Key& key, std::shared_ptr<const Plan>* plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    auto made = std::make_shared<Plan>();
    TW_RETURN_IF_ERROR(make_plan(key, made.get()));
    if (plans_.size() == kMaxPlans) {
      plans_.erase(std::min_element(plans_.begin(), plans_.end(), [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      }));
    }
    found = plans_.emplace(key, Known{std::move(made)}).first;
  }
  found->second.last_use = ++uses_;
  *plan = found->second.plan;
  return {};
}

Status GemmRunner::make_layout(const Key& key, int64_t rows, int64_t cols, Owner<CublasLtLayout>* layout) const {
  CublasLtLayout made = nullptr;
  TW_RETURN_IF_ERROR(check(table_.MatrixLayoutCreate(&made, cuda_type(key.dtype), static_cast<uint64_t>(rows),
                                                     static_cast<uint64_t>(cols), rows),
                           "cublasLtMatrixLayoutCreate"));
  *layout = {made, {table_.MatrixLayoutDestroy}};
  return {};
}

/// cuBLASLt's matrices are column-major, and so ours are their transposes: out^T[n, m] = weight^T[n, k] x^T[k, m].
Status GemmRunner::make_plan(const Key& key, Plan* plan) const {
  CublasLtMatmulDesc desc = nullptr;
  TW_RETURN_IF_ERROR(check(table_.MatmulDescCreate(&desc, kCublasCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate"));
  plan->desc = {desc, {table_.MatmulDescDestroy}};
  const auto set = [&](CublasLtMatmulDescAttribute attribute, int32_t value) {
    return check(table_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  };
  TW_RETURN_IF_ERROR(set(kCublasLtTransA, key.transb != 0 ? kCublasT : kCublasN));
  if (key.sm_target > 0) TW_RETURN_IF_ERROR(set(kCublasLtSmCountTarget, key.sm_target));
  TW_RETURN_IF_ERROR(key.transb != 0 ? make_layout(key, key.k, key.n, &plan->weight)
                                     : make_layout(key, key.n, key.k, &plan->weight));
  TW_RETURN_IF_ERROR(make_layout(key, key.k, key.m, &plan->x));
  TW_RETURN_IF_ERROR(make_layout(key, key.n, key.m, &plan->out));
  return choose_algorithm(key, plan);
}

Status GemmRunner::choose_algorithm(const Key& key, Plan* plan) const {
  CublasLtPreference made = nullptr;
  TW_RETURN_IF_ERROR(check(table_.MatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate"));
  const Owner<CublasLtPreference> preference(made, {table_.MatmulPreferenceDestroy});
  const auto set = [&](CublasLtPreferenceAttribute attribute, auto value) {
    return check(table_.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  TW_RETURN_IF_ERROR(set(kCublasLtMaxWorkspaceBytes, uint64_t{kWorkspaceBytes}));
  TW_RETURN_IF_ERROR(set(kCublasLtReductionSchemes, kCublasLtReduceInComputeType));  // not in the tensors' dtype
  for (const auto attribute :
       {kCublasLtMinAlignmentA, kCublasLtMinAlignmentB, kCublasLtMinAlignmentC, kCublasLtMinAlignmentD}) {
    TW_RETURN_IF_ERROR(set(attribute, key.alignment));
  }
  int found = 0;
  TW_RETURN_IF_ERROR(
      check(table_.MatmulAlgoGetHeuristic(handle_.get(), plan->desc.get(), plan->weight.get(), plan->x.get(),
                                          plan->out.get(), plan->out.get(), made, 1, &plan->chosen, &found),
            "cublasLtMatmulAlgoGetHeuristic"));
  if (found > 0 && plan->chosen.state == kCublasSuccess) return {};
  return error(TW_UNSUPPORTED, "cuBLASLt has no algorithm for [" + std::to_string(key.m) + ", " +
                                   std::to_string(key.k) + "] x [" + std::to_string(key.k) + ", " +
                                   std::to_string(key.n) + "] on tensors aligned to " + std::to_string(key.alignment) +
                                   " bytes");
}

}  // namespace tokenweave
