"""Opened OpenCL devices: contexts, queues, programs, and what is known of each device."""

from __future__ import annotations

import ctypes
import linecache
import logging
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from pyopencl.characterize import has_src_build_cache

from dispatcher.backends.opencl.caches import cache_folder, discard_damaged, prepare_cache
from dispatcher.backends.opencl.icd import platforms_of, prepare_icd_vendors, settings
from dispatcher.backends.opencl.memory import HostPool
from dispatcher.backends.opencl.target import Facts
from dispatcher.backends.opencl.workers import workers_of
from dispatcher.device.filecache import FileCache
from dispatcher.errors import BuildError

logger = logging.getLogger(__name__)

POCL = "Portable Computing Language"
#: What people call a platform that calls itself something else.
COMMON_NAMES = {POCL: "PoCL"}
#: An environment variable by which Intel's runtime compiles for older processors, and the lanes of float that these
#: have; the device tells those of the processor that is there.
ARCHITECTURE = "CL_CONFIG_CPU_TARGET_ARCH"
ARCHITECTURE_LANES = {"core-avx2": 8, "corei7-avx": 8, "corei7": 4}
BINARIES = FileCache("opencl")
#: A core's second-level cache where nobody tells, and the share of it that scratch may take.
COMMON_CORE_CACHE = 512 * 1024
CACHE_SHARE = 0.88
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: What a processor may have of such a cache.
LEAST_CORE_CACHE, MOST_CORE_CACHE = 64 * 1024, 8 << 20
#: Idle host memory that results may reuse.
KEEP_BYTES = 1 << 30
#: Nothing here may let the compiler reorder sums, drop NaN, or flush denormals.
BUILD_OPTIONS = ("-cl-std=CL1.2",)
#: Built programs that are kept for later executables.
MOST_PROGRAMS = 512
#: What :func:`first_error` says of a log without one.
NO_MESSAGE = "no message"
_QUIET = ("ignore", None, cl.CompilerWarning, None, 0)
_NO_LOG = "<error retrieving log>"  # PyOpenCL's words


def first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.replace(_NO_LOG, "").splitlines() if "error" in line.lower()]
    return next((line for line in lines if ": error:" in line), lines[0] if lines else NO_MESSAGE)


def core_cache() -> int:
    """Bytes of second-level cache for each logical processor that shares one, as runtimes run a worker on each.

    A common size where the system does not tell, or, as in some virtual machines, tells what no processor has.
    """
    for index in CACHES.glob("index*"):
        try:
            if (index / "level").read_text().strip() == "2":
                size = int((index / "size").read_text().strip().removesuffix("K")) * 1024
                sharers = int((index / "shared_cpu_map").read_text().strip().replace(",", ""), 16).bit_count()
                share = size // max(1, sharers)
                return share if LEAST_CORE_CACHE <= share <= MOST_CORE_CACHE else COMMON_CORE_CACHE
        except (OSError, ValueError):
            continue
    return COMMON_CORE_CACHE


def float_lanes(platform: Any, device: Any) -> int:
    """Native lanes of a vector of float, of the processor that a device's compiler compiles for."""
    lanes = int(device.native_vector_width_float)
    limited = ARCHITECTURE_LANES.get(os.environ.get(ARCHITECTURE, ""), lanes)
    return min(lanes, limited) if platform.name.startswith("Intel") else lanes


def build(program: Any, options: Sequence[str] = ()) -> Any:
    """Build a program with these options alone.

    PyOpenCL's own ``build`` adds some, among them those of the environment variable ``PYOPENCL_BUILD_OPTIONS``, and
    it keeps a cache, in which a process that is killed while it writes blocks all others.

    PyOpenCL's warning that the compiler said something is left out. ``warnings.catch_warnings`` would undo, or keep for
    good, what other threads do to the filters meanwhile.

    Args:
        program: a ``pyopencl._cl._Program``.

    Raises:
        pyopencl.RuntimeError: the compiler refused it; the message has its log.
    """
    warnings.filters.insert(0, _QUIET)  # type: ignore[attr-defined]
    try:
        return cl.Program(program.build(" ".join(options).encode()))
    finally:
        with suppress(ValueError):  # another thread has put back the filters of an earlier time
            warnings.filters.remove(_QUIET)  # type: ignore[attr-defined]


