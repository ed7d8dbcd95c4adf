"""A call that is broken off, wherever that happens, leaves a state from which the next one is right."""

from __future__ import annotations

import contextlib
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
from fakes import CONV, SOFTMAX

import dispatcher
from dispatcher import registry
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import DispatcherError
from dispatcher.interface import Device
from tests.signals import no_signal_here

PACKAGE = str(Path(dispatcher.__file__).parent)
#: At how many lines of which call it is broken off, at most: at all of the first one.
POINTS = {"new weights": 150, "other sizes": 5, "compiling": 5}

Tensors = dict[str, np.ndarray]


class Breaker:
    """Notes the lines of the package that this thread runs, and raises ``error`` at one of them."""

    def __init__(self, at: tuple[str, int] | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error = at, error
        self.lines: dict[tuple[str, int], None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not no_signal_here(frame):
            line = frame.f_code.co_filename, frame.f_lineno
            self.lines[line] = None
            if line == self.at:
                raise self.error(f"broken off at {line}")
        return self._line

    def run(self, work: Callable[[], Any]) -> None:
        """Do some work, which may be broken off. Finalizers fail of that alone."""
        before, reports = sys.gettrace(), sys.unraisablehook
        others: list[Any] = []
        sys.unraisablehook = lambda unraisable: others.append(unraisable.exc_value)
        sys.settrace(self)
        try:
            with contextlib.suppress(self.error, DispatcherError):  # what we make of a MemoryError
                work()
        finally:
            sys.settrace(before)
            sys.unraisablehook = reports
        assert all(isinstance(error, self.error) for error in others), others


def breakers(work: Callable[[], Any], most: int) -> list[Breaker]:
    """For the lines that ``work`` runs, or some of them, evenly spread, with the first and the last among them."""
    count = Breaker()
    count.run(work)
    lines = list(count.lines)
    assert len(lines) > 50
    chosen = np.unique(np.linspace(0, len(lines) - 1, most).astype(int))
    return [Breaker(lines[number], (KeyboardInterrupt, MemoryError)[number % 2]) for number in chosen]


class Operands:
    """Two sets of tensors for the softmax problem and two more of another size, with the right results."""

    def __init__(self, device: Device) -> None:
        self.device = device
        operator = dispatcher.explain(SOFTMAX, device=device.id, case="sample").operator
        larger = dispatcher.explain(SOFTMAX, device=device.id, case="sample", batch_size=5).operator
        self.a, self.b = random_tensors(operator, 1), random_tensors(operator, 2)
        self.c, self.d = random_tensors(larger, 3), random_tensors(larger, 4)
        self.compiled = self.compile()
        self.results = []
        for bound, tensors in ((operator, self.a), (operator, self.b), (larger, self.c), (larger, self.d)):
            result = self.compiled(**tensors)
            assert verify_result(bound, tensors, result).passed
            self.results.append(result.copy())

    def compile(self) -> dispatcher.CompiledOperator:
        """An operator that has not been called yet; it is compiled for a and b."""
        return dispatcher.compile(SOFTMAX, device=self.device.id, case="sample")

    def check(self, compiled: dispatcher.CompiledOperator) -> None:
        """All calls, in another thread so that no lock may be held; the results are alive at the same time."""

        found: list[np.ndarray] = []
        thread = threading.Thread(
            target=lambda: found.extend([compiled(**tensors) for tensors in (self.b, self.a, self.c, self.d, self.a)]),
            daemon=True,
        )
        thread.start()
        thread.join(20)
        assert len(found) == 5
        for result, expected in zip(found, [self.results[number] for number in (1, 0, 2, 3, 0)], strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5)  # in parts, sums round differently


def pooled(device: Device) -> list[int]:
    """Addresses of the memory that lies idle on a device's behalf, each once."""
    backend: Any = registry.backend(device.backend)
    idle: list[int] = []
    if device.backend == "opencl":
        host = backend._runtime(device).host
        blocks = [block for blocks in host._idle.values() for block in blocks]
        assert sum(block.nbytes for block in blocks) <= min(host._idle_bytes, host._keep_bytes)
        idle = [block.ctypes.data for block in blocks]
    if device.backend == "cuda":
        from dispatcher.backends.cuda import driver

        idle = [int(block) for blocks in driver.context(device.index)._free.values() for block in blocks]
    assert len(idle) == len(set(idle)), "memory that would be handed out twice"
    return idle


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*out-of-thread")  # in a __del__
@pytest.mark.parametrize("call", POINTS)
def test_a_call_that_is_broken_off(backend_device: Device, call: str) -> None:
    if backend_device.index and (backend_device.backend == "cuda" or call != "new weights"):
        pytest.skip("the first device of the backend stands for it")
    operands = Operands(backend_device)

    def ready() -> dispatcher.CompiledOperator:
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
        pooled(backend_device)
    gc.collect()
    assert len(pooled(backend_device)) <= before + 40


def test_a_call_that_an_alarm_ends(backend_device: Device) -> None:
    """Fifteen moments of a call with new weights, as a user's Ctrl-C may find it; the signal is a real one."""
    if backend_device.backend == "cuda" and backend_device.index:
        pytest.skip("one simulated device is like the other")
    channels = 8 if backend_device.backend == "cuda" else 96  # so many weights that packing them takes its time
    x = np.ones((1, channels, 2, 2, 2), np.float32)
    weights = [np.full((channels, channels, 3, 3, 3), value, np.float32) for value in (1, 2)]
    compiled = dispatcher.compile(CONV, device=backend_device.id)
    expected = [compiled(input=x, kernel=weight) for weight in weights]
    start = time.perf_counter()
    compiled(input=x, kernel=weights[0])
    duration_s = time.perf_counter() - start
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(15):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, duration_s * (number + 1) / 15)
                compiled(input=x, kernel=weights[1])
                signal.setitimer(signal.ITIMER_REAL, 0)
            for which in (1, 0):
                np.testing.assert_array_equal(compiled(input=x, kernel=weights[which]), expected[which])
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
