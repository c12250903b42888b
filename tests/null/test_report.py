from __future__ import annotations

import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.picture import NOTE
from trtllm_tokenweave.report import (
    DemoReport,
    Picture,
    PromptRow,
    RefusedRow,
    ScheduleBox,
    ScheduleEdge,
    SiteRow,
    SplitStep,
    draw_schedule,
    report_html,
    write_picture,
    write_report,
)

BOXES = (
    ScheduleBox("compute", "attention", "prefix", 0, 2, 3, "layer 0"),
    ScheduleBox("compute", "attention", "suffix", 2, 2, 1, "layer 0"),
    ScheduleBox("communication", "AllReduceRmsNorm", "prefix", 2, 1.5, None, "$layer_0$ <attention>"),
    ScheduleBox("compute", "mlp", "prefix", 4, 3, 6),
)
EDGES = (ScheduleEdge(0, 2, "fork"), ScheduleEdge(2, 3, "join"))

REPORT = DemoReport(
    model="SmolLM2-135M-Instruct",
    tp_size=3,
    num_layers=30,
    sites=[
        SiteRow(0, "attention", "transformer.layers.0.attention", "transformer.layers.0.post_layernorm.weight", 1e-5)
    ],
    prompts=[PromptRow("What is the capital of France?", "The capital of France is Paris.", True, 8)],
    max_logit_diff=3.4e-5,
    split_steps=[SplitStep(0, 300, 5, 192, 108, "context"), SplitStep(1, 5, 5, 5, 0, "generation")],
    command="trtllm-tokenweave demo",
    refused=[RefusedRow("lm_head", "its result has two readers")],
    limits=["Nothing here is a speed."],
    versions={"numpy": "2.4"},
    seconds={"weave": 1.25},
)


class Page(HTMLParser):
    """Tags, attributes and visible text of a page; fails where tags do not match."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += f"{data} "


@pytest.fixture(scope="module")
def picture() -> Picture:
    return draw_schedule(BOXES, EDGES)


def test_picture_formats(picture: Picture) -> None:
    assert picture.png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture.png[16:24])
    assert width > 2 * height > 800
    assert picture.svg.lstrip().startswith(b"<?xml")
    assert picture.caption.startswith("Two lanes: 3 pieces of work on the compute stream, 1 collectives")
    assert picture.caption.endswith("1 forks and 1 joins between them.")


def test_picture_is_repeatable(picture: Picture) -> None:
    assert draw_schedule(BOXES, EDGES) == picture


def test_picture_says_that_it_is_not_measured(picture: Picture) -> None:
    # matplotlib keeps each text as a comment beside its outlines.
    assert f"<!-- {NOTE} -->".encode() in picture.svg
    for text in (b"attention", b"suffix", b"3 waves", b"1 wave", b"$layer_0$ &lt;attention&gt;"):
        assert b"<!-- " + text + b" -->" in picture.svg


def test_many_boxes_and_long_names_stay_drawable() -> None:
    boxes = [ScheduleBox("compute", "a very long name " * 4, "whole", i, 1, i) for i in range(60)]
    width, _ = struct.unpack(">II", draw_schedule(boxes, ()).png[16:24])
    assert width <= 42 * 160


@pytest.mark.parametrize(
    ("boxes", "edges", "message"),
    [
        ((), (), "no boxes"),
        ((replace(BOXES[0], duration=0),), (), "duration 0"),
        ((BOXES[0], replace(BOXES[1], start=1.5)), (), "starts before attention has ended"),
        (BOXES, (ScheduleEdge(0, 9, "fork"),), "names a box that is not there"),
        (BOXES, (ScheduleEdge(-1, 2, "fork"),), "names a box that is not there"),
        (BOXES, (ScheduleEdge(0, 3, "join"),), "stays on the compute lane"),
    ],
)
def test_picture_refuses(boxes: tuple[ScheduleBox, ...], edges: tuple[ScheduleEdge, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_schedule(boxes, edges)


def test_page_is_whole_and_needs_no_network(picture: Picture) -> None:
    html = report_html(REPORT, picture)
    page = Page(html)
    assert re.search(r"https?:|//[a-z]|@import|url\(", html.split("base64,")[0]) is None
    assert re.search(r"https?:", html) is None
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    (source,) = [value for name, value in page.attributes if name in ("src", "href")]
    assert source.startswith("data:image/svg+xml;base64,")


def test_page_says_it_all(picture: Picture) -> None:
    text = " ".join(Page(report_html(REPORT, picture)).text.split())
    for part in (
        "Identical: all 1 prompts gave the same tokens",
        "1 of 2 steps cut in two",
        "3.4e-05 largest logit difference",
        "The capital of France is Paris. 8 yes",
        "0 context 5 300 192 108",
        "1 generation 5 5 5 0",
        "transformer.layers.0.post_layernorm.weight",
        "1 left as they were",
        "its result has two readers",
        "Nothing here is a speed.",
        "not to scale, not measured",
        "trtllm-tokenweave demo",
        "numpy 2.4",
    ):
        assert part in text


def test_difference_is_shown(picture: Picture) -> None:
    row = PromptRow("p", "woven words", False, 4, stock_text="stock words")
    report = replace(REPORT, prompts=[*REPORT.prompts, row])
    assert not report.identical
    text = " ".join(Page(report_html(report, picture)).text.split())
    assert "Different: 1 of 2 prompts gave other tokens" in text
    assert "woven words stock: stock words 4 no" in text
    assert "Identical: all" not in text


def test_empty_report(picture: Picture) -> None:
    report = replace(REPORT, prompts=[], sites=[], split_steps=[], refused=[], limits=[], versions={}, seconds={})
    assert not report.identical
    assert "No prompts were run." in Page(report_html(report, picture)).text


def test_all_text_is_escaped(picture: Picture) -> None:
    bad = "<script>alert(1)</script> & \"quotes\" 'too'"
    report = DemoReport(
        model=bad,
        tp_size=1,
        num_layers=1,
        sites=[SiteRow(0, bad, bad, bad, 1e-5)],
        prompts=[PromptRow(bad, bad, False, 1, bad)],
        max_logit_diff=0.0,
        split_steps=[],
        command=bad,
        refused=[RefusedRow(bad, bad)],
        dtype=bad,
        backends=[bad],
        limits=[bad],
        versions={bad: bad},
        seconds={bad: 1.0},
    )
    html = report_html(report, replace(picture, caption=bad))
    assert "<script" not in html
    assert Page(html).text.count(bad) >= 14


def test_files_are_written_whole(picture: Picture, tmp_path: Path) -> None:
    path = write_report(REPORT, picture, tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == report_html(REPORT, picture)
    png, svg = write_picture(picture, tmp_path / "new")
    assert (png.read_bytes(), svg.read_bytes()) == (picture.png, picture.svg)
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == [
        "report.html",
        "schedule.png",
        "schedule.svg",
    ]
    assert path.stat().st_mode & 0o600 == 0o600
    path.write_text("old", encoding="utf-8")
    write_report(REPORT, picture, path)
    assert path.read_text(encoding="utf-8") != "old"


def test_failed_write_leaves_the_old_file_and_nothing_aside(
    picture: Picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"report\.html: cannot be written: No space left on device"):
        write_report(REPORT, picture, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == "old"


def test_folder_that_is_a_file(picture: Picture, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is no folder"):
        write_report(REPORT, picture, tmp_path / "file" / "report.html")
