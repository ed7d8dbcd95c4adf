"""What a convolution's launch does to its input while it loads it: which steps fit, and in what form.

A prologue has three cuts: a chain of operations on each element, a pooling, and a chain on each pooled value. Blocks
that share inputs, in their halos, make them once each; :func:`pays` says whether that costs less than a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.backends.cuda.sources import MAX_STAGES, WINDOWS, refuses
from dispatcher.backends.cuda.tiles import COSTS
from dispatcher.ops.steps import Pointwise, Pool, Step

#: Most elements of a window whose reads are unrolled.
MAX_WINDOW = 64


@dataclass(frozen=True)
class Prologue:
    """Steps that one convolution launch runs on its input.

    Attributes:
        first: on each element.
        pool: the pooling, or None.
        second: on each pooled value.
    """

    first: tuple[Pointwise, ...] = ()
    pool: Pool | None = None
    second: tuple[Pointwise, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.first or self.pool or self.second)

    @property
    def window(self) -> tuple[int, int, int]:
        """Box of the pooling; ones where there is none."""
        return (1, 1, 1) if self.pool is None else self.pool.window

    @property
    def volume(self) -> int:
        """Elements from which one input is made."""
        return math.prod(self.window)


NO_PROLOGUE = Prologue()


def describe(steps: Sequence[Step]) -> Prologue | str:
    """The prologue made of ``steps``, in order, or the reason why there is none."""
    before: list[Pointwise] = []
    behind: list[Pointwise] = []
    pool: Pool | None = None
    for step in steps:
        match step:
            case Pointwise():
                reason = refuses(step, (), 0, tensors=False)
                if reason is not None:
                    return reason
                (before if pool is None else behind).append(step)
            case Pool() if pool is not None:
                return "one pooling is fused already"
            case Pool() if not step.plain:
                return WINDOWS
            case Pool():
                if math.prod(step.window) > MAX_WINDOW:
                    return f"a window of {math.prod(step.window)} elements is more than {MAX_WINDOW}"
                pool = step
            case _:
                return f"{step.op} needs more than a window of its input"
    if pool is None:  # every step may be in either chain
        before, behind = before[:MAX_STAGES], before[MAX_STAGES:]
    if max(len(before), len(behind)) > MAX_STAGES:
        return f"a chain holds {MAX_STAGES} operations at most"
    return Prologue(tuple(before), pool, tuple(behind))


def pays(prologue: Prologue, reads: float) -> bool:
    """Does a fused prologue take less time than a launch of its own?

    Args:
        reads: how often the convolution's blocks read each input. Each time after the first costs the window's
            elements; a launch would read them once and write the input.
    """
    return (1 - COSTS.hidden_reads) * (reads - 1) * prologue.volume <= prologue.volume + 1
