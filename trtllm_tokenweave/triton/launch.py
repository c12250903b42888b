"""One Triton server a rank, under one mpirun; only rank 0's can be reached from outside."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from trtllm_tokenweave.config import launch_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.first_end import FirstEnd
from trtllm_tokenweave.launch import (
    AUTO,
    SHARED_MEMORY,
    Job,
    MpiOptions,
    find_mpirun,
    find_program,
    mpirun_command,
    shown,
)
from trtllm_tokenweave.libraries import find_library
from trtllm_tokenweave.triton.repository import TritonModel, engine_ranks, read_repository

#: Where NVIDIA's containers keep the server.
CONTAINER_SERVER = "/opt/tritonserver/bin/tritonserver"

#: What a rank says when it cannot load a model, and when it takes the server down (triton/model.py).
_RANK_ERROR = re.compile(r"TritonModelException: (.+?)(?:\\n|$)|: error: (.+); the server is going down")

_PROBE_SECONDS = 1.0
#: How much longer than Triton's own limit for stopping the launcher waits.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """How the servers are started.

    Attributes:
        ranks: Servers, each on the GPU of its rank.
        repository: The model repository.
        tritonserver: The program; "": the one on PATH, else the container's.
        address: Where rank 0's ports listen.
        http_port: Port of HTTP.
        grpc_port: Port of gRPC.
        metrics_port: Port of the metrics.
        rank_models: Models that all ranks load; (): found by name and backend.
        arguments: More arguments of every server.
        preload: Library that the servers load first; None: ours, where a model needs it; AUTO: ours.
        use_preload: Whether one is loaded at all.
        ready_seconds: How long until rank 0 must be ready.
        stop_seconds: How long the servers may take to stop.
        mpi: How mpirun is called.
    """

    ranks: int
    repository: Path
    tritonserver: str = ""
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    rank_models: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    preload: Path | None = None
    use_preload: bool = True
    ready_seconds: float = 1200.0
    stop_seconds: float = 60.0
    mpi: MpiOptions = field(default_factory=MpiOptions)

    @property
    def ports(self) -> dict[str, int]:
        """Ports by what they are for."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


def server_command(options: ServerOptions, region: str) -> list[str]:
    """The mpirun command; everything that can be checked before is.

    Args:
        options: What to start.
        region: Beginning of the names of the servers' shared memory.

    Raises:
        UserError: a program, a library or a model is missing or wrong.
    """
    _check_different(options.ports)
    models = read_repository(options.repository)
    _check_ranks(options, models)
    server = _server(options.tritonserver)
    mpi = replace(options.mpi, mpirun=find_mpirun(options.mpi.mpirun), preload=_preload(options, models))
    shared = _rank_models(options, models)
    ranks = [_rank_command(rank, server, options, shared, region) for rank in range(options.ranks)]
    return mpirun_command(ranks, mpi)


def _rank_command(rank: int, server: str, options: ServerOptions, models: Sequence[str], region: str) -> list[str]:
    words = [server, f"--model-repository={options.repository.resolve()}", "--disable-auto-complete-config"]
    words.append(f"--exit-timeout-secs={max(1, round(options.stop_seconds))}")
    words.append(f"--backend-config=python,shm-region-prefix-name={region}{rank}_")
    if rank == 0:
        for name, port in options.ports.items():
            words += [f"--{name}-address={options.address}", f"--{name}-port={port}"]
    else:
        words += [f"--allow-{name}=false" for name in options.ports]
        words += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
    return [*words, *options.arguments]


def launch(options: ServerOptions, *, dry_run: bool = False) -> None:
    """Start the servers, say when they are ready, and wait for their end.

    Args:
        options: What to start.
        dry_run: Print the command and start nothing.

    Raises:
        UserError: see `server_command`; or a port is taken.
        TokenWeaveError: the servers were not ready in time, ended by themselves, or had to be killed.
    """
    region = f"tokenweave_{os.getpid()}_"
    command = server_command(options, region)
    if dry_run:
        print(shown(command))
        return
    for name, port in options.ports.items():
        _check_port(options.address, name, port)
    watch = _Watch(options)
    heard, first = _FirstError(), FirstEnd(_backend)

    def hear(line: str) -> None:
        heard(line)
        first.hear(line)

    job = Job(command, stop_seconds=options.stop_seconds + _GRACE_SECONDS, first_end=first)
    try:
        code = job.run(watch, hear)
    finally:
        # Servers that were killed leave the Python backend's.
        for left in SHARED_MEMORY.glob(f"{region}*"):
            left.unlink(missing_ok=True)
    # A server that is stopped while it starts dies of the signal; one that ends before it is ready has failed, whatever
    # its code.
    if code if watch.ready else not job.signal:
        when = "" if watch.ready else " before they were ready"
        who = f" (first {first})" if str(first) else ""
        why = f": {heard.text}" if heard.text else "; their last messages say why"
        raise TokenWeaveError(f"the servers ended with code {code}{when}{who}{why}")


