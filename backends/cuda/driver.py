"""The CUDA driver through PyCUDA: devices, the primary context of each, memory that is reused, and arrays
that stay there.

Nothing happens when this module is imported; PyCUDA is loaded when a device is first looked for. The primary
context is the one that other libraries in the process use, so that their arrays can be used in place. It is
made current only around our own work, in whatever thread that runs, and the thread's previous context is
restored.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.backends.cuda import toolkit
from dispatcher.device.filecache import Turns
from dispatcher.errors import DeviceError, DeviceMemoryError, InputError, KernelError, install
from dispatcher.interface import bits_of
from dispatcher.problem.dlpack import KDL_CUDA, capsule

_ALIGNMENT = 256
_PLAIN_SHARED_BYTES = 48 * 1024  # more has to be asked for
_EVENT_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LANES = 32  # streams of others that have a stream of ours to themselves
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY


def load() -> Any:
    """``pycuda.driver``, initialised.

    Raises:
        DeviceError: it cannot be used; the message says why and what to do.
    """
    if importlib.util.find_spec("pycuda") is None:
        try:
            _library()
        except OSError as error:
            raise DeviceError(
                f"the NVIDIA driver library is missing ({error}); install the NVIDIA driver, then PyCUDA"
            ) from error
        raise DeviceError(f"PyCUDA is not installed; {install('cuda')}")
    try:
        driver = importlib.import_module("pycuda.driver")
    except ImportError as error:
        if "libcuda" in str(error) or "nvcuda" in str(error):
            raise DeviceError(f"the NVIDIA driver library is missing ({error}); install the NVIDIA driver") from error
        raise DeviceError(f"PyCUDA cannot be imported: {error}") from error
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        raise DeviceError(_no_device(str(error))) from error
    if count == 0:
        raise DeviceError(_no_device("the driver counts none"))
    return driver


def _no_device(cause: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}, which may hide them"
    return f"no CUDA device is visible ({cause}){hint}"


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver tells of a device without opening it. Memory is in bytes.

    Attributes:
        name: the device's name.
        architecture: compute capability, such as 90 for 9.0.
        processors: multiprocessors.
        shared_limit: most shared memory that a block may have.
        total_bytes: memory of the device.
    """

    name: str
    architecture: int
    processors: int
    shared_limit: int
    total_bytes: int


def describe(driver: Any, index: int) -> DeviceFacts:
    """Facts of device ``index``; no context is made."""
    device = driver.Device(index)
    attribute = driver.device_attribute
    major, minor = device.compute_capability()
    return DeviceFacts(
        name=device.name(),
        architecture=10 * major + minor,
        processors=device.get_attribute(attribute.MULTIPROCESSOR_COUNT),
        shared_limit=device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        total_bytes=device.total_memory(),
    )


def footprint() -> str:
    """What listing CUDA devices depends on, as a text that changes when the driver or a setting does."""
    version = ""
    with suppress(OSError):  # there only where NVIDIA's kernel module is loaded
        version = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    settings = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(("CUDA_", "NVIDIA_", "NVCC_", "DISPATCHER_NVCC", "LD_"))
    )
    return repr((version, settings))


#: PyCUDA's allocations, by bytes.
FreeMemory = dict[int, list[Any]]


class Block:
    """Memory of a device, which goes back to its context when nobody refers to the block any more.

    Args:
        owner: the context.
        size: bytes.
        memory: PyCUDA's allocation.
        free: the memory that it becomes part of then.
    """

    _memory: Any = None  # a signal may arrive before there is any

    def __init__(self, owner: Context, size: int, memory: Any, free: FreeMemory) -> None:
        self._owner, self._size, self._free, self._memory = owner, size, free, memory

    def __int__(self) -> int:
        return int(self._memory)

    def __del__(self) -> None:
        if self._memory is not None:
            self._owner.give_back(self._size, self._memory, self._free)


@dataclass(eq=False)
class Lane:
    """A stream of ours, and memory that the calls in it use one after another.

    Attributes:
        stream: PyCUDA's.
        capture: the number of the capture that it belongs to, which becomes a CUDA graph; 0 for none.
        free: memory that nothing uses but what is in the stream already.
        kept: what the graph refers to.
    """

    stream: Any
    capture: int = 0
    free: FreeMemory = field(default_factory=lambda: defaultdict(list))
    kept: list[Any] = field(default_factory=list)


