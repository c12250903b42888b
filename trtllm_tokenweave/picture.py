"""Draw the woven schedule: two lanes, the halves' work in each, and the edges between them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lane = Literal["compute", "communication"]
Half = Literal["prefix", "suffix", "whole"]
EdgeKind = Literal["fork", "join"]


@dataclass(frozen=True)
class ScheduleBox:
    """One piece of work.

    Attributes:
        lane: The stream that it runs on.
        label: What it is ("attention", "AllReduceRmsNorm").
        half: The tokens that it works on.
        start: When it begins, in model units.
        duration: How long it takes, in model units, > 0.
        waves: Waves of thread blocks that its GEMMs take, or None where that says nothing.
        site: Where it belongs ("layer 3 attention"), "" for none.
    """

    lane: Lane
    label: str
    half: Half
    start: float
    duration: float
    waves: int | None = None
    site: str = ""

    @property
    def end(self) -> float:
        """When it ends, in model units."""
        return self.start + self.duration


@dataclass(frozen=True)
class ScheduleEdge:
    """One event: box `dst` waits for box `src` on the other lane.

    Attributes:
        src: Index of the box waited for.
        dst: Index of the box that waits.
        kind: "fork" starts work on the communication stream, "join" brings it back.
    """

    src: int
    dst: int
    kind: EdgeKind


@dataclass(frozen=True)
class Picture:
    """One drawing in two formats.

    Attributes:
        png: PNG file.
        svg: SVG file; its text is drawn as paths, so that it needs no fonts.
        caption: What the picture shows, for people who cannot see it.
    """

    png: bytes
    svg: bytes
    caption: str


NOTE = "Time runs to the right in model units: not to scale, not measured."

_FILL: dict[Half, str] = {"prefix": "#2f6db5", "suffix": "#d9772b", "whole": "#5f6b7a"}
_TINT: dict[Half, str] = {"prefix": "#dbe8f7", "suffix": "#fbe5d3", "whole": "#e6e9ed"}
_EDGE: dict[EdgeKind, str] = {"fork": "#3d4753", "join": "#8a3ea8"}
_LANES: tuple[Lane, ...] = ("compute", "communication")

_LANE_Y: dict[Lane, float] = {"compute": 1.0, "communication": 0.0}
_BOX_HEIGHT = 0.56
# Inches: of the narrowest box, so that its text can be read; of the whole drawing, so that it can be looked at.
_MIN_BOX, _MIN_WIDTH, _MAX_WIDTH = 1.2, 9.0, 40.0
_HEIGHT = 3.7
_MARGIN_LEFT, _MARGIN_RIGHT = 1.45, 0.25
# Width of a character over the font's size, in DejaVu Sans, on average; rather too wide than too narrow.
_CHARACTER = {"normal": 0.62, "bold": 0.74}
# Distance of a box's lines of text, in units of the vertical axis.
_LINE = 0.128
_INK = "#1c2430"


def draw_schedule(
    boxes: Sequence[ScheduleBox], edges: Sequence[ScheduleEdge], title: str = "Woven schedule"
) -> Picture:
    """Draw boxes on two lanes and dashed edges between them.

    Args:
        boxes: At least one; boxes of one lane must not overlap.
        edges: Events between boxes of different lanes.
        title: Heading of the drawing.

    Raises:
        ValueError: No boxes, a box without duration, overlapping boxes, or an edge that names no box or stays on one
            lane.
    """
    _check(boxes, edges)
    from matplotlib.figure import Figure

    span = max(box.end for box in boxes) - min(box.start for box in boxes)
    inner = min(max(span / min(box.duration for box in boxes) * _MIN_BOX, _MIN_WIDTH), _MAX_WIDTH)
    width = inner + _MARGIN_LEFT + _MARGIN_RIGHT
    with drawing_style():
        figure = Figure(figsize=(width, _HEIGHT), facecolor="white")
        axes = figure.add_axes((_MARGIN_LEFT / width, 0.12, inner / width, 0.66))
        first = min(box.start for box in boxes)
        axes.set_xlim(first, first + span)
        axes.set_ylim(-0.5, 1.5)
        axes.axis("off")
        _draw_lanes(axes, first, span)
        # What one inch is in model units: gaps and font sizes are chosen in inches.
        unit = span / inner
        for box in boxes:
            _draw_box(axes, box, unit)
        for edge in edges:
            _draw_edge(axes, boxes[edge.src], boxes[edge.dst], edge.kind, unit)
        _draw_frame(figure, title, {box.half for box in boxes}, {edge.kind for edge in edges})
        return save_figure(figure, _caption(boxes, edges))


def drawing_style() -> AbstractContextManager[None]:
    """Matplotlib's settings: text as paths and a fixed salt, so that the same figure is the same file everywhere."""
    import matplotlib as mpl

    return mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "tokenweave", "font.family": "DejaVu Sans"})


