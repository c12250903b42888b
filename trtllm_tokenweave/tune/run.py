"""What `trtllm-tokenweave tune` does around the search: its arguments, its ranks, its engine and its files."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_tokenweave import __version__
from trtllm_tokenweave.agreement import gather_json, on_all_ranks
from trtllm_tokenweave.atomic import check_target, replace_file
from trtllm_tokenweave.bench.stack_network import Gemm, Stack
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.device import call, current_gpu, use_device
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.manifest import sha256
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.passes import WeaveOptions
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.progress import print_progress
from trtllm_tokenweave.table import MeasuredOn, TuningTable, save_table
from trtllm_tokenweave.table.files import read_json, read_text
from trtllm_tokenweave.table.measured import layer_gemms
from trtllm_tokenweave.table.shipped import MEASUREMENTS, choose_table, this_machine
from trtllm_tokenweave.tensorrt_module import tensorrt
from trtllm_tokenweave.tune.candidates import Launches, Space
from trtllm_tokenweave.tune.check import HELD_OUT, held_out, jitter
from trtllm_tokenweave.tune.engine import PREFIX_INPUT, GpuRunner, Mode, TuningEngine, steps_of
from trtllm_tokenweave.tune.measure import Run
from trtllm_tokenweave.tune.store import Record, load_record, partial_file
from trtllm_tokenweave.tune.tuner import TuneGoal, make_table, measurements, tune
from trtllm_tokenweave.waves import default_table, gemm_shapes, table_key


@dataclass(frozen=True)
class TuneArguments:
    """The command's options.

    Attributes:
        model: Name of the model shape or checkpoint.
        config: Its shape.
        layers: Decoder layers of the tuning engine.
        keys: Keys of its attention stand-in.
        counts: Token counts to tune.
        space: The candidates; its SMs are those of the GPU when it runs.
        gemm: Whose GEMMs the engine has.
        symmetric: Whether activations lie in symmetric memory.
        mode: Eager steps, or CUDA graphs.
        budget_seconds: See `TuneGoal`.
        exhaustive: See `TuneGoal`.
        output: The table to write; None: none is tuned.
        table: Table to check instead of a new one.
        check: Where to write the check at held-out counts.
        held_out: Its counts; none: those of `check.HELD_OUT` up to the last of ``counts`` that the table has rows for.
        jitter: Where to write even against tuned splits.
        jitter_counts: Its counts.
        restart: Throw away what an unfinished run has measured.
        timing_cache: Folder of TensorRT's timing caches, one a rank; None: that of what is written first.
    """

    model: str
    config: ModelConfig
    layers: int
    keys: int
    counts: tuple[int, ...]
    space: Space
    gemm: Gemm = "trt"
    symmetric: bool = True
    mode: Mode = "eager"
    budget_seconds: float = 285.0
    exhaustive: bool = False
    output: Path | None = None
    table: Path | None = None
    check: Path | None = None
    held_out: tuple[int, ...] = ()
    jitter: Path | None = None
    jitter_counts: tuple[int, ...] = ()
    restart: bool = False
    timing_cache: Path | None = None

    @property
    def outputs(self) -> tuple[Path, ...]:
        """What is to be written."""
        return tuple(path for path in (self.output, self.check, self.jitter) if path is not None)

    @property
    def cache_folder(self) -> Path:
        """Folder of the timing caches."""
        return self.timing_cache or self.outputs[0].parent

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of a step of the engine."""
        used = [*self.counts]
        used += self.held_out if self.check is not None else ()
        used += self.jitter_counts if self.jitter is not None else ()
        return max(used)


def run_tune(arguments: TuneArguments) -> dict[str, Any] | None:
    """Tune and check on the ranks that mpirun started; what was written on rank 0, None on the others.

    Raises:
        UserError: options that do not fit, or a machine that cannot do it.
        TokenWeaveError: on all ranks, where one fails.
    """
    started = time.monotonic()
    environment = read_environment()
    launcher = environment.needed_ranks("tune")
    environment.check_launch()
    arguments.config.local(launcher.size)
    for path in arguments.outputs:
        check_target(path)
    current_gpu()
    comm = MpiComm()
    use_device(comm.rank)
    plugin_library()
    register_reference("AllReduce")
    return _Session(arguments, comm, started).run()


