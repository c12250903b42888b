#include <array>
#include <cstdio>
#include <string>

#include "group.h"

namespace tokenweave {
namespace {

/// Field by field, so that the error can name the one that differs.
struct Item {
  const char* name;
  uint64_t value;
};

uint64_t version_number() {
  int major = 0, minor = 0, patch = 0;
  (void)std::sscanf(twVersion(), "%d.%d.%d", &major, &minor, &patch);
  return static_cast<uint64_t>(major) * 1000000 + minor * 1000 + patch;
}

}  // namespace

Status compare_configurations(Bootstrap& bootstrap, const TwGroupConfig& config) {
  const std::array items{
      Item{"library version (major * 1000000 + minor * 1000 + patch)", version_number()},
      Item{"size", static_cast<uint64_t>(config.size)},
      Item{"tensor_bytes", config.tensor_bytes},
      Item{"staging_bytes", config.staging_bytes},
      Item{"allow_multicast", config.allow_multicast != 0},
      Item{"config_hash (model, dtype, tuning table or engine)", config.config_hash},
  };
  std::array<uint64_t, items.size()> mine{};
  for (size_t i = 0; i < items.size(); ++i) mine[i] = items[i].value;
  std::vector<decltype(mine)> all;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, "comparing configurations", mine, &all));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (all[rank][i] == all[0][i]) continue;
      return error(TW_RANKS_DISAGREE, std::string(items[i].name) + " is " + std::to_string(all[0][i]) +
                                          " on rank 0 and " + std::to_string(all[rank][i]) + " on rank " +
                                          std::to_string(rank) +
                                          ". Fix: start all ranks with the same library, engine and settings");
    }
  }
  return {};
}

}  // namespace tokenweave
