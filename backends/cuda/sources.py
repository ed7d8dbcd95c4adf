"""The C text that a launch's kernel is compiled with: its chains of operations and its monoids, out of the operator
table's forms, and the operands that they read. ``kernels/chain.cuh`` says how kernels call them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dispatcher.ops.forms import SUM, PointwiseForm, ReductionForm
from dispatcher.ops.steps import (
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
)

#: Most operations of a convolution's chain, and of any other one.
MAX_STAGES = 8
MAX_RIDERS = 16
#: Why a pooling joins no other launch.
WINDOWS = "its windows overlap, leave gaps or reach into padding"
#: Most operands of a launch: a kernel's parameters have 4 KB.
MAX_OPERANDS = 48
#: Functions of the dialect that the kernels define (``kernels/device.cuh``).
DIALECT = frozenset(
    f"{name}_v" for name in ("exp", "exp_below", "expm1", "log", "log1p", "tanh", "abs", "sqrt", "gelu", "max", "min")
)
_PLAIN = ReductionForm("sum", SUM)


def unknown(form: PointwiseForm | ReductionForm) -> str | None:
    """A function that the form's text calls and the kernels do not have, or None."""
    if isinstance(form, PointwiseForm):
        texts = [form.c, *(expression for _, expression in form.let)]
    else:
        texts = [form.lift, form.finish, form.monoid.c]
    called = (name for text in texts for name in re.findall(r"\b(\w+_v)\s*\(", text))
    return next((name for name in called if name not in DIALECT), None)


def is_channel(operand: Operand, channels: int) -> bool:
    """Does it have one value for each of ``channels`` channels?"""
    return isinstance(operand, TensorOperand) and operand.per_channel and operand.shape[1] == channels


def refuses(step: Pointwise, held: Collection[int], first: int, tensors: bool = True) -> str | None:
    """Why ``step`` cannot be in a chain, or None.

    Args:
        held: values that are in registers there.
        first: first step of the launch: values that it makes itself are in no memory.
        tensors: may the chain read operands that are more than one value a channel?
    """
    for operand in step.arguments:
        if isinstance(operand, ScalarOperand) or is_channel(operand, step.shape[1]):
            continue
        if isinstance(operand, ValueOperand):
            if operand.value in held:
                continue
            if tensors and operand.value > first:
                return f"an operand of {step.op} is a value that the launch no longer holds"
        if not tensors:
            return f"an operand of {step.op} is neither a number nor one value a channel"
    return None


def keeps(steps: Sequence[Step], start: int) -> set[int]:
    """Values of a chain that are read after a norm which follows them; the chain's input is value ``start``."""
    made, part, kept = {start: 0}, 0, set()
    for value, step in enumerate(steps, start + 1):
        part += isinstance(step, Normalize)
        if isinstance(step, Pointwise):
            kept |= {o.value for o in step.arguments if isinstance(o, ValueOperand) and made.get(o.value, part) < part}
        made[value] = part
    return kept


