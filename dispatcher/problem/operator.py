"""An operator: a problem bound to sizes and scalars. Everything derived from them is derived here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.errors import DtypeError, InputError, one_of
from dispatcher.ops.binding import Binding, Bound, Field, default_of
from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Operand,
    Reduce,
    ScalarOperand,
    Shape,
    Softmax,
    Step,
    TensorOperand,
    ValueOperand,
)
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.messages import brief, picked
from dispatcher.problem.model import Frozen, Problem, StepSpec

DTYPES = ("float16", "float32", "float64")
PRECISIONS = ("fp32", "tf32")


@dataclass(frozen=True)
class Operator:
    """A problem with every number known. Backends compile this and nothing else.

    Value ``0`` is the tensor that the first step reads, value ``i + 1`` the result of ``steps[i]``. Some
    steps may read other input tensors; those appear as operands.

    Attributes:
        problem: what is computed.
        sizes: every ``size_t`` parameter.
        scalars: every ``double`` parameter.
        dtype: of every tensor: ``float16`` (computed in float32), ``float32`` or ``float64``.
        precision: ``fp32``, or ``tf32`` where the user allows 10-bit mantissas in matrix products.
        steps: the bound pipeline.
        source: name of the tensor that is value 0.
        tensor_shapes: shape of each input tensor as the caller passes it.
    """

    problem: Problem
    sizes: Mapping[str, int]
    scalars: Mapping[str, float]
    dtype: str
    precision: str
    steps: tuple[Step, ...]
    source: str
    tensor_shapes: Mapping[str, tuple[int, ...]]

    @property
    def output_shape(self) -> Shape:
        """``(N, C, D, H, W)`` of the result."""
        return self.steps[-1].shape

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable identity: equal keys mean that one compiled program serves both operators."""
        return (self.steps, self.source, tuple(self.tensor_shapes.items()), self.dtype, self.precision)

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolution steps, in order."""
        return tuple(step for step in self.steps if isinstance(step, Convolution))

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolutions; the rest of a pipeline is not counted."""
        return sum(step.geometry.flops for step in self.convolutions)

    @property
    def ideal_bytes(self) -> int:
        """Bytes moved if each input were read once and each output written once."""
        elements = sum(math.prod(shape) for shape in self.tensor_shapes.values())
        return (elements + math.prod(self.output_shape)) * np.dtype(self.dtype).itemsize

    @property
    def mixes_batch(self) -> bool:
        """True when some step combines elements of different batch items."""
        return any(isinstance(step, Normalize | Softmax | Reduce) and 0 in step.axes for step in self.steps)

    @property
    def empty(self) -> bool:
        """True when the batch is empty, so that there is nothing to compute."""
        return math.prod(self.output_shape) == 0


def operator_dict(operator: Operator) -> dict[str, Any]:
    """What an operator computes, ready for JSON."""
    names = ("dtype", "precision", "sizes", "scalars", "tensor_shapes", "output_shape", "flops", "ideal_bytes")
    return {"problem": operator.problem.name, "title": operator.problem.title, **picked(operator, *names)}


