"""The operator table: every operation that a problem file may name, stated once.

An entry says which fields an operation takes, how it is bound to sizes, and, through its form
(:mod:`dispatcher.ops.forms`), what it computes: backends, error bounds, input sets, peers and the documentation read
this table. Besides it there is one more statement of each operation, the float64 reference.

A new pointwise operation or reduction is one entry here and one function in ``backends/numpy_ref/steps.py``. An
operation that others make up is a builder that appends their steps (:meth:`Binding.then`) and nothing else.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import replace

import numpy as np

from dispatcher.ops.binding import (
    AXIS,
    Binding,
    Builder,
    Field,
    Operation,
    build_conv,
    build_conv_transpose,
    normalize,
    of_each_rank,
    pointwise,
    pool,
    reduction,
    squeeze,
)
from dispatcher.ops.forms import MAX, MIN, PRODUCT, SUM, PointwiseForm, ReductionForm
from dispatcher.ops.steps import AXES, Pool, ScalarOperand, Softmax, ValueOperand
from dispatcher.ops.symbols import Symbol


# ---- operations that others make up ------------------------------------------------------------------------
def build_log_softmax(binding: Binding) -> None:
    """``(x - max) - log(sum(exp(x - max)))``: subtracting the maximum first keeps what is small beside it."""
    centred = binding.then("subtract", value=binding.then("max", axis=binding["axis"]))
    binding.then("subtract", centred, value=binding.then("log_sum_exp", centred, axis=binding["axis"]))


def build_rms_norm(binding: Binding) -> None:
    """``x / sqrt(mean(x^2) + eps)``. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)"""
    square = binding.then("mean", binding.then("square"), axis=binding["axis"])
    root = binding.then("sqrt", binding.then("add", square, value=binding["eps"]))
    result = binding.then("divide", by=root)
    weight = binding.per_channel("weight", binding.input_shape[1])
    if weight is not None:
        binding.then("scale", result, by=weight)


def build_gelu_tanh(binding: Binding) -> None:
    """``in/2 * (1 + tanh(u))``, which is ``in * sigmoid(2u)``, for ``u = sqrt(2/pi) * (in + 0.044715 * in^3)``."""
    x = ValueOperand(binding.source, binding.input_shape)
    slope = 2 * math.sqrt(2 / math.pi)
    cubic = binding.then("scale", binding.then("square"), by=ScalarOperand(slope * 0.044715))
    twice = binding.then("scale", binding.then("add", cubic, value=ScalarOperand(slope)), by=x)
    binding.then("scale", binding.then("sigmoid", twice), by=x)


def adaptive(op: str, form: ReductionForm) -> Builder:
    """Pool to a given size: with windows side by side where that comes out even, else with some that overlap."""

    def build(binding: Binding) -> None:
        extents, sizes = binding.input_shape[2:], binding["size"]
        for place, name in binding.spatial:
            if sizes[place] < 1:
                raise binding.fail(f"size on axis {name} is {sizes[place]}; it must be 1 or more")
        pairs = list(zip(extents, sizes, strict=True))
        # A window begins at o*extent/size, whose fraction is 1 - gcd/size at most; the gcd of symbols is 1 at least.
        known = not any(isinstance(number, Symbol) for pair in pairs for number in pair)
        window = tuple(-(-(extent + size - (math.gcd(extent, size) if known else 1)) // size) for extent, size in pairs)
        if known and all(extent % size == 0 for extent, size in pairs):
            binding.then(op, window=window)
        else:
            base = binding.base((*binding.input_shape[:2], *sizes))
            binding.append(Pool(**base, form=form, window=window, stride=window, adaptive=True))

    return build


_EPS = Field("eps", "scalar", "added to the variance", default=1e-5, least=0.0)
_AFFINE = (Field("weight", "tensor", "one factor a channel"), Field("bias", "tensor", "one term a channel"))
_WINDOWS = (
    Field("window", "each", "extent of the window", required=True),
    Field("stride", "each", "from one window to the next; the window's extent by default"),
    Field("padding", "padding", "places around the input that windows may reach into", default=0),
    Field("dilation", "each", "spacing of a window's places", default=1),
    Field("ceil_mode", "flag", "whether a window may reach beyond the end", default=False),
)
_MEAN_WINDOWS = (
    *(field for field in _WINDOWS if field.name != "dilation"),
    Field("count_include_pad", "flag", "whether padding counts, as zeros", default=True),
    Field("divisor", "size", "what to divide the sum by instead of the number of places"),
)
_SIZE = (Field("size", "each", "extent of the result", required=True),)
_CHANNEL_BIAS = Field("bias", "tensor", "(out_channels,)")
_DILATION = Field("dilation", "each", "spacing of the taps", default=1)
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
    **of_each_rank(
        "conv",
        Operation(
            (
                Field("weight", "tensor", "(out_channels, in_channels/groups, kernel extents)", True),
                _CHANNEL_BIAS,
                Field("stride", "each", "from one window to the next", default=1),
                Field("padding", "padding", "zeros around the input", default=0, same=True),
                _DILATION,
                _GROUPS,
            ),
            build_conv,
            "convolution; its kernel is not flipped",
        ),
    ),
    **of_each_rank(
        "conv_transpose",
        Operation(
            (
                Field("weight", "tensor", "(in_channels, out_channels/groups, kernel extents)", True),
                _CHANNEL_BIAS,
                Field("stride", "each", "stride of the output", default=1),
                Field("padding", "each", "outputs cut from both ends", default=0),
                Field("output_padding", "each", "outputs added at the far end", default=0),
                _DILATION,
                _GROUPS,
            ),
            build_conv_transpose,
            "transposed convolution",
        ),
    ),
    # -- combining with an operand
    "add": pointwise(
        PointwiseForm(
            "add",
            "x + a",
            slope=1.0,
            arguments=1,
            cheap=True,
            integral=True,
            commutes=True,
            torch="torch.add",
            onnx="Add",
        ),
        "in + value",
        Field("value", "operand", "what is added", True),
    ),
    "subtract": pointwise(
        PointwiseForm(
            "subtract", "x - a", slope=1.0, arguments=1, cheap=True, integral=True, torch="torch.sub", onnx="Sub"
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
            commutes=True,
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
        PointwiseForm("maximum", "max_v(x, a)", arguments=1, cheap=True, integral=True, commutes=True, slope=1.0),
        "the larger of in and value; NaN wins",
        Field("value", "operand", "the other one", True),
    ),
    "minimum": pointwise(
        PointwiseForm("minimum", "min_v(x, a)", arguments=1, cheap=True, integral=True, commutes=True, slope=1.0),
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
    # -- choosing
    "greater": pointwise(
        PointwiseForm("greater", "x > a ? C(1.0) : C(0.0)", arguments=1, cheap=True, integral=True, limits=(0.0, 1.0)),
        "1 where in > value, else 0",
        Field("value", "operand", "what it is compared with", True, infinite=True),
    ),
    "greater_equal": pointwise(
        PointwiseForm(
            "greater_equal", "x >= a ? C(1.0) : C(0.0)", arguments=1, cheap=True, integral=True, limits=(0.0, 1.0)
        ),
        "1 where in >= value, else 0",
        Field("value", "operand", "what it is compared with", True, infinite=True),
    ),
    "where": pointwise(
        PointwiseForm("where", "x != C(0.0) ? a : b", arguments=2, cheap=True, integral=True),
        "value where in is not 0, else other",
        Field("value", "operand", "what is taken where in is not 0", True, infinite=True),
        Field("other", "operand", "what is taken elsewhere", True, infinite=True),
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
    "gelu_tanh": Operation(
        (), build_gelu_tanh, "in/2 * (1 + tanh(sqrt(2/pi) * (in + 0.044715 * in^3))), the approximation of gelu"
    ),
    "relu": pointwise(
        PointwiseForm("relu", "x < C(0.0) ? C(0.0) : x", cheap=True, integral=True, torch="torch.relu", onnx="Relu"),
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
            limits=(0.0, 1.0),
            torch="torch.sigmoid",
            onnx="Sigmoid",
        ),
        "1 / (1 + exp(-in))",
    ),
    "tanh": pointwise(
        PointwiseForm("tanh", "tanh_v(x)", exponential=True, limits=(-1.0, 1.0), torch="torch.tanh", onnx="Tanh"),
        "tanh(in)",
    ),
    "silu": pointwise(
        PointwiseForm(
            "silu",
            "(x < C(0.0) ? x * e : x) / (C(1.0) + e)",
            let=(("e", "exp_below_v(-abs_v(x))"),),  # which does not overflow
            exponential=True,
            torch="torch.nn.functional.silu",
        ),
        "in * sigmoid(in)",
    ),
    "softplus": pointwise(
        PointwiseForm(
            "softplus",
            "(x < C(0.0) ? C(0.0) : x) + log1p_v(exp_below_v(-abs_v(x)))",
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
            " : C(1.0) - C(2.0) * e * e / (C(1.0) + C(2.0) * e * (C(1.0) + e)))",
            let=(("e", "exp_below_v(-abs_v(x))"),),
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
            "x > C(0.0) ? C(1.0507009873554804934) * x : C(1.7580993408473768599) * expm1_v(x)",
            exponential=True,
            torch="torch.selu",
            onnx="Selu",
        ),
        "1.0507 * (in where in > 0, else 1.6733 * (exp(in) - 1))",
    ),
    "softsign": pointwise(
        PointwiseForm("softsign", "x / (C(1.0) + abs_v(x))", torch="torch.nn.functional.softsign", onnx="Softsign"),
        "in / (1 + |in|)",
    ),
    # -- elementary functions
    "exp": pointwise(PointwiseForm("exp", "exp_v(x)", exponential=True, torch="torch.exp", onnx="Exp"), "exp(in)"),
    "log": pointwise(
        PointwiseForm("log", "log_v(x)", pole="x", torch="torch.log", onnx="Log"), "natural logarithm of in"
    ),
    "sqrt": pointwise(PointwiseForm("sqrt", "sqrt_v(x)", torch="torch.sqrt", onnx="Sqrt"), "square root of in"),
    "abs": pointwise(
        PointwiseForm("abs", "abs_v(x)", cheap=True, integral=True, slope=1.0, torch="torch.abs", onnx="Abs"), "|in|"
    ),
    "square": pointwise(PointwiseForm("square", "x * x", cheap=True, integral=True, torch="torch.square"), "in * in"),
    "reciprocal": pointwise(
        PointwiseForm("reciprocal", "C(1.0) / x", pole="x", torch="torch.reciprocal", onnx="Reciprocal"), "1 / in"
    ),
    # -- norms and softmax
    "layer_norm": Operation(
        (AXIS, _EPS, *_AFFINE),
        lambda binding: normalize(binding, binding["axis"]),
        "normalise over the named axes at each remaining place",
    ),
    "group_norm": Operation(
        (Field("groups", "size", "parts of the channel axis", True), _EPS, *_AFFINE),
        lambda binding: normalize(binding, (1, 2, 3, 4), binding["groups"]),
        "normalise each group of channels over channels and space",
    ),
    "instance_norm": Operation(
        (_EPS, *_AFFINE),
        lambda binding: normalize(binding, AXES["spatial"]),
        "normalise each channel of each batch item over space",
    ),
    "batch_norm": Operation(
        (_EPS, *_AFFINE),
        lambda binding: normalize(binding, (0, 2, 3, 4)),
        "normalise each channel over batch and space, with the statistics of this batch",
    ),
    "rms_norm": Operation(
        (AXIS, Field("eps", "scalar", "added to the mean square", default=1e-5, least=0.0), _AFFINE[0]),
        build_rms_norm,
        "in / sqrt(mean of squares over the named axes + eps)",
    ),
    "softmax": Operation(
        (AXIS,),
        lambda binding: binding.append(Softmax(**binding.base(binding.input_shape), axes=binding["axis"])),
        "softmax over the named axes taken together",
    ),
    "log_softmax": Operation((AXIS,), build_log_softmax, "logarithm of the softmax over the named axes taken together"),
    # -- pools and reductions
    **of_each_rank("avg_pool", Operation(_MEAN_WINDOWS, pool(MEAN), "mean of each window")),
    **of_each_rank("max_pool", Operation(_WINDOWS, pool(MAXIMUM), "maximum of each window; NaN wins")),
    **of_each_rank(
        "adaptive_avg_pool", Operation(_SIZE, adaptive("avg_pool", MEAN), "mean of windows that make the size")
    ),
    **of_each_rank(
        "adaptive_max_pool", Operation(_SIZE, adaptive("max_pool", MAXIMUM), "maximum of windows that make the size")
    ),
    "squeeze": Operation(
        (replace(AXIS, required=True, default=None),), squeeze, "drop axes of extent 1; nothing is computed"
    ),
    "sum": reduction(ReductionForm("sum", SUM, torch="torch.sum", onnx="ReduceSum"), "sum over the named axes"),
    "mean": reduction(MEAN, "mean over the named axes"),
    "max": reduction(MAXIMUM, "maximum over the named axes; NaN wins"),
    "min": reduction(
        ReductionForm("min", MIN, torch="torch.amin", onnx="ReduceMin"), "minimum over the named axes; NaN wins"
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


#: What to write for operations that others have under another name, without underscores, capitals and ranks.
_ELSEWHERE = {
    **dict.fromkeys(("swish", "sigmoidlinearunit"), "silu"),
    **dict.fromkeys(("convolution", "crosscorrelation", "depthwiseconv", "pointwiseconv"), "conv"),
    **dict.fromkeys(("convtransposed", "transposedconv", "deconv", "deconvolution"), "conv_transpose"),
    **dict.fromkeys(("multiply", "mul", "scaling"), "scale"),
    **dict.fromkeys(("bias", "biasadd", "residual", "residualadd", "addition"), "add"),
    **dict.fromkeys(("sub", "subtraction"), "subtract"),
    **dict.fromkeys(("div", "division"), "divide"),
    **dict.fromkeys(("globalavgpool", "globalaveragepool"), "mean with axis: spatial"),
    "globalmaxpool": "max with axis: spatial",
    "averagepool": "avg_pool",
    "clip": "clamp",
    "relu6": "hardtanh with min: 0 and max: 6",
    "hardsigmoid": "add with value: 3, hardtanh with min: 0 and max: 6, divide with by: 6",
    "dropout": "nothing, for there is no dropout outside training",
    "identity": "nothing",
    "flatten": "nothing, and name all axes where they are reduced",
}


def near_operation(name: str) -> str:
    """``; write ...``, or ``; did you mean ...?``, where an operation that is not in the vocabulary is like one that
    is, else nothing."""
    names = {re.sub("_", "", each): each for each in VOCABULARY}
    plain = re.sub("[ _-]", "", name[:100]).lower()
    rank = re.search(r"[123]d$", plain)
    stem = re.sub(r"(\d+)d$", "", plain)
    if stem in _ELSEWHERE:
        ranked = f"{_ELSEWHERE[stem]}{rank[0] if rank else ''}"
        return f"; write {ranked if ranked in VOCABULARY else _ELSEWHERE[stem]}"
    close = difflib.get_close_matches(plain, names, n=1, cutoff=0.75) or [each for each in (stem,) if each in names]
    return f"; did you mean {names[close[0]]!r}?" if close else ""
