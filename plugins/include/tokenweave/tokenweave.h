/// C interface of the TokenWeave kernel library.
///
/// Rules that hold for every function:
/// - Errors are values: the return code, and the same code with a message in `*status` when `status` is not null.
///   Nothing throws over this boundary, and nothing exits the process.
/// - "Collective" means: every rank of the group calls it, in the same order relative to other collective calls. A rank
///   that fails or does not come gives the others an error within the group's timeout, or twice that where rank 0 does
///   not come; it never leaves them hanging.
/// - A group may be used by one host thread at a time, and its kernels must not run concurrently with one another, nor
///   with those of its calls that CUDA graphs replay.
/// - Kernels wait on the GPU for those of the other ranks, and by default one may take every SM. Where a device serves
///   several groups, all ranks run their calls in one order: when each GPU starts with another group's, neither ends
///   before the timeout.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TW_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { TW_MAX_RANKS = 8, TW_MESSAGE_BYTES = 512 };

typedef enum TwCode {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1,  ///< The call can never work as written; nothing was queued.
  TW_UNSUPPORTED = 2,       ///< This device, driver or size cannot do it; nothing was queued.
  TW_OUT_OF_MEMORY = 3,
  TW_CUDA_ERROR = 4,
  TW_BOOTSTRAP_ERROR = 5,  ///< A rank did not come, or left, while the host sides talked.
  TW_RANKS_DISAGREE = 6,   ///< Ranks were given different configurations, or made different calls.
  TW_TIMEOUT = 7,          ///< A kernel gave up waiting for a rank. The group is dead: destroy it.
  TW_INTERNAL = 8,
} TwCode;

typedef struct TwStatus {
  TwCode code;
  char message[TW_MESSAGE_BYTES];  ///< Ends with 0; says what, where and how to fix it.
} TwStatus;

/// The numbers of nvinfer1::DataType.
typedef enum TwDataType { TW_FLOAT = 0, TW_HALF = 1, TW_BFLOAT16 = 7 } TwDataType;

/// How ranks reach one another.
typedef enum TwFabric {
  TW_FABRIC_AUTO = -1,           ///< multimem where the group has it, else peer
  TW_FABRIC_PEER = 0,            ///< peer pointers over NVLink or PCIe
  TW_FABRIC_MULTIMEM = 1,        ///< NVSwitch multicast
  TW_FABRIC_SOFT_MULTICAST = 2,  ///< peer pointers with the rounding of multimem, for tests
} TwFabric;

/// Who allocates, maps and frees symmetric memory.
typedef enum TwMemory {
  TW_MEMORY_CUDA = 0,  ///< this library, by the CUDA driver
  TW_MEMORY_NCCL = 1,  ///< NCCL
} TwMemory;

/// How a kernel moves rows: a matter of speed only.
typedef enum TwLoader {
  TW_LOADER_AUTO = -1,     ///< the fastest that the sizes and the device allow
  TW_LOADER_CP_ASYNC = 0,  ///< each thread its own vectors
  TW_LOADER_BULK = 1,      ///< the copy engine whole rows; peer fabric, compute capability 9.0 and later
  TW_LOADER_PUSH = 2,      ///< to the ranks that need them, without staging; peer fabric, two ranks or more, few tokens
} TwLoader;

typedef struct TwGroup TwGroup;

typedef struct TwGroupConfig {
  size_t struct_bytes;      ///< sizeof(TwGroupConfig) of the caller
  int32_t rank;             ///< of this process in the group; ignored in loopback
  int32_t size;             ///< ranks, 1 to TW_MAX_RANKS
  int32_t device;           ///< CUDA device ordinal
  int32_t loopback;         ///< not 0: all ranks are virtual and live on `device`, in this process
  int32_t allow_multicast;  ///< 0: never set NVSwitch multicast up
  uint32_t timeout_ms;      ///< of one wait for a rank, host or device; 0: TOKENWEAVE_TIMEOUT_MS, else 30000
  int32_t trap_on_fault;    ///< not 0: a kernel that gives up also kills its CUDA context, for hosts that never ask
  uint64_t tensor_bytes;    ///< symmetric memory that twGroupTensorMemory hands out, per rank
  uint64_t staging_bytes;   ///< symmetric memory for tensors that are not symmetric, per rank; see TwAllReduceRmsNorm
  uint64_t config_hash;     ///< of whatever must be equal on all ranks (hidden size, dtype, tables); compared
  const char*
      bootstrap;  ///< null: TOKENWEAVE_BOOTSTRAP, else MPI when it is initialised. "/path" or "@name", see README
  const int32_t* mpi_ranks;  ///< ranks of the group in MPI_COMM_WORLD; null: 0 to size - 1
} TwGroupConfig;

typedef struct TwGroupInfo {
  size_t struct_bytes;              ///< sizeof(TwGroupInfo) of the caller
  int32_t rank, size, local_ranks;  ///< local_ranks: virtual ranks in this process, 1 unless loopback
  int32_t max_ctas;
  TwFabric fabric;                          ///< what TW_FABRIC_AUTO means here
  char multicast_reason[TW_MESSAGE_BYTES];  ///< why multimem is not used; empty when it is
  TwMemory memory;
  char memory_reason[TW_MESSAGE_BYTES];  ///< why it is not NCCL's though TOKENWEAVE_SYMMETRIC_MEMORY asks; else empty
} TwGroupInfo;

