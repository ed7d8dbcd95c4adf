"""Charts of benchmarks: bars of times and rooflines. Matplotlib is imported when a chart is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatcher.errors import InputError, install

if TYPE_CHECKING:
    from dispatcher.timing.results import Measured, Race

#: Ours in one hue, the peers in muted ones that differ in lightness as well.
OUR_COLOURS = ("#c8401e", "#ef8a62", "#7f2a14", "#f7b799")
PEER_COLOURS = ("#c9d3dc", "#9db4c5", "#6f93ad", "#4c7391", "#8c8c8c", "#4f4f4f")
OTHER_ROOF, OTHER_POINT = "#333333", "#4c7391"
MARKERS = "osD^vP"


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


def require_matplotlib(path: str) -> None:
    """Check that a chart can be drawn to ``path``.

    Raises:
        InputError: Matplotlib is not installed, or the file is not to be a PNG.
    """
    if Path(path).suffix.lower() != ".png":
        raise InputError(f"--plot is {path!r}; expected a file name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"--plot needs matplotlib, which is not installed; {install('plot')}")


def short(problem: str) -> str:
    """A problem's name without what all of the bundled ones share."""
    return problem.replace("conv-transpose-3d-", "").replace("conv-transpose3d-", "")


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write a chart as a PNG file, a row for each panel.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(panels)
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(17, 5.6 * rows), squeeze=False, width_ratios=(1.7, 1), layout="constrained"
    )
    everything = [entry for panel in panels for entry in panel.entries if entry.times_s is not None]
    colours: dict[str, str] = {}
    for ours, palette in ((True, OUR_COLOURS), (False, PEER_COLOURS)):
        names = dict.fromkeys(entry.who for entry in everything if entry.ours == ours)
        colours |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    for (left, right), panel in zip(axes, panels, strict=True):
        _draw_bars(left, panel, colours)
        _draw_roofline(right, panel, colours)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    """Draw groups of bars, one bar for each contender, on a logarithmic scale of milliseconds."""
    groups = list(dict.fromkeys(entry.problem for entry in panel.entries))
    series = dict.fromkeys(entry.who for entry in panel.entries if entry.times_s is not None)
    width = 0.84 / max(1, len(series))
    for position, who in enumerate(series):
        mine = [entry for entry in panel.entries if entry.who == who]
        shift = (position - (len(series) - 1) / 2) * width
        shown = [(groups.index(each.problem) + shift, each.times_s) for each in mine if each.times_s is not None]
        heights = [1e3 * median for _, (median, _, _) in shown]
        below = [1e3 * max(0.0, median - low) for _, (median, low, _) in shown]
        above = [1e3 * max(0.0, high - median) for _, (median, _, high) in shown]
        bars = axis.bar(
            [place for place, _ in shown], heights, width * 0.94, yerr=(below, above), color=colours[who],
            label=who, error_kw={"elinewidth": 0.8}, zorder=2,
        )  # fmt: skip
        axis.bar_label(bars, fmt=_milliseconds, fontsize=6.5, padding=2, rotation=90)
    axis.set_xticks(range(len(groups)), [name.replace("-", "-\n", 2) for name in groups], fontsize=8)
    axis.set_yscale("log")
    axis.set_ylabel("milliseconds (log scale; lower is better)")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * 2.5)
    axis.grid(axis="y", which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="upper left", frameon=False)
    axis.set_title(panel.titles[0], loc="left")


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
        path: the PNG file to write.

    Raises:
        InputError: the file cannot be written.
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
    try:
        draw([panel], title, path)
    except OSError as error:
        raise InputError(f"--plot {str(path)!r} cannot be written: {error.strerror or error}") from error


def _entry(each: Measured, who: str, ours: bool, reached: tuple[float, float] | None = None) -> Entry:
    times_s = (each.median_s, *each.quartiles_s)
    return Entry(short(each.operator.problem.name), who, ours, times_s, reached)
