"""Lowered launches on a device: their kernels, the buffers they keep, and how they are enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.implementations import Task, choose
from dispatcher.backends.opencl.lowered import Counter, Lowered, Rows, Scratch, Table, Tensor, Value, Weights
from dispatcher.backends.opencl.render import KernelOperands
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.interface import PlannedLaunch, Tensors
from dispatcher.ops.steps import ScalarOperand, TensorOperand


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
    """The buffers of one call, and the events of its launches."""

    queue: Any
    values: dict[int, Any]
    rows: dict[int, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)


class Launch:
    """One launch on a device.

    Args:
        runtime: the device.
        lowered: what to launch.
        kernel: built from it.
        real: float32 or float64.
        planned: for people.
    """

    def __init__(
        self, runtime: OpenClRuntime, lowered: Lowered, kernel: Any, real: np.dtype[Any], planned: PlannedLaunch
    ) -> None:
        self._runtime, self.lowered, self._kernel, self._real = runtime, lowered, kernel, real
        self.planned = planned
        self._operands, self._weights = Remembered(), Remembered()
        self._instead: str | None = None
        self._scratch: Any = None
        self._counter: Any = None
        self._tables: dict[int, Any] = {}

    @property
    def scratch_bytes(self) -> int:
        """Memory of its own."""
        elements = sum(each.elements for each in self.lowered.arguments if isinstance(each, Scratch))
        return elements * self._real.itemsize

    def prepare(self, tensors: Tensors) -> str | None:
        """Bring packed weights and operands up to date; the algorithm to use instead when the weights ask for one."""
        for each in self.lowered.arguments:
            if isinstance(each, KernelOperands):
                names = [operand.name for _, operand in each.entries if isinstance(operand, TensorOperand)]
                if self._operands.stale(tensors, names):
                    self._operands.buffer = self._runtime.constant(self._values(each, tensors))
            elif isinstance(each, Weights) and self._weights.stale(tensors, [each.name]):
                weight = np.asarray(tensors[each.name], self._real)
                # Zeros stand for what lies outside the tensor, and zero times infinity is not zero.
                finite = bool(np.isfinite(weight).all())
                self._instead = "gather" if not finite else None if each.suited(weight) else "direct"
                with np.errstate(invalid="ignore"):
                    self._weights.buffer = self._runtime.constant(each.pack(weight))
        return self._instead

    def _values(self, operands: KernelOperands, tensors: Tensors) -> np.ndarray:
        """The ``operands`` buffer: scalars, and per-channel tensors of the current call."""
        values = np.zeros(operands.size, self._real)
        for offset, operand in operands.entries:
            if isinstance(operand, ScalarOperand):
                values[offset] = operand.value
            elif isinstance(operand, TensorOperand):
                values[offset : offset + operand.shape[1]] = np.ravel(tensors[operand.name])
        return values

    def met_nonfinite(self, queue: Any) -> bool:
        """Whether the finished launch met data that it is not right on; clears the flag."""
        if self._counter is None or not any(
            isinstance(each, Counter) and each.guarded for each in self.lowered.arguments
        ):
            return False
        flags = np.empty(3, np.int32)
        cl.enqueue_copy(queue, flags, self._counter, is_blocking=True)
        if flags[2]:
            cl.enqueue_copy(queue, self._counter, np.zeros(3, np.int32), is_blocking=True)
        return bool(flags[2])

    def _argument(self, call: Call, position: int) -> Any:
        argument = self.lowered.arguments[position]
        match argument:
            case Value():
                return call.values[argument.number]
            case Rows():
                return call.rows[argument.value]
            case Tensor():
                return call.tensors[argument.name]
            case Weights():
                return self._weights.buffer
            case KernelOperands():
                return self._operands.buffer
            case Table():
                if position not in self._tables:
                    self._tables[position] = self._runtime.constant(argument.numbers)
                return self._tables[position]
            case Scratch():
                if self._scratch is None:
                    self._scratch = self._runtime.buffer(self.scratch_bytes)
                    cl.enqueue_fill_buffer(call.queue, self._scratch, self._real.type(0), 0, self.scratch_bytes)
                return self._scratch
            case Counter():
                if self._counter is None:
                    self._counter = self._runtime.constant(np.zeros(3, np.int32))
                return self._counter
        return argument

    def enqueue(self, call: Call) -> None:
        """Enqueue the kernel."""
        self._kernel.set_args(*(self._argument(call, i) for i in range(len(self.lowered.arguments))))
        size, local = (self.lowered.items,), (self.lowered.local,)
        event = cl.enqueue_nd_range_kernel(call.queue, self._kernel, size, local)
        call.events.append((self.planned.name, event))


def build(runtime: OpenClRuntime, task: Task) -> Launch | None:
    """Choose, lower and build a task; None when the device can launch no work-group of it.

    A compiler may need more registers or local memory than was estimated; the task is then lowered again for less, and
    in the end, where that is enough, for one work-item, which needs neither.
    """
    implementation, rejected = choose(task)
    limits = task.target.limits
    for _ in range(implementation.most_builds):
        lowered = implementation.lower(replace(task, target=replace(task.target, limits=limits)))
        if lowered is None:
            return None
        kernel = cl.Kernel(runtime.program(lowered.text), lowered.kernel)
        info = cl.kernel_work_group_info
        most = kernel.get_work_group_info(info.WORK_GROUP_SIZE, runtime.device)
        taken = kernel.get_work_group_info(info.LOCAL_MEM_SIZE, runtime.device)
        if lowered.local == 1 or (lowered.local <= most and taken <= task.target.limits.local_memory):
            planned = replace(lowered.planned, rejected=rejected)
            return Launch(runtime, lowered, kernel, task.real, planned)
        if lowered.local > most:
            limits = replace(limits, work_items=lowered.local // 2)
        else:
            limits = replace(limits, local_memory=lowered.local_bytes // 2)
    return None
