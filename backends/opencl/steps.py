"""Lowering of single steps, each a launch of its own, and of the gather convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.backends.opencl.render import (
    KernelOperands,
    Site,
    defines,
    kernel_text,
    reduction_defines,
    section,
    tail_macro,
)
from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Softmax,
    Step,
)

#: Widest pooling window that is folded in vectors; a wider one is folded one element at a time.
VECTOR_WINDOW = 64


@dataclass(frozen=True)
class StepSource:
    """What a launch of a single step needs.

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


def lower_step(
    step: Step, riders: Sequence[Pointwise], real: str, vec: int, *, whole_rows: bool = True
) -> StepSource:
    """Lower ``step`` with the pointwise steps that ride on its store.

    Args:
        step: any step but a convolution.
        riders: pointwise steps behind it.
        real: ``float`` or ``double``.
        vec: lanes of a vector.
        whole_rows: a work-item of a pointwise step owns a row, and not a single vector of one.
    """
    match step:
        case Pointwise():
            return _pointwise((step, *riders), real, vec, whole_rows)
        case Pool():
            return _pool(step, riders, real, vec)
        case Normalize() | Softmax() | Reduce():
            return _reduction(step, riders, real, vec)
    raise AssertionError(f"no kernel for {type(step).__name__}")


def _pointwise(chain: Sequence[Pointwise], real: str, vec: int, whole_rows: bool) -> StepSource:
    operands = KernelOperands()
    _, channels, depth, height, width = chain[0].shape
    shares = 1 if whole_rows else -(-width // vec)
    tail = operands.tail(chain, Site("c", ("n", "c", "d", "h", "w"), "WIDTH - w"))
    values = {
        "CHANNELS": channels,
        "DEPTH": depth,
        "HEIGHT": height,
        "WIDTH": width,
        "SHARES": shares,
        "PARAMETERS": operands.parameters,
    }
    parts = (defines(values), tail_macro("TAIL", tail, "x"), section("step_pointwise.cl"))
    text = kernel_text(real, vec, operands, *parts)
    return StepSource("pointwise_step", text, operands, math.prod(chain[0].shape[:4]) * shares)


def _pool(step: Pool, riders: Sequence[Pointwise], real: str, vec: int) -> StepSource:
    operands = KernelOperands()
    window = step.window
    tail = operands.tail(riders, Site("c", ("n", "c", "d", "h", "w"), "OUT_W - w"))
    values = {
        "CHANNELS": step.shape[1],
        **dict(zip(("IN_D", "IN_H", "IN_W"), step.input_shape[2:], strict=True)),
        **dict(zip(("OUT_D", "OUT_H", "OUT_W"), step.shape[2:], strict=True)),
        **dict(zip(("WINDOW_D", "WINDOW_H", "WINDOW_W"), window, strict=True)),
        **reduction_defines(step.form, f"{math.prod(window)}", "POOL"),
        "PARAMETERS": operands.parameters,
    }
    parts = (defines(values), tail_macro("TAIL", tail, "x"), section("step_pool.cl"))
    text = kernel_text(real, vec if window[2] <= VECTOR_WINDOW else 1, operands, *parts)
    return StepSource("pool_step", text, operands, math.prod(step.shape[:4]))


def run_block(count: int) -> int:
    """How many out of ``count`` terms are summed one after another before the sums of such runs are: their third root,
    since sums have three levels, but no fewer than 64, which cost nothing in accuracy."""
    return max(64, int(count ** (1 / 3)))


def _reduction(
    step: Normalize | Softmax | Reduce, riders: Sequence[Pointwise], real: str, vec: int
) -> StepSource:
    operands = KernelOperands()
    groups = step.groups if isinstance(step, Normalize) else 1
    n, c, d, h, w = step.input_shape
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
    block = run_block(-(-extents[run] // stride)) * stride
    each_run = " ".join(
        [f"for (int {names[i]} = 0; {names[i]} < {extents[i]}; {names[i]}++)" for i in inner if i != run]
        + [f"for (int block = 0; block < {extents[run]}; block += {block})"]
    )
    each_in_run = (
        f"for (int {names[run]} = block; {names[run]} < min(block + {block}, {extents[run]}); "
        f"{names[run]} += {stride})"
    )
    offset = " + ".join(
        [f"{names[i]} * (size_t){strides[i]}" for i in inner] + ["w" if width_reduced else "w0"]
    )

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
        "CASCADE": max(
            8, math.isqrt(math.prod(extents[i] for i in inner if i != run) * -(-extents[run] // block))
        ),
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


def lower_gather(step: ConvTranspose3d, riders: Sequence[Pointwise], real: str) -> StepSource:
    """Lower a convolution to the gather kernel, with the pointwise steps that ride on its store."""
    operands = KernelOperands()
    g = step.geometry
    values: dict[str, object] = {
        "IC": g.in_channels,
        "OC": g.out_channels,
        "GROUP_IC": g.in_channels // g.groups,
        "GROUP_OC": g.out_channels // g.groups,
    }
    for letter, axis in zip("DHW", g.axes, strict=True):
        values |= {
            f"I{letter}": axis.input,
            f"O{letter}": axis.output,
            f"K{letter}": axis.kernel,
            f"STRIDE_{letter}": axis.stride,
            f"PADDING_{letter}": axis.padding,
            f"DILATION_{letter}": axis.dilation,
        }
    tail = operands.bias(step, "oc") + operands.tail(riders, Site("oc", ("n", "oc", "od", "oh", "ow")))
    values["PARAMETERS"] = operands.parameters
    parts = (defines(values), tail_macro("TAIL", tail, "x"), section("conv_transpose3d_gather.cl"))
    text = kernel_text(real, 1, operands, *parts)
    return StepSource("conv_transpose3d_gather", text, operands, math.prod(step.shape))
