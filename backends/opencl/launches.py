"""What launches have in common, and the launches of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.fusion import riders
from dispatcher.backends.opencl.grouped import Grouping, Shared, lower_grouped
from dispatcher.backends.opencl.limits import Limits
from dispatcher.backends.opencl.render import KernelOperands
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.steps import StepSource, lower_gather, lower_step
from dispatcher.backends.opencl.tiles import round_up
from dispatcher.interface import PlannedLaunch, Tensors
from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Pointwise,
    ScalarOperand,
    Softmax,
    TensorOperand,
    ValueOperand,
)
from dispatcher.problem.operator import Operator


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """True when two C-contiguous arrays of one shape and dtype hold the same bytes (NaN included)."""
    return a.shape == b.shape and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


class Remembered:
    """A device buffer made from some tensors, made again only when their bytes have changed."""

    def __init__(self) -> None:
        self.buffer: Any = None
        self._copies: dict[str, np.ndarray] = {}

    def stale(self, tensors: Tensors, names: Sequence[str]) -> bool:
        """True when the buffer has to be made; remembers the tensors' bytes."""
        if self.buffer is not None and all(same_bytes(self._copies[name], tensors[name]) for name in names):
            return False
        self._copies = {name: np.array(tensors[name]) for name in names}
        return True


@dataclass
class Call:
    """The state of one call while its launches are enqueued."""

    queue: Any
    tensors: Tensors
    values: dict[int, Any]
    tensor_buffers: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)


class Launch(Protocol):
    """One kernel launch."""

    planned: PlannedLaunch
    source: int
    output: int

    def prepare(self, tensors: Tensors) -> bool:
        """Bring packed weights and operands up to date; False when the weights rule this launch out."""

    def enqueue(self, call: Call) -> None:
        """Enqueue the kernel."""


class Operands:
    """The ``operands`` buffer of a launch: scalars, and per-channel tensors of the current call."""

    def __init__(self, runtime: OpenClRuntime, layout: KernelOperands, real: np.dtype[Any]) -> None:
        self._runtime, self._layout, self._real = runtime, layout, real
        self._remembered = Remembered()
        self._names = [operand.name for _, operand in layout.entries if isinstance(operand, TensorOperand)]

    @property
    def buffer(self) -> Any:
        return self._remembered.buffer

    def update(self, tensors: Tensors) -> None:
        if not self._remembered.stale(tensors, self._names):
            return
        values = np.zeros(self._layout.size, self._real)
        for offset, operand in self._layout.entries:
            if isinstance(operand, ScalarOperand):
                values[offset] = operand.value
            elif isinstance(operand, TensorOperand):
                values[offset : offset + operand.shape[1]] = np.ravel(tensors[operand.name])
        self._remembered.buffer = self._runtime.constant(values)


#: Work-items of a work-group of a kernel whose work-items have nothing to do with each other.
INDEPENDENT_ITEMS = 64


