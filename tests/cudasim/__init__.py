"""A CPU stand-in for the CUDA driver: the product's CUDA code and its .cu files run in tests without a GPU.

    DISPATCHER_CUDA_SIM=1 python -m pytest

`activate()` builds what is missing, loads the stand-in libcuda.so.1 before PyCUDA is imported and names
the compiler stand-in in DISPATCHER_NVCC. Nothing here is part of the installed package, and nothing loads
unless asked for. README.md beside this file says what it can and can't do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.cudasim.build import BuildError, driver_library
from tests.cudasim.cache import SOURCES

__all__ = ["Activation", "BuildError", "NotRequestedError", "RealDriverError", "activate", "emulate", "requested"]

SWITCH = "DISPATCHER_CUDA_SIM"
DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # any of them speaks for a real GPU


class NotRequestedError(RuntimeError):
    """DISPATCHER_CUDA_SIM is not 1: the simulator stays away."""


class RealDriverError(RuntimeError):
    """A real CUDA driver is in this process or on this machine: the simulator must not shadow it."""


@dataclass(frozen=True)
class Activation:
    """The simulator, loaded into this process.

    Attributes:
        library: The stand-in libcuda.so.1.
        nvcc: The executable that stands in for nvcc.
    """

    library: Path
    nvcc: Path

    def child_environment(self) -> dict[str, str]:
        """Environment variables under which a child process finds the simulator as its CUDA driver."""
        folders = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {SWITCH: "1", **self._compiler_environment(), "LD_LIBRARY_PATH": ":".join(folders)}

    def _compiler_environment(self) -> dict[str, str]:
        return {"DISPATCHER_NVCC": str(self.nvcc), f"{SWITCH}_PYTHON": sys.executable}


_active: Activation | None = None


def requested() -> bool:
    """Whether the environment asks for the simulator."""
    return os.environ.get(SWITCH) == "1"


def _real_driver() -> str | None:
    """What speaks for a real driver on this machine, or None."""
    for device in DEVICE_FILES:
        if Path(device).exists():
            return f"{device} exists"
    stand_in = os.path.realpath(driver_library())
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith("libcuda.so") and os.path.realpath(path) != stand_in:
            return f"{path} is loaded"
    return None


def activate() -> Activation:
    """Makes the simulator this process's CUDA driver. Calling it again does nothing new.

    Raises:
        NotRequestedError: The environment does not ask for it.
        RealDriverError: There is a real driver.
        BuildError: The simulator did not build.
    """
    global _active  # noqa: PLW0603 - a process has one driver
    if _active is not None:
        return _active
    if not requested():
        raise NotRequestedError(f"the CUDA simulator loads only when {SWITCH}=1; it is {os.environ.get(SWITCH)!r}")
    real = _real_driver()
    if real is not None:
        raise RealDriverError(f"the CUDA simulator does not load beside a real driver: {real}; unset {SWITCH}")
    library = driver_library()
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # PyCUDA's libcuda.so.1 is then this one: same SONAME
    _active = Activation(library=library, nvcc=SOURCES / "nvcc")
    os.environ.update(_active._compiler_environment())
    return _active


@contextmanager
def emulate(
    *,
    devices: int | None = None,
    arch: str | None = None,
    memory_mb: int | None = None,
    poison: int | None = None,
    processors: int | None = None,
    alignment: Literal[16, 32, 64, 128, 256] | None = None,
    schedule: Literal["forward", "reverse"] | None = None,
    async_copy: Literal["late", "eager"] | None = None,
    mma: Literal["rn", "rz"] | None = None,
    threads: int | None = None,
    blocks: slice | None = None,
    streams: Literal["eager", "late"] | int | None = None,
) -> Iterator[None]:
    """Changes what the simulator emulates, for the length of a `with` block. None leaves a setting as it is.

    Each setting is also an environment variable, DISPATCHER_CUDA_SIM_ and its name in capitals.

    Args:
        devices: How many devices there are (0 to 8; 2 by default).
        arch: Compute capability, such as "8.0", or one per device, "8.0,9.0"; "8.9" by default.
        memory_mb: Memory of each device; 8192 by default. It may be more than this machine has: an allocation above
            64 MB takes memory only where it is written.
        poison: The byte that fresh device memory is full of; 255 by default, which makes NaN. With others a stray
            read shows where a kernel deals with NaN.
        processors: Multiprocessors of each device; 4 by default.
        alignment: Of allocations; 256 by default, as on a GPU. With 16, reads closer behind an allocation's
            end are caught as well.
        schedule: In which order threads and blocks run. "reverse" finds missing barriers that "forward"
            hides.
        async_copy: Whether cp.async copies at its wait ("late", the default) or at once ("eager").
        mma: Whether tensor-core sums are rounded ("rn", the default) or truncated as on real ones ("rz").
        threads: How many OS threads run a launch's blocks; as many as there are CPUs by default.
        streams: When work in streams runs: at once ("eager", the default); only when somebody waits for it, and nothing
            else before ("late"); or then together with any other work that may run, by this seed for the choice.
        blocks: Run only these of each launch's blocks, such as slice(-8, None) for the last eight; all by default.
    """
    wanted = {
        "DEVICES": devices,
        "ARCH": arch,
        "MEMORY_MB": memory_mb,
        "POISON": poison,
        "PROCESSORS": processors,
        "ALIGNMENT": alignment,
        "SCHEDULE": schedule,
        "ASYNC_COPY": async_copy,
        "MMA": mma,
        "THREADS": threads,
        "STREAMS": streams,
        "BLOCKS": blocks and ":".join("" if n is None else str(n) for n in (blocks.start, blocks.stop)),
    }
    changes = {f"{SWITCH}_{name}": str(value) for name, value in wanted.items() if value is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
