"""Serving on several ranks, as threads: a small random Llama on the interpreter, and generators that misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from trtllm_tokenweave.checkpoint import RandomCheckpoint
from trtllm_tokenweave.comm import CommError, LocalComm, SingleComm, run_ranks
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.runner import GenerationLimits, Generator, make_generator
from trtllm_tokenweave.triton.service import Counts, Ended, Request, Service, ServiceOptions
from trtllm_tokenweave.triton.settings import read_settings
from trtllm_tokenweave.triton.text import TextStream

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    dtype="float32",
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_size=8,
    intermediate_size=32,
    vocab_size=48,
    max_position_embeddings=128,
)
LIMITS = GenerationLimits(
    max_num_tokens=16, max_batch_size=3, max_seq_len=64, max_new_tokens=6, tokens_per_block=8, eos_ids=frozenset()
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 20, [12, 13], [14, 15, 16], [17]]
SECONDS = 60.0


def _generators(size: int) -> list[tuple[Generator, Any]]:
    comms: list[Any] = [SingleComm()] if size == 1 else list(LocalComm.group(size, timeout=SECONDS))
    made = []
    for rank, comm in enumerate(comms):
        network, mapping = RecordedNetwork(), Mapping(size, rank, size)
        sizes = NetworkOptions(
            max_batch_size=LIMITS.max_batch_size,
            max_num_tokens=LIMITS.max_num_tokens,
            max_seq_len=LIMITS.max_seq_len,
            tokens_per_block=LIMITS.tokens_per_block,
        )
        weights = RandomCheckpoint(CONFIG, seed=3).rank_weights(mapping)
        build_llama(network, CONFIG, mapping, weights, sizes)
        made.append((make_generator([ExecutionContext(network, comm)], CONFIG, size, LIMITS), comm))
    return made


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self, cancel_after: int = 1000) -> None:
        self.said: list[int] = []
        self.ended: Ended = ""
        self.error = ""
        self.refused = False
        self.cancel_after = cancel_after
        self.over = threading.Event()

    def tokens(self, tokens: Sequence[int], ended: Ended) -> None:
        assert not self.over.is_set()
        self.said += tokens
        self.ended = ended
        if ended:
            self.over.set()

    def failed(self, what: str, *, refused: bool = False) -> None:
        assert not self.over.is_set()
        self.error, self.refused = what, refused
        self.over.set()

    def is_cancelled(self) -> bool:
        return len(self.said) >= self.cancel_after


class Ranks:
    """Services of all ranks, each running in a thread, and the errors that ended them."""

    def __init__(self, size: int, options: ServiceOptions | None = None) -> None:
        self.counts: list[Counts] = []
        options = options or ServiceOptions(heartbeat_seconds=0.01, cancel_seconds=0.0)
        self.services = [Service(comm, generator, options, self.counts.append) for generator, comm in _generators(size)]
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_ranks([service.run for service in self.services])
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            self.error = error

    def ask(self, prompt: Sequence[int], most: int = 6, cancel_after: int = 1000) -> Heard:
        heard = Heard(cancel_after)
        self.services[0].add(Request(tuple(prompt), most, heard))
        return heard

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def stop(self, rank: int = 0) -> None:
        self.services[rank].stop()
        self.join()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return _generators(1)[0][0].generate(PROMPTS).tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_requests_get_what_generate_gives(size: int, wanted: list[list[int]]) -> None:
    ranks = Ranks(size)
    heard = [ranks.ask(prompt) for prompt in PROMPTS]
    for one in heard:
        assert one.over.wait(SECONDS)
    late = ranks.ask(PROMPTS[0], most=2)
    assert late.over.wait(SECONDS)
    ranks.stop()
    assert ranks.error is None
    assert [one.said for one in heard] == wanted
    assert {one.ended for one in heard} == {"length"}
    assert late.said == wanted[0][:2]
    counts = ranks.services[0].counts
    assert (counts.completed, counts.open, counts.failed) == (len(PROMPTS) + 1, 0, 0)
    assert counts.generated_tokens == 6 * len(PROMPTS) + 2
    assert counts.prompt_tokens == sum(map(len, PROMPTS)) + len(PROMPTS[0])
    assert counts.steps < counts.generated_tokens  # several sequences share a step
    assert ranks.counts[-1] == counts


@pytest.mark.parametrize(
    ("prompt", "most", "message"),
    [
        ([], 1, "request: is empty"),
        ([1], 0, "request: max_new_tokens is 0, expected at least 1"),
        ([48], 1, "request: token 48 is outside the vocabulary of 48"),
        (
            [1] * 64,
            1,
            "request: 64 tokens and 1 new ones exceed max_seq_len 64. Fix: shorten the prompt, lower max_tokens or",
        ),
    ],
)
def test_a_wrong_request_fails_alone(prompt: list[int], most: int, message: str, wanted: list[list[int]]) -> None:
    ranks = Ranks(2)
    wrong, right = ranks.ask(prompt, most), ranks.ask(PROMPTS[0])
    assert wrong.over.wait(SECONDS)
    assert right.over.wait(SECONDS)
    ranks.stop()
    assert wrong.error.startswith(message)
    assert wrong.refused
    assert right.said == wanted[0]
    assert ranks.counts[-1].refused == ranks.services[0].counts.refused == 1
    assert ranks.error is None


def test_cancelled_requests_make_room_on_all_ranks(wanted: list[list[int]]) -> None:
    ranks = Ranks(2)
    gone = [ranks.ask([20 + i], most=60, cancel_after=2) for i in range(3)]
    after = ranks.ask(PROMPTS[1])  # waits: three are in flight
    for one in [*gone, after]:
        assert one.over.wait(SECONDS)
    ranks.stop()
    assert {one.error for one in gone} == {"cancelled"}
    assert max(len(one.said) for one in gone) < 60
    assert after.said == wanted[1]
    assert ranks.counts[-1].cancelled == ranks.services[0].counts.cancelled == 3
    assert not any(service.generator.busy for service in ranks.services)


def test_a_cancellation_is_counted_when_nothing_else_happens() -> None:
    ranks = Ranks(1)
    assert ranks.ask([20], most=60, cancel_after=2).over.wait(SECONDS)
    end = time.monotonic() + SECONDS
    while not (ranks.counts and ranks.counts[-1].cancelled):
        assert time.monotonic() < end
        time.sleep(0.01)
    ranks.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_finishes_what_has_begun(rank: int, wanted: list[list[int]]) -> None:
    ranks = Ranks(2)
    heard = [ranks.ask(prompt) for prompt in PROMPTS]
    ranks.stop(rank)
    assert ranks.error is None
    assert [one.said for one in heard] == wanted
    with pytest.raises(TokenWeaveError, match="the server has stopped"):
        ranks.ask([1])


def test_a_submit_that_raises_fails_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heard asserts the "once"."""
    generator, comm = _generators(1)[0]
    submit = generator.submit

    def fail(prompt: Sequence[int], most: int | None = None) -> int:
        if prompt[0] == 2:
            raise RuntimeError("out of order")
        return submit(prompt, most)

    monkeypatch.setattr(generator, "submit", fail)
    service, heard = Service(comm, generator), [Heard() for _ in range(4)]
    for token, one in zip((1, 48, 2, 3), heard, strict=True):  # begun, refused, the one that raises, and one behind it
        service.add(Request((token,), 1, one))
    with pytest.raises(RuntimeError, match="out of order"):
        service.run()
    assert [one.refused for one in heard] == [False, True, False, False]
    assert [one.error for one in heard if not one.refused] == ["the server is going down: out of order"] * 3
    assert (service.counts.failed, service.counts.refused) == (3, 1)


