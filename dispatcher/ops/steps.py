"""The pipeline vocabulary: what each step of a problem file means, once, for every backend.

Every value in a pipeline has five axes: batch, channel, depth, height, width (``N C D H W``); a reduction
keeps its axis with extent 1. A problem file names a step of :data:`VOCABULARY`; binding it to sizes gives one
of the frozen classes below, which backends realise by class and, for :class:`Pointwise`, :class:`Pool` and
:class:`Reduce`, by ``function``. A new activation is one entry here and one in each backend's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dispatcher.errors import GeometryError, InputError
from dispatcher.ops.geometry import SPATIAL_AXES, AxisGeometry, ConvGeometry

Shape = tuple[int, int, int, int, int]
AXES: dict[str, tuple[int, ...]] = {
    "batch": (0,),
    "channel": (1,),
    "depth": (2,),
    "height": (3,),
    "width": (4,),
    "spatial": (2, 3, 4),
}


# ---- operands: what a step combines its input with ---------------------------------------------------------
@dataclass(frozen=True)
class ScalarOperand:
    """A number, either written in the file or the value of a ``double`` parameter."""

    value: float


@dataclass(frozen=True)
class TensorOperand:
    """A tensor parameter. ``shape`` is its shape, padded with leading ones to five axes."""

    name: str
    shape: Shape

    @property
    def per_channel(self) -> bool:
        """True when it varies along the channel axis at most."""
        return all(extent == 1 for axis, extent in enumerate(self.shape) if axis != 1)


@dataclass(frozen=True)
class ValueOperand:
    """The result of an earlier step: an index into the operator's values (see :class:`Step`)."""

    value: int
    shape: Shape


Operand = ScalarOperand | TensorOperand | ValueOperand


# ---- bound steps -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One bound step. Value ``0`` is the pipeline's input tensor; step ``i`` makes value ``i + 1``.

    Attributes:
        op: the step's name in the problem file.
        source: index of the value it reads.
        input_shape: shape of that value, ``(N, C, D, H, W)``.
        shape: shape of the value it makes.
    """

    op: str
    source: int
    input_shape: Shape
    shape: Shape

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Everything it reads besides its source."""
        return ()


@dataclass(frozen=True)
class ConvTranspose3d(Step):
    """Transposed convolution; weight ``(IC, OC/groups, KD, KH, KW)``, optional bias ``(OC,)``."""

    geometry: ConvGeometry
    weight: TensorOperand
    bias: TensorOperand | None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Pointwise(Step):
    """``out = function(in, *arguments)``, element by element; arguments broadcast to the input's shape."""

    function: str
    arguments: tuple[Operand, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.arguments


@dataclass(frozen=True)
class Normalize(Step):
    """``(in - mean) / sqrt(variance + eps)`` over ``axes``, then times ``weight`` plus ``bias``.

    The variance is the biased one.

    With ``groups > 1`` the channel axis is split in that many equal parts, each normalised alone.
    """

    axes: tuple[int, ...]
    groups: int
    eps: float
    weight: TensorOperand | None
    bias: TensorOperand | None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in (self.weight, self.bias) if operand is not None)


