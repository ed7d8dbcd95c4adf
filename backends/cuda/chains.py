"""Chains of operations on a voxel's channels, as ``chain.cuh`` reads them; prologues and epilogues have two each."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.ops.steps import Normalize, Operand, Pointwise, ScalarOperand, Step, TensorOperand

#: Vocabulary function to operation, as in ``chain.cuh``.
OPERATIONS = {
    "add": 1,
    "subtract": 2,
    "scale": 3,
    "clamp": 4,
    "gelu": 5,
    "relu": 6,
    "leaky_relu": 7,
    "sigmoid": 8,
    "tanh": 9,
    "silu": 10,
    "softplus": 11,
    "hardswish": 12,
}
LAYER_NORM = 32
_BY_CHANNEL = 64  # this bit for operand a, the next one for b
#: Most operations of a chain.
MAX_STAGES = 8


def refuses(step: Pointwise, channels: int) -> str | None:
    """Why a step on ``channels`` channels cannot be in a chain, or None."""
    for operand in step.arguments:
        by_channel = (
            isinstance(operand, TensorOperand) and operand.per_channel and operand.shape[1] == channels
        )
        if not by_channel and not isinstance(operand, ScalarOperand):
            return f"an operand of {step.op} is neither a number nor one value a channel"
    return None


def code(steps: Sequence[Step]) -> int:
    """The operations of ``steps`` as the kernels read them: one byte each, the first one lowest."""
    number = 0
    for place, step in enumerate(steps):
        operation = OPERATIONS[step.function] if isinstance(step, Pointwise) else LAYER_NORM
        for bit, operand in enumerate(operands(step)):
            if isinstance(operand, TensorOperand):
                operation |= _BY_CHANNEL << bit
        number |= operation << (8 * place)
    return number


def define(steps: Sequence[Step]) -> str:
    """The same as a literal of a kernel's source."""
    return f"0x{code(steps):x}ull"


def operands(step: Step) -> tuple[Operand | None, ...]:
    """Operands a and b of a step in a chain; eps of a layer norm is not among them."""
    if isinstance(step, Normalize):
        return (step.weight, step.bias)
    assert isinstance(step, Pointwise)
    return step.operands
