"""The operator table: every operation that a problem file may name, stated once.

An entry says which fields an operation takes, how it is bound to sizes, and, through its form
(:mod:`dispatcher.ops.forms`), what it computes: backends, error bounds, input sets, peers and the documentation read
this table. Besides it there is one more statement of each operation, the float64 reference.

A new pointwise operation or reduction is one line here and one function in ``backends/numpy_ref/steps.py``. An
operation that others make up is a builder that appends their steps (:meth:`Binding.then`) and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dispatcher.errors import GeometryError
from dispatcher.ops.forms import MAX, MIN, PRODUCT, SUM, PointwiseForm, ReductionForm
from dispatcher.ops.geometry import SPATIAL_AXES, AxisGeometry, ConvGeometry
from dispatcher.ops.steps import (
    AXES,
    ConvTranspose3d,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Shape,
    Softmax,
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


class Binding:
    """What a builder may ask while its operation is bound: its fields, resolved, and the value it reads.

    Args:
        op: name of the operation, or ``name.part`` of a part of another one.
        position: its 1-based place in the pipeline, for messages.
        source: index of the value it reads.
        fields: field name to resolved value: triples and sizes are integers, operands are :data:`Operand`.
        values: shapes of all values so far; grows with the steps that are appended.
        steps: all steps so far; grows likewise.
    """

    def __init__(
        self,
        op: str,
        position: int,
        source: int,
        fields: Mapping[str, Any],
        values: list[Shape],
        steps: list[Step],
    ) -> None:
        self.op, self.position, self.source = op, position, source
        self.fields, self.values, self.steps = fields, values, steps

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def input_shape(self) -> Shape:
        """Shape of the value it reads."""
        return self.values[self.source]

    def fail(self, message: str) -> GeometryError:
        """An error that names this step."""
        return GeometryError(f"step {self.position} ({self.op.partition('.')[0]}): {message}")

    def base(self, shape: Sequence[int]) -> dict[str, Any]:
        """The keyword arguments that every bound step takes."""
        return {"op": self.op, "source": self.source, "input_shape": self.input_shape, "shape": tuple(shape)}

    def append(self, step: Step) -> ValueOperand:
        """Append a bound step to the pipeline; returns its value."""
        self.steps.append(step)
        self.values.append(step.shape)
        return ValueOperand(len(self.values) - 1, step.shape)

    def then(self, op: str, source: ValueOperand | None = None, **fields: Any) -> ValueOperand:
        """Append operation ``op`` as a part of this one.

        Args:
            op: of the vocabulary.
            source: the value it reads; the one that this operation reads by default.
            fields: resolved; the rest have their defaults.

        Returns:
            The value of its last step.
        """
        operation = VOCABULARY[op]
        resolved = {field.name: fields.get(field.name, default_of(field)) for field in operation.fields}
        place = self.source if source is None else source.value
        part = Binding(f"{self.op}.{op}", self.position, place, resolved, self.values, self.steps)
        operation.build(part)
        return ValueOperand(len(self.values) - 1, self.values[-1])

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


def default_of(field: Field) -> Any:
    """The default of ``field`` as a resolved value."""
    match field.kind, field.default:
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


#: Appends the steps of an operation to the pipeline that is being bound.
Builder = Callable[[Binding], object]


@dataclass(frozen=True)
class Operation:
    """An entry of the table: the fields it takes, how it is bound to sizes, and what it means, for people."""

    fields: tuple[Field, ...]
    build: Builder
    meaning: str


# ---- steps that are classes of their own -------------------------------------------------------------------
def _build_conv_transpose(binding: Binding) -> None:
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


def _build_conv(binding: Binding) -> None:
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
            name,
            binding.input_shape[2 + i],
            weight.shape[2 + i],
            binding["padding"][i],
            binding["dilation"][i],
        )
        for i, name in enumerate(SPATIAL_AXES)
    ]
    _convolution(binding, weight.shape[0], axes, transposed=False)


def _convolution(
    binding: Binding, out_channels: int, axes: Sequence[AxisGeometry], *, transposed: bool = True
) -> None:
    geometry = ConvGeometry(
        binding.input_shape[0],
        binding.input_shape[1],
        out_channels,
        binding["groups"],
        axes[0],
        axes[1],
        axes[2],
    )
    binding.append(
        ConvTranspose3d(
            **binding.base(geometry.output_shape),
            geometry=geometry,
            weight=binding["weight"],
            bias=binding.per_channel("bias", out_channels),
            transposed=transposed,
        )
    )


def _normalize(binding: Binding, axes: tuple[int, ...], groups: int = 1) -> None:
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


def _pool(form: ReductionForm) -> Builder:
    def build(binding: Binding) -> None:
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
        binding.append(Pool(**binding.base((*binding.input_shape[:2], *pooled)), form=form, window=window))

    return build


# ---- operations that others make up ------------------------------------------------------------------------
def _build_log_softmax(binding: Binding) -> None:
    """``(x - max) - log(sum(exp(x - max)))``: subtracting the maximum first keeps what is small beside it."""
    centred = binding.then("subtract", value=binding.then("max", axis=binding["axis"]))
    binding.then("subtract", centred, value=binding.then("log_sum_exp", centred, axis=binding["axis"]))


def _build_rms_norm(binding: Binding) -> None:
    """``x / sqrt(mean(x^2) + eps)``. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)"""
    square = binding.then("mean", binding.then("square"), axis=binding["axis"])
    root = binding.then("sqrt", binding.then("add", square, value=binding["eps"]))
    result = binding.then("divide", by=root)
    weight = binding.per_channel("weight", binding.input_shape[1])
    if weight is not None:
        binding.then("scale", result, by=weight)


# ---- one entry each ----------------------------------------------------------------------------------------
def pointwise(form: PointwiseForm, meaning: str, *fields: Field) -> Operation:
    """An operation on each element; ``fields`` are its arguments, in the order of the form's."""

    def build(binding: Binding) -> None:
        operands: list[Operand] = []
        for field in fields:
            operand: Operand = binding[field.name]
            if not isinstance(operand, ScalarOperand):
                for axis, (extent, wanted) in enumerate(zip(operand.shape, binding.input_shape, strict=True)):
                    if extent not in (1, wanted):
                        axis_name = list(AXES)[axis]
                        raise binding.fail(
                            f"{field.name} has extent {extent} on axis {axis_name}; "
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

    return Operation((_AXIS_CHANNEL,), build, meaning)


_AXIS_CHANNEL = Field("axis", "axes", "axes to work over", default="channel")
_EPS = Field("eps", "scalar", "added to the variance", default=1e-5, least=0.0)
_AFFINE = (
    Field("weight", "tensor", "one factor a channel"),
    Field("bias", "tensor", "one term a channel"),
)
_WINDOW = Field("window", "triple", "extent of the window, and its stride", required=True)
_CHANNEL_BIAS = Field("bias", "tensor", "(out_channels,)")
_DILATION = Field("dilation", "triple", "spacing of the taps", default=1)
_GROUPS = Field("groups", "size", "independent channel groups", default=1)

CLAMP = PointwiseForm(
    "clamp",
    "raised > b ? b : raised",
    let=(("raised", "x < a ? a : x"),),
    arguments=2,
    cheap=True,
    saturates=True,
    integral=True,
    torch="torch.clamp",
    onnx="Clip",
)
MAXIMUM = ReductionForm("max", MAX, torch="torch.amax", onnx="ReduceMax")
MEAN = ReductionForm("mean", SUM, finish="t * share", torch="torch.mean", onnx="ReduceMean")

VOCABULARY: dict[str, Operation] = {
    "conv_transpose3d": Operation(
        (
            Field(
                "weight", "tensor", "(in_channels, out_channels/groups, kernel_d, kernel_h, kernel_w)", True
            ),
            _CHANNEL_BIAS,
            Field("stride", "triple", "stride of the output", default=1),
            Field("padding", "triple", "outputs cut from both ends", default=0),
            Field("output_padding", "triple", "outputs added at the far end", default=0),
            _DILATION,
            _GROUPS,
        ),
        _build_conv_transpose,
        "transposed 3-D convolution",
    ),
    "conv3d": Operation(
        (
            Field(
                "weight", "tensor", "(out_channels, in_channels/groups, kernel_d, kernel_h, kernel_w)", True
            ),
            _CHANNEL_BIAS,
            Field("padding", "triple", "zeros around the input, at most dilation * (kernel - 1)", default=0),
            _DILATION,
            _GROUPS,
        ),
        _build_conv,
        "3-D convolution with stride 1",
    ),
    # -- combining with an operand
    "add": pointwise(
        PointwiseForm("add", "x + a", arguments=1, cheap=True, integral=True, torch="torch.add", onnx="Add"),
        "in + value",
        Field("value", "operand", "what is added", True),
    ),
    "subtract": pointwise(
        PointwiseForm(
            "subtract", "x - a", arguments=1, cheap=True, integral=True, torch="torch.sub", onnx="Sub"
        ),
        "in - value",
        Field("value", "operand", "what is subtracted", True),
    ),
    "scale": pointwise(
        PointwiseForm(
            "scale",
            "x * a",
            arguments=1,
            cheap=True,
            integral=True,
            role="factor",
            torch="torch.mul",
            onnx="Mul",
        ),
        "in * by",
        Field("by", "operand", "the factor", True),
    ),
    "divide": pointwise(
        PointwiseForm("divide", "x / a", arguments=1, role="factor", pole="a", torch="torch.div", onnx="Div"),
        "in / by",
        Field("by", "operand", "the divisor", True),
    ),
    "maximum": pointwise(
        PointwiseForm("maximum", "max_v(x, a)", arguments=1, cheap=True, integral=True),
        "the larger of in and value; NaN wins",
        Field("value", "operand", "the other one", True),
    ),
    "minimum": pointwise(
        PointwiseForm("minimum", "min_v(x, a)", arguments=1, cheap=True, integral=True),
        "the smaller of in and value; NaN wins",
        Field("value", "operand", "the other one", True),
    ),
    "clamp": pointwise(
        CLAMP,
        "min(max(in, min), max); NaN stays NaN, and max wins where max < min",
        Field("min", "scalar", "lower bound", default=-math.inf, infinite=True),
        Field("max", "scalar", "upper bound", default=math.inf, infinite=True),
    ),
    "hardtanh": pointwise(
        CLAMP,
        "min(max(in, min), max), between -1 and 1",
        Field("min", "scalar", "lower bound", default=-1.0, infinite=True),
        Field("max", "scalar", "upper bound", default=1.0, infinite=True),
    ),
    # -- activations
    "gelu": pointwise(
        PointwiseForm(
            "gelu",
            "gelu_v(x)",
            exponential=True,
            slope=1.13,
            # 1 + erf(x) cancels where x is negative.
            rounding=lambda x: 4.0 * np.minimum(np.abs(x), 6.0),
            torch="torch.nn.functional.gelu",
            onnx="Gelu",
        ),
        "in/2 * (1 + erf(in/sqrt(2)))",
    ),
    "relu": pointwise(
        PointwiseForm(
            "relu", "x < C(0.0) ? C(0.0) : x", cheap=True, integral=True, torch="torch.relu", onnx="Relu"
        ),
        "max(in, 0)",
    ),
    "leaky_relu": pointwise(
        PointwiseForm(
            "leaky_relu",
            "x > C(0.0) || x != x ? x : x * a",
            arguments=1,
            cheap=True,
            torch="torch.nn.functional.leaky_relu",
            onnx="LeakyRelu",
            onnx_attributes=("alpha",),
        ),
        "in where in > 0, else slope * in",
        Field("slope", "scalar", "factor of negative values", default=0.01),
    ),
    "sigmoid": pointwise(
        PointwiseForm(
            "sigmoid",
            "C(1.0) / (C(1.0) + exp_v(-x))",
            exponential=True,
            torch="torch.sigmoid",
            onnx="Sigmoid",
        ),
        "1 / (1 + exp(-in))",
    ),
    "tanh": pointwise(
        PointwiseForm("tanh", "tanh_v(x)", exponential=True, torch="torch.tanh", onnx="Tanh"), "tanh(in)"
    ),
    "silu": pointwise(
        PointwiseForm(
            "silu",
            "x * ((x < C(0.0) ? e : C(1.0)) / (C(1.0) + e))",
            let=(("e", "exp_v(-abs_v(x))"),),  # which does not overflow
            exponential=True,
            torch="torch.nn.functional.silu",
        ),
        "in * sigmoid(in)",
    ),
    "softplus": pointwise(
        PointwiseForm(
            "softplus",
            "(x < C(0.0) ? C(0.0) : x) + log1p_v(exp_v(-abs_v(x)))",
            exponential=True,
            rounding=lambda x: 2.0,  # log(1 + exp(x)) cancels, without log1p
            torch="torch.nn.functional.softplus",
            onnx="Softplus",
        ),
        "log(1 + exp(in))",
    ),
    "hardswish": pointwise(
        PointwiseForm(
            "hardswish",
            "x * ((raised > C(6.0) ? C(6.0) : raised) / C(6.0))",
            let=(("gate", "x + C(3.0)"), ("raised", "gate < C(0.0) ? C(0.0) : gate")),
            cheap=True,
            torch="torch.nn.functional.hardswish",
            onnx="HardSwish",
        ),
        "in * clamp(in + 3, 0, 6) / 6",
    ),
    "mish": pointwise(
        PointwiseForm(
            "mish",
            # tanh(log(1 + exp(x))) = ((1 + exp(x))^2 - 1) / ((1 + exp(x))^2 + 1)
            "x * (x < C(0.0) ? e * (e + C(2.0)) / (e * (e + C(2.0)) + C(2.0))"
            " : (C(1.0) + C(2.0) * e) / (C(1.0) + C(2.0) * e * (C(1.0) + e)))",
            let=(("e", "exp_v(-abs_v(x))"),),
            exponential=True,
            torch="torch.nn.functional.mish",
            onnx="Mish",
        ),
        "in * tanh(log(1 + exp(in)))",
    ),
    "elu": pointwise(
        PointwiseForm(
            "elu",
            "x > C(0.0) ? x : a * expm1_v(x)",
            arguments=1,
            exponential=True,
            torch="torch.nn.functional.elu",
            onnx="Elu",
            onnx_attributes=("alpha",),
        ),
        "in where in > 0, else alpha * (exp(in) - 1)",
        Field("alpha", "scalar", "what negative values tend to, negated", default=1.0),
    ),
    "selu": pointwise(
        PointwiseForm(
            "selu",
            "C(1.0507009873554804934) * (x > C(0.0) ? x : C(1.6732632423543772848) * expm1_v(x))",
            exponential=True,
            torch="torch.selu",
            onnx="Selu",
        ),
        "1.0507 * (in where in > 0, else 1.6733 * (exp(in) - 1))",
    ),
    "softsign": pointwise(
        PointwiseForm(
            "softsign", "x / (C(1.0) + abs_v(x))", torch="torch.nn.functional.softsign", onnx="Softsign"
        ),
        "in / (1 + |in|)",
    ),
    # -- elementary functions
    "exp": pointwise(
        PointwiseForm("exp", "exp_v(x)", exponential=True, torch="torch.exp", onnx="Exp"), "exp(in)"
    ),
    "log": pointwise(
        PointwiseForm("log", "log_v(x)", pole="x", torch="torch.log", onnx="Log"), "natural logarithm of in"
    ),
    "sqrt": pointwise(
        PointwiseForm("sqrt", "sqrt_v(x)", torch="torch.sqrt", onnx="Sqrt"), "square root of in"
    ),
    "abs": pointwise(
        PointwiseForm("abs", "abs_v(x)", cheap=True, integral=True, torch="torch.abs", onnx="Abs"), "|in|"
    ),
    "square": pointwise(
        PointwiseForm("square", "x * x", cheap=True, integral=True, torch="torch.square"), "in * in"
    ),
    "reciprocal": pointwise(
        PointwiseForm("reciprocal", "C(1.0) / x", pole="x", torch="torch.reciprocal", onnx="Reciprocal"),
        "1 / in",
    ),
    # -- norms and softmax
    "layer_norm": Operation(
        (_AXIS_CHANNEL, _EPS, *_AFFINE),
        lambda binding: _normalize(binding, binding["axis"]),
        "normalise over the named axes at each remaining place",
    ),
    "group_norm": Operation(
        (Field("groups", "size", "parts of the channel axis", True), _EPS, *_AFFINE),
        lambda binding: _normalize(binding, (1, 2, 3, 4), binding["groups"]),
        "normalise each group of channels over channels and space",
    ),
    "instance_norm": Operation(
        (_EPS, *_AFFINE),
        lambda binding: _normalize(binding, AXES["spatial"]),
        "normalise each channel of each batch item over space",
    ),
    "batch_norm": Operation(
        (_EPS, *_AFFINE),
        lambda binding: _normalize(binding, (0, 2, 3, 4)),
        "normalise each channel over batch and space, with the statistics of this batch",
    ),
    "rms_norm": Operation(
        (
            _AXIS_CHANNEL,
            Field("eps", "scalar", "added to the mean square", default=1e-5, least=0.0),
            _AFFINE[0],
        ),
        _build_rms_norm,
        "in / sqrt(mean of squares over the named axes + eps)",
    ),
    "softmax": Operation(
        (_AXIS_CHANNEL,),
        lambda binding: binding.append(Softmax(**binding.base(binding.input_shape), axes=binding["axis"])),
        "softmax over the named axes taken together",
    ),
    "log_softmax": Operation(
        (_AXIS_CHANNEL,), _build_log_softmax, "logarithm of the softmax over the named axes taken together"
    ),
    # -- pools and reductions
    "avg_pool3d": Operation((_WINDOW,), _pool(MEAN), "mean of each window"),
    "max_pool3d": Operation((_WINDOW,), _pool(MAXIMUM), "maximum of each window; NaN wins"),
    "sum": reduction(
        ReductionForm("sum", SUM, torch="torch.sum", onnx="ReduceSum"), "sum over the named axes"
    ),
    "mean": reduction(MEAN, "mean over the named axes"),
    "max": reduction(MAXIMUM, "maximum over the named axes; NaN wins"),
    "min": reduction(
        ReductionForm("min", MIN, torch="torch.amin", onnx="ReduceMin"),
        "minimum over the named axes; NaN wins",
    ),
    "product": reduction(ReductionForm("product", PRODUCT, onnx="ReduceProd"), "product over the named axes"),
    "log_sum_exp": reduction(
        ReductionForm(
            "log_sum_exp",
            SUM,
            lift="exp_v(x)",
            finish="log_v(t)",
            shifted=True,
            torch="torch.logsumexp",
            onnx="ReduceLogSumExp",
        ),
        "log of the sum of exponentials over the named axes",
    ),
}
