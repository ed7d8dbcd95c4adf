"""What the system lets this process take: memory and processor time, by control groups and by resource limits.

A control group's limits hold for all that is in it, groups below it included, so that the tightest one on the way up
from the own group counts. Both versions of control groups may be mounted at once.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_UNLIMITED = 1 << 62  # version 1 writes a number beyond this where there is no limit

#: Memory that is in use, of version 2 and of version 1, and what may limit it.
_USAGE = ("memory.current", "memory.usage_in_bytes")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
#: Page cache and the like, which is in use only as long as nobody needs the memory; version 1 has ``total_`` before the
#: names where groups below are counted.
_DROPPABLE = ("inactive_file", "active_file", "slab_reclaimable")
#: Resource limits, and what of a process counts for them.
_RESOURCES = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def _text(path: Path) -> str:
    """The contents of a file of the system; empty where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return ""


def table(path: Path) -> dict[str, int]:
    """The numbers of a file whose lines are ``name number``, with a unit of kB or without one, in bytes."""
    found = {}
    for line in _text(path).splitlines():
        with contextlib.suppress(ValueError, IndexError):
            name, number, *unit = line.split()
            found[name.rstrip(":")] = int(number) << (10 if unit == ["kB"] else 0)
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in one that says ``max``."""
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return None


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups that hold this process and may limit it, from its own to the outermost."""
    mounts = []
    for line in _text(_PROC / "self/mountinfo").splitlines():
        fields, _, kind = line.partition(" - ")
        root, point = (Path(name.replace("\\040", " ")) for name in fields.split()[3:5])
        mounts.append((root, point, kind.split()))
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        group = Path(name)
        for root, point, (kind, _, *options) in mounts:
            mounted = kind == "cgroup" and controller in ",".join(options).split(",")
            if not (mounted and controller in controllers.split(",") if controllers else kind == "cgroup2"):
                continue
            inside = group.is_relative_to(root) and ".." not in group.parts
            folder = point / group.relative_to(root) if inside else point
            while folder != point:
                yield folder
                folder = folder.parent
            yield point


def memory_rooms() -> Iterator[int]:
    """For each limit that holds for this process, the bytes that are left of it; below 0 where it is exceeded."""
    for group in _groups("memory"):
        limits = [limit for limit in (_number(group / name) for name in _LIMITS) if limit is not None]
        if limits and min(limits) < _UNLIMITED:
            used = next((found for found in (_number(group / name) for name in _USAGE) if found is not None), 0)
            counts = table(group / "memory.stat")
            yield min(limits) - used + sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _DROPPABLE)
    own = table(_PROC / "self/status")
    for kind, counted in _RESOURCES:
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - own.get(counted, 0)


def processors() -> float:
    """Processors whose time this process may use at most by the quotas of its control groups; infinite without any."""
    least = math.inf
    for group in _groups("cpu"):
        quota, period = f"{_text(group / 'cpu.max')} - -".split()[:2]  # version 2: both in one file
        if quota == "-":
            quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() or "-" for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            least = min(least, int(quota) / int(period))
    return least
