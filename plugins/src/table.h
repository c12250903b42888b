// Reads the packed tuning table that an engine carries, and looks a step up in it.
//
// The layout is described in trtllm_tokenweave/table/packing.py and the rule in trtllm_tokenweave/schedule.py; both are
// pinned by tests/vectors/table_lookup.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace tokenweave {

enum class TableFabric : uint8_t { kAuto = 0, kMultimem = 1, kPeer = 2, kLoopback = 3 };
enum class TableDtype : uint8_t { kFloat = 0, kHalf = 1, kBfloat16 = 2 };

/// How one fused collective is launched. The defaults are those of a step that no row covers.
struct TableLaunch {
  TableFabric fabric = TableFabric::kAuto;
  int32_t ctas = 8;
  int32_t threads = 1024;
  int32_t gemm_sms = 0;  ///< 0: the SMs that the CTAs leave
};

/// Whether the numbers are in the ranges of a table; names the one that is not.
Status check_launch(const TableLaunch& launch);

/// What one step does.
struct StepPlan {
  int64_t split = 0;      ///< tokens of the prefix half
  bool weave = false;     ///< both halves hold tokens
  bool from_row = false;  ///< a row of the table matched, not the default rule
  bool alone = false;     ///< the row says fuse: its launch configurations are for collectives with no work beside them
  TableLaunch attention, mlp;
};

/// An inclusive range of counts.
struct Bucket {
  static constexpr uint32_t kUnbounded = 0xffffffff;
  uint32_t lo = 1, hi = kUnbounded;

  bool unbounded() const { return hi == kUnbounded; }
  bool contains(int64_t value) const { return value >= lo && (unbounded() || value <= hi); }
  bool overlaps(const Bucket& other) const { return lo <= other.hi && other.lo <= hi; }
};

struct TableRow {
  Bucket batch, tokens;
  uint32_t split_offset = 0;
  bool weave = false;
  TableLaunch attention, mlp;
};

class TuningTable {
 public:
  /// TW_INVALID_ARGUMENT says what is wrong: not a table, truncated, corrupt, too new, or a value out of range.
  static Status read(const uint8_t* data, size_t bytes, TuningTable* table);

  /// `batch` sequences and `num_tokens` tokens, both >= 0; an empty step is looked up as if it held one of each.
  StepPlan plan_step(int64_t batch, int64_t num_tokens) const;

  int32_t tp_size() const { return tp_size_; }
  int32_t hidden_size() const { return static_cast<int32_t>(hidden_size_); }
  TableDtype dtype() const { return dtype_; }
  const std::vector<TableRow>& rows() const { return rows_; }

 private:
  Status check_rows() const;

  // The default rule of dense models, which an engine without a table follows.
  uint32_t granularity_ = 256;
  uint32_t min_tokens_ = 1024;
  uint32_t hidden_size_ = 0;
  uint16_t tp_size_ = 0;
  TableDtype dtype_ = TableDtype::kFloat;
  std::vector<TableRow> rows_;
};

}  // namespace tokenweave
