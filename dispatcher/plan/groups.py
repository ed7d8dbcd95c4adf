"""Growing groups: consecutive steps of a pipeline that a backend runs together.

A group belongs to a backend and *is* what that backend lowers, so nothing is decided twice: :func:`split` opens one at
a step and offers it the following steps, one after another, until it declines. What can run together is the
backend's knowledge; which values have to reach memory is known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from dispatcher.ops.steps import Step, ValueOperand
from dispatcher.problem.operator import Operator


class Group(Protocol):
    """Steps ``first .. last`` (indices into ``Operator.steps``) that run together.

    Attributes:
        first: index of the first step.
        last: index of the last step that it took.
        note: for people, why it ends where it ends; empty at the end of the pipeline.
    """

    first: int
    last: int
    note: str

    def take(self, index: int) -> str | None:
        """Take step ``index``, which is ``last + 1`` and reads the value of step ``last``, into the group.

        Its operands may be earlier values: of steps in the group (``> first``), or made before it.

        Returns:
            None when the step is in the group now, else the reason why the group stays as it is.
        """


Grown = TypeVar("Grown", bound=Group)


class Flow:
    """Who reads which value of an operator; value 0 is its input, value ``i + 1`` the result of step ``i``."""

    def __init__(self, operator: Operator) -> None:
        self.steps = operator.steps
        self.last_reader: dict[int, int] = {}
        self.readers: Counter[int] = Counter()
        for index, step in enumerate(self.steps):
            for value in values_read(step):
                self.last_reader[value] = index
                self.readers[value] += 1

    def follows(self, index: int) -> str | None:
        """None when step ``index`` reads the value of the step before it, else why it cannot join that step."""
        step = self.steps[index]
        return None if step.source == index else f"{step.op} reads an earlier value"

    def open_values(self, first: int, last: int) -> list[int]:
        """Values of steps ``first .. last - 1`` that a step after ``last`` still reads."""
        return [value for value in range(first + 1, last + 1) if self.last_reader.get(value, -1) > last]


def values_read(step: Step) -> set[int]:
    """Every value that a step reads: its source, and operands that are values."""
    return {step.source, *(operand.value for operand in step.operands if isinstance(operand, ValueOperand))}


def split(operator: Operator, open_group: Callable[[int], Grown]) -> list[Grown]:
    """Cut ``operator`` into groups, each as long as it goes.

    A group ends where it declines the next step, or earlier where a value that it would not store is read again
    after it.

    Args:
        operator: whose steps.
        open_group: makes a group of one step, given by its index.
    """
    flow = Flow(operator)
    groups: list[Grown] = []
    first = 0
    while first < len(operator.steps):
        group = open_group(first)
        closed, note = first, ""
        while group.last + 1 < len(operator.steps):
            reason = flow.follows(group.last + 1) or group.take(group.last + 1)
            if reason is not None:
                note = reason
                break
            if not flow.open_values(first, group.last):
                closed = group.last
        if closed < group.last:
            value = min(flow.open_values(first, group.last))
            note = f"the result of {operator.steps[value - 1].op} is read again later"
            group = open_group(first)
            while group.last < closed:
                declined = group.take(group.last + 1)
                assert declined is None, declined
        group.note = note
        groups.append(group)
        first = group.last + 1
    return groups