class Context:
    """One device with its primary context, streams, memory and loaded kernels. Safe to use from several
    threads."""

    def __init__(self, driver: Any, index: int) -> None:
        self.driver = driver
        self.index = index
        facts = describe(driver, index)
        self.name, self.architecture, self.processors = facts.name, facts.architecture, facts.processors
        self.shared_limit, self.total_bytes = facts.shared_limit, facts.total_bytes
        self._context = driver.Device(index).retain_primary_context()
        self._lost: str | None = None
        self._lock = threading.RLock()
        self._free: FreeMemory = defaultdict(list)
        self._streams: list[Any] = []
        self._lanes: dict[int, Lane] = {}
        self._captured: dict[tuple[int, int], Lane] = {}
        self._graphs: list[Lane] = []
        self._kept: deque[tuple[Any, Any]] = deque()
        self._modules: dict[toolkit.Kernel, Any] = {}
        self._turns = Turns()
        atexit.register(self.close)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the context current in this thread, and let it do what a capture in some stream forbids others:
        nothing here is of one unless its stream is.

        Raises:
            KernelError: an earlier failure has left the context unusable.
        """
        if self._lost is not None:
            raise KernelError(f"the CUDA context of {self.name} was lost earlier ({self._lost}); restart the process")
        mode = ctypes.c_int(_RELAXED)
        self._context.push()
        _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            with suppress(self.driver.Error) if self._lost is not None else nullcontext():
                self.driver.Context.pop()

    def failure(self, kernels: str, error: Exception) -> KernelError:
        """The error to raise when ``kernels`` failed; finds out whether the context survived. Call while
        active."""
        try:
            self.driver.mem_get_info()
        except self.driver.Error:
            self._lost = f"{kernels}: {error}"
        return KernelError(f"{kernels} failed on {self.name}: {error}")

    # ---- kernels -------------------------------------------------------------------------------------------
    def function(self, kernel: toolkit.Kernel, name: str, shared_bytes: int, compiler: toolkit.Toolkit) -> Any:
        """The kernel ``name`` of a compiled file, ready for ``shared_bytes`` of dynamic shared memory.

        Raises:
            BuildError: the compiler refused it.
            KernelError: the driver refused it.
        """
        module = self.module(kernel, compiler)
        with self.active():
            try:
                function = module.get_function(name)
                if shared_bytes > _PLAIN_SHARED_BYTES:
                    attribute = self.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                    function.set_attribute(attribute, shared_bytes)
            except self.driver.Error as error:
                raise KernelError(f"kernel {name} cannot be prepared on {self.name}: {error}") from error
            return function

    def module(self, kernel: toolkit.Kernel, compiler: toolkit.Toolkit) -> Any:
        """A compiled and loaded kernel file. Whoever asks for one that is being made waits for it; several threads may
        make different ones at the same time."""
        with self._turns(kernel):
            if kernel not in self._modules:
                image = toolkit.cubin(kernel, self.architecture, compiler, self.name)
                with self.active():  # until it is kept: a module that is dropped outside is never unloaded
                    try:
                        self._modules[kernel] = self.driver.module_from_buffer(image)
                    except (self.driver.Error, ValueError):
                        # It is no cubin, whatever its digest (PyCUDA raises a ValueError where the driver's log
                        # is not text): make it again, once.
                        image = toolkit.cubin(kernel, self.architecture, compiler, self.name, fresh=True)
                        try:
                            self._modules[kernel] = self.driver.module_from_buffer(image)
                        except self.driver.Error as error:
                            raise KernelError(f"{kernel.file} does not load on {self.name}: {error}") from error
            return self._modules[kernel]

    # ---- streams -------------------------------------------------------------------------------------------
    @contextmanager
    def stream(self) -> Iterator[Any]:
        """A stream that nobody else uses meanwhile; it waits for the legacy default stream. Use while
        active.

        At the end its work is done, also that of a body which was broken off: nothing writes any more to memory
        that others may use then.
        """
        with self._lock:
            stream = self._streams.pop() if self._streams else self.driver.Stream()
        try:
            yield stream
        finally:
            with suppress(self.driver.Error):  # the body waits too, and says what failed
                stream.synchronize()
            with self._lock:
                self._streams.append(stream)

    @contextmanager
    def lane(self, handle: int | None) -> Iterator[Lane]:
        """A lane beside stream ``handle`` of another library: it comes after what is in that stream so far, and before
        what gets there later, in a graph too. Without a handle, one that :meth:`stream` makes. Use while active.

        PyCUDA puts nothing in a stream that it did not make, hence one of ours. A stream keeps its lane, so that its
        calls share memory, and those in two streams neither wait for each other nor meet in it.
        """
        if handle is None:
            with self.stream() as stream:
                yield Lane(stream, free=self._free)
            return
        capture = self.capture(handle)
        with self._lock:
            lane = self._captured_lane(handle, capture) if capture else self._eager_lane(handle)
            self.order(handle, lane.stream.handle)
        try:
            yield lane
        except BaseException:
            with suppress(self.driver.Error, InputError):  # what failed is on its way already
                self.order(lane.stream.handle, handle)
                if not capture:
                    lane.stream.synchronize()
            raise
        self.order(lane.stream.handle, handle)

    def _eager_lane(self, handle: int) -> Lane:
        if handle not in self._lanes:
            full = len(self._lanes) == _LANES
            lane = self._lanes.pop(next(iter(self._lanes))) if full else Lane(self.driver.Stream(_NON_BLOCKING))
            self._lanes[handle] = lane
        return self._lanes[handle]

    def _captured_lane(self, handle: int, capture: int) -> Lane:
        """A lane for one capture: its memory is the graph's, for good. Its stream serves others after the capture."""
        if (handle, capture) not in self._captured:
            lanes = self._captured.items()
            ended = next((key for key, lane in lanes if self.capture(lane.stream.handle) != lane.capture), None)
            if ended is None:
                stream = self.driver.Stream(_NON_BLOCKING)
            else:
                self._graphs.append(self._captured.pop(ended))
                stream = self._graphs[-1].stream
            self._captured[handle, capture] = Lane(stream, capture)
        return self._captured[handle, capture]

    def order(self, first: int, then: int) -> None:
        """Let stream ``then`` wait for what has been put in stream ``first`` so far."""
        # PyCUDA takes no stream that it did not make, so this goes to the driver directly.
        library, event = _library(), ctypes.c_void_p()
        status = library.cuEventCreate(ctypes.byref(event), _EVENT_DISABLE_TIMING)
        if status == 0:
            status = library.cuEventRecord(event, ctypes.c_void_p(first))
            if status == 0:
                status = library.cuStreamWaitEvent(ctypes.c_void_p(then), event, 0)
            library.cuEventDestroy_v2(event)
        if status != 0:
            message = f"stream is {first}; the driver cannot let stream {then} wait for it (error {status})"
            failure = self.failure("a kernel of an earlier call", RuntimeError(message))
            raise InputError(message) if self._lost is None else failure

    def capture(self, handle: int) -> int:
        """The number of the capture that stream ``handle`` belongs to, or 0."""
        state, number = ctypes.c_int(), ctypes.c_uint64()
        status = _library().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(handle), ctypes.byref(state), ctypes.byref(number), None, None, None
        )
        if status != 0:
            raise InputError(f"stream is {handle}; the driver cannot say whether it is captured (error {status})")
        return number.value if state.value else 0

    def join(self, lane: Lane, handle: int) -> None:
        """Let a lane wait for what stream ``handle`` holds so far.

        Raises:
            InputError: the stream is captured and the lane is not, or in another capture.
        """
        capture = self.capture(handle)
        if capture == lane.capture:
            self.order(handle, lane.stream.handle)
        elif capture:
            raise InputError(
                f"stream {handle} is being captured, but the call is not in that capture; give an output whose library "
                "works in that stream, or compile with the option stream"
            )
        else:  # a graph waits for nothing outside of it
            _library().cuStreamSynchronize(ctypes.c_void_p(handle))

    def keep(self, lane: Lane, *objects: Any) -> None:
        """Keep ``objects`` alive until what is in the lane is done; for good where it is part of a graph."""
        if lane.capture:
            lane.kept += objects
            return
        event = self.driver.Event(self.driver.event_flags.DISABLE_TIMING)
        event.record(lane.stream)
        done = []  # let go of without the lock, whatever that starts
        with self._lock:
            self._kept.append((event, objects))
            while self._kept[0][0] is not event and self._kept[0][0].query():
                done.append(self._kept.popleft())

    # ---- memory --------------------------------------------------------------------------------------------
    def allocate(self, sizes: Sequence[int], free: FreeMemory | None = None) -> list[Block]:
        """Blocks of at least the given bytes, reused where possible; all or none. Use while active.

        Args:
            sizes: the bytes.
            free: where blocks come from and go back to; without it, what nothing uses any more.

        Raises:
            DeviceMemoryError: they do not fit; the message holds the bytes and the limit.
        """
        rounded = [max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT for size in sizes]
        pool = self._free if free is None else free
        with self._lock:
            blocks = [Block(self, size, pool[size].pop(), pool) if pool[size] else None for size in rounded]
            missing = sum(size for size, block in zip(rounded, blocks, strict=True) if block is None)
            try:
                if missing and missing > self.driver.mem_get_info()[0]:
                    self.trim()
                    left, total = self.driver.mem_get_info()
                    if missing > left:
                        raise DeviceMemoryError(
                            f"{sum(rounded)} bytes are needed on {self.name}, {missing} of them new, "
                            f"but {left} of its {total} bytes are free; use a smaller batch or another device"
                        )
                return [
                    Block(self, size, self.driver.mem_alloc(size), pool) if block is None else block
                    for size, block in zip(rounded, blocks, strict=True)
                ]
            except (DeviceMemoryError, self.driver.Error) as error:
                blocks.clear()
                self.trim()
                if isinstance(error, DeviceMemoryError):
                    raise
                raise DeviceMemoryError(
                    f"{sum(rounded)} bytes cannot be allocated on {self.name}, which has {self.total_bytes}: {error}"
                ) from error

    def give_back(self, size: int, memory: Any, free: FreeMemory) -> None:
        """Take a block's memory back for reuse."""
        with self._lock:  # reentrant: garbage collection can run anywhere
            free[size].append(memory)

    def trim(self) -> None:
        """Return memory that nobody uses to the driver; that of graphs stays. Use while active."""
        with self._lock:
            for lane in self._lanes.values():
                lane.stream.synchronize()
            self._kept.clear()
            for free in (self._free, *(lane.free for lane in self._lanes.values())):
                for blocks in list(free.values()):
                    while blocks:
                        blocks.pop().free()

    def close(self) -> None:
        """Give everything back, and the context itself; at exit this happens while the driver still works."""
        atexit.unregister(self.close)
        if self._lost is None:
            with suppress(self.driver.Error):
                with self.active():
                    self.trim()
                    self._streams.clear()
                    self._lanes.clear()
                    self._captured.clear()
                    self._graphs.clear()
                    self._modules.clear()
                self._context.detach()
            self._lost = "it was closed"


