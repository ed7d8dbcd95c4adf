"""Steps that several others make up, told by what they compute: ``x * sigmoid(x)`` is a silu, however it is written.

A step is looked at as it is made, and those before it have been looked at already, so each rule here is about the last
step of its pattern. Equal steps are one value, so parts are compared by identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dispatcher.torch.channels import apart
from dispatcher.torch.draft import Draft, Value

Rule = Callable[[Draft, Value], Value | None]

#: What only a rule may consume, since the vocabulary has no step for it.
PARTS = frozenset(("cat", "erf", "grouped", "log1p", "pad"))

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def simplify(draft: Draft, value: Value) -> Value | None:
    """A shorter way to what ``value`` computes, or None."""
    rules = (apart, *_RULES.get(value.op, ()))
    return next((found for rule in rules if (found := rule(draft, value)) is not None), None)


# ---- what a value is made of -------------------------------------------------------------------------------
def _close(number: float, wanted: float) -> bool:
    """Whether a constant that somebody wrote with some digits, or that went through float32, is the one meant."""
    return math.isclose(number, wanted, rel_tol=1e-5)


def _peeled(value: Value) -> Iterator[tuple[float, Value]]:
    """A value as a number times another one: itself, and what is left without its constant factors."""
    number = 1.0
    yield number, value
    while value.op in ("scale", "divide") and isinstance(value.operand, float) and value.source is not None:
        number = number * value.operand if value.op == "scale" else number / value.operand
        value = value.source
        yield number, value


def _polynomial(value: Value, x: Value, steps: int = 8) -> dict[int, float] | None:
    """The coefficients of a value as a polynomial of ``x``, by degree; None where it is none of so few steps."""
    if value is x:
        return {1: 1.0}
    source = None if value.source is None or not steps else _polynomial(value.source, x, steps - 1)
    if source is None:
        return None
    operand = value.operand
    if value.op == "square":
        return _product(source, source)
    other = {0: operand} if isinstance(operand, float) else None
    if isinstance(operand, Value):
        other = _polynomial(operand, x, steps - 1)
    if other is None:
        return None
    if value.op == "scale":
        return _product(source, other)
    if value.op == "divide" and isinstance(operand, float) and operand:
        return {degree: number / operand for degree, number in source.items()}
    if value.op in ("add", "subtract"):
        sign = 1.0 if value.op == "add" else -1.0
        degrees = {*source, *other}
        return {degree: source.get(degree, 0.0) + sign * other.get(degree, 0.0) for degree in degrees}
    return None


def _product(left: dict[int, float], right: dict[int, float]) -> dict[int, float] | None:
    result: dict[int, float] = {}
    for a, x in left.items():
        for b, y in right.items():
            result[a + b] = result.get(a + b, 0.0) + x * y
    return result if max(result) <= 8 else None


def _is_polynomial(value: Value | None, x: Value, wanted: dict[int, float]) -> bool:
    found = None if value is None else _polynomial(value, x)
    return found is not None and all(
        math.isclose(found.get(degree, 0.0), wanted.get(degree, 0.0), rel_tol=1e-4, abs_tol=1e-12)
        for degree in {*found, *wanted}
    )


def _operands(value: Value) -> Iterator[tuple[Value, Value]]:
    """The two values that a step combines, in both orders; none where one is no value."""
    if value.source is not None and isinstance(value.operand, Value):
        yield value.source, value.operand
        yield value.operand, value.source


def _one_more(value: Value, op: str) -> Value | None:
    """The source of a step ``op`` to which ``value`` adds 1."""
    if value.op == "add" and value.operand == 1.0 and value.source is not None and value.source.op == op:
        return value.source.source
    return None


def _over_axes(value: Value | None, op: str) -> tuple[Value | None, tuple[int, ...]]:
    """What a reduction reads, and its axes."""
    if value is None or value.op != op:
        return None, ()
    return value.source, value.fields["axis"]


# ---- activations -------------------------------------------------------------------------------------------
def gated(draft: Draft, value: Value) -> Value | None:
    """``x`` times a gate that depends on ``x``."""
    for left, right in _operands(value):
        for number, x in _peeled(left):
            for other, gate in _peeled(right):
                op, share = _gate(x, gate)
                if op:
                    factor = number * other * share
                    result = draft.step(op, x)
                    return result if _close(factor, 1.0) else draft.step("scale", result, by=factor)
    return None


def cancelled(draft: Draft, value: Value) -> Value | None:
    """Constant factors that make 1."""
    found = [each for number, each in _peeled(value) if math.isclose(number, 1.0, rel_tol=1e-12)]
    return found[-1] if len(found) > 1 and found[-1] is not value else None


def _gate(x: Value, gate: Value) -> tuple[str, float]:
    """The activation that is ``x`` times ``gate`` over a number, and that number."""
    if gate.op == "sigmoid" and gate.source is x:
        return "silu", 1.0
    if gate.op == "tanh" and gate.source is not None and gate.source.op == "softplus" and gate.source.source is x:
        return "mish", 1.0
    # clamp(x + 3, 0, 6), and as a sixth of it, clamp(x / 6 + 0.5, 0, 1)
    most = gate.fields.get("max", 0.0) if gate.op == "clamp" and gate.fields.get("min") == 0.0 else 0.0
    if most > 0.0 and _is_polynomial(gate.source, x, {0: most / 2, 1: most / 6}):
        return "hardswish", most
    if _is_polynomial(_one_more(gate, "erf"), x, {1: math.sqrt(0.5)}):
        return "gelu", 2.0
    if _is_polynomial(_one_more(gate, "tanh"), x, {1: _ROOT_2_OVER_PI, 3: _ROOT_2_OVER_PI * 0.044715}):
        return "gelu_tanh", 2.0
    return "", 0.0


def sigmoid(draft: Draft, value: Value) -> Value | None:
    """``1 / (1 + exp(-x))``."""
    power = None if value.source is None else _one_more(value.source, "exp")
    negated = None if power is None else _negated(power)
    return None if negated is None else draft.step("sigmoid", negated)


def _negated(value: Value) -> Value | None:
    return value.source if value.op == "scale" and value.operand == -1.0 else None


def quotient(draft: Draft, value: Value) -> Value | None:
    """``x / (1 + exp(-x))``, ``x / (1 + |x|)``, ``exp(x) / sum(exp(x))``, and norms."""
    x, by = value.source, value.operand
    if x is None or not isinstance(by, Value):
        return None
    power = _one_more(by, "exp")
    if power is not None and _negated(power) is x:
        return draft.step("silu", x)
    if _one_more(by, "abs") is x:
        return draft.step("softsign", x)
    total, axes = _over_axes(by, "sum")
    if x.op == "exp" and total is x and x.source is not None:
        return _softmax(draft, x.source, axes)
    if by.op == "sqrt" and by.source is not None:
        return _norm(draft, x, by.source)
    return None


def normalised(draft: Draft, value: Value) -> Value | None:
    """``x * (1 / sqrt(variance + eps))``."""
    for x, factor in _operands(value):
        if factor.op == "reciprocal" and factor.source is not None and factor.source.op == "sqrt":
            root = factor.source.source
            found = None if root is None else _norm(draft, x, root)
            if found is not None:
                return found
    return None


def softplus(draft: Draft, value: Value) -> Value | None:
    """``log(1 + exp(x))``."""
    source = value.source
    x = None
    if source is not None:
        x = _one_more(source, "exp") if value.op == "log" else source.source if source.op == "exp" else None
    return None if x is None else draft.step("softplus", x)


def chosen(draft: Draft, value: Value) -> Value | None:
    """``x`` where ``x > 0``, else ``slope * x``."""
    condition, above, below = value.source, value.fields["value"], value.fields["other"]
    x = condition.source if condition is not None and condition.op.startswith("greater") else None
    if x is None or condition is None or condition.operand != 0.0:
        return None
    positive = _negated(x)
    if positive is not None:
        x, above, below = positive, below, above
    if above is not x or not isinstance(below, Value) or below.op != "scale" or below.source is not x:
        return None
    return draft.step("leaky_relu", above, slope=below.operand) if isinstance(below.operand, float) else None


def leaky_relu(draft: Draft, value: Value) -> Value | None:
    """``max(x, slope * x)``."""
    for x, other in _operands(value):
        slope = other.operand if other.op == "scale" and other.source is x else None
        if isinstance(slope, float) and 0 <= slope <= 1:
            return draft.step("leaky_relu", x, slope=slope)
    return None


# ---- reductions and norms ----------------------------------------------------------------------------------
def logarithm(draft: Draft, value: Value) -> Value | None:
    """``log(sum(exp(x)))``, ``log(softmax(x))``."""
    total, axes = _over_axes(value.source, "sum")
    if value.source is not None and total is not None and total.op == "exp" and total.source is not None:
        return draft.step("log_sum_exp", total.source, value.source.shape, axis=axes)
    x, axes = _over_axes(value.source, "softmax")
    return None if x is None else draft.step("log_softmax", x, axis=axes)


def shifted(draft: Draft, value: Value) -> Value | None:
    """``log_sum_exp(x - m) + m``, where ``m`` is the maximum of ``x``."""
    for total, most in _operands(value):
        centred, axes = _over_axes(total, "log_sum_exp")
        if centred is not None and _centred(centred, "max", axes) is not None and centred.operand is most:
            assert centred.source is not None
            return draft.step("log_sum_exp", centred.source, total.shape, axis=axes)
    return None


def log_softmax(draft: Draft, value: Value) -> Value | None:
    """``x - log_sum_exp(x)``."""
    x, axes = _over_axes(value.operand, "log_sum_exp") if isinstance(value.operand, Value) else (None, ())
    return draft.step("log_softmax", x, axis=axes) if x is not None and x is value.source else None


def _centred(value: Value, op: str, axes: tuple[int, ...]) -> Value | None:
    """``x`` of ``x - op(x)`` over ``axes``."""
    if value.op != "subtract" or not isinstance(value.operand, Value):
        return None
    source, over = _over_axes(value.operand, op)
    return source if source is value.source and over == axes else None


def _softmax(draft: Draft, x: Value, axes: tuple[int, ...]) -> Value:
    plain = _centred(x, "max", axes)
    return draft.step("softmax", x if plain is None else plain, axis=axes)


def _norm(draft: Draft, value: Value, root: Value) -> Value | None:
    """``value / sqrt(root)`` as a norm: of what is centred by its variance, of others by their mean square."""
    if root.op != "add" or not isinstance(root.operand, float) or root.operand < 0 or root.source is None:
        return None
    x, axes = _variance(root.source)
    if x is not None:
        return draft.norm(x, axes, root.operand) if _centred(value, "mean", axes) is x else None
    square, axes = _over_axes(root.source, "mean")
    if square is not None and square.op == "square" and square.source is value:
        return draft.step("rms_norm", value, axis=axes, eps=root.operand)
    return None


def _variance(value: Value) -> tuple[Value | None, tuple[int, ...]]:
    """``x`` and the axes, where ``value`` is its biased variance."""
    square, axes = _over_axes(value, "mean")
    if square is not None and square.op == "square" and square.source is not None:
        return _centred(square.source, "mean", axes), axes
    if value.op == "subtract" and isinstance(value.operand, Value) and value.operand.op == "square":
        square, axes = _over_axes(value.source, "mean")
        x, others = _over_axes(value.operand.source, "mean")
        if square is not None and square.op == "square" and square.source is x and axes == others:
            return x, axes
    return None, ()


_RULES: dict[str, tuple[Rule, ...]] = {
    "scale": (cancelled, gated, normalised),
    "divide": (cancelled, quotient),
    "reciprocal": (sigmoid,),
    "log": (softplus, logarithm),
    "log1p": (softplus,),
    "maximum": (leaky_relu,),
    "where": (chosen,),
    "add": (shifted,),
    "subtract": (log_softmax,),
}