def test_no_more_are_taken_than_may_wait() -> None:
    generator, comm = _generators(1)[0]
    service = Service(comm, generator, ServiceOptions(max_queue_size=2))
    for _ in range(2):
        service.add(Request((1,), 1, Heard()))
    with pytest.raises(TokenWeaveError, match=r"2 requests wait or run already, no more are taken \(max_queue_size\)"):
        service.add(Request((1,), 1, Heard()))


@pytest.mark.parametrize("idle", [True, False])
def test_a_rank_that_is_gone_fails_what_is_open(idle: bool) -> None:
    """The other rank never takes part: rank 0 gives up after the communicator's limit, whether it has work or not."""
    generator = _generators(1)[0][0]
    comm = LocalComm.group(2, timeout=0.3)[0]
    service, heard = Service(comm, generator, ServiceOptions(heartbeat_seconds=0.01)), Heard()
    if not idle:
        service.add(Request((1,), 1, heard))
    with pytest.raises(CommError, match=r"no answer within 0\.3 s from rank 1"):
        service.run()
    if not idle:
        assert heard.error.startswith("the server is going down: rank 0 waits in 'exchange of requests'")
        assert not heard.refused
    with pytest.raises(TokenWeaveError, match="the server is going down"):
        service.add(Request((1,), 1, Heard()))