_contexts: dict[int, Context] = {}
_contexts_lock = threading.Lock()


def context(index: int) -> Context:
    """The context of device ``index``; made once.

    Raises:
        DeviceError: there is no such device, or it cannot be opened.
    """
    with _contexts_lock:
        if index not in _contexts:
            driver = load()
            count = driver.Device.count()
            if not 0 <= index < count:
                raise DeviceError(
                    f"cuda:{index} does not exist; this machine has {count} CUDA device(s), numbered from 0"
                )
            try:
                _contexts[index] = Context(driver, index)
            except driver.Error as error:
                raise DeviceError(f"cuda:{index} cannot be opened: {error}") from error
        return _contexts[index]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def device_of(pointer: int) -> int | None:
    """Device that a pointer belongs to, or None when the driver does not say. A context must be current."""
    ordinal = ctypes.c_int(-1)
    try:
        status = _library().cuPointerGetAttribute(
            ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, ctypes.c_uint64(pointer)
        )
    except (OSError, AttributeError):
        return None
    return ordinal.value if status == 0 else None


def interface_of(value: Any) -> dict[str, Any] | None:
    """The ``__cuda_array_interface__`` of ``value``, or None when it has none."""
    interface = getattr(value, "__cuda_array_interface__", None)
    return interface if isinstance(interface, dict) else None


