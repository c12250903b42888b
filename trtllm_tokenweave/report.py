"""The demo's one-page report: self-contained HTML that opens without a network, and the picture beside it.

`report_html` is pure; `write_report` and `write_picture` write each file aside and rename it, so that a reader never
meets half a file.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trtllm_tokenweave import __version__
from trtllm_tokenweave.atomic import check_folder, replace_files
from trtllm_tokenweave.picture import Picture, ScheduleBox, ScheduleEdge, draw_schedule

StepKind = Literal["context", "mixed", "generation"]


@dataclass(frozen=True)
class SiteRow:
    """One fused place.

    Attributes:
        index: Its number, in network order.
        kind: "attention" or "mlp": what its AllReduce follows.
        layer: Where it is ("transformer.layers.0.attention").
        gamma: Name of the norm's weight tensor.
        eps: The norm's epsilon.
    """

    index: int
    kind: str
    layer: str
    gamma: str
    eps: float


@dataclass(frozen=True)
class RefusedRow:
    """One place that was left as it was.

    Attributes:
        layer: Where it is.
        reason: Why it cannot be fused.
    """

    layer: str
    reason: str


@dataclass(frozen=True)
class PromptRow:
    """What one prompt gave.

    Attributes:
        prompt: The user's words.
        text: What the woven network generated.
        identical: Whether stock and woven network generated the same tokens.
        tokens: Number of generated tokens.
        stock_text: What the stock network generated; shown where it differs.
    """

    prompt: str
    text: str
    identical: bool
    tokens: int
    stock_text: str = ""


@dataclass(frozen=True)
class SplitStep:
    """How one step was cut.

    Attributes:
        step: Its number.
        num_tokens: Tokens of the step, prefix + suffix.
        batch: Sequences of the step.
        prefix: Tokens of the prefix half.
        suffix: Tokens of the suffix half; 0 where the step is fused only.
        kind: "context" (prefill), "mixed", or "generation" (decode).
    """

    step: int
    num_tokens: int
    batch: int
    prefix: int
    suffix: int
    kind: StepKind

    @property
    def woven(self) -> bool:
        """Whether both halves hold tokens."""
        return self.prefix > 0 and self.suffix > 0


@dataclass(frozen=True)
class DemoReport:
    """Everything on the page.

    Attributes:
        model: Model's name.
        tp_size: Number of ranks.
        num_layers: Transformer layers.
        sites: Fused places, in network order.
        prompts: What each prompt gave.
        max_logit_diff: Largest absolute difference of a logit between stock and woven network.
        split_steps: Every step of the run.
        command: The command line that made the report.
        refused: Places that were left as they were.
        dtype: Data type of the network ("float32").
        backends: How the ranks ran ("threads of one process", "mpirun -n 3").
        limits: What the demo does not show, one sentence each.
        versions: Versions by name.
        seconds: Seconds of each phase by name, on the machine that ran the demo.
    """

    model: str
    tp_size: int
    num_layers: int
    sites: Sequence[SiteRow]
    prompts: Sequence[PromptRow]
    max_logit_diff: float
    split_steps: Sequence[SplitStep]
    command: str
    refused: Sequence[RefusedRow] = ()
    dtype: str = ""
    backends: Sequence[str] = ()
    limits: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every prompt gave the same tokens (False when there was none)."""
        return bool(self.prompts) and all(row.identical for row in self.prompts)

    @property
    def woven_steps(self) -> int:
        """Number of steps that were cut in two."""
        return sum(step.woven for step in self.split_steps)


def report_html(report: DemoReport, picture: Picture) -> str:
    """Render the page: inline style, the picture as data, no script and no reference to anything outside.

    Args:
        report: The content. All of its text is escaped.
        picture: The schedule, from `draw_schedule`.
    """
    return _render(
        "report.html.j2",
        report=report,
        largest_step=max((step.num_tokens for step in report.split_steps), default=1),
        caption=picture.caption,
        image=_image(picture),
    )


def plots_html(title: str, what: str, facts: Mapping[str, str], pictures: Sequence[Picture]) -> str:
    """Render a page of plots: self-contained, and escaped, like `report_html`.

    Args:
        title: Heading.
        what: What was measured.
        facts: How, where and when, by name.
        pictures: The plots.
    """
    images = [(picture.caption, _image(picture)) for picture in pictures]
    return _render("plots.html.j2", title=title, what=what, facts=facts, images=images)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("trtllm_tokenweave", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(version=__version__, **values)


def _image(picture: Picture) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture.svg).decode("ascii")


def write_report(report: DemoReport, picture: Picture, path: Path) -> Path:
    """Write the page to `path`, making its folder where needed, and return the path.

    Raises:
        UserError: The file cannot be written.
    """
    write_files([(path, report_html(report, picture).encode("utf-8"))])
    return path


def write_picture(picture: Picture, folder: Path, stem: str = "schedule") -> tuple[Path, Path]:
    """Write ``<stem>.png`` and ``<stem>.svg`` into `folder`, and return both paths.

    Raises:
        UserError: A file cannot be written.
    """
    (png, _), (svg, _) = files = picture_files(picture, folder, stem)
    write_files(files)
    return png, svg


def picture_files(picture: Picture, folder: Path, stem: str) -> tuple[tuple[Path, bytes], tuple[Path, bytes]]:
    """The paths and the contents of a picture's two files."""
    return (folder / f"{stem}.png", picture.png), (folder / f"{stem}.svg", picture.svg)


def write_files(files: Sequence[tuple[Path, bytes]]) -> None:
    """Write all files or none, making their folders where needed.

    Raises:
        UserError: A file cannot be written.
    """
    folders = dict.fromkeys(path.parent for path, _ in files)
    for folder in folders:
        check_folder(folder)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    replace_files([(path, partial(_fill, content)) for path, content in files])


def _fill(content: bytes, aside: Path) -> None:
    aside.write_bytes(content)


__all__ = [
    "DemoReport",
    "PromptRow",
    "RefusedRow",
    "SiteRow",
    "SplitStep",
    "Picture",
    "ScheduleBox",
    "ScheduleEdge",
    "draw_schedule",
    "picture_files",
    "plots_html",
    "report_html",
    "write_files",
    "write_picture",
    "write_report",
]
