"""Cutting a pipeline into launches.

A *segment* is what one launch (or one tight group of launches) computes: either a convolution with the steps
that a backend can fuse before it (prologue) and behind it (epilogue), or a single step on its own. What can
be fused is the backend's knowledge; that a value which somebody else reads must reach memory is known here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from dispatcher.ops.steps import ConvTranspose3d, Step, ValueOperand
from dispatcher.problem.operator import Operator


class Fusion(Protocol):
    """What a backend can fuse. Both methods return None for yes, else the reason for no."""

    def prologue(self, step: Step, fused: tuple[Step, ...], convolution: ConvTranspose3d) -> str | None:
        """May ``step`` run while ``convolution`` reads its input? ``fused`` run after it, in order."""

    def epilogue(self, convolution: ConvTranspose3d, fused: tuple[Step, ...], step: Step) -> str | None:
        """May ``step`` run on the convolution's results, after the ``fused`` ones, before they are stored?"""


@dataclass(frozen=True)
class Segment:
    """Consecutive steps ``first .. last`` (indices into ``Operator.steps``) that are launched together.

    Attributes:
        first: index of the first step.
        last: index of the last step.
        convolution: index of the convolution among them, or None for a step on its own.
        note: why the segment ends where it ends; empty at the end of the pipeline.
    """

    first: int
    last: int
    convolution: int | None
    note: str

    def prologue(self, operator: Operator) -> tuple[Step, ...]:
        """Steps fused before the convolution."""
        return () if self.convolution is None else operator.steps[self.first : self.convolution]

    def epilogue(self, operator: Operator) -> tuple[Step, ...]:
        """Steps fused behind the convolution."""
        return () if self.convolution is None else operator.steps[self.convolution + 1 : self.last + 1]


def plan(operator: Operator, fusion: Fusion) -> tuple[Segment, ...]:
    """Cut ``operator`` into segments, fusing as much around each convolution as ``fusion`` allows."""
    steps = operator.steps
    readers = Counter(step.source for step in steps)
    readers.update(
        operand.value for step in steps for operand in step.operands if isinstance(operand, ValueOperand)
    )

    def flows(index: int) -> str | None:
        """None when step ``index`` feeds step ``index + 1`` and nobody else."""
        if steps[index + 1].source != index + 1:
            return f"{steps[index + 1].op} reads an earlier value"
        return None if readers[index + 1] == 1 else f"the result of {steps[index].op} is read again later"

    segments: list[Segment] = []
    start = 0  # first step that no segment holds yet
    for index, convolution in enumerate(steps):
        if index < start or not isinstance(convolution, ConvTranspose3d):
            continue
        first = index
        while first > start and flows(first - 1) is None:
            if fusion.prologue(steps[first - 1], steps[first:index], convolution) is not None:
                break
            first -= 1
        segments.extend(Segment(i, i, None, "a step of its own") for i in range(start, first))
        last, note = index, ""
        while last + 1 < len(steps):
            reason = flows(last) or fusion.epilogue(convolution, steps[index + 1 : last + 1], steps[last + 1])
            if reason is not None:
                note = reason
                break
            last += 1
        segments.append(Segment(first, last, index, note))
        start = last + 1
    segments.extend(Segment(i, i, None, "a step of its own") for i in range(start, len(steps)))
    return tuple(segments)
