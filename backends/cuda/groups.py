"""The groups of steps that are launched together: grown step by step, each with the implementation that runs it."""

from __future__ import annotations

from dispatcher.backends.cuda.implementations import Implementation, choose
from dispatcher.backends.cuda.sources import MAX_OPERANDS
from dispatcher.backends.cuda.tasks import ConvTask, Setting, Task, opened
from dispatcher.backends.cuda.tiles import HaloTask
from dispatcher.plan.groups import split


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
        self.implementation, self.rejected = choose(task)
        self.task, self.last = task, index
        return None


def grouped(setting: Setting) -> list[CudaGroup]:
    """The operator's steps in groups."""
    return split(setting.operator, lambda index: CudaGroup(setting, index))


def halo_tasks(setting: Setting) -> list[HaloTask | None]:
    """What each convolution's launch has to do, with all that is fused; None where the general kernel runs it."""
    tasks = [group.task for group in grouped(setting)]
    return [None if task.refusal is not None else task.halo for task in tasks if isinstance(task, ConvTask)]
