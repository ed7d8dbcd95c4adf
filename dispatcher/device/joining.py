"""Several devices that work on one batch together, each on a share that goes with its measured speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher import registry
from dispatcher.device.selftest import speed
from dispatcher.device.splitting import (
    Part,
    PartwiseExecutable,
    batch_parameter,
    compile_within_memory,
    shares,
    with_batch,
)
from dispatcher.errors import DeviceError
from dispatcher.interface import Backend, Device
from dispatcher.problem.operator import Operator


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
        batch = operator.output_shape[0]
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
