"""Turning host values into the ``#define`` lines and tables that the kernel files are compiled with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeGuard

from dispatcher.ops.forms import Monoid, PointwiseForm, ReductionForm
from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    ScalarOperand,
    Shape,
    TensorOperand,
    ValueOperand,
)


@cache
def kernel_source(name: str) -> str:
    """Text of ``kernels/<name>``."""
    return (files("dispatcher.backends.opencl") / "kernels" / name).read_text(encoding="utf-8")


def thirds(vec: int) -> Iterator[tuple[str, str]]:
    """Masks of two shuffles each that deal three vectors out to every third element, or interleave three vectors.

    The first one takes elements of two vectors, the second one of what that gives and the third vector.
    """
    for s in range(3):
        places = [s * vec + lane for lane in range(vec)]
        merged = [at % 3 * vec + at // 3 for at in places]
        for kind, picked in (("DEAL", list(range(s, 3 * vec, 3))), ("MERGE", merged)):
            first = [at if at < 2 * vec else 0 for at in picked]
            second = [lane if at < 2 * vec else at - vec for lane, at in enumerate(picked)]
            for name, mask in (("LOW", first), ("HIGH", second)):
                yield f"{kind}_{s}_{name}", ", ".join(map(str, mask))


def defines(values: Mapping[str, object]) -> str:
    """One ``#define`` line for each name; booleans become 0 and 1."""
    return "".join(
        f"#define {name} {int(value) if isinstance(value, bool) else value}\n" for name, value in values.items()
    )


def table(name: str, values: Sequence[int] | Sequence[Sequence[int]]) -> str:
    """A constant table of one or two dimensions; ragged rows are filled up with zeros."""
    if values and isinstance(values[0], Sequence):
        rows: list[Sequence[int]] = [row for row in values if isinstance(row, Sequence)]
        width = max(1, *(len(row) for row in rows)) if len(rows) > 1 else max(1, len(rows[0]))
        body = ", ".join("{" + ", ".join(map(str, [*row, *([0] * (width - len(row)))])) + "}" for row in rows)
        return f"constant int {name}[{len(rows)}][{width}] = {{{body}}};\n"
    return f"constant int {name}[{max(1, len(values))}] = {{{', '.join(map(str, values)) or '0'}}};\n"


def section(file: str, prefix: str = "") -> str:
    """A kernel file behind its defines; ``#include`` lines are replaced by the files they name.

    ``#line`` directives make compiler messages point into the files.
    """
    lines = []
    for number, line in enumerate(kernel_source(file).splitlines(), start=1):
        if line.startswith("#include"):
            included = line.split('"')[1]
            lines += [section(included), f'#line {number + 1} "{file}"']
        else:
            lines.append(line)
    return f'{prefix}#line 1 "{file}"\n' + "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Site:
    """A place in a kernel where pointwise steps work on ``x``: what the kernel calls what they need there.

    Attributes:
        channel: expression of the channel.
        coordinates: expressions of batch item, channel, depth, height and width of ``x``, or of its first lane; none
            where only the channel is known, so that no operand can vary along other axes.
        left: expression of the elements that its row has from there on; empty where ``x`` is a single element.
    """

    channel: str = "c"
    coordinates: tuple[str, ...] = ()
    left: str = ""


