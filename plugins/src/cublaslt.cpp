#include "cublaslt.h"

#include "runtime_library.h"

namespace tokenweave {

Status load_cublaslt(CublasLtTable* table, const std::vector<std::string>& names) {
  RuntimeLibrary library;
  TW_RETURN_IF_ERROR(library.open(names,
                                  "install cuBLAS of CUDA 12 or 13 (Python: nvidia-cublas or nvidia-cublas-cu12) and "
                                  "add its folder to LD_LIBRARY_PATH"));
  TW_RETURN_IF_ERROR(library.find("cublasLtGetStatusName", &table->GetStatusName));
  TW_RETURN_IF_ERROR(library.find("cublasLtCreate", &table->Create));
  TW_RETURN_IF_ERROR(library.find("cublasLtDestroy", &table->Destroy));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulDescCreate", &table->MatmulDescCreate));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulDescDestroy", &table->MatmulDescDestroy));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulDescSetAttribute", &table->MatmulDescSetAttribute));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatrixLayoutCreate", &table->MatrixLayoutCreate));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatrixLayoutDestroy", &table->MatrixLayoutDestroy));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulPreferenceCreate", &table->MatmulPreferenceCreate));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulPreferenceDestroy", &table->MatmulPreferenceDestroy));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulPreferenceSetAttribute", &table->MatmulPreferenceSetAttribute));
  TW_RETURN_IF_ERROR(library.find("cublasLtMatmulAlgoGetHeuristic", &table->MatmulAlgoGetHeuristic));
  return library.find("cublasLtMatmul", &table->Matmul);
}

Status cublaslt_status(const CublasLtTable& table, CublasStatus status, const char* call) {
  if (status == kCublasSuccess) return {};
  return error(TW_CUDA_ERROR, std::string(call) + " failed: " + table.GetStatusName(status) + " (" +
                                  std::to_string(static_cast<int>(status)) + ")");
}

}  // namespace tokenweave
