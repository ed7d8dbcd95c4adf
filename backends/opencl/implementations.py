"""The implementations of a group, one ordered list, and the choice among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from dispatcher.backends.opencl import inplace, lines, tiled, tuned
from dispatcher.backends.opencl.grouped import Shared, lower_shared
from dispatcher.backends.opencl.groups import WINDOWS, Group, LineRules, Rules, Unfused, plan
from dispatcher.backends.opencl.lowered import Lowered
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.steps import lower_gather, lower_step
from dispatcher.backends.opencl.target import Target
from dispatcher.backends.opencl.tiles import Tile, merged, merged_shape
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.ops.steps import Convolution, Pool, ScalarOperand
from dispatcher.problem.operator import Operator

#: What a vector of results of the direct core costs besides its sums, in vector multiply-adds: it is stored in a line,
#: read again when the others of the box are there, and stored where it belongs. Winograd's work counts its lines.
LINE_COST = 30.0
#: A product of the kernel that computes one result after another.
GATHER_COST = 4.0


@dataclass(frozen=True)
class Task:
    """A group that is to run on a device.

    Attributes:
        group: the steps.
        target: the device.
        options: what is fixed; algorithm ``auto`` stands for those of CPUs.
        real: float32 or float64.
    """

    group: Group
    target: Target
    options: Options
    real: np.dtype[Any]

    @property
    def asked(self) -> str | None:
        """None where no options of a kernel are given, nor known to be best, else which."""
        assert self.group.convolution is not None
        given = replace(self.options, fusion=None)
        if replace(given, tuned=None) not in (Options(), Options("direct")):
            return "options of another kernel are given"
        geometry = self.group.convolution.geometry
        known = tuned.recall(self.target.identity, geometry, None, self.real.name) if given == Options() else None
        return None if known is None else known[1]

    @cached_property
    def geometry(self) -> ConvGeometry:
        """The convolution's, for lines: planes, or all of space, are one row where nothing tells its rows apart."""
        group = self.group
        assert group.convolution is not None
        geometry = group.convolution.geometry
        apart = group.fold is not None or group.gathers is not None or self.asked is not None
        if apart or any(axis.stride > 1 for axis in geometry.axes):
            return geometry
        found, shape = merged(geometry), group.convolution.shape
        operands = (each for step in group.tail for each in step.arguments if not isinstance(each, ScalarOperand))
        shapes = (merged_shape(each.shape, shape, found.output_shape) for each in operands)
        return geometry if group.at_store and None in shapes else found

    @cached_property
    def lines(self) -> tuple[Tile, str]:
        """The tile of the CPU kernel, and why its core was chosen."""
        group = self.group
        fold, whole_rows = None if group.fold is None else group.fold[0], group.gathers is not None
        return lines.choose(self.geometry, fold, self.target, self.real, self.options, whole_rows=whole_rows)

    @cached_property
    def in_place(self) -> inplace.InPlaceLayout:
        """The layout of the CPU kernel for groups of few channels."""
        return inplace.layout_of(self.group, self.target, self.real)


