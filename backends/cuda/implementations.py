"""Everything that can run a task, in order of preference."""

from __future__ import annotations

from typing import Any, Protocol

from dispatcher.backends.cuda.conv_fma import Fma
from dispatcher.backends.cuda.conv_halo import Halo
from dispatcher.backends.cuda.memory_bound import Elementwise, FromGathered, PoolKernel, Rows
from dispatcher.backends.cuda.program import Described, Program
from dispatcher.backends.cuda.tasks import Task


class Implementation(Protocol):
    """One way to run tasks of one kind.

    Attributes:
        name: for people, and of the option ``algorithm`` where users may choose.
        takes: the kind of task.
    """

    name: str
    takes: type[Task]

    def accepts(self, task: Any) -> str | None:
        """None when it can run ``task``, else the reason why not."""

    def estimate(self, task: Any) -> float:
        """Cycles that its launches take, on a device that does nothing else."""

    def lower(self, task: Any, program: Program) -> list[Described]:
        """Append the launches of ``task`` to ``program``; returns what is said of each."""


#: The first one that accepts a task runs it.
IMPLEMENTATIONS: tuple[Implementation, ...] = (Halo(), Fma(), PoolKernel(), FromGathered(), Rows(), Elementwise())


def choose(task: Task) -> tuple[Implementation, tuple[tuple[str, str], ...]]:
    """What runs ``task``, and what does not, with the reasons."""
    rejected: list[tuple[str, str]] = []
    for implementation in IMPLEMENTATIONS:
        if isinstance(task, implementation.takes):
            reason = implementation.accepts(task)
            if reason is None:
                return implementation, tuple(rejected)
            rejected.append((implementation.name, reason))
    raise TypeError(f"nothing runs {type(task).__name__}: {rejected}")