class _Session:
    """One run of the command on one rank."""

    def __init__(self, arguments: TuneArguments, comm: CommBackend, started: float) -> None:
        self.arguments, self.comm, self.started = arguments, comm, started
        self.gpu = current_gpu()
        properties = call("cudaGetDeviceProperties", call("cudaGetDevice"))
        self.sms = int(properties.multiProcessorCount)
        self.shapes = gemm_shapes(arguments.config, comm.size)
        given = on_all_ranks(comm, "table", self._given_table)
        self.given = given
        self.space = replace(arguments.space, sms=self.sms, others=_launches(given))

    def _given_table(self) -> TuningTable | None:
        path, gemm = self.arguments.table, self.arguments.gemm
        if path is None:
            return None
        table = choose_table(self.arguments.config, self.comm.size, this_machine(), given=path).table
        if table.gemm != gemm:
            what = f"{path} was measured with other GEMMs than {gemm}"
            raise UserError(what, where="--gemm", fix=f"give --gemm {table.gemm}")
        return table

    def say(self, what: str) -> None:
        """Progress on stderr."""
        print_progress(time.monotonic() - self.started, what)

    def run(self) -> dict[str, Any] | None:
        """Build the engine, tune, check, write."""
        arguments, comm = self.arguments, self.comm
        record = self._record()
        if comm.rank == 0:
            self.say(f"building the tuning engine: {arguments.layers} layers, {len(self.space.launches)} launches")
        engine = self._engine()
        with GpuRunner(engine, comm, self._cache()) as runner:
            plugin_library().reset_counters()
            build_seconds = round(time.monotonic() - self.started, 1)
            if comm.rank == 0:
                self.say(f"built; {'; '.join(runner.checks)}")
            written: list[str] = []
            document: dict[str, Any] = {"build_seconds": build_seconds}
            table = self.given
            if arguments.output is not None and table is None:
                run = self._run(record, runner, partial_file(arguments.output))
                table = self._tune(run, partial(self._measured_on, engine, runner), document, arguments.output)
                written += [str(arguments.output), str(_beside(arguments.output))]
            if table is not None and arguments.check is not None:
                self._check(table, runner, document | self._spent(table), arguments.check)
                written.append(str(arguments.check))
            if table is not None and arguments.jitter is not None:
                self._jitter(table, runner, document, arguments.jitter)
                written.append(str(arguments.jitter))
            document["symmetric"] = runner.symmetric
        return {"written": written, **document} if comm.rank == 0 else None

    def _engine(self) -> TuningEngine:
        arguments, comm = self.arguments, self.comm
        config = arguments.config.model_copy(update={"num_hidden_layers": arguments.layers})
        space = self.space
        key = table_key(config, comm.size, gpu=self.gpu.name)
        options = WeaveOptions(
            Mapping(comm.size, comm.rank, comm.size),
            space.table(key),
            len(space.launches),
            arguments.max_num_tokens,
            gemm=arguments.gemm,
            prefix_input=PREFIX_INPUT,
        )
        rule = default_table(config, comm.size)
        stack = Stack(config, options, arguments.keys)
        return TuningEngine(stack, space, rule, arguments.gemm, arguments.symmetric, arguments.mode)

    def _cache(self) -> Path:
        """This rank's timing cache."""
        return self.arguments.cache_folder / f"tune_timing{self.comm.rank}.cache"

    def _key(self) -> dict[str, Any]:
        """What samples depend on."""
        arguments = self.arguments
        return {
            "gpu": self.gpu.name,
            "cuda_driver": self.gpu.driver,
            "tensorrt": str(tensorrt().__version__),
            "library": __version__,
            "tp_size": self.comm.size,
            "model": arguments.model,
            "dtype": arguments.config.dtype,
            "gemms": {name: list(shape) for name, shape in layer_gemms(self.shapes).items()},
            "layers": arguments.layers,
            "keys": arguments.keys,
            "token counts": list(arguments.counts),
            "steps a sample": [steps_of(n, arguments.layers) for n in arguments.counts],
            "max_num_tokens": arguments.max_num_tokens,
            "candidates": [str(c) for c in (self.space.ctas, self.space.alone, self.space.gemm_sms)],
            "gemm": arguments.gemm,
            "symmetric": arguments.symmetric,
            "mode": arguments.mode,
            "exhaustive": arguments.exhaustive,
        }

    def _record(self) -> Record:
        """The samples of an unfinished run: rank 0 reads them, all have them."""
        output, key = self.arguments.output, self._key()

        def read() -> str:
            if output is None or self.comm.rank != 0 or self.arguments.restart:
                return ""
            found = load_record(partial_file(output), key)
            if found is not None:
                if not self._cache().exists():
                    # Samples are of the kernels that an engine built from it has.
                    what, fix = "is gone, and with it the engine that was measured", "bring it back, or give --restart"
                    raise UserError(what, where=str(self._cache()), fix=fix)
                count = sum(len(m.ms) for b in found.buckets.values() for m in b.candidates.values())
                self.say(f"going on with {count} samples of {partial_file(output)}")
            return "" if found is None else found.model_dump_json()

        text = gather_json(self.comm, "samples", on_all_ranks(self.comm, "unfinished run", read))[0]
        return Record.model_validate_json(text) if text else Record(key=key)

    def _run(self, record: Record, runner: GpuRunner, file: Path | None) -> Run:
        say = self.say if self.comm.rank == 0 else _silent
        started = self.started if file is not None else time.monotonic()
        return Run(self.comm, runner, record, time.monotonic, started, file, say)

    def _measured_on(self, engine: TuningEngine, runner: GpuRunner) -> MeasuredOn:
        """Of a run that is over: only then is it known where collectives found their tensors."""
        arguments = self.arguments
        ranges = {name: [r.minimum, r.optimum, r.maximum] for name, r in engine.profile.items()}
        profiles = json.dumps(ranges, sort_keys=True).encode()
        hashes = {"profiles": sha256(profiles), "cache": sha256(self._cache().read_bytes())}
        shared = gather_json(self.comm, "hashes", hashes)[0]
        return MeasuredOn(
            gpu=self.gpu.name,
            sms=self.sms,
            cuda_driver=self.gpu.driver,
            tensorrt=str(tensorrt().__version__),
            library=__version__,
            model=arguments.model,
            tp_size=self.comm.size,
            layers=arguments.layers,
            gemms=layer_gemms(self.shapes),
            gemm=arguments.gemm,
            symmetric=runner.symmetric,
            mode=arguments.mode,
            max_num_tokens=arguments.max_num_tokens,
            opt_num_tokens=engine.opt_num_tokens,
            profiles_sha256=shared["profiles"],
            timing_cache_sha256=shared["cache"],
            date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        )

    def _tune(
        self, run: Run, measured_on: Callable[[], MeasuredOn], document: dict[str, Any], output: Path
    ) -> TuningTable:
        arguments, comm = self.arguments, self.comm
        key = table_key(arguments.config, comm.size, gpu=self.gpu.name)
        goal = TuneGoal(key, arguments.counts, self.space, self.shapes, arguments.budget_seconds, arguments.exhaustive)
        choices = tune(goal, run)
        seconds = run.elapsed()
        measured = measured_on()
        table = make_table(goal, choices, measured)
        document |= {"gpu_seconds": round(seconds, 1), "counters": plugin_library().counters()}

        def write() -> None:
            if comm.rank != 0:
                return
            beside = {
                "format_version": 1,
                "what": f"candidates of {output.name}: ms a step of {arguments.layers} decoder layers of "
                f"{arguments.model}, tp_size {comm.size}; at one clock (mhz; those of candidates: what they ran at)",
                "table_sha256": table.sha256,
                "command": _command(comm.size),
                "measured": measured.model_dump(mode="json"),
                **document,
                "mhz": run.record.mhz,
                "buckets": measurements(run, choices),
            }
            _write(_beside(output), beside)
            save_table(table, output)
            partial_file(output).unlink(missing_ok=True)

        on_all_ranks(comm, "writing the table", write)
        return table

    def _spent(self, table: TuningTable) -> dict[str, Any]:
        """Seconds that a given table took, from the file beside it."""

        def read() -> dict[str, Any]:
            path = self.arguments.table
            if path is None or not _beside(path).exists():
                return {}
            found = read_json(read_text(_beside(path)), str(_beside(path)))
            known = isinstance(found, dict) and found.get("table_sha256") == table.sha256
            return {name: found[name] for name in ("gpu_seconds",) if known and name in found}

        return on_all_ranks(self.comm, "file beside the table", read)

    def _check(self, table: TuningTable, runner: GpuRunner, document: dict[str, Any], output: Path) -> None:
        most = self.arguments.max_num_tokens
        usual = (n for n in HELD_OUT if n <= most and table.lookup(1, n).source == "table")
        counts = self.arguments.held_out or tuple(usual)
        if not counts:
            raise UserError("the table has a row for none of the usual counts", where="--held-out", fix="name some")
        what = "the table's choice, the best of an exhaustive sweep and fuse-only at token counts that were not tuned"
        head = self._head(what, table) | document
        self._write_rows(output, head, runner, "held_out", lambda run: held_out(table, self.space, run, counts))

    def _jitter(self, table: TuningTable, runner: GpuRunner, document: dict[str, Any], output: Path) -> None:
        head = self._head("even split, the table's choice and fuse-only", table) | document
        counts = self.arguments.jitter_counts
        self._write_rows(output, head, runner, "jitter", lambda run: jitter(table, self.space, run, counts))

    def _head(self, what: str, table: TuningTable) -> dict[str, Any]:
        arguments = self.arguments
        return {
            "what": f"{what}; ms a step of {arguments.layers} decoder layers of {arguments.model}, hidden "
            f"{arguments.config.hidden_size}, tp_size {self.comm.size}; medians of interleaved samples at one "
            "clock (mhz), slower rank",
            "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
            "command": _command(self.comm.size),
            "machine": {key: value for key, value in self._key().items() if key in _MACHINE},
            "table_sha256": table.sha256,
        }

    def _write_rows(self, output: Path, head: dict[str, Any], runner: GpuRunner, name: str, rows_of: RowsOf) -> None:
        """Measure rows, and write them after every one: a check that is cut short leaves what it has."""
        record, rows = Record(key={}), list[dict[str, Any]]()

        def write() -> None:
            if self.comm.rank == 0:
                _write(output, {**head, "symmetric": runner.symmetric, "mhz": record.mhz, name: rows})

        for row in rows_of(self._run(record, runner, None)):
            rows.append(row)
            on_all_ranks(self.comm, f"writing {output.name}", write)


#: Measures the rows of a result one by one.
RowsOf = Callable[[Run], Iterator[dict[str, Any]]]
_MACHINE = ("gpu", "cuda_driver", "tensorrt", "library", "tp_size", "gemm", "symmetric", "mode")


def _silent(_what: str) -> None:
    """Ranks other than 0 say nothing."""


def _beside(table: Path) -> Path:
    """The file with the samples of a table."""
    return table.with_name(table.stem + MEASUREMENTS)


def _launches(table: TuningTable | None) -> tuple[Launches, ...]:
    """The launch configurations of a table that is to be checked."""
    return () if table is None else tuple((row.mode, row.attention, row.mlp) for row in table.rows)


def _command(size: int) -> str:
    """How this program was started, without folders."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:] if word != "tune"]
    return " ".join(["mpirun -n", str(size), "trtllm-tokenweave tune", *words])


def _write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1) + "\n"
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))
