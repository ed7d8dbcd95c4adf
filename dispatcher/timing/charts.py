"""Charts of benchmarks: bars of times and rooflines. Matplotlib is imported when a chart is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatcher.errors import InputError

if TYPE_CHECKING:
    from dispatcher.timing.results import Measured, Race

#: Ours in one hue, the peers in muted ones that differ in lightness as well.
OUR_COLOURS = ("#c8401e", "#ef8a62", "#7f2a14", "#f7b799")
PEER_COLOURS = ("#c9d3dc", "#9db4c5", "#6f93ad", "#4c7391", "#8c8c8c", "#4f4f4f")
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Bars:
    """The bars of one contender.

    Attributes:
        label: who it is.
        colour: of the bars.
        times_s: median and quartiles in seconds for each group of bars; None where it has no time.
    """

    label: str
    colour: str
    times_s: Sequence[tuple[float, float, float] | None]


@dataclass(frozen=True)
class Roof:
    """What a device can do at best: operations in 1e9 a second, and bytes in 1e9 a second."""

    colour: str
    gflops: float
    gbytes_per_s: float


@dataclass(frozen=True)
class Point:
    """One operator under a roof.

    Attributes:
        intensity: operations for each ideal byte.
        gflops: what was reached.
        marker: stands for the operator.
        colour: stands for who ran it.
        hollow: drawn as an outline.
    """

    intensity: float
    gflops: float
    marker: str
    colour: str
    hollow: bool = False


def require_matplotlib(path: str) -> None:
    """Check that a chart can be drawn to ``path``.

    Raises:
        InputError: Matplotlib is not installed, or the file is not to be a PNG.
    """
    if Path(path).suffix.lower() != ".png":
        raise InputError(f"--plot is {path!r}; expected a file name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not installed; pip install 'kernel-dispatcher[plot]'"
        )


def colours_of(ours: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """A colour for each contender."""
    palettes = ((ours, OUR_COLOURS), (peers, PEER_COLOURS))
    return {name: palette[i % len(palette)] for names, palette in palettes for i, name in enumerate(names)}


def short(problem: str) -> str:
    """A problem's name without what all of the bundled ones share."""
    return problem.replace("conv-transpose-3d-", "").replace("conv-transpose3d-", "")


@dataclass(frozen=True)
class Panel:
    """A row of a chart: bars of times, and a roofline.

    Attributes:
        titles: of the two.
        groups: names of the groups of bars.
        series: the bars of each contender.
        roofs: what the devices can do; where there are several, the legend has to say how much.
        points: what was reached; without any, there is no roofline.
        markers: operator to its marker, for the legend.
        colours: contender to its colour and whether its points are hollow, for the legend.
    """

    titles: tuple[str, str]
    groups: Sequence[str]
    series: Sequence[Bars]
    roofs: Sequence[Roof]
    points: Sequence[Point]
    markers: Mapping[str, str]
    colours: Mapping[str, tuple[str, bool]]


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
    for row, panel in zip(axes, panels, strict=True):
        _draw_bars(row[0], panel.groups, panel.series)
        row[0].set_title(panel.titles[0], loc="left")
        if panel.points:
            _draw_roofline(row[1], panel)
            row[1].set_title(panel.titles[1], loc="left")
        else:
            row[1].set_axis_off()
            row[1].set_title("No roofline: no device here was measured", loc="left")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(axis: Any, groups: Sequence[str], series: Sequence[Bars]) -> None:
    """Draw groups of bars, one bar for each contender, on a logarithmic scale of milliseconds."""
    width = 0.84 / len(series)
    for position, each in enumerate(series):
        shown = [(index, time) for index, time in enumerate(each.times_s) if time is not None]
        if not shown:
            continue
        places = [index + (position - (len(series) - 1) / 2) * width for index, _ in shown]
        heights = [1e3 * median for _, (median, _, _) in shown]
        below = [1e3 * max(0.0, median - low) for _, (median, low, _) in shown]
        above = [1e3 * max(0.0, high - median) for _, (median, _, high) in shown]
        bars = axis.bar(
            places, heights, width * 0.94, yerr=(below, above), color=each.colour, label=each.label,
            error_kw={"elinewidth": 0.8}, zorder=2,
        )  # fmt: skip
        axis.bar_label(
            bars,
            fmt=lambda ms: f"{ms:.3g}" if ms < 100 else f"{ms:.0f}",
            fontsize=6.5,
            padding=2,
            rotation=90,
        )
    axis.set_xticks(range(len(groups)), [name.replace("-", "-\n", 2) for name in groups], fontsize=8)
    axis.set_yscale("log")
    axis.set_ylabel("milliseconds (log scale; lower is better)")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * 2.5)
    axis.grid(axis="y", which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="upper left", frameon=False)


