"""What a warm call of an OpenCL operator does again, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dispatcher
from dispatcher.device import machine
from dispatcher.interface import Device
from tests.fakes import conv_tensors

CONV = "conv-transpose-3d-asym-input-sq-kernel"


def test_bound_tensors_are_compared_once(opencl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.opencl import launches

    compared, same_bytes = [], launches.same_bytes
    monkeypatch.setattr(launches, "same_bytes", lambda *arrays: compared.append(arrays) or same_bytes(*arrays))
    prepared, prepare = [], launches.Launch.prepare
    monkeypatch.setattr(launches.Launch, "prepare", lambda *given: prepared.append(given) or prepare(*given))
    x, w = conv_tensors().values()
    bound, free = (dispatcher.compile(CONV, device=opencl.id, kernel=kernel) for kernel in (w, None))
    first = bound(input=x)
    bound(input=x)
    compared.clear()
    prepared.clear()
    np.testing.assert_array_equal(bound(input=x), first)
    assert not compared and not prepared
    bound.update(kernel=2 * w)
    np.testing.assert_array_equal(bound(input=x), 2 * first)
    # A tensor of the caller's may have changed, whether it is writeable or not.
    w.flags.writeable = False
    for factor in (1, 1, 2):
        w.flags.writeable = True
        w *= factor
        w.flags.writeable = False
        np.testing.assert_array_equal(free(input=x, kernel=w), factor * first)


def test_free_memory_is_looked_up_for_new_memory_only(opencl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.opencl import BACKEND
    from dispatcher.backends.opencl.memory import HostPool

    asked: list[int] = []
    monkeypatch.setattr(machine, "SMALL_BYTES", 0)
    monkeypatch.setattr(machine, "available_bytes", lambda: asked.append(1) or 1 << 40)
    monkeypatch.setattr(BACKEND._runtime(opencl), "host", HostPool(1 << 20))
    x, w = conv_tensors().values()
    call = dispatcher.compile(CONV, device=opencl.id, kernel=w)
    results = [call(input=x), call(input=x)]
    assert len(asked) == 2
    np.testing.assert_array_equal(*results)
    results.pop()
    results.append(call(input=x))
    assert len(asked) == 2
    results.append(call(input=x))
    assert len(asked) == 3


def test_operators_of_one_program_keep_their_arguments(opencl: Device) -> None:
    x, w = conv_tensors().values()
    calls = [dispatcher.compile(CONV, device=opencl.id, input=x, kernel=factor * w) for factor in (1, 2, 4)]
    first = calls[0]()
    for _ in range(2):
        for factor, call in zip((1, 2, 4), calls, strict=True):
            np.testing.assert_array_equal(call(), factor * first)


def test_tiny_operators_are_waited_for_awake(opencl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.opencl import BACKEND

    class Last:
        looks = 0

        @property
        def command_execution_status(self) -> int:
            self.looks += 1
            return 3 - self.looks

    runtime = BACKEND._runtime(opencl)
    x, w = conv_tensors().values()
    looks = []
    for units, repeats in ((2, 1), (1, 1), (2, 1000)):
        monkeypatch.setattr(runtime, "facts", replace(runtime.facts, compute_units=units))
        compiled = dispatcher.compile(CONV, device=opencl.id, kernel=w)
        last = Last()
        compiled.prepare(input=np.repeat(x, repeats, axis=0)).choice.executable._finish(last)
        looks.append(last.looks)
    assert looks == [3, 0, 0]


def test_a_block_returns_when_the_last_view_is_gone() -> None:
    from dispatcher.backends.opencl.memory import HUGE_PAGE, HostPool

    pool = HostPool(4 * HUGE_PAGE)
    for shape in ((4, 4), (HUGE_PAGE, 2)):
        array = pool.empty(shape, np.dtype(np.uint8))
        address, view = array.ctypes.data, array[1:].T
        del array
        assert address % 4096 == 0 and not pool.ready(view.base.nbytes)
        del view
        assert pool.ready(shape[0] * shape[1])
        assert pool.empty(shape, np.dtype(np.uint8)).ctypes.data == address