class Kernel:
    """A kernel, which keeps its arguments to itself: threads take turns to set them and to enqueue it.

    PyOpenCL writes a Python module for each one and leaves its text in ``linecache`` for good, under a name that it
    looks for among all others there. So there is one for all threads, they are made one at a time, and the text goes.

    Args:
        program: the built program.
        name: of the kernel.
    """

    _making = threading.Lock()

    def __init__(self, program: Any, name: str) -> None:
        self._lock, self._program, self._name = threading.Lock(), program, name
        with self._making:
            self.raw = cl.Kernel(program, name)
            for entry in [entry for entry in list(linecache.cache) if f"pyopencl invoker for '{name}'" in entry]:
                linecache.cache.pop(entry, None)

    def copy(self) -> Kernel:
        """The same kernel, with arguments of its own."""
        return Kernel(self._program, self._name)

    def enqueue(self, queue: Any, items: int, local: int | None, *arguments: Any) -> Any:
        """Enqueue ``items`` work-items in groups of ``local``; returns the event."""
        with self._lock:
            self.raw.set_args(*arguments)
            return cl.enqueue_nd_range_kernel(queue, self.raw, (items,), None if local is None else (local,))


class OpenClRuntime:
    """One device with its context. Programs are built once for each source text.

    Args:
        rates: of its register tiles; see :attr:`dispatcher.backends.opencl.target.Facts.rates`.
    """

    def __init__(self, platform: Any, device: Any, rates: str = "") -> None:
        self.platform, self.device, self._rates = platform, device, rates
        if "portable computing" in platform.name.lower():
            discard_damaged(cache_folder())
        self.workers = workers_of(platform.name)
        with self.workers.starting():  # as Intel's runtime does here
            self.context = cl.Context([device])
        self.host = HostPool(KEEP_BYTES)
        self._settings = repr(settings())
        self._programs: dict[str, tuple[Any, dict[str, Kernel]]] = {}
        self._lock = threading.Lock()

    @cached_property
    def facts(self) -> Facts:
        device = self.device
        cpu = bool(device.type & cl.device_type.CPU)
        vec = min(16, max(4, float_lanes(self.platform, device))) if cpu else 1
        doubles = int(device.native_vector_width_double)
        return Facts(
            cpu=cpu,
            compute_units=device.max_compute_units,
            vec=vec,
            vec_double=(max(2, vec // 2) if cpu else 1) if doubles else 0,
            cache=int(CACHE_SHARE * core_cache()),
            global_memory=device.global_mem_size,
            largest_buffer=device.max_mem_alloc_size,
            unified=bool(device.host_unified_memory),
            any_pointer=_any_pointer(device),
            rates=self._rates,
        )

    def queue(self) -> Any:
        """A new in-order queue that records times."""
        return cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)

    def kernel(self, text: str, name: str) -> Kernel:
        """The kernel ``name`` of the program built from ``text``. Both are made once, whoever asks at the same time.

        Raises:
            BuildError: with the compiler's first error line and its whole log.
        """
        with self._lock:
            if text not in self._programs:
                self._programs[text] = self._cached(text) or self._build(text), {}
            self._programs[text] = program, kernels = self._programs.pop(text)  # behind those asked for longer ago
            if len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            if name not in kernels:
                kernels[name] = Kernel(program, name)
            return kernels[name]

    def _build(self, text: str) -> Any:
        # A compiler that fails without a word may have met another process in a folder of its own cache. A comment
        # gives the program another folder there: first one for all processes, then one for this process alone.
        for comment in ("", "\n// again", f"\n// {os.getpid()}"):
            try:
                built = build(cl._cl._Program(self.context, text + comment), BUILD_OPTIONS)
            except cl.RuntimeError as error:
                failure = error
                if first_error(str(error)) != NO_MESSAGE:
                    break
            else:
                if self._use_cache:
                    BINARIES.put(self._key(text), built.get_info(cl.program_info.BINARIES)[0])
                return built
        raise BuildError(self._build_message(str(failure)), str(failure)) from failure

    def _cached(self, text: str) -> Any:
        """The program from a cached binary; None when there is none that the runtime still takes."""
        binary = BINARIES.get(self._key(text)) if self._use_cache else None
        if binary is None:
            return None
        try:
            return build(cl._cl._Program(self.context, [self.device], [binary]))
        except cl.Error as error:
            logger.info("a cached program is of no use any more: %s", error)
            return None

    @cached_property
    def _use_cache(self) -> bool:
        """Some runtimes keep compiled programs themselves."""
        return not has_src_build_cache(self.device)

    @cached_property
    def identity(self) -> str:
        """What results that hold for this device and this version of its driver are filed under."""
        device, platform = self.device, self.platform
        return "\0".join((platform.name, platform.version, device.name, device.driver_version))

    def _key(self, text: str) -> str:
        return "\0".join((self.identity, self._settings, *BUILD_OPTIONS, text))

    def _build_message(self, log: str) -> str:
        return f"{self.device.name.strip()}: the OpenCL compiler refused a kernel: {first_error(log)}"

    def buffer(self, nbytes: int) -> Any:
        """A device buffer of at least one element."""
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(8, nbytes))

    def constant(self, array: np.ndarray) -> Any:
        """A device buffer with a copy of ``array``."""
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        return cl.Buffer(self.context, flags, hostbuf=np.ascontiguousarray(array))

    def wrap(self, array: np.ndarray, *, writable: bool = False) -> Any:
        """A kernel argument that is the host memory itself, for devices that share memory with the host.

        A buffer over a pointer that is not aligned to the device's liking is copied behind the scenes by some
        runtimes; where the device takes any pointer, none is made.
        """
        if self.facts.any_pointer:
            return cl.SVM(array if array.flags.writeable else _same_memory(array))
        access = cl.mem_flags.WRITE_ONLY if writable else cl.mem_flags.READ_ONLY
        return cl.Buffer(self.context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=array)


