#include "rank_group.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "counters.h"
#include "log.h"

namespace tokenweave::trt {
namespace {

constexpr int64_t kOutside = -1;

Status from(const TwStatus& status) { return {status.code, status.message}; }

std::string place(int64_t offset) {
  return offset == kOutside ? "outside of tensor memory" : "at byte " + std::to_string(offset) + " of tensor memory";
}

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
  made->num_ranks_ = options.ranks.size();

  TwGroupInfo info{};
  info.struct_bytes = sizeof info;
  if (twGroupGetInfo(created, &info, &status) != TW_OK) return from(status);
  made->has_multimem_ = info.fabric == TW_FABRIC_MULTIMEM;
  made->multicast_reason_ = info.multicast_reason;
  if (!made->has_multimem_) log(Severity::kINFO, "no NVSwitch multicast: " + made->multicast_reason_);
  if (info.memory_reason[0] != '\0') {
    log(Severity::kWARNING, std::string("symmetric memory is not NCCL's: ") + info.memory_reason);
  }
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

Status RankGroup::compare_offsets(const KernelCall& call, const std::string& where) {
  if (staged_ || num_ranks_ == 1 || tensor_bytes_ == 0) return {};
  constexpr std::array<const char*, 3> kNames{"input", "normed", "residual_out"};
  using Offsets = std::array<int64_t, kNames.size()>;
  const TwAllReduceRmsNormTensors& t = call.tensors;
  const Offsets mine{offset_of(t.input), offset_of(t.normed),
                     call.op.gather_residual != 0 ? offset_of(t.residual_out) : kOutside};
  std::vector<Offsets> all(num_ranks_);
  TwStatus status{};
  if (twGroupAllGather(group_.get(), &mine, all.data(), sizeof mine, &status) != TW_OK) return from(status);
  const auto other = std::find_if(all.begin(), all.end(), [&all](const Offsets& one) { return one != all[0]; });
  if (other == all.end()) return {};
  staged_ = true;
  const size_t tensor = std::mismatch(all[0].begin(), all[0].end(), other->begin()).first - all[0].begin();
  log(Severity::kWARNING,
      where + ": " + kNames[tensor] + " lies " + place(all[0][tensor]) + " on rank 0 and " + place((*other)[tensor]) +
          " on rank " + std::to_string(other - all.begin()) +
          ". From here on all collectives of this engine are copied through staging memory, on all ranks. Fix: build "
          "the ranks' engines together, with the same timing cache");
  return {};
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
  TwAllReduceRmsNorm op = call.op;
  op.staged = staged_ ? 1 : 0;
  const bool outside = offset_of(t.input) == kOutside || offset_of(t.normed) == kOutside ||
                       (op.gather_residual != 0 && offset_of(t.residual_out) == kOutside);
  if (staged_ || outside) ++counters().staged;
  if (staged_) ++counters().offset_fallbacks;
  TwStatus status{};
  const TwCode code = twAllReduceRmsNorm(group_.get(), &op, &t, &config, queue.stream, &status);
  return code == TW_OK ? Status{} : from(status);
}

Status RankGroup::take_fault() {
  TwStatus status{};
  if (took_fault_ || twGroupCheck(group_.get(), &status) == TW_OK) return {};
  took_fault_ = true;
  return from(status);
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

int64_t RankGroup::offset_of(const void* tensor) const {
  const auto* begin = static_cast<const uint8_t*>(tensor);
  return begin >= tensor_memory_ && begin < tensor_memory_ + tensor_bytes_ ? begin - tensor_memory_ : kOutside;
}

}  // namespace tokenweave::trt
