"""How an operation is bound to sizes: its fields, and builders that append its steps to a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dispatcher.errors import GeometryError
from dispatcher.ops.forms import PointwiseForm, ReductionForm
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry
from dispatcher.ops.steps import (
    SPATIAL_NAMES,
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
    axis_names,
)
from dispatcher.ops.symbols import larger, smaller

FieldKind = Literal["each", "padding", "size", "flag", "operand", "tensor", "scalar", "axes"]


@dataclass(frozen=True)
class Field:
    """One key that a step takes in a problem file.

    Kinds: ``each`` an integer expression, or a list of one for each spatial axis; ``padding`` the same, or a list of
    pairs (before, after), or ``same``; ``size`` an integer expression; ``flag`` true or false; ``scalar`` a number or
    the name of a ``double`` parameter; ``tensor`` the name of a tensor parameter; ``operand`` a scalar, a tensor, or
    the name of an earlier step's result; ``axes`` an axis name, a list of them, or the name of a size parameter that
    holds an axis' number.
    """

    name: str
    kind: FieldKind
    meaning: str
    required: bool = False
    default: Any = None
    infinite: bool = False  # a scalar that may be plus or minus infinity
    least: float | None = None
    same: bool = False  # padding that may be ``same``


@dataclass
class Bound:
    """A pipeline that is being bound.

    Attributes:
        vocabulary: every operation by name.
        values: shape of each value so far; value 0 is the pipeline's input.
        rank: spatial axes of the problem.
        steps: that make the others.
    """

    vocabulary: Mapping[str, Operation]
    values: list[Shape]
    rank: int = 3
    steps: list[Step] = field(default_factory=list)


class Binding:
    """What a builder may ask while its operation is bound: its fields, resolved, and the value it reads.

    Args:
        op: name of the operation, or ``name.part`` of a part of another one.
        position: its 1-based place in the pipeline, for messages.
        source: index of the value it reads.
        fields: field name to resolved value: sizes are integers, operands are :data:`Operand`.
        pipeline: to which its steps are appended.

    Attributes:
        dropped: axes that the result no longer has; builders add to them.
    """

    def __init__(self, op: str, position: int, source: int, fields: Mapping[str, Any], pipeline: Bound) -> None:
        self.op, self.position, self.source = op, position, source
        self.fields, self.pipeline = fields, pipeline
        self.dropped: set[int] = set()

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def input_shape(self) -> Shape:
        """Shape of the value it reads."""
        return self.pipeline.values[self.source]

    def fail(self, message: str) -> GeometryError:
        """An error that names this step."""
        return GeometryError(f"step {self.position} ({self.op.partition('.')[0]}): {message}")

    @property
    def spatial(self) -> list[tuple[int, str]]:
        """The spatial axes, counted from 0 for depth, with their names; those that the problem lacks come first."""
        names = SPATIAL_NAMES[self.pipeline.rank]
        return list(enumerate(("depth", "height", "width")[: 3 - len(names)] + names))

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
        rank = self.pipeline.rank
        resolved = {each.name: fields.get(each.name, default_of(each, rank)) for each in operation.fields}
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


def default_of(key: Field, rank: int) -> Any:
    """The default of a field as a resolved value, in problems with ``rank`` spatial axes."""
    match key.kind, key.default:
        case _, None:
            return None
        case "axes", name:
            return axis_names(rank)[name]
        case "each", number:
            return (number,) * 3
        case "padding", number:
            return ((number, number),) * 3
        case "size" | "tensor" | "flag", value:
            return value
        case _, number:
            return ScalarOperand(float(number))


#: Which axes an operation works over.
AXIS = Field("axis", "axes", "axes to work over", default="channel")

#: Which axes of the step's input a tensor's own axes are, where these are not the last ones.
ALONG = Field("along", "axes", "the axes that a tensor of fewer axes has; the last ones by default")
KEEPDIM = Field("keepdim", "flag", "whether the axes stay, with extent 1", default=True)

#: Appends the steps of an operation to the pipeline that is being bound.
Builder = Callable[[Binding], object]


@dataclass(frozen=True)
class Operation:
    """An entry of the table.

    Attributes:
        fields: that it takes.
        build: binds it to sizes.
        meaning: for people.
        rank: the number of spatial axes of the problems that may have it; None for any.
    """

    fields: tuple[Field, ...]
    build: Builder
    meaning: str
    rank: int | None = None


def of_each_rank(name: str, operation: Operation) -> dict[str, Operation]:
    """An operation for problems of any rank, and under the names that say their rank."""
    ranked = {f"{name}{rank}d": replace(operation, rank=rank) for rank in SPATIAL_NAMES}
    return {name: operation, **ranked}


# ---- steps that are classes of their own -------------------------------------------------------------------
def _layout(binding: Binding, first: str, second: str) -> str:
    letters = ", ".join(f"kernel_{name[0]}" for name in SPATIAL_NAMES[binding.pipeline.rank])
    return f"(the layout is {first}, {second}, {letters})"


def build_conv_transpose(binding: Binding) -> None:
    weight: TensorOperand = binding["weight"]
    channels = binding.input_shape[1]
    if weight.shape[0] != channels:
        raise binding.fail(
            f"weight {weight.name} has shape {weight.shape}; its first extent must be the input's {channels} channels "
            + _layout(binding, "in_channels", "out_channels/groups")
        )
    axes = [
        AxisGeometry(
            name,
            binding.input_shape[2 + i],
            weight.shape[2 + i],
            *(binding[key][i] for key in ("stride", "padding", "output_padding", "dilation")),
        )
        for i, name in binding.spatial
    ]
    _convolution(binding, weight.shape[1] * binding["groups"], axes)


def build_conv(binding: Binding) -> None:
    weight: TensorOperand = binding["weight"]
    groups: int = binding["groups"]
    channels = binding.input_shape[1]
    if weight.shape[1] * groups != channels:
        raise binding.fail(
            f"weight {weight.name} has shape {weight.shape} with {groups} groups; its second extent times groups must "
            f"be the input's {channels} channels " + _layout(binding, "out_channels", "in_channels/groups")
        )
    axes = []
    for i, name in binding.spatial:
        extent, kernel, stride = binding.input_shape[2 + i], weight.shape[2 + i], binding["stride"][i]
        padding, dilation = binding["padding"], binding["dilation"][i]
        pair = same_padding(extent, kernel, stride, dilation) if padding == "same" else padding[i]
        axes.append(AxisGeometry.ordinary(name, extent, kernel, stride, pair, dilation))
    _convolution(binding, weight.shape[0], axes, transposed=False)


def same_padding(extent: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Zeros before and after an axis with which there are ``ceil(extent / stride)`` outputs, one more after if odd."""
    if min(stride, dilation) < 1:
        return 0, 0  # which the geometry refuses
    total = larger(0, (-(-extent // stride) - 1) * stride + dilation * (kernel - 1) + 1 - extent)
    return total // 2, total - total // 2


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


def squeeze(binding: Binding) -> None:
    """Drop axes of extent 1 from the result; nothing is computed."""
    long = [axis for axis in binding["axis"] if binding.input_shape[axis] != 1]
    if long:
        name = next(name for name, axes in axis_names(binding.pipeline.rank).items() if axes == (long[0],))
        raise binding.fail(f"axis {name} has extent {binding.input_shape[long[0]]}; expected 1")
    binding.dropped.update(binding["axis"])


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
        stride = binding["stride"] or window
        padding, dilation = binding["padding"], binding.fields.get("dilation", (1, 1, 1))
        divisor = binding.fields.get("divisor")
        pooled, pairs = [], []
        for i, name in binding.spatial:
            extent, (before, after), reach = binding.input_shape[2 + i], padding[i], dilation[i] * (window[i] - 1) + 1
            for key, value in (("window", window[i]), ("stride", stride[i]), ("dilation", dilation[i])):
                if value < 1:
                    raise binding.fail(f"{key} on axis {name} is {value}; it must be 1 or more")
            if 2 * max(before, after) > reach:
                raise binding.fail(
                    f"padding on axis {name} is {max(before, after)}; it must be at most half the window ({reach})"
                )
            left = extent + before + after - reach
            last = left // stride[i]
            if binding["ceil_mode"]:  # one more, where it begins inside the input or its padding before it
                last = smaller(-(-left // stride[i]), (extent + before - 1) // stride[i])
            if last < 0:
                raise binding.fail(
                    f"window on axis {name} is {reach}, larger than its input ({extent + before + after}); the output "
                    "would be empty"
                )
            pooled.append(last + 1)
            pairs.append((before, after))
        if divisor is not None and divisor < 1:
            raise binding.fail(f"divisor is {divisor}; it must be 1 or more")
        counted = binding.fields.get("count_include_pad", True)
        shape = (*binding.input_shape[:2], *pooled)
        binding.append(
            Pool(
                **binding.base(shape),
                form=form,
                window=window,
                stride=stride,
                padding=tuple(pairs),
                dilation=dilation,
                count_padding=counted,
                divisor=divisor,
            )
        )

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
                        axis_name = next(k for k, v in axis_names(binding.pipeline.rank).items() if v == (axis,))
                        raise binding.fail(
                            f"{each.name} has extent {extent} on axis {axis_name}; "
                            f"expected 1 or {wanted}, to broadcast to {binding.input_shape}"
                        )
            operands.append(operand)
        base = binding.base(binding.input_shape)
        latest = ValueOperand(len(binding.pipeline.values) - 1, binding.input_shape)
        if form.commutes and operands == [latest]:  # what was made last is still at hand
            operands = [ValueOperand(binding.source, binding.input_shape)]
            base["source"] = latest.value
        binding.append(Pointwise(**base, form=form, arguments=tuple(operands)))

    along = (ALONG,) if any(each.kind == "operand" for each in fields) else ()
    return Operation((*fields, *along), build, meaning)


def reduction(form: ReductionForm, meaning: str) -> Operation:
    """An operation that makes one value of all values along some axes."""

    def build(binding: Binding) -> None:
        axes = binding["axis"]
        shape = [1 if axis in axes else extent for axis, extent in enumerate(binding.input_shape)]
        binding.append(Reduce(**binding.base(shape), form=form, axes=axes))
        if not binding["keepdim"]:
            binding.dropped.update(axes)

    return Operation((AXIS, KEEPDIM), build, meaning)