def _same_memory(array: np.ndarray) -> np.ndarray:
    """A view that claims to be writable, for PyOpenCL, which asks that of memory that kernels only read.

    The caller keeps ``array`` alive.
    """
    view: np.ndarray = array.view()
    try:
        view.flags.writeable = True
    except ValueError:  # its owner may not write to it either
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        return np.ctypeslib.as_array(memory)
    return view


def _any_pointer(device: Any) -> bool:
    try:
        return bool(device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM)
    except (cl.Error, AttributeError):
        return False  # OpenCL 1.x knows no shared virtual memory


@dataclass(frozen=True)
class Found:
    """A device that the loader lists: where it stands and what it is called."""

    platform: Any
    device: Any
    name: str
    kind: str
    details: Mapping[str, str | int | float]


def _platforms(runtimes: Sequence[str]) -> list[Any]:
    """Every platform that the loader lists, and those that it would list if nobody had asked it before.

    The loader looks for runtimes once in a process. Where somebody else made it do so, it has not heard of all of ours,
    whose libraries are ``runtimes``.
    """
    try:
        listed, failure = cl.get_platforms(), None
    except cl.Error as error:
        listed, failure = [], error
    if len(listed) < len(runtimes):
        addresses = [address for library in runtimes for address in platforms_of(library)]
        found = [cl.Platform.from_int_ptr(address) for address in dict.fromkeys(addresses)]
        listed += [platform for platform in found if platform not in listed]
    if failure is not None and not listed:
        raise failure
    return listed


def find_devices() -> list[Found]:
    """Every device of every platform, in the loader's order; platforms without devices are passed over.

    Raises:
        pyopencl.Error: no platform at all.
    """
    runtimes = [entry.library for entry in prepare_icd_vendors().entries if entry.used]
    prepare_cache()
    found = []
    with workers_of(POCL).starting():
        platforms = _platforms(runtimes)
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error as error:
            if getattr(error, "code", None) == cl.status_code.DEVICE_NOT_FOUND:
                continue
            raise
        for device in devices:
            kind = "unknown"
            if device.type & cl.device_type.GPU:
                kind = "gpu"
            elif device.type & cl.device_type.CPU:
                kind = "cpu"
            details: dict[str, str | int | float] = {
                "platform": platform.name.strip(),
                "platform_version": platform.version.strip(),
                "driver": device.driver_version.strip(),
                "compute_units": device.max_compute_units,
                "memory_bytes": device.global_mem_size,
                "largest_buffer_bytes": device.max_mem_alloc_size,
                "vector_width_float": float_lanes(platform, device),
                "fp64": bool(device.native_vector_width_double),
            }
            runtime = platform.name.strip()
            runtime = COMMON_NAMES.get(runtime, runtime)
            name = f"{device.name.strip()} ({runtime}, {device.driver_version.strip()})"
            found.append(Found(platform, device, name, kind, details))
    return found
