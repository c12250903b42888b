#include "layer_step.h"

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "fields.h"

namespace tokenweave::trt {
namespace {

TableDtype table_dtype(int32_t type_id) {
  return type_id == TW_FLOAT ? TableDtype::kFloat : type_id == TW_HALF ? TableDtype::kHalf : TableDtype::kBfloat16;
}

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, what); }

Status check_fabric(const TableLaunch& launch) {
  return launch.fabric != TableFabric::kLoopback
             ? Status{}
             : bad("field 'table' asks for the loopback fabric, which is for tests of the kernel. Fix: use auto");
}

struct Override {
  std::mutex mutex;
  std::optional<TableLaunch> launch;
};

Override& process_override() {
  static auto* one = new Override;  // never freed: plugins may run while the process ends
  return *one;
}

}  // namespace

int64_t first_dim(const nvinfer1::Dims& dims) { return dims.nbDims > 0 ? dims.d[0] : 1; }

LayerStep layer_step(const nvinfer1::PluginTensorDesc& rows, const nvinfer1::PluginTensorDesc& num_tokens_ref,
                     const nvinfer1::PluginTensorDesc& batch_ref) {
  return {first_dim(rows.dims), first_dim(num_tokens_ref.dims), first_dim(batch_ref.dims)};
}

TableLaunch launch_of(const TuningTable& table, const LayerStep& step, SiteKind kind) {
  const StepPlan plan = table.plan_step(step.sequences, step.tokens);
  TableLaunch launch = kind == SiteKind::kAttention ? plan.attention : plan.mlp;
  if (!step.split()) {
    if (!plan.alone) launch.ctas = 0;
    return launch;
  }
  Override& given = process_override();
  const std::lock_guard<std::mutex> lock(given.mutex);
  if (given.launch) {
    const TableFabric fabric = launch.fabric;
    launch = *given.launch;
    launch.fabric = fabric;
  }
  return launch;
}

Status override_launch(const TableLaunch* launch) {
  if (launch != nullptr) TW_RETURN_IF_ERROR(check_launch(*launch));
  Override& given = process_override();
  const std::lock_guard<std::mutex> lock(given.mutex);
  given.launch = launch != nullptr ? std::optional<TableLaunch>(*launch) : std::nullopt;
  return {};
}

Status read_table_field(const std::vector<uint8_t>& bytes, int32_t type_id, std::shared_ptr<const TuningTable>* table) {
  TW_RETURN_IF_ERROR(check_type_id(type_id));
  auto read = std::make_shared<TuningTable>();
  if (!bytes.empty()) {
    const Status status = TuningTable::read(bytes.data(), bytes.size(), read.get());
    if (!status.ok()) return bad("field 'table': " + status.message);
    if (read->dtype() != table_dtype(type_id)) return bad("field 'table' is for another dtype than field 'type_id'");
    for (const TableRow& row : read->rows()) {
      TW_RETURN_IF_ERROR(check_fabric(row.attention));
      TW_RETURN_IF_ERROR(check_fabric(row.mlp));
    }
  }
  *table = std::move(read);
  return {};
}

}  // namespace tokenweave::trt
