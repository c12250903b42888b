/// C interface of the TensorRT plugin library, beside the two functions that TensorRT itself looks for (getCreators and
/// setLoggerFinder). It follows the rules of tokenweave.h; any thread may call it at any time.
#pragma once

#include "tokenweave/tokenweave.h"

#ifdef __cplusplus
extern "C" {
#endif

/// What the plugins of this process queued since it started, or since twPluginResetCounters. CUDA graph replays run no
/// plugin: a graph counts once, when it is captured.
typedef struct TwPluginCounters {
  size_t struct_bytes;        ///< sizeof(TwPluginCounters) of the caller
  uint64_t overlapped;        ///< collectives put on the communication stream, beside the other half's compute
  uint64_t captured;          ///< how many of these were recorded into a CUDA graph
  uint64_t in_line;           ///< collectives put on the caller's stream, because the step has no other half
  uint64_t empty;             ///< halves without tokens
  uint64_t joins;             ///< StreamJoins that made the caller's stream wait
  uint64_t staged;            ///< collectives with a tensor outside symmetric memory: copied, unless they are pushed
  uint64_t alias_copies;      ///< outputs that TensorRT did not alias to their input: copied
  uint64_t unkept_inputs;     ///< tensors of a collective that its join does not keep alive: results may be wrong
  uint64_t fabric_fallbacks;  ///< collectives whose table asks for multimem, run over peer pointers
  uint64_t offset_fallbacks;  ///< collectives staged because the ranks' tensors lie at different offsets
  uint64_t refused_steps;     ///< steps that began while another context's step was under way
  uint64_t unfinished_steps;  ///< steps that ended before their last join, because something failed
  uint64_t while_building;    ///< calls of plugins in a build, which do nothing
} TwPluginCounters;

TW_API TwCode twPluginGetCounters(TwPluginCounters* counters, TwStatus* status);
TW_API void twPluginResetCounters(void);

/// The newest error of any plugin: its code, and its message in `*status`. TW_OK and an empty message: none so far. A
/// collective that gives up on the GPU is one, too, as soon as it is asked for here: ask after synchronising the step.
TW_API TwCode twPluginLastError(TwStatus* status);

/// How what runs beside the other half's work is launched; ranges as in a tuning table.
typedef struct TwPluginLaunch {
  size_t struct_bytes;  ///< sizeof(TwPluginLaunch) of the caller
  int32_t ctas;         ///< of a collective
  int32_t threads;      ///< of one of its CTAs
  int32_t gemm_sms;     ///< SMs that Gemm layers of ours keep to; 0: all
} TwPluginLaunch;

/// For experiments: from the next step on, split steps of every engine of this process are launched like this instead
/// of as their tables say; null: as the tables say. The split stays as it is, and steps in a captured CUDA graph stay
/// as they were. All ranks have to do it before the same step.
TW_API TwCode twPluginOverrideLaunch(const TwPluginLaunch* launch, TwStatus* status);

/// Collective. Symmetric memory of at least `bytes` for the one engine on `device` that has not run yet, to be an
/// execution context's device memory (createExecutionContext with kUSER_MANAGED, then setDeviceMemoryV2): collectives
/// then skip the copies through staging memory, if the ranks' tensors lie at equal offsets: the ranks compare them on
/// the host, before every layer's first collective. Call it after the contexts were created and before the first step.
/// It stays valid until the last of these contexts is destroyed.
TW_API TwCode twPluginTensorMemory(int32_t device, uint64_t bytes, void** data, TwStatus* status);

#ifdef __cplusplus
}  // extern "C"
#endif
