"""A real Triton server under mpirun serves a real model: SmolLM2 on the CPU interpreter, two and three ranks.

Runs in the Python that build_scripts/fetch_sdk tritonserver makes: ``.sdk/triton/bin/python -m pytest tests/serving``.
The tests of a server run in order; the last one ends it.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.triton_server import COMMAND, SECONDS, Server, tritonserver, wait_until

_LACK = next(
    (
        f"{what} is missing ({fix})"
        for what, found, fix in (
            ("mpirun", shutil.which("mpirun"), "apt-get install openmpi-bin"),
            ("tritonserver", tritonserver(), "build_scripts/fetch_sdk tritonserver"),
        )
        if found is None
    ),
    "",
)
if _LACK and not os.environ.get("CI"):
    pytest.skip(_LACK, allow_module_level=True)
assert not _LACK, _LACK

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

PROMPTS = ("What is the capital of France?", "Name three primary colors.", "Write a two-word greeting.", "Count to 3.")
TOKENS = 4
RANK_TIMEOUT = 20
MODEL = ("--chat-template", "--max-tokens", str(TOKENS), "--max-seq-len", "192", "--max-batch-size", "8")


def _started(server: Server) -> Iterator[Server]:
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _started(Server(tmp_path_factory.mktemp("streaming"), 2, *MODEL, "--streaming"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*MODEL, "--no-streaming", "--rank-timeout-seconds", str(RANK_TIMEOUT))
    yield from _started(Server(tmp_path_factory.mktemp("plain"), 3, *options))


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, str]:
    """What the demo says to each prompt."""
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [*COMMAND, "demo", "--json", "--no-mpi", "--no-report", "--tp", "2", "--max-new-tokens", str(TOKENS)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=SECONDS)
    found = {row["prompt"]: row["text"] for row in json.loads(done.stdout)["prompts"]}
    assert len(set(found.values())) == len(PROMPTS)  # so that mixed-up answers would be seen
    return found


def _generate(server: Server, kind: str = "generate", **values: Any) -> str:
    """One request to HTTP's generate extension; returns the body. Errors raise HTTPError."""
    url = f"http://127.0.0.1:{server.http}/v2/models/tokenweave/{kind}"
    request = urllib.request.Request(url, json.dumps(values).encode())
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return str(answer.read().decode())


