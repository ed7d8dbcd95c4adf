"""The meaning of every step, written as plain Python loops from its definition, for tiny shapes.

This checks the reference, so it shares nothing with it: sums are exact (``math.fsum``), functions come from
``math``, and each output element is computed on its own. NaN and infinities are not considered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Softmax,
    Step,
    TensorOperand,
)
from dispatcher.problem.operator import Operator

Index = tuple[int, ...]


def places(shape: Sequence[int]) -> Iterator[Index]:
    """Every index of an array of ``shape``."""
    return product(*(range(extent) for extent in shape))


def conv_transpose3d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> np.ndarray:
    """Each input element, times each weight of its channel, is added where the definition sends it."""
    batch, in_channels, *extents = x.shape
    out_group, *kernel = weight.shape[1:]
    in_group = in_channels // groups
    sizes = [
        (extents[a] - 1) * stride[a] - 2 * padding[a] + dilation[a] * (kernel[a] - 1) + output_padding[a] + 1
        for a in range(3)
    ]
    terms: dict[Index, list[float]] = {
        place: [] if bias is None else [float(bias.reshape(-1)[place[1]])]
        for place in places((batch, out_group * groups, *sizes))
    }
    for n, c, *voxel in places(x.shape):
        for o, *tap in places(weight.shape[1:]):
            target = [voxel[a] * stride[a] - padding[a] + tap[a] * dilation[a] for a in range(3)]
            place = (n, c // in_group * out_group + o, *target)
            if place in terms:
                terms[place].append(float(x[(n, c, *voxel)]) * float(weight[(c, o, *tap)]))
    y = np.zeros((batch, out_group * groups, *sizes))
    for place, products in terms.items():
        y[place] = math.fsum(products)
    return y


def conv3d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    *,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    groups: int,
) -> np.ndarray:
    """Each output is the sum over a window of the input with zeros around it."""
    out_channels, in_group, *taps = weight.shape
    out_group = out_channels // groups
    sizes = [(x.shape[2 + a] + sum(padding[a]) - dilation[a] * (taps[a] - 1) - 1) // stride[a] + 1 for a in range(3)]
    y = np.zeros((x.shape[0], out_channels, *sizes))
    for n, o, *voxel in places(y.shape):
        products = [0.0 if bias is None else float(bias.reshape(-1)[o])]
        for c, *tap in places((in_group, *taps)):
            source = [voxel[a] * stride[a] + tap[a] * dilation[a] - padding[a][0] for a in range(3)]
            if all(0 <= source[a] < x.shape[2 + a] for a in range(3)):
                products.append(float(x[(n, o // out_group * in_group + c, *source)]) * float(weight[(o, c, *tap)]))
        y[(n, o, *voxel)] = math.fsum(products)
    return y


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


POINTWISE: dict[str, Callable[..., float]] = {
    "add": lambda x, value: x + value,
    "subtract": lambda x, value: x - value,
    "scale": lambda x, by: x * by,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x, slope: x if x > 0 else slope * x,
    "sigmoid": sigmoid,
    "tanh": math.tanh,
    "silu": lambda x: x * sigmoid(x),
    "softplus": lambda x: math.log1p(math.exp(x)) if x < 30 else x + math.exp(-x),
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "divide": lambda x, by: x / by,
    "maximum": max,
    "minimum": min,
    "greater": lambda x, value: float(x > value),
    "greater_equal": lambda x, value: float(x >= value),
    "where": lambda x, value, other: value if x else other,
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x)) if x < 30 else x),
    "elu": lambda x, alpha: x if x > 0 else alpha * math.expm1(x),
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543773 * math.expm1(x)),
    "softsign": lambda x: x / (1 + abs(x)),
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "abs": abs,
    "square": lambda x: x**2,
    "reciprocal": lambda x: 1 / x,
}


def along(x: np.ndarray, axes: Sequence[int]) -> Iterator[list[Index]]:
    """The indices of ``x``, in lists that differ along ``axes`` only."""
    kept = [range(1) if axis in axes else range(extent) for axis, extent in enumerate(x.shape)]
    moved = [range(extent) if axis in axes else range(1) for axis, extent in enumerate(x.shape)]
    for start in product(*kept):
        yield [tuple(a + b for a, b in zip(start, offset, strict=True)) for offset in product(*moved)]


def normalize(
    x: np.ndarray, axes: Sequence[int], groups: int, eps: float, weight: np.ndarray | None, bias: np.ndarray | None
) -> np.ndarray:
    y = np.zeros(x.shape)
    for line in along(x, axes):
        size = x.shape[1] // groups
        parts = [[place for place in line if place[1] // size == group] for group in range(groups)]
        if 1 not in axes:
            parts = [line]
        for part in parts:
            values = [float(x[place]) for place in part]
            mean = math.fsum(values) / len(values)
            variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
            for place in part:
                y[place] = (float(x[place]) - mean) / math.sqrt(variance + eps)
    for place in places(x.shape):
        if weight is not None:
            y[place] *= weight.reshape(-1)[place[1]]
        if bias is not None:
            y[place] += bias.reshape(-1)[place[1]]
    return y


def softmax(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    y = np.zeros(x.shape)
    for line in along(x, axes):
        top = max(float(x[place]) for place in line)
        total = math.fsum(math.exp(float(x[place]) - top) for place in line)
        for place in line:
            y[place] = math.exp(float(x[place]) - top) / total
    return y


def log_sum_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
    "product": math.prod,
    "log_sum_exp": log_sum_exp,
}


def pool(x: np.ndarray, step: Pool) -> np.ndarray:
    """What a window makes of the places of the input that lie in it; its other places are padding."""
    y = np.zeros(step.shape)
    for n, c, *voxel in places(y.shape):
        values, padded = [], 0
        for tap in places(step.window):
            if step.adaptive:
                shares = [Fraction(x.shape[2 + a], y.shape[2 + a]) for a in range(3)]
                place = [math.floor(voxel[a] * shares[a]) + tap[a] for a in range(3)]
                if any(place[a] >= (voxel[a] + 1) * shares[a] for a in range(3)):
                    continue
            else:
                place = [voxel[a] * step.stride[a] - step.padding[a][0] + tap[a] * step.dilation[a] for a in range(3)]
            if all(0 <= place[a] < x.shape[2 + a] for a in range(3)):
                values.append(float(x[(n, c, *place)]))
            padded += all(place[a] < x.shape[2 + a] + step.padding[a][1] for a in range(3))
        count = step.divisor or (padded if step.count_padding else len(values))
        y[(n, c, *voxel)] = max(values) if step.function == "max" else math.fsum(values) / count
    return y


def run(operator: Operator, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The result of the whole pipeline, float64."""
    values = [np.asarray(tensors[operator.source], np.float64).reshape(operator.steps[0].input_shape)]

    def tensor(operand: TensorOperand | None) -> np.ndarray | None:
        return None if operand is None else np.asarray(tensors[operand.name], np.float64).reshape(operand.shape)

    def read(operand: Operand, place: Index) -> float:
        if isinstance(operand, ScalarOperand):
            return operand.value
        if isinstance(operand, TensorOperand):
            array = np.asarray(tensors[operand.name], np.float64).reshape(operand.shape)
        else:
            array = values[operand.value]
        return float(array[tuple(min(i, extent - 1) for i, extent in zip(place, array.shape, strict=True))])

    def compute(step: Step, x: np.ndarray) -> np.ndarray:
        match step:
            case Convolution(geometry=geometry, transposed=False):
                kernel = tensor(step.weight)
                assert kernel is not None
                return conv3d(
                    x,
                    kernel,
                    tensor(step.bias),
                    stride=[axis.step for axis in geometry.axes],
                    padding=[axis.ordinary_padding for axis in geometry.axes],
                    dilation=[axis.dilation for axis in geometry.axes],
                    groups=geometry.groups,
                )
            case Convolution(geometry=geometry):
                fields: dict[str, Any] = {
                    name: [getattr(axis, name) for axis in geometry.axes]
                    for name in ("stride", "padding", "output_padding", "dilation")
                }
                weight = tensor(step.weight)
                assert weight is not None
                return conv_transpose3d(x, weight, tensor(step.bias), groups=geometry.groups, **fields)
            case Pointwise(function=function, arguments=arguments):
                y = np.zeros(x.shape)
                for place in places(x.shape):
                    operands = [read(argument, place) for argument in arguments]
                    y[place] = POINTWISE[function](float(x[place]), *operands)
                return y
            case Normalize():
                return normalize(x, step.axes, step.groups, step.eps, tensor(step.weight), tensor(step.bias))
            case Softmax(axes=axes):
                return softmax(x, axes)
            case Pool():
                return pool(x, step)
            case Reduce(function=reduction, axes=axes):
                y = np.zeros([1 if axis in axes else extent for axis, extent in enumerate(x.shape)])
                for line in along(x, axes):
                    y[line[0]] = REDUCTIONS[reduction]([float(x[place]) for place in line])
                return y
        raise AssertionError(f"no definition of {step}")

    for step in operator.steps:
        values.append(compute(step, values[step.source]))
    return values[-1].reshape(operator.output_shape)
