"""An operator of any sizes as a function of the host: a general kernel for each step, with pointwise ones behind it.

The operator is bound to symbols (:mod:`dispatcher.ops.symbols`), so that each of its numbers says what it is for any
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.backends.cuda.exporttext import Sections, field, parameters_type
from dispatcher.backends.cuda.program import BLOCK, C_TYPES
from dispatcher.backends.cuda.sources import MAX_OPERANDS, MAX_RIDERS, Source, refuses
from dispatcher.backends.cuda.toolkit import Kernel
from dispatcher.ops.steps import (
    Convolution,
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
)
from dispatcher.ops.symbols import c_text
from dispatcher.plan.groups import split
from dispatcher.problem.operator import Operator


class _AnySource(Source):
    """Whose operands are known to broadcast, and not along which axes."""

    def _read(self, operand: Operand, channels: int, names: dict[int, str], linear: Shape | None) -> str:
        return super()._read(operand, -1, names, None)


@dataclass
class _Group:
    """A step, or a chain of pointwise ones, and the pointwise steps behind it."""

    operator: Operator
    first: int
    last: int
    note: str = ""

    def take(self, index: int) -> str | None:
        """See :meth:`dispatcher.plan.groups.Group.take`."""
        step = self.operator.steps[index]
        if not isinstance(step, Pointwise):
            return f"{step.op} is a kernel of its own"
        operands = sum(len(each.operands) for each in self.operator.steps[self.first : index + 1])
        if len(self.riders) == MAX_RIDERS or operands > MAX_OPERANDS:
            return "the chain is full"
        reason = refuses(step, range(self.start, index + 1), self.first)
        if reason is None:
            self.last = index
        return reason

    @property
    def start(self) -> int:
        """The value that the chain reads."""
        return self.first + (not isinstance(self.operator.steps[self.first], Pointwise))

    @property
    def riders(self) -> Sequence[Step]:
        """The chain."""
        return self.operator.steps[self.start : self.last + 1]


class AnyText:
    """The function for any sizes.

    Args:
        name: of the function.
        operator: bound to symbols.
        compute: the dtype of sums and of values between launches.
        sections: where its kernels go.
    """

    def __init__(self, name: str, operator: Operator, compute: str, sections: Sections) -> None:
        self.name, self.operator, self.compute, self.sections = name, operator, compute, sections
        self.lines: list[str] = []
        self._known: dict[str, str] = {}  # extents of earlier values

    def text(self) -> str:
        """The function; its kernels are in the sections then."""
        operator, steps = self.operator, self.operator.steps
        for index, shape in enumerate([steps[0].input_shape, *(step.shape for step in steps)]):
            self._shape(index, shape)
        self.lines.append(f"if (elements(shape_{len(steps)}) == 0 || call.error != cudaSuccess) return;")
        for group in split(operator, lambda index: _Group(operator, index, index)):
            result = group.last + 1
            if result < len(steps):
                kind = C_TYPES[self.compute]
                self.lines.append(f"{kind} *value_{result} = call.take<{kind}>(elements(shape_{result}));")
            self.lines.append(f"// {', '.join(step.op for step in steps[group.first : result])}")
            self._launch(group)
        body = "".join(f"  {line}\n" for line in self.lines)
        return f"static void {self.name}(const Arguments &a, Call &call) {{\n{body}}}\n"

    def number(self, number: float) -> str:
        """C text for a number, in which extents of values have their names."""
        text = c_text(number)
        for known, name in self._known.items():
            text = text.replace(known, name)
        return text

    def _shape(self, index: int, shape: Shape) -> None:
        texts = [self.number(extent) for extent in shape]
        self.lines.append(f"const index_t shape_{index}[5] = {{{', '.join(texts)}}};")
        self.lines.append(f"call.check(shape_{index});")
        new = {c_text(extent): f"shape_{index}[{axis}]" for axis, extent in enumerate(shape)}
        compound = {text: name for text, name in new.items() if "(" in text and text not in self._known}
        # The longest first, since they may hold others.
        self._known = dict(sorted({**self._known, **compound}.items(), key=lambda each: -len(each[0])))

    def _value(self, index: int) -> str:
        if index == 0:
            return field(self.operator.source)
        return field(self.operator.problem.output.name) if index == len(self.operator.steps) else f"value_{index}"

    def _launch(self, group: _Group) -> None:
        step, steps, result = self.operator.steps[group.first], self.operator.steps, group.last + 1
        source = _AnySource()
        source.chain("last_chain", group.riders, group.start, None, step.source if group.start == group.first else None)
        numbers = {0: self.operator.dtype, len(steps): self.operator.dtype}
        stored = {"INPUT": numbers.get(step.source, self.compute), "OUTPUT": numbers.get(result, self.compute)}
        stored |= {"STORAGE": self.operator.dtype, "COMPUTE": self.compute}
        defines: dict[str, int | str] = {name: C_TYPES[dtype] for name, dtype in stored.items()}
        defines["OPERANDS"] = max(1, len(source.operands))
        file, functions, more, lines = self._kernel(step, source, result)
        lines += [f"point(p.x, {self._value(step.source)});", f"point(p.y, {self._value(result)});"]
        for number, operand in enumerate(source.operands):
            lines.append(self._operand(number, operand))
        kernel = Kernel.of(file, {**defines, **more}, source.text)
        space = self.sections.name(kernel, functions[0])
        self.lines += ["{", f"  {space}::{parameters_type(kernel, functions[0])} p = {{}};"]
        self.lines += [f"  {line}" for line in lines]
        self.lines += self._started(space, functions, step, result)
        self.lines.append("}")

    def _started(self, space: str, functions: Sequence[str], step: Step, result: int) -> list[str]:
        def call(function: str, threads: str) -> str:
            return f"call.launch({space}::{function}, {threads}, {BLOCK}, 0, p);"

        if len(functions) == 1:
            count = f"elements(shape_{result})"
            return [f"  {call(functions[0], f'blocks_for({count})')}"]
        return [
            "  if (p.rows < 4096 && p.items > 1)",
            f"    {call(functions[1], 'larger(1, p.rows)')}",
            "  else",
            f"    {call(functions[0], 'blocks_for(p.rows)')}",
        ]

    def _operand(self, number: int, operand: Operand) -> str:
        if isinstance(operand, ScalarOperand):
            return f"p.operand[{number}].number = {self.number(operand.value)};"
        data = field(operand.name) if isinstance(operand, TensorOperand) else self._value(operand.value)
        shape = ", ".join(map(self.number, operand.shape))
        return f"broadcast(p.operand[{number}], {data}, {{{shape}}});"

    def _kernel(
        self, step: Step, source: Source, result: int
    ) -> tuple[str, tuple[str, ...], dict[str, int | str], list[str]]:
        """File, functions, further defines and statements that fill in the parameters of the step's kernel."""

        def each(name: str, numbers: Sequence[float]) -> str:
            places = enumerate(map(self.number, numbers))
            return " ".join(f"p.{name}[{axis}] = {text};" for axis, text in places)

        shape, read = f"shape_{result}", f"shape_{step.source}"
        match step:
            case Convolution():
                geometry = step.geometry
                axes = geometry.axes
                groups = self.number(geometry.groups)
                lines = [
                    f"point(p.w, {field(step.weight.name)});",
                    *([] if step.bias is None else [f"point(p.bias, {field(step.bias.name)});"]),
                    f"p.batch = {read}[0]; p.groups = {groups};",
                    f"p.in_channels = {read}[1] / p.groups; p.out_channels = {shape}[1] / p.groups;",
                    f"set(p.in, {read}, 2); set(p.out, {shape}, 2);",
                ]
                for name in ("kernel", "stride", "step", "padding", "dilation"):
                    lines.append(each(name, [getattr(axis, name) for axis in axes]))
                return "conv_any.cu", ("conv_any",), {"TRANSPOSED": int(step.transposed)}, lines
            case Pool():
                source.chain("pre_first_chain", (), 0)
                source.monoid("pool", step)
                before, after = zip(*step.padding, strict=True)
                sizes = {"window": step.window, "stride": step.stride, "dilation": step.dilation}
                lines = [
                    f"p.count = elements({shape}); set(p.extent, {shape}); set(p.in, {read}, 2);",
                    *(each(name, numbers) for name, numbers in {**sizes, "before": before, "after": after}.items()),
                    f"p.counted = {int(step.count_padding)}; p.divisor = {self.number(step.divisor or 0)};",
                    f"p.adaptive = {int(step.adaptive)};",
                ]
                defines = dict.fromkeys(("PLAIN", "WINDOW_Z", "WINDOW_Y", "WINDOW_X"), 0)
                return "pool.cu", ("pool",), {**defines, "VECTOR": 1}, lines
            case Normalize() | Softmax() | Reduce():
                reduced = isinstance(step, Reduce)
                source.monoid("row", step if isinstance(step, Reduce) else None)
                groups = self.number(step.groups) if isinstance(step, Normalize) else "1"
                over = sum(1 << axis for axis in step.axes)
                lines = [f"set(p.extent, {shape}); split_axes(p, {read}, {over}, {groups});"]
                if isinstance(step, Normalize):
                    lines.append(f"p.eps = {self.number(step.eps)};")
                    given = {"weight": step.weight, "bias": step.bias}
                    lines += [
                        f"point(p.{name}, {field(each.name)});" for name, each in given.items() if each is not None
                    ]
                function = "REDUCE" if reduced else "SOFTMAX" if isinstance(step, Softmax) else "NORMALIZE"
                more: dict[str, int | str] = {
                    "FUNCTION": function,
                    "ROW_SHIFTED": int(isinstance(step, Reduce) and step.form.shifted),
                }
                return "rows.cu", ("rows_by_thread", "rows_by_block"), more, lines
            case Pointwise():
                lines = [f"p.count = elements({shape}); set(p.extent, {shape});"]
                return "elementwise.cu", ("elementwise",), {"STRIDED": 0}, lines
        raise TypeError(step)  # `supports` lets no other class through
