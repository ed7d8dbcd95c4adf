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
    from dispatcher.timing.results import Benchmark, Measured, Race

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


def draw_bars(axis: Any, groups: Sequence[str], series: Sequence[Bars]) -> None:
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


def draw_roofline(
    axis: Any,
    roofs: Sequence[Roof],
    points: Sequence[Point],
    markers: Mapping[str, str],
    colours: Mapping[str, tuple[str, bool]],
) -> None:
    """Draw roofs and the points under them.

    Args:
        axis: Matplotlib's axis.
        roofs: what the devices can do; where there are several, the legend has to say how much.
        points: what was reached.
        markers: operator to its marker, for the legend.
        colours: contender to its colour and whether its points are hollow, for the legend.
    """
    intensities = [point.intensity for point in points]
    edges = [roof.gflops / roof.gbytes_per_s for roof in roofs]
    left, right = min([*intensities, *edges]) / 2, max([*intensities, *edges]) * 2
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
    for point in points:
        face, edge = ("white", point.colour) if point.hollow else (point.colour, point.colour)
        axis.plot(
            point.intensity, point.gflops, point.marker, color=face, markeredgecolor=edge, markersize=8,
            zorder=3 if point.hollow else 4,
        )  # fmt: skip
    for label, marker in markers.items():
        axis.plot([], [], marker, color="#777777", label=label)
    for label, (colour, hollow) in colours.items():
        axis.plot([], [], "s", color="white" if hollow else colour, markeredgecolor=colour, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte (each input and output once)")
    axis.set_ylabel("GFLOP/s of the plain convolution; Winograd does fewer")
    axis.grid(which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def new_figure(rows: int) -> tuple[Any, Any]:
    """A figure with ``rows`` rows of bars and a roofline; draws to files only.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, 2, figsize=(17, 5.6 * rows), squeeze=False, width_ratios=(1.7, 1), layout="constrained"
    )
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file and forget it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_races(races: Sequence[Race], title: str, path: Path) -> None:
    """Write a chart of what ``dispatcher bench`` measured: times of warm calls, and a roofline.

    Args:
        races: at least one of them with a result.
        title: heading.
        path: the PNG file to write.

    Raises:
        InputError: the file cannot be written.
    """
    shown = [race for race in races if race.results]
    mine = {result.name: result.device.name for race in shown for result in race.results}
    labels = {_peer_name(peer): None for race in shown for peer in race.peers}
    colours = colours_of(list(mine), list(labels))
    figure, ((bars, roofline),) = new_figure(1)
    contenders = [
        {**{each.name: each for each in race.results}, **{_peer_name(peer): peer for peer in race.peers}}
        for race in shown
    ]
    draw_bars(
        bars,
        [short(race.results[0].operator.problem.name) for race in shown],
        [
            Bars(name, colour, [_times(row[name]) if name in row else None for row in contenders])
            for name, colour in colours.items()
        ],
    )
    bars.set_title("Time of a warm call (median, quartiles)", loc="left")
    _draw_points(roofline, shown, colours)
    figure.suptitle(title)
    try:
        save(figure, path)
    except OSError as error:
        raise InputError(f"--plot {str(path)!r} cannot be written: {error.strerror or error}") from error


def _peer_name(peer: Any) -> str:
    return str(peer.name) if peer.place == "cpu" else f"{peer.name} ({peer.place})"


def _times(each: Measured) -> tuple[float, float, float]:
    return each.median_s, *each.quartiles_s


def _draw_points(axis: Any, races: Sequence[Race], colours: Mapping[str, str]) -> None:
    """The roofline: cold kernels of ours where the device tells, else whole cold calls; no peers."""
    roofs: dict[str, Roof] = {}
    points: list[Point] = []
    markers: dict[str, str] = {}
    for number, race in enumerate(races):
        for result in race.results:
            if result.roofline is None:
                continue
            name = short(result.operator.problem.name)
            markers.setdefault(name, MARKERS[number % len(MARKERS)])
            limits = result.roofline
            roofs.setdefault(
                result.name,
                Roof(colours[result.name], limits.gflops, limits.gbytes_per_s),
            )
            if result.operator.flops:
                points.append(_point(result, markers[name], colours[result.name]))
    if not points:
        axis.set_axis_off()
        axis.set_title("No roofline: no device here was measured", loc="left")
        return
    draw_roofline(
        axis, list(roofs.values()), points, markers, {name: (colours[name], False) for name in roofs}
    )
    axis.set_title("Roofline (kernels, caches cold)", loc="left")


def _point(result: Benchmark, marker: str, colour: str) -> Point:
    seconds = (result.cold.kernel or result.cold.wall).median_s
    operator = result.operator
    return Point(operator.flops / operator.ideal_bytes, operator.flops / seconds / 1e9, marker, colour)
