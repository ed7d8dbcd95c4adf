"""What every step of the vocabulary computes, as plain NumPy functions on float64 arrays.

Nothing here is shared with the kernels: in particular the convolution *scatters* (each input voxel adds its
products to the outputs that it reaches), while the kernels gather. NaN and infinities follow IEEE arithmetic
unless a function says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.ops.geometry import AxisGeometry
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax, Step

Array = NDArray[np.float64]
Progress = Callable[[float], None]

#: Elements of one partial product of the convolution.
BLOCK_ELEMENTS = 1 << 17


# ---- convolution -------------------------------------------------------------------------------------------
def reached(axis: AxisGeometry, tap: int, start: int, stop: int) -> tuple[slice, slice]:
    """Those inputs ``start <= i < stop`` of one axis that ``tap`` sends to an output, and these outputs.

    Input ``i`` meets tap ``k`` at output ``o = i*stride - padding + k*dilation``; outputs below zero or
    beyond the output extent do not exist.
    """
    shift = tap * axis.dilation - axis.padding
    first = max(start, -(shift // axis.stride))  # the smallest i with i*stride + shift >= 0
    last = min(stop - 1, axis.input - 1, (axis.output - 1 - shift) // axis.stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    return (slice(first, last + 1), slice(first * axis.stride + shift, last * axis.stride + shift + 1, axis.stride))


def conv_transpose3d(
    step: Convolution,
    x: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None = None,
    *,
    advance: Progress | None = None,
) -> NDArray[Any]:
    """Transposed convolution by its definition: ``y[o] += weight[:, :, k]^T x[i]``, ``o = i*S - P + k*L``.

    Args:
        step: gives the geometry; its batch extent is taken from ``x`` instead.
        x: ``(N, IC, ID, IH, IW)``.
        weight: ``(IC, OC/groups, KD, KH, KW)``, of the dtype of ``x``.
        bias: ``(1, OC, 1, 1, 1)`` or None.
        advance: told, from time to time, which further fraction is done.

    Returns:
        ``(N, OC, OD, OH, OW)`` of the dtype of ``x``, in which all sums are taken.
    """
    geometry = step.geometry
    depth, height, width = geometry.axes
    in_group = geometry.in_channels // geometry.groups
    out_group = geometry.out_channels // geometry.groups
    # Channels last, so that each product of a row of voxels with one tap's weights is a small matrix product.
    voxels = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    y = np.zeros((x.shape[0], *geometry.output_shape[2:], geometry.out_channels), x.dtype)
    taps = np.ascontiguousarray(np.moveaxis(weight, (0, 1), (-2, -1)))  # (KD, KH, KW, IC, OC/groups)

    # One block after another, so that the outputs it adds to stay in the processor's cache.
    plane = out_group * height.input * width.input
    planes = max(1, min(depth.input, BLOCK_ELEMENTS // plane))
    items = max(1, BLOCK_ELEMENTS // (plane * depth.input))
    blocks = list(product(range(0, x.shape[0], items), range(geometry.groups), range(0, depth.input, planes)))
    for item, group, start in blocks:
        block = voxels[item : item + items, ..., group * in_group : (group + 1) * in_group]
        target = y[item : item + items, ..., group * out_group : (group + 1) * out_group]
        for kd, kh, kw in np.ndindex(depth.kernel, height.kernel, width.kernel):
            from_d, to_d = reached(depth, kd, start, start + planes)
            from_h, to_h = reached(height, kh, 0, height.input)
            from_w, to_w = reached(width, kw, 0, width.input)
            weights = taps[kd, kh, kw, group * in_group : (group + 1) * in_group]
            target[:, to_d, to_h, to_w] += block[:, from_d, from_h, from_w] @ weights
        if advance is not None:
            advance(1.0 / len(blocks))
    y = np.moveaxis(y, -1, 1)
    return y if bias is None else y + bias


def conv3d(
    step: Convolution,
    x: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None = None,
    *,
    advance: Progress | None = None,
) -> NDArray[Any]:
    """Ordinary convolution by its definition: ``y[o] = sum over k of weight[:, :, k] x[o*S + k*L - P]``.

    The arguments are those of :func:`conv_transpose3d`, but weight is ``(OC, IC/groups, KD, KH, KW)``.
    """
    geometry = step.geometry
    padded = np.pad(x, [(0, 0), (0, 0), *(axis.ordinary_padding for axis in geometry.axes)])
    out_group, in_group = geometry.out_channels // geometry.groups, geometry.in_channels // geometry.groups
    y = np.zeros((x.shape[0], *geometry.output_shape[1:]), x.dtype)
    parts = y.reshape(x.shape[0], geometry.groups, out_group, *y.shape[2:])
    for tap in np.ndindex(*weight.shape[2:]):
        d, h, w = (
            slice(k * axis.dilation, k * axis.dilation + (axis.output - 1) * axis.step + 1, axis.step)
            for k, axis in zip(tap, geometry.axes, strict=True)
        )
        factors = weight[:, :, tap[0], tap[1], tap[2]]
        if in_group == 1:  # no sum over channels
            parts += factors.reshape(geometry.groups, out_group, 1, 1, 1) * padded[:, :, None, d, h, w]
        for group in range(geometry.groups if in_group > 1 else 0):
            ins = slice(group * in_group, (group + 1) * in_group)
            outs = slice(group * out_group, (group + 1) * out_group)
            y[:, outs] += np.moveaxis(np.tensordot(factors[outs], padded[:, ins, d, h, w], (1, 1)), 0, 1)
        if advance is not None:
            advance(1.0 / geometry.kernel_volume)
    return y if bias is None else y + bias


def convolution(step: Convolution, *arguments: Any, advance: Progress | None = None) -> NDArray[Any]:
    """The convolution that ``step`` is, transposed or ordinary; the arguments are those of either."""
    return (conv_transpose3d if step.transposed else conv3d)(step, *arguments, advance=advance)


# ---- pointwise functions -----------------------------------------------------------------------------------
# Chebyshev coefficients of (1 + sqrt(2) x) exp(x^2/2) erfc(x/sqrt(2)) in t = (x - 5)/(x + 5) for x >= 0,
# computed with 60 digits. The form is that of Shepherd and Laframboise, "Chebyshev approximation of
# (1 + 2x) exp(x^2) erfc x in 0 <= x < infinity", Mathematics of Computation 36 (1981).
_TAIL = (
    1.1776280588550565,
    -0.002070164954163592,
    -0.08689193785931783,
    0.0582021306264661,
    -0.02468386816352125,
    0.007749977528919303,
    -0.0018351135750304367,
    0.0003092890123159829,
    -2.8457444195718713e-05,
    -1.5682105379274114e-06,
    9.165834808656812e-07,
    -8.421406249929772e-08,
    -1.4981485042331556e-08,
    3.886229309825303e-09,
    1.3014057406791717e-10,
    -1.3166676623487952e-10,
    2.8507318890223805e-12,
    4.4091921632576855e-12,
    -2.3192671295152295e-13,
    -1.5884855472871292e-13,
    1.0057815714505135e-14,
    6.289329512798089e-15,
    -3.3091542619905146e-16,
    -2.695879190436833e-16,
    5.9995102329838115e-18,
    1.2072852119610399e-17,
)
_BLOCK = 1 << 13  # elements worked on at once, so that all temporary arrays stay in the cache


def _tail(x: Array) -> Array:
    """``0.5 * erfc(x / sqrt(2))`` for ``x >= 0``, the probability that a normal variable exceeds ``x``."""
    x = np.minimum(x, 40.0)  # beyond, the result is zero in float64
    t = (x - 5.0) / (x + 5.0)
    twice = 2.0 * t
    above, here = np.zeros_like(x), np.zeros_like(x)
    for coefficient in reversed(_TAIL[1:]):  # Clenshaw's recurrence
        above *= -1.0
        above += twice * here
        above += coefficient
        above, here = here, above
    scaled = _TAIL[0] + t * here - above
    # exp(-x^2/2) with x^2 split into a part that is exact and a small rest, else its rounding error would be
    # multiplied by x^2.
    head = x.astype(np.float32).astype(np.float64)
    rest = (x - head) * (x + head)
    exponential = np.exp(-0.5 * head * head) * np.exp(-0.5 * rest)
    result: Array = 0.5 * exponential * scaled / (1.0 + math.sqrt(2.0) * x)
    return result


def normal_cdf(x: Array) -> Array:
    """``0.5 * (1 + erf(x / sqrt(2)))`` with a relative error below 1e-15, for every float64 down to -37.

    NumPy has no error function, and the formula as it stands cancels for negative ``x``.
    """
    blocks = np.nditer(
        [x, None],
        ["external_loop", "buffered", "zerosize_ok"],
        [["readonly"], ["writeonly", "allocate"]],
        buffersize=_BLOCK,
    )
    with blocks:
        for block, result in blocks:
            tail = _tail(np.abs(block))
            result[...] = np.where(block > 0, 1.0 - tail, tail)
        whole: Array = blocks.operands[1]
    return whole


def gelu(x: Array) -> Array:
    """``x/2 * (1 + erf(x/sqrt(2)))``; at minus infinity it is 0, the limit, and at plus infinity infinite."""
    return np.where(np.isneginf(x), 0.0, x * normal_cdf(x))


def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """``min(max(x, low), high)``; NaN stays NaN."""
    return np.minimum(np.maximum(x, low), high)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, as ``exp(x) / (1 + exp(x))`` below zero, where ``exp(-x)`` could overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0.0, small, 1.0) / (1.0 + small)


# Klambauer et al., "Self-Normalizing Neural Networks", 2017: the fixed point of mean 0 and variance 1.
SELU_SCALE = 1.0507009873554804934193349852946
SELU_ALPHA = 1.6732632423543772848170429916717

#: Function of a :class:`Pointwise` step to what it computes: the element, then the step's arguments.
POINTWISE: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "scale": np.multiply,
    "clamp": clamp,
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0.0),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, slope * x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "silu": lambda x: x * sigmoid(x),
    "softplus": lambda x: np.logaddexp(0.0, x),
    "hardswish": lambda x: x * clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "greater": lambda x, value: np.where(x > value, 1.0, 0.0),
    "greater_equal": lambda x, value: np.where(x >= value, 1.0, 0.0),
    "where": lambda x, *choices: np.where(x != 0.0, *choices),
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "elu": lambda x, alpha: np.where(x > 0.0, x, alpha * np.expm1(x)),
    "selu": lambda x: SELU_SCALE * np.where(x > 0.0, x, SELU_ALPHA * np.expm1(x)),
    "softsign": lambda x: x / (1.0 + np.abs(x)),
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "square": np.square,
    "reciprocal": np.reciprocal,
}


def pointwise(step: Pointwise, x: Array, *arguments: Array | float) -> Array:
    """Apply the function of the step to each element."""
    return POINTWISE[step.function](x, *arguments)


# ---- normalisation, softmax, pools, reductions -------------------------------------------------------------
def split_groups(step: Normalize, x: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """``x`` as ``(N, groups, C/groups, D, H, W)``, and the step's axes counted in that shape."""
    shape = (x.shape[0], step.groups, x.shape[1] // step.groups, *x.shape[2:])
    return x.reshape(shape), tuple(axis if axis == 0 else axis + 1 for axis in step.axes)


def centred(parts: Array, axes: tuple[int, ...]) -> Array:
    """Deviations from the mean over ``axes``: exactly 0 for equal values, and right beside an outlier.

    The first value is subtracted before a mean is taken, and the mean that is left is subtracted once more.
    """
    first = parts[tuple(slice(1) if axis in axes else slice(None) for axis in range(parts.ndim))]
    apart: Array = parts - (first + (parts - first).mean(axis=axes, keepdims=True))
    apart -= apart.mean(axis=axes, keepdims=True)
    return apart


def normalize(step: Normalize, x: Array, *affine: Array) -> Array:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, in two passes: the mean, then the variance.

    Args:
        step: says what is normalised, and whether there are a weight and a bias.
        x: any value, ``(N, C, D, H, W)``.
        affine: those of weight and bias that there are, ``(1, C, 1, 1, 1)`` each.
    """
    parts, axes = split_groups(step, x)
    apart = centred(parts, axes)
    apart /= np.sqrt(np.square(apart).mean(axis=axes, keepdims=True) + step.eps)
    y: Array = apart.reshape(x.shape)
    given = iter(affine)
    if step.weight is not None:
        y = y * next(given)
    if step.bias is not None:
        y = y + next(given)
    return y


def softmax(step: Softmax, x: Array) -> Array:
    """``exp(x - max) / sum(exp(x - max))`` over the step's axes together."""
    exponentials = np.exp(x - x.max(axis=step.axes, keepdims=True, initial=-np.inf))
    result: Array = exponentials / exponentials.sum(axis=step.axes, keepdims=True)
    return result


def windows(step: Pool, x: NDArray[Any], combine: np.ufunc, outside: float = 0.0) -> NDArray[Any]:
    """Combine the elements of each window, one axis after another; beyond the input there is ``outside``."""
    for axis, size in enumerate(step.window, start=2):
        if step.adaptive:
            spans = [slice(start, stop) for start, stop in zip(*shares(step, axis), strict=True)]
            parts = [x[tuple([slice(None)] * axis + [span])] for span in spans]
            x = np.concatenate([combine.reduce(part, axis=axis, keepdims=True) for part in parts], axis=axis)
            continue
        stride, gap, (before, _) = step.stride[axis - 2], step.dilation[axis - 2], step.padding[axis - 2]
        count, extent = step.shape[axis], x.shape[axis]
        last = (count - 1) * stride + gap * (size - 1) + 1  # places that windows reach, from the first on
        if before or last > extent + before:
            around = [(0, 0)] * 5
            around[axis] = (before, max(0, last - extent - before))
            x = np.pad(x, around, constant_values=outside)
        places = [slice(tap * gap, tap * gap + (count - 1) * stride + 1, stride) for tap in range(size)]
        parts = [x[tuple([slice(None)] * axis + [place])] for place in places]
        x = parts[0]
        for part in parts[1:]:
            x = combine(x, part)
    return x


def shares(step: Pool, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the windows of an adaptive pool begin on an axis, and where they end."""
    extent, size = step.input_shape[axis], step.shape[axis]
    places = np.arange(size)
    return places * extent // size, -(-(places + 1) * extent // size)


def counts(step: Pool) -> Array:
    """What a mean divides the sum of each window by, ``(1, 1, D, H, W)``."""
    if step.divisor is not None:
        return np.full((1, 1, 1, 1, 1), float(step.divisor))
    result = np.ones((1, 1, 1, 1, 1))
    for axis, size in enumerate(step.window, start=2):
        extent, (before, after) = step.input_shape[axis], step.padding[axis - 2]
        starts = np.arange(step.shape[axis]) * step.stride[axis - 2] - before
        stops = starts + size
        if step.adaptive:
            starts, stops = shares(step, axis)
        elif step.count_padding:
            stops = np.minimum(stops, extent + after)
        else:
            starts, stops = np.maximum(starts, 0), np.minimum(stops, extent)
        result = result * np.float64(stops - starts).reshape([-1 if place == axis else 1 for place in range(5)])
    return result


def pool(step: Pool, x: Array) -> Array:
    """Maximum (NaN wins) or mean of each window."""
    match step.function:
        case "max":
            return windows(step, x, np.maximum, -np.inf)
        case "mean":
            return windows(step, x, np.add, 0.0) / counts(step)
    raise KeyError(step.function)


def mean(x: Array, axes: tuple[int, ...]) -> Array:
    """Arithmetic mean; NaN where there is nothing to average."""
    count = np.float64(math.prod(x.shape[axis] for axis in axes))
    result: Array = x.sum(axis=axes, keepdims=True) / count
    return result


def log_sum_exp(x: Array, axes: tuple[int, ...]) -> Array:
    """``log(sum(exp(x)))`` with the maximum taken out; where that is infinite it is the result."""
    top = x.max(axis=axes, keepdims=True, initial=-np.inf)
    shift = np.where(np.isinf(top), 0.0, top)
    result: Array = np.log(np.exp(x - shift).sum(axis=axes, keepdims=True)) + shift
    return result


#: Function of a :class:`Reduce` step to what it computes from the value and the axes.
REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "sum": lambda x, axes: x.sum(axis=axes, keepdims=True),
    "mean": mean,
    "max": lambda x, axes: x.max(axis=axes, keepdims=True, initial=-np.inf),
    "min": lambda x, axes: x.min(axis=axes, keepdims=True, initial=np.inf),
    "product": lambda x, axes: x.prod(axis=axes, keepdims=True),
    "log_sum_exp": log_sum_exp,
}


def reduce(step: Reduce, x: Array) -> Array:
    """A reduction over the step's axes, which stay with extent 1."""
    return REDUCTIONS[step.function](x, step.axes)


# ---- the table ---------------------------------------------------------------------------------------------
#: Class of a step to the function that computes it from the step, its source and its operands.
TABLE: dict[type[Step], Callable[..., Array]] = {
    Convolution: convolution,
    Pointwise: pointwise,
    Normalize: normalize,
    Softmax: softmax,
    Pool: pool,
    Reduce: reduce,
}


def apply(step: Step, x: Array, operands: Sequence[Any], advance: Progress | None = None) -> Array:
    """Compute one step.

    Args:
        step: what to compute.
        x: the value it reads, ``(N, C, D, H, W)``; ``N`` may be a part of the batch.
        operands: the values of ``step.operands``, in that order.
        advance: told, from time to time, which further fraction of a convolution is done.
    """
    if isinstance(step, Convolution):
        return convolution(step, x, *operands, advance=advance)
    return TABLE[type(step)](step, x, *operands)