@dataclass(frozen=True)
class Softmax(Step):
    """Softmax over ``axes`` taken together, with the maximum subtracted."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Pool(Step):
    """``max`` or ``avg`` over windows along depth, height, width: stride = window, no padding, floor mode."""

    function: Literal["max", "avg"]
    window: tuple[int, int, int]


@dataclass(frozen=True)
class Reduce(Step):
    """``sum``, ``mean``, ``max`` or ``log_sum_exp`` over ``axes``, which are kept with extent 1."""

    function: Literal["sum", "mean", "max", "log_sum_exp"]
    axes: tuple[int, ...]


# ---- the vocabulary ----------------------------------------------------------------------------------------
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


class Binding:
    """What a step's builder may ask while it is bound: its fields, resolved.

    Args:
        op: name of the step.
        position: its 1-based place in the pipeline, for messages.
        source: index of the value it reads.
        input_shape: that value's shape.
        fields: field name to resolved value: triples and sizes are integers, operands are :data:`Operand`.
    """

    def __init__(
        self, op: str, position: int, source: int, input_shape: Shape, fields: Mapping[str, Any]
    ) -> None:
        self.op, self.position, self.source, self.input_shape = op, position, source, input_shape
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def fail(self, message: str) -> GeometryError:
        """An error that names this step."""
        return GeometryError(f"step {self.position} ({self.op}): {message}")

    def base(self, shape: Sequence[int]) -> dict[str, Any]:
        """The keyword arguments that every bound step takes."""
        return {"op": self.op, "source": self.source, "input_shape": self.input_shape, "shape": tuple(shape)}

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


Builder = Callable[[Binding], Step]


@dataclass(frozen=True)
class StepType:
    """An entry of the vocabulary: the fields it takes and how it is bound to sizes."""

    fields: tuple[Field, ...]
    build: Builder
    meaning: str


def _build_conv(binding: Binding) -> Step:
    weight: TensorOperand = binding["weight"]
    groups: int = binding["groups"]
    in_channels = binding.input_shape[1]
    if weight.shape[0] != in_channels:
        raise binding.fail(
            f"weight {weight.name} has shape {weight.shape}; its first extent must be the input's "
            f"{in_channels} channels "
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
    geometry = ConvGeometry(
        binding.input_shape[0], in_channels, weight.shape[1] * groups, groups, axes[0], axes[1], axes[2]
    )
    return ConvTranspose3d(
        **binding.base(geometry.output_shape),
        geometry=geometry,
        weight=weight,
        bias=binding.per_channel("bias", geometry.out_channels),
    )


def _build_layer_norm(binding: Binding) -> Step:
    return Normalize(
        **binding.base(binding.input_shape),
        axes=binding["axis"],
        groups=1,
        eps=binding["eps"].value,
        weight=binding.per_channel("weight", binding.input_shape[1]),
        bias=binding.per_channel("bias", binding.input_shape[1]),
    )


def _build_group_norm(binding: Binding) -> Step:
    groups, channels = binding["groups"], binding.input_shape[1]
    if groups < 1 or channels % groups:
        raise binding.fail(f"groups is {groups}; it must divide the {channels} channels")
    return Normalize(
        **binding.base(binding.input_shape),
        axes=(1, 2, 3, 4),
        groups=groups,
        eps=binding["eps"].value,
        weight=binding.per_channel("weight", binding.input_shape[1]),
        bias=binding.per_channel("bias", binding.input_shape[1]),
    )


def _build_softmax(binding: Binding) -> Step:
    return Softmax(**binding.base(binding.input_shape), axes=binding["axis"])


def _pool(function: Literal["max", "avg"]) -> Builder:
    def build(binding: Binding) -> Step:
        window = binding["window"]
        extents = binding.input_shape[2:]
        for name, size, extent in zip(SPATIAL_AXES, window, extents, strict=True):
            if size < 1:
                raise binding.fail(f"window on axis {name} is {size}; it must be 1 or more")
            if size > extent:
                raise binding.fail(
                    f"window on axis {name} is {size}, larger than its input ({extent}); "
                    "the output would be empty"
                )
        pooled = [extent // size for size, extent in zip(window, extents, strict=True)]
        return Pool(**binding.base((*binding.input_shape[:2], *pooled)), function=function, window=window)

    return build


def _reduce(function: Literal["sum", "mean", "max", "log_sum_exp"]) -> Builder:
    def build(binding: Binding) -> Step:
        axes = binding["axis"]
        shape = [1 if axis in axes else extent for axis, extent in enumerate(binding.input_shape)]
        return Reduce(**binding.base(shape), function=function, axes=axes)

    return build


def _pointwise(function: str, *arguments: str) -> Builder:
    def build(binding: Binding) -> Step:
        operands: list[Operand] = []
        for name in arguments:
            operand: Operand = binding[name]
            if not isinstance(operand, ScalarOperand):
                for axis, (extent, wanted) in enumerate(zip(operand.shape, binding.input_shape, strict=True)):
                    if extent not in (1, wanted):
                        axis_name = list(AXES)[axis]
                        raise binding.fail(
                            f"{name} has extent {extent} on axis {axis_name}; "
                            f"expected 1 or {wanted}, to broadcast to {binding.input_shape}"
                        )
            operands.append(operand)
        return Pointwise(**binding.base(binding.input_shape), function=function, arguments=tuple(operands))

    return build


_AXIS_CHANNEL = Field("axis", "axes", "axes to work over", default="channel")
_EPS = Field("eps", "scalar", "added to the variance", default=1e-5, least=0.0)
_AFFINE = (
    Field("weight", "tensor", "one factor a channel"),
    Field("bias", "tensor", "one term a channel"),
)
_WINDOW = Field("window", "triple", "extent of the window, and its stride", required=True)


def _simple(function: str, meaning: str) -> StepType:
    return StepType((), _pointwise(function), meaning)


VOCABULARY: dict[str, StepType] = {
    "conv_transpose3d": StepType(
        (
            Field(
                "weight", "tensor", "(in_channels, out_channels/groups, kernel_d, kernel_h, kernel_w)", True
            ),
            Field("bias", "tensor", "(out_channels,)"),
            Field("stride", "triple", "stride of the output", default=1),
            Field("padding", "triple", "outputs cut from both ends", default=0),
            Field("output_padding", "triple", "outputs added at the far end", default=0),
            Field("dilation", "triple", "spacing of the taps", default=1),
            Field("groups", "size", "independent channel groups", default=1),
        ),
        _build_conv,
        "transposed 3-D convolution",
    ),
    "add": StepType(
        (Field("value", "operand", "what is added", True),), _pointwise("add", "value"), "in + value"
    ),
    "subtract": StepType(
        (Field("value", "operand", "what is subtracted", True),),
        _pointwise("subtract", "value"),
        "in - value",
    ),
    "scale": StepType((Field("by", "operand", "the factor", True),), _pointwise("scale", "by"), "in * by"),
    "clamp": StepType(
        (
            Field("min", "scalar", "lower bound", default=-math.inf, infinite=True),
            Field("max", "scalar", "upper bound", default=math.inf, infinite=True),
        ),
        _pointwise("clamp", "min", "max"),
        "min(max(in, min), max); NaN stays NaN, and max wins where max < min",
    ),
    "gelu": _simple("gelu", "in/2 * (1 + erf(in/sqrt(2)))"),
    "relu": _simple("relu", "max(in, 0)"),
    "leaky_relu": StepType(
        (Field("slope", "scalar", "factor of negative values", default=0.01),),
        _pointwise("leaky_relu", "slope"),
        "in where in > 0, else slope * in",
    ),
    "sigmoid": _simple("sigmoid", "1 / (1 + exp(-in))"),
    "tanh": _simple("tanh", "tanh(in)"),
    "silu": _simple("silu", "in * sigmoid(in)"),
    "softplus": _simple("softplus", "log(1 + exp(in))"),
    "hardswish": _simple("hardswish", "in * clamp(in + 3, 0, 6) / 6"),
    "layer_norm": StepType(
        (_AXIS_CHANNEL, _EPS, *_AFFINE),
        _build_layer_norm,
        "normalise over the named axes at each remaining place",
    ),
    "group_norm": StepType(
        (Field("groups", "size", "parts of the channel axis", True), _EPS, *_AFFINE),
        _build_group_norm,
        "normalise each group of channels over channels and space",
    ),
    "softmax": StepType((_AXIS_CHANNEL,), _build_softmax, "softmax over the named axes taken together"),
    "avg_pool3d": StepType((_WINDOW,), _pool("avg"), "mean of each window"),
    "max_pool3d": StepType((_WINDOW,), _pool("max"), "maximum of each window; NaN wins"),
    "sum": StepType((_AXIS_CHANNEL,), _reduce("sum"), "sum over the named axes"),
    "mean": StepType((_AXIS_CHANNEL,), _reduce("mean"), "mean over the named axes"),
    "max": StepType((_AXIS_CHANNEL,), _reduce("max"), "maximum over the named axes; NaN wins"),
    "log_sum_exp": StepType(
        (_AXIS_CHANNEL,), _reduce("log_sum_exp"), "log of the sum of exponentials over the named axes"
    ),
}


def resolve_axes(value: str | Sequence[str]) -> tuple[int, ...]:
    """Axis numbers of an axis name or a list of names.

    Raises:
        InputError: a name is unknown, or the list is empty.
    """
    names = [value] if isinstance(value, str) else list(value)
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        raise InputError(f"axis is {value!r}; expected names out of {', '.join(AXES)}")
    return tuple(sorted({axis for name in names for axis in AXES[name]}))
