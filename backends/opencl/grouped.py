"""Lowering of reductions and pools whose results are shared out among the work-items of a work-group, for GPUs.

A reduction and a pool are the same thing here: a tensor's axes, each cut in a part that stays and a part that is
reduced, with their strides. A work-group computes ``lanes`` results that lie side by side, ``slices`` work-items to
each, which combine their parts in local memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.backends.opencl.groups import Group
from dispatcher.backends.opencl.lowered import Lowered, Value, extra_arguments, planned
from dispatcher.backends.opencl.render import (
    KernelOperands,
    Site,
    defines,
    kernel_text,
    reduction_defines,
    section,
    tail_macro,
)
from dispatcher.backends.opencl.steps import StepSource, real_name, run_block, works_in_place
from dispatcher.backends.opencl.target import Limits, Target, power_above, power_below
from dispatcher.ops.steps import Normalize, Pointwise, Pool, Reduce, ScalarOperand, Softmax

Shared = Pool | Normalize | Softmax | Reduce
#: Work-items of a work-group, and of one where there are fewer results than compute units.
WORK_ITEMS = 256
MOST_WORK_ITEMS = 1024
#: Work-groups for each compute unit that hide each other's waits.
GROUPS_PER_UNIT = 4
#: Elements that a work-item reduces by itself before it is worth combining with others.
TERMS = 8
#: Elements that lie side by side inside a reduction, at least, for neighbouring work-items to load them; where there
#: are fewer, neighbouring work-items load for neighbouring results.
SHORT_RUN = 16
#: Bytes of local memory that a compiler may want for itself.
LOCAL_SLACK = 64


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor, or a part of one.

    Attributes:
        extent: number of places along it.
        stride: elements of the tensor from one place to the next.
        reduced: False when every place has a result of its own.
        channels: channels from one place to the next.
        number: of the tensor's axis.
    """

    extent: int
    stride: int
    reduced: bool
    channels: int = 0
    number: int = 1


