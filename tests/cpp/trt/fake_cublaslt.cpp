#include "fake_cublaslt.h"

#include <cstring>
#include <map>

namespace tokenweave::test {

FakeCublasLt& cublaslt() {
  static FakeCublasLt fake;
  return fake;
}

namespace {

constexpr int kSuccess = 0, kInvalidValue = 7, kTransA = 3, kSmCountTarget = 15, kMaxWorkspace = 1,
              kReductionSchemes = 3, kAlignmentA = 5;

struct Object {
  std::map<int, uint64_t> attributes;
  cudaDataType_t type{};
  uint64_t rows = 0, cols = 0;
  int64_t ld = 0;
};

int answer(const char* function) { return cublaslt().failing == function ? 14 : kSuccess; }

int create(Object** object, const char* function) {
  if (const int status = answer(function); status != kSuccess) return status;
  *object = new Object;
  ++cublaslt().objects;
  return kSuccess;
}

int destroy(Object* object) {
  delete object;
  --cublaslt().objects;
  return kSuccess;
}

int set(Object* object, int attribute, const void* value, size_t bytes, const char* function) {
  uint64_t& stored = object->attributes[attribute] = 0;
  std::memcpy(&stored, value, bytes);
  return answer(function);
}

}  // namespace
}  // namespace tokenweave::test

using namespace tokenweave::test;

#pragma GCC visibility push(default)
extern "C" {

const char* cublasLtGetStatusName(int) { return "CUBLAS_STATUS_INTERNAL_ERROR"; }

int cublasLtCreate(void** handle) {
  *handle = &cublaslt();
  const int status = answer("cublasLtCreate");
  if (status == kSuccess) ++cublaslt().handles;
  return status;
}

int cublasLtDestroy(void*) {
  --cublaslt().handles;
  return kSuccess;
}

int cublasLtMatmulDescCreate(Object** desc, int compute, cudaDataType_t scale) {
  if (compute != 68 || scale != CUDA_R_32F) return kInvalidValue;
  return create(desc, "cublasLtMatmulDescCreate");
}
int cublasLtMatmulDescDestroy(Object* desc) { return destroy(desc); }
int cublasLtMatmulDescSetAttribute(Object* desc, int attribute, const void* value, size_t bytes) {
  return set(desc, attribute, value, bytes, "cublasLtMatmulDescSetAttribute");
}

int cublasLtMatrixLayoutCreate(Object** layout, cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld) {
  const int status = create(layout, "cublasLtMatrixLayoutCreate");
  if (status == kSuccess) **layout = {{}, type, rows, cols, ld};
  return status;
}
int cublasLtMatrixLayoutDestroy(Object* layout) { return destroy(layout); }

int cublasLtMatmulPreferenceCreate(Object** preference) { return create(preference, "cublasLtMatmulPreferenceCreate"); }
int cublasLtMatmulPreferenceDestroy(Object* preference) { return destroy(preference); }
int cublasLtMatmulPreferenceSetAttribute(Object* preference, int attribute, const void* value, size_t bytes) {
  return set(preference, attribute, value, bytes, "cublasLtMatmulPreferenceSetAttribute");
}

int cublasLtMatmulAlgoGetHeuristic(void*, Object* desc, Object* a, Object* b, Object*, Object* d, Object* preference,
                                   int requested, void* result, int* found) {
  const bool transa = desc->attributes[kTransA] == 1;
  const uint64_t n = transa ? a->cols : a->rows, k = transa ? a->rows : a->cols;
  if (b->rows != k || d->rows != n || d->cols != b->cols || requested != 1) return kInvalidValue;
  struct {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
  } const chosen{{cublaslt().asked.size()}, 4096, cublaslt().state, 1.0f, {}};
  std::memcpy(result, &chosen, sizeof chosen);
  *found = cublaslt().found;
  for (int i = 1; i < 4; ++i) {
    if (preference->attributes[kAlignmentA + i] != preference->attributes[kAlignmentA]) return kInvalidValue;
  }
  cublaslt().asked.push_back({a->type, static_cast<int64_t>(b->cols), static_cast<int64_t>(n), static_cast<int64_t>(k),
                              transa, static_cast<int32_t>(desc->attributes[kSmCountTarget]),
                              preference->attributes[kMaxWorkspace],
                              static_cast<uint32_t>(preference->attributes[kReductionSchemes]),
                              static_cast<uint32_t>(preference->attributes[kAlignmentA])});
  return answer("cublasLtMatmulAlgoGetHeuristic");
}

int cublasLtMatmul(void*, Object* desc, const float* alpha, const void* a, Object* a_layout, const void* b,
                   Object* b_layout, const float* beta, const void* c, Object*, void* d, Object* d_layout,
                   const uint64_t* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (*beta != 0.0f || c != d) return kInvalidValue;
  cublaslt().ran.push_back({a, b, d, workspace, workspace_bytes, *algorithm, *alpha, stream});
  if (a_layout->type == CUDA_R_32F) {
    const bool transa = desc->attributes[kTransA] == 1;
    for (uint64_t row = 0; row < d_layout->rows; ++row) {
      for (uint64_t col = 0; col < d_layout->cols; ++col) {
        float sum = 0;
        for (uint64_t i = 0; i < b_layout->rows; ++i) {
          const auto at = transa ? i + row * a_layout->ld : row + i * a_layout->ld;
          sum += static_cast<const float*>(a)[at] * static_cast<const float*>(b)[i + col * b_layout->ld];
        }
        static_cast<float*>(d)[row + col * d_layout->ld] = *alpha * sum;
      }
    }
  }
  return answer("cublasLtMatmul");
}

}  // extern "C"
#pragma GCC visibility pop
