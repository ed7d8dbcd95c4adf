"""Turning host values into the ``#define`` lines and tables that the kernel files are compiled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Operand,
    Pointwise,
    ScalarOperand,
    Step,
    TensorOperand,
)

#: Kernel expression of each pointwise function; ``x`` is the value, ``a0`` and ``a1`` its arguments.
POINTWISE: dict[str, str] = {
    "add": "x + {0}",
    "subtract": "x - {0}",
    "scale": "x * {0}",
    "clamp": "clamp_keep_nan(x, {0}, {1})",
    "gelu": "gelu(x)",
    "relu": "relu(x)",
    "leaky_relu": "leaky_relu(x, SPLAT({0}))",
    "sigmoid": "sigmoid(x)",
    "tanh": "tanh(x)",
    "silu": "silu(x)",
    "softplus": "softplus(x)",
    "hardswish": "hardswish(x)",
}


@cache
def kernel_source(name: str) -> str:
    """Text of ``kernels/<name>``."""
    return (files("dispatcher.backends.opencl") / "kernels" / name).read_text(encoding="utf-8")


def defines(values: Mapping[str, object]) -> str:
    """One ``#define`` line for each name; booleans become 0 and 1."""
    return "".join(
        f"#define {name} {int(value) if isinstance(value, bool) else value}\n"
        for name, value in values.items()
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


class OperandLayout:
    """Where each scalar and per-channel tensor of a launch lies in its ``operands`` buffer.

    Args:
        padding: zeros behind every per-channel tensor, for vector code that runs past the last channel.
    """

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding
        self.entries: list[tuple[int, Operand]] = []
        self.size = 1

    def place(self, operand: Operand) -> int:
        """Offset of ``operand``, in elements; the same operand gets one place."""
        for offset, known in self.entries:
            if known == operand:
                return offset
        offset = self.size
        self.entries.append((offset, operand))
        self.size += 1 if isinstance(operand, ScalarOperand) else operand.shape[1] + self.padding
        return offset

    def expression(self, operand: Operand, channel: str) -> str:
        """Kernel expression that reads ``operand`` at ``channel``."""
        offset = self.place(operand)
        if isinstance(operand, ScalarOperand) or operand.shape[1] == 1:
            return f"operands[{offset}]"
        return f"operands[{offset} + ({channel})]"


def tail(layout: OperandLayout, steps: Sequence[Step]) -> str:
    """Statements that apply a convolution's bias and a chain of pointwise steps to ``x`` at channel ``c``."""
    statements = []
    for step in steps:
        if isinstance(step, ConvTranspose3d):
            if step.bias is not None:
                statements.append(f"x = x + {layout.expression(step.bias, 'c')};")
            continue
        assert isinstance(step, Pointwise)
        arguments = [layout.expression(argument, "c") for argument in step.arguments]
        statements.append(f"x = {POINTWISE[step.function].format(*arguments)};")
    return " ".join(statements)


def affine_of(layout: OperandLayout, step: Normalize) -> str:
    """Statements that apply a normalisation's weight and bias to ``x`` at channel ``c``."""
    statements = []
    if step.weight is not None:
        statements.append(f"x = x * {layout.expression(step.weight, 'c')};")
    if step.bias is not None:
        statements.append(f"x = x + {layout.expression(step.bias, 'c')};")
    return " ".join(statements)


def tail_macro(name: str, statements: str) -> str:
    """``#define NAME(x, c)`` that runs ``statements``."""
    return f"#define {name}(x, c) do {{ {statements} }} while (0)\n"


def fusable_operand(operand: Operand) -> bool:
    """True for what an ``operands`` buffer can hold: scalars and tensors that vary along channels at most."""
    return isinstance(operand, ScalarOperand) or (isinstance(operand, TensorOperand) and operand.per_channel)
