#include "table.h"

#include <algorithm>
#include <cstring>

namespace tokenweave {
namespace {

constexpr char kMagic[4] = {'T', 'W', 'T', 'B'};
constexpr uint16_t kLayoutVersion = 1, kSchemaVersion = 1;
constexpr size_t kHeaderBytes = 112, kRowBytes = 40, kCrcBytes = 4;

// The bounds of trtllm_tokenweave/table/model.py and launch.py.
constexpr uint32_t kMaxCount = 1u << 30;
constexpr uint32_t kOffsetStep = 8, kCluster = 2, kMaxCtas = 132, kMaxGemmSms = 256, kWarp = 32, kMaxThreads = 1024;

/// Little-endian integers at fixed offsets.
class View {
 public:
  explicit View(const uint8_t* data) : data_(data) {}
  uint8_t u8(size_t at) const { return data_[at]; }
  uint16_t u16(size_t at) const { return static_cast<uint16_t>(data_[at] | data_[at + 1] << 8); }
  uint32_t u32(size_t at) const { return u16(at) | static_cast<uint32_t>(u16(at + 2)) << 16; }

 private:
  const uint8_t* data_;
};

/// CRC-32 of IEEE 802.3, as zlib's.
uint32_t crc32(const uint8_t* data, size_t bytes) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

Status bad(const std::string& what) { return error(TW_INVALID_ARGUMENT, "tuning table " + what); }

Status stale(const std::string& what) { return bad(what + ". Fix: rebuild the engine"); }

struct Range {
  int64_t low, high, multiple = 1;
};

/// What is wrong with a value; empty when nothing is.
std::string misfit(const std::string& name, int64_t value, const Range& range) {
  if (value >= range.low && value <= range.high && value % range.multiple == 0) return {};
  return name + " " + std::to_string(value) + ", not " + std::to_string(range.low) + " to " +
         std::to_string(range.high) + (range.multiple > 1 ? " in steps of " + std::to_string(range.multiple) : "");
}

std::string misfit(const std::string& name, const TableLaunch& launch) {
  for (const std::string& found : {misfit(name + ".ctas", launch.ctas, {kCluster, kMaxCtas, kCluster}),
                                   misfit(name + ".threads", launch.threads, {kWarp, kMaxThreads, kWarp}),
                                   misfit(name + ".gemm_sms", launch.gemm_sms, {0, kMaxGemmSms, kCluster})}) {
    if (!found.empty()) return found;
  }
  return {};
}

Status check_range(const std::string& name, uint32_t value, uint32_t low, uint32_t high, uint32_t multiple = 1) {
  const std::string found = misfit(name, value, {low, high, multiple});
  return found.empty() ? Status{} : bad("has " + found);
}

Status read_launch(const View& view, size_t at, const std::string& name, TableLaunch* launch) {
  TW_RETURN_IF_ERROR(check_range(name + ".fabric", view.u8(at), 0, static_cast<uint32_t>(TableFabric::kLoopback)));
  launch->fabric = static_cast<TableFabric>(view.u8(at));
  launch->ctas = view.u16(at + 2);
  launch->threads = view.u16(at + 4);
  launch->gemm_sms = view.u16(at + 6);
  const std::string found = misfit(name, *launch);
  return found.empty() ? Status{} : bad("has " + found);
}

Status read_bucket(const View& view, size_t at, const std::string& name, Bucket* bucket) {
  *bucket = {view.u32(at), view.u32(at + 4)};
  TW_RETURN_IF_ERROR(check_range(name + ".lo", bucket->lo, 1, kMaxCount));
  return bucket->unbounded() ? Status{} : check_range(name + ".hi", bucket->hi, bucket->lo, kMaxCount);
}

Status read_row(const View& view, size_t at, const std::string& name, TableRow* row) {
  TW_RETURN_IF_ERROR(read_bucket(view, at, name + ".batch", &row->batch));
  TW_RETURN_IF_ERROR(read_bucket(view, at + 8, name + ".tokens", &row->tokens));
  row->split_offset = view.u32(at + 16);
  TW_RETURN_IF_ERROR(check_range(name + ".split_offset", row->split_offset, 0, kMaxCount, kOffsetStep));
  TW_RETURN_IF_ERROR(check_range(name + ".mode", view.u8(at + 20), 0, 1));
  row->weave = view.u8(at + 20) == 1;
  TW_RETURN_IF_ERROR(read_launch(view, at + 24, name + ".attention", &row->attention));
  return read_launch(view, at + 32, name + ".mlp", &row->mlp);
}

}  // namespace

Status TuningTable::read(const uint8_t* data, size_t bytes, TuningTable* table) {
  if (bytes < sizeof kMagic || std::memcmp(data, kMagic, sizeof kMagic) != 0) return bad("has a wrong magic");
  if (bytes < kHeaderBytes + kCrcBytes) return stale("is truncated: " + std::to_string(bytes) + " bytes");
  const View view(data);
  if (view.u16(4) > kLayoutVersion || view.u16(10) > kSchemaVersion) {
    return bad("version " + std::to_string(view.u16(4)) + " (schema " + std::to_string(view.u16(10)) +
               ") was made by a newer version. Fix: upgrade this library");
  }
  if (view.u16(4) != kLayoutVersion || view.u16(10) != kSchemaVersion || view.u16(6) != kHeaderBytes ||
      view.u16(8) != kRowBytes) {
    return stale("has an unknown layout (version " + std::to_string(view.u16(4)) + ")");
  }
  const size_t num_rows = view.u32(12);
  const size_t expected = kHeaderBytes + num_rows * kRowBytes + view.u32(16) + kCrcBytes;
  if (bytes != expected) {
    return stale("is truncated or too long: " + std::to_string(bytes) + " bytes, expected " + std::to_string(expected));
  }
  if (view.u32(bytes - kCrcBytes) != crc32(data, bytes - kCrcBytes)) {
    return stale("is corrupt: the checksum does not match");
  }

  TuningTable made;
  made.granularity_ = view.u32(20);
  made.min_tokens_ = view.u32(24);
  made.hidden_size_ = view.u32(28);
  made.tp_size_ = view.u16(32);
  made.dtype_ = static_cast<TableDtype>(view.u8(34));
  TW_RETURN_IF_ERROR(check_range("granularity", made.granularity_, 16, 65536, 16));
  TW_RETURN_IF_ERROR(check_range("min_tokens", made.min_tokens_, 1, kMaxCount));
  TW_RETURN_IF_ERROR(check_range("hidden_size", made.hidden_size_, 1, kMaxCount));
  TW_RETURN_IF_ERROR(check_range("tp_size", made.tp_size_, 1, 1024));
  TW_RETURN_IF_ERROR(check_range("dtype", view.u8(34), 0, static_cast<uint32_t>(TableDtype::kBfloat16)));
  TW_RETURN_IF_ERROR(check_range("model_kind", view.u8(35), 0, 1));
  TW_RETURN_IF_ERROR(check_range("source", view.u8(36), 0, 2));
  made.rows_.resize(num_rows);
  for (size_t i = 0; i < num_rows; ++i) {
    TW_RETURN_IF_ERROR(read_row(view, kHeaderBytes + i * kRowBytes, "rows[" + std::to_string(i) + "]", &made.rows_[i]));
  }
  TW_RETURN_IF_ERROR(made.check_rows());
  *table = std::move(made);
  return {};
}

Status TuningTable::check_rows() const {
  for (size_t i = 0; i < rows_.size(); ++i) {
    const TableRow& row = rows_[i];
    const std::string name = "rows[" + std::to_string(i) + "]";
    if ((row.tokens.lo - 1) % granularity_ != 0 || (!row.tokens.unbounded() && row.tokens.hi % granularity_ != 0)) {
      return bad("has " + name + ".tokens off the granularity " + std::to_string(granularity_));
    }
    const uint32_t limit = (row.tokens.unbounded() ? kMaxCount : row.tokens.hi) / 2;
    if (row.weave ? row.split_offset >= limit : row.split_offset != 0) {
      return bad("has " + name + ".split_offset " + std::to_string(row.split_offset) + ", which can never split");
    }
    const auto same_steps = [&row](const TableRow& o) {
      return o.batch.overlaps(row.batch) && o.tokens.overlaps(row.tokens);
    };
    if (std::any_of(rows_.begin(), rows_.begin() + i, same_steps))
      return bad("has " + name + " overlapping an earlier row");
  }
  return {};
}

Status check_launch(const TableLaunch& launch) {
  const std::string found = misfit("launch", launch);
  return found.empty() ? Status{} : error(TW_INVALID_ARGUMENT, found);
}

StepPlan TuningTable::plan_step(int64_t batch, int64_t num_tokens) const {
  const int64_t sequences = std::max<int64_t>(batch, 1), tokens = std::max<int64_t>(num_tokens, 1);
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const TableRow& candidate) {
    return candidate.batch.contains(sequences) && candidate.tokens.contains(tokens);
  });
  StepPlan plan;
  plan.split = num_tokens;
  plan.from_row = row != rows_.end();
  if (num_tokens >= min_tokens_ && (!plan.from_row || row->weave)) {
    const int64_t rounded = (num_tokens + granularity_ - 1) / granularity_ * granularity_;
    plan.split = std::min<int64_t>(num_tokens, rounded / 2 + (plan.from_row ? row->split_offset : 0));
  }
  plan.weave = plan.split < num_tokens;
  if (plan.from_row) {
    plan.alone = !row->weave;
    plan.attention = row->attention;
    plan.mlp = row->mlp;
  }
  return plan;
}

}  // namespace tokenweave
