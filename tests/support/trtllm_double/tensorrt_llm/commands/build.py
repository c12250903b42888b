from __future__ import annotations

import argparse
import copy
import os
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .. import builder
from .._strict import seal
from ..builder import BuildConfig
from ..models import MODEL_MAP, PretrainedConfig

#: Flags of trtllm-build 1.2: with one value, with several, and without.
_VALUES = """
    checkpoint_dir model_config build_config model_cls_file model_cls_name output_dir max_batch_size max_input_len
    max_seq_len max_beam_width max_num_tokens opt_num_tokens max_encoder_input_len max_prompt_embedding_table_size
    kv_cache_type paged_kv_cache input_timing_cache output_timing_cache profiling_verbosity workers log_level
    visualize_network logits_dtype lora_ckpt_source max_lora_rank speculative_decoding_mode max_draft_len
    bert_attention_plugin gpt_attention_plugin gemm_plugin gemm_swiglu_plugin fp8_rowwise_gemm_plugin lora_plugin
    dora_plugin moe_plugin mamba_conv1d_plugin nccl_plugin low_latency_gemm_plugin low_latency_gemm_swiglu_plugin
    gemm_allreduce_plugin context_fmha bert_context_fmha_fp32_acc remove_input_padding tokens_per_block
    use_paged_context_fmha use_fp8_context_fmha fuse_fp4_quant multiple_profiles paged_state streamingllm
    norm_quant_fusion reduce_fusion user_buffer use_fused_mlp pp_reduce_scatter
"""
_LISTS = "lora_dir lora_target_modules"
_SWITCHES = """
    strip_plan weight_sparsity weight_streaming fast_build enable_debug_output dry_run monitor_memory
    gather_context_logits gather_generation_logits gather_all_token_logits
"""
_DEFAULTS: dict[str, Any] = {
    "output_dir": "engine_outputs",
    "max_batch_size": 8,
    "max_seq_len": 96,
    "max_beam_width": 1,
    "max_draft_len": 0,
    "max_num_tokens": 96,
    "workers": 1,
    "reduce_fusion": "disable",
    "multiple_profiles": "disable",
    "remove_input_padding": "enable",
}


def mpi_world_size() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def mpi_rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def mpi_comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def build_and_save(
    rank: int,
    gpu_id: int,
    ckpt_dir: str | None,
    build_config: BuildConfig,
    output_dir: str,
    log_level: str,
    model_config: PretrainedConfig,
    model_cls: Any,
    **kwargs: Any,
) -> bool:
    rank_config = copy.deepcopy(model_config)
    rank_config.mapping._double_rank = rank
    cls = MODEL_MAP[model_config.architecture] if model_cls is None else model_cls
    model = cls(rank_config) if ckpt_dir is None else cls.from_checkpoint(ckpt_dir, config=rank_config)
    builder._build(model, build_config).double_save(Path(output_dir))
    return True


def parallel_build(
    model_config: PretrainedConfig,
    ckpt_dir: str | None,
    build_config: BuildConfig,
    output_dir: str,
    workers: int = 1,
    log_level: str = "info",
    model_cls: Any = None,
    **kwargs: Any,
) -> None:
    world_size, failed = model_config.mapping.world_size, False
    given = (ckpt_dir, build_config, output_dir, log_level, model_config, model_cls)
    if mpi_world_size() > 1:
        for rank in range(mpi_rank(), world_size, mpi_world_size()):
            try:
                build_and_save(rank, 0, *given, **kwargs)
            except Exception:  # noqa: BLE001 - as TensorRT-LLM does
                traceback.print_exc()
                failed = True
        mpi_comm().Barrier()
        if failed:
            mpi_comm().Abort()
    elif workers == 1:
        for rank in range(world_size):
            assert build_and_save(rank, 0, *given, **kwargs), "Engine building failed, please check error log."
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=workers) as pool:
            futures = [pool.submit(build_and_save, r, r % workers, *given, **kwargs) for r in range(world_size)]
            for future in as_completed(futures):
                try:
                    future.result()
                except Exception:  # noqa: BLE001 - as TensorRT-LLM does
                    traceback.print_exc()
                    failed = True
            assert not failed, "Engine building failed, please check error log."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in _VALUES.split():
        default = _DEFAULTS.get(name)
        kind = int if isinstance(default, int) or name == "opt_num_tokens" else str
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in _LISTS.split():
        parser.add_argument(f"--{name}", nargs="+")
    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def main() -> None:
    args = _parser().parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    model_cls = None
    if args.model_cls_file is not None:
        assert args.model_cls_name is not None
        module = SourceFileLoader("models", args.model_cls_file).load_module()
        model_cls = getattr(module, args.model_cls_name)
    model_config = PretrainedConfig._double_read(Path(args.checkpoint_dir) / "config.json")
    own = ("opt_num_tokens", "max_beam_width", "max_draft_len")
    others = {name: value for name, value in vars(args).items() if name not in own}
    build_config = BuildConfig(args.opt_num_tokens, args.max_beam_width, args.max_draft_len, others)
    parallel_build(
        model_config, args.checkpoint_dir, build_config, args.output_dir, args.workers, args.log_level, model_cls
    )


seal(__name__)

if __name__ == "__main__":
    main()