/// A tensor in device memory, row-major, 16-byte aligned.
typedef struct TwAllReduceRmsNormTensors {
  const void* input;     ///< [num_tokens, hidden]: this rank's addend
  const void* residual;  ///< [num_tokens, hidden], or this rank's rows when residual_sharded
  void* normed;          ///< [num_tokens, hidden]
  void* residual_out;    ///< this rank's rows, or [num_tokens, hidden] when gather_residual
} TwAllReduceRmsNormTensors;

/// normed = RMSNorm(sum over ranks of input + bias + residual) * norm_weight, on every rank.
///
/// The sum is taken in fp32 in rank order (multimem: in the switch, rounded to the dtype), bias and residual are added
/// in fp32, and the result is rounded to the dtype: residual_out. That rounded value is divided by sqrt(mean square +
/// eps) in fp32, multiplied by norm_weight in fp32 and rounded.
///
/// Rank r owns tokens [r * R, (r + 1) * R) with R = ceil(num_tokens / size), as far as they exist: a sharded tensor has
/// R rows and holds these, rows past them are undefined.
///
/// input, normed, and a gathered residual_out, may each lie in the group's tensor memory (at the same offset on all
/// ranks) or anywhere else; the kernel then copies through the group's staging memory. Where some ranks' tensors lie at
/// other offsets, or elsewhere, all ranks say `staged`; twGroupAllGather can tell. normed may be input.
/// residual_out may be residual when both are sharded or both are whole.
typedef struct TwAllReduceRmsNorm {
  size_t struct_bytes;       ///< sizeof(TwAllReduceRmsNorm) of the caller
  TwDataType dtype;          ///< of all tensors
  int32_t num_tokens;        ///< equal on all ranks; 0 does nothing
  int32_t hidden;            ///< a multiple of 8, up to 16384
  int32_t residual_sharded;  ///< residual holds this rank's rows only
  int32_t gather_residual;   ///< residual_out gets all rows
  int32_t staged;            ///< copy through staging memory wherever the tensors lie
  float eps;
  const void* norm_weight;  ///< [hidden]
  const void* bias;         ///< [hidden] or null
} TwAllReduceRmsNorm;

typedef struct TwLaunchConfig {
  size_t struct_bytes;  ///< sizeof(TwLaunchConfig) of the caller
  TwFabric fabric;
  TwLoader loader;
  int32_t ctas;             ///< 0: the default; equal on all ranks
  int32_t threads;          ///< at most this many a CTA; 0: the default
  int32_t cluster_size;     ///< CTAs that the hardware places together, a divisor of ctas; 0: the default; 1: none
  void* launch_completion;  ///< cudaEvent_t that fires when all CTAs have started, or null
} TwLaunchConfig;

/// "major.minor.patch". Any thread, any time.
TW_API const char* twVersion(void);

/// Collective (but in loopback). Makes the group's symmetric memory and compares size, library version and config_hash
/// over ranks. On failure on any rank all ranks get an error that names it, nothing is kept, and *group is null. Only
/// a process that can load no driver waits for nobody: TW_UNSUPPORTED at once.
TW_API TwCode twGroupCreate(const TwGroupConfig* config, TwGroup** group, TwStatus* status);

/// Collective. Waits for the device and then, for at most the timeout, for the other ranks, so that no rank unmaps
/// memory that another still reads. Always frees this rank's share (NCCL's memory not when the device is lost);
/// `group` null does nothing. The status is advisory.
TW_API TwCode twGroupDestroy(TwGroup* group, TwStatus* status);

/// Any time after creation. Fills `info` but for its struct_bytes.
TW_API TwCode twGroupGetInfo(const TwGroup* group, TwGroupInfo* info, TwStatus* status);

/// The tensor memory of a rank, as this process's device addresses it. Valid until twGroupDestroy. Its bytes start out
/// as 0.
TW_API TwCode twGroupTensorMemory(const TwGroup* group, int32_t rank, void** data, size_t* bytes, TwStatus* status);

/// Collective, on the host. Hands `bytes` of every rank to all of them, in the order of ranks: `all` has room for size
/// * bytes. Waits for the other ranks, for rank 0 for up to twice the timeout; once it has failed on a rank, it fails
/// for good. In loopback all virtual ranks say the same.
TW_API TwCode twGroupAllGather(TwGroup* group, const void* mine, void* all, size_t bytes, TwStatus* status);

/// Whether any kernel of this group gave up so far: TW_OK, TW_TIMEOUT or TW_RANKS_DISAGREE with rank, peer and what was
/// seen. Does not wait; call it after synchronising a stream to learn about the work queued there.
TW_API TwCode twGroupCheck(const TwGroup* group, TwStatus* status);

/// Collective. Queues the operation on `stream` (a cudaStream_t of the group's device); may be captured into a graph.
/// `tensors` has one entry, or one per virtual rank in loopback; `launch` null means all defaults.
/// Returns TW_TIMEOUT or TW_RANKS_DISAGREE, and queues nothing, once twGroupCheck would. A call that gives up later, on
/// the device, fills the rows of every CTA that gave up with NaN; kernels queued behind it do so at once.
TW_API TwCode twAllReduceRmsNorm(TwGroup* group, const TwAllReduceRmsNorm* op, const TwAllReduceRmsNormTensors* tensors,
                                 const TwLaunchConfig* launch, void* stream, TwStatus* status);

#ifdef __cplusplus
}  // extern "C"
#endif
