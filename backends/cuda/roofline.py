"""What a CUDA device can do at best: two kernels that do nothing but multiply-adds, or nothing but copying."""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatcher.backends.cuda.driver import Context
from dispatcher.backends.cuda.toolkit import Kernel, Toolkit

#: Numbers that a thread keeps in registers, threads of a block, and blocks for each multiprocessor.
CHAINS, THREADS, BLOCKS_PER_PROCESSOR = 16, 256, 16
#: Rounds of multiply-adds in the launches that find out how many make a launch of :data:`RUN_S` seconds.
FIRST_ROUNDS, RUN_S = 64, 2e-3
#: Bytes that are copied; above the caches of all GPUs.
COPY_BYTES = 1 << 30
RUNS = 10

_PARAMS = np.dtype([("out", np.uint64), ("in", np.uint64), ("count", np.int64)], align=True)


class Microbenchmarks:
    """Runs the kernels of ``roofline.cu`` on a device, on the device's clock.

    Args:
        context: the opened device.
        compiler: makes the kernels.
        dtype: ``float32`` or ``float64``: of the multiply-adds.
        run_s: seconds that a launch of multiply-adds should take.
        copy_bytes: bytes that are copied, a multiple of 16; a quarter of the device's memory at most.
    """

    def __init__(
        self,
        context: Context,
        compiler: Toolkit,
        dtype: str = "float32",
        *,
        run_s: float = RUN_S,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        self.dtype = dtype
        self._context, self._compiler = context, compiler
        self._run_s = run_s
        self._words = min(copy_bytes, context.total_bytes // 4) // 16
        self._blocks = BLOCKS_PER_PROCESSOR * context.processors
        real = "double" if dtype == "float64" else "float"
        self._kernel = Kernel.of("roofline.cu", {"REAL": real, "CHAINS": CHAINS, "PARAMS_BYTES": _PARAMS.itemsize})

    @property
    def method(self) -> str:
        """How it is measured, for people."""
        return (
            f"fused multiply-adds in registers, best of {RUNS}; copying {16 * self._words >> 20} MiB of the "
            f"device's memory, best of {RUNS}; CUDA events"
        )

    def peak_gflops(self) -> float:
        """The best rate of several launches, in 1e9 operations a second."""
        threads = self._blocks * THREADS
        first_s = self._shortest("fma_chains", [8 * threads], FIRST_ROUNDS)
        rounds = max(FIRST_ROUNDS, int(FIRST_ROUNDS * self._run_s / first_s))
        seconds = self._shortest("fma_chains", [8 * threads], rounds)
        return 2.0 * CHAINS * rounds * threads / seconds / 1e9

    def copy_gbytes_per_s(self) -> float:
        """Bytes read plus bytes written, in 1e9 a second; the best of several launches."""
        nbytes = 16 * self._words
        return 2.0 * nbytes / self._shortest("copy_words", [nbytes, nbytes], self._words) / 1e9

    def _shortest(self, name: str, sizes: list[int], count: int) -> float:
        """Seconds of the shortest of several launches with buffers of these sizes."""
        context, driver = self._context, self._context.driver
        function = context.function(self._kernel, name, 0, self._compiler)
        with context.active(), context.stream() as stream:
            blocks = context.allocate(sizes)
            for block, size in zip(blocks, sizes, strict=True):
                driver.memset_d8_async(int(block), 0, size, stream)
            parameters = np.zeros((), _PARAMS)
            parameters["out"], parameters["in"] = int(blocks[0]), int(blocks[-1])
            parameters["count"] = count
            times = [self._seconds(function, name, parameters, stream) for _ in range(RUNS + 1)]
        return min(times[1:])

    def _seconds(self, function: Any, name: str, parameters: Any, stream: Any) -> float:
        driver = self._context.driver
        start, end = driver.Event(), driver.Event()
        try:
            start.record(stream)
            function(parameters[()], grid=(self._blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
            end.record(stream)
            end.synchronize()
        except driver.Error as error:
            raise self._context.failure(f"kernel {name}", error) from error
        return 1e-3 * float(end.time_since(start))


def flush(context: Context) -> None:
    """Write twice as much of the device's memory as its second-level cache holds."""
    driver = context.driver
    size = 2 * int(driver.Device(context.index).get_attribute(driver.device_attribute.L2_CACHE_SIZE) or (64 << 20))
    with context.active(), context.stream() as stream:
        (block,) = context.allocate([size])
        driver.memset_d8_async(int(block), 0, size, stream)
        stream.synchronize()