def axes_of(step: Shared) -> list[Axis]:
    """The axes of the tensor that ``step`` reads, the slowest first."""
    n, c, d, h, w = step.input_shape
    volume = d * h * w
    if isinstance(step, Pool):
        axes = [Axis(n, c * volume, False, number=0), Axis(c, volume, False, 1)]
        for number, (extent, window) in enumerate(zip((d, h, w), step.window, strict=True), start=2):
            stride = (h * w, w, 1)[number - 2]
            axes += [Axis(extent // window, window * stride, False, number=number)]
            axes += [Axis(window, stride, True, number=number)]
        return axes
    groups = step.groups if isinstance(step, Normalize) else 1
    batch, channel, depth, height, width = (axis in step.axes for axis in range(5))
    return [
        Axis(n, c * volume, batch, number=0),
        Axis(groups, c // groups * volume, channel and groups == 1, c // groups),
        Axis(c // groups, volume, channel, 1),
        Axis(d, h * w, depth, number=2),
        Axis(h, w, height, number=3),
        Axis(w, 1, width, number=4),
    ]


def joined(axes: Sequence[Axis]) -> list[Axis]:
    """The same places in fewer axes: without those of extent 1, and with neighbours that lie without a gap as one."""
    result: list[Axis] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        if result and result[-1].stride == axis.extent * axis.stride:
            axis = Axis(result.pop().extent * axis.extent, axis.stride, axis.reduced)  # noqa: PLW2901
        result.append(axis)
    return result


def _weighted(axes: Sequence[Axis], source: str, weights: Sequence[int], suffix: str) -> str:
    """Expression for the sum of weight times index, with the indices of place ``source`` along ``axes``."""
    total, below, terms = math.prod(axis.extent for axis in axes), 1, []
    for axis, weight in zip(reversed(axes), reversed(weights), strict=True):
        if axis.extent > 1 and weight:
            index = source if below == 1 else f"{source} / {below}{suffix}"
            if below * axis.extent < total:
                index = f"({index}) % {axis.extent}{suffix}"
            terms.append(f"({index}) * {weight}{suffix}")
        below *= axis.extent
    return " + ".join(reversed(terms)) or "0"


@dataclass(frozen=True)
class Grouping:
    """How a work-group is shared out. All three are powers of two or flags.

    Attributes:
        lanes: results of a work-group.
        slices: work-items that share a result.
        slices_first: neighbouring work-items share a result, and are not neighbouring results'.
    """

    lanes: int
    slices: int
    slices_first: bool

    @property
    def work_items(self) -> int:
        """Work-items of a work-group."""
        return self.lanes * self.slices


def grouping(results: int, terms: int, run: int, limits: Limits, itemsize: int) -> Grouping:
    """How to share out ``results`` results over ``terms`` elements each.

    Args:
        results: of the whole launch.
        terms: elements that a result combines.
        run: how many of them lie side by side.
        limits: of the device; never exceeded.
        itemsize: bytes of an element; a work-item needs one in local memory.
    """
    room = min(limits.work_items, max(1, (limits.local_memory - LOCAL_SLACK) // itemsize))
    few = results < limits.compute_units
    items = power_below(min(room, MOST_WORK_ITEMS if few else WORK_ITEMS))
    together = power_below(min(limits.multiple, items))
    worthwhile = power_above(-(-terms // TERMS))
    slices_first = run >= SHORT_RUN
    if slices_first:
        slices = min(items, max(worthwhile, min(together, power_above(terms))))
        lanes = power_above(-(-results // limits.compute_units))
    else:
        lanes = power_above(results)
        wanted = -(-limits.compute_units * GROUPS_PER_UNIT * items // results)
        slices = min(worthwhile, power_above(wanted), items // min(together, lanes))
    return Grouping(min(items // slices, lanes), slices, slices_first)


def lower_grouped(step: Shared, riders: Sequence[Pointwise], real: str, limits: Limits) -> tuple[StepSource, Grouping]:
    """Lower ``step`` with the pointwise steps that ride on its store.

    Args:
        step: a pool, or a step that reduces over axes.
        riders: pointwise steps behind it.
        real: ``float`` or ``double``.
        limits: that a work-group has to keep to.
    """
    operands = KernelOperands()
    axes = axes_of(step)
    kept = [axis for axis in axes if not axis.reduced]
    reduced = [axis for axis in axes if axis.reduced]
    results, terms = (math.prod(axis.extent for axis in part) for part in (kept, reduced))
    inner = joined(reduced)
    run = inner[-1].extent if inner and inner[-1].stride == 1 else 1
    group = grouping(results, terms, run, limits, 8 if real == "double" else 4)
    stretch = run_block(-(-terms // group.slices)) * group.slices
    # Every index, and what is added to one, has to fit.
    small = math.prod(step.input_shape) + stretch + group.work_items < 1 << 32
    suffix = "u" if small else "ul"

    def place(part: Sequence[Axis], source: str) -> str:
        within = joined(part)
        return _weighted(within, source, [axis.stride for axis in within], suffix)

    def channel(part: Sequence[Axis], source: str) -> str:
        return _weighted(part, source, [axis.channels for axis in part], suffix)

    def coordinate(number: int, part: Sequence[Axis], source: str) -> str:
        return _weighted(part, source, [int(axis.number == number) for axis in part], suffix)

    result_at = [coordinate(number, kept, "result") for number in range(5)]
    result_at[1] = "RESULT_CHANNEL(result)"
    at = [f"{result_at[number]} + {coordinate(number, reduced, 'i')}" for number in range(5)]
    at[1] = "CHANNEL(result, i)"
    values: dict[str, object] = {
        "INDEX": "uint" if small else "ulong",
        "LANES": group.lanes,
        "SLICES": group.slices,
        "USE_SLICES_FIRST": group.slices_first,
        "PARTIAL_ELEMENTS": group.work_items if group.slices > 1 else 1,
        "COUNT": f"{terms}{suffix}",
        "STRETCH": f"{stretch}{suffix}",
        "PLACE(result)": f"({place(kept, '(result)')})",
        "OFFSET(i)": f"({place(reduced, '(i)')})",
        "RESULT_CHANNEL(result)": f"({channel(kept, '(result)')})",
        "CHANNEL(result, i)": f"({channel(kept, '(result)')} + {channel(reduced, '(i)')})",
        "STEP_NORMALIZE": isinstance(step, Normalize),
        "STEP_SOFTMAX": isinstance(step, Softmax),
        "STEP_REDUCE": isinstance(step, Reduce | Pool),
    }
    affine, kernel = "", "softmax_group"
    if isinstance(step, Normalize):
        kernel = "normalize_group"
        values["EPS"] = operands.place(ScalarOperand(step.eps))
        affine = operands.affine(step)
    elif isinstance(step, Reduce | Pool):
        kernel = "pool_group" if isinstance(step, Pool) else "reduce_group"
        values["KERNEL_NAME"] = kernel
        values |= reduction_defines(step.form, "COUNT", "REDUCE") | {"REDUCE_SHIFTED": step.form.shifted}
    whole = isinstance(step, Reduce | Pool)
    site = Site(result_at[1], tuple(result_at)) if whole else Site(at[1], tuple(at))
    tail = operands.tail(riders, site)
    values["PARAMETERS"] = operands.parameters
    parts = (
        defines(values),
        section("slices.cl"),
        tail_macro("AFFINE", affine),
        tail_macro("RESULT_TAIL" if whole else "TAIL", tail, "x"),
        section("group_reduction.cl"),
    )
    return StepSource(kernel, kernel_text(real, 1, operands, *parts), operands, results), group


def lower_shared(group: Group, target: Target, real: np.dtype[Any]) -> Lowered:
    """Lower a group whose first step reduces, for a device whose work-groups share out the work."""
    step = group.parts[0].step
    assert isinstance(step, Shared)
    made, shares = lower_grouped(step, group.tail, real_name(real), target.limits)
    detail = {"items": made.count, "results_per_group": shares.lanes, "work_items_per_result": shares.slices}
    arguments = (Value(group.source), made.operands, Value(group.output), np.uint64(made.count))
    return Lowered(
        made.kernel,
        made.text,
        (*arguments, *extra_arguments(group, made.operands)),
        -(-made.count // shares.lanes) * shares.work_items,
        shares.work_items,
        group.source,
        group.output,
        planned(group, made.kernel, "step", detail),
        in_place=works_in_place(group),
        local_bytes=shares.work_items * real.itemsize,
    )
