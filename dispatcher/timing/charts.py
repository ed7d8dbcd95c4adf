"""Charts of benchmarks: bars of times and rooflines; and what all pictures share. Drawing one imports Matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatcher.errors import InputError, install
from dispatcher.problem.messages import brief

if TYPE_CHECKING:
    from dispatcher.timing.results import Measured, Race

#: Ours in one hue, the peers in muted ones that differ in lightness as well.
OUR_COLOURS = ("#c8401e", "#ef8a62", "#7f2a14", "#f7b799")
PEER_COLOURS = ("#c9d3dc", "#9db4c5", "#6f93ad", "#4c7391", "#8c8c8c", "#4f4f4f")
OTHER_ROOF, OTHER_POINT = "#333333", "#4c7391"
MARKERS = "osD^vP"
#: What a file name may end in, and what is left out of such files so that the same picture is the same bytes.
FORMATS: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Entry:
    """One contender on one problem.

    Attributes:
        problem: names a group of bars, and has a marker.
        who: the contender, who has a colour.
        ours: whether it is one of ours.
        times_s: median and quartiles; None where there is no bar, and the point in the roofline is an outline.
        reached: operations for each ideal byte, and operations in 1e9 a second; None without a point.
    """

    problem: str
    who: str
    ours: bool
    times_s: tuple[float, float, float] | None
    reached: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """A row of a chart: bars of times, and a roofline where there are points.

    Attributes:
        titles: of the two.
        entries: what is drawn.
        roofs: what a contender, or everybody, can do at best: operations and bytes, both in 1e9 a second.
    """

    titles: tuple[str, str]
    entries: Sequence[Entry]
    roofs: Mapping[str, tuple[float, float]]


def require_matplotlib(path: str | Path) -> None:
    """Check that a picture can be drawn to ``path``.

    Raises:
        InputError: Matplotlib is not installed, or the file is none of :data:`FORMATS`.
    """
    if not isinstance(path, str | os.PathLike) or Path(path).suffix.lower() not in FORMATS:
        shown = brief(str(path) if isinstance(path, os.PathLike) else path)
        raise InputError(f"the picture's file is {shown}; expected a name that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"a picture needs matplotlib, which is not installed; {install('plot')}")


@contextmanager
def figure_for(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, which is written to ``path`` in the end; the caller's settings of Matplotlib do not
    matter, and stay.

    Raises:
        InputError: see :func:`require_matplotlib`; or the file cannot be written.
    """
    require_matplotlib(path)
    import matplotlib.style
    from matplotlib.figure import Figure

    fixed = {"svg.hashsalt": "kernel-dispatcher", "svg.fonttype": "none"}
    with matplotlib.style.context("default"), matplotlib.rc_context(fixed):
        figure = Figure(figsize=(width, height))
        yield figure
        try:
            figure.savefig(path, dpi=110, metadata=FORMATS[Path(path).suffix.lower()])
        except OSError as error:
            raise InputError(f"the picture {str(path)!r} cannot be written: {error.strerror or error}") from error


