"""How an operation is bound to sizes: its fields, and builders that append its steps to a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dispatcher.errors import GeometryError
from dispatcher.ops.forms import PointwiseForm, ReductionForm
from dispatcher.ops.geometry import SPATIAL_AXES, AxisGeometry, ConvGeometry
from dispatcher.ops.steps import (
    AXES,
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Shape,
    Step,
    TensorOperand,
    ValueOperand,
    resolve_axes,
)

FieldKind = Literal["triple", "size", "operand", "tensor", "scalar", "axes"]


@dataclass(frozen=True)
class Field:
    """One key that a step takes in a problem file.

    Kinds: ``triple`` an integer expression, or a list of three (depth, height, width); ``size`` an integer
    expression; ``scalar`` a number or the name of a ``double`` parameter; ``tensor`` the name of a tensor
    parameter; ``operand`` a scalar, a tensor, or the name of an earlier step's result; ``axes`` an axis name
    or a list of them.
    """

    name: str
    kind: FieldKind
    meaning: str
    required: bool = False
    default: Any = None
    infinite: bool = False  # a scalar that may be plus or minus infinity
    least: float | None = None


@dataclass
class Bound:
    """A pipeline that is being bound.

    Attributes:
        vocabulary: every operation by name.
        values: shape of each value so far; value 0 is the pipeline's input.
        steps: that make the others.
    """

    vocabulary: Mapping[str, Operation]
    values: list[Shape]
    steps: list[Step] = field(default_factory=list)


class Binding:
    """What a builder may ask while its operation is bound: its fields, resolved, and the value it reads.

    Args:
        op: name of the operation, or ``name.part`` of a part of another one.
        position: its 1-based place in the pipeline, for messages.
        source: index of the value it reads.
        fields: field name to resolved value: triples and sizes are integers, operands are :data:`Operand`.
        pipeline: to which its steps are appended.
    """

    def __init__(self, op: str, position: int, source: int, fields: Mapping[str, Any], pipeline: Bound) -> None:
        self.op, self.position, self.source = op, position, source
        self.fields, self.pipeline = fields, pipeline

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def input_shape(self) -> Shape:
        """Shape of the value it reads."""
        return self.pipeline.values[self.source]

    def fail(self, message: str) -> GeometryError:
        """An error that names this step."""
        return GeometryError(f"step {self.position} ({self.op.partition('.')[0]}): {message}")

    def base(self, shape: Sequence[int]) -> dict[str, Any]:
        """The keyword arguments that every bound step takes."""
        return {"op": self.op, "source": self.source, "input_shape": self.input_shape, "shape": tuple(shape)}

    def append(self, step: Step) -> ValueOperand:
        """Append a bound step to the pipeline; returns its value."""
        self.pipeline.steps.append(step)
        self.pipeline.values.append(step.shape)
        return ValueOperand(len(self.pipeline.values) - 1, step.shape)

    def then(self, op: str, source: ValueOperand | None = None, **fields: Any) -> ValueOperand:
        """Append operation ``op`` as a part of this one.

        Args:
            op: of the vocabulary.
            source: the value it reads; the one that this operation reads by default.
            fields: resolved; the others have their defaults.

        Returns:
            The value of its last step.

        Raises:
            TypeError: ``op`` has no such field.
        """
        operation = self.pipeline.vocabulary[op]
        names = [each.name for each in operation.fields]
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise TypeError(f"{op} takes no {unknown[0]}; expected {', '.join(names) or 'nothing'}")
        resolved = {each.name: fields.get(each.name, default_of(each)) for each in operation.fields}
        place = self.source if source is None else source.value
        operation.build(Binding(f"{self.op}.{op}", self.position, place, resolved, self.pipeline))
        return ValueOperand(len(self.pipeline.values) - 1, self.pipeline.values[-1])

    def per_channel(self, name: str, channels: int) -> TensorOperand | None:
        """Field ``name`` as a tensor with one value a channel: given as ``(C,)`` or ``(1, C, 1, 1, 1)``."""
        operand: TensorOperand | None = self.fields[name]
        if operand is None:
            return None
        extents = [extent for extent in operand.shape if extent != 1]
        if math.prod(operand.shape) != channels or len(extents) > 1:
            raise self.fail(
                f"{name} is tensor {operand.name} with {math.prod(operand.shape)} values; "
                f"expected one value for each of the {channels} channels"
            )
        return replace(operand, shape=(1, channels, 1, 1, 1))


def default_of(key: Field) -> Any:
    """The default of a field as a resolved value."""
    match key.kind, key.default:
        case _, None:
            return None
        case "axes", name:
            return resolve_axes(name)
        case "triple", number:
            return (number,) * 3
        case "size" | "tensor", value:
            return value
        case _, number:
            return ScalarOperand(float(number))


#: Which axes an operation works over.
AXIS = Field("axis", "axes", "axes to work over", default="channel")

#: Appends the steps of an operation to the pipeline that is being bound.
Builder = Callable[[Binding], object]


@dataclass(frozen=True)
class Operation:
    """An entry of the table: the fields it takes, how it is bound to sizes, and what it means, for people."""

    fields: tuple[Field, ...]
    build: Builder
    meaning: str


# ---- steps that are classes of their own -------------------------------------------------------------------
def build_conv_transpose(binding: Binding) -> None:
    weight: TensorOperand = binding["weight"]
    channels = binding.input_shape[1]
    if weight.shape[0] != channels:
        raise binding.fail(
            f"weight {weight.name} has shape {weight.shape}; its first extent must be the input's "
            f"{channels} channels "
            "(the layout is in_channels, out_channels/groups, kernel_d, kernel_h, kernel_w)"
        )
    axes = [
        AxisGeometry(
            name,
            binding.input_shape[2 + i],
            weight.shape[2 + i],
            binding["stride"][i],
            binding["padding"][i],
            binding["output_padding"][i],
            binding["dilation"][i],
        )
        for i, name in enumerate(SPATIAL_AXES)
    ]
    _convolution(binding, weight.shape[1] * binding["groups"], axes)


def build_conv(binding: Binding) -> None:
    weight: TensorOperand = binding["weight"]
    groups: int = binding["groups"]
    channels = binding.input_shape[1]
    if weight.shape[1] * groups != channels:
        raise binding.fail(
            f"weight {weight.name} has shape {weight.shape} with {groups} groups; its second extent times groups must "
            f"be the input's {channels} channels "
            "(the layout is out_channels, in_channels/groups, kernel_d, kernel_h, kernel_w)"
        )
    axes = [
        AxisGeometry.ordinary(
            name, binding.input_shape[2 + i], weight.shape[2 + i], binding["padding"][i], binding["dilation"][i]
        )
        for i, name in enumerate(SPATIAL_AXES)
    ]
    _convolution(binding, weight.shape[0], axes, transposed=False)


def _convolution(binding: Binding, out_channels: int, axes: Sequence[AxisGeometry], *, transposed: bool = True) -> None:
    geometry = ConvGeometry(
        binding.input_shape[0], binding.input_shape[1], out_channels, binding["groups"], axes[0], axes[1], axes[2]
    )
    binding.append(
        Convolution(
            **binding.base(geometry.output_shape),
            geometry=geometry,
            weight=binding["weight"],
            bias=binding.per_channel("bias", out_channels),
            transposed=transposed,
        )
    )


def normalize(binding: Binding, axes: tuple[int, ...], groups: int = 1) -> None:
    channels = binding.input_shape[1]
    if groups < 1 or channels % groups:
        raise binding.fail(f"groups is {groups}; it must divide the {channels} channels")
    binding.append(
        Normalize(
            **binding.base(binding.input_shape),
            axes=axes,
            groups=groups,
            eps=binding["eps"].value,
            weight=binding.per_channel("weight", channels),
            bias=binding.per_channel("bias", channels),
        )
    )


def pool(form: ReductionForm) -> Builder:
    def build(binding: Binding) -> None:
        window = binding["window"]
        extents = binding.input_shape[2:]
        for name, size, extent in zip(SPATIAL_AXES, window, extents, strict=True):
            if size < 1:
                raise binding.fail(f"window on axis {name} is {size}; it must be 1 or more")
            if size > extent:
                raise binding.fail(
                    f"window on axis {name} is {size}, larger than its input ({extent}); the output would be empty"
                )
        pooled = [extent // size for size, extent in zip(window, extents, strict=True)]
        binding.append(Pool(**binding.base((*binding.input_shape[:2], *pooled)), form=form, window=window))

    return build


# ---- one entry each ----------------------------------------------------------------------------------------
def pointwise(form: PointwiseForm, meaning: str, *fields: Field) -> Operation:
    """An operation on each element; ``fields`` are its arguments, in the order of the form's."""

    def build(binding: Binding) -> None:
        operands: list[Operand] = []
        for each in fields:
            operand: Operand = binding[each.name]
            if not isinstance(operand, ScalarOperand):
                for axis, (extent, wanted) in enumerate(zip(operand.shape, binding.input_shape, strict=True)):
                    if extent not in (1, wanted):
                        axis_name = list(AXES)[axis]
                        raise binding.fail(
                            f"{each.name} has extent {extent} on axis {axis_name}; "
                            f"expected 1 or {wanted}, to broadcast to {binding.input_shape}"
                        )
            operands.append(operand)
        binding.append(Pointwise(**binding.base(binding.input_shape), form=form, arguments=tuple(operands)))

    return Operation(fields, build, meaning)


def reduction(form: ReductionForm, meaning: str) -> Operation:
    """An operation that makes one value of all values along some axes."""

    def build(binding: Binding) -> None:
        axes = binding["axis"]
        shape = [1 if axis in axes else extent for axis, extent in enumerate(binding.input_shape)]
        binding.append(Reduce(**binding.base(shape), form=form, axes=axes))

    return Operation((AXIS,), build, meaning)
