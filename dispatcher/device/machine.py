"""What is known of this machine: processor, caches, memory, versions of libraries, and how busy others keep it."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.device import limits
from dispatcher.errors import DeviceMemoryError
from dispatcher.interface import Device
from dispatcher.problem.operator import Operator

#: Cores that other programs may keep busy, as a share of the cores that this process may use; at least half a core.
BUSY_SHARE = 0.25
#: Seconds for which the machine is watched before anything is timed.
WATCH_S = 0.3
#: Last-level cache where the system does not tell.
COMMON_CACHE_BYTES = 32 << 20

#: Needs below this are not checked: reading the numbers costs more than a small call.
SMALL_BYTES = 64 << 20

_CPUS = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")


def cores() -> int:
    """Cores that this process may use: those that it may run on, fewer where a quota allows the time of fewer."""
    return max(1, min(len(_own_cpus()), math.ceil(min(limits.processors(), os.cpu_count() or 1))))


def _own_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


# ---- load --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LoadMeter:
    """The state of the processor's clocks at one moment; :meth:`foreign_cores` compares it with now.

    Attributes:
        wall_s: ``time.perf_counter``.
        own_s: processor time of this process, all threads.
        busy_s: processor time of everybody on the cores that this process may use, time taken by a hypervisor
            included; None where the system does not tell.
    """

    wall_s: float
    own_s: float
    busy_s: float | None

    @classmethod
    def start(cls) -> LoadMeter:
        """The state now."""
        return cls(time.perf_counter(), time.process_time(), _busy_seconds())

    def foreign_cores(self) -> float | None:
        """Cores that other programs kept busy since then, on average; None where the system does not tell."""
        now = LoadMeter.start()
        if self.busy_s is None or now.busy_s is None or now.wall_s <= self.wall_s:
            return None
        foreign = (now.busy_s - self.busy_s) - (now.own_s - self.own_s)
        return max(0.0, foreign / (now.wall_s - self.wall_s))


def _busy_seconds() -> float | None:
    """Seconds that the cores of this process have been busy since the system's start (Linux: /proc/stat)."""
    own = {f"cpu{number}" for number in _own_cpus()}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in own:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def foreign_load() -> float | None:
    """Cores that other programs keep busy, watched for a moment; None where the system does not tell."""
    meter = LoadMeter.start()
    time.sleep(WATCH_S)
    return meter.foreign_cores()


def busy_reason(foreign_cores: float | None) -> str | None:
    """Why the machine is too busy for timing, or None.

    Args:
        foreign_cores: cores that other programs keep busy; None where that is not known, which is no reason.
    """
    allowed = max(0.5, BUSY_SHARE * cores())
    if foreign_cores is None or foreign_cores <= allowed:
        return None
    busy = f"other programs keep {foreign_cores:.2g} of {cores()} cores busy"
    return f"{busy}, and more than {allowed:.2g} would spoil the times"


# ---- memory ------------------------------------------------------------------------------------------------
def available_bytes() -> int | None:
    """Bytes that this process may still take without swapping or being killed; None where nobody says."""
    rooms = list(limits.memory_rooms())
    available = limits.table(_MEMINFO).get("MemAvailable")
    if available is not None:
        rooms.append(available)
    return max(0, min(rooms)) if rooms else None


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
    if device.kind == "reference":  # at least the operand and the result of one step, for one item, in float64
        needed += max(8 * (math.prod(step.input_shape[1:]) + math.prod(step.shape[1:])) for step in operator.steps)
    if needed <= SMALL_BYTES:
        return
    available = available_bytes()
    if available is not None and needed > available:
        raise DeviceMemoryError(
            f"{operator.problem.name} on {device.id} takes at least {needed} bytes of the host's memory, and "
            f"{available} are available; use a smaller batch or smaller sizes"
        )


# ---- facts -------------------------------------------------------------------------------------------------
def last_level_cache_bytes() -> int:
    """Bytes of all caches of the highest level together; a common size where the system does not tell."""
    found: dict[int, dict[str, int]] = {}  # level to the cores that share a cache, and its size
    for index in _CPUS.glob("cpu[0-9]*/cache/index*"):
        try:
            level = int((index / "level").read_text())
            size = int((index / "size").read_text().strip().removesuffix("K")) * 1024
            found.setdefault(level, {})[(index / "shared_cpu_list").read_text()] = size
        except (OSError, ValueError):
            continue
    return sum(found[max(found)].values()) if found else COMMON_CACHE_BYTES


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Version of each distribution that is installed, and of Python."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_facts() -> dict[str, Any]:
    """Processor, cores, system and memory, as far as the system tells."""
    facts: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}",
    }
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        pairs = (line.partition(":") for line in text.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        facts["cpu"] = fields.get("model name", facts["cpu"])
        if "cpu family" in fields:
            facts["cpu_family_model"] = f"{fields['cpu family']}/{fields.get('model', '?')}"
        flags = set(fields.get("flags", "").split())
        facts["vector_instructions"] = [name for name in ("avx2", "fma", "avx512f") if name in flags]
        facts["virtual"] = "hypervisor" in flags
    except OSError:  # another system than Linux
        return facts
    memory = limits.table(_MEMINFO).get("MemTotal")
    return facts if memory is None else {**facts, "memory_bytes": memory}
