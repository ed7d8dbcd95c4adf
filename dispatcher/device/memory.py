"""How much memory the host can still give."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np

from dispatcher.errors import DeviceMemoryError
from dispatcher.interface import Device
from dispatcher.problem.operator import Operator

#: Needs below this are not checked: reading the numbers costs more than a small call.
SMALL_BYTES = 64 << 20

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # limit and usage, of version 2 and of version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int | None:
    """Bytes that this process may still take without swapping or being killed; None where nobody says."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
    for limit, usage in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            limits.append(int(limit.read_text()) - int(usage.read_text()))
    return max(0, min(limits)) if limits else None


def check_host_memory(operator: Operator, device: Device, with_output: bool) -> None:
    """Check that a call's result, and what the reference computes it from, fit into the host's memory.

    Args:
        operator: what will run.
        device: where; only the reference computes in host memory that it takes itself.
        with_output: the result has to be allocated too.

    Raises:
        DeviceMemoryError: they do not; an allocation that big would succeed, and the process be killed later.
    """
    needed = math.prod(operator.output_shape) * np.dtype(operator.dtype).itemsize if with_output else 0
    if (
        device.kind == "reference"
    ):  # at least the operand and the result of one step, for one item, in float64
        needed += max(
            8 * (math.prod(step.input_shape[1:]) + math.prod(step.shape[1:])) for step in operator.steps
        )
    if needed <= SMALL_BYTES:
        return
    available = available_bytes()
    if available is not None and needed > available:
        raise DeviceMemoryError(
            f"{operator.problem.name} on {device.id} takes at least {needed} bytes of the host's memory, and "
            f"{available} are available; use a smaller batch or smaller sizes"
        )
