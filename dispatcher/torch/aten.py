"""What ATen operators on elements, and reductions, are among the steps of the vocabulary.

A handler takes the graph, whose ``node`` is the present one, and the operator's arguments by the names of its schema,
the first tensor as ``x``; it returns the tensor that results, or a tuple of them where the operator has several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dispatcher.torch.draft import GROUPS, RefusedError, SymbolicError, Tensor, Value, fixed, is_one
from dispatcher.torch.graph import Array, Constant, Graph, Handler, equal, relaid, whole

_Handler = TypeVar("_Handler", bound=Handler)

#: By the operator's name, without ``aten.``.
HANDLERS: dict[str, Handler] = {}

#: The name of the field that holds what a step combines its source with.
_OPERAND = {
    **dict.fromkeys(("add", "subtract", "maximum", "minimum", "greater", "greater_equal"), "value"),
    **dict.fromkeys(("scale", "divide"), "by"),
}


def handles(*names: str) -> Callable[[_Handler], _Handler]:
    """Make a function the handler of these operators."""

    def register(handler: _Handler) -> _Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def array_of(value: Any) -> Array:
    if isinstance(value, Array):
        return value
    if isinstance(value, Constant):
        raise RefusedError(f"{value.name} is not the input that the pipeline begins with, and can be an operand alone")
    raise RefusedError(f"it works on {type(value).__name__}; expected a tensor")


def number_of(value: Any) -> float:
    if isinstance(value, Constant) and value.literal and value.data is not None and value.data.numel() == 1:
        return float(value.data)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        raise SymbolicError
    if not isinstance(value, int | float):
        raise RefusedError("a number in it is computed; expected a constant")
    return float(value)


# ---- one element at a time ---------------------------------------------------------------------------------
def chain(graph: Graph, x: Any, *steps: tuple[str, dict[str, Any]]) -> Array:
    array = array_of(x)
    value = array.value
    for op, fields in steps:
        value = graph.draft.step(op, value, **fields)
    return array.computed(value)


def _pointwise(*steps: tuple[str, dict[str, Any]]) -> Handler:
    return lambda graph, x, **_: chain(graph, x, *steps)


for _name in ("relu", "sigmoid", "tanh", "silu", "mish", "hardswish", "selu", "exp", "log", "sqrt", "abs", "square"):
    HANDLERS[_name] = _pointwise((_name, {}))
for _name in ("reciprocal", "erf", "log1p"):
    HANDLERS[_name] = _pointwise((_name, {}))
HANDLERS |= {
    "absolute": HANDLERS["abs"],
    "special_erf": HANDLERS["erf"],
    "special_log1p": HANDLERS["log1p"],
    "special_expit": HANDLERS["sigmoid"],
    "relu6": _pointwise(("clamp", {"min": 0.0, "max": 6.0})),
    "hardsigmoid": _pointwise(("add", {"value": 3.0}), ("clamp", {"min": 0.0, "max": 6.0}), ("divide", {"by": 6.0})),
    "neg": _pointwise(("scale", {"by": -1.0})),
    "negative": _pointwise(("scale", {"by": -1.0})),
    "rsqrt": _pointwise(("sqrt", {}), ("reciprocal", {})),
    "log2": _pointwise(("log", {}), ("divide", {"by": math.log(2)})),
    "log10": _pointwise(("log", {}), ("divide", {"by": math.log(10)})),
    "exp2": _pointwise(("scale", {"by": math.log(2)}), ("exp", {})),
    "log_sigmoid": _pointwise(("scale", {"by": -1.0}), ("softplus", {}), ("scale", {"by": -1.0})),
}


@handles("gelu")
def _gelu(graph: Graph, x: Any, approximate: str = "none", **_: Any) -> Array:
    return chain(graph, x, ("gelu" if approximate == "none" else "gelu_tanh", {}))


@handles("clamp", "clip", "hardtanh", "clamp_min", "clamp_max")
def _clamp(graph: Graph, x: Any, min: Any = None, max: Any = None, **given: Any) -> Any:
    low, high = given.get("min_val", min), given.get("max_val", max)
    if isinstance(low, Array | Constant) or isinstance(high, Array | Constant):
        x = x if low is None else combined(graph, "maximum", x, low)
        return x if high is None else combined(graph, "minimum", x, high)
    bounds = {name: number_of(bound) for name, bound in (("min", low), ("max", high)) if bound is not None}
    return chain(graph, x, ("clamp", bounds))


@handles("leaky_relu")
def _leaky_relu(graph: Graph, x: Any, negative_slope: Any, **_: Any) -> Array:
    return chain(graph, x, ("leaky_relu", {"slope": number_of(negative_slope)}))


@handles("rrelu")
def _rrelu(graph: Graph, x: Any, lower: Any, upper: Any, training: bool, **_: Any) -> Array:
    if training:
        raise RefusedError("in training mode it draws slopes at random; call eval() on the module")
    return _leaky_relu(graph, x, (number_of(lower) + number_of(upper)) / 2)


@handles("elu")
def _elu(graph: Graph, x: Any, alpha: Any, scale: Any = 1, input_scale: Any = 1, **_: Any) -> Array:
    if (number_of(scale), number_of(input_scale)) != (1.0, 1.0):
        raise RefusedError("its scale and input_scale are not 1")
    return chain(graph, x, ("elu", {"alpha": number_of(alpha)}))


@handles("celu")
def _celu(graph: Graph, x: Any, alpha: Any, **_: Any) -> Array:
    a = number_of(alpha)
    return chain(graph, x, ("divide", {"by": a}), ("elu", {}), ("scale", {"by": a}))


@handles("softplus")
def _softplus(graph: Graph, x: Any, beta: Any = 1, threshold: Any = 20, **_: Any) -> Array:
    b = number_of(beta)
    scaled = x if b == 1.0 else chain(graph, x, ("scale", {"by": b}))
    result = chain(graph, scaled, ("softplus", {}), *([("divide", {"by": b})] if b != 1.0 else []))
    if number_of(threshold) >= 20.0:  # from where on float32 shows no difference
        return result
    return _where(graph, combined(graph, "greater", scaled, threshold), x, result)


def along(constant: Constant, place: int, count: int) -> Constant:
    """One value for each place of dimension ``place`` out of ``count``, to broadcast."""
    trailing = count - place - 1
    if constant.data is None or len(constant.sizes) != 1:
        raise RefusedError(f"{constant.name} is an input of the module; expected a weight with one dimension")
    data = constant.data.reshape(-1, *[1] * trailing)
    return Constant(constant.name, data, tuple(data.shape), constant.literal)


@handles("prelu", "_prelu_kernel")
def _prelu(graph: Graph, x: Any, weight: Any, **_: Any) -> Array:
    below = chain(graph, x, ("minimum", {"value": 0.0}))
    if graph.name.startswith("prelu") and isinstance(weight, Constant):
        weight = along(weight, 1, len(below.layout))
    return combined(graph, "add", combined(graph, "scale", below, weight), chain(graph, x, ("relu", {})))


@handles("softshrink")
def _softshrink(graph: Graph, x: Any, lambd: Any, **_: Any) -> Array:
    bound = number_of(lambd)
    return combined(graph, "subtract", x, chain(graph, x, ("clamp", {"min": -bound, "max": bound})))


# ---- choices: a tensor of truth values shows a value of ones and zeros -----------------------------------
@handles("gt", "greater", "ge", "greater_equal", "lt", "less", "le", "less_equal")
def _compared(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    op = "greater_equal" if graph.name[1:2] == "e" or graph.name.endswith("equal") else "greater"
    return combined(graph, op, *((other, x) if graph.name.startswith("l") else (x, other)))


@handles("eq", "ne", "not_equal")
def _equal(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    least, most = combined(graph, "greater_equal", x, other), combined(graph, "greater_equal", other, x)
    same = combined(graph, "scale", least, most)
    return same if graph.name == "eq" else combined(graph, "subtract", 1.0, same)


@handles("logical_and", "bitwise_and", "__and__", "logical_or", "bitwise_or", "__or__")
def _both(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    return combined(graph, "scale" if "and" in graph.name else "maximum", x, other)


@handles("logical_not", "bitwise_not")
def _not(graph: Graph, x: Any, **_: Any) -> Array:
    return combined(graph, "subtract", 1.0, array_of(x))


@handles("isnan", "isinf", "isfinite", "isposinf", "isneginf")
def _is_odd(graph: Graph, x: Any, **_: Any) -> Array:
    if graph.name == "isnan":
        return _equal(graph, x, x)
    size = array_of(x) if graph.name.endswith("posinf") else chain(graph, x, ("abs", {}))
    if graph.name == "isneginf":
        size = chain(graph, x, ("scale", {"by": -1.0}))
    if graph.name == "isfinite":
        return combined(graph, "greater", math.inf, size)
    return combined(graph, "greater_equal", size, math.inf)


@handles("sign", "sgn")
def _sign(graph: Graph, x: Any, **_: Any) -> Array:
    above, below = combined(graph, "greater", x, 0.0), combined(graph, "greater", 0.0, array_of(x))
    return combined(graph, "subtract", above, below)


@handles("where")
def _where(graph: Graph, condition: Any, x: Any = None, other: Any = None, **_: Any) -> Array:
    """``x`` where the condition holds, else ``other``."""
    wide = [each for each in (condition, x, other) if isinstance(each, Array)]
    widest = max(wide, key=lambda each: len(each.value.axes))
    if widest is not condition:  # nothing is greater than infinity: zeros of all axes, to which it is added
        condition = combined(graph, "add", chain(graph, widest, ("greater", {"value": math.inf})), condition)
    array, operands = array_of(condition), []
    for each in (x, other):
        operand: Any = each
        if isinstance(each, Array):
            layout, sizes = _aligned(array, each)
            if not array.covers(layout):
                raise RefusedError("its condition lacks axes of what it chooses from")
            array, operand = Array(array.cell, layout, sizes), each.value
        elif isinstance(each, Constant):
            array, operand = _widened(array, len(each.sizes)), graph.operand(each, array)
        else:
            operand = number_of(each)
        operands.append(operand)
    if any(isinstance(each, Tensor) and each.along is not None for each in operands):
        raise RefusedError("it chooses from an input in another layout than it is given in")
    return array.computed(graph.draft.step("where", array.value, value=operands[0], other=operands[1]))


@handles("masked_fill", "index_put")
def _masked_fill(graph: Graph, x: Any, mask: Any = None, value: Any = None, **given: Any) -> Array:
    """``value`` where the mask holds; also written ``x[mask] = value``."""
    if graph.name == "index_put":
        (mask, *more), value = given["indices"], number_of(given["values"])
        if more or given.get("accumulate") or not isinstance(mask, Array):
            raise RefusedError("it writes into a part of a tensor")
    return _where(graph, mask, value, array_of(x))


@handles("hardshrink")
def _hardshrink(graph: Graph, x: Any, lambd: Any, **_: Any) -> Array:
    inside = combined(graph, "greater_equal", number_of(lambd), chain(graph, x, ("abs", {})))
    return _where(graph, inside, 0.0, x)


@handles("threshold")
def _threshold(graph: Graph, x: Any, threshold: Any, value: Any, **_: Any) -> Array:
    return _where(graph, combined(graph, "greater_equal", number_of(threshold), array_of(x)), value, x)


@handles("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _filled(graph: Graph, x: Any, fill_value: Any = None, **_: Any) -> Constant:
    """One number for all elements, of a tensor that is like a computed one."""
    number = number_of(fill_value) if "full" in graph.name else float("ones" in graph.name)
    return Constant(graph.node.name, torch.tensor(number, dtype=torch.float64), graph.sizes, literal=True)


@handles("pow")
def _pow(graph: Graph, x: Any, exponent: Any, **_: Any) -> Array:
    if isinstance(exponent, Array):
        base = number_of(x)
        if base <= 0.0:
            raise RefusedError(f"it raises {base:g} to computed powers; expected a positive number")
        return chain(graph, exponent, ("scale", {"by": math.log(base)}), ("exp", {}))
    power = number_of(exponent)
    magnitude = abs(power)
    if magnitude == 0.5:
        result = chain(graph, x, ("sqrt", {}))
    elif magnitude in range(1, 9):
        result = array_of(x)
        for bit in f"{int(magnitude):b}"[1:]:  # square and multiply
            result = chain(graph, result, ("square", {}))
            if bit == "1":
                result = combined(graph, "scale", result, x)
    elif not power.is_integer():
        return chain(graph, x, ("log", {}), ("scale", {"by": power}), ("exp", {}))
    else:
        raise RefusedError(f"the exponent is {power:g}; expected one that is not 0 and, if whole, up to 8")
    return result if power > 0 else chain(graph, result, ("reciprocal", {}))


# ---- two operands ------------------------------------------------------------------------------------------
def combined(graph: Graph, op: str, left: Any, right: Any) -> Array:
    """``left op right``, broadcast."""
    if not isinstance(left, Array):
        return _reversed(graph, op, left, array_of(right))
    key = _OPERAND[op]
    if isinstance(right, Array):
        layout, sizes = _aligned(left, right)
        # A step's source has all axes of its result; the pipeline's input is the better operand of two equals.
        if not left.covers(layout) or (left.value.tensor and right.covers(layout) and not right.value.tensor):
            if not right.covers(layout):
                raise RefusedError("each of its operands lacks axes of the other one")
            return _reversed(graph, op, left, right)
        return Array([graph.draft.step(op, left.value, **{key: right.value})], layout, sizes)
    if isinstance(right, Constant):
        operand = graph.operand(right, left)
        value = graph.draft.step(op, left.value, **{key: operand})
        return _widened(left, len(right.sizes)).computed(value)
    return left.computed(graph.draft.step(op, left.value, **{key: number_of(right)}))


def _widened(array: Array, count: int) -> Array:
    """With ``count`` dimensions at least."""
    lead = max(0, count - len(array.layout))
    return Array(array.cell, ((),) * lead + array.layout, (1,) * lead + array.sizes)


def _times(graph: Graph, operand: Any, factor: float) -> Any:
    """An operand of any kind times a number."""
    if isinstance(operand, Array):
        return chain(graph, operand, ("scale", {"by": factor}))
    if not isinstance(operand, Constant):
        return number_of(operand) * factor
    if operand.data is None:
        raise RefusedError(f"it needs {operand.name}, an input, times {factor:g}")
    return Constant(operand.name, operand.data * factor, operand.sizes, operand.literal)


def _reversed(graph: Graph, op: str, left: Any, right: Array) -> Array:
    """``left op right`` as a step that reads ``right``."""
    if op == "subtract":
        op, right = "add", chain(graph, right, ("scale", {"by": -1.0}))
    elif op == "divide":
        op, right = "scale", chain(graph, right, ("reciprocal", {}))
        if not isinstance(left, Array | Constant) and number_of(left) == 1.0:
            return right
    elif op.startswith("greater"):
        return combined(graph, op, _times(graph, right, -1.0), _times(graph, left, -1.0))
    return combined(graph, op, right, left)


def _aligned(left: Array, right: Array) -> tuple[tuple[tuple[int, ...], ...], tuple[Any, ...]]:
    """The layout and sizes of what two tensors broadcast to."""
    count = max(len(left.layout), len(right.layout))
    layout, sizes = [], []
    for place in range(-count, 0):
        (axes, size), (others, extent) = (
            (each.layout[place], each.sizes[place]) if -place <= len(each.layout) else ((), 1) for each in (left, right)
        )
        if axes and others and axes != others:
            raise RefusedError("its operands have different axes along one dimension")
        layout.append(axes or others)
        sizes.append(extent if is_one(size) else size)
    used = [axis for axes in layout for axis in axes]
    if len(set(used)) < len(used):
        raise RefusedError("its operands have one axis along different dimensions")
    return tuple(layout), tuple(sizes)


@handles("add", "sub", "subtract", "rsub")
def _add(graph: Graph, x: Any, other: Any, alpha: Any = 1, **_: Any) -> Array:
    if graph.node.meta["val"].dtype is torch.bool:
        raise RefusedError("it adds truth values")
    op = "add" if graph.name == "add" else "subtract"
    if graph.name == "rsub":
        x, other = other, x
    if number_of(alpha) != 1.0:
        other = _times(graph, other, number_of(alpha))
    return combined(graph, op, x, other)


@handles("mul", "multiply")
def _mul(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    if isinstance(x, Array) and isinstance(other, Array) and x.value is other.value and x.layout == other.layout:
        return chain(graph, x, ("square", {}))
    return combined(graph, "scale", x, other)


@handles("div", "divide", "true_divide")
def _div(graph: Graph, x: Any, other: Any, rounding_mode: Any = None, **_: Any) -> Array:
    if rounding_mode is not None:
        raise RefusedError(f"it rounds ({rounding_mode})")
    return combined(graph, "divide", x, other)


@handles("maximum")
def _maximum(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    return combined(graph, "maximum", x, other)


@handles("minimum")
def _minimum(graph: Graph, x: Any, other: Any, **_: Any) -> Array:
    return combined(graph, "minimum", x, other)


# ---- reductions and softmax --------------------------------------------------------------------------------
def _dims(array: Array, dim: Any) -> list[int]:
    count = len(array.layout)
    given = [dim] if isinstance(dim, int) else list(dim or range(count))
    return sorted({each % count if count else 0 for each in given})


def axes_of(array: Array, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(axis for place in dims for axis in (array.layout[place] if array.layout else ())))


def _same_dtype(graph: Graph, dtype: Any) -> None:
    if dtype is not None and dtype != graph.node.args[0].meta["val"].dtype:
        raise RefusedError(f"it converts to {dtype}; a problem has one dtype")


def reduced(graph: Graph, op: str, x: Any, dim: Any = None, keepdim: bool = False) -> Array:
    array = array_of(x)
    dims = _dims(array, dim)
    if op not in ("mean", "max", "min"):  # to which repeated values make no difference
        whole(array, dims)
    axes = axes_of(array, dims)
    shape = [1 if axis in axes else extent for axis, extent in enumerate(array.value.shape)]
    value = graph.draft.step(op, array.value, shape, axis=axes) if axes else array.value
    left = [
        ((), 1) if place in dims else pair
        for place, pair in enumerate(zip(array.layout, array.sizes, strict=True))
        if keepdim or place not in dims
    ]
    return Array([value], tuple(axes for axes, _ in left), tuple(size for _, size in left))


@handles("sum", "mean", "logsumexp", "amax", "amin")
def _reduction(graph: Graph, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, **_: Any) -> Array:
    name = graph.name
    _same_dtype(graph, dtype)
    op = {"logsumexp": "log_sum_exp", "amax": "max", "amin": "min"}.get(name, name)
    return reduced(graph, op, x, dim, keepdim)


@handles("prod")
def _prod(graph: Graph, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, **_: Any) -> Array:
    _same_dtype(graph, dtype)
    return reduced(graph, "product", x, dim, keepdim)


@handles("max", "min")
def _extreme(graph: Graph, x: Any, other: Any = None, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    op = graph.name
    if other is not None:
        return combined(graph, f"{op}imum", x, other)
    result = reduced(graph, op, x, dim, keepdim)
    return result if dim is None else (result, None)


@handles("var", "std", "var_mean", "std_mean")
def _spread(
    graph: Graph,
    x: Any,
    dim: Any = None,
    unbiased: bool = True,
    correction: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> Any:
    name = graph.name
    array = array_of(x)
    taken = number_of(correction) if correction is not None else float(unbiased)
    mean = reduced(graph, "mean", array, dim, True)
    square = chain(graph, combined(graph, "subtract", array, mean), ("square", {}))
    result = reduced(graph, "mean", square, dim, keepdim)
    if taken:
        count = math.prod(fixed(array.sizes[place]) for place in _dims(array, dim))
        if count <= taken:
            raise RefusedError("the variance of so few values is not defined")
        result = chain(graph, result, ("scale", {"by": count / (count - taken)}))
    if name.startswith("std"):
        result = chain(graph, result, ("sqrt", {}))
    return (result, reduced(graph, "mean", array, dim, keepdim)) if name.endswith("_mean") else result


@handles("norm", "linalg_vector_norm")
def _vector_norm(
    graph: Graph, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, **given: Any
) -> Array:
    _same_dtype(graph, dtype)
    order = given.get("ord", given.get("p", 2))
    order = 2.0 if order is None else number_of(order)
    if order == 1.0:
        return reduced(graph, "sum", chain(graph, x, ("abs", {})), dim, keepdim)
    if order == 2.0:
        total = reduced(graph, "sum", chain(graph, x, ("square", {})), dim, keepdim)
        return chain(graph, total, ("sqrt", {}))
    if order == math.inf:
        return reduced(graph, "max", chain(graph, x, ("abs", {})), dim, keepdim)
    if order <= 0.0:
        raise RefusedError(f"the order of the norm is {order:g}; expected a positive one")
    return _pow(graph, reduced(graph, "sum", _pow(graph, chain(graph, x, ("abs", {})), order), dim, keepdim), 1 / order)


@handles("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(graph: Graph, x: Any, dim: int, dtype: Any = None, **_: Any) -> Array:
    _same_dtype(graph, dtype)
    op = "log_softmax" if "log" in graph.name else "softmax"
    array = array_of(x)
    whole(array, _dims(array, dim))
    axes = axes_of(array, _dims(array, dim)) or unit_axes(graph, array)
    return array.computed(graph.draft.step(op, array.value, axis=axes))


def unit_axes(graph: Graph, array: Array) -> tuple[int, ...]:
    """An axis of extent 1, for what works over a dimension of size 1."""
    found = [axis for axis in (1, 0, *graph.draft.spatial) if is_one(array.value.shape[axis])]
    if not found:
        raise RefusedError("it works over a dimension of size 1 that is none of the problem's axes")
    return tuple(found[:1])


# ---- what computes nothing ---------------------------------------------------------------------------------
@handles(
    *("alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy", "lift", "view_of", "to", "_to_copy"),
    *("type_as", "positive"),
)
def _same(graph: Graph, x: Any, **_: Any) -> Any:
    before, after = graph.node.args[0].meta["val"], graph.node.meta["val"]
    # Whole numbers and truth values come from comparisons alone, and are floating-point numbers in the pipeline.
    if before.dtype != after.dtype and (before.is_floating_point() or not after.is_floating_point()):
        raise RefusedError(f"it converts {before.dtype} to {after.dtype}; a problem has one dtype")
    return array_of(x)


HANDLERS["prims.copy_strided"] = lambda graph, a, **_: _same(graph, a)


def _is_zero(value: Value) -> bool:
    """Whether a value is 0 whatever the input is, as what is first clamped to 0 or less and then to 0 or more."""
    below = value.source
    if value.op != "clamp" or value.fields.get("min") != 0.0 or below is None:
        return False
    most = below.fields.get("max") if below.op == "clamp" else below.operand if below.op == "minimum" else None
    return isinstance(most, float) and most <= 0.0


@handles("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
def _dropout(graph: Graph, x: Any, p: Any, train: bool | None, **_: Any) -> Any:
    if train and number_of(p) > 0 and not _is_zero(array_of(x).value):
        raise RefusedError("in training mode it draws at random; call eval() on the module, or set p to 0")
    return (array_of(x), None) if graph.name.startswith("native") else array_of(x)


@handles(
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"),
    *("ravel", "atleast_1d", "_reshape_alias", "squeeze_copy", "view_copy", "unsqueeze_copy"),
)
def _view(graph: Graph, x: Any, **_: Any) -> Any:
    if isinstance(x, Constant):  # an input
        before, after = ([size for size in sizes if not is_one(size)] for sizes in (x.sizes, graph.sizes))
        if len(before) != len(after) or not all(map(equal, before, after)):
            raise RefusedError(f"it views {x.name} in a shape that it is not given in")
        return Constant(x.name, None, graph.sizes, given=x.given)
    return _grouped(graph, array_of(x), relaid(array_of(x), graph.sizes))


def _grouped(graph: Graph, array: Array, view: Array) -> Array:
    """A view of ``array``, in which channels may lie in groups now, or no longer."""
    value = array.value
    made = value.source if value.op == "grouped" and any(axes[:2] == (GROUPS, 1) for axes in view.layout) else None
    if made is not None:
        layout = tuple(tuple(axis for axis in axes if axis != GROUPS) for axes in view.layout)
    elif (GROUPS,) in view.layout and len(value.shape) == GROUPS:
        groups, layout = fixed(view.sizes[view.layout.index((GROUPS,))]), view.layout
        shape = (value.shape[0], value.shape[1] // groups, *value.shape[2:], groups)
        made = graph.draft.step("grouped", value, shape, groups=groups)
    else:
        return view
    view = Array([made], layout, view.sizes)
    graph.cut += [array.cell, view.cell]
    return view


@handles("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "numpy_T", "mT", "permute_copy")
def _permute(graph: Graph, x: Any, **given: Any) -> Array:
    array = array_of(x)
    # Where each dimension goes is told by a tensor whose sizes are all different.
    probe = torch.empty([place + 2 for place in range(len(array.layout))], device="meta")
    order = [size - 2 for size in graph.node.target(probe, **given).shape]
    return Array(array.cell, tuple(array.layout[i] for i in order), tuple(array.sizes[i] for i in order))


@handles("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expand(graph: Graph, x: Any, **_: Any) -> Array:
    array = array_of(x)
    sizes = graph.sizes
    before = sizes[len(sizes) - len(array.sizes) :]
    if not all(is_one(old) or equal(old, new) for old, new in zip(array.sizes, before, strict=True)):
        raise RefusedError("it repeats values along an axis")
    return Array(array.cell, ((),) * (len(sizes) - len(array.layout)) + array.layout, sizes)
