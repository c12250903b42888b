#include <cstring>

#include "bootstrap.h"

namespace tokenweave {
namespace {

struct Verdict {
  TwCode code;
  char message[TW_MESSAGE_BYTES - 32];
};

}  // namespace

Status agree(Bootstrap& bootstrap, const char* what, const Status& mine) {
  Verdict verdict{mine.code, {}};
  std::strncpy(verdict.message, mine.message.c_str(), sizeof verdict.message - 1);
  std::vector<Verdict> all;
  TW_RETURN_IF_ERROR(all_gather(bootstrap, what, verdict, &all));
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    if (all[rank].code != TW_OK)
      return error(all[rank].code, "rank " + std::to_string(rank) + ": " + all[rank].message);
  }
  return {};
}

}  // namespace tokenweave
