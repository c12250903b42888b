// The C functions.
#include <cstring>

#include "all_reduce_rms_norm.h"
#include "c_api.h"
#include "group.h"
#include "tokenweave/tokenweave.h"

struct TwGroup {
  std::unique_ptr<tokenweave::Group> group;
};

namespace {

using tokenweave::check_struct;
using tokenweave::error;
using tokenweave::guarded;
using tokenweave::Status;

Status check_group(const TwGroup* group) {
  return group != nullptr ? Status{} : error(TW_INVALID_ARGUMENT, "group is null");
}

}  // namespace

extern "C" {

const char* twVersion(void) { return TOKENWEAVE_VERSION; }

TwCode twGroupCreate(const TwGroupConfig* config, TwGroup** group, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    if (group == nullptr) return error(TW_INVALID_ARGUMENT, "group is null");
    *group = nullptr;
    TW_RETURN_IF_ERROR(check_struct(config, "config"));
    auto made = std::make_unique<TwGroup>();
    TW_RETURN_IF_ERROR(tokenweave::Group::create(*config, &made->group));
    *group = made.release();
    return {};
  });
}

TwCode twGroupDestroy(TwGroup* group, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    const std::unique_ptr<TwGroup> owner(group);
    return owner == nullptr ? Status{} : owner->group->leave();
  });
}

TwCode twGroupGetInfo(const TwGroup* group, TwGroupInfo* info, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_struct(info, "info"));
    TW_RETURN_IF_ERROR(check_group(group));
    const tokenweave::Group& g = *group->group;
    *info = TwGroupInfo{};
    info->struct_bytes = sizeof *info;
    info->rank = g.rank();
    info->size = g.size();
    info->local_ranks = g.local_ranks();
    info->max_ctas = tokenweave::kMaxCtas;
    info->fabric = g.has_multicast() ? TW_FABRIC_MULTIMEM : TW_FABRIC_PEER;
    std::strncpy(info->multicast_reason, g.multicast_reason().c_str(), sizeof info->multicast_reason - 1);
    info->memory = g.memory();
    std::strncpy(info->memory_reason, g.memory_reason().c_str(), sizeof info->memory_reason - 1);
    return {};
  });
}

TwCode twGroupTensorMemory(const TwGroup* group, int32_t rank, void** data, size_t* bytes, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_group(group));
    const tokenweave::Group& g = *group->group;
    if (data == nullptr || bytes == nullptr) return error(TW_INVALID_ARGUMENT, "data or bytes is null");
    if (rank < 0 || rank >= g.size()) {
      return error(TW_INVALID_ARGUMENT,
                   "rank is " + std::to_string(rank) + ", not 0 to " + std::to_string(g.size() - 1));
    }
    *data = g.buffer(rank) + g.tensor_offset();
    *bytes = g.tensor_bytes();
    return {};
  });
}

TwCode twGroupAllGather(TwGroup* group, const void* mine, void* all, size_t bytes, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_group(group));
    if (mine == nullptr || all == nullptr) return error(TW_INVALID_ARGUMENT, "mine or all is null");
    return group->group->all_gather(mine, all, bytes);
  });
}

TwCode twGroupCheck(const TwGroup* group, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_group(group));
    return group->group->check();
  });
}

TwCode twAllReduceRmsNorm(TwGroup* group, const TwAllReduceRmsNorm* op, const TwAllReduceRmsNormTensors* tensors,
                          const TwLaunchConfig* launch, void* stream, TwStatus* status) {
  return guarded(status, [&]() -> Status {
    TW_RETURN_IF_ERROR(check_group(group));
    TW_RETURN_IF_ERROR(check_struct(op, "op"));
    if (tensors == nullptr) return error(TW_INVALID_ARGUMENT, "tensors is null");
    const TwLaunchConfig defaults{sizeof(TwLaunchConfig), TW_FABRIC_AUTO, TW_LOADER_AUTO, 0, 0, 0, nullptr};
    if (launch != nullptr) TW_RETURN_IF_ERROR(check_struct(launch, "launch"));
    return tokenweave::all_reduce_rms_norm(*group->group, *op, tensors, launch != nullptr ? *launch : defaults, stream);
  });
}

}  // extern "C"
