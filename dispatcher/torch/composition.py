"""An operator's steps as functions of PyTorch: what a gradient is taken of, and what benchmarks compare with."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dispatcher.errors import UnsupportedError
from dispatcher.ops.forms import PRODUCT
from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Softmax,
    Step,
    TensorOperand,
    ValueOperand,
)
from dispatcher.ops.vocabulary import MAXIMUM
from dispatcher.problem.operator import Operator

#: Functions of two tensors, neither of which may be a number.
_OF_TENSORS: dict[str, Callable[..., Any]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "greater": lambda x, value: torch.gt(x, value).to(x.dtype),
    "greater_equal": lambda x, value: torch.ge(x, value).to(x.dtype),
    "where": lambda x, value, other: torch.where(x != 0, value, other),
}


def torch_pipeline(operator: Operator, constant: Callable[[TensorOperand], Any]) -> Callable[[Any], Any]:
    """All steps as one PyTorch function of the input.

    Args:
        operator: what to compute.
        constant: gives the PyTorch tensor of a tensor operand.

    Returns:
        A function of the input, in which values have five axes but for the functions of a rank of their own.
    """
    rank = operator.problem.rank
    shape = operator.output_shape  # here, since Dynamo cannot trace a cached property
    stages = [(step, torch_stage(step, constant, rank)) for step in operator.steps]
    fixed: dict[Any, Any] = {}  # operands that are no values of the pipeline
    for step in operator.steps:
        for operand in step.operands if isinstance(step, Pointwise) else ():
            if isinstance(operand, TensorOperand):
                fixed[operand] = constant(operand).reshape(operand.shape)
            elif isinstance(operand, ScalarOperand):
                fixed[operand] = operand.value

    def pipeline(x: Any) -> Any:
        values = [x.reshape(operator.steps[0].input_shape)]
        for step, stage in stages:
            operands = step.operands if isinstance(step, Pointwise) else ()
            arguments = [
                values[operand.value] if isinstance(operand, ValueOperand) else fixed[operand] for operand in operands
            ]
            values.append(stage(values[step.source], *arguments))
        return values[-1].reshape(shape)

    return pipeline


def torch_stage(step: Step, constant: Callable[[Any], Any], rank: int) -> Callable[..., Any]:
    """One step as a PyTorch function of its source and, for a pointwise step, its operands."""
    absent = tuple(range(2, 5 - rank))  # axes that a problem of this rank lacks

    def channels(operand: TensorOperand | None) -> Any:
        return None if operand is None else constant(operand).flatten()

    def ranked(x: Any, function: Callable[[Any], Any]) -> Any:
        """Apply a function of tensors that have the axes of the problem."""
        y = function(x.squeeze(absent)) if absent else function(x)
        for axis in absent:
            y = y.unsqueeze(axis)
        return y

    match step:
        case Convolution(geometry=geometry, transposed=transposed):
            weight, bias, groups = constant(step.weight), channels(step.bias), geometry.groups
            axes = geometry.axes[3 - rank :]
            weight = weight.reshape(*step.weight.shape[:2], *step.weight.shape[5 - rank :])
            dilation = tuple(axis.dilation for axis in axes)
            if transposed:
                strides, padding, output_padding = (
                    tuple(getattr(axis, name) for axis in axes) for name in ("stride", "padding", "output_padding")
                )
                function = getattr(F, f"conv_transpose{rank}d")
                return lambda x: ranked(
                    x, lambda x: function(x, weight, bias, strides, padding, output_padding, groups, dilation)
                )
            convolve, steps = getattr(F, f"conv{rank}d"), tuple(axis.step for axis in axes)
            around, after = zip(*(axis.ordinary_padding for axis in axes), strict=True)
            if around == after:
                return lambda x: ranked(x, lambda x: convolve(x, weight, bias, steps, around, dilation, groups))
            ends = [extent for axis in reversed(axes) for extent in axis.ordinary_padding]
            return lambda x: ranked(x, lambda x: convolve(F.pad(x, ends), weight, bias, steps, 0, dilation, groups))
        case Pointwise(form=form) if form.torch:
            return dotted(form.torch)
        case Pointwise(form=form) if form.name in _OF_TENSORS:
            return lambda x, *given: _OF_TENSORS[form.name](
                x, *(torch.as_tensor(each, dtype=x.dtype, device=x.device) for each in given)
            )
        case Normalize(eps=eps):
            weight, bias = channels(step.weight), channels(step.bias)
            count = step.shape[1]
            match step.axes, step.groups:
                case (1,), 1:
                    return lambda x: F.layer_norm(x.movedim(1, -1), (count,), weight, bias, eps=eps).movedim(-1, 1)
                case (1, 2, 3, 4), groups:
                    return lambda x: F.group_norm(x, groups, weight, bias, eps)
                case (2, 3, 4), 1:
                    return lambda x: F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)
                case (0, 2, 3, 4), 1:
                    return lambda x: F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
                case over, 1:
                    factor, term = (None if each is None else each.view(1, -1, 1, 1, 1) for each in (weight, bias))
                    return lambda x: normalized(x, over, eps, factor, term)
        case Softmax(axes=(2, 3, 4)):
            return lambda x: torch.softmax(x.flatten(2), 2).view_as(x)
        case Softmax(axes=(axis,)):
            return lambda x: torch.softmax(x, axis)
        case Softmax(axes=axes):
            return lambda x: (x - torch.logsumexp(x, axes, keepdim=True)).exp()
        case Pool():
            pool = torch_pool(step, rank)
            return lambda x: ranked(x, pool)
        case Reduce(form=form, axes=axes) if form.torch:
            reduce = dotted(form.torch)
            return lambda x: reduce(x, axes, keepdim=True)
        case Reduce(form=form, axes=axes) if form.plain and form.monoid is PRODUCT:
            return lambda x: functools.reduce(lambda y, axis: torch.prod(y, axis, keepdim=True), axes, x)
    raise UnsupportedError(f"step {step.op} has no PyTorch form here")


def normalized(x: Any, axes: tuple[int, ...], eps: float, factor: Any, term: Any) -> Any:
    """``x`` normalised over ``axes``, then times ``factor`` plus ``term`` where there are any."""
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(variance + eps)
    y = y if factor is None else y * factor
    return y if term is None else y + term


def torch_pool(step: Pool, rank: int) -> Callable[[Any], Any]:
    """A pooling as a PyTorch function of its source, which has the axes of the problem."""
    if step.adaptive:
        adaptive = getattr(F, f"adaptive_{'max' if step.form is MAXIMUM else 'avg'}_pool{rank}d")
        return functools.partial(adaptive, output_size=step.shape[5 - rank :])
    window, stride, dilation = step.window[3 - rank :], step.stride[3 - rank :], step.dilation[3 - rank :]
    padding, after = zip(*step.padding[3 - rank :], strict=True)
    if padding != after:
        raise UnsupportedError(f"step {step.op} has padding that PyTorch has no argument for")
    # Outputs beyond those of floor mode are those of ceil mode.
    extents = zip(step.input_shape[5 - rank :], step.shape[5 - rank :], padding, window, stride, dilation, strict=True)
    ceil_mode = any((o - 1) * s + d * (w - 1) + 1 > extent + 2 * p for extent, o, p, w, s, d in extents)
    if step.form is MAXIMUM:
        return lambda x: getattr(F, f"max_pool{rank}d")(x, window, stride, padding, dilation, ceil_mode)
    if rank == 1 and step.divisor is not None:
        raise UnsupportedError(f"step {step.op} has a divisor, which avg_pool1d has not")
    more = () if rank == 1 else (step.divisor,)
    return lambda x: getattr(F, f"avg_pool{rank}d")(x, window, stride, padding, ceil_mode, step.count_padding, *more)


def dotted(name: str) -> Callable[..., Any]:
    """The function of a dotted name, such as ``torch.nn.functional.gelu``."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