def _backend(words: list[str]) -> str:
    """What a server's child is, where it runs a model of the Python backend."""
    return "the Python backend" if words[0].endswith("_stub") else ""


class _FirstError:
    """Keeps the first error of a rank; the others only follow from it."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, line: str) -> None:
        found = _RANK_ERROR.search(line)
        if found is not None and not self.text:
            self.text = found[1] or found[2]


class _Watch:
    """Looks whether rank 0 is ready, and says so once."""

    def __init__(self, options: ServerOptions) -> None:
        self.ready = False
        self._options = options
        self._began = time.monotonic()
        host = "127.0.0.1" if options.address == "0.0.0.0" else options.address
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{options.http_port}/v2/health/ready"

    def __call__(self) -> None:
        if self.ready:
            return
        seconds = time.monotonic() - self._began
        if _answers(self._url):
            self.ready = True
            places = ", ".join(f"{n} {self._options.address}:{port}" for n, port in self._options.ports.items())
            print(f"ready after {seconds:.0f} s: {places}", file=sys.stderr, flush=True)
        elif seconds > self._options.ready_seconds:
            raise TokenWeaveError(
                f"the servers were not ready within {self._options.ready_seconds:g} s (--ready-seconds)"
            )


def _answers(url: str) -> bool:
    # The server is this machine's: a proxy of the environment does not reach it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_PROBE_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _server(given: str) -> str:
    fix = "install Triton, or give its path as --tritonserver (build_scripts/fetch_sdk tritonserver fetches one)"
    if not given and shutil.which("tritonserver") is None and Path(CONTAINER_SERVER).exists():
        return CONTAINER_SERVER
    return find_program(given or "tritonserver", fix)


def _preload(options: ServerOptions, models: Sequence[TritonModel]) -> Path | None:
    """The library that gives TensorRT-LLM's runtime our plugins; other models load them themselves."""
    if not options.use_preload:
        return None
    path = options.preload
    if path is None and not any(model.on_all_ranks and model.backend != "python" for model in models):
        return None
    if path is None or path == AUTO:
        path = find_library("tokenweave_preload")
    if path is None or not path.is_file():
        raise UserError(
            "is not there, and without it TensorRT-LLM's runtime does not know the plugins of woven engines",
            where=str(path or "libtokenweave_preload.so"),
            fix="pip install . (README.md), give it as --preload, or say --no-preload for engines that are not woven",
        )
    return path.resolve()


def _rank_models(options: ServerOptions, models: Sequence[TritonModel]) -> list[str]:
    names = [model.name for model in models]
    unknown = next((name for name in options.rank_models if name not in names), None)
    if unknown is not None:
        raise UserError(f"{unknown!r} is not one of {', '.join(names)}", where="--rank-model")
    found = list(options.rank_models) or [model.name for model in models if model.on_all_ranks]
    if not found and options.ranks > 1:
        raise UserError(
            "it is not clear which model runs on all ranks",
            where=str(options.repository),
            fix="name it with --rank-model, or start one rank",
        )
    return found


def _check_ranks(options: ServerOptions, models: Sequence[TritonModel]) -> None:
    # TensorRT-LLM's orchestrator starts the other ranks by itself.
    if launch_environment().get("TRTLLM_ORCHESTRATOR") == "1":
        return
    for model in models:
        ranks = None if model.engine is None else engine_ranks(model.engine)
        if ranks not in (None, options.ranks):
            raise UserError(
                f"is built for {ranks} ranks, but {options.ranks} are to be started",
                where=f"{options.repository / model.name}: {model.engine}",
                fix=f"-n {ranks}",
            )


def _check_different(ports: Mapping[str, int]) -> None:
    for (one, port), (other, same) in combinations(ports.items(), 2):
        if port == same:
            raise UserError(f"is the --{one}-port too", where=f"--{other}-port {port}", fix="choose another")


def _check_port(address: str, name: str, port: int) -> None:
    with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UserError(
                f"cannot be used on {address}: {error.strerror}", where=f"--{name}-port {port}", fix="choose another"
            ) from error