class Implementation(Protocol):
    """One way to run a group."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def most_builds(self) -> int:
        """Kernels that are built at most, each for less than the one before, until the device takes one."""

    def accepts(self, task: Task) -> str | None:
        """None when it can run the task, else why not."""

    def estimate(self, task: Task) -> float:
        """Estimated cost, in units that implementations which accept the same tasks share."""

    def lower(self, task: Task) -> Lowered | None:
        """The launch; None when no work-group of it fits the target."""


@dataclass(frozen=True)
class Lines:
    """The convolution for CPUs, with one of its cores."""

    name: str
    winograd: bool
    most_builds: int = 1

    def accepts(self, task: Task) -> str | None:
        reason = _convolution_reason(task)
        if reason is None and task.options.algorithm in ("tiled", "gather"):
            reason = f"algorithm {task.options.algorithm} is used"
        if reason is None:
            tile, why = task.lines
            reason = None if tile.winograd == self.winograd else why
        return reason

    def estimate(self, task: Task) -> float:
        geometry, fold = task.geometry, task.group.fold
        window = None if fold is None else fold[0]
        facts, real = task.target.facts, task.real
        work, _ = lines.best(geometry, window, facts, real, Options(), transformed=self.winograd)
        vectors = math.prod(geometry.output_shape[1:4]) * -(-geometry.width.output // facts.lanes(real))
        return work if self.winograd else work + LINE_COST * vectors

    def lower(self, task: Task) -> Lowered:
        return lines.lower_lines(task.group, task.geometry, task.target, task.real, *task.lines)


@dataclass(frozen=True)
class InPlace:
    """The convolution for CPUs whose groups have few channels; its taps may lie as far apart as they like."""

    name: str = "in-place"
    most_builds: int = 1

    def accepts(self, task: Task) -> str | None:
        if task.group.convolution is None:
            return "not a convolution"
        return task.asked or inplace.in_place_reason(task.group, task.in_place)

    def estimate(self, task: Task) -> float:
        return task.in_place.work

    def lower(self, task: Task) -> Lowered:
        return inplace.lower_in_place(task.group, task.in_place, task.real)


@dataclass(frozen=True)
class Tiled:
    """The convolution for GPUs."""

    name: str = "tiled"
    most_builds: int = 4

    def accepts(self, task: Task) -> str | None:
        if task.options.algorithm != "tiled":
            return "the device is a CPU" if task.target.facts.cpu else "algorithm gather is used"
        return _convolution_reason(task)

    def estimate(self, task: Task) -> float:
        return _elements(task)

    def lower(self, task: Task) -> Lowered | None:
        return tiled.lower_tiled(task.group, task.target, task.real)


@dataclass(frozen=True)
class Gather:
    """A convolution computed one result after another."""

    name: str = "gather"
    most_builds: int = 1

    def accepts(self, task: Task) -> str | None:
        if task.group.convolution is None:
            return "not a convolution"
        return "a kernel of its own runs it" if task.group.declined is None else None

    def estimate(self, task: Task) -> float:
        assert task.group.convolution is not None
        geometry = task.group.convolution.geometry
        return GATHER_COST * geometry.flops / (2 * max(1, geometry.batch))

    def lower(self, task: Task) -> Lowered:
        return lower_gather(task.group, task.target, task.real)


@dataclass(frozen=True)
class Grouped:
    """A reduction whose results work-groups share out."""

    name: str = "grouped"
    most_builds: int = 32

    def accepts(self, task: Task) -> str | None:
        if task.target.facts.cpu and task.options.algorithm != "tiled":
            return "a CPU's work-item does best with rows of its own"
        step = task.group.parts[0].step if task.group.parts else None
        if isinstance(step, Pool) and not step.plain:
            return WINDOWS
        return None if isinstance(step, Shared) else "not a reduction"

    def estimate(self, task: Task) -> float:
        return _elements(task)

    def lower(self, task: Task) -> Lowered:
        return lower_shared(task.group, task.target, task.real)


@dataclass(frozen=True)
class Steps:
    """Steps without a convolution, each work-item for itself."""

    name: str = "step"
    most_builds: int = 8

    def accepts(self, task: Task) -> str | None:
        if task.group.convolution is not None:
            return "a convolution"
        return "work-groups share out its results" if Grouped().accepts(task) is None else None

    def estimate(self, task: Task) -> float:
        return _elements(task)

    def lower(self, task: Task) -> Lowered:
        target = task.target
        if task.options.algorithm == "tiled":
            target = replace(target, facts=replace(target.facts, cpu=False))
        return lower_step(task.group, target, task.real)


#: All of them, the preferred ones first.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    InPlace(),
    Lines("lines-winograd", winograd=True),
    Lines("lines-direct", winograd=False),
    Tiled(),
    Grouped(),
    Steps(),
    Gather(),
)


def _convolution_reason(task: Task) -> str | None:
    return "not a convolution" if task.group.convolution is None else task.group.declined


def _elements(task: Task) -> float:
    return float(math.prod(task.group.steps[0].input_shape))


def choose(task: Task) -> tuple[Implementation, tuple[tuple[str, str], ...]]:
    """The implementation with the least estimated cost among those that accept the task, the first one among equals.

    Returns:
        The implementation, and the name of each other one with the reason against it.
    """
    reasons = [(each, each.accepts(task)) for each in IMPLEMENTATIONS]
    accepting = [each for each, reason in reasons if reason is None]
    best = min(accepting, key=lambda each: each.estimate(task)) if len(accepting) > 1 else accepting[0]
    rejected = [
        (each.name, reason or f"{best.name} is estimated to be faster") for each, reason in reasons if each is not best
    ]
    return best, tuple(rejected)


def rules_of(target: Target, options: Options, itemsize: int, refused: list[Convolution]) -> Rules:
    """What fuses under ``options``."""
    if options.fusion == "off":
        return Unfused()
    if options.algorithm == "gather":
        return Rules()
    if options.algorithm == "tiled":
        return tiled.TiledRules(target.limits, itemsize, refused)
    if not target.facts.cpu:
        return LineRules(None)
    return LineRules(0 if options.fusion == "eager" else target.facts.cache)


def tasks_of(operator: Operator, target: Target, options: Options, refused: list[Convolution]) -> list[Task]:
    """What an operator takes, in order.

    Args:
        operator: to run.
        target: the device.
        options: what is fixed.
        refused: convolutions for which the device has turned out to launch no tile of the tiled kernel.
    """
    real = np.dtype(np.float64 if operator.dtype == "float64" else np.float32)
    rules = rules_of(target, options, real.itemsize, refused)
    return [Task(group, target, options, real) for group in plan(operator, rules, target.facts.lanes(real))]
