#include "gemm_fields.h"

namespace tokenweave::trt {

void GemmFields::visit(FieldVisitor& visitor, nvinfer1::TensorRTPhase) {
  visitor.int32("type_id", &type_id, 0, kNoLimit);
  visitor.flag("transb", &transb);
  visitor.int32("kind", &kind, 0, 1);
  visitor.chars("table", &table);
}

Status GemmFields::check(nvinfer1::TensorRTPhase) { return read_table_field(table, type_id, &tuning_table); }

}  // namespace tokenweave::trt
