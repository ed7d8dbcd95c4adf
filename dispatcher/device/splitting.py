"""Working on a batch in parts: one after another where memory is short, side by side on several devices.

Of several devices used as one, each takes a share that goes with its measured speed.

An operator can be split when its batch size is a size parameter that means nothing but the batch, and no step
mixes batch items. Each part is an operator of its own, with a smaller batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dispatcher import registry
from dispatcher.device.selftest import speed
from dispatcher.errors import DeviceError, DeviceMemoryError
from dispatcher.interface import Backend, Device, Executable, PlannedLaunch, Tensors, Timings
from dispatcher.problem.expressions import Expression
from dispatcher.problem.operator import Operator, bind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Batch items from ``start`` up to ``stop``, and what computes them.

    ``place`` is the device's id where there are several devices.
    """

    start: int
    stop: int
    executable: Executable
    place: str = ""


def batch_parameter(operator: Operator) -> tuple[str, str]:
    """The size parameter that is the batch and nothing else.

    Returns:
        Its name and an empty text, or an empty name and why the operator cannot be split.
    """
    problem = operator.problem
    if operator.mixes_batch:
        return "", "a step mixes batch items"
    if operator.axes[:1] != (0,):
        return "", "the result has no batch axis"
    source = next(tensor for tensor in problem.tensors if tensor.name == operator.source)
    name = str((source.shape or ("",))[0])
    if problem.parameter(name) is None:
        return "", f"the batch of {operator.source} is {name}, which is not a size parameter"
    for tensor in problem.tensors:
        extents = tensor.shape or ()
        others = extents[1:] if len(extents) == problem.rank + 2 and str(extents[0]) == name else extents
        if any(name in extent.names for extent in others):
            return "", f"{name} is more than the batch of tensor {tensor.name}"
    for spec in problem.pipeline:
        named = [value for value in spec.fields.values() if value == name]  # an axis' number
        if named or any(name in expression.names for expression in _expressions(tuple(spec.fields.values()))):
            return "", f"{name} is a number that {spec.op} uses"
    return name, ""


def batched_tensors(operator: Operator, parameter: str) -> set[str]:
    """The names of the input tensors whose first axis is the batch, ``parameter``."""
    tensors = operator.problem.tensors
    return {tensor.name for tensor in tensors if tensor.shape and str(tensor.shape[0]) == parameter}


def _expressions(value: Any) -> Iterator[Expression]:
    if isinstance(value, Expression):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _expressions(part)


def with_batch(operator: Operator, parameter: str, batch: int) -> Operator:
    """The same operator for another number of batch items."""
    sizes = {**operator.sizes, parameter: batch}
    return bind(operator.problem, sizes, operator.scalars, dtype=operator.dtype, precision=operator.precision)


def compile_within_memory(
    backend: Backend, operator: Operator, device: Device, options: Mapping[str, Any], least_parts: int = 1
) -> Executable:
    """Compile ``operator``, in as few parts of the batch as its memory makes necessary.

    Args:
        backend: the device's backend.
        operator: what to compile; not empty.
        device: where.
        options: for the backend.
        least_parts: parts to begin with.

    Raises:
        DeviceMemoryError: not even one batch item fits, or the batch cannot be split.
    """
    failure: DeviceMemoryError | None = None
    if least_parts <= 1:
        try:
            return backend.compile(operator, device, options)
        except DeviceMemoryError as error:
            failure = error
    batch = operator.batch
    parameter, reason = batch_parameter(operator)
    parts = max(2, least_parts)
    while parameter and parts <= 2 * batch - 1:
        size = -(-batch // min(parts, batch))
        try:
            made = _equal_parts(backend, operator, device, options, parameter, size)
        except DeviceMemoryError as error:
            failure = error
            if size == 1:
                break
            parts *= 2
            continue
        _log.info("%s works on %d batch items at a time on %s", operator.problem.name, size, device.id)
        return PartwiseExecutable(operator, parameter, made)
    if failure is None:
        failure = DeviceMemoryError(f"{operator.problem.name} does not fit on {device.id}, one batch item at a time")
    if reason:
        raise DeviceMemoryError(f"{failure} (it cannot be split over the batch: {reason})") from failure
    raise failure


def _equal_parts(
    backend: Backend, operator: Operator, device: Device, options: Mapping[str, Any], parameter: str, size: int
) -> list[Part]:
    """Parts of ``size`` batch items, the last one perhaps smaller; equal ones share an executable."""
    batch = operator.batch
    executables: dict[int, Executable] = {}
    parts = []
    for start in range(0, batch, size):
        count = min(size, batch - start)
        if count not in executables:
            executables[count] = backend.compile(with_batch(operator, parameter, count), device, options)
        parts.append(Part(start, start + count, executables[count]))
    return parts


def shares(batch: int, speeds: Sequence[float]) -> list[int]:
    """Divide ``batch`` items in proportion to speeds; equally where a speed is not known (zero)."""
    if not all(each > 0 for each in speeds):
        speeds = [1.0] * len(speeds)
    exact = [batch * each / sum(speeds) for each in speeds]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(counts)), key=lambda place: (counts[place] - exact[place], -speeds[place]))
    for place in by_rest[: batch - sum(counts)]:
        counts[place] += 1
    return counts