def short(problem: str) -> str:
    """A problem's name without what all of the bundled ones share."""
    return problem.replace("conv-transpose-3d-", "").replace("conv-transpose3d-", "")


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write a chart, a row for each panel.

    Raises:
        InputError: see :func:`figure_for`.
    """
    everything = [entry for panel in panels for entry in panel.entries if entry.times_s is not None]
    colours: dict[str, str] = {}
    for ours, palette in ((True, OUR_COLOURS), (False, PEER_COLOURS)):
        names = dict.fromkeys(entry.who for entry in everything if entry.ours == ours)
        colours |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    lines = [sum(entry.times_s is not None for entry in panel.entries) for panel in panels]
    groups = [len({entry.problem for entry in panel.entries}) for panel in panels]
    heights = [max(4.5, 1.6 + 0.17 * bars + 0.34 * names) for bars, names in zip(lines, groups, strict=True)]
    with figure_for(path, 17, sum(heights)) as figure:
        figure.set_layout_engine("constrained")
        axes = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(1.5, 1), height_ratios=heights)
        for (left, right), panel in zip(axes, panels, strict=True):
            _draw_bars(left, panel, colours)
            _draw_roofline(right, panel, colours)
        figure.suptitle(title)


def _draw_bars(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    """Draw bars under their problem's name, one for each contender, on a logarithmic scale of milliseconds."""
    groups = list(dict.fromkeys(entry.problem for entry in panel.entries))
    series = dict.fromkeys(entry.who for entry in panel.entries if entry.times_s is not None)
    places: dict[str, list[tuple[int, tuple[float, float, float]]]] = {who: [] for who in series}
    line = 0
    for group in groups:
        axis.text(
            0.0, line, group, transform=axis.get_yaxis_transform(), va="center", fontsize=9, fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=3,
        )  # fmt: skip
        for entry in panel.entries:
            if entry.problem == group and entry.times_s is not None:
                line += 1
                places[entry.who].append((line, entry.times_s))
        line += 2
    for who, shown in places.items():
        medians = [1e3 * median for _, (median, _, _) in shown]
        below = [1e3 * max(0.0, median - low) for _, (median, low, _) in shown]
        above = [1e3 * max(0.0, high - median) for _, (median, _, high) in shown]
        axis.barh(
            [place for place, _ in shown], medians, 0.86, xerr=(below, above), color=colours[who], label=who,
            error_kw={"elinewidth": 0.8}, zorder=2,
        )  # fmt: skip
        for (place, (_, _, high)), median in zip(shown, medians, strict=True):
            axis.annotate(
                _milliseconds(median), (max(median, 1e3 * high), place), (4, 0), textcoords="offset points",
                va="center", fontsize=7.5,
            )  # fmt: skip
    axis.set_ylim(line - 1, -1)
    axis.set_yticks([])
    axis.set_xscale("log")
    left, right = axis.get_xlim()
    axis.set_xlim(left, right * (right / left) ** 0.06)
    axis.set_xlabel("milliseconds (log scale; shorter is better)")
    axis.grid(axis="x", which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    axis.set_title(panel.titles[0], loc="left", pad=44 if len(series) > 4 else 30)


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _draw_roofline(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    """Draw roofs and the points under them; where there are several roofs, the legend has to say how much."""
    points = [(entry, *entry.reached) for entry in panel.entries if entry.reached is not None]
    if not points:
        axis.set_axis_off()
        axis.set_title("No roofline: no device here was measured", loc="left")
        return
    edges = [*(x for _, x, _ in points), *(gflops / gbytes for gflops, gbytes in panel.roofs.values())]
    left, right = min(edges) / 2, max(edges) * 2
    line = np.geomspace(left, right, 200)
    for who, (gflops, gbytes) in panel.roofs.items():
        roof = np.minimum(gflops, gbytes * line)
        axis.plot(line, roof, color=colours.get(who, OTHER_ROOF), linewidth=1.5, zorder=2)
        if len(panel.roofs) == 1:
            axis.annotate(
                f"{gflops:.0f} GFLOP/s of multiply-adds", (right, gflops), ha="right", va="bottom", fontsize=8
            )
            axis.annotate(
                f"{gbytes:.0f} GB/s", (left, gbytes * left), ha="left", va="bottom", fontsize=8,
                xytext=(4, 8), textcoords="offset points",
            )  # fmt: skip
    problems = list(dict.fromkeys(entry.problem for entry in panel.entries))
    markers = {name: MARKERS[number % len(MARKERS)] for number, name in enumerate(problems)}
    for name in dict.fromkeys(entry.problem for entry, _, _ in points):
        axis.plot([], [], markers[name], color="#777777", label=name)
    known: set[str] = set()
    for entry, intensity, gflops in points:
        edge = colours.get(entry.who, OTHER_POINT)
        style = {"color": "white" if entry.times_s is None else edge, "markeredgecolor": edge}
        order = 3 if entry.times_s is None else 4
        axis.plot(intensity, gflops, markers[entry.problem], markersize=8, zorder=order, **style)
        if entry.who not in known:
            axis.plot([], [], "s", label=entry.who, **style)
        known.add(entry.who)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte (each input and output once)")
    axis.set_ylabel("GFLOP/s of the plain convolution; Winograd does fewer")
    axis.grid(which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axis.set_title(panel.titles[1], loc="left")


def draw_races(races: Sequence[Race], title: str, path: Path) -> None:
    """Write a chart of what ``dispatcher bench`` measured: times of warm calls, and a roofline.

    The roofline has cold kernels of ours where the device tells, else whole cold calls; no peers.

    Args:
        races: at least one of them with a result.
        title: heading.
        path: the file to write.

    Raises:
        InputError: see :func:`figure_for`.
    """
    entries: list[Entry] = []
    roofs: dict[str, tuple[float, float]] = {}
    for race in races:
        for result in race.results:
            reached, operator = None, result.operator
            if result.roofline is not None:
                roofs[result.name] = (result.roofline.gflops, result.roofline.gbytes_per_s)
                if operator.flops:
                    gflops = operator.flops / (result.cold.kernel or result.cold.wall).median_s / 1e9
                    reached = (operator.flops / operator.ideal_bytes, gflops)
            entries.append(_entry(result, result.name, True, reached))
        for peer in race.peers if race.results else ():
            where = "" if peer.place == "cpu" else f" ({peer.place})"
            entries.append(_entry(peer, f"{peer.name}{where}", False))
    panel = Panel(("Time of a warm call (median, quartiles)", "Roofline (kernels, caches cold)"), entries, roofs)
    draw([panel], title, path)


def _entry(each: Measured, who: str, ours: bool, reached: tuple[float, float] | None = None) -> Entry:
    times_s = (each.median_s, *each.quartiles_s)
    return Entry(short(each.operator.problem.name), who, ours, times_s, reached)