def test_a_failing_step_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)

    def fail(_inputs: object) -> None:
        raise TokenWeaveError("the step failed: timeout")

    monkeypatch.setattr(ranks.services[1].generator, "run_step", fail)
    heard = ranks.ask([1])
    assert heard.over.wait(SECONDS)
    ranks.join()
    assert "the server is going down" in heard.error
    assert "the step failed: timeout" in str(ranks.error)


def test_ranks_out_of_step_are_noticed() -> None:
    made = _generators(2)
    made[1][0].submit([1])  # a sequence that rank 0 knows nothing of
    services = [Service(comm, generator, ServiceOptions(heartbeat_seconds=0.01)) for generator, comm in made]
    services[0].add(Request((1,), 1, Heard()))
    with pytest.raises(TokenWeaveError, match="rank 1 is not in step: its sequence 1 is rank 0's 0"):
        run_ranks([partial(Service.run, service) for service in services])


class Bytes:
    """A tokenizer with a token a byte."""

    eos_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "gr\u00fc\u00df", "\u6771\u4eac \U0001f600!", ""])
def test_pieces_of_text_join_to_the_text(text: str) -> None:
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    ids = list(text.encode())
    pieces = [stream.push([token], last=False) for token in ids] + [stream.push([], last=True)]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(text)  # each character came when it was whole


def test_a_piece_costs_as_much_late_as_early() -> None:
    class Counting(Bytes):
        longest = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    text = "gr\u00fc\u00df \u6771\u4eac \U0001f600 " * 50
    for chunk in (1, 3, 40):
        tokenizer = Counting()
        stream = TextStream(tokenizer)  # type: ignore[arg-type]
        ids = list(text.encode())
        pieces = [stream.push(ids[at : at + chunk], last=False) for at in range(0, len(ids), chunk)]
        assert "".join([*pieces, stream.push([], last=True)]) == text
        assert tokenizer.longest < 200 < len(ids)


def test_what_stays_incomplete_is_said_at_the_end() -> None:
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    first = stream.push([65, 0xE6], last=False)
    assert (first, stream.push([0x9D], last=True)) == ("A", "\N{REPLACEMENT CHARACTER}")


def _parameters(**values: str) -> dict[str, Any]:
    return {name: {"string_value": value} for name, value in values.items()}


def test_settings_are_the_parameters() -> None:
    found = read_settings(_parameters(max_tokens="7", chat_template="true", engine_dir="", FORCE_CPU_ONLY="no"))
    assert (found.max_tokens, found.chat_template, found.engine_dir) == (7, True, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": "7"}, "config.pbtxt, parameter max_token: is not known. Fix: the parameters are engine_dir, "),
        ({"max_tokens": "many"}, "config.pbtxt, parameter max_tokens: 'many': "),
        ({"max_tokens": "0"}, "config.pbtxt, parameter max_tokens: '0': "),
        ({"chat_template": "perhaps"}, "config.pbtxt, parameter chat_template: 'perhaps': "),
    ],
)
def test_wrong_parameters_are_named(values: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_settings(_parameters(**values))
    assert str(caught.value).startswith(message)
