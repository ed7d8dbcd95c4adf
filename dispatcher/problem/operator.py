"""An operator: a problem bound to sizes and scalars. Everything derived from them is derived here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import DtypeError, InputError, install, one_of
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
    axis_names,
    five_axes,
)
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.messages import brief, picked
from dispatcher.problem.model import Frozen, Problem, StepSpec
from dispatcher.problem.shown import Shown

DTYPES = ("float16", "bfloat16", "float32", "float64")
PRECISIONS = ("fp32", "tf32")


@dataclass(frozen=True, repr=False)
class Operator(Shown):
    """A problem with every number known. Backends compile this and nothing else.

    Value ``0`` is the tensor that the first step reads, value ``i + 1`` the result of ``steps[i]``. Some
    steps may read other input tensors; those appear as operands.

    Attributes:
        problem: what is computed.
        sizes: every ``size_t`` parameter.
        scalars: every ``double`` parameter.
        dtype: of every tensor: ``float16`` and ``bfloat16`` (both computed in float32), ``float32`` or ``float64``.
        precision: ``fp32``, or ``tf32`` where the user allows 10-bit mantissas in matrix products.
        steps: the bound pipeline.
        source: name of the tensor that is value 0.
        tensor_shapes: shape of each input tensor as the caller passes it.
        axes: those of the last step's value that the result has, out of five.
    """

    problem: Problem
    sizes: Mapping[str, int]
    scalars: Mapping[str, float]
    dtype: str
    precision: str
    steps: tuple[Step, ...]
    source: str
    tensor_shapes: Mapping[str, tuple[int, ...]]
    axes: tuple[int, ...] = (0, 1, 2, 3, 4)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the result as the caller gets it: the axes that the problem has, without those that it drops."""
        return tuple(self.steps[-1].shape[axis] for axis in self.axes)

    def with_all_axes(self, result: NDArray[Any]) -> NDArray[Any]:
        """A view of an array of :attr:`output_shape` that has all five axes, those of the last step's value."""
        return np.expand_dims(result, [axis for axis in range(5) if axis not in self.axes])

    @property
    def batch(self) -> int:
        """Batch items of the pipeline's input."""
        return self.steps[0].input_shape[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable identity: equal keys mean that one compiled program serves both operators."""
        return (self.steps, self.source, tuple(self.tensor_shapes.items()), self.axes, self.dtype, self.precision)

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
        return (elements + math.prod(self.output_shape)) * storage_dtype(self.dtype).itemsize

    @property
    def mixes_batch(self) -> bool:
        """True when some step combines elements of different batch items."""
        return bool(self.mixing)

    @property
    def mixing(self) -> tuple[Step, ...]:
        """The steps that combine elements of different batch items."""
        return tuple(step for step in self.steps if isinstance(step, Normalize | Softmax | Reduce) and 0 in step.axes)

    @property
    def empty(self) -> bool:
        """True when the batch is empty, so that there is nothing to compute."""
        return math.prod(self.output_shape) == 0

    def _headline(self) -> str:
        inputs = ", ".join(f"{name} {shape}" for name, shape in self.tensor_shapes.items())
        return f"{self.problem.name} ({self.dtype}, {self.precision}): {inputs} -> {self.output_shape}"

    def _facts(self) -> Mapping[str, object]:
        numbers = [f"{name}={value}" for name, value in {**self.sizes, **self.scalars}.items()]
        steps = [f"{step.op} -> {step.shape}" for step in self.steps]
        return {
            "numbers": ", ".join(numbers),
            "steps": steps,
            "operations": self.flops,
            "ideal bytes": self.ideal_bytes,
        }


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of :data:`DTYPES`. Bfloat16 is no dtype of NumPy's own: ml_dtypes brings it.

    Raises:
        DtypeError: ml_dtypes is not installed.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401 (from here on NumPy knows the name)
        except ImportError as error:
            raise DtypeError(f"dtype bfloat16 needs ml_dtypes ({error}); {install('torch')}") from error
    return np.dtype(name)


def check_c_type(dtype: str | None, what: str) -> None:
    """Check that C has a type for a dtype.

    Args:
        dtype: one of :data:`DTYPES`, or what a caller gave instead.
        what: is written in C, for the message.

    Raises:
        DtypeError: it is bfloat16.
    """
    if dtype == "bfloat16":
        raise DtypeError(f"dtype is bfloat16, which {what} cannot have; expected float16, float32 or float64")


def limits_of(dtype: np.dtype[Any] | str) -> Any:
    """What ``np.finfo`` says of one of :data:`DTYPES`, also of bfloat16."""
    if np.dtype(dtype).name != "bfloat16":
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)


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
    storage_dtype(dtype)
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
    source = problem.source
    binder = _Binder(problem.rank, sizes, scalars, shapes, source)
    for position, spec in enumerate(problem.pipeline, start=1):
        binder.add(position, spec)
    steps = tuple(binder.pipeline.steps)
    if not steps:
        raise InputError(f"{problem.name} computes nothing; add a step that does")
    return Operator(
        problem, Frozen(sizes), Frozen(scalars), dtype, precision, steps, source, Frozen(shapes), binder.latest.axes
    )


@dataclass(frozen=True)
class _Named:
    """A value that steps may read: its index, and the axes that it has out of five."""

    value: int
    axes: tuple[int, ...]


class _Binder:
    """Binds operations one after another; knows the shapes and names of the values made so far."""

    def __init__(
        self,
        rank: int,
        sizes: Mapping[str, int],
        scalars: Mapping[str, float],
        shapes: Mapping[str, tuple[int, ...]],
        source: str,
    ) -> None:
        self.sizes, self.scalars, self.shapes = sizes, scalars, shapes
        self.axes = (0, 1, *axis_names(rank)["spatial"])  # of the problem's values, before any is dropped
        self.pipeline = Bound(VOCABULARY, [self.five_axes(f"the pipeline's input {source}", source, self.axes)], rank)
        self.latest = _Named(0, self.axes)
        self.names: dict[str, _Named] = {source: self.latest}

    def add(self, position: int, spec: StepSpec) -> None:
        operation = VOCABULARY[spec.op]
        source = self.latest
        if spec.source is not None:
            if spec.source not in self.names:
                raise InputError(
                    f"step {position} ({spec.op}) reads {spec.source!r}; expected the pipeline's input or an "
                    f"earlier step's result ({', '.join(self.names)})"
                )
            source = self.names[spec.source]
        # A tensor operand's own axes are the last ones of the step's input, unless the step says which.
        along = spec.fields.get("along", source.axes)
        where = f"step {position} ({spec.op})"
        fields = {
            field.name: default_of(field, self.pipeline.rank)
            if field.name not in spec.fields
            else self.resolve(f"{where}: {field.name}", field, spec.fields[field.name], source, along)
            for field in operation.fields
        }
        gone = [
            field.name
            for field in operation.fields
            if field.kind == "axes" and fields[field.name] and not set(fields[field.name]) <= set(source.axes)
        ]
        if gone:
            raise InputError(f"{where}: {gone[0]} is an axis that an earlier step dropped; keep it with keepdim: true")
        made = len(self.pipeline.values)
        binding = Binding(spec.op, position, source.value, fields, self.pipeline)
        operation.build(binding)
        value = source.value if len(self.pipeline.values) == made else len(self.pipeline.values) - 1
        self.latest = _Named(value, tuple(axis for axis in source.axes if axis not in binding.dropped))
        if spec.result is not None:
            self.names[spec.result] = self.latest

    def resolve(self, where: str, field: Field, value: Any, source: _Named, along: Sequence[int]) -> Any:
        """The value of a field of a step that reads ``source``; a tensor operand has the last axes out of ``along``."""
        match field.kind:
            case "each" | "padding" if isinstance(value, tuple):
                neutral = field.default if field.default is not None else 1
                lacking = (neutral,) * (3 - len(value))
                each = (*lacking, *(self.number(part) for part in value))
                return each if field.kind == "each" else tuple(n if isinstance(n, tuple) else (n, n) for n in each)
            case "size":
                return value.evaluate(self.sizes)
            case "axes" if isinstance(value, str):
                number = self.sizes[value]
                if number >= len(source.axes):
                    last = len(source.axes) - 1
                    raise InputError(f"{value} ({where}) is {number}; expected an axis from 0 to {last}")
                return (source.axes[number],)
            case "tensor":
                return self.tensor(where, value, self.axes)
            case "operand" | "scalar":
                return self.operand(where, field, value, source, along)
        return value

    def number(self, part: Any) -> Any:
        """What an expression, or each of a pair of them, is."""
        if isinstance(part, tuple):
            return tuple(each.evaluate(self.sizes) for each in part)
        return part.evaluate(self.sizes)

    def five_axes(self, where: str, name: str, axes: Sequence[int]) -> Shape:
        try:
            return five_axes(self.shapes[name], axes)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def tensor(self, where: str, name: str, axes: Sequence[int]) -> TensorOperand:
        return TensorOperand(name, self.five_axes(f"{where} is tensor {name}", name, axes))

    def operand(self, where: str, field: Field, value: float | str, source: _Named, along: Sequence[int]) -> Operand:
        if isinstance(value, str):
            named = self.names.get(value)
            if named is not None and (named.value > 0 or value not in self.scalars):
                if named.axes != source.axes:
                    got = f"{where} is {value}, and only one of it and the step's input has all axes"
                    raise InputError(f"{got}; keep them with keepdim: true")
                return ValueOperand(named.value, self.pipeline.values[named.value])
            if value in self.shapes:
                return self.tensor(where, value, along)
            number = self.scalars[value]
            where = f"{value} ({where})"
        else:
            number = float(value)
        if math.isnan(number) or (math.isinf(number) and not field.infinite):
            raise InputError(f"{where} is {number}; expected a finite number")
        if field.least is not None and number < field.least:
            raise InputError(f"{where} is {number}; it must be {field.least:g} or more")
        return ScalarOperand(number)