class StepLaunch:
    """A single step, or a gather convolution, with the pointwise steps that ride on its store.

    Args:
        runtime: the device.
        operator: that the steps belong to.
        first: index of the step.
        last: index of the last step that rides on it.
        real: float32 or float64.
        note: for the plan.
        limits: of a device whose work-groups share out rows among their work-items; None where a work-item
            does best with rows of its own (CPUs).
    """

    def __init__(
        self,
        runtime: OpenClRuntime,
        operator: Operator,
        first: int,
        last: int,
        real: np.dtype[Any],
        note: str,
        limits: Limits | None,
    ) -> None:
        step = operator.steps[first]
        chain = [rider for rider in operator.steps[first + 1 : last + 1] if isinstance(rider, Pointwise)]
        name = "double" if real == np.float64 else "float"
        facts = runtime.facts
        vec = max(1, facts.vec_double if name == "double" else facts.vec)
        details: dict[str, int] = {}
        lowered: StepSource
        if limits is not None and isinstance(step, Shared):
            lowered, group, self._kernel = build_grouped(runtime, limits, step, chain, name)
            self._local = group.work_items
            self._size = -(-lowered.count // group.lanes) * group.work_items
            details = {"results_per_group": group.lanes, "work_items_per_result": group.slices}
        else:
            if isinstance(step, ConvTranspose3d):
                lowered = lower_gather(step, chain, name)
            elif limits is None:
                lowered = lower_step(step, chain, name, vec)
            else:
                lowered = lower_step(step, chain, name, 1, whole_rows=False)
            self._kernel = cl.Kernel(runtime.program(lowered.text), lowered.kernel)
            most = self._kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, runtime.device)
            self._local = 1 if limits is None else min(INDEPENDENT_ITEMS, most)
            self._size = round_up(lowered.count, self._local)
        self.source, self.output = step.source, last + 1
        self.in_place = isinstance(step, Pointwise | Normalize | Softmax)
        self._operands = Operands(runtime, lowered.operands, real)
        self._weight = step.weight.name if isinstance(step, ConvTranspose3d) else ""
        self._buffers = lowered.operands.buffers
        self._count = lowered.count
        algorithm = "gather" if isinstance(step, ConvTranspose3d) else "step"
        ops = tuple(each.op for each in operator.steps[first : last + 1])
        self.planned = PlannedLaunch(lowered.kernel, ops, algorithm, {"items": self._count} | details, note)

    def prepare(self, tensors: Tensors) -> bool:
        self._operands.update(tensors)
        return True

    def enqueue(self, call: Call) -> None:
        extra = []
        for operand in self._buffers:
            if isinstance(operand, TensorOperand):
                extra.append(call.tensor_buffers[operand.name])
            elif isinstance(operand, ValueOperand):
                extra.append(call.values[operand.value])
        arguments = [call.values[self.source], self._operands.buffer, call.values[self.output]]
        if self._weight:
            arguments.insert(1, call.tensor_buffers[self._weight])
        self._kernel.set_args(*arguments, np.uint64(self._count), *extra)
        event = cl.enqueue_nd_range_kernel(call.queue, self._kernel, (self._size,), (self._local,))
        call.events.append((self.planned.name, event))

    @property
    def values_read(self) -> list[int]:
        """Values it reads besides its source."""
        return [operand.value for operand in self._buffers if isinstance(operand, ValueOperand)]

    @property
    def tensor_names(self) -> list[str]:
        """Tensors it reads as buffers of their own."""
        named = [operand.name for operand in self._buffers if isinstance(operand, TensorOperand)]
        return [*named, self._weight] if self._weight else named


def build_grouped(
    runtime: OpenClRuntime, limits: Limits, step: Shared, chain: list[Pointwise], real: str
) -> tuple[StepSource, Grouping, Any]:
    """Lower ``step`` to a kernel that the device can launch, and build it.

    A compiler may need more registers or local memory than a full work-group has; then smaller ones are tried, down
    to one work-item, which needs neither.

    Returns:
        The source, how work-groups are shared out, and the kernel.
    """
    while True:
        lowered, group = lower_grouped(step, chain, real, limits)
        kernel = cl.Kernel(runtime.program(lowered.text), lowered.kernel)
        info = cl.kernel_work_group_info
        most = kernel.get_work_group_info(info.WORK_GROUP_SIZE, runtime.device)
        taken = kernel.get_work_group_info(info.LOCAL_MEM_SIZE, runtime.device)
        if group.work_items == 1 or (group.work_items <= most and taken <= limits.local_memory):
            return lowered, group, kernel
        limits = replace(limits, work_items=group.work_items // 2)


def step_launches(
    runtime: OpenClRuntime,
    operator: Operator,
    first: int,
    last: int,
    real: np.dtype[Any],
    note: str,
    limits: Limits | None,
) -> list[Launch]:
    """Launches of steps ``first .. last``, each with its riders; ``limits`` as for :class:`StepLaunch`."""
    launches: list[Launch] = []
    index = first
    while index <= last:
        end = riders(operator, index, last)
        launches.append(StepLaunch(runtime, operator, index, end, real, note if end == last else "", limits))
        index = end + 1
    return launches
