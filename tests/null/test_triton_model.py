"""The model of Triton's Python backend, with a double of the module that Triton gives it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.runner import GenerationLimits, Produced

SECONDS = 60.0


class TritonModelException(Exception):  # noqa: N818  (Triton's name)
    pass


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE = "invalid", "unavailable"


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self.array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self.array


class Sender:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.final = threading.Event()

    def send(self, response: Any, flags: int) -> None:
        assert not self.final.is_set()
        self.sent.append(response)
        if flags:
            self.final.set()

    def is_cancelled(self) -> bool:
        return False

    def texts(self) -> list[str]:
        assert self.final.wait(SECONDS)
        return [response.outputs["text_output"] for response in self.sent]

    def error(self) -> tuple[str, str]:
        assert self.final.wait(SECONDS)
        message, code = self.sent[-1].error.args
        return message, code


class Generator:
    """Says one letter a step: a, b, c, ... Each step does what the test wants first."""

    limits = GenerationLimits()

    def __init__(self, before_step: Callable[[], None]) -> None:
        self.before_step = before_step
        self.left: dict[int, int] = {}
        self.submitted = 0

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def submit(self, prompt: Any, most: int) -> int:
        if len(prompt) > 5:
            raise UserError("is too long", where="sequence 0", fix="shorten it")
        self.left[self.submitted] = most
        self.submitted += 1
        return self.submitted - 1

    def cancel(self, number: int) -> None:
        self.left.pop(number, None)

    def step(self) -> list[Produced]:
        if self.left:
            self.before_step()
        said = []
        for number, left in list(self.left.items()):
            self.left[number] -= 1
            said.append(Produced(number, ord("a") + left % 26, "length" if left == 1 else ""))
            if left == 1:
                del self.left[number]
        return said


class Bytes:
    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        assert add_bos  # there is no chat template
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def _response(outputs: list[Tensor] | None = None, error: Any = None) -> Any:
    values = {tensor.name(): tensor.array.item().decode() for tensor in outputs or []}
    return SimpleNamespace(outputs=values, error=error)


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    double = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=TritonModelException,
        TritonError=TritonError,
        Tensor=Tensor,
        InferenceResponse=_response,
        using_decoupled_model_transaction_policy=lambda configuration: configuration["decoupled"],
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", double)
    names = ("trtllm_tokenweave.triton.metrics", "trtllm_tokenweave.triton.model")
    for name in names:
        sys.modules.pop(name, None)
    module = importlib.import_module(names[1])
    monkeypatch.setattr(module, "Metrics", lambda _name: SimpleNamespace(update=lambda _counts: None, close=list))
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.01)
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(module, "_MARGIN_SECONDS", 0.01)
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def _start(
    module: Any, before_step: Callable[[], None] = lambda: None, *, decoupled: bool = True, **parameters: str
) -> Any:
    @contextmanager
    def source(_settings: Any, comm: Any) -> Iterator[Any]:
        comm.all_gather("loading", np.zeros(1))
        yield SimpleNamespace(generator=Generator(before_step), tokenizer=Bytes(), what="letters")

    module.open_source = source
    model = module.TritonPythonModel()
    given = {name: {"string_value": value} for name, value in parameters.items()}
    model.initialize({"model_config": json.dumps({"name": "m", "decoupled": decoupled, "parameters": given})})
    return model


def _ask(model: Any, **values: Any) -> Sender:
    sender = Sender()
    tensors = [Tensor(name, np.array([[value]])) for name, value in values.items()]
    for tensor in tensors:
        if tensor.name() == "text_input":
            tensor.array = np.array([[values["text_input"]]], dtype=np.object_)
    model.execute([SimpleNamespace(get_response_sender=lambda: sender, inputs=lambda: tensors)])
    return sender


def test_answers_whole_and_in_pieces(model_module: Any, killed: list[tuple[int, int]]) -> None:
    model = _start(model_module)
    assert _ask(model, text_input=b"x", max_tokens=3).texts() == ["dcb"]
    sender = _ask(model, text_input=b"x", max_tokens=3, stream=True)
    assert sender.texts() == ["d", "c", "b"]
    assert [response.outputs["finish_reason"] for response in sender.sent] == ["", "", "length"]
    model.finalize()
    assert killed == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "text_input: is missing"),
        ({"text_input": b"\xff"}, "text_input: is no UTF-8"),
        ({"text_input": b"x", "stream": True}, "stream: this model answers each request once"),
        ({"text_input": b" "}, "text_input: is empty"),
        ({"text_input": b"x", "top_k": 4}, "top_k: 4 is not served"),
        ({"text_input": b"x", "beam_width": 2}, "beam_width: 2 is not served"),
        ({"text_input": b"x", "max_tokens": 0}, "max_tokens: is 0, expected at least 1"),
        ({"text_input": b"too long"}, "request: is too long. Fix: shorten it"),
    ],
)
def test_refusals(model_module: Any, killed: list[tuple[int, int]], values: dict[str, Any], message: str) -> None:
    model = _start(model_module, decoupled=False)
    said, code = _ask(model, **values).error()
    assert said.startswith(message)
    assert code == TritonError.INVALID_ARG
    assert model._service.counts.refused == 1
    assert _ask(model, text_input=b"x", max_tokens=1).texts() == ["b"]  # others are served
    model.finalize()
    assert model._service.counts.refused == 1
    assert killed == []


def test_the_metrics_count_every_refusal(model_module: Any, killed: list[tuple[int, int]]) -> None:
    shown: list[int] = []
    metrics = SimpleNamespace(update=lambda counts: shown.append(counts.refused), close=list)
    model_module.Metrics = lambda _name: metrics
    model = _start(model_module)
    wrong: list[dict[str, Any]] = [
        {"text_input": b""},
        {"text_input": b"too long"},
        {"text_input": b"x", "max_tokens": 0},
        {"text_input": b"x", "top_k": 4},
        {"text_input": b"x", "beam_width": 2},
    ]
    for values in wrong:
        before = sum(shown[-1:])
        _ask(model, **values).error()
        _wait(partial(lambda before: shown[-1:] == [before + 1], before))  # while nothing else happens
    model.finalize()
    assert shown[-1] == 5
    assert killed == []


def test_a_failed_step_takes_the_server_down(
    model_module: Any, killed: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise TokenWeaveError("the step failed: timeout of rank 1")

    model = _start(model_module, fail)
    said, code = _ask(model, text_input=b"x").error()
    assert said == "the server is going down: the step failed: timeout of rank 1"
    assert code == TritonError.UNAVAILABLE
    model._worker.join(SECONDS)
    assert killed == [(os.getppid(), signal.SIGTERM)]
    assert "m: error: the step failed: timeout of rank 1; the server is going down" in capsys.readouterr().err


def test_a_step_that_hangs_takes_the_server_down(model_module: Any, killed: list[tuple[int, int]]) -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(SECONDS)

    model = _start(model_module, hang, rank_timeout_seconds="600")
    first = model._service.exchanged
    _wait(lambda: model._service.exchanged > first)  # an idle server shows that it lives
    sender = _ask(model, text_input=b"x")
    assert begun.wait(SECONDS)
    assert killed == []
    model._service.exchanged -= 1000  # as if it had hung for so long
    said, _ = sender.error()
    assert said.startswith("the server is going down: rank 0 hangs: it has not answered for 600.01 s")
    _wait(lambda: bool(killed))
    assert killed == [(os.getppid(), signal.SIGTERM)]
    release.set()
    model._worker.join(SECONDS)


def test_ranks_wait_longer_for_a_load_than_for_a_step(
    model_module: Any, killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    class Mpi:
        rank, size = 0, 1

        def __init__(self, timeout: float) -> None:
            self.timeout = timeout

        def all_gather(self, _tag: str, x: Any, timeout: float | None = None) -> list[Any]:
            limits.append(self.timeout if timeout is None else timeout)
            return [x]

        def finalize(self) -> None:
            pass

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setattr(model_module, "MpiComm", Mpi)
    model = _start(model_module, rank_timeout_seconds="7", load_timeout_seconds="700")
    assert limits[0] == 700
    model.finalize()
    assert set(limits[1:]) == {7}
    assert killed == []


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_model_that_cannot_be_loaded(model_module: Any) -> None:
    with pytest.raises(TritonModelException, match=r"config\.pbtxt, parameter wrong: is not known"):
        _start(model_module, wrong="1")
