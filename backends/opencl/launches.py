"""Lowered launches on a device: their kernels, the buffers they keep, and how they are enqueued."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.implementations import Task, choose
from dispatcher.backends.opencl.lowered import Counter, Lowered, Rows, Scratch, Table, Tensor, Value, Weights
from dispatcher.backends.opencl.render import KernelOperands
from dispatcher.backends.opencl.runtime import Kernel, OpenClRuntime
from dispatcher.interface import PlannedLaunch, Tensors
from dispatcher.ops.steps import ScalarOperand, TensorOperand


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """True when two C-contiguous arrays of one shape and dtype hold the same bytes (NaN included)."""
    bits = f"u{a.itemsize}"
    return a.shape == b.shape and bool((a.view(bits) == b.view(bits)).all())


def packed_names(argument: Weights | KernelOperands) -> list[str]:
    """The tensors that a packed argument is made from."""
    if isinstance(argument, Weights):
        return [argument.name]
    return [operand.name for _, operand in argument.entries if isinstance(operand, TensorOperand)]


@dataclass(frozen=True)
class Made:
    """A device buffer made from some tensors, and what they were then.

    Attributes:
        sources: copies of the tensors.
        buffer: made from these copies.
        instead: the algorithm to run on them in place of this one, where kernels are not right on them; or None.
    """

    sources: Tensors
    buffer: Any
    instead: str | None = None


#: What a call leaves for the next one: by value, and by launch and number of an argument.
Kept: TypeAlias = dict[tuple[Any, int], Any]


@dataclass
class Call:
    """The buffers of one call, the events of its launches, and what their guards hold, with what brings it here.

    Values ``between`` launches, which are among ``values``, and ``rows`` are in buffers that are kept.
    """

    queue: Any
    kept: Kept
    values: dict[int, Any]
    between: Mapping[int, Any] = field(default_factory=dict)
    rows: Mapping[int, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)
    guards: dict[tuple[Launch, int], tuple[np.ndarray, Any]] = field(default_factory=dict)


class Launch:
    """One launch on a device. The state of its calls is in :data:`Kept`; they take turns.

    Args:
        runtime: the device.
        lowered: what to launch.
        kernel: built from it; nobody else sets its arguments.
        real: float32 or float64.
        planned: for people.
    """

    def __init__(
        self, runtime: OpenClRuntime, lowered: Lowered, kernel: Kernel, real: np.dtype[Any], planned: PlannedLaunch
    ) -> None:
        self._runtime, self.lowered, self._kernel, self._real = runtime, lowered, kernel, real
        self.planned = planned
        arguments = list(enumerate(lowered.arguments))
        self._packed = [(position, each) for position, each in arguments if isinstance(each, Weights | KernelOperands)]
        self.packed = [name for _, each in self._packed for name in packed_names(each)]
        self._memory = [(position, each) for position, each in arguments if isinstance(each, Table | Scratch | Counter)]
        self._changing = [(position, each) for position, each in arguments if isinstance(each, Value | Rows | Tensor)]
        self._set: dict[int, Any] = {}  # which of these are set to a buffer that stays
        for position, each in arguments:
            if isinstance(each, np.integer):
                kernel.raw.set_arg(position, each)
        self._guards = [position for position, each in arguments if isinstance(each, Counter) and each.guarded]

    @property
    def scratch_bytes(self) -> int:
        """Memory of its own."""
        elements = sum(each.elements for each in self.lowered.arguments if isinstance(each, Scratch))
        return elements * self._real.itemsize

    def prepare(self, kept: Kept, tensors: Tensors, changed: Collection[str]) -> str | None:
        """Bring packed weights and operands up to date with those tensors that may have ``changed``; the algorithm to
        use instead when the weights ask for one."""
        instead = None
        for position, each in self._packed:
            made: Made | None = kept.get((self, position))
            if made is None or not all(
                same_bytes(made.sources[name], tensors[name]) for name in made.sources if name in changed
            ):
                made = kept[self, position] = self._make(each, tensors)
                self._kernel.raw.set_arg(position, made.buffer)
            instead = instead or made.instead
        return instead

    def _make(self, argument: Weights | KernelOperands, tensors: Tensors) -> Made:
        sources = {name: np.array(tensors[name]) for name in packed_names(argument)}
        if isinstance(argument, KernelOperands):
            return Made(sources, self._runtime.constant(self._values(argument, sources)))
        weight = np.asarray(sources[argument.name], self._real)
        # Zeros stand for what lies outside the tensor, and zero times infinity is not zero.
        instead = "gather" if not np.isfinite(weight).all() else None if argument.suited(weight) else "direct"
        with np.errstate(invalid="ignore"):
            return Made(sources, self._runtime.constant(argument.pack(weight)), instead)

    def _values(self, operands: KernelOperands, tensors: Tensors) -> np.ndarray:
        """The ``operands`` buffer: scalars, and per-channel tensors of the current call."""
        values = np.zeros(operands.size, self._real)
        for offset, operand in operands.entries:
            if isinstance(operand, ScalarOperand):
                values[offset] = operand.value
            elif isinstance(operand, TensorOperand):
                values[offset : offset + operand.shape[1]] = np.ravel(tensors[operand.name])
        return values

    def met_nonfinite(self, call: Call) -> bool:
        """Whether the finished launch met data that it is not right on; clears the flag."""
        met = False
        for position in self._guards:
            flags, copied = call.guards[self, position]
            if flags[2]:
                met = True
                flags[:] = 0
                if copied is not None:
                    cl.enqueue_copy(call.queue, call.kept[self, position], flags, is_blocking=True)
        return met

    def _first(self, argument: Table | Scratch | Counter, queue: Any) -> Any:
        """The buffer of an argument as the first call finds it."""
        if isinstance(argument, Scratch):
            scratch = self._runtime.buffer(self.scratch_bytes)
            cl.enqueue_fill_buffer(queue, scratch, self._real.type(0), 0, self.scratch_bytes)
            return scratch
        if isinstance(argument, Table):
            return self._runtime.constant(argument.numbers)
        zeros = np.zeros(3, np.int32)  # where the host may read it in place, no command has to fetch it
        return cl.SVM(zeros) if self._runtime.facts.any_pointer else self._runtime.constant(zeros)

    def enqueue(self, call: Call) -> None:
        """Enqueue the kernel. Arguments that stay were set when they were made: each takes PyOpenCL up to 7 us."""
        kernel, lowered = self._kernel.raw, self.lowered
        for position, each in self._memory:
            if (self, position) not in call.kept:
                call.kept[self, position] = self._first(each, call.queue)
                kernel.set_arg(position, call.kept[self, position])
        for position, argument in self._changing:
            match argument:
                case Value():
                    value, stays = call.values[argument.number], argument.number in call.between
                case Rows():
                    value, stays = call.rows[argument.value], True
                case Tensor():
                    value, stays = call.tensors[argument.name], False
            if value is not self._set.get(position):
                kernel.set_arg(position, value)
                self._set[position] = value if stays else None  # a caller's array is not kept alive
        event = cl.enqueue_nd_range_kernel(call.queue, kernel, (lowered.items,), (lowered.local,))
        call.events.append((self.planned.name, event))
        for position in self._guards:
            counter = call.kept[self, position]
            if isinstance(counter, cl.SVM):
                call.guards[self, position] = counter.mem, None
            else:  # whoever waits for the result waits for this as well
                flags = np.empty(3, np.int32)
                copied = cl.enqueue_copy(call.queue, flags, counter, is_blocking=False)
                call.guards[self, position] = flags, copied


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
        kernel = runtime.kernel(lowered.text, lowered.kernel)
        info = cl.kernel_work_group_info
        most = kernel.raw.get_work_group_info(info.WORK_GROUP_SIZE, runtime.device)
        taken = kernel.raw.get_work_group_info(info.LOCAL_MEM_SIZE, runtime.device)
        if lowered.local == 1 or (lowered.local <= most and taken <= task.target.limits.local_memory):
            planned = replace(lowered.planned, rejected=rejected)
            return Launch(runtime, lowered, kernel.copy(), task.real, planned)
        if lowered.local > most:
            limits = replace(limits, work_items=lowered.local // 2)
        else:
            limits = replace(limits, local_memory=lowered.local_bytes // 2)
    return None
