"""Pictures of what the library gives: explanations, verifications, searches for options, races."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.call.explanation import Explanation
from dispatcher.check.judging import Judgement
from dispatcher.check.verifying import Verification
from dispatcher.ops.steps import axis_names
from dispatcher.report.flow import draw_explanation
from dispatcher.report.layout import options_text
from dispatcher.timing.charts import OTHER_POINT, OTHER_ROOF, OUR_COLOURS, PEER_COLOURS, draw_races, figure_for
from dispatcher.timing.results import Benchmark, Race
from dispatcher.timing.tuning import Candidate, TuneResult

#: Results of ``verify`` in a picture: the worst ones.
MOST_RESULTS = 12
#: Candidates of a search in a picture.
MOST_CANDIDATES = 30
#: The least and the largest ratio of error and bound that is drawn as it is.
LEAST_RATIO, MOST_RATIO = 1e-3, 1e4

#: Median and quartiles.
Times = tuple[float, float, float]


def draw(found: Sequence[Any], path: str | Path) -> None:
    """Draw results of one kind; of explanations, the first.

    Raises:
        InputError: see :func:`dispatcher.timing.charts.figure_for`.
    """
    match found[0]:
        case Explanation():
            draw_explanation(found[0], path)
        case Verification() | Judgement():
            draw_errors(found, path)
        case TuneResult():
            draw_candidates(found, path)
        case Race():
            draw_races(found, "kernel-dispatcher, times on this machine", Path(path))
        case Benchmark():
            races = [Race((each,), each.peers, (), len(each.times_s), True, None) for each in found]
            draw(races, path)


# ---- verify: where the errors are --------------------------------------------------------------------------
def draw_errors(results: Sequence[Verification | Judgement], path: str | Path) -> None:
    """For each result, the worst first, the largest error over its bound at each place along each axis.

    Raises:
        InputError: see :func:`dispatcher.timing.charts.figure_for`.
    """
    shown = results[:MOST_RESULTS]
    columns = max(3, *(len(result.operator.output_shape) for result in shown))
    with figure_for(path, 1.5 + 2.4 * columns, 0.5 + 2.1 * len(shown)) as figure:
        figure.set_layout_engine("constrained")
        left_out = f" of the worst {len(shown)} of {len(results)}" if len(results) > len(shown) else ""
        title = f"Largest error over its bound at each place along each axis{left_out}"
        figure.suptitle(f"{title}; {MOST_RATIO:g} stands for more, and for NaN", fontsize=11)
        for row, result in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
            _draw_result(row, result, columns)


def _draw_result(row: Any, result: Verification | Judgement, columns: int) -> None:
    """A row of panels, one for each axis; or why there are none."""
    checks = [check for check in result.checks if check.comparison is not None and check.comparison.profiles]
    title = f"{result.operator.problem.name} on {result.device.id}: {result.outcome}"
    if not checks:
        row.suptitle(title, fontsize=9, fontweight="bold", x=0.01, ha="left", parse_math=False)
        reason = textwrap.fill(result.reason or "nothing was compared", 40 * columns, break_long_words=False)
        row.subplots().set_axis_off()
        row.text(0.02, 0.5, reason, fontsize=8, va="center", parse_math=False)
        return
    worst = max(checks, key=lambda check: check.comparison.severity if check.comparison else 0.0)
    assert worst.comparison is not None
    title += f" (the worst inputs: {worst.inputs}, normwise {worst.comparison.normwise_over_bound:.2g})"
    row.suptitle(title, fontsize=9, fontweight="bold", x=0.01, ha="left", parse_math=False)
    names = {places[0]: name for name, places in axis_names(result.operator.problem.rank).items() if name != "spatial"}
    panels = row.subplots(1, columns, squeeze=False, sharey=True)[0]
    profiles = worst.comparison.profiles
    for at, (panel, profile) in enumerate(zip(panels, profiles, strict=False)):
        ratios = np.clip(np.nan_to_num(profile, nan=np.inf), LEAST_RATIO, MOST_RATIO)
        colours = np.where(ratios > 1.0, OUR_COLOURS[0], OTHER_POINT)
        panel.vlines(
            range(len(ratios)), LEAST_RATIO, ratios, colors=colours, linewidth=max(0.6, 90 / len(ratios) ** 1.1)
        )
        panel.axhline(1.0, color=OTHER_ROOF, linewidth=1.0)
        panel.set_xlim(-0.7, len(ratios) - 0.3)
        panel.set_yscale("log")
        panel.set_ylim(LEAST_RATIO, max(3.0, 2 * float(ratios.max())))
        panel.set_xlabel(names[result.operator.axes[at]], fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_xticks(range(0, len(ratios), 1 + (len(ratios) - 1) // 6))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(profiles) :]:
        panel.set_axis_off()
    panels[0].set_ylabel("error / bound", fontsize=8)


# ---- tune: candidates --------------------------------------------------------------------------------------
def draw_candidates(results: Sequence[TuneResult], path: str | Path) -> None:
    """For each search, the times of its candidates with their quartiles.

    Raises:
        InputError: see :func:`dispatcher.timing.charts.figure_for`.
    """
    heights = [0.9 + 0.2 * len(_shown(result)) for result in results]
    with figure_for(path, 11, sum(heights) + 0.3) as figure:
        figure.set_layout_engine("constrained")
        panels = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)[:, 0]
        for panel, result in zip(panels, results, strict=True):
            _draw_search(panel, result)


def _shown(result: TuneResult) -> list[tuple[Candidate, Times]]:
    """The candidates that were timed, the slowest ones left out, with median and quartiles in milliseconds."""
    timed = [(each, each.time_s, each.quartiles_s) for each in result.candidates]
    shown = [(each, (1e3 * at, 1e3 * ends[0], 1e3 * ends[1])) for each, at, ends in timed if at is not None and ends]
    return shown[:MOST_CANDIDATES]


def _draw_search(panel: Any, result: TuneResult) -> None:
    """A line for each candidate: the default, the finalists, and then those that were left out before the final, the
    fastest first. The latter have the times of earlier rounds, which cannot be compared with those of the final."""
    shown = _shown(result)
    for line, (each, (median, low, high)) in enumerate(shown):
        won = bool(result.best) and each.options == result.best
        colour = OUR_COLOURS[0] if won else OTHER_ROOF if line == 0 else PEER_COLOURS[1 if each.reason else 3]
        panel.hlines(line, low, high, color=colour, linewidth=4, alpha=0.5)
        panel.plot(median, line, "o", color=colour, markersize=5)
    finalists = sum(not each.reason for each, _ in shown)
    panel.vlines(1e3 * result.default_s, -0.6, finalists - 0.5, color=OTHER_ROOF, linewidth=0.8, linestyle=":")
    if finalists < len(shown):
        panel.axhline(finalists - 0.5, color=OTHER_POINT, linewidth=0.8)
        below = {"ha": "right", "va": "top", "fontsize": 7.5, "color": OTHER_POINT}
        place = (1.0, finalists - 0.45)
        panel.text(*place, "earlier rounds, which the final left out", transform=panel.get_yaxis_transform(), **below)
    labels = [options_text(each.options) for each, _ in shown]
    panel.set_yticks(range(len(shown)), labels, fontsize=7.5, family="monospace", parse_math=False)
    panel.set_ylim(len(shown) - 0.4, -0.6)
    panel.set_xlabel(f"milliseconds on the {result.clock}'s clock: median, quartiles", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", color="#dddddd", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
    found = f"{result.gain:.2f} times the default's speed" if result.best else "the default stays"
    more = len(result.candidates) - len(shown)
    title = f"{result.problem} on {result.device}: {found}{f'; {more} more candidates' if more else ''}"
    panel.set_title(title, fontsize=9, fontweight="bold", loc="left", parse_math=False)