class KernelOperands:
    """What the pointwise steps of a launch need: gathered while its source text is made.

    Args:
        padding: zeros behind every per-channel tensor, for vector code that runs past the last channel.

    Attributes:
        entries: offset of each scalar and per-channel tensor in the ``operands`` buffer, which is ``size`` long.
        buffers: operands that are buffers of their own, the kernel's parameters ``a0``, ``a1``, ...
        gathers: the kernel leaves statistics of its rows in a last parameter ``partials``.
        shaped: the shape of a buffer as the kernel's coordinates count it.
    """

    def __init__(self, padding: int = 0, shaped: Callable[[Shape], Shape | None] = lambda shape: shape) -> None:
        self.padding = padding
        self.shaped = shaped
        self.entries: list[tuple[int, Operand]] = []
        self.size = 1
        self.buffers: list[Operand] = []
        self.gathers = False
        self._forms: dict[str, PointwiseForm] = {}

    @property
    def definitions(self) -> str:
        """The functions of all forms that are used."""
        return "".join(form.definition for form in self._forms.values())

    @property
    def parameters(self) -> str:
        """Parameters of the kernel for its buffers, each behind a comma."""
        text = "".join(f", global const REAL *restrict a{i}" for i in range(len(self.buffers)))
        return text + ", global REAL *restrict partials" * self.gathers

    @property
    def arguments(self) -> str:
        """The same for a call inside the kernel."""
        return "".join(f", a{i}" for i in range(len(self.buffers))) + ", partials" * self.gathers

    def place(self, operand: Operand) -> int:
        """Offset of a scalar or per-channel tensor, in elements; the same operand gets one place."""
        for offset, known in self.entries:
            if known == operand:
                return offset
        offset = self.size
        self.entries.append((offset, operand))
        self.size += 1 if isinstance(operand, ScalarOperand) else operand.shape[1] + self.padding
        return offset

    def expression(self, operand: Operand, site: Site) -> str:
        """Kernel expression of ``operand`` at ``site``, a ``VALUE``."""
        if in_operands(operand):
            offset = self.place(operand)
            if isinstance(operand, ScalarOperand) or operand.shape[1] == 1:
                return f"SPLAT(operands[{offset}])"
            return f"SPLAT(operands[{offset} + ({site.channel})])"
        assert site.coordinates and not isinstance(operand, ScalarOperand)
        if operand not in self.buffers:
            self.buffers.append(operand)
        name = f"a{self.buffers.index(operand)}"
        shape = self.shaped(operand.shape)
        assert shape is not None
        # An axis of extent 1 does not move the place.
        strides = [math.prod(shape[axis + 1 :]) for axis in range(5)]
        terms = [f"({site.coordinates[axis]}) * (size_t){strides[axis]}" for axis in range(5) if shape[axis] > 1]
        place = " + ".join(terms) or "0"
        if site.left and shape[4] > 1:
            return f"load_lanes({name} + {place}, {site.left}, R(0.0))"
        return f"SPLAT({name}[{place}])"

    def tail(self, steps: Sequence[Pointwise], site: Site = Site()) -> str:
        """Statements that apply consecutive pointwise steps to ``x``.

        Args:
            steps: in order.
            site: where.
        """
        made = {step.source for step in steps}  # values that a later one of these steps may read again
        again = {operand.value for step in steps for operand in step.arguments if _is_value(operand)}
        text = ""
        for step in steps:
            if step.source in again:
                text += f"const VALUE v{step.source} = x; "
            self._forms[step.form.name] = step.form
            arguments = [
                f"v{operand.value}" if _is_value(operand) and operand.value in made else self.expression(operand, site)
                for operand in step.arguments
            ]
            text += f"x = {step.form.function}({', '.join(['x', *arguments])}); "
        return text

    def affine(self, step: Normalize, channel: str = "c") -> str:
        """Statements that apply a normalisation's weight and bias to ``x``."""
        site, text = Site(channel), ""
        if step.weight is not None:
            text += f"x = x * {self.expression(step.weight, site)}; "
        if step.bias is not None:
            text += f"x = x + {self.expression(step.bias, site)}; "
        return text

    def bias(self, step: Convolution, channel: str = "c") -> str:
        """Statements that apply a convolution's bias to ``x``."""
        return "" if step.bias is None else f"x = x + {self.expression(step.bias, Site(channel))}; "


def _is_value(operand: Operand) -> TypeGuard[ValueOperand]:
    return isinstance(operand, ValueOperand)


def in_operands(operand: Operand) -> bool:
    """True for what an ``operands`` buffer can hold: scalars and tensors that vary along channels at most."""
    return isinstance(operand, ScalarOperand) or (isinstance(operand, TensorOperand) and operand.per_channel)


def tail_macro(name: str, statements: str, parameters: str = "x, c") -> str:
    """``#define NAME(x, c)`` that runs ``statements``."""
    return f"#define {name}({parameters}) do {{ {statements} }} while (0)\n"


def kernel_text(real: str, vec: int, operands: KernelOperands, *parts: str) -> str:
    """The source text of a kernel: arithmetic in ``real`` and in vectors of ``vec`` lanes, the forms, the ``parts``."""
    values = {"REAL": real, "REAL_IS_DOUBLE": real == "double", "VEC": vec}
    return "".join((section("numeric.cl", defines(values)), section("lanes.cl"), operands.definitions, *parts))


# ---- reductions --------------------------------------------------------------------------------------------
#: Terms that a norm adds up before it adds them, with compensation, to those before: with more, equal terms show.
NORM_RUN = 4
#: Functions of the table's C text that have macros here which take values of any type.
_ANY_TYPE = {"max_v": "LARGER", "min_v": "SMALLER"}


def identity(monoid: Monoid) -> str:
    """Kernel expression of what changes nothing, a ``REAL``."""
    return monoid.identity_c if math.isinf(monoid.identity) else f"R({monoid.identity_c})"


def combination(monoid: Monoid) -> str:
    """Kernel expression that combines the values ``a`` and ``b``, vectors or numbers of any type.

    None of today's monoids needs more than operators, maximum and minimum; one that does works on ``VALUE`` only.
    """
    return re.sub(r"\b\w+_v\b", lambda match: _ANY_TYPE.get(match[0], match[0]), monoid.combination("a", "b"))


def combinable(monoid: Monoid) -> bool:
    """True when :func:`combination` takes values of any type."""
    return "_v(" not in combination(monoid)


def reduction_defines(form: ReductionForm, count: str, prefix: str) -> dict[str, object]:
    """What a kernel file needs to know of a reduction over ``count`` values, in macros named ``prefix_...``.

    ``COMBINE(a, b)`` of vectors, ``COMBINE_ONE(a, b)`` of numbers, ``IDENTITY`` a number, ``LIFT(x)``,
    ``FINISH(t)`` of the total.
    """
    one = combination(form.monoid)
    if not combinable(form.monoid):
        one = f"LANE0({form.monoid.combination('SPLAT(a)', 'SPLAT(b)')})"
    return {
        f"{prefix}_COMBINE(a, b)": f"({form.monoid.combination('a', 'b')})",
        f"{prefix}_COMBINE_ONE(a, b)": f"({one})",
        f"{prefix}_IDENTITY": identity(form.monoid),
        f"{prefix}_LIFT(x)": form.lifted("x"),
        f"{prefix}_FINISH(t)": form.finished("t", f"R(1.0) / {count}"),
    }
