"""A call that is broken off, wherever that happens, leaves a state from which the next one is right."""

from __future__ import annotations

import contextlib
import dis
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fakes import SOFTMAX

import dispatcher
from dispatcher import registry
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import DispatcherError
from dispatcher.interface import Device

PACKAGE = str(Path(dispatcher.__file__).parent)
#: At how many lines of which call it is broken off.
POINTS = {"new weights": 80, "other sizes": 8, "compiling": 8}

Tensors = dict[str, np.ndarray]


def no_signal_here(frame: FrameType) -> bool:
    """Whether Python lets no signal in at this line: where a ``try`` begins, and between the body of a ``with`` and
    what it calls to end as usual."""
    code, at = frame.f_code.co_code, frame.f_lasti
    load, nothing = bytes([dis.opmap["LOAD_CONST"]]), dis.opmap["NOP"]
    ahead = [code[start : start + 6] for start in (at, at + 2)]  # a value that is returned is moved first
    return code[at] == nothing or any(each[:1] == load and each == each[:2] * 3 for each in ahead)


class Breaker:
    """Counts the lines of the package that this thread runs, and raises ``error`` at one of them."""

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.lines = at, error, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not no_signal_here(frame):
            self.lines += 1
            if self.lines == self.at:
                raise self.error(f"broken off at {frame.f_code.co_filename}:{frame.f_lineno}")
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
        thread.join(20)
        assert len(found) == 3
        for result, expected in zip(found, [self.results[number] for number in (1, 0, 2)], strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5)  # in parts, sums round differently


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
    if backend_device.backend == "cuda" and backend_device.index:
        pytest.skip("one simulated device is like the other")
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


def test_a_call_that_an_alarm_ends(backend_device: Device) -> None:
    """Fifteen moments of a call with new weights, as a user's Ctrl-C may find it; the signal is a real one."""
    if backend_device.index:
        pytest.skip("tried on the first device of each backend")
    operands = Operands(backend_device)
    start = time.perf_counter()
    operands.compiled(**operands.a)
    duration_s = time.perf_counter() - start
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(15):
            operands.compiled(**operands.a)
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, duration_s * number / 15))
                operands.compiled(**operands.b)
                signal.setitimer(signal.ITIMER_REAL, 0)
            operands.check(operands.compiled)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_no_memory_for_something_in_a_call(backend_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses the first, second, third, ... allocation of a call with new weights."""
    if backend_device.backend == "numpy" or backend_device.index:
        pytest.skip("tried on the first device of each driver")
    operands = Operands(backend_device)
    if backend_device.backend == "opencl":
        import pyopencl as cl

        where, name, error = cl, "Buffer", cl.MemoryError("clCreateBuffer failed: OUT_OF_HOST_MEMORY")
    else:
        from dispatcher.backends.cuda import driver

        context = driver.context(backend_device.index)
        with context.active():
            context.trim()
        where, name, error = context.driver, "mem_alloc", context.driver.MemoryError("no room")
    allocate = getattr(where, name)
    for refused in range(6):
        made: list[None] = []

        def refuse(*arguments: Any, made: list[None] = made, refused: int = refused, **named: Any) -> Any:
            made.append(None)
            if len(made) == refused + 1:
                raise error
            return allocate(*arguments, **named)

        compiled = operands.compile()
        with monkeypatch.context() as planted, contextlib.suppress(DispatcherError):
            planted.setattr(where, name, refuse)
            compiled(**operands.b)
        assert len(made) > refused or refused > 1
        operands.check(compiled)


def test_nothing_is_in_flight_after_an_interruption(backend_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the caller's output nor memory that is handed out again is written to by what was left behind."""
    if backend_device.backend == "numpy":
        pytest.skip("it works in the caller's thread")
    operands = Operands(backend_device)
    told: list[str] = []
    if backend_device.backend == "opencl":
        import pyopencl as cl

        enqueue, events = cl.enqueue_nd_range_kernel, []

        def interrupted(*arguments: Any) -> Any:
            events.append(enqueue(*arguments))
            raise KeyboardInterrupt

        monkeypatch.setattr(cl, "enqueue_nd_range_kernel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            operands.compiled(**operands.b)
        assert [event.command_execution_status for event in events] == [cl.command_execution_status.COMPLETE]
    else:
        from dispatcher.backends.cuda import driver, executable

        context = driver.context(backend_device.index)

        class Stream(context.driver.Stream):  # type: ignore[misc, name-defined]
            def synchronize(self) -> None:
                told.append("waited")
                super().synchronize()

        with context.active():
            context._streams.append(Stream())
        give_back = context.give_back
        monkeypatch.setattr(context, "give_back", lambda *block: told.append("memory") or give_back(*block))
        launch = executable._Call.launch

        def interrupted_launch(*arguments: Any) -> None:
            launch(*arguments)
            told.append("launched")
            raise KeyboardInterrupt

        monkeypatch.setattr(executable._Call, "launch", interrupted_launch)
        with contextlib.suppress(KeyboardInterrupt):
            operands.compiled(**operands.b)
        context._streams.pop()
        assert told[:3] == ["launched", "waited", "memory"]
    monkeypatch.undo()
    operands.check(operands.compiled)