def _refusal(server: Server, **values: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _generate(server, **values)
    return caught.value.code, json.loads(caught.value.read())["error"]


def _tensors(client: Any, **values: Any) -> list[Any]:
    kinds = {"text_input": ("BYTES", np.object_), "stream": ("BOOL", np.bool_), "max_tokens": ("INT32", np.int32)}
    tensors = []
    for name, value in values.items():
        kind, dtype = kinds[name]
        tensor = client.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        tensors.append(tensor)
    return tensors


class Stream:
    """A client over gRPC's stream: each has a connection of its own."""

    def __init__(self, server: Server) -> None:
        self.results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self.client.start_stream(lambda result, error: self.results.put((result, error)))

    def send(self, prompt: str, request: str, **values: Any) -> None:
        inputs = _tensors(grpcclient, text_input=prompt.encode(), stream=True, **values)
        self.client.async_stream_infer("tokenweave", inputs, request_id=request)

    def answers(self, count: int) -> dict[str, list[str]]:
        """Pieces of text by request, once ``count`` requests have ended."""
        pieces: dict[str, list[str]] = {}
        while count:
            result, error = self.results.get(timeout=SECONDS)
            assert error is None, error
            pieces.setdefault(result.get_response().id, []).append(result.as_numpy("text_output").item().decode())
            count -= result.as_numpy("finish_reason").item() != b""
        return pieces


def _figures(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("tokenweave_")}


def _outcome(server: Server, name: str) -> float:
    return _figures(server)[f'tokenweave_requests_total{{model="tokenweave",outcome="{name}"}}']


def _wait_until_counted(server: Server) -> None:
    """Until the figures hold all that was answered: they follow a step's answers, the open requests last."""
    wait_until("counted", lambda: _figures(server)['tokenweave_open_requests{model="tokenweave"}'] == 0)


# ---- two ranks, streaming


def test_the_text_is_the_demos(server: Server, texts: dict[str, str]) -> None:
    for prompt, text in texts.items():
        answer = json.loads(_generate(server, text_input=prompt))
        assert answer["text_output"] == text
        assert answer["finish_reason"] in ("length", "stop")


def test_streams_give_the_text_in_pieces(server: Server, texts: dict[str, str]) -> None:
    client = Stream(server)
    client.send(PROMPTS[0], "one")
    (pieces,) = client.answers(1).values()
    client.client.stop_stream()
    assert len(pieces) == TOKENS
    assert "".join(pieces) == texts[PROMPTS[0]]
    events = [
        line[len("data: ") :]
        for line in _generate(server, "generate_stream", text_input=PROMPTS[0], stream=True).splitlines()
        if line.startswith("data: ")
    ]
    assert [json.loads(event)["text_output"] for event in events] == pieces


def test_a_request_says_how_many_tokens_it_wants(server: Server, texts: dict[str, str]) -> None:
    short = json.loads(_generate(server, text_input=PROMPTS[1], max_tokens=2))["text_output"]
    assert short
    assert texts[PROMPTS[1]].startswith(short)
    assert short != texts[PROMPTS[1]]


def test_a_hundred_requests_of_eight_clients(server: Server, texts: dict[str, str]) -> None:
    _wait_until_counted(server)
    completed, steps = _outcome(server, "completed"), _figures(server)['tokenweave_steps_total{model="tokenweave"}']

    def over_http(client: int) -> list[tuple[str, str]]:
        asked = [PROMPTS[(client + i) % len(PROMPTS)] for i in range(12)]
        return [(prompt, json.loads(_generate(server, text_input=prompt))["text_output"]) for prompt in asked]

    def over_grpc(client: int) -> list[tuple[str, str]]:
        asked = [PROMPTS[(client + i) % len(PROMPTS)] for i in range(13)]
        stream = Stream(server)
        for number, prompt in enumerate(asked):
            stream.send(prompt, str(number))
        answers = stream.answers(len(asked))
        stream.client.stop_stream()
        return [(prompt, "".join(answers[str(number)])) for number, prompt in enumerate(asked)]

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(over_http if client < 4 else over_grpc, client) for client in range(8)]
        answers = [answer for job in jobs for answer in job.result()]
    assert len(answers) == 100
    assert [answer for answer in answers if texts[answer[0]] != answer[1]] == []
    _wait_until_counted(server)
    assert _outcome(server, "completed") - completed == 100
    # One after the other they would take a step a token.
    assert _figures(server)['tokenweave_steps_total{model="tokenweave"}'] - steps < 100 * TOKENS / 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_input": " "}, "text_input: is empty. Fix: give some words"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens: is 0, expected at least 1"),
        ({"text_input": "a", "max_tokens": 500}, "500 new ones exceed max_seq_len 192. Fix: shorten the prompt"),
        ({"text_input": "word " * 300}, "exceed max_seq_len 192. Fix: shorten the prompt"),
        ({"text_input": "a", "beam_width": 2}, "beam_width: 2 is not served. Fix: leave it out, or give 1"),
        ({"text_input": "a", "top_k": 5}, "top_k: 5 is not served: the most likely token is taken"),
        ({"max_tokens": 2}, "text_input: is missing"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_bad_requests_are_refused(server: Server, values: dict[str, Any], message: str) -> None:
    before = _outcome(server, "refused")
    code, error = _refusal(server, **values)
    assert code == 400
    assert message in error
    wait_until("counted", lambda: _outcome(server, "refused") == before + 1)


def test_grpc_refuses_with_the_same_words(server: Server) -> None:
    stream = Stream(server)
    stream.send("a", "one", max_tokens=0)
    result, error = stream.results.get(timeout=SECONDS)
    stream.client.stop_stream()
    assert "max_tokens: is 0, expected at least 1" in str(error if error is not None else result)


def test_cancelled_requests_make_room(server: Server, texts: dict[str, str]) -> None:
    before = _outcome(server, "cancelled")
    stream = Stream(server)
    stream.send("Tell me a very long story.", "long", max_tokens=120)
    stream.results.get(timeout=SECONDS)  # it runs
    stream.client.stop_stream(cancel_requests=True)
    wait_until("cancelled", lambda: _outcome(server, "cancelled") > before)
    assert json.loads(_generate(server, text_input=PROMPTS[0]))["text_output"] == texts[PROMPTS[0]]
    wait_until("nothing open", lambda: _figures(server)['tokenweave_open_requests{model="tokenweave"}'] == 0)


def test_only_rank_0_listens(server: Server) -> None:
    ranks = [words for words in server.processes().values() if words[0].endswith("tritonserver")]
    assert len(ranks) == 2
    assert sorted("--allow-http=false" in words for words in ranks) == [False, True]


def test_a_taken_port_is_refused_before_anything_starts(server: Server, tmp_path: Path) -> None:
    subprocess.run([*COMMAND, "triton", "repo", str(tmp_path / "repository")], check=True)
    words = ["triton", "launch", str(tmp_path / "repository"), "--tritonserver", str(tritonserver())]
    done = subprocess.run(
        [*COMMAND, *words, "--http-port", str(server.http)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"--http-port {server.http}: cannot be used on 127.0.0.1" in done.stderr


def test_a_clean_stop_leaves_nothing_behind(server: Server) -> None:
    assert server.processes()
    assert server.left_behind()  # the negative control: while it runs, there is something
    assert server.stop(signal.SIGINT) == 0, server.log
    wait_until("processes gone", lambda: not server.processes(), 30)
    assert server.left_behind() == []
    assert "going down" not in server.log


# ---- three ranks, one answer a request


def test_whole_answers_over_http_and_grpc(plain: Server, texts: dict[str, str]) -> None:
    http = httpclient.InferenceServerClient(
        f"127.0.0.1:{plain.http}", connection_timeout=SECONDS, network_timeout=SECONDS
    )
    grpc = grpcclient.InferenceServerClient(f"127.0.0.1:{plain.grpc}")
    for client, module in ((http, httpclient), (grpc, grpcclient)):
        for prompt in PROMPTS[:2]:
            result = client.infer("tokenweave", _tensors(module, text_input=prompt.encode(), max_tokens=TOKENS))
            assert result.as_numpy("text_output").item().decode() == texts[prompt]
        with pytest.raises(InferenceServerException, match=r"stream: this model answers each request once\. Fix: make"):
            client.infer("tokenweave", _tensors(module, text_input=b"a", stream=True))


def test_a_dead_rank_takes_the_server_down(plain: Server) -> None:
    backend = plain.backend(2)
    os.kill(backend, signal.SIGKILL)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        _generate(plain, text_input=PROMPTS[0])
    # The limit, and time for a busy machine to notice.
    assert plain.process.wait(SECONDS) == 1
    assert f"no answer within {RANK_TIMEOUT} s; the server is going down" in plain.log
    last = plain.log.splitlines()[-1]
    assert last.startswith("error: the servers ended with code")
    assert f"(first the Python backend of rank 2, pid {backend}: signal 9, SIGKILL)" in last
    wait_until("processes gone", lambda: not plain.processes(), 30)
    assert plain.left_behind() == []