class Source:
    """Grows while a launch is made.

    Attributes:
        operands: what the text reads, in the order of its slots.
    """

    def __init__(self) -> None:
        self.operands: list[Operand] = []
        self._forms: dict[str, PointwiseForm] = {}
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All of it: just the operations that are used, then what uses them."""
        return "".join([*(form.definition for form in self._forms.values()), *self._parts])

    def slot(self, operand: Operand) -> int:
        """A new slot for an operand."""
        self.operands.append(operand)
        return len(self.operands) - 1

    def monoid(self, name: str, step: Pool | Reduce | None) -> None:
        """The functions of a reduction; those of a sum where there is none and the kernel does not use them."""
        form = _PLAIN if step is None else step.form
        finish = form.finished("t", "share")
        self._parts.append(
            f"INLINE VALUE {name}_lift(const VALUE x) {{ return {form.lifted('x')}; }}\n"
            f"template <class T> INLINE T {name}_combine(const T a, const T b) "
            f"{{ return {form.monoid.combination('a', 'b')}; }}\n"
            f"template <class T> INLINE T {name}_identity() {{ return T({form.monoid.identity_c}); }}\n"
            f"template <class T, class S> INLINE T {name}_finish(const T t, const S share) {{ return {finish}; }}\n"
        )

    def chain(
        self, name: str, steps: Sequence[Step], start: int, linear: Shape | None = None, source: int | None = None
    ) -> None:
        """A chain on one value.

        Args:
            name: of the function.
            steps: pointwise ones; number ``i`` makes value ``start + 1 + i``.
            start: the value that the first of them reads.
            linear: shape of the values where their places are known as indices into a contiguous tensor.
            source: the value that the first one reads where that is an earlier one than ``start``.
        """
        names = {start if source is None else source: f"v{start}"}
        lines = "".join(f"  {line}\n" for line in self._operations(steps, start, names, linear))
        self._parts.append(
            f"template <class At> INLINE VALUE {name}(const Operand *operand, const VALUE v{start}, const At &at) {{\n"
            f"{lines}  return v{start + len(steps)};\n}}\n"
        )

    def team(self, name: str, steps: Sequence[Step], start: int) -> None:
        """A chain on all channels of a voxel, which may hold layer norms; arguments as for :meth:`chain`."""
        kept = keeps(steps, start)
        body, first = "", 0  # `first`: of the steps that are not in the body yet
        names: dict[int, str] = {}
        for place in range(len(steps) + 1):
            value = start + place
            norm = steps[place] if place < len(steps) and isinstance(steps[place], Normalize) else None
            if norm is None and value not in kept and place < len(steps):
                continue
            if place > first:
                at = start + first
                lines = self._operations(steps[first:place], at, {**names, at: f"v{at}"})
                body += (
                    f"  team.each([&](const VALUE v{at}, const auto &at) {{\n"
                    + "".join(f"    {line}\n" for line in lines)
                    + f"    return v{value};\n  }});\n"
                )
            first = place
            if value in kept:
                body += f"  const auto k{value} = team.keep();\n"
                names[value] = f"at.of(k{value})"
            if isinstance(norm, Normalize):
                affine = ("nullptr" if o is None else f"operand[{self.slot(o)}].data" for o in (norm.weight, norm.bias))
                eps = self.slot(ScalarOperand(norm.eps))
                body += f"  team.layer_norm(NUMBER({eps}), {', '.join(affine)});\n"
                first = place + 1
        self._parts.append(
            f"template <class Team> INLINE void {name}(const Operand *operand, Team &team) {{\n{body}}}\n"
        )

    def _operations(
        self, steps: Sequence[Step], start: int, names: dict[int, str], linear: Shape | None = None
    ) -> Iterator[str]:
        """One line for each step; ``names`` are those of values that are at hand, and grow."""
        for value, step in enumerate(steps, start + 1):
            assert isinstance(step, Pointwise)
            self._forms[step.form.name] = step.form
            arguments = [f"v{value - 1}", *(self._read(o, step.shape[1], names, linear) for o in step.arguments)]
            yield f"const VALUE v{value} = {step.form.function}({', '.join(arguments)});"
            names[value] = f"v{value}"

    def _read(self, operand: Operand, channels: int, names: dict[int, str], linear: Shape | None) -> str:
        if isinstance(operand, ValueOperand) and operand.value in names:
            return names[operand.value]
        slot = self.slot(operand)
        if isinstance(operand, ScalarOperand):
            return f"NUMBER({slot})"
        if is_channel(operand, channels):
            return f"CHANNEL({slot})"
        element = "COMPUTE" if isinstance(operand, ValueOperand) and operand.value > 0 else "STORAGE"
        return f"{'LINEAR' if operand.shape == linear else 'TENSOR'}({slot}, {element})"


def broadcast_strides(shape: Shape) -> list[int]:
    """Element strides of a contiguous tensor that broadcasts: 0 where an extent is 1."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(0 if extent == 1 else step)
        step *= extent
    return strides[::-1]


def fill(parameters: Any, operands: Sequence[Operand]) -> Iterator[tuple[int, TensorOperand | ValueOperand]]:
    """Put numbers and strides into a launch's parameters; yields the slots whose pointers are missing."""
    for number, operand in enumerate(operands):
        if isinstance(operand, ScalarOperand):
            parameters["operand"][number]["number"] = operand.value
        else:
            parameters["operand"][number]["stride"] = broadcast_strides(operand.shape)
            yield number, operand
