"""The model `tokenweave` of Triton's Python backend: one process a rank, each in the server that mpirun started.

Rank 0's server takes the requests. A thread of its own loads the model, serves, and makes every call of MPI and CUDA;
Triton's calls only hand requests over. When a rank fails or does not answer, all servers of the job are ended, because
none of them could go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_tokenweave.comm import CommBackend, MpiComm, SingleComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.triton.metrics import Metrics
from trtllm_tokenweave.triton.service import Ended, Request, Service, ServiceOptions
from trtllm_tokenweave.triton.settings import read_settings
from trtllm_tokenweave.triton.source import Source, open_source
from trtllm_tokenweave.triton.text import TextStream

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_REASONS: dict[Ended, str] = {"eos": "stop", "length": "length"}

#: Seconds in which the last answers and messages of a server that goes down leave it.
_LAST_WORDS_SECONDS = 2.0

#: What a step may take beyond the ranks' time limit: a rank that waits in vain for another one says so itself.
_MARGIN_SECONDS = 5.0
_WATCH_SECONDS = 1.0


class TritonPythonModel:
    """What Triton's Python backend asks for."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model on all ranks.

        Raises:
            TritonModelException: with the reason; the server does not start then.
        """
        configuration = json.loads(args["model_config"])
        self._streaming = bool(pb_utils.using_decoupled_model_transaction_policy(configuration))
        self._name = str(configuration["name"])
        self._ending = False
        self._ready: Future[tuple[Service, Source]] = Future()
        try:
            self._settings = read_settings(configuration.get("parameters", {}))
            self._worker = threading.Thread(target=self._work, name="tokenweave", daemon=True)
            self._worker.start()
            self._service, self._source = self._ready.result()
            threading.Thread(target=self._watch, name="tokenweave watch", daemon=True).start()
        except Exception as error:
            raise pb_utils.TritonModelException(_line(error)) from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand requests over. They are answered as their tokens come, by the thread that serves."""
        for request in requests:
            reply = _Reply(request.get_response_sender(), self._source)
            try:
                self._take(request, reply)
            except UserError as error:
                self._service.count_refused()
                reply.failed(str(error), refused=True)
            except Exception as error:  # noqa: BLE001  (an exception that leaves here would leave the request open)
                reply.failed(_line(error))

    def finalize(self) -> None:
        """Stop serving: on all ranks, once rank 0 has answered what it has begun."""
        self._ending = True
        if not self._ready.done() or self._ready.exception() is not None:
            return
        self._service.stop()
        self._worker.join()

    def _take(self, request: Any, reply: _Reply) -> None:
        values = _inputs(request)
        if "text_input" not in values:
            raise UserError("is missing", where="text_input")
        text = values["text_input"]
        try:
            prompt = text.decode() if isinstance(text, bytes) else str(text)
        except UnicodeDecodeError as error:
            raise UserError(f"is no UTF-8 ({error})", where="text_input") from error
        if not prompt.strip():
            raise UserError("is empty", where="text_input", fix="give some words")
        if values.get("beam_width", 1) != 1:
            raise UserError(f"{values['beam_width']} is not served", where="beam_width", fix="leave it out, or give 1")
        if values.get("top_k", 1) not in (0, 1):
            raise UserError(
                f"{values['top_k']} is not served: the most likely token is taken", where="top_k", fix="leave it out"
            )
        reply.stream = bool(values.get("stream", False))
        if reply.stream and not self._streaming:
            raise UserError(
                "this model answers each request once",
                where="stream",
                fix="make the model repository with streaming (decoupled mode), or leave it out",
            )
        tokens = self._encode(prompt)
        most = int(values.get("max_tokens", self._settings.max_tokens))
        if most < 1:
            raise UserError(f"is {most}, expected at least 1", where="max_tokens")
        self._service.add(Request(tuple(tokens), most, reply))

    def _encode(self, prompt: str) -> list[int]:
        tokenizer = self._source.tokenizer
        if self._settings.chat_template:
            return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        return tokenizer.encode(prompt, add_bos=True)

    # ---- the thread that serves

    def _work(self) -> None:
        try:
            launcher = read_environment().launcher
            comm = SingleComm() if launcher is None else MpiComm(timeout=self._settings.load_timeout_seconds)
            self._serve(comm)
        except Exception as error:  # noqa: BLE001  (told to Triton, or the last words of this server)
            if self._ready.done():
                self._take_down(_line(error))
            else:
                self._ready.set_exception(error)
            return
        if isinstance(comm, MpiComm):
            comm.finalize()
        if not self._ending:
            # Another rank was stopped, so this server has nothing left to do.
            os.kill(os.getppid(), signal.SIGTERM)

    def _serve(self, comm: CommBackend) -> None:
        settings = self._settings
        heartbeat = min(ServiceOptions.heartbeat_seconds, settings.rank_timeout_seconds / 4)
        options = ServiceOptions(settings.max_queue_size, settings.cancellation_check_period_ms / 1000, heartbeat)
        metrics = Metrics(self._name) if comm.rank == 0 else None
        try:
            with open_source(settings, comm) as source:
                if isinstance(comm, MpiComm):
                    comm.timeout = settings.rank_timeout_seconds
                on_step = metrics.update if metrics is not None else None
                service = Service(comm, source.generator, options, on_step)
                self._say(f"rank {comm.rank} of {comm.size} serves {source.what}")
                self._comm = comm
                self._ready.set_result((service, source))
                try:
                    service.run()
                except Exception as error:  # noqa: BLE001  (the last words of this server)
                    # At once: giving back what a failed step holds may wait for the GPU for ever.
                    self._take_down(_line(error))
        finally:
            if metrics is not None:
                metrics.close()

    def _watch(self) -> None:
        """Take the server down when a step, or the end, hangs: a GPU waits for a dead rank without a limit."""
        limit = self._settings.rank_timeout_seconds + _MARGIN_SECONDS
        while self._worker.is_alive():
            if time.monotonic() - self._service.exchanged > limit:
                what = f"rank {self._comm.rank} hangs: it has not answered for {limit:g} s"
                self._service.close(f"the server is going down: {what}")
                self._take_down(what)
                return
            time.sleep(_WATCH_SECONDS)

    def _take_down(self, what: str) -> None:
        """End all servers of the job: mpirun does that when one rank aborts."""
        self._ending = True
        self._say(f"error: {what}; the server is going down")
        time.sleep(_LAST_WORDS_SECONDS)
        if isinstance(self._comm, MpiComm):
            self._comm.abort(1)
        os.kill(os.getppid(), signal.SIGTERM)

    def _say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


