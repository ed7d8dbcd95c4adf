"""A call that is broken off, wherever that happens, leaves a state from which the next one is right."""

from __future__ import annotations

import contextlib
import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fakes import CONV, SOFTMAX

import dispatcher
from dispatcher import registry
from dispatcher.check.inputs import random_tensors
from dispatcher.check.comparison import verify_result
from dispatcher.device.selection import backend_devices
from dispatcher.errors import DispatcherError
from dispatcher.interface import Device

PACKAGE = str(Path(dispatcher.__file__).parent)
POINTS = {"new weights": 60, "other sizes": 16, "compiling": 16}

Tensors = dict[str, np.ndarray]


def leaves_with(frame: FrameType) -> bool:
    """Whether a ``with`` statement is about to be left as usual: Python lets no signal in between body and exit."""
    code, load = frame.f_code.co_code, bytes([dis.opmap["LOAD_CONST"]])
    starts = (frame.f_lasti, frame.f_lasti + 2)  # a value that is returned is moved first
    return any(code[at : at + 1] == load and code[at : at + 2] * 3 == code[at : at + 6] for at in starts)


class Breaker:
    """Counts the lines of the package that this thread runs, and raises ``error`` at one of them."""

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.lines = at, error, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not leaves_with(frame):
            self.lines += 1
            if self.lines == self.at:
                raise self.error("broken off")
        return self._line

    def run(self, work: Callable[[], Any]) -> None:
        """Do some work, which may be broken off."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            with contextlib.suppress(self.error, DispatcherError):  # what we make of a MemoryError
                work()
        finally:
            sys.settrace(before)


def breakers(work: Callable[[], Any], most: int) -> list[Breaker]:
    """For some of the lines that ``work`` runs, evenly spread, the first and the last among them."""
    count = Breaker()
    count.run(work)
    assert count.lines > 50
    places = np.unique(np.linspace(1, count.lines, most).astype(int)).tolist()
    return [Breaker(place, (KeyboardInterrupt, MemoryError)[number % 2]) for number, place in enumerate(places)]


class Operands:
    """Two sets of tensors for the softmax problem and one more of another size, with the right results."""

    def __init__(self, device: Device) -> None:
        self.device = device
        operator = dispatcher.explain(SOFTMAX, device=device.id, case="sample").operator
        larger = dispatcher.explain(SOFTMAX, device=device.id, case="sample", batch_size=5).operator
        self.a, self.b, self.c = random_tensors(operator, 1), random_tensors(operator, 2), random_tensors(larger, 3)
        self.compiled = self.compile()
        self.results = []
        for bound, tensors in ((operator, self.a), (operator, self.b), (larger, self.c)):
            result = self.compiled(**tensors)
            assert verify_result(bound, tensors, result).passed
            self.results.append(result.copy())

    def compile(self) -> dispatcher.CompiledOperator:
        """An operator that has not been called yet; it is compiled for a and b."""
        return dispatcher.compile(SOFTMAX, device=self.device.id, case="sample")

    def check(self, compiled: dispatcher.CompiledOperator) -> None:
        """All three calls, in another thread so that no lock may be held; the results are alive at the same time."""

        found: list[np.ndarray] = []
        thread = threading.Thread(
            target=lambda: found.extend([compiled(**tensors) for tensors in (self.b, self.a, self.c)]), daemon=True
        )
        thread.start()
        thread.join(60)
        assert len(found) == 3
        for result, expected in zip(found, [self.results[number] for number in (1, 0, 2)], strict=True):
            np.testing.assert_array_equal(result, expected)


def pooled(device: Device) -> list[int]:
    """Addresses of the memory that lies idle on a device's behalf."""
    backend: Any = registry.backend(device.backend)
    gc.collect()
    if device.backend == "opencl":
        host = backend._runtime(device).host
        blocks = [block for blocks in host._idle.values() for block in blocks]
        assert sum(block.nbytes for block in blocks) <= min(host._idle_bytes, host._keep_bytes)
        return [block.ctypes.data for block in blocks]
    if device.backend == "cuda":
        from dispatcher.backends.cuda import driver

        return [int(block) for blocks in driver.context(device.index)._free.values() for block in blocks]
    return []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*out-of-thread")  # in a __del__
@pytest.mark.parametrize("call", POINTS)
def test_a_call_that_is_broken_off(backend_device: Device, call: str) -> None:
    operands = Operands(backend_device)

    def ready() -> dispatcher.CompiledOperator:
        if call == "new weights":
            operands.compiled(**operands.a)
        return operands.compiled if call == "new weights" else operands.compile()

    def work(compiled: dispatcher.CompiledOperator) -> Callable[[], Any]:
        if call == "compiling":
            return lambda: operands.compile()(**operands.b)
        return lambda: compiled(**(operands.c if call == "other sizes" else operands.b))

    before = len(pooled(backend_device))
    for breaker in breakers(work(ready()), POINTS[call]):
        compiled = ready()
        breaker.run(work(compiled))
        operands.check(compiled)
    idle = pooled(backend_device)
    assert len(idle) == len(set(idle)) <= before + 40