class PartwiseExecutable:
    """Runs parts of a batch, one after another or, on several devices, side by side."""

    def __init__(
        self, operator: Operator, parameter: str, parts: Sequence[Part], *, side_by_side: bool = False
    ) -> None:
        self._operator, self._parts, self._side_by_side = operator, tuple(parts), side_by_side
        self._batched = batched_tensors(operator, parameter)

    @property
    def count(self) -> int:
        """Parts that run one after another."""
        return 1 if self._side_by_side else len(self._parts)

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        """The launches of every part; parts that make the same ones are listed once."""
        launches: list[PlannedLaunch] = []
        for executable in dict.fromkeys(part.executable for part in self._parts):
            own = [part for part in self._parts if part.executable is executable]
            items = f"batch items {own[0].start} to {own[-1].stop - 1}"
            if len(own) > 1:
                items += f", {own[0].stop - own[0].start} at a time"
            note = f"{items} on {own[0].place}" if own[0].place else items
            for launch in executable.launches:
                launches.append(replace(launch, note=f"{note}; {launch.note}" if launch.note else note))
        return launches

    def __call__(
        self, tensors: Tensors, output: np.ndarray | None = None, timings: Timings | None = None
    ) -> np.ndarray:
        """Run every part into its slice of the result; see ``Executable``."""
        operator = self._operator
        result = np.empty(operator.output_shape, operator.dtype) if output is None else output
        own = [None if timings is None else Timings() for _ in self._parts]
        starts = [0.0 for _ in self._parts]

        def run(number: int) -> None:
            part = self._parts[number]
            starts[number] = time.perf_counter()
            items = slice(part.start, part.stop)
            inputs = {**tensors, **{name: tensors[name][items] for name in self._batched}}
            part.executable(inputs, result[items], own[number])

        if self._side_by_side:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(len(self._parts), "dispatcher", partial(np.seterr, all="ignore")) as pool:
                for done in [pool.submit(run, number) for number in range(len(self._parts))]:
                    done.result()
        else:
            for number in range(len(self._parts)):
                run(number)
        if timings is not None:
            self._add_up(timings, own, starts)
        return result

    def _add_up(self, timings: Timings, parts: Sequence[Timings | None], starts: Sequence[float]) -> None:
        """The times of one part after another, or of the slowest of several at once."""
        measured = [part for part in parts if part is not None]
        total = max if self._side_by_side else sum
        timings.upload_s += total(part.upload_s for part in measured)
        timings.kernel_s += total(part.kernel_s for part in measured)
        timings.download_s += total(part.download_s for part in measured)
        clocks = {part.clock for part in measured}
        timings.clock = clocks.pop() if len(clocks) == 1 else "host"
        timings.shared_memory = all(part.shared_memory for part in measured)
        for part, start, one in zip(self._parts, starts, measured, strict=True):
            timings.launches += one.launches
            timings.parts.append((part.place, start, one))


def part_count(executable: Executable) -> int:
    """Parts of the batch that run one after another."""
    return executable.count if isinstance(executable, PartwiseExecutable) else 1


# ---- several devices ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class JoinedDevice(Device):
    """Devices that are used as one.

    Attributes:
        members: the devices, in the order in which they take their shares of the batch.
        label: what a user wrote to name them, such as ``all-of:opencl``.
    """

    members: tuple[Device, ...] = ()
    label: str = ""

    @property
    def id(self) -> str:
        """What a user writes to name it."""
        return self.label


def join(label: str, members: Sequence[Device]) -> JoinedDevice:
    """One device out of several usable ones.

    Raises:
        DeviceError: a device is among them twice.
    """
    ids = [member.id for member in members]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise DeviceError(f"{label} names {twice} twice; name each device once")
    kinds = {member.kind for member in members}
    return JoinedDevice(
        backend="all-of",
        index=0,
        name=" + ".join(f"{member.id} {member.name}" for member in members),
        kind=kinds.pop() if len(kinds) == 1 else "unknown",
        facts={member.id: member.name for member in members},
        members=tuple(members),
        label=label,
    )


class JoinedBackend:
    """Hands shares of a batch to the backends of a :class:`JoinedDevice`; see ``Backend``."""

    name = "all-of"

    def probe(self) -> Sequence[Device]:
        """Nothing of its own: devices are joined on request."""
        return ()

    def supports(self, operator: Operator, device: Device) -> str | None:
        """None when every member can run its share."""
        if len(_members(device)) > 1:
            parameter, reason = batch_parameter(operator)
            if not parameter:
                return f"it cannot be split over the batch: {reason}"
        for member in _members(device):
            refusal = registry.backend(member.backend).supports(operator, member)
            if refusal is not None:
                return f"{member.id}: {refusal}"
        return None

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> PartwiseExecutable:
        """Compile each member's share for it."""
        members = _members(device)
        batch = operator.batch
        parameter, _ = batch_parameter(operator)
        counts = shares(batch, [speed(member) for member in members])
        parts, start = [], 0
        for member, count in zip(members, counts, strict=True):
            if count:
                share = operator if count == batch else with_batch(operator, parameter, count)
                backend = registry.backend(member.backend)
                executable = compile_within_memory(backend, share, member, options)
                parts.append(Part(start, start + count, executable, member.id))
                start += count
        return PartwiseExecutable(operator, parameter, parts, side_by_side=True)


def _members(device: Device) -> tuple[Device, ...]:
    assert isinstance(device, JoinedDevice)
    return device.members


JOINED: Backend = JoinedBackend()


def backend_of(device: Device) -> Backend:
    """The backend that runs ``device``, which may be several devices."""
    return JOINED if isinstance(device, JoinedDevice) else registry.backend(device.backend)
