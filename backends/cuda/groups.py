"""The groups of steps that are launched together: grown step by step, each with the implementation that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.backends.cuda.gathering import Gather, gathered_for, is_mean
from dispatcher.backends.cuda.implementations import Implementation, choose
from dispatcher.backends.cuda.sources import MAX_OPERANDS
from dispatcher.backends.cuda.tasks import ConvTask, GatheredTask, RowsTask, Setting, Task, opened
from dispatcher.backends.cuda.tiles import HaloTask
from dispatcher.ops.steps import Normalize
from dispatcher.plan.groups import Flow, split


class CudaGroup:
    """See :class:`dispatcher.plan.groups.Group`. What is lowered is its task, by its implementation.

    Attributes:
        task: what has to be done.
        implementation: what does it.
        rejected: implementations that come before it, each with the reason why not.
    """

    def __init__(self, setting: Setting, index: int) -> None:
        self.first = self.last = index
        self.note = ""
        self.task: Task = opened(setting, index)
        self.implementation: Implementation
        self.implementation, self.rejected = choose(self.task)

    def take(self, index: int) -> str | None:
        """Take step ``index``; see :meth:`dispatcher.plan.groups.Group.take`."""
        task = self.task.extended(index)
        if isinstance(task, str):
            return task
        if sum(len(step.operands) for step in task.steps) > MAX_OPERANDS:
            return f"a launch has {MAX_OPERANDS} operands at most"
        self.adopt(task)
        return None

    def adopt(self, task: Task) -> None:
        """Do this instead."""
        self.implementation, self.rejected = choose(task)
        self.task, self.last = task, task.last

    def gather(self, following: Sequence[CudaGroup], flow: Flow) -> int | str:
        """Have this launch gather the statistics that the group after it needs, and tell that one.

        Args:
            following: the groups after this one.
            flow: who reads which value.

        Returns:
            How many of the following groups became one with the first of them; or the reason why nothing is gathered.
        """
        if not isinstance(self.task, ConvTask) or not following or not isinstance(following[0].task, RowsTask):
            return "no statistics follow a convolution"
        consumer, value = following[0], self.last + 1
        first = consumer.task.steps[0]
        if first.source != value:
            return f"{first.op} reads an earlier value"
        gather = gathered_for(first, flow.readers[value] > 1)
        if isinstance(gather, str):
            return gather
        end, last, joined = consumer.first, consumer.last, 0
        if consumer.last == consumer.first and _is_averaged(value + 1, following[1:], flow):
            mean = following[1].task  # of which nobody needs the values
            end, last, joined = mean.first, mean.last, 1
            gather = Gather("MOMENTS", flow.readers[value] > 1, alone=True)
        task = self.task.gathering(gather)
        if isinstance(task, str):
            return task
        self.adopt(task)
        consumer.adopt(GatheredTask(consumer.task.setting, consumer.first, last, end, gather))
        consumer.note = following[joined].note
        return joined


def _is_averaged(value: int, following: Sequence[CudaGroup], flow: Flow) -> bool:
    """Is ``value``, the result of a normalisation, read by the next group alone, which takes its mean over space?"""
    task = following[0].task if following else None
    return (
        isinstance(task, RowsTask)
        and task.steps[0].source == value
        and is_mean(task.steps[0])
        and isinstance(task.setting.operator.steps[value - 1], Normalize)
        and flow.readers[value] == 1
    )


def grouped(setting: Setting) -> list[CudaGroup]:
    """The operator's steps in groups."""
    groups, flow = split(setting.operator, lambda index: CudaGroup(setting, index)), Flow(setting.operator)
    for place, group in enumerate(groups):  # which shrinks behind the place
        joined = group.gather(groups[place + 1 :], flow)
        if isinstance(joined, int):
            del groups[place + 2 : place + 2 + joined]
    return groups


def halo_tasks(setting: Setting) -> list[HaloTask | None]:
    """What each convolution's launch has to do, with all that is fused; None where the general kernel runs it."""
    tasks = [group.task for group in grouped(setting)]
    return [None if task.refusal is not None else task.halo for task in tasks if isinstance(task, ConvTask)]
