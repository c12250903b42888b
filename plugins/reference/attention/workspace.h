// The device memory of one call. No GPU is touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenweave::reference {

/// Which CTA of one launch does what. A kernel (schedule.cu) makes it from the lengths on the device, so nothing that
/// the host wrote is read when a captured graph is replayed, and nothing is copied from the host.
struct Schedule {
  int32_t* q_starts = nullptr;        ///< [rows + 1] tokens of the launch before each row
  int32_t* page_starts = nullptr;     ///< [rows + 1] where each row's K pages start in the block table
  int32_t* cta_starts = nullptr;      ///< [rows + 1] CTAs before each row
  int32_t* partial_starts = nullptr;  ///< [rows + 1] rows of the partial results (or of the output) before each row
  int32_t* merge_starts = nullptr;    ///< [tokens + 1] partial results before each token, where keys are split
  int32_t* cta_rows = nullptr;        ///< [ctas]
  int32_t* cta_tiles = nullptr;       ///< [ctas] which tile of its row's queries
  int32_t* cta_chunks = nullptr;      ///< [ctas] which chunk of its row's keys
  int32_t* chunk_tokens = nullptr;    ///< [1] keys in a chunk
  bool* cta_valid = nullptr;          ///< [ctas]
};

struct Workspace {
  Schedule context, generation;
  void* partial_out = nullptr;   ///< [partials, num_heads, head_size], of the activations' dtype
  float* partial_lse = nullptr;  ///< [partials, num_heads] log2 of each chunk's softmax denominator
};

/// What the size of the memory follows from.
struct WorkspaceSizes {
  int32_t tokens = 0, rows = 0;  ///< of the call; those of its two launches are not more
  int32_t num_heads = 0, num_kv_heads = 0, head_size = 0;
  int32_t slots = 0;  ///< cta_slots()
};

/// Bytes that a call takes; never less for more tokens or rows. Fills `workspace` with places behind `base`, 256-byte
/// aligned, unless it is null.
size_t lay_out(const WorkspaceSizes& sizes, void* base, Workspace* workspace);

}  // namespace tokenweave::reference
