"""Lowering of single steps, each a launch of its own, and of the gather convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.backends.opencl.groups import Group
from dispatcher.backends.opencl.lowered import Argument, Lowered, Rows, Tensor, Value, extra_arguments, planned
from dispatcher.backends.opencl.render import (
    NORM_RUN,
    KernelOperands,
    Site,
    defines,
    kernel_text,
    reduction_defines,
    section,
    tail_macro,
)
from dispatcher.backends.opencl.target import Target, power_below, round_up
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, ScalarOperand, Softmax

#: Most columns of a pool's input that a work-item keeps combined; windows that reach further are combined one by one.
MOST_COLUMNS = 4096
#: Elements of a plane that is taken for one row: loops count them in ints.
LONGEST_LINE = 1 << 30
#: Work-items of a work-group of a kernel whose work-items have nothing to do with each other, and the groups that each
#: core of a CPU gets at least. To start a group takes more time than a short row does.
INDEPENDENT_ITEMS, SHARES = 64, 32


@dataclass(frozen=True)
class StepSource:
    """Source text of a single step.

    Attributes:
        kernel: name of the kernel.
        text: OpenCL C source.
        operands: what it reads besides its source.
        count: work-items, or results that work-groups share out; the kernel's argument of that name.
    """

    kernel: str
    text: str
    operands: KernelOperands
    count: int


def lower_step(group: Group, target: Target, real: np.dtype[Any]) -> Lowered:
    """Lower a group without a convolution to a kernel whose work-items have nothing to do with each other."""
    cpu = target.facts.cpu
    name = real_name(real)
    vec = target.facts.lanes(real) if cpu else 1
    step = group.parts[0].step if group.parts else None
    sources: tuple[Argument, ...] = (Value(group.source),)
    if group.given is not None:
        made, sources = _given(group, name, vec)
    elif step is None:
        made = _pointwise(group, name, vec, whole_rows=cpu)
    elif isinstance(step, Pool):
        made = _pool(group, step, name, vec)
    else:
        assert isinstance(step, Normalize | Softmax | Reduce)
        made = _reduction(step, group.tail, name, vec)
    return step_launch(group, target, made, sources)


def lower_gather(group: Group, target: Target, real: np.dtype[Any]) -> Lowered:
    """Lower a convolution and its tail to the kernel that computes one result after another."""
    step = group.convolution
    assert step is not None and len(group.parts) == 1
    made = gather_source(step, group.tail, real_name(real))
    return step_launch(group, target, made, (Value(group.source), Tensor(step.weight.name)), "gather")


def step_launch(
    group: Group, target: Target, made: StepSource, sources: tuple[Argument, ...], algorithm: str = "step"
) -> Lowered:
    """The launch of a kernel with a work-item for each of ``count``."""
    fair = made.count // (target.facts.compute_units * SHARES) if target.facts.cpu else INDEPENDENT_ITEMS
    local = max(1, min(INDEPENDENT_ITEMS, target.limits.work_items, fair))
    arguments = (*sources, made.operands, Value(group.output), np.uint64(made.count))
    return Lowered(
        made.kernel,
        made.text,
        (*arguments, *extra_arguments(group, made.operands)),
        round_up(made.count, local),
        local,
        group.source,
        group.output,
        planned(group, made.kernel, algorithm, {"items": made.count}),
        in_place=works_in_place(group),
    )


def works_in_place(group: Group) -> bool:
    """Whether each element of the source is read before it, and nothing else, is written."""
    first = group.steps[0]
    return isinstance(first, Pointwise | Normalize | Softmax) and group.reduction is None


def real_name(real: np.dtype[Any]) -> str:
    """``float`` or ``double``."""
    return "double" if real == np.float64 else "float"


def statistics_defines(group: Group) -> dict[str, object]:
    """What row_statistics.cl needs to know of a group."""
    found = group.gathers
    values: dict[str, object] = {
        f"GATHER_{kind.upper()}": found is not None and found.kind == kind
        for kind in ("moments", "total", "exponentials")
    }
    values["GATHER_ROWS"] = math.prod(group.steps[-1].shape[:4])
    values["USE_STORE"] = group.stored
    if found is not None and found.form is not None:
        values |= reduction_defines(found.form, "1", "GATHER")
    return values


#: Coordinates of an element in kernels that work row by row.
ROW = ("n", "c", "d", "h", "w")


def _pointwise(group: Group, real: str, vec: int, *, whole_rows: bool) -> StepSource:
    operands = KernelOperands()
    operands.gathers = group.gathers is not None
    shape = group.steps[0].shape
    _, channels, depth, height, width = shape
    shares = 1 if whole_rows else -(-width // vec)
    tail = operands.tail(group.tail, Site("c", ROW, "OUT_W - w"))
    values = {
        "CHANNELS": channels,
        "DEPTH": depth,
        "HEIGHT": height,
        "OUT_W": width,
        "SHARES": shares,
        "PARAMETERS": operands.parameters,
    }
    parts = (
        defines(values | statistics_defines(group)),
        section("row_statistics.cl"),
        tail_macro("TAIL", tail, "x"),
        section("step_pointwise.cl"),
    )
    text = kernel_text(real, vec, operands, *parts)
    return StepSource("pointwise_step", text, operands, math.prod(shape[:4]) * shares)


def _pool(group: Group, step: Pool, real: str, vec: int) -> StepSource:
    operands = KernelOperands()
    operands.gathers = group.gathers is not None
    tail = operands.tail(group.tail, Site("c", ROW, "OUT_W - w"))
    out_w, in_w, window, stride = (each[-1] for each in (step.shape, step.input_shape, step.window, step.stride))
    if vec > 1:
        vec = power_below(min(vec, in_w))
    span = round_up(out_w if step.adaptive else min(out_w, max(1, MOST_COLUMNS // 4 // stride)), vec)
    columns = in_w if step.adaptive else span * stride + (window - 1) * step.dilation[2]
    if columns > MOST_COLUMNS:
        vec = span = 1
    axes = {
        "IN": step.input_shape[2:],
        "OUT": step.shape[2:],
        "WINDOW": step.window,
        "STRIDE": step.stride,
        "DILATION": step.dilation,
        "BEFORE": [before for before, _ in step.padding],
        "AFTER": [after for _, after in step.padding],
    }
    values = {
        "CHANNELS": step.shape[1],
        **{f"{name}_{axis}": each[i] for name, each in axes.items() for i, axis in enumerate("DHW")},
        "SPAN": span,
        "COLUMNS": columns,
        "REPEAT": int(group.gathers is None and vec <= out_w <= span),
        "COUNT_PADDING": int(step.count_padding),
        "DIVISOR": step.divisor or (math.prod(step.window) if step.plain else 0),
        "ADAPTIVE": int(step.adaptive),
        **reduction_defines(step.form, "places", "POOL"),
        "PARAMETERS": operands.parameters,
    }
    parts = (
        defines(values | statistics_defines(group)),
        section("row_statistics.cl"),
        tail_macro("TAIL", tail, "x"),
        section("step_pool.cl"),
    )
    return StepSource("pool_step", kernel_text(real, vec, operands, *parts), operands, math.prod(step.shape[:4]))


def _given(group: Group, real: str, vec: int) -> tuple[StepSource, tuple[Argument, ...]]:
    """A step over whole planes whose statistics the launch before has left."""
    operands = KernelOperands()
    operands.gathers = group.gathers is not None
    step, given, reduction = group.parts[0].step, group.given, group.reduction
    assert given is not None and isinstance(step, Normalize | Softmax | Reduce)
    n, c, d, h, w = step.input_shape
    groups = step.groups if isinstance(step, Normalize) else 1
    batch, channel = 0 in step.axes, 1 in step.axes
    together = c // groups if channel else 1  # channels of a place
    parts_of_channels = c // together
    planes = (n if batch else 1) * together
    # Place `outer` is (n, part of the channels), of those that stay; plane i of it is (n, channel) of the rest.
    image = f"(i) / {together}" if batch else f"(outer) / {parts_of_channels}"
    part = "(outer)" if batch else f"(outer) % {parts_of_channels}"
    values: dict[str, object] = {
        "CHANNELS": c,
        "OUT_D": d,
        "OUT_H": h,
        "OUT_W": w,
        "PLANES(outer)": planes,
        "PLANE(outer, i)": f"(({image}) * {c} + ({part}) * {together} + (i) % {together})",
        "GIVEN_ROWS": n * c * d * h,
        "COUNT": planes * d * h * w,
        "STEP_NORMALIZE": isinstance(step, Normalize) and reduction is None,
        "STEP_REDUCE": isinstance(step, Reduce),
        "STEP_REDUCE_NORMALIZED": reduction is not None,
        **{f"GIVEN_{kind.upper()}": given.kind == kind for kind in ("moments", "total", "exponentials")},
        **statistics_defines(group),
    }
    results = n * c // planes
    affine, kernel, site = "", "softmax_given", Site("c", ROW, "OUT_W - w")
    if isinstance(step, Normalize):
        kernel = "normalize_given"
        values["EPS"] = operands.place(ScalarOperand(step.eps))
        affine = operands.affine(step)
        if reduction is not None:
            kernel, site = "normalize_reduce_given", Site("c", ("n", "c", "0", "0", "0"))
            mean = reduction.form.finish != "t"
            values["REDUCED_SHARE"] = "R(1.0)" if mean else f"(R(1.0) * {d * h * w})"
    elif isinstance(step, Reduce):
        kernel = "reduce_given"
        at = ("0" if batch else f"outer / {parts_of_channels}", "0" if channel else f"outer % {c}")
        site = Site(at[1], (*at, "0", "0", "0"))
    if given.form is not None:
        form = step.form if isinstance(step, Reduce) else given.form
        values |= reduction_defines(form, "COUNT", "REDUCE")
    elif isinstance(step, Reduce):
        values |= reduction_defines(step.form, "COUNT", "REDUCE")
    tail = operands.tail(group.tail, site)
    values |= {"KERNEL_NAME": kernel, "PARAMETERS": operands.parameters}
    parts = (
        defines(values),
        section("row_statistics.cl"),
        tail_macro("TAIL", tail, "x"),
        tail_macro("AFFINE", affine, "x"),
        section("step_given.cl"),
    )
    rows = Rows(group.source, given.numbers * n * c * d * h)
    alone = isinstance(step, Reduce) or reduction is not None
    sources: tuple[Argument, ...] = (rows,) if alone else (Value(group.source), rows)
    return StepSource(kernel, kernel_text(real, vec, operands, *parts), operands, results), sources


def run_block(count: int) -> int:
    """How many out of ``count`` terms are summed one after another before the sums of such runs are: their third root,
    since sums have three levels, but no fewer than 64, which cost nothing in accuracy."""
    return max(64, int(count ** (1 / 3)))


def _is_one_line(step: Normalize | Softmax | Reduce, riders: Sequence[Pointwise]) -> bool:
    """Whether a whole plane may be taken for one long row: all of it is reduced, and operands lie as it does."""
    plane = step.input_shape[2:]
    operands = [each for rider in riders for each in rider.arguments if not isinstance(each, ScalarOperand)]
    alike = all(each.shape[2:] == (1, 1, 1) or (each.shape[2:] == plane and plane[2] > 1) for each in operands)
    return {2, 3, 4} <= set(step.axes) and alike and math.prod(plane) <= LONGEST_LINE


def _reduction(step: Normalize | Softmax | Reduce, riders: Sequence[Pointwise], real: str, vec: int) -> StepSource:
    operands = KernelOperands()
    groups = step.groups if isinstance(step, Normalize) else 1
    n, c, d, h, w = step.input_shape
    if _is_one_line(step, riders):
        d, h, w = 1, 1, d * h * w
    # Six axes: batch, group of channels, channel in group, depth, height, width, with their strides.
    extents = (n, groups, c // groups, d, h, w)
    strides = (c * d * h * w, c // groups * d * h * w, d * h * w, h * w, w, 1)
    names = ("n", "g", "k", "d", "h", "w")
    reduced = [axis in step.axes for axis in (0, -1, 1, 2, 3, 4)]
    kept = [i for i in range(5) if not reduced[i]]
    inner = [i for i in range(5) if reduced[i]]
    width_reduced = reduced[5]
    result_extents = [1 if flag else extent for flag, extent in zip(reduced, extents, strict=True)]

    def index(i: int, source: str) -> str:
        """Index along axis i of place ``source`` among the kept axes, the last of which varies fastest."""
        below = math.prod(extents[j] for j in kept if j > i)
        return f"({source} / {below}UL % {extents[i]}UL)"

    def place(source: str, widths: Sequence[int]) -> str:
        return " + ".join([f"{index(i, source)} * {widths[i]}UL" for i in kept] or ["0"])

    result_strides = [math.prod(result_extents[i + 1 :]) for i in range(6)]
    run = 5 if width_reduced else inner[-1]
    stride = vec if width_reduced else 1
    # A norm's sums of runs are compensated: short runs cost little.
    terms = NORM_RUN if isinstance(step, Normalize) else run_block(-(-extents[run] // stride))
    block = terms * stride
    each_run = " ".join(
        [f"for (int {names[i]} = 0; {names[i]} < {extents[i]}; {names[i]}++)" for i in inner if i != run]
        + [f"for (int block = 0; block < {extents[run]}; block += {block})"]
    )
    each_in_run = (
        f"for (int {names[run]} = block; {names[run]} < min(block + {block}, {extents[run]}); {names[run]} += {stride})"
    )
    offset = " + ".join([f"{names[i]} * (size_t){strides[i]}" for i in inner] + ["w" if width_reduced else "w0"])

    def coordinates(*, result: bool) -> tuple[str, ...]:
        """Batch item, channel, depth, height and width of an element, or of a result."""
        n, g, k, d, h = (index(i, "outer") if i in kept else "0" if result else names[i] for i in range(5))
        lane = "w0" if not width_reduced else "0" if result else "w"
        return n, f"({g} * {c // groups} + {k})", d, h, lane

    at, result_at = coordinates(result=False), coordinates(result=True)
    element = Site(at[1], at, "LEFT")
    result = Site(result_at[1], result_at, "RESULT_WIDTH - w0")
    count = math.prod(extent for extent, flag in zip(extents, reduced, strict=True) if flag)
    values = {
        "USE_WIDTH_REDUCTION": width_reduced,
        "WIDTH": w,
        "COUNT": count,
        "OUTER_BASE(outer)": f"({place('(outer)', strides)})",
        "OUTER_RESULT(outer)": f"({place('(outer)', result_strides)})",
        "EACH_RUN": each_run,
        "CASCADE": max(8, math.isqrt(math.prod(extents[i] for i in inner if i != run) * -(-extents[run] // block))),
        "EACH_IN_RUN": each_in_run,
        "OFFSET": f"({offset})",
        "STEP_NORMALIZE": isinstance(step, Normalize),
        "STEP_SOFTMAX": isinstance(step, Softmax),
        "STEP_REDUCE": isinstance(step, Reduce),
    }
    affine = ""
    kernel = "softmax_step"
    if isinstance(step, Normalize):
        kernel = "normalize_step"
        values["EPS"] = operands.place(ScalarOperand(step.eps))
        affine = operands.affine(step, at[1])
    elif isinstance(step, Reduce):
        kernel = "reduce_step"
        values |= reduction_defines(step.form, "COUNT", "REDUCE")
        values |= {"REDUCE_SHIFTED": step.form.shifted, "REDUCE_LIFTED": step.form.lift != "x"}
    site = result if isinstance(step, Reduce) else element
    tail = operands.tail(riders, site)
    values["PARAMETERS"] = operands.parameters
    parts = (
        defines(values),
        tail_macro("AFFINE", affine, "x"),
        tail_macro("RESULT_TAIL" if isinstance(step, Reduce) else "TAIL", tail, "x"),
        section("step_reduction.cl"),
    )
    text = kernel_text(real, vec, operands, *parts)
    return StepSource(kernel, text, operands, math.prod(extents[i] for i in kept))


def gather_source(step: Convolution, riders: Sequence[Pointwise], real: str) -> StepSource:
    """The gather kernel of a convolution with the pointwise steps that ride on its store."""
    operands = KernelOperands()
    g = step.geometry
    values: dict[str, object] = {
        "IC": g.in_channels,
        "OC": g.out_channels,
        "GROUP_IC": g.in_channels // g.groups,
        "GROUP_OC": g.out_channels // g.groups,
        "TRANSPOSED": step.transposed,
    }
    for letter, axis in zip("DHW", g.axes, strict=True):
        values |= {
            f"I{letter}": axis.input,
            f"O{letter}": axis.output,
            f"K{letter}": axis.kernel,
            f"STRIDE_{letter}": axis.stride,
            f"STEP_{letter}": axis.step,
            f"PADDING_{letter}": axis.padding,
            f"DILATION_{letter}": axis.dilation,
        }
    tail = operands.bias(step, "oc") + operands.tail(riders, Site("oc", ("n", "oc", "od", "oh", "ow")))
    values["PARAMETERS"] = operands.parameters
    parts = (defines(values), tail_macro("TAIL", tail, "x"), section("conv_transpose3d_gather.cl"))
    text = kernel_text(real, 1, operands, *parts)
    return StepSource("conv_gather", text, operands, math.prod(step.shape))
