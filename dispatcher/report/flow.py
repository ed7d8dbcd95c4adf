"""The picture of an explanation: the pipeline from top to bottom, the launches that run its steps, and what passes
between them."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispatcher.call.explanation import Explanation
from dispatcher.interface import PlannedLaunch
from dispatcher.ops.steps import ScalarOperand, Step, TensorOperand, ValueOperand
from dispatcher.plan.groups import Flow
from dispatcher.problem.messages import counted
from dispatcher.problem.operator import Operator, storage_dtype
from dispatcher.report.layout import count
from dispatcher.timing.charts import OTHER_POINT, OTHER_ROOF, OUR_COLOURS, figure_for

#: Points: of a letter of DejaVu Sans Mono at this size, and of a line.
SIZE, LETTER, LINE = 9.0, 9.0 * 0.602, 14.0
#: Letters beside a frame, inside of it, and in a line of a long text at least.
MARGIN, INDENT, LONG_TEXT = 3, 2, 84
PALE, GREY = "#eef2f5", "#666666"


@dataclass
class Stage:
    """Launches that run the same steps, ``first .. last`` of the operator's.

    Attributes:
        launches: several, where they are passes over the same steps.
        first: None where it cannot be told which steps a launch runs.
    """

    launches: list[PlannedLaunch]
    first: int | None
    last: int


def stages(operator: Operator, launches: Sequence[PlannedLaunch]) -> list[Stage]:
    """Which steps each launch runs: the following ones, once more those of the launch before, or, for another part of
    the batch, the first ones again."""
    names = [step.op for step in operator.steps]
    found: list[Stage] = []
    for launch in launches:
        number, start = len(launch.steps), found[-1].last + 1 if found else 0
        if launch.steps and tuple(names[start : start + number]) == launch.steps:
            found.append(Stage([launch], start, start + number - 1))
        elif found and launch.steps == found[-1].launches[-1].steps:
            found[-1].launches.append(launch)
        elif launch.steps and start == len(names) and tuple(names[:number]) == launch.steps:
            found.append(Stage([launch], 0, number - 1))
        else:
            found.append(Stage([launch], None, start - 1))
    return found


def handed_over(operator: Operator, last: int) -> list[tuple[str, tuple[int, ...], int]]:
    """What later steps read of the results of steps up to ``last``: whose result, shape, bytes.

    Between launches 16-bit types are float32.
    """
    readers = Flow(operator).last_reader
    itemsize = max(4, storage_dtype(operator.dtype).itemsize)
    values = [value for value in range(1, last + 2) if readers.get(value, -1) > last]
    steps = [operator.steps[value - 1] for value in values]
    return [(step.op, visible(operator, step.shape), math.prod(step.shape) * itemsize) for step in steps]


def visible(operator: Operator, shape: Sequence[int]) -> tuple[int, ...]:
    """A value's shape without the axes that problems of its rank lack."""
    return (*shape[:2], *shape[5 - operator.problem.rank :])


# ---- lines -------------------------------------------------------------------------------------------------
@dataclass
class _Line:
    """A line of text, and what it is: of a frame or between two, a title, a step, a remark."""

    text: str
    kind: str = "step"
    framed: bool = True


def _lines(explanation: Explanation) -> Iterator[_Line]:
    operator = explanation.operator
    size = storage_dtype(operator.dtype).itemsize
    found = stages(operator, explanation.launches)
    # Parts of the batch, which run the same steps one after another, pass on together what is counted once here.
    between = sum(nbytes for last in {each.last for each in found} for *_, nbytes in handed_over(operator, last))
    passes = f", {count(between)}B passed on between them" if between else ""
    yield _Line(f"{operator.problem.name} on {explanation.device.id}", "title", False)
    yield _Line(explanation.device.name, "remark", False)
    work = f"{operator.dtype}, {operator.precision}, {count(operator.flops)}FLOP" if operator.flops else operator.dtype
    launches = counted(len(explanation.launches), "launch")
    yield _Line(f"{work}, {launches}{passes}", "remark", False)
    yield _Line("", framed=False)
    shape = operator.tensor_shapes[operator.source]
    yield _Line(f"{operator.source} {shape}, {count(math.prod(shape) * size)}B", "arrow", False)
    if not found:
        yield from _step_lines(operator, range(len(operator.steps)))
    number = 0
    for stage in found:
        for launch in stage.launches:
            number += 1
            yield _Line(f"{number}  {launch.name}", "title")
            yield from _long(f"algorithm: {launch.algorithm}")
            if launch.note and stage.last == len(operator.steps) - 1:  # nothing follows, so it is about the launch
                yield from _long(f"note: {launch.note}")
        if stage.first is None:
            yield _Line(", ".join(stage.launches[-1].steps) or "prepares what follows", "step")
        else:
            yield from _step_lines(operator, range(stage.first, stage.last + 1))
        launch = stage.launches[-1]
        if launch.detail.get("why"):
            yield from _long(f"chosen: {launch.detail['why']}")
        if stage is not found[-1]:
            passed_on = handed_over(operator, stage.last)
            if launch.note and passed_on:
                yield from _long(f"note: {launch.note}")
            for op, shape, nbytes in passed_on:
                yield _Line(f"result of {op} {shape}, {count(nbytes)}B", "arrow", False)
            if not passed_on:
                yield _Line("", framed=False)
    total = math.prod(operator.output_shape) * size
    yield _Line(f"{operator.problem.output.name} {operator.output_shape}, {count(total)}B", "arrow", False)


