"""Lowering of single steps, each a launch of its own, and of the gather convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.backends.opencl.render import (
    POINTWISE,
    OperandLayout,
    affine_of,
    defines,
    fusable_operand,
    section,
    tail,
    tail_macro,
)
from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Operand,
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
        operands: layout of its ``operands`` buffer.
        buffers: operands that are passed as buffers of their own, in order.
        count: work-items, or results that work-groups share out; the kernel's argument of that name.
    """

    kernel: str
    text: str
    operands: OperandLayout
    buffers: tuple[Operand, ...]
    count: int


def preamble(real: str, vec: int) -> str:
    """What the text of every step's kernel begins with: arithmetic in ``real``, in vectors of ``vec`` lanes."""
    values = {"REAL": real, "REAL_IS_DOUBLE": real == "double", "VEC": vec}
    return section("numeric.cl", defines(values)) + section("lanes.cl")


def lower_step(
    step: Step, riders: Sequence[Pointwise], real: str, vec: int, *, whole_rows: bool = True
) -> StepSource:
    """Lower ``step`` with the pointwise steps that ride on its store.

    Args:
        step: any step but a convolution.
        riders: pointwise steps behind it whose operands are scalars or per-channel tensors.
        real: ``float`` or ``double``.
        vec: lanes of a vector.
        whole_rows: a work-item of a pointwise step owns a row, and not a single vector of one.
    """
    match step:
        case Pointwise():
            return _pointwise(step, riders, real, vec, whole_rows)
        case Pool():
            return _pool(step, riders, real, vec)
        case Normalize() | Softmax() | Reduce():
            return _reduction(step, riders, real, vec)
    raise AssertionError(f"no kernel for {type(step).__name__}")


def _pointwise(
    step: Pointwise, riders: Sequence[Pointwise], real: str, vec: int, whole_rows: bool
) -> StepSource:
    layout = OperandLayout()
    buffers: list[Operand] = []
    arguments = []
    for operand in step.arguments:
        if isinstance(operand, ScalarOperand) or fusable_operand(operand):
            arguments.append(layout.expression(operand, "c"))
            continue
        name = f"a{len(buffers)}"
        buffers.append(operand)
        # Offset of the row in the operand: an axis of extent 1 does not move it.
        terms, stride = ["0"], operand.shape[4]
        for axis, index in ((3, "h"), (2, "d"), (1, "c"), (0, "n")):
            if operand.shape[axis] > 1:
                terms.append(f"{index} * (size_t){stride}")
            stride *= operand.shape[axis]
        place = " + ".join(terms)
        if operand.shape[4] > 1:
            arguments.append(f"load_lanes({name} + {place} + w, WIDTH - w, R(0.0))")
        else:
            arguments.append(f"{name}[{place}]")
    _, channels, depth, height, width = step.shape
    shares = 1 if whole_rows else -(-width // vec)
    first = f"x = {POINTWISE[step.function].format(*arguments)};"
    parameters = "".join(f", global const REAL *restrict a{i}" for i in range(len(buffers)))
    text = (
        preamble(real, vec)
        + defines(
            {
                "CHANNELS": channels,
                "DEPTH": depth,
                "HEIGHT": height,
                "WIDTH": width,
                "SHARES": shares,
                "BUFFERS": parameters,
            }
        )
        + tail_macro("FIRST", first)
        + tail_macro("TAIL", tail(layout, riders))
        + section("step_pointwise.cl")
    )
    return StepSource("pointwise_step", text, layout, tuple(buffers), math.prod(step.shape[:4]) * shares)


def _pool(step: Pool, riders: Sequence[Pointwise], real: str, vec: int) -> StepSource:
    layout = OperandLayout()
    window = step.window
    maximum = step.function == "max"
    values = {
        "CHANNELS": step.shape[1],
        **dict(zip(("IN_D", "IN_H", "IN_W"), step.input_shape[2:], strict=True)),
        **dict(zip(("OUT_D", "OUT_H", "OUT_W"), step.shape[2:], strict=True)),
        **dict(zip(("WINDOW_D", "WINDOW_H", "WINDOW_W"), window, strict=True)),
        "POOL_COMBINE(a, b)": "max_keep_nan(a, b)" if maximum else "((a) + (b))",
        "POOL_COMBINE_SCALAR(a, b)": "(((b) > (a) || (b) != (b)) ? (b) : (a))" if maximum else "((a) + (b))",
        "POOL_SHARE": "R(1.0)" if maximum else f"(R(1.0) / {math.prod(window)})",
    }
    text = (
        preamble(real, vec if window[2] <= VECTOR_WINDOW else 1)
        + defines(values)
        + tail_macro("TAIL", tail(layout, riders))
        + section("step_pool.cl")
    )
    return StepSource("pool_step", text, layout, (), math.prod(step.shape[:4]))


def run_block(count: int) -> int:
    """How many out of ``count`` terms are summed one after another before the sums of such runs are: their third root,
    since sums have three levels, but no fewer than 64, which cost nothing in accuracy."""
    return max(64, int(count ** (1 / 3)))


def _reduction(
    step: Normalize | Softmax | Reduce, riders: Sequence[Pointwise], real: str, vec: int
) -> StepSource:
    layout = OperandLayout()
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
    group = index(1, "outer") if not reduced[1] else "g"
    channel = "k" if reduced[2] else index(2, "outer")
    values = {
        "USE_WIDTH_REDUCTION": width_reduced,
        "WIDTH": w,
        "COUNT": math.prod(extent for extent, flag in zip(extents, reduced, strict=True) if flag),
        "OUTER_BASE(outer)": f"({place('(outer)', strides)})",
        "OUTER_RESULT(outer)": f"({place('(outer)', result_strides)})",
        "EACH_RUN": each_run,
        "CASCADE": max(
            8, math.isqrt(math.prod(extents[i] for i in inner if i != run) * -(-extents[run] // block))
        ),
        "EACH_IN_RUN": each_in_run,
        "OFFSET": f"({offset})",
        "CHANNEL": f"({group} * {c // groups} + {channel})",
        "RESULT_CHANNEL": "0" if reduced[2] else index(2, "outer"),
        "STEP_NORMALIZE": isinstance(step, Normalize),
        "STEP_SOFTMAX": isinstance(step, Softmax),
        "STEP_REDUCE": isinstance(step, Reduce),
    }
    affine = ""
    kernel = "softmax_step"
    if isinstance(step, Normalize):
        kernel = "normalize_step"
        values["EPS"] = layout.place(ScalarOperand(step.eps))
        affine = affine_of(layout, step)
    elif isinstance(step, Reduce):
        kernel = "reduce_step"
        values |= {f"REDUCE_{name.upper()}": step.function == name for name in ("mean", "max", "log_sum_exp")}
    text = (
        preamble(real, vec)
        + defines(values)
        + tail_macro("AFFINE", affine)
        + tail_macro("TAIL", tail(layout, riders))
        + section("step_reduction.cl")
    )
    return StepSource(kernel, text, layout, (), math.prod(extents[i] for i in kept))


def lower_gather(step: ConvTranspose3d, riders: Sequence[Pointwise], real: str) -> StepSource:
    """Lower a convolution to the gather kernel, with the pointwise steps that ride on its store."""
    layout = OperandLayout()
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
    text = (
        section("numeric.cl", defines({"REAL": real, "REAL_IS_DOUBLE": real == "double", "VEC": 1}))
        + defines(values)
        + tail_macro("TAIL", tail(layout, [step, *riders]))
        + section("conv_transpose3d_gather.cl")
    )
    return StepSource("conv_transpose3d_gather", text, layout, (step.weight,), math.prod(step.shape))
