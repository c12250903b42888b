"""The places of TensorRT-LLM's build that are replaced while it runs.

``parallel_build`` and ``build_and_save`` of ``tensorrt_llm.commands.build`` are replaced in the process of the command.
What stands for ``build_and_save`` is handed to the processes of ``--workers`` by name and with its options, so it sets
the other two there as well: ``tensorrt_llm.builder.optimize`` (the network is complete) and ``Builder.build_engine``
(the last place before TensorRT).
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.trtllm import surface
from trtllm_tokenweave.trtllm.options import TokenWeaveOptions
from trtllm_tokenweave.trtllm.rank_build import RankBuild, Request, given_table
from trtllm_tokenweave.trtllm.record import check_ranks, make_record, save_record
from trtllm_tokenweave.trtllm.surface import TensorRtLlm

#: What `install` has replaced in this process, by name.
_REPLACED: dict[str, Callable[..., Any]] = {}


def install(library: TensorRtLlm, options: TokenWeaveOptions) -> None:
    """Weave all that ``tensorrt_llm.commands.build`` builds in this process from now on.

    The options of the first call stay: a command line's are there before a model class file's.

    Raises:
        UserError: the plugin library is not installed.
    """
    if _REPLACED:
        return
    if find_library("tokenweave_trt") is None:
        fix = "pip install . (README.md), or build it (plugins/README.md)"
        raise UserError("is not installed", where="libtokenweave_trt.so", fix=fix)
    module = library.build
    original = module.parallel_build

    @wraps(original)
    def parallel_build(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(original, args, kwargs)
        if options.table is not None:
            given_table(options.table, given["model_config"])  # an hour before the first rank needs it
        try:
            done = original(*args, **kwargs)
        except AssertionError as error:
            if not str(error).startswith("Engine building failed"):
                raise
            # Its way to say that a worker failed, and it has printed why.
            raise TokenWeaveError(f"TensorRT-LLM: {error}") from error
        if module.mpi_rank() == 0:
            check_ranks(Path(given["output_dir"]), given["model_config"].mapping.world_size)
        return done

    _REPLACED.update(parallel_build=original, build_and_save=module.build_and_save)
    module.parallel_build, module.build_and_save = parallel_build, partial(build_and_save, options)


def uninstall() -> None:
    """Undo `install`; nothing happens where it was not called."""
    while _REPLACED:
        setattr(surface.load().build, *_REPLACED.popitem())


def build_and_save(options: TokenWeaveOptions, *args: Any, **kwargs: Any) -> Any:
    """Build one rank's engine, woven, and record what was done; stands for TensorRT-LLM's function of this name.

    Args:
        options: How to weave.
        args: What TensorRT-LLM's function gets.
        kwargs: Likewise.

    Raises:
        UserError, TokenWeaveError: as `RankBuild`. Under mpirun all processes end instead.
    """
    try:
        library = surface.load()
        original = _REPLACED.get("build_and_save", library.build.build_and_save)
        given = _arguments(original, args, kwargs)
        request = Request(options, given["rank"], given["model_config"], given["build_config"], given["ckpt_dir"])
        return _build(library, request, Path(given["output_dir"]), partial(original, *args, **kwargs))
    except TokenWeaveError as error:
        _tell(error)
        raise


def _build(library: TensorRtLlm, request: Request, folder: Path, original: Callable[[], Any]) -> Any:
    build = RankBuild(request, library.network)
    with _hooked(library, build):
        done = original()
    if build.outcome is None:
        what = "TensorRT-LLM built an engine without calling optimize or build_engine, so nothing was woven"
        raise TokenWeaveError(f"rank {request.rank}: {what}")
    save_record(make_record(build.outcome, request.rank, library.version), folder)
    return done


@contextmanager
def _hooked(library: TensorRtLlm, build: RankBuild) -> Iterator[None]:
    """Weave the network of one build. None is held: its weights take as much memory as the engine."""
    builder = library.builder
    optimize, build_engine = builder.optimize, builder.Builder.build_engine

    @wraps(optimize)
    def optimize_and_weave(net: Any) -> Any:
        done = optimize(net)
        build.weave(net)
        return done

    @wraps(build_engine)
    def set_up_and_build(self: Any, network: Any, builder_config: Any, *args: Any, **kwargs: Any) -> Any:
        build.weave(network)  # of architectures that TensorRT-LLM does not optimise
        build.set_up(network, builder_config.trt_builder_config)
        return build_engine(self, network, builder_config, *args, **kwargs)

    builder.optimize, builder.Builder.build_engine = optimize_and_weave, set_up_and_build
    try:
        yield
    finally:
        builder.optimize, builder.Builder.build_engine = optimize, build_engine


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _tell(error: TokenWeaveError) -> None:
    """Print an error that would else be lost: of a worker, or of a process of mpirun, which then ends all of them."""
    build = sys.modules.get("tensorrt_llm.commands.build")
    ranks = build.mpi_world_size() if build is not None else 1
    if ranks > 1 or multiprocessing.parent_process() is not None:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if ranks > 1 and build is not None:
        # TensorRT-LLM would catch it, go on with this process's other ranks, and end with a code that may be 0.
        build.mpi_comm().Abort(2 if isinstance(error, UserError) else 1)