def _long(text: str) -> Iterator[_Line]:
    for line in textwrap.wrap(text, LONG_TEXT, break_long_words=False, break_on_hyphens=False):
        yield _Line(line, "remark")


def _step_lines(operator: Operator, indices: range) -> Iterator[_Line]:
    """Steps in columns: what they do, with what, and the shape of what they make."""
    rows = [
        (step.op, _operands(operator, step), f"-> {visible(operator, step.shape)}")
        for step in map(operator.steps.__getitem__, indices)
    ]
    wide, wider = (max(len(row[column]) for row in rows) for column in (0, 1))
    for op, operands, shape in rows:
        yield _Line(f"{op:<{wide}}  {operands:<{wider}}  {shape}")


def _operands(operator: Operator, step: Step) -> str:
    size = storage_dtype(operator.dtype).itemsize
    words = []
    for operand in step.operands:
        match operand:
            case ScalarOperand(value):
                words.append(f"{value:g}")
            case TensorOperand(name, shape):
                words.append(f"{name} {count(math.prod(shape) * size)}B")
            case ValueOperand(value):
                words.append(operator.source if value == 0 else f"result of {operator.steps[value - 1].op}")
    return ", ".join(words)


# ---- drawing -----------------------------------------------------------------------------------------------
def draw_explanation(explanation: Explanation, path: str | Path) -> None:
    """Draw an explanation.

    Raises:
        InputError: see :func:`dispatcher.timing.charts.figure_for`.
    """
    lines = list(_lines(explanation))
    letters = max(len(line.text) + 2 * (INDENT if line.framed else 0) for line in lines) + 2 * MARGIN
    # A frame takes half a line above and below.
    edges = sum(line.framed != after.framed for line, after in itertools.pairwise(lines))
    width, height = letters * LETTER, (len(lines) + 1 + 0.6 * edges) * LINE
    with figure_for(path, width / 72, height / 72) as figure:
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.set(xlim=(0, width), ylim=(height, 0))
        place, top = LINE, 0.0
        for line, after in zip(lines, [*lines[1:], _Line("", framed=False)], strict=True):
            left = (MARGIN + (INDENT if line.framed else 0)) * LETTER
            if line.kind == "arrow":
                axis.annotate(
                    "", (left, place + 0.4 * LINE), (left, place - 0.5 * LINE),
                    arrowprops={"arrowstyle": "-|>", "color": OTHER_POINT, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
                left += 2 * LETTER
            top = top or (place - 0.75 * LINE if line.framed else 0.0)
            axis.text(
                left, place, line.text, family="monospace", fontsize=SIZE, va="center", parse_math=False,
                fontweight="bold" if line.kind == "title" else "normal",
                color={"title": OUR_COLOURS[2], "remark": GREY}.get(line.kind, OTHER_ROOF), zorder=3,
            )  # fmt: skip
            place += LINE
            if line.framed != after.framed:
                place += 0.6 * LINE
            if line.framed and not after.framed:
                axis.add_patch(_frame(top, place - 0.85 * LINE - top, width))
                top = 0.0


def _frame(top: float, height: float, width: float) -> object:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (MARGIN * LETTER, top), width - 2 * MARGIN * LETTER, height, boxstyle="round,pad=0,rounding_size=5",
        facecolor=PALE, edgecolor=OTHER_POINT, linewidth=1.2, zorder=1,
    )  # fmt: skip
