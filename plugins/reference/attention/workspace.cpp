#include "workspace.h"

#include <algorithm>

#include "batch.h"

namespace tokenweave::reference {
namespace {

constexpr size_t kAlignment = 256;

class Places {
 public:
  explicit Places(void* base) : base_(static_cast<uint8_t*>(base)) {}

  template <typename T>
  void take(T** place, size_t count, size_t bytes_each = sizeof(T)) {
    *place = base_ != nullptr ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (count * bytes_each + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* base_;
  size_t bytes_ = 0;
};

/// Most CTAs of a launch. A row's last tile may be partly empty; small tiles are used only while they are at most two a
/// row.
size_t most_ctas(const WorkspaceSizes& sizes) {
  const size_t group = static_cast<size_t>(sizes.num_heads / sizes.num_kv_heads);
  const size_t tiles = sizes.tokens * group / kLargeTile + size_t{2} * sizes.rows;
  return std::max(tiles, static_cast<size_t>(sizes.slots));
}

void lay_out(const WorkspaceSizes& sizes, Places* places, Schedule* schedule) {
  const size_t rows = sizes.rows, ctas = most_ctas(sizes);
  for (int32_t** starts :
       {&schedule->q_starts, &schedule->page_starts, &schedule->cta_starts, &schedule->partial_starts}) {
    places->take(starts, rows + 1);
  }
  places->take(&schedule->merge_starts, static_cast<size_t>(sizes.tokens) + 1);
  for (int32_t** of_cta : {&schedule->cta_rows, &schedule->cta_tiles, &schedule->cta_chunks}) {
    places->take(of_cta, ctas);
  }
  places->take(&schedule->chunk_tokens, 1);
  places->take(&schedule->cta_valid, ctas);
}

}  // namespace

size_t lay_out(const WorkspaceSizes& sizes, void* base, Workspace* workspace) {
  Places places(base);
  Workspace unused;
  Workspace& out = workspace != nullptr ? *workspace : unused;
  lay_out(sizes, &places, &out.context);
  lay_out(sizes, &places, &out.generation);
  // The two launches follow one another. Query rows of all chunks are no more than the tiles of `slots` CTAs hold.
  const size_t head_rows = size_t{kLargeTile} * sizes.slots * sizes.num_kv_heads;
  constexpr size_t kBytesOfActivation = 2;
  places.take(&out.partial_out, head_rows * sizes.head_size, kBytesOfActivation);
  places.take(&out.partial_lse, head_rows);
  return places.bytes();
}

}  // namespace tokenweave::reference