class _Reply:
    """Answers one request: a response a piece of text while streaming, else one with the whole text."""

    def __init__(self, sender: Any, source: Source) -> None:
        self.stream = False
        self._sender = sender
        self._text = TextStream(source.tokenizer)
        self._tokens: list[int] = []

    def tokens(self, tokens: Sequence[int], ended: Ended) -> None:
        """See `service.Listener`."""
        self._tokens += tokens
        if not self.stream and not ended:
            return
        text = self._text.push(self._tokens, last=bool(ended))
        self._tokens.clear()
        if not text and not ended:
            return
        response = pb_utils.InferenceResponse(
            [_tensor("text_output", text), _tensor("finish_reason", _REASONS.get(ended, ""))]
        )
        self._send(response, last=bool(ended))

    def failed(self, what: str, *, refused: bool = False) -> None:
        """See `service.Listener`."""
        code = pb_utils.TritonError.INVALID_ARG if refused else pb_utils.TritonError.UNAVAILABLE
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(what, code)), last=True)

    def is_cancelled(self) -> bool:
        """See `service.Listener`."""
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, last: bool) -> None:
        try:
            self._sender.send(response, flags=_FINAL if last else 0)
        except Exception as error:  # noqa: BLE001  (one answer that cannot be given must not end the others)
            print(f"an answer could not be given: {_line(error)}", file=sys.stderr, flush=True)


def _inputs(request: Any) -> dict[str, Any]:
    """The request's inputs, each the one value that its tensor holds."""
    values: dict[str, Any] = {}
    for tensor in request.inputs():
        array = tensor.as_numpy().reshape(-1)
        if array.size != 1:
            raise UserError(
                f"holds {array.size} values, expected 1", where=tensor.name(), fix="send one prompt a request"
            )
        values[tensor.name()] = array[0]
    return values


def _tensor(name: str, text: str) -> Any:
    """One string, with the batch dimension that the model's configuration declares."""
    return pb_utils.Tensor(name, np.array([[text.encode()]], dtype=np.object_))


def _line(error: Exception) -> str:
    """An error in one line."""
    text = str(error) if isinstance(error, TokenWeaveError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
