"""Ranks that build together: whose timings they start from, and that one that fails stops all."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trtllm_tokenweave import builder
from trtllm_tokenweave.builder import BuilderSettings, ShapeRange, build_on_all_ranks
from trtllm_tokenweave.comm import LocalComm, run_ranks
from trtllm_tokenweave.errors import TokenWeaveError, UserError

PROFILE = {"x": ShapeRange((1, 16), (128, 16), (256, 16))}


def build_ranks(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int | None = None,
    without_cache: int | None = None,
    takes: float = 0.0,
    known: bytes = b"",
) -> tuple[list[Any], Any]:
    """What three ranks get, or the error of each; and (rank, timings that it started from) in order.

    A build writes its own timings; one that starts from ``known`` finds nothing missing, and writes them in another
    order.
    """
    order: list[tuple[int, bytes | None]] = []

    def fake_build(rank: Any, settings: BuilderSettings) -> Any:
        cache = settings.timing_cache
        assert cache is not None
        given = cache.read_bytes() if cache.exists() else None
        order.append((rank, given))
        if rank == failing:
            raise UserError("does not fit", where="profile")
        time.sleep(takes)
        cache.write_bytes(known[::-1] if known and given == known else bytes([200, rank]))
        return f"plan {rank}"

    def job(comm: LocalComm) -> Any:
        made: Any = comm.rank
        try:
            cache = None if comm.rank == without_cache else folder / f"{comm.rank}.cache"
            return build_on_all_ranks(comm, made, BuilderSettings((PROFILE,), timing_cache=cache))
        except TokenWeaveError as error:
            return str(error)

    monkeypatch.setattr(builder, "build", fake_build)
    return run_ranks([partial(job, comm) for comm in LocalComm.group(3, timeout=takes / 2 or 20)]), order


def test_other_ranks_start_from_rank_0s_timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "2.cache").write_bytes(b"of another day")
    plans, order = build_ranks(tmp_path, monkeypatch)
    assert plans == ["plan 0", "plan 1", "plan 2"]
    assert order[0] == (0, None)
    assert sorted(order[1:]) == [(1, bytes([200, 0])), (2, bytes([200, 0]))]


def test_all_ranks_build_at_once_from_timings_that_rank_0_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.cache").write_bytes(b"whole")
    (tmp_path / "2.cache").write_bytes(b"of another day")
    plans, order = build_ranks(tmp_path, monkeypatch, known=b"whole")
    assert plans == ["plan 0", "plan 1", "plan 2"]
    assert sorted(order) == [(rank, b"whole") for rank in range(3)]


def test_the_others_build_again_where_rank_0s_timings_were_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.cache").write_bytes(b"part")
    plans, order = build_ranks(tmp_path, monkeypatch, known=b"whole")
    assert plans == ["plan 0", "plan 1", "plan 2"]
    assert sorted(order[:3]) == [(rank, b"part") for rank in range(3)]
    assert sorted(order[3:]) == [(rank, bytes([200, 0])) for rank in (1, 2)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_build_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    errors, order = build_ranks(tmp_path, monkeypatch, failing)
    assert errors == [f"rank {failing}, profile: does not fit"] * 3
    assert len(order) == (1 if failing == 0 else 3)


def test_ranks_need_a_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, order = build_ranks(tmp_path, monkeypatch, without_cache=1)
    assert errors == ["rank 1, timing_cache: is not given. Fix: name a file, each rank its own"] * 3
    assert not order


def test_timings_of_rank_0_that_cannot_be_read_stop_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "0.cache").write_bytes(b"whole")
    monkeypatch.setattr(Path, "read_bytes", refused)
    errors, order = build_ranks(tmp_path, monkeypatch)
    assert errors == [errors[0]] * 3
    assert errors[0].startswith(f"rank 0, {tmp_path / '0.cache'}: cannot be read: Permission denied. Fix: ")
    assert not order


@pytest.mark.parametrize("rank", [0, 2])
def test_a_timing_cache_that_cannot_be_written_stops_all_before_rank_0_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    (tmp_path / f"{rank}.cache").mkdir()
    errors, order = build_ranks(tmp_path, monkeypatch)
    assert errors == [f"rank {rank}, {tmp_path / f'{rank}.cache'}: is a folder. Fix: give the name of a file"] * 3
    assert not order


def test_ranks_wait_for_a_build_longer_than_for_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, _ = build_ranks(tmp_path, monkeypatch, takes=0.6)
    assert plans == ["plan 0", "plan 1", "plan 2"]
