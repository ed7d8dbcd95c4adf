"""What an OpenCL device can do at best: two kernels that do nothing but multiply-adds, or nothing but copying."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.render import defines, section
from dispatcher.backends.opencl.runtime import Kernel, OpenClRuntime

#: Vectors that a work-item keeps in registers.
CHAINS = 12
#: Work-items of a work-group on GPUs, and work-groups for each compute unit of any device: with few of them, some
#: runtimes give most to one thread.
GPU_GROUP, GROUPS_PER_UNIT = 256, 64
#: Bytes that are copied; well above common caches.
COPY_BYTES = 256 << 20
#: Seconds that a run of multiply-adds takes, long enough for the clock and short enough to be repeated.
RUN_S = 1e-3
PEAK_RUNS, COPY_RUNS, FIRST_RUNS = 50, 6, 5


class Microbenchmarks:
    """Runs the kernels of ``roofline.cl`` on a device.

    Args:
        runtime: the opened device.
        dtype: ``float32`` or ``float64``: of the multiply-adds.
    """

    def __init__(self, runtime: OpenClRuntime, dtype: str = "float32") -> None:
        facts = runtime.facts
        self.dtype = dtype
        self._runtime, self._real = runtime, np.dtype(dtype)
        self._vec = (facts.vec_double if dtype == "float64" else facts.vec) if facts.cpu else 1
        group = 1 if facts.cpu else GPU_GROUP
        self._items, self._group = GROUPS_PER_UNIT * group * facts.compute_units, group
        # A queue without profiling, as on the host's clock the two differ by what profiling costs.
        self._queue = cl.CommandQueue(runtime.context)
        real = "double" if dtype == "float64" else "float"
        values = {"REAL": real, "VEC": self._vec, "CHAINS": CHAINS, "GROUP": group, "INTERLEAVED": not facts.cpu}
        pragma = "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n" if real == "double" else ""
        text = section("roofline.cl", pragma + defines(values))
        self._fma, self._copy = runtime.kernel(text, "fma_chains"), runtime.kernel(text, "copy")
        self._out = runtime.buffer(self._items * self._vec * self._real.itemsize)
        self._steps = 1000
        rate = max(self.gflops_now() for _ in range(FIRST_RUNS))
        self._steps = max(1000, int(rate * 1e9 * RUN_S / self._flops_a_step))

    @property
    def method(self) -> str:
        """How it is measured, for people."""
        return (
            f"fused multiply-adds in registers for {1e3 * RUN_S:g} ms, best of {PEAK_RUNS}; "
            f"copying {COPY_BYTES >> 20} MiB, best of {COPY_RUNS}"
        )

    @property
    def _flops_a_step(self) -> float:
        return 2.0 * self._vec * CHAINS * self._items

    def gflops_now(self) -> float:
        """The rate of multiply-adds in one run of about :data:`RUN_S`, in 1e9 operations a second."""
        seconds = self._seconds(self._fma, self._out, np.int32(self._steps))
        return self._flops_a_step * self._steps / seconds / 1e9

    def peak_gflops(self) -> float:
        """The best rate of several runs."""
        return max(self.gflops_now() for _ in range(PEAK_RUNS))

    def copy_gbytes_per_s(self, nbytes: int = COPY_BYTES) -> float:
        """Bytes read plus bytes written in 1e9 a second, when copying ``nbytes``; the best of several runs."""
        nbytes = min(nbytes, self._runtime.facts.largest_buffer, self._runtime.facts.global_memory // 4)
        vector = self._vec * self._real.itemsize
        vectors = max(1, nbytes // (vector * self._items))
        nbytes = vectors * vector * self._items
        source, target = (self._runtime.buffer(nbytes) for _ in range(2))
        cl.enqueue_fill_buffer(self._queue, source, self._real.type(1), 0, nbytes)
        self._queue.finish()
        seconds = min(self._seconds(self._copy, source, target, np.int32(vectors)) for _ in range(COPY_RUNS))
        return 2.0 * nbytes / seconds / 1e9

    def _seconds(self, kernel: Kernel, *arguments: Any) -> float:
        start = time.perf_counter()
        kernel.enqueue(self._queue, self._items, self._group, *arguments)
        self._queue.finish()
        return time.perf_counter() - start


def probe(runtime: OpenClRuntime, copy_bytes: int) -> tuple[Callable[[], float], float]:
    """A function that measures multiply-adds a second right now, in 1e9, and the copying rate in GB/s."""
    found = Microbenchmarks(runtime)
    return found.gflops_now, found.copy_gbytes_per_s(copy_bytes)


def flush(runtime: OpenClRuntime) -> None:
    """Write twice as much of the device's memory as its cache holds."""
    nbytes = 2 * max(1 << 20, int(runtime.device.global_mem_cache_size))
    queue = cl.CommandQueue(runtime.context)
    cl.enqueue_fill_buffer(queue, runtime.buffer(nbytes), np.int32(0), 0, nbytes)
    queue.finish()