class DeviceArray:
    """A result that stays on the device: C-contiguous, and usable by any library that reads
    ``__cuda_array_interface__``.

    Attributes:
        shape: extents.
        dtype: NumPy dtype of the elements.
    """

    def __init__(
        self,
        owner: Context,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        block: Block | None,
        lane: Lane | None = None,
    ) -> None:
        """``lane`` is where it is made, or None where it is complete."""
        self.shape = shape
        self.dtype = dtype
        self._owner, self._block, self._lane = owner, block, lane
        self._pointer = 0 if block is None else int(block)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str if self.dtype.kind == "f" else self.dtype.name,
            "data": (self._pointer, False),
            "strides": None,
            "version": 3,
            "stream": None if self._lane is None else self._lane.stream.handle,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (KDL_CUDA, self._owner.index)

    def __dlpack__(self, *, stream: Any = None, **versions: Any) -> Any:
        """A DLPack capsule; ``stream`` waits for the result."""
        if self._lane is not None and stream != -1:  # which stands for no stream
            with self._owner.active():
                self._owner.order(self._lane.stream.handle, stream or _LEGACY_STREAM)
        return capsule(self, self._pointer, self.shape, self.dtype, self._owner.index)

    def get(self) -> np.ndarray:
        """A copy on the host."""
        result = np.empty(self.shape, self.dtype)
        if result.nbytes:
            with self._owner.active():
                if self._lane is not None:
                    self._lane.stream.synchronize()
                self._owner.driver.memcpy_dtoh(bits_of(result), self._pointer)
        return result

    def copy(self) -> DeviceArray:
        """A copy on the device."""
        block = None
        if self.nbytes:
            with self._owner.active():
                (block,) = self._owner.allocate([self.nbytes])
                self._owner.driver.memcpy_dtod(int(block), self._pointer, self.nbytes)
        return DeviceArray(self._owner, self.shape, self.dtype, block)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on the device cannot become a NumPy array without a copy")
        return self.get() if dtype is None else self.get().astype(dtype)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device='cuda:{self._owner.index}')"