def check_precision(precision: Any) -> None:
    """Check that ``precision`` is one of :data:`PRECISIONS`.

    Raises:
        InputError: it is not.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InputError(f"precision is {brief(precision)}; {one_of(precision, PRECISIONS)}")


def bind(
    problem: Problem,
    sizes: Mapping[str, int],
    scalars: Mapping[str, float],
    *,
    dtype: str = "float32",
    precision: str = "fp32",
) -> Operator:
    """Bind every size and scalar of ``problem``.

    Args:
        problem: what to compute.
        sizes: a value for every ``size_t`` parameter (defaults already filled in).
        scalars: a value for every ``double`` parameter.
        dtype: of all tensors.
        precision: ``fp32`` or ``tf32``.

    Raises:
        InputError: a value is missing, out of range or not finite where it must be.
        GeometryError: the sizes do not make a legal operator.
    """
    if dtype not in DTYPES:
        raise DtypeError(f"dtype is {dtype}; expected one of {', '.join(DTYPES)}")
    check_precision(precision)
    if precision == "tf32" and dtype != "float32":
        raise InputError(f"precision tf32 needs dtype float32, got {dtype}; leave precision out")
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in problem.tensors:
        assert tensor.shape is not None
        shapes[tensor.name] = tuple(expression.evaluate(sizes) for expression in tensor.shape)
        for expression, extent in zip(tensor.shape, shapes[tensor.name], strict=True):
            if extent < 0:
                raise InputError(f"tensor {tensor.name}: extent {expression} is {extent}; it must be 0 or more")
    source = problem.pipeline[0].source or problem.tensors[0].name
    if len(shapes[source]) != 5:
        raise InputError(
            f"tensor {source} has shape {shapes[source]}; the pipeline's input must have five axes (N, C, D, H, W)"
        )
    binder = _Binder(sizes, scalars, shapes, source)
    for position, spec in enumerate(problem.pipeline, start=1):
        binder.add(position, spec)
    steps = tuple(binder.pipeline.steps)
    return Operator(problem, Frozen(sizes), Frozen(scalars), dtype, precision, steps, source, Frozen(shapes))


class _Binder:
    """Binds operations one after another; knows the shapes and names of the values made so far."""

    def __init__(
        self, sizes: Mapping[str, int], scalars: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]], source: str
    ) -> None:
        self.sizes, self.scalars, self.shapes = sizes, scalars, shapes
        first = shapes[source]
        self.pipeline = Bound(VOCABULARY, [(first[0], first[1], first[2], first[3], first[4])])
        self.names: dict[str, int] = {source: 0}

    def add(self, position: int, spec: StepSpec) -> None:
        kind = VOCABULARY[spec.op]
        source = len(self.pipeline.values) - 1
        if spec.source is not None:
            if spec.source not in self.names:
                raise InputError(
                    f"step {position} ({spec.op}) reads {spec.source!r}; expected the pipeline's input or an "
                    f"earlier step's result ({', '.join(self.names)})"
                )
            source = self.names[spec.source]
        fields = {
            field.name: self.resolve(position, spec.op, field, spec.fields[field.name])
            if field.name in spec.fields
            else default_of(field)
            for field in kind.fields
        }
        kind.build(Binding(spec.op, position, source, fields, self.pipeline))
        if spec.result is not None:
            self.names[spec.result] = len(self.pipeline.values) - 1

    def resolve(self, position: int, op: str, field: Field, value: Any) -> Any:
        where = f"step {position} ({op}): {field.name}"
        match field.kind:
            case "triple":
                return tuple(part.evaluate(self.sizes) for part in value)
            case "size":
                return value.evaluate(self.sizes)
            case "axes":
                return value
            case "tensor":
                return self.tensor(where, value)
            case _:
                return self.operand(where, field, value)

    def tensor(self, where: str, name: str) -> TensorOperand:
        shape = self.shapes[name]
        if len(shape) > 5:
            raise InputError(f"{where} is tensor {name} of shape {shape}; expected five axes at most")
        padded = (1,) * (5 - len(shape)) + shape
        return TensorOperand(name, (padded[0], padded[1], padded[2], padded[3], padded[4]))

    def operand(self, where: str, field: Field, value: float | str) -> Operand:
        if isinstance(value, str):
            if value in self.names and self.names[value] > 0:
                index = self.names[value]
                return ValueOperand(index, self.pipeline.values[index])
            if value in self.names and value not in self.scalars:
                return ValueOperand(0, self.pipeline.values[0])
            if value in self.shapes:
                return self.tensor(where, value)
            number = self.scalars[value]
            where = f"{value} ({where})"
        else:
            number = float(value)
        if math.isnan(number) or (math.isinf(number) and not field.infinite):
            raise InputError(f"{where} is {number}; expected a finite number")
        if field.least is not None and number < field.least:
            raise InputError(f"{where} is {number}; it must be {field.least:g} or more")
        return ScalarOperand(number)
