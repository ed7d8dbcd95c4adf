"""How operations are computed: C text that OpenCL C and CUDA C share, and what others need to know of each.

The text is written in a dialect that both languages can compile, on single numbers and on vectors of them:

- ``VALUE`` is the type of a value; ``C(0.5)`` is a constant of that type;
- ``+ - * /``, comparisons, and ``condition ? value : value``, where the condition compares values;
- ``exp_v expm1_v log_v log1p_v sqrt_v tanh_v abs_v gelu_v`` of one value, ``exp_below_v`` of one that is 0 at most, and
  ``max_v min_v`` of two (a NaN wins).

``backends/opencl/kernels/numeric.cl`` and ``backends/cuda/kernels/device.cuh`` define these names. The float64
reference states each operation once more, on purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: Names of the arguments of a pointwise operation in its C text, in the order of its fields.
ARGUMENTS = ("a", "b")


@dataclass(frozen=True)
class PointwiseForm:
    """``out = function(x, a, b)``, element by element.

    Attributes:
        name: in the vocabulary, and of the C function, behind ``op_``.
        c: the result, an expression over ``x``, the arguments ``a`` and ``b``, and the names in ``let``.
        let: name and expression of parts that the result needs more than once, in order.
        arguments: how many there are besides ``x``.
        cheap: takes a few instructions, so that computing it again costs less than storing it.
        exponential: built on an exponential, which overflows.
        saturates: makes one constant of all large values.
        integral: of integers it makes integers, exactly.
        commutes: ``x`` and ``a`` may change places.
        role: what a tensor argument does to the size of values: a ``factor`` multiplies them.
        pole: the operand at whose zero the function is not continuous: ``x``, ``a`` or none.
        slope: bound on the size of the derivative by ``x`` and by each argument; None where the ends of an interval
            tell how far values get apart.
        limits: between which all results lie; None where there are none, or arguments say.
        rounding: error of a careful implementation beyond a few roundings of the result, in units of roundoff, as
            a function of ``x`` (an array).
        torch: dotted name of the PyTorch function that takes ``x`` and the arguments, or empty.
        onnx: the ONNX operator that does, or empty.
        onnx_attributes: names of the attributes that hold the arguments there; without them they are inputs.
    """

    name: str
    c: str
    let: tuple[tuple[str, str], ...] = ()
    arguments: int = 0
    cheap: bool = False
    exponential: bool = False
    saturates: bool = False
    integral: bool = False
    commutes: bool = False
    role: Literal["factor", "term"] = "term"
    pole: Literal["", "x", "a"] = ""
    slope: float | None = None
    limits: tuple[float, float] | None = None
    rounding: Callable[[Any], Any] | None = None
    torch: str = ""
    onnx: str = ""
    onnx_attributes: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        """Name of the C function."""
        return f"op_{self.name}"

    @property
    def definition(self) -> str:
        """The C function; ``INLINE`` stands for what the language puts before one."""
        parameters = ", ".join(f"const VALUE {name}" for name in ("x", *ARGUMENTS[: self.arguments]))
        let = "".join(f" const VALUE {name} = {expression};" for name, expression in self.let)
        return f"INLINE VALUE {self.function}({parameters}) {{{let} return {self.c}; }}\n"


@dataclass(frozen=True)
class Monoid:
    """A way to combine two values that is associative, with the value that changes nothing.

    Attributes:
        c: the combination of ``a`` and ``b``, as C text.
        identity: combined with it, any value stays what it is.
        errors: how errors combine: ``selects`` one of the values, ``adds`` or ``multiplies`` them.
    """

    c: str
    identity: float
    errors: Literal["selects", "adds", "multiplies"]

    def combination(self, a: str, b: str) -> str:
        """C text that combines two expressions."""
        words = {"a": f"({a})", "b": f"({b})"}
        return _substitute(self.c, words)

    @property
    def identity_c(self) -> str:
        """The identity as a C number, without the suffix of a type."""
        return ("-INFINITY" if self.identity < 0 else "INFINITY") if math.isinf(self.identity) else f"{self.identity}"


SUM = Monoid("a + b", 0.0, "adds")
PRODUCT = Monoid("a * b", 1.0, "multiplies")
MAX = Monoid("max_v(a, b)", -math.inf, "selects")
MIN = Monoid("min_v(a, b)", math.inf, "selects")


@dataclass(frozen=True)
class ReductionForm:
    """Many values to one: ``finish(combine(lift(x_1), lift(x_2), ...))``.

    Attributes:
        name: in the vocabulary.
        monoid: how values are combined.
        lift: C expression of what ``x`` contributes.
        finish: C expression of the result over the total ``t`` and ``share``, one over the number of values.
        shifted: the largest value is subtracted before ``lift`` and added after ``finish``, unless it is infinite.
        torch: dotted name of the PyTorch function that takes ``x``, the axes and ``keepdim``, or empty.
        onnx: the ONNX operator, or empty.
    """

    name: str
    monoid: Monoid
    lift: str = "x"
    finish: str = "t"
    shifted: bool = False
    torch: str = ""
    onnx: str = ""

    @property
    def plain(self) -> bool:
        """True when values are combined as they are and the total is the result, up to a factor ``share``."""
        return self.lift == "x" and self.finish in ("t", "t * share") and not self.shifted

    @property
    def integral(self) -> bool:
        """True when of integers it makes integers, exactly, as long as these are small."""
        return self.lift == "x" and self.finish == "t" and not self.shifted and self.monoid is not PRODUCT

    def lifted(self, x: str) -> str:
        """C text of what the expression ``x`` contributes."""
        return _substitute(self.lift, {"x": f"({x})"})

    def finished(self, total: str, share: str) -> str:
        """C text of the result."""
        return _substitute(self.finish, {"t": f"({total})", "share": f"({share})"})


def _substitute(text: str, words: dict[str, str]) -> str:
    """``text`` with whole words replaced."""
    return re.sub(r"\b[A-Za-z_]\w*", lambda match: words.get(match[0], match[0]), text)
