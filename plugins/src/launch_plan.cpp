#include "launch_plan.h"

#include <algorithm>
#include <string>

namespace tokenweave {
namespace {

// Defaults where no table names a number. Measured on 2 H200 over NVLink: every SM for peer pointers, but the end
// barrier of many CTAs costs more than they gain while a CTA has no more than a row or two. Multicast: the paper's
// upper end.
constexpr int kFewRows = 128;
constexpr int kCtasForFewRows = 64;
constexpr int kMultimemCtas = 16;
// The same measurement: the copy engine wins while CTAs are few or have a row or two each, else whole rows in flight on
// all SMs end together and leave the link idle between the loads and the stores (57.7 against 59.3 us at 1024 tokens).
constexpr int kBulkCtas = 48;
constexpr int kBulkRowsPerCta = 2;
// docs/results/loopback_h200.json: few CTAs whose shared memory holds one row of all ranks only load nothing while that
// row is summed; then threads that load for themselves are faster.
constexpr int kBulkRows = 2;
// docs/results/kernel_variants_tp2.json, hidden 8192 in 16 bits: pushing wins with a CTA for each own row and at least
// 64 (13.1 against 13.6 us at 64 tokens, 15.2 against 15.5 at 128, 20.9 against 21.1 at 256), and loses with two rows a
// CTA (22.1 us at 256 tokens) or 16 CTAs (17.4 us at 64). More than 64 CTAs are for more rows only (15.7 us with 132 at
// 128 tokens). Fewer than 64 tokens, other sizes and more ranks were not measured.
constexpr int kPushCtas = 64;

int free_sms(const LaunchRequest& request, const DeviceLimits& limits) {
  return request.loopback ? limits.sm_count / request.size : limits.sm_count;
}

int default_ctas(const LaunchRequest& request, const DeviceLimits& limits, Loader loader) {
  const int sms = free_sms(request, limits);
  const int rows = request.rows_per_rank;
  int ctas = std::min(sms, kMaxCtas);
  if (loader == Loader::kPush) {
    if (rows <= kPushCtas) ctas = std::min(ctas, kPushCtas);  // without own rows they empty the mailbox
  } else {
    ctas = std::min(ctas, rows <= kFewRows ? std::min(rows, kCtasForFewRows) : rows);
    if (request.fabric == Fabric::kMultimem) ctas = std::min(ctas, kMultimemCtas);
  }
  const int cluster = std::max(request.cluster_size, 1);
  return std::max(ctas / cluster * cluster, cluster);
}

/// Pairs share what two SMs of one TPC share and so leave whole TPCs to others; 226 -> 217 us with 16 CTAs at 4096
/// tokens.
int default_cluster(const LaunchRequest& request, const DeviceLimits& limits, int ctas) {
  return limits.compute_capability >= 90 && !request.loopback && ctas % 2 == 0 ? 2 : 1;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

int threads_per_row(int vectors_per_row, int vectors_per_thread = kVectorsPerThread) {
  return ceil_div(vectors_per_row, vectors_per_thread * 32) * 32;
}

size_t dynamic_shared_bytes(const DeviceLimits& limits) {
  return limits.shared_bytes > kStaticSharedBytes ? limits.shared_bytes - kStaticSharedBytes : 0;
}

size_t row_bytes(const LaunchRequest& request) { return size_t{16} * request.vectors_per_row; }

/// Whether the mailbox holds what a rank receives in one call: parts, results, residuals.
bool push_possible(const LaunchRequest& request) {
  const size_t rows = size_t(request.size - 1) * request.rows_per_rank * (request.gather_residual ? 3 : 2);
  return request.fabric == Fabric::kPeer && request.size > 1 && rows * row_bytes(request) <= kMailboxTurnBytes &&
         threads_per_row(request.vectors_per_row) <= push_threads(request.size);
}

bool push_is_fastest(const LaunchRequest& request, const DeviceLimits& limits) {
  const int most_ctas = request.ctas != 0 ? request.ctas : free_sms(request, limits);
  return push_possible(request) && most_ctas >= std::max(kPushCtas, request.rows_per_rank);
}

}  // namespace

Status plan_launch(const LaunchRequest& request, const DeviceLimits& limits, LaunchPlan* plan) {
  if (request.ctas < 0 || request.ctas > kMaxCtas) {
    return error(TW_INVALID_ARGUMENT,
                 "ctas is " + std::to_string(request.ctas) + ", not 0 to " + std::to_string(kMaxCtas));
  }
  if (request.ctas > limits.sm_count) {
    return error(TW_UNSUPPORTED, "ctas is " + std::to_string(request.ctas) + " and the device has " +
                                     std::to_string(limits.sm_count) +
                                     " SMs: CTAs that wait for other ranks must be able to run at once");
  }
  if (request.cluster_size < 0 || request.cluster_size > 8 ||
      (request.cluster_size > 1 && request.ctas % request.cluster_size != 0)) {
    return error(TW_INVALID_ARGUMENT, "cluster_size " + std::to_string(request.cluster_size) +
                                          " is not 0 to 8 or does not divide ctas " + std::to_string(request.ctas));
  }
  if (request.cluster_size > 1 && (limits.compute_capability < 90 || request.loopback)) {
    return error(TW_UNSUPPORTED, "clusters need compute capability 9.0 and no loopback");
  }
  if (request.fabric == Fabric::kMultimem && limits.compute_capability < 90) {
    return error(TW_UNSUPPORTED, "multimem needs compute capability 9.0. Fix: use the peer fabric");
  }
  plan->ctas = request.ctas != 0 ? request.ctas : default_ctas(request, limits, request.kernel.loader);
  plan->cluster_size = request.cluster_size != 0 ? request.cluster_size : default_cluster(request, limits, plan->ctas);
  if (request.loopback && plan->ctas * request.size > limits.sm_count) {
    return error(TW_UNSUPPORTED, "loopback needs all CTAs of all ranks at once, and the device has " +
                                     std::to_string(limits.sm_count) + " SMs. Fix: at most " +
                                     std::to_string(limits.sm_count / request.size) + " ctas");
  }

  const int most_threads = request.kernel.max_threads;
  const int threads = request.threads == 0 ? most_threads : std::min(request.threads, most_threads);
  const int rows_per_cta = ceil_div(request.rows_per_rank, plan->ctas);
  if (request.kernel.loader == Loader::kPush) {
    // A vector a thread while there are threads: latency is all that counts.
    plan->teams = 1;
    plan->team_threads = std::min(threads / 32 * 32, threads_per_row(request.vectors_per_row, 1));
    if (plan->team_threads < threads_per_row(request.vectors_per_row)) {
      return error(TW_INVALID_ARGUMENT, "one row needs " + std::to_string(threads_per_row(request.vectors_per_row)) +
                                            " threads; allowed are " + std::to_string(threads));
    }
    return {};
  }

  const bool bulk = request.kernel.loader == Loader::kBulk;
  plan->team_threads = threads_per_row(request.vectors_per_row);
  const size_t shared = dynamic_shared_bytes(limits);
  // What one team needs: a vector of each source per thread, or a stage of whole rows.
  const size_t unit = request.kernel.sources * (bulk ? row_bytes(request) : size_t{16} * plan->team_threads);
  const int units = static_cast<int>(shared / unit);
  const int fitting = std::min({threads / plan->team_threads, units, kMaxTeams});
  if (fitting < 1) {
    return error(request.threads == 0 ? TW_UNSUPPORTED : TW_INVALID_ARGUMENT,
                 "one row needs " + std::to_string(plan->team_threads) + " threads and " + std::to_string(unit) +
                     " bytes of shared memory; allowed are " + std::to_string(threads) + " and " +
                     std::to_string(shared));
  }
  // Teams without a row would only wait.
  plan->teams = std::clamp(rows_per_cta, 1, fitting);
  plan->stage_bits = 0;
  while (bulk && (2 << plan->stage_bits) <= std::min(units / plan->teams, kMaxStages)) ++plan->stage_bits;
  plan->shared_bytes = (unit * plan->teams) << plan->stage_bits;
  return {};
}

Status pick_loader(const LaunchRequest& request, const KernelEntry& bulk, const DeviceLimits& limits, TwLoader wanted,
                   Loader* loader) {
  const bool possible = request.fabric == Fabric::kPeer && limits.compute_capability >= 90 &&
                        threads_per_row(request.vectors_per_row) <= bulk.max_threads &&
                        bulk.sources * row_bytes(request) <= dynamic_shared_bytes(limits);
  if (wanted < TW_LOADER_AUTO || wanted > TW_LOADER_PUSH) {
    return error(TW_INVALID_ARGUMENT, "unknown loader " + std::to_string(wanted));
  }
  if (wanted == TW_LOADER_PUSH && !push_possible(request)) {
    return error(TW_UNSUPPORTED,
                 "the push loader needs the peer fabric, two ranks or more, rows that its threads can hold, and tokens "
                 "of which a rank receives at most " +
                     std::to_string(kMailboxTurnBytes) + " bytes. Fix: TW_LOADER_AUTO");
  }
  if (wanted == TW_LOADER_PUSH || (wanted == TW_LOADER_AUTO && push_is_fastest(request, limits))) {
    *loader = Loader::kPush;
    return {};
  }
  if (wanted == TW_LOADER_BULK && !possible) {
    return error(TW_UNSUPPORTED,
                 "the bulk loader needs the peer fabric, compute capability 9.0 and room for a row of all "
                 "ranks in shared memory. Fix: TW_LOADER_AUTO");
  }
  const int ctas = request.ctas != 0 ? request.ctas : default_ctas(request, limits, Loader::kBulk);
  const bool overlaps = kBulkRows * bulk.sources * row_bytes(request) <= dynamic_shared_bytes(limits);
  const bool faster = (ctas <= kBulkCtas && overlaps) || request.rows_per_rank <= kBulkRowsPerCta * ctas;
  *loader =
      wanted == TW_LOADER_BULK || (wanted == TW_LOADER_AUTO && possible && faster) ? Loader::kBulk : Loader::kCpAsync;
  return {};
}

}  // namespace tokenweave