def _draw_roofline(axis: Any, panel: Panel) -> None:
    """Draw roofs and the points under them."""
    roofs = panel.roofs
    intensities = [
        *(point.intensity for point in panel.points),
        *(roof.gflops / roof.gbytes_per_s for roof in roofs),
    ]
    left, right = min(intensities) / 2, max(intensities) * 2
    line = np.geomspace(left, right, 200)
    for roof in roofs:
        axis.plot(
            line,
            np.minimum(roof.gflops, roof.gbytes_per_s * line),
            color=roof.colour,
            linewidth=1.5,
            zorder=2,
        )
    if len(roofs) == 1:
        (roof,) = roofs
        axis.annotate(
            f"{roof.gflops:.0f} GFLOP/s of multiply-adds", (right, roof.gflops),
            ha="right", va="bottom", fontsize=8,
        )  # fmt: skip
        axis.annotate(
            f"{roof.gbytes_per_s:.0f} GB/s", (left, roof.gbytes_per_s * left), ha="left", va="bottom",
            fontsize=8, xytext=(4, 8), textcoords="offset points",
        )  # fmt: skip
    for point in panel.points:
        face, edge = ("white", point.colour) if point.hollow else (point.colour, point.colour)
        axis.plot(
            point.intensity, point.gflops, point.marker, color=face, markeredgecolor=edge, markersize=8,
            zorder=3 if point.hollow else 4,
        )  # fmt: skip
    for label, marker in panel.markers.items():
        axis.plot([], [], marker, color="#777777", label=label)
    for label, (colour, hollow) in panel.colours.items():
        axis.plot([], [], "s", color="white" if hollow else colour, markeredgecolor=colour, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte (each input and output once)")
    axis.set_ylabel("GFLOP/s of the plain convolution; Winograd does fewer")
    axis.grid(which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


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
    shown = [race for race in races if race.results]
    contenders: list[dict[str, Measured]] = [
        {**{each.name: each for each in race.results}, **{_peer_name(peer): peer for peer in race.peers}}
        for race in shown
    ]
    mine = list(dict.fromkeys(result.name for race in shown for result in race.results))
    colours = colours_of(mine, [name for name in dict.fromkeys(_names(contenders)) if name not in mine])
    roofs: dict[str, Roof] = {}
    points: list[Point] = []
    markers: dict[str, str] = {}
    for number, race in enumerate(shown):
        for result in race.results:
            limits, operator, colour = result.roofline, result.operator, colours[result.name]
            if limits is None:
                continue
            roofs.setdefault(result.name, Roof(colour, limits.gflops, limits.gbytes_per_s))
            marker = markers.setdefault(short(operator.problem.name), MARKERS[number % len(MARKERS)])
            if operator.flops:
                gflops = operator.flops / (result.cold.kernel or result.cold.wall).median_s / 1e9
                points.append(Point(operator.flops / operator.ideal_bytes, gflops, marker, colour))
    panel = Panel(
        ("Time of a warm call (median, quartiles)", "Roofline (kernels, caches cold)"),
        [short(race.results[0].operator.problem.name) for race in shown],
        [
            Bars(name, colour, [_times(row[name]) if name in row else None for row in contenders])
            for name, colour in colours.items()
        ],
        list(roofs.values()),
        points,
        markers,
        {name: (colours[name], False) for name in roofs},
    )
    try:
        draw([panel], title, path)
    except OSError as error:
        raise InputError(f"--plot {str(path)!r} cannot be written: {error.strerror or error}") from error


def _names(contenders: Sequence[Mapping[str, Measured]]) -> list[str]:
    return [name for row in contenders for name in row]


def _peer_name(peer: Any) -> str:
    return str(peer.name) if peer.place == "cpu" else f"{peer.name} ({peer.place})"


def _times(each: Measured) -> tuple[float, float, float]:
    return each.median_s, *each.quartiles_s
