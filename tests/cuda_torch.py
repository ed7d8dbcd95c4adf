"""A stand-in for PyTorch on CUDA, which runs on the simulator: tensors, streams, graphs, and memory as its allocator
gives it. PyTorch itself needs a GPU for these.

Memory belongs to the stream that it was allocated in: given back, it is that stream's again at once, full of NaN by
then, but not before streams that it was recorded for have passed. What a capture allocates stays its graph's.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda import driver

_current = threading.local()


def call(name: str, *arguments: Any) -> None:
    """Call the driver; fails where it does."""
    status = getattr(driver._library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: error {status}")


class Stream:
    """A stream that does not wait for the legacy default stream, as PyTorch's are."""

    def __init__(self, handle: int | None = None) -> None:
        made = ctypes.c_void_p(handle)
        if handle is None:
            with driver.context(0).active():
                call("cuStreamCreate", ctypes.byref(made), 1)
        self.cuda_stream = made.value or 0

    def synchronize(self) -> None:
        """Wait for all that is in it."""
        with driver.context(0).active():
            call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def wait_stream(self, other: Stream) -> None:
        """Go on behind what is in another stream so far."""
        with driver.context(0).active():
            driver.context(0).order(other.cuda_stream, self.cuda_stream)


_default = Stream(0)


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread."""
    return getattr(_current, "stream", _default)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """``torch.cuda.stream``."""
    before, _current.stream = current_stream(), chosen
    try:
        yield
    finally:
        _current.stream = before


class _Memory:
    """An allocation of the stream that is current when it is made."""

    def __init__(self, size: int) -> None:
        self.size, self.streams, self.owner = size, {}, current_stream()
        context = driver.context(0)
        with context.active():
            self.captured = context.capture(self.owner.cuda_stream)
            free = _free[self.owner.cuda_stream, self.captured, size]
            self.block = free.pop() if free else context.driver.mem_alloc(size)

    def __del__(self) -> None:
        context = driver.context(0)
        with context.active():
            if context.capture(self.owner.cuda_stream) == self.captured:
                for other in self.streams.values():
                    context.order(other.cuda_stream, self.owner.cuda_stream)
                address, where = ctypes.c_uint64(int(self.block)), ctypes.c_void_p(self.owner.cuda_stream)
                driver._library().cuMemsetD8Async(address, 255, ctypes.c_size_t(self.size), where)
        _free[self.owner.cuda_stream, self.captured, self.size].append(self.block)


_free: dict[tuple[int, int, int], list[Any]] = defaultdict(list)


def forget() -> None:
    """Give free memory back to the driver, after all work."""
    _free.clear()


class Tensor:
    """A contiguous tensor on cuda:0."""

    is_nested = is_quantized = requires_grad = False
    layout = "torch.strided"
    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, shape: tuple[int, ...], dtype: str = "torch.float32") -> None:
        self.shape, self.dtype = shape, dtype
        self._size = math.prod(shape) * self.element_size()
        self._memory = _Memory(self._size)

    def element_size(self) -> int:
        return np.dtype(self.dtype.removeprefix("torch.")).itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def data_ptr(self) -> int:
        return int(self._memory.block)

    def detach(self) -> Tensor:
        return self

    resolve_neg = detach

    def is_inference(self) -> bool:
        return True

    def record_stream(self, other: Stream) -> None:
        if other.cuda_stream != self._memory.owner.cuda_stream:
            self._memory.streams[other.cuda_stream] = other

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return Tensor(shape, dtype)

    def copy_(self, source: Tensor | np.ndarray) -> Tensor:
        """Copy from a tensor or from the host, in the current stream."""
        on_host = isinstance(source, np.ndarray)
        name, address = ("HtoD", source.ctypes.data) if on_host else ("DtoD", source.data_ptr())  # type: ignore[union-attr]
        with driver.context(0).active():
            target, where = ctypes.c_uint64(self.data_ptr()), ctypes.c_void_p(current_stream().cuda_stream)
            call(f"cuMemcpy{name}Async_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(self._size), where)
        return self

    def clone(self) -> Tensor:
        return Tensor(self.shape, self.dtype).copy_(self)

    def numpy(self) -> np.ndarray:
        """A copy on the host, made in the current stream and waited for; no other stream is."""
        result = np.empty(self.shape, self.dtype.removeprefix("torch."))
        with driver.context(0).active():
            source, where = ctypes.c_uint64(self.data_ptr()), ctypes.c_void_p(current_stream().cuda_stream)
            call(
                "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(result.ctypes.data), source, ctypes.c_size_t(self._size), where
            )
        current_stream().synchronize()
        return result


def tensor(array: np.ndarray) -> Tensor:
    """A copy of an array, made in the current stream."""
    return Tensor(array.shape, f"torch.{array.dtype}").copy_(np.ascontiguousarray(array))


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    status = 0  # of the latest end of a capture

    def __init__(self) -> None:
        self._executable = ctypes.c_void_p()

    @contextmanager
    def capture(self, where: Stream) -> Iterator[None]:
        """``torch.cuda.graph(self, stream=where)``."""
        graph = ctypes.c_void_p()
        with stream(where):
            with driver.context(0).active():
                call("cuStreamBeginCapture_v2", ctypes.c_void_p(where.cuda_stream), 0)
            try:
                yield
            finally:
                with driver.context(0).active():
                    CUDAGraph.status = driver._library().cuStreamEndCapture(
                        ctypes.c_void_p(where.cuda_stream), ctypes.byref(graph)
                    )
        if self.status:
            raise RuntimeError(f"cuStreamEndCapture: error {self.status}")
        with driver.context(0).active():
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_uint64(0))

    def replay(self) -> None:
        """Launch it in the current stream."""
        with driver.context(0).active():
            call("cuGraphLaunch", self._executable, ctypes.c_void_p(current_stream().cuda_stream))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be ``torch``."""
    dtypes = {name: f"torch.{name}" for name in ("float16", "float32", "float64", "uint8")}
    stand_in = SimpleNamespace(
        **dtypes,
        Tensor=Tensor,
        cuda=sys.modules[__name__],
        strided=Tensor.layout,
        empty=lambda size, dtype, device: Tensor((size,), dtype),
        is_grad_enabled=lambda: False,
        _subclasses=SimpleNamespace(FakeTensor=type("FakeTensor", (), {})),
        _C=SimpleNamespace(_functorch=SimpleNamespace(is_functorch_wrapped_tensor=lambda value: False)),
    )
    monkeypatch.setitem(sys.modules, "torch", stand_in)
