"""What does not fit is worked on in parts, with the same result; what cannot be is an error with the numbers."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, FakeBackend, conv_tensors, correct

import dispatcher
from dispatcher.check.inputs import random_tensors
from dispatcher.device import limits, machine, splitting
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


class System:
    """Files that say what a system lets this process take."""

    def __init__(self, root: Path, groups: str, *mounts: str) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:       500 kB\n")
        self.write("proc/self/cgroup", groups)
        lines = (
            f"30 29 0:1 {line.replace('AT', str(root / 'my groups').replace(' ', chr(92) + '040'))}" for line in mounts
        )
        self.write("proc/self/mountinfo", "".join(f"{line}\n" for line in lines))

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, name: str, **files: str) -> None:
        for file, text in files.items():
            self.write(f"my groups/{name}/{file.replace('__', '.')}", f"{text}\n")


V1 = ("/ AT/memory rw - cgroup cgroup rw,memory", "/ AT/cpu rw - cgroup cgroup rw,cpu,cpuacct")
V2 = ("/ AT/v2 rw,nosuid shared:4 - cgroup2 cgroup2 rw",)
SLURM = "5:memory:/slurm/job_1/step_0\n4:cpuacct,cpu:/slurm/job_1\n1:name=systemd:/x\n0::/\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., System]:
    def make(*files: str) -> System:
        monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "proc/meminfo")
        monkeypatch.setattr(limits, "_PROC", tmp_path / "proc")
        return System(tmp_path, *files)

    return make


def test_what_is_available_comes_from_the_system(system: Callable[..., System]) -> None:
    made = system("")
    assert machine.available_bytes() == 500 << 10
    made.write("proc/meminfo", "MemTotal: 9 kB\n")
    assert machine.available_bytes() is None


def test_the_tightest_control_group_on_the_way_up_counts(system: Callable[..., System]) -> None:
    made = system("0::/user.slice/job/step\n", *V2)
    made.group("v2/user.slice/job/step", memory__max="max", memory__current="100")
    assert machine.available_bytes() == 500 << 10
    made.group("v2/user.slice/job", memory__max="9000", memory__high="max", memory__current="7000")
    assert machine.available_bytes() == 2000
    cache = "anon 1\nfile 5500\ninactive_file 3000\nactive_file 1000\nslab_reclaimable 500\nshmem 900"
    made.group("v2/user.slice/job", memory__stat=cache)  # all of which the system drops where memory is needed
    assert machine.available_bytes() == 6500
    made.group("v2/user.slice/job", memory__high="8000")
    assert machine.available_bytes() == 5500
    made.group("v2/user.slice", memory__max="4000", memory__current="unreadable")
    assert machine.available_bytes() == 4000
    made.group("v2", memory__max="600", memory__current="700")
    assert machine.available_bytes() == 0
    made.group("v2/user.slice/job", cpu__max="max 100000")
    assert machine.cores() == len(os.sched_getaffinity(0))
    made.group("v2/user.slice", cpu__max="50000 100000")
    assert machine.cores() == 1


def test_control_groups_of_version_1_and_of_both(system: Callable[..., System]) -> None:
    made = system(SLURM, *V1, *V2)
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50"
    unlimited = {"memory__limit_in_bytes": str(2**63 - 4096), "memory__usage_in_bytes": "10"}
    made.group("memory/slurm/job_1/step_0", **unlimited)
    assert machine.available_bytes() == 500 << 10
    made.group("memory/slurm/job_1", memory__limit_in_bytes="5000", memory__usage_in_bytes="1000", memory__stat=stat)
    made.group("cpu/slurm/job_1", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (machine.available_bytes(), machine.cores()) == (4350, len(os.sched_getaffinity(0)))
    made.group("cpu/slurm", cpu__cfs_quota_us="20000", cpu__cfs_period_us="100000")
    assert machine.cores() == 1
    # In a container the mount begins at the own group, or the group is not to be seen at all.
    for group in ("/docker/abc", "/docker/abc/deeper", "/../elsewhere", "/other"):
        made.write("proc/self/cgroup", f"5:memory:{group}\n")
        made.write("proc/self/mountinfo", f"1 1 0:1 /docker/abc {made.root}/c rw - cgroup cgroup rw,memory\n")
        made.write("c/memory.limit_in_bytes", "77\n")
        assert machine.available_bytes() == 77


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_resource_limits_count(system: Callable[..., System], monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    made = system("")
    made.write("proc/self/status", "Name: me\nVmSize:\t 100 kB\nVmData:\t 30 kB\nThreads: 3\n")
    used = {resource.RLIMIT_AS: 100 << 10, resource.RLIMIT_DATA: 30 << 10}[kind]
    found = {kind: (used + 7, used + 9)}
    monkeypatch.setattr(resource, "getrlimit", lambda asked: found.get(asked, (resource.RLIM_INFINITY,) * 2))
    assert machine.available_bytes() == 7


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
