"""From an operator to launches: its groups, each lowered by the implementation that was chosen while it grew."""

from __future__ import annotations

from dispatcher.backends.cuda.groups import grouped
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.program import Program
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.interface import PlannedLaunch
from dispatcher.problem.operator import Operator


def lower(operator: Operator, target: Target, options: Options) -> Program:
    """Plan ``operator`` for ``target`` and make its launches.

    Raises:
        InputError: the options name a tile that does not fit.
    """
    program = Program(operator)
    for group in grouped(Setting(operator, target, options)):
        before = len(program.launches)
        described = group.implementation.lower(group.task, program)
        steps = tuple(step.op for step in operator.steps[group.first : group.last + 1])
        for launch, (algorithm, detail) in zip(program.launches[before:], described, strict=True):
            planned = PlannedLaunch(launch.name, steps, algorithm, detail, group.note, group.rejected)
            program.planned.append(planned)
    return program
