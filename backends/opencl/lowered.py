"""Launches as inert data: what a kernel is compiled from, what it is given, how many work-items run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dispatcher.backends.opencl.groups import Group
from dispatcher.backends.opencl.render import KernelOperands
from dispatcher.interface import PlannedLaunch
from dispatcher.ops.steps import TensorOperand, ValueOperand


@dataclass(frozen=True)
class Value:
    """The buffer of a value of the operator."""

    number: int


@dataclass(frozen=True)
class Rows:
    """The statistics of a value's rows: ``elements`` numbers."""

    value: int
    elements: int


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter as it is."""

    name: str


@dataclass(frozen=True)
class Weights:
    """A tensor parameter rearranged by ``pack``; zeros around it stand for nothing, so it has to be finite.

    Weights that are not ``suited`` are for the direct core.
    """

    name: str
    pack: Callable[[np.ndarray], np.ndarray]
    suited: Callable[[np.ndarray], bool] = lambda weight: True


@dataclass(frozen=True)
class Table:
    """Constant numbers."""

    numbers: np.ndarray


@dataclass(frozen=True)
class Scratch:
    """Memory of the launch's own, ``elements`` numbers, zero before the first call."""

    elements: int


@dataclass(frozen=True)
class Counter:
    """Three integers that are zero before the first call; see conv_transpose3d_lines.cl.

    When it is ``guarded``, a call after which the last one is set has met data that the kernel is not right on.
    """

    guarded: bool


Argument: TypeAlias = Value | Rows | Tensor | Weights | Table | Scratch | Counter | KernelOperands | np.integer[Any]


@dataclass(frozen=True)
class Lowered:
    """One launch.

    Attributes:
        kernel: name of the kernel.
        text: OpenCL C source.
        arguments: of the kernel, in order.
        items: global size, and ``local`` that of a work-group.
        source: number of the value it reads; ``output`` that of the one it makes.
        planned: for people.
        in_place: source and output may be the same buffer.
        local_bytes: local memory of a work-group, about.
    """

    kernel: str
    text: str
    arguments: tuple[Argument, ...]
    items: int
    local: int
    source: int
    output: int
    planned: PlannedLaunch
    in_place: bool = False
    local_bytes: int = 0

    @property
    def reads(self) -> list[int]:
        """Numbers of the values it reads, one that is read in two ways twice."""
        values = [each.number for each in self.arguments if isinstance(each, Value)]
        return [number for number in values if number != self.output]


def extra_arguments(group: Group, operands: KernelOperands) -> tuple[Argument, ...]:
    """What the kernel is given for its parameters ``a0``, ``a1``, ... and ``partials``."""
    buffers: list[Argument] = []
    for operand in operands.buffers:
        if isinstance(operand, TensorOperand):
            buffers.append(Tensor(operand.name))
        elif isinstance(operand, ValueOperand):
            buffers.append(Value(operand.value))
    return (*buffers, *((rows_of(group),) if group.gathers is not None else ()))


def rows_of(group: Group) -> Rows:
    """The statistics that a group leaves of its result."""
    assert group.gathers is not None
    n, c, d, h, _ = group.steps[-1].shape
    return Rows(group.output, group.gathers.numbers * n * c * d * h)


def planned(group: Group, kernel: str, algorithm: str, detail: Mapping[str, str | int | float]) -> PlannedLaunch:
    """The launch of a group, for people."""
    extra: dict[str, str | int | float] = {}
    if group.gathers is not None:
        extra["gathers"] = f"{group.gathers.kind} of rows" + ("" if group.stored else ", and stores nothing else")
    if group.given is not None:
        extra["given"] = f"{group.given.kind} of rows"
    return PlannedLaunch(kernel, tuple(step.op for step in group.steps), algorithm, {**detail, **extra}, group.note)
