"""Statistics that a convolution's launch gathers of the values that it makes, for a step over all of space that
follows: what is gathered, and which steps need nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dispatcher.ops.steps import Normalize, Reduce, Softmax, Step

_SPACE = {2, 3, 4}
_NUMBERS = {"MOMENTS": 3, "EXPONENTS": 2, "COMBINED": 1}


@dataclass(frozen=True)
class Gather:
    """What a launch gathers of a channel; see ``kernels/gather.cuh``.

    Attributes:
        kind: ``MOMENTS``, ``EXPONENTS`` or ``COMBINED``.
        stored: the values are stored too.
        reduce: whose lifted values are combined; None for the other kinds.
        alone: the next launch has the statistics alone, and not the values too.
    """

    kind: Literal["MOMENTS", "EXPONENTS", "COMBINED"]
    stored: bool
    reduce: Reduce | None = None
    alone: bool = False

    @property
    def numbers(self) -> int:
        """Numbers that a lane keeps of a channel, and that the launch stores of a box and a channel."""
        return _NUMBERS[self.kind]

    @property
    def wide(self) -> bool:
        """Lanes keep doubles. Where floats might leave their range, the values must be there to be read again."""
        return self.alone

    @property
    def defines(self) -> dict[str, int | str]:
        """The defines of a kernel that gathers, or that reads what was gathered."""
        return {"GATHER": self.kind, "GATHER_STATE": "double" if self.wide else "float"}


NO_GATHER: dict[str, int | str] = {"GATHER": 0, "GATHER_STATE": "float"}


def gathered_for(step: Step, stored: bool) -> Gather | str:
    """What ``step`` needs of the values that it reads, or the reason why a convolution's launch cannot gather it.

    Args:
        stored: the values have to be stored in any case.
    """
    if not isinstance(step, Normalize | Softmax | Reduce) or not set(step.axes) >= _SPACE:
        return f"{step.op} does not work over all of space"
    if isinstance(step, Normalize):
        return Gather("MOMENTS", True)
    if isinstance(step, Softmax):
        return Gather("EXPONENTS", True)
    if step.form.shifted or step.form.monoid.errors == "multiplies":
        return f"{step.op} is combined in double precision from the start"
    return Gather("COMBINED", stored, step, alone=True)


def is_mean(step: Step) -> bool:
    """Is it the mean over space alone?"""
    return isinstance(step, Reduce) and set(step.axes) == _SPACE and step.form.plain and step.form.name == "mean"
