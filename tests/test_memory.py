"""What does not fit is worked on in parts, with the same result; what cannot be is an error with the numbers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, FakeBackend, conv_tensors, correct

import dispatcher
from dispatcher.check.inputs import random_tensors
from dispatcher.device import machine, splitting
from dispatcher.device.selection import FallbackWarning, backend_devices
from dispatcher.errors import DeviceMemoryError
from dispatcher.interface import Device, Timings
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator

PROBLEMS = [CONV, LAYERNORM, SUM, SOFTMAX, MAXMAX]


def bound(problem: Any, **arguments: Any) -> Operator:
    loaded = load_problem(problem)
    return bind_arguments(loaded, sort_arguments(loaded, arguments), case="sample")


class SmallBackend(FakeBackend):
    """A device that takes few batch items at once: it says so at ``compile``, or only when it runs."""

    def __init__(self, items: int, late: bool = False) -> None:
        super().__init__("small")
        self.items, self.late = items, late
        self.batches: list[int] = []

    def check(self, operator: Operator) -> None:
        batch = operator.output_shape[0]
        if batch > self.items:
            raise DeviceMemoryError(f"{batch * 1000} bytes are needed, and the limit is {self.items * 1000}")

    def compile(self, operator: Operator, device: Device, options: Any) -> Any:
        if not self.late:
            self.check(operator)
        return super().compile(operator, device, options)

    def behave(self, operator: Operator, tensors: Any) -> np.ndarray:
        self.check(operator)
        self.batches.append(operator.output_shape[0])
        return correct(operator, tensors)


def small(items: int, late: bool = False) -> SmallBackend:
    backend = SmallBackend(items, late)
    backend.behaviour = backend.behave
    return backend


# ---- splitting ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [False, True], ids=["at-compile", "at-run"])
@pytest.mark.parametrize(("batch", "items", "parts"), [(7, 3, [2, 2, 2, 1]), (4, 2, [2, 2]), (5, 1, [1] * 5)])
def test_what_does_not_fit_is_split_over_the_batch(
    install_backends: Install, late: bool, batch: int, items: int, parts: list[int]
) -> None:
    backend = small(items, late)
    install_backends(backend)
    operator = bound(LAYERNORM, batch_size=batch)
    tensors = random_tensors(operator, 0)
    whole = correct(operator, tensors)
    compiled = dispatcher.compile(LAYERNORM, device="small", case="sample", batch_size=batch)
    np.testing.assert_array_equal(compiled(**tensors), whole)
    assert backend.batches == parts
    output = np.full_like(whole, np.nan)
    assert compiled(**tensors, output=output) is output
    np.testing.assert_array_equal(output, whole)
    assert backend.batches == parts * 2  # the way of splitting is remembered
    assert {len(seen["kernel"]) for seen in backend.seen} == {len(tensors["kernel"])}


def test_what_still_does_not_fit_is_an_error_with_the_numbers(install_backends: Install) -> None:
    for late in (False, True):
        install_backends(small(0, late))
        with pytest.raises(DeviceMemoryError, match="1000 bytes are needed, and the limit is 0") as caught:
            dispatcher.run(CONV, device="small", **conv_tensors())
        assert caught.value.exit_code == 4
        with pytest.warns(FallbackWarning, match="1000 bytes are needed") as warned:
            dispatcher.run(CONV, device="auto", **conv_tensors())
        assert len(warned) == 1


def mapping(steps: list[Any], shape: list[Any], **sizes: int) -> dict[str, Any]:
    return {
        "name": "made-up",
        "title": "Made up",
        "parameters": [
            {"name": "x", "type": "tensor", "const": True, "shape": shape},
            {"name": "y", "type": "tensor", "const": False},
            *({"name": name, "type": "size_t", "default": value} for name, value in sizes.items()),
        ],
        "pipeline": steps,
    }


AXES = ["n", "c", "d", "h", "w"]
SIZES = {"n": 4, "c": 2, "d": 2, "h": 2, "w": 2}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (mapping([{"op": "layer_norm", "axis": ["batch", "channel"]}], AXES, **SIZES), "mixes batch items"),
        (mapping([{"op": "softmax", "axis": "batch"}], AXES, **SIZES), "mixes batch items"),
        (mapping([{"op": "sum", "axis": "batch"}], AXES, **SIZES), "mixes batch items"),
        (mapping(["gelu"], ["n * 2", "c", "d", "h", "w"], **SIZES), r"the batch of x is n \* 2"),
        (mapping(["gelu"], ["n", "c * n", "d", "h", "w"], **SIZES), "n is more than the batch of tensor x"),
        (mapping([{"op": "avg_pool3d", "window": "n"}], AXES, n=2, c=1, d=4, h=4, w=4), "n is a number that"),
    ],
)
def test_what_is_no_mere_batch_is_not_split(install_backends: Install, problem: Any, words: str) -> None:
    operator = bind_arguments(load_problem(problem), sort_arguments(load_problem(problem), {}))
    assert splitting.batch_parameter(operator)[0] == ""
    install_backends(small(0))
    tensors = random_tensors(operator, 0)
    with pytest.raises(DeviceMemoryError, match=f"cannot be split over the batch: .*{words}"):
        dispatcher.run(problem, device="small", **tensors)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_bundled_problem_can_be_split(problem: str) -> None:
    operator = bound(problem)
    parameter, reason = splitting.batch_parameter(operator)
    assert (parameter, reason) == ("batch_size", "")
    part = splitting.with_batch(operator, parameter, 1)
    assert part.output_shape == (1, *operator.output_shape[1:])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_real_device_gives_equal_bits_when_split(small_opencl: Callable[[int], str], problem: str) -> None:
    operator = bound(problem, batch_size=5)
    tensors = random_tensors(operator, 3)
    limit, compiled = 10_000, None
    while compiled is None:  # the least memory that it can be run in
        request = small_opencl(limit)
        try:
            compiled = dispatcher.compile(problem, device=request, **sizes_of(operator))
        except DeviceMemoryError:
            limit = limit * 6 // 5
    result = compiled(**tensors)
    assert any("at a time" in launch.note for launch in compiled.explain().launches)
    small_opencl(1 << 40)
    np.testing.assert_array_equal(result, dispatcher.run(problem, device=request, **sizes_of(operator), **tensors))


def sizes_of(operator: Operator) -> dict[str, Any]:
    return {**operator.sizes, **operator.scalars}


@pytest.fixture
def small_opencl(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """A function that limits the memory of the first OpenCL device and returns the request that means it."""
    usable = [device for device in backend_devices("opencl") if device.available]
    if not usable:
        pytest.skip("there is no usable OpenCL device")
    from dataclasses import replace

    from dispatcher.backends.opencl import BACKEND

    runtime = BACKEND._runtime(usable[0])
    before = runtime.facts

    def limit(nbytes: int) -> str:
        monkeypatch.setitem(runtime.__dict__, "facts", replace(before, global_memory=nbytes))
        return usable[0].id

    monkeypatch.setitem(runtime.__dict__, "facts", before)
    return limit


@pytest.mark.skipif(os.environ.get("DISPATCHER_CUDA_SIM") != "1", reason="needs the CUDA simulator")
def test_a_small_gpu_works_in_parts_and_goes_on_after_an_out_of_memory() -> None:
    from tests.cuda_support import machine

    x = np.random.default_rng(0).integers(-3, 4, (8, 1, 32, 32, 32)).astype(np.float32)
    w = np.full((1, 1, 1, 1, 1), 2, np.float32)
    with machine(memory_mb=1):
        compiled = dispatcher.compile(CONV, device="cuda")
        for _ in range(2):
            np.testing.assert_array_equal(compiled(input=x, kernel=w), 2 * x)
            assert "2 at a time" in compiled.explain().launches[0].note
            with pytest.raises(DeviceMemoryError, match=r"4096000 bytes .* of its 1048576 bytes are free"):
                compiled(input=np.ones((1, 1, 80, 80, 80), np.float32), kernel=w)


def test_a_split_call_adds_up_its_times(install_backends: Install) -> None:
    install_backends(small(1))
    compiled = dispatcher.compile(CONV, device="small")
    call = compiled.prepare(**conv_tensors())
    timings = Timings()
    call(timings=timings)
    assert [place for place, _, _ in timings.parts] == ["", ""]


# ---- the host's memory -------------------------------------------------------------------------------------
def test_a_result_larger_than_the_host_s_memory_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 << 20)
    x, w = np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 1, 1, 1, 1), np.float32)
    assert dispatcher.run(CONV, device="numpy", input=x, kernel=w, stride=9).shape[2] == 10
    needed = 4 * 1100**3 + 8 * (8 + 1100**3)
    with pytest.raises(DeviceMemoryError, match=f"at least {needed} bytes of the host's memory, and 104857600"):
        dispatcher.run(CONV, device="numpy", input=x, kernel=w, stride=1099)


def test_what_is_available_comes_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit, usage = (tmp_path / name for name in ("meminfo", "limit", "usage"))
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_CGROUPS", ((limit, usage),))
    assert machine.available_bytes() is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       5 kB\n")
    limit.write_text("max\n")
    usage.write_text("700\n")
    assert machine.available_bytes() == 5 << 10
    limit.write_text("2700\n")
    assert machine.available_bytes() == 2000
    limit.write_text("600\n")
    assert machine.available_bytes() == 0


# ---- life after it -----------------------------------------------------------------------------------------
def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    pytest.skip("this system does not say how much memory a process has")


def test_a_thousand_failures_leak_nothing(small_opencl: Callable[[int], str]) -> None:
    request = small_opencl(100_000)
    operator = bound(LAYERNORM, batch_size=1, in_channels=1, out_channels=1)
    tensors = random_tensors(operator, 0)
    sizes = {"case": "sample", "in_channels": 1, "out_channels": 1}
    huge = {**tensors, "input": np.ones((1, 1, 20, 20, 20), np.float32)}
    expected = dispatcher.run(LAYERNORM, device="numpy", **sizes, **tensors)
    compiled = dispatcher.compile(LAYERNORM, device=request, case="sample")
    levels = []
    for number in range(1000):
        with pytest.raises(DeviceMemoryError, match=r"takes \d+ bytes, more than .* of 100000 bytes"):
            compiled(**huge)
        result = compiled(**tensors)
        if number in (200, 999):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
            gc.collect()
            levels.append(resident_bytes())
    assert levels[1] - levels[0] < 8 << 20
