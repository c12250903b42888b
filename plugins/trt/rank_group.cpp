#include "rank_group.h"

#include <utility>

#include "counters.h"
#include "log.h"

namespace tokenweave::trt {
namespace {

Status from(const TwStatus& status) { return {status.code, status.message}; }

}  // namespace

void RankGroup::Destroy::operator()(TwGroup* group) const {
  TwStatus status{};
  if (twGroupDestroy(group, &status) != TW_OK) {
    log(Severity::kWARNING, std::string("leaving the group of ranks: ") + status.message);
  }
}

Status RankGroup::create(const Options& options, std::unique_ptr<RankGroup>* group) {
  TwGroupConfig config{};
  config.struct_bytes = sizeof config;
  config.rank = options.rank;
  config.size = static_cast<int32_t>(options.ranks.size());
  config.device = options.device;
  config.allow_multicast = 1;
  config.tensor_bytes = options.tensor_bytes;
  config.staging_bytes = options.staging_bytes;
  config.config_hash = options.config_hash;
  config.mpi_ranks = options.ranks.data();
  TwStatus status{};
  TwGroup* created = nullptr;
  if (twGroupCreate(&config, &created, &status) != TW_OK) return from(status);
  std::unique_ptr<RankGroup> made(new RankGroup);
  made->group_.reset(created);
  made->staging_bytes_ = options.staging_bytes;

  TwGroupInfo info{};
  if (twGroupGetInfo(created, &info, &status) != TW_OK) return from(status);
  made->has_multimem_ = info.fabric == TW_FABRIC_MULTIMEM;
  made->multicast_reason_ = info.multicast_reason;
  if (!made->has_multimem_) log(Severity::kINFO, "no NVSwitch multicast: " + made->multicast_reason_);
  void* memory = nullptr;
  if (twGroupTensorMemory(created, options.rank, &memory, &made->tensor_bytes_, &status) != TW_OK) return from(status);
  made->tensor_memory_ = static_cast<uint8_t*>(memory);
  *group = std::move(made);
  return {};
}

std::string RankGroup::sizes() const {
  return std::to_string(staging_bytes_) + " bytes of staging and " + std::to_string(tensor_bytes_) +
         " of tensor memory";
}

Status RankGroup::queue(const KernelCall& call, const KernelQueue& queue) {
  TwLaunchConfig config{};
  config.struct_bytes = sizeof config;
  config.fabric = pick_fabric(call.launch.fabric);
  config.loader = TW_LOADER_AUTO;
  config.ctas = call.launch.ctas;
  config.threads = call.launch.threads;
  config.cluster_size = queue.cluster_size;
  config.launch_completion = queue.started;
  const TwAllReduceRmsNormTensors& t = call.tensors;
  const bool staged = !in_tensor_memory(t.input) || !in_tensor_memory(t.normed) ||
                      (call.op.gather_residual != 0 && !in_tensor_memory(t.residual_out));
  if (staged) ++counters().staged;
  TwStatus status{};
  const TwCode code = twAllReduceRmsNorm(group_.get(), &call.op, &t, &config, queue.stream, &status);
  return code == TW_OK ? Status{} : from(status);
}

TwFabric RankGroup::pick_fabric(TableFabric wanted) {
  if (wanted == TableFabric::kPeer) return TW_FABRIC_PEER;
  if (wanted == TableFabric::kMultimem && !has_multimem_) {  // on all ranks: they have it together or not at all
    ++counters().fabric_fallbacks;
    if (!std::exchange(warned_of_fallback_, true)) {
      log(Severity::kWARNING, "the tuning table asks for multimem, which this group lacks (" + multicast_reason_ +
                                  "): peer pointers serve instead. Fix: tune on this machine");
    }
  }
  return TW_FABRIC_AUTO;
}

bool RankGroup::in_tensor_memory(const void* tensor) const {
  const auto* begin = static_cast<const uint8_t*>(tensor);
  return begin >= tensor_memory_ && begin < tensor_memory_ + tensor_bytes_;
}

}  // namespace tokenweave::trt