def save_figure(figure: Figure, caption: str, dpi: int = 160) -> Picture:
    """Both formats of a figure; to be called inside the :func:`drawing_style` that it was drawn in."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(png.getvalue(), svg.getvalue(), caption)


def _check(boxes: Sequence[ScheduleBox], edges: Sequence[ScheduleEdge]) -> None:
    if not boxes:
        raise ValueError("there are no boxes to draw")
    for index, box in enumerate(boxes):
        if box.duration <= 0:
            raise ValueError(f"box {index} ({box.label}) has duration {box.duration:g}; it must be above 0")
    for lane in _LANES:
        row = sorted((box for box in boxes if box.lane == lane), key=lambda box: box.start)
        for before, after in pairwise(row):
            # Sums of durations may be off by rounding.
            if after.start < before.end - 1e-9 * max(1.0, abs(before.end)):
                raise ValueError(f"on the {lane} lane {after.label} starts before {before.label} has ended")
    for edge in edges:
        if not (0 <= edge.src < len(boxes) and 0 <= edge.dst < len(boxes)):
            raise ValueError(f"edge {edge.src} -> {edge.dst} names a box that is not there ({len(boxes)} boxes)")
        if boxes[edge.src].lane == boxes[edge.dst].lane:
            raise ValueError(f"edge {edge.src} -> {edge.dst} stays on the {boxes[edge.src].lane} lane")


def _draw_lanes(axes: Axes, first: float, span: float) -> None:
    for lane in _LANES:
        y = _LANE_Y[lane]
        axes.axhspan(y - 0.38, y + 0.38, color="#f4f6f8", zorder=0)
        axes.annotate(
            f"{lane}\nstream",
            (first, y),
            xytext=(-12, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color=_INK,
            annotation_clip=False,
        )
    axes.annotate(
        "",
        (first + span, -0.47),
        xytext=(first, -0.47),
        arrowprops={"arrowstyle": "-|>", "color": "#9aa4b0", "lw": 0.9},
        annotation_clip=False,
    )


def _draw_box(axes: Axes, box: ScheduleBox, unit: float) -> None:
    from matplotlib.patches import Rectangle

    gap = min(0.035 * unit, box.duration / 8)
    y, width = _LANE_Y[box.lane], box.duration - 2 * gap
    filled = box.lane == "compute"
    axes.add_patch(
        Rectangle(
            (box.start + gap, y - _BOX_HEIGHT / 2),
            width,
            _BOX_HEIGHT,
            facecolor=_FILL[box.half] if filled else _TINT[box.half],
            edgecolor=_FILL[box.half],
            linewidth=1.2,
            zorder=2,
        )
    )
    waves = "" if box.waves is None else f"{box.waves} wave{'' if box.waves == 1 else 's'}"
    lines = [(box.label, 9.0, "bold"), (box.half if box.half != "whole" else "all tokens", 7.5, "normal")]
    lines += [(box.site, 7.0, "normal")] if box.site else []
    lines += [(waves, 7.5, "bold")] if waves else []
    top = y + _LINE * (len(lines) - 1) / 2
    for row, (text, size, weight) in enumerate(lines):
        room = width / unit * 72 * 0.94
        axes.text(
            box.start + box.duration / 2,
            top - _LINE * row,
            text,
            ha="center",
            va="center",
            fontsize=max(min(size, room / (_CHARACTER[weight] * max(len(text), 1))), 3.0),
            fontweight=weight,
            color="white" if filled else _INK,
            # Names may hold dollar signs, which would start a formula.
            parse_math=False,
            zorder=3,
        )


def _draw_edge(axes: Axes, src: ScheduleBox, dst: ScheduleBox, kind: EdgeKind, unit: float) -> None:
    """From the lower or upper corner where `src` ends to the facing corner where `dst` begins."""
    from matplotlib.patches import FancyArrowPatch

    side = 1 if _LANE_Y[dst.lane] > _LANE_Y[src.lane] else -1
    # Forks and joins that meet at one moment stand beside each other.
    shift = 0.06 * unit
    x_src, x_dst = src.end - shift, dst.start + shift
    axes.add_patch(
        FancyArrowPatch(
            (x_src, _LANE_Y[src.lane] + side * _BOX_HEIGHT / 2),
            (x_dst, _LANE_Y[dst.lane] - side * _BOX_HEIGHT / 2),
            arrowstyle="-|>",
            mutation_scale=8,
            linestyle=(0, (3, 2)),
            linewidth=1.2,
            color=_EDGE[kind],
            shrinkA=0,
            shrinkB=0,
            clip_on=False,
            zorder=4,
        )
    )


def _draw_frame(figure: Figure, title: str, halves: set[Half], kinds: set[EdgeKind]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    width = figure.get_figwidth()
    figure.text(0.2 / width, 0.965, title, fontsize=12.5, fontweight="bold", color=_INK, va="top", parse_math=False)
    figure.text(_MARGIN_LEFT / width, 0.045, NOTE, fontsize=8, color="#5f6b7a", va="center", style="italic")
    names: dict[Half, str] = {"prefix": "prefix half", "suffix": "suffix half", "whole": "all tokens"}
    handles: list[Patch | Line2D] = [Patch(color=_FILL[half], label=names[half]) for half in names if half in halves]
    waits: dict[EdgeKind, str] = {"fork": "fork: communication starts", "join": "join: compute waits"}
    for kind, text in waits.items():
        if kind in kinds:
            handles.append(Line2D([], [], color=_EDGE[kind], linestyle=(0, (3, 2)), linewidth=1.4, label=text))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.12 / width, 0.905),
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        handlelength=1.8,
        columnspacing=1.6,
        labelcolor=_INK,
    )


def _caption(boxes: Sequence[ScheduleBox], edges: Sequence[ScheduleEdge]) -> str:
    counts = {lane: sum(box.lane == lane for box in boxes) for lane in _LANES}
    return (
        f"Two lanes: {counts['compute']} pieces of work on the compute stream, {counts['communication']} collectives "
        f"on the communication stream, {sum(edge.kind == 'fork' for edge in edges)} forks and "
        f"{sum(edge.kind == 'join' for edge in edges)} joins between them."
    )
