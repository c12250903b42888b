// What the host hands to the fused kernel, and what the kernel hands back. Read by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenweave {

constexpr int kMaxRanks = 8;
constexpr int kMaxCtas = 256;
/// 16-byte vectors of one row that a thread keeps in registers.
constexpr int kVectorsPerThread = 4;
constexpr int kMaxHidden = 16384;
constexpr int kMostThreads = 1024;  // of a CTA; a kernel may allow fewer
/// Rows that the bulk loader has in flight for one team; a power of two.
constexpr int kMaxStages = 4;
/// Of the push loader, by the number of ranks, for more ranks need more registers.
constexpr int push_threads(int size) { return size == 2 ? kMostThreads : 768; }
/// Named barriers 1 to 15 serve the teams of a CTA; barrier 0 is __syncthreads.
constexpr int kMaxTeams = 15;

enum class DataType : int32_t { kFloat = 0, kHalf = 1, kBfloat16 = 7 };  // the numbers of nvinfer1::DataType

/// How a rank reads and writes the others' rows.
enum class Fabric : int32_t {
  kPeer = 0,           ///< peer pointers; the rank sum is kept in fp32
  kMultimem = 1,       ///< NVSwitch multicast; the switch rounds the rank sum to the dtype
  kSoftMulticast = 2,  ///< peer pointers with the switch's rounding: checks the arithmetic of kMultimem without it
};

/// How a kernel moves rows.
enum class Loader : int32_t {
  kCpAsync = 0,  ///< each thread its own vectors; every device and size
  kBulk = 1,     ///< the copy engine whole rows; from sm_90 on, where a row of all ranks fits
  kPush = 2,     ///< each rank stores its part of a row in its owner's mailbox; every device, few tokens
};

/// Where the two cross-rank barriers of one call stand.
enum class Phase : int32_t { kStart = 0, kEnd = 1 };

/// What a rank knows of its mailbox, see push.cuh; touched by its owner only.
struct MailboxState {
  uint32_t turn;          ///< of the next call, below kMailboxTurns
  uint32_t readers;       ///< CTAs of this call that have read the rest of this
  uint32_t last_vectors;  ///< 16-byte vectors that the last call received at most
};

/// The head of every rank's symmetric buffer. A signal is {epoch, signature of the call} in one 64-bit word.
struct SignalPad {
  uint64_t signals[kMaxCtas][kMaxRanks];  ///< [CTA][sender]; written by the sender, polled by the owner of the pad
  uint32_t epochs[kMaxCtas];              ///< last epoch that each CTA of the owner used; touched by the owner only
  MailboxState mailbox;
};
constexpr size_t kSignalPadBytes = 32768;
static_assert(sizeof(SignalPad) <= kSignalPadBytes);
/// After it comes the mailbox, for kMailboxTurns calls in turn. Its bytes start out as 0xff.
constexpr int kMailboxTurns = 3;
/// What a rank receives at most in one call: 256 tokens of hidden size 8192 in 16 bits with two ranks, as far as the
/// push loader is the fastest.
constexpr size_t kMailboxTurnBytes = 4 << 20;
constexpr size_t kMailboxBytes = kMailboxTurns * kMailboxTurnBytes;
/// Tensors start here.
constexpr size_t kTensorOffset = kSignalPadBytes + kMailboxBytes;

enum class FaultCode : uint32_t { kNone = 0, kTimeout = 1, kRanksDisagree = 2 };

/// Host-mapped; the first CTA that gives up fills it, `code` last.
struct FaultRecord {
  FaultCode code;
  int32_t rank, peer, cta;
  Phase phase;
  uint32_t expected, seen;                      ///< epochs
  uint32_t expected_signature, seen_signature;  ///< of the call
};

/// A tensor in symmetric memory: the address of token 0 in each rank's buffer, and in all of them at once.
struct SymmetricTensor {
  uint8_t* of_rank[kMaxRanks];
  uint8_t* multicast;  ///< kMultimem only
};

/// The tensors of one rank that lives on this device, by token: where a tensor holds only the rank's own tokens, the
/// pointer is moved back by the tokens before them.
struct LocalTensors {
  const uint8_t* input;
  const uint8_t* residual;
  uint8_t* normed;
  uint8_t* residual_out;
};

struct KernelArgs {
  SignalPad* pads[kMaxRanks];
  SymmetricTensor input;
  SymmetricTensor normed;
  SymmetricTensor residual_out;   ///< used when gather_residual
  LocalTensors local[kMaxRanks];  ///< entry 0, or one per virtual rank in loopback
  const uint8_t* norm_weight;
  const uint8_t* bias;  ///< or null

  int32_t rank;           ///< of blockIdx.y == 0
  int32_t size;           ///< tensor-parallel ranks
  int32_t num_tokens;     ///< rows over all ranks
  int32_t rows_per_rank;  ///< ceil(num_tokens / size)
  int32_t vectors_per_row;
  int32_t stage_bits;  ///< of the bulk loader: 1 << stage_bits rows are in flight for a team
  float eps;
  float inverse_hidden;

  bool gather_residual;  ///< every rank gets all rows of residual_out, not only its own
  bool stage_input;      ///< local.input is not symmetric: the kernel copies it to `input`
  bool stage_normed;     ///< local.normed is not symmetric: the kernel copies the others' rows from `normed`
  bool stage_residual;   ///< the same for residual_out
  bool trap_on_fault;

  uint32_t signature;    ///< equal on all ranks, or the ranks do not make the same call
  uint64_t timeout_ns;   ///< of one wait
  uint32_t* fault_flag;  ///< device memory; not 0 once any CTA of this process gave up
  FaultRecord* fault;
};

/// One compiled kernel. It takes shared memory for `sources` vectors a thread, or with the bulk loader for `sources`
/// rows a stage and team.
struct KernelEntry {
  const void* function;
  Loader loader;
  int sources;
  int max_threads;  ///< of a CTA
};

/// Null function where no kernel exists for the combination.
KernelEntry find_kernel(DataType dtype, Fabric fabric, Loader loader, int size);

}  // namespace tokenweave
