"""`dispatcher bench` cannot be fooled: what it measures, what it refuses, and what it says."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, MAXMAX, FakeBackend, FakeExecutable, correct

import dispatcher
from dispatcher import cli
from dispatcher.check.inputs import random_tensors
from dispatcher.check.verifying import compile_for
from dispatcher.device import machine
from dispatcher.errors import BusyError, DeviceError, InputError, KernelError, VerificationError
from dispatcher.interface import Device, Measurable, Roofline, Timings
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.loader import load_problem
from dispatcher.registry import backend
from dispatcher.timing import contenders, differences, peers, racing, sampling
from dispatcher.timing.peers import Peer, PeerCall
from dispatcher.timing.racing import Rules
from dispatcher.timing.results import Race
from dispatcher.timing.sampling import Times, bootstrap_ratio, resampled_medians

foreign_cores = machine.LoadMeter.foreign_cores  # before the fixture of conftest.py replaces it


class Clocked(FakeBackend):
    """A backend that fills in its timings and knows its roofline.

    Args:
        clock: fills the timings of a call in.
        steps: told what happens: ``flush`` and ``call``.
    """

    def __init__(self, *arguments: Any, clock: Callable[[Timings], None] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **{"kind": "cpu", **options})
        self.clock = clock
        self.steps: list[str] = []
        self.rooflines = 0

    def compile(self, operator: Any, device: Device, options: Mapping[str, Any]) -> FakeExecutable:
        super().compile(operator, device, options)
        owner = self

        class Executable(FakeExecutable):
            def __call__(self, tensors: Any, output: Any = None, timings: Timings | None = None) -> Any:
                owner.steps.append(f"call {device.id}")
                result = super().__call__(tensors, output, timings)
                if timings is not None and owner.clock is not None:
                    owner.clock(timings)
                return result

        return Executable(self, operator)

    def roofline(self, device: Device, dtype: str) -> Roofline:
        self.rooflines += 1
        return Roofline(100.0, 10.0, dtype, "made up")

    def flush_caches(self, device: Device) -> None:
        self.steps.append("flush")


@pytest.fixture
def fake(install_backends: Install) -> FakeBackend:
    """A right backend that comes before NumPy."""
    made = FakeBackend(kind="cpu")
    install_backends(made)
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between contenders, and a small buffer to empty the caches with."""
    monkeypatch.setattr(sampling, "SETTLE_S", 0.0)
    monkeypatch.setattr(sampling, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(contenders, "host_caches", cache(sampling.HostCaches))


def race(
    problem: Any,
    devices: list[str | Device | None],
    *,
    against: str | list[str] = (),  # type: ignore[assignment]
    dtype: str | None = None,
    **given: Any,
) -> Race:
    """A race of a problem's case `sample`; ``given`` are rules, or sizes and scalars."""
    rules = {name: given.pop(name) for name in list(given) if name in Rules.__dataclass_fields__}
    operator = bind_numbers(load_problem(problem), given, "time", case="sample", dtype=dtype)
    return racing.race(operator, devices, Rules(**rules), against=against)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dispatcher bench`."""
    capsys.readouterr()
    code = cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- what is measured --------------------------------------------------------------------------------------
def test_64_times_the_work_takes_more_than_8_times_the_time(backend_device: Device) -> None:
    sizes = {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "stride": 1, "padding": 1}
    batch, medians = 1 if backend_device.kind == "reference" else 4, []
    for extent in (8, 32):
        outcome = dispatcher.benchmark(
            CONV, device=backend_device.id, repeats=3, warmup=1, batch_size=batch, **sizes,
            depth=extent, height=extent, width=extent, output_padding=0, dilation=1, groups=1,
        )  # fmt: skip
        medians.append((outcome.operator.flops, outcome.warm.wall.min_s, outcome.cold.wall.min_s))
    (small, *small_s), (large, *large_s) = medians
    assert 60 < large / small < 80
    assert all(b > 8 * a for a, b in zip(small_s, large_s, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_parts_of_a_call_fit_into_it(backend_device: Device, dtype: str) -> None:
    operator = dispatcher.explain(MAXMAX, case="sample", dtype=dtype, device=backend_device.id).operator
    tensors = random_tensors(operator, 0)
    call = compile_for(operator, backend_device.id).prepare_bound(operator, tensors)
    call()
    timings = Timings()
    start = time.perf_counter()
    call(timings=timings)
    wall_s = time.perf_counter() - start
    assert timings.clock == ("host" if backend_device.kind == "reference" else "device")
    assert timings.shared_memory == (backend_device.kind != "gpu")
    assert min(timings.upload_s, timings.download_s) >= 0
    assert max(seconds for _, seconds in timings.launches) <= timings.kernel_s
    assert timings.upload_s + timings.kernel_s + timings.download_s <= wall_s


def test_devices_that_share_the_batch_are_timed_as_one(install_backends: Install) -> None:
    def clock(timings: Timings) -> None:
        timings.kernel_s, timings.clock, timings.shared_memory = 1e-6, "device", True

    clocked = Clocked(devices=("One", "Two"), clock=clock)
    install_backends(clocked)
    found = dispatcher.benchmark(CONV, device="all-of:fake", repeats=2)
    assert (found.name, found.clock, found.shared_memory) == ("all-of:fake", "device", True)
    assert found.kernel_s == (1e-6, 1e-6)  # side by side, the slowest counts
    assert found.roofline is None
    assert clocked.steps.count("flush") == 2 * 2 * 2  # of both, before each cold call


class LateDevice:
    """A device that works in a thread of its own, and takes its time.

    Attributes:
        waits: whether a call waits for the device.
    """

    def __init__(self, delay_s: float, waits: bool) -> None:
        self.delay_s, self.waits = delay_s, waits
        self.kernel_s = 0.0

    def executable(self, operator: Any) -> Any:
        launches = ()

        def call(tensors: Any, output: Any = None, timings: Timings | None = None) -> Any:
            result = np.empty(operator.output_shape, operator.dtype) if output is None else output

            def work() -> None:
                start = time.perf_counter()
                time.sleep(self.delay_s)
                result[...] = correct(operator, tensors)
                self.kernel_s = time.perf_counter() - start

            thread = threading.Thread(target=work)
            thread.start()
            if self.waits:
                thread.join()
                if timings is not None:
                    timings.kernel_s, timings.clock = self.kernel_s, "device"
            return result

        call.launches = launches  # type: ignore[attr-defined]
        return call


def late_backend(monkeypatch: pytest.MonkeyPatch, delay_s: float, waits: bool) -> FakeBackend:
    late = FakeBackend(kind="cpu")
    device = LateDevice(delay_s, waits)
    monkeypatch.setattr(late, "compile", lambda operator, chosen, options: device.executable(operator))
    return late


def test_a_delay_on_the_device_shows_up_whole(install_backends: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backends(late_backend(monkeypatch, 0.03, waits=True))
    found = dispatcher.benchmark(CONV, repeats=2, warmup=0)
    for condition in (found.warm, found.cold):
        assert condition.kernel is not None
        assert condition.wall.min_s >= 0.03
        assert condition.kernel.min_s >= 0.03
    assert found.clock == "device"
    assert found.first_s >= 0.03


def test_a_call_that_does_not_wait_for_the_device_is_found_out(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backends(late_backend(monkeypatch, 0.03, waits=False))
    with pytest.raises(VerificationError, match="wrong result on fake:0"):
        dispatcher.benchmark(CONV, repeats=2, warmup=0)


#: Calls of one round after one call to warm up: the calls before the two warm ones are not timed.
FIRST, WARM_UP, COLD, COLD_CLOCKED, WARM, WARM_CLOCKED = 1, 2, 3, 4, 6, 8


@pytest.mark.parametrize("number", [FIRST, WARM_UP, COLD, COLD_CLOCKED, WARM, WARM_CLOCKED])
@pytest.mark.parametrize("fault", ["wrong", "unwritten"])
def test_a_single_wrong_result_is_found(fake: FakeBackend, number: int, fault: str) -> None:
    def behaviour(operator: Any, tensors: Any) -> np.ndarray:
        result = correct(operator, tensors)
        if fake.calls == number:
            result.ravel()[7] = math.nan if fault == "unwritten" else result.ravel()[7] + 0.5
        return result

    fake.behaviour = behaviour
    with pytest.raises(VerificationError, match=r"1 of .* elements are wrong") as caught:
        dispatcher.benchmark(CONV, repeats=1, warmup=1)
    assert ("call" in str(caught.value)) == (number != FIRST)
    assert fake.calls == 1 if number == FIRST else fake.calls == 8


def test_a_call_that_writes_nothing_is_found(install_backends: Install) -> None:
    lazy = Clocked()
    install_backends(lazy)

    class Forgets(FakeExecutable):
        def __call__(self, tensors: Any, output: Any = None, timings: Timings | None = None) -> Any:
            if self.backend.calls < 4:
                return super().__call__(tensors, output, timings)
            self.backend.calls += 1
            return output

    lazy.compile = lambda operator, device, options: Forgets(lazy, operator)  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="NaN where the reference is a number"):
        dispatcher.benchmark(CONV, repeats=2, warmup=1)


def test_results_that_differ_within_their_bounds_are_right(fake: FakeBackend) -> None:
    def wanders(operator: Any, tensors: Any) -> np.ndarray:
        return np.nextafter(correct(operator, tensors), np.float32(fake.calls % 3 - 1), dtype=np.float32)

    fake.behaviour = wanders
    found = dispatcher.benchmark(CONV, repeats=2)
    assert found.comparison is not None and found.comparison.passed
    assert found.comparison.max_error_over_bound > 0


def test_caches_are_emptied_before_cold_calls_only(install_backends: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked()
    install_backends(clocked)
    flush = sampling.HostCaches.flush
    monkeypatch.setattr(sampling.HostCaches, "flush", lambda self: (clocked.steps.append("host"), flush(self)))
    dispatcher.benchmark(CONV, repeats=1, warmup=0)
    cold, warm = ["host", "flush", "call fake:0"], ["call fake:0", "call fake:0"]
    assert clocked.steps == ["call fake:0", *cold, *cold, *warm, *warm]


def test_emptying_the_caches_touches_twice_what_they_hold() -> None:
    caches = sampling.HostCaches()
    caches.flush()
    assert caches.nbytes == 2 << 16
    parts = caches._parts
    assert len(parts) == machine.cores()
    assert all((part == 2).all() for part in parts)
    assert sum(part.nbytes for part in parts) > caches.nbytes - 8 * len(parts) ** 2
    assert machine.last_level_cache_bytes() > 1 << 18


def test_contenders_take_turns(install_backends: Install) -> None:
    clocked = Clocked(devices=("One", "Two"))
    install_backends(clocked)
    outcome = race(CONV, ["fake:0", "fake:1"], repeats=4, warmup=0)
    calls = [step for step in clocked.steps if step.startswith("call")][2:]
    turns = [calls[i : i + 6] for i in range(0, len(calls), 6)]
    assert all(len(set(turn)) == 1 for turn in turns)
    rounds = [{turns[i][0], turns[i + 1][0]} for i in range(0, len(turns), 2)]
    assert rounds == [{"call fake:0", "call fake:1"}] * 4
    assert [result.name for result in outcome.results] == ["fake:0", "fake:1"]
    assert (outcome.rounds, outcome.settled) == (4, True)


def test_sampling_ends_when_the_medians_are_known(install_backends: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "SETTLED", math.inf)
    install_backends(FakeBackend(kind="cpu"))
    outcome = race(CONV, [None])
    assert (outcome.rounds, outcome.settled) == (racing.LEAST_ROUNDS, True)
    monkeypatch.setattr(racing, "SETTLED", -1.0)
    outcome = race(CONV, [None])
    assert (outcome.rounds, outcome.settled) == (racing.MOST_ROUNDS, False)


def test_sampling_ends_with_the_time(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "SETTLED", -1.0)
    fake.behaviour = lambda operator, tensors: (time.sleep(0.02), correct(operator, tensors))[1]
    outcome = race(CONV, [None], time_limit_s=0.2)
    assert 1 <= outcome.rounds < 10 and not outcome.settled
    for wrong in (0, -1.0, math.inf, math.nan, "1"):
        with pytest.raises(InputError, match="time_limit_s is"):
            race(CONV, [None], time_limit_s=wrong)  # type: ignore[arg-type]


def test_another_device_may_not_take_over(install_backends: Install) -> None:
    weak = FakeBackend("weak", kind="cpu")

    def breaks(operator: Any, tensors: Any) -> np.ndarray:
        if weak.calls > 3:
            raise KernelError("it broke")
        return correct(operator, tensors)

    weak.behaviour = breaks
    install_backends(weak)
    with (
        pytest.warns(dispatcher.FallbackWarning),
        pytest.raises(KernelError, match="failed while it was timed, and numpy took over"),
    ):
        dispatcher.benchmark(CONV, repeats=2)


# ---- numbers -----------------------------------------------------------------------------------------------
def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    match value:
        case dict():
            for part in value.values():
                yield from numbers(part)
        case list():
            for part in value:
                yield from numbers(part)
        case bool():
            return
        case int() | float():
            yield value


def broken_clock(kind: str) -> Callable[[], float]:
    """A clock that stands still, or goes backwards."""
    ticks = iter(range(10**9))
    return (lambda: 5.0) if kind == "still" else (lambda: -float(next(ticks)))


RATES = ("gflops", "ideal_gbytes_per_s", "roofline_share")


@pytest.mark.parametrize("kind", ["still", "backwards"])
def test_no_clock_makes_an_impossible_rate(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    install_backends(Clocked())
    clock = types.SimpleNamespace(perf_counter=broken_clock(kind), sleep=time.sleep,
                                  get_clock_info=time.get_clock_info)  # fmt: skip
    for module in (contenders, racing, sampling):
        monkeypatch.setattr(module, "time", clock)
    code, out, _ = bench(capsys, CONV, MAXMAX, "--repeat", "2", "--json")
    assert code == 0
    report = json.loads(out, parse_constant=pytest.fail)
    for result in report["results"]:
        for name in RATES:
            assert 0 < result[name] < math.inf
        assert all(number >= 0 and math.isfinite(number) for number in numbers(result["warm"]))
    code, out, _ = bench(capsys, CONV, "--repeat", "2")
    assert code == 0
    assert not {"inf", "nan", "-1", "0"} & set(out.replace("%", " ").split())


@pytest.mark.parametrize("kernel_s", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_kernel_times_that_cannot_be_are_thrown_away(install_backends: Install, kernel_s: float) -> None:
    def clock(timings: Timings) -> None:
        timings.kernel_s, timings.clock = kernel_s, "device"

    install_backends(Clocked(clock=clock))
    found = dispatcher.benchmark(CONV, repeats=2)
    assert found.warm.kernel is None and found.cold.kernel is None and found.kernel_s == ()
    assert found.clock == ""
    assert ("the device's clock gave" in found.clock_note) == (kernel_s != 0.0)
    assert found.roofline_share is not None and 0 < found.roofline_share < math.inf
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_pipeline_without_products_has_no_rate_of_them(fake: FakeBackend) -> None:
    problem = {
        "name": "only-gelu",
        "title": "GELU alone",
        "parameters": [
            {"name": "input", "type": "tensor", "const": True, "shape": ["n", "c", "d", "d", "d"]},
            {"name": "output", "type": "tensor", "const": False},
            *({"name": name, "type": "size_t"} for name in "ncd"),
        ],
        "pipeline": [{"op": "gelu"}],
        "cases": {"sample": {"n": 1, "c": 2, "d": 3}},
    }
    found = dispatcher.benchmark(problem, repeats=1)
    assert found.gflops is None
    assert found.ideal_gbytes_per_s is not None and found.ideal_gbytes_per_s > 0


def test_rates_are_numbers_above_zero_or_nothing() -> None:
    assert sampling.rate(2e9, 1.0) == 2.0
    for amount, seconds in ((0, 1.0), (1, 0.0), (1, -1.0), (1, math.inf), (1, math.nan), (1e308, 1e-300)):
        assert sampling.rate(amount, seconds) is None


def test_statistics_of_times() -> None:
    times = Times((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (times.median_s, times.quartiles_s, times.min_s) == (3.0, (2.0, 4.0), 1.0)
    assert times.uncertainty == pytest.approx(1.57 * 2.0 / math.sqrt(5) / 3.0)
    assert Times((0.0, 0.0)).uncertainty is None
    found = sampling.ratio(Times((8.0, 10.0, 12.0)), Times((1.0, 2.0, 3.0)))
    assert (found.value, found.low, found.high) == (5.0, 9.0 / 2.5, 11.0 / 1.5)


# ---- the roofline ------------------------------------------------------------------------------------------
def test_every_device_measures_what_it_can_do(backend_device: Device) -> None:
    measured = backend(backend_device.backend)
    assert isinstance(measured, Measurable)
    if backend_device.backend == "cuda":
        pytest.skip("test_cuda_roofline.py does it in short runs")
    found = measured.roofline(backend_device, "float32")
    assert 0.1 < found.gflops < 1e6
    assert 0.1 < found.gbytes_per_s < 1e5
    assert found.dtype == ("float64" if backend_device.kind == "reference" else "float32")
    measured.flush_caches(backend_device)


def test_the_share_of_the_roofline(install_backends: Install) -> None:
    def clock(timings: Timings) -> None:
        timings.kernel_s, timings.clock = 1e-5, "device"

    clocked = Clocked(clock=clock)
    install_backends(clocked)
    found = dispatcher.benchmark(CONV, repeats=2)
    operator = found.operator
    best_s = max(operator.flops / 100e9, operator.ideal_bytes / 10e9)
    assert found.roofline_share == pytest.approx(best_s / 1e-5)
    dispatcher.benchmark(MAXMAX, repeats=1)
    assert clocked.rooflines == 1  # once for a device


def test_a_roofline_that_cannot_be_measured_costs_nothing_else(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked = Clocked()

    def fails(device: Device, dtype: str) -> Roofline:
        raise RuntimeError("no")

    monkeypatch.setattr(clocked, "roofline", fails)
    install_backends(clocked)
    found = dispatcher.benchmark(CONV, repeats=1)
    assert found.roofline is None and found.roofline_share is None


# ---- peers -------------------------------------------------------------------------------------------------
def make_peer(change: Callable[[np.ndarray], np.ndarray], seen: list[Any] | None = None) -> Any:
    """Prepares a peer that changes the right result."""

    def make(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
        if seen is not None:
            seen.append((threads, gpu))
        right = correct(operator, tensors)

        def call(timings: Timings | None = None) -> np.ndarray:
            if timings is not None and gpu is not None:
                timings.kernel_s, timings.clock = 1e-7, "device"
            return change(right.copy())

        return call

    return make


def slow(result: np.ndarray) -> np.ndarray:
    time.sleep(0.02)
    return result


def unsupported(*_: Any) -> PeerCall:
    raise peers.Unsupported("it knows no such step")


@pytest.fixture
def some_peers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Peers that are right, slow, wrong, changing and unable; gives what they were made with."""
    seen: list[Any] = []
    table = {
        "right": Peer("Right", (), make_peer(lambda result: result, seen)),
        "slow": Peer("Slow", (), make_peer(slow)),
        "wrong": Peer("Wrong", (), make_peer(lambda result: result * np.float32(1.001))),
        "unable": Peer("Unable", (), unsupported),
        "missing": Peer("Missing", ("json", "no_such_module"), unsupported),
    }
    monkeypatch.setattr(peers, "PEERS", table)
    monkeypatch.setattr(contenders, "PEERS", table)
    return seen


def test_peers_take_part_and_are_checked(
    fake: FakeBackend, some_peers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = bench(capsys, CONV, "--against", "right,slow,wrong,unable", "--repeat", "3", "--json")
    assert code == 0  # what a peer cannot do is no failure of ours
    report = json.loads(out)
    assert [peer["peer"] for peer in report["peers"]] == ["right", "slow"]
    assert all(peer["verified"] and peer["place"] == "cpu" for peer in report["peers"])
    assert some_peers == [(machine.cores(), None)]
    (result,) = report["results"]
    found = result["ratios"]["slow"]
    assert 0 < found["low"] <= found["value"] <= found["high"]
    assert found["value"] == report["peers"][1]["median_s"] / result["median_s"]
    assert report["peers"][1]["min_s"] >= 0.02
    reasons = {failure["device"]: failure["reason"] for failure in report["failures"]}
    assert "wrong result on Wrong (cpu)" in reasons["wrong"]
    assert "it knows no such step" in reasons["unable"]
    assert len(err.splitlines()) == 2
    code, out, _ = bench(capsys, CONV, "--against", "slow", "--repeat", "3")
    assert code == 0
    assert "how many times as long others take" in out


def test_a_peer_that_becomes_wrong_is_found(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, some_peers: list[Any]
) -> None:
    calls: list[int] = []

    def wears_out(result: np.ndarray) -> np.ndarray:
        calls.append(1)
        return result if len(calls) < 6 else result + np.float32(1.0)

    monkeypatch.setitem(peers.PEERS, "right", Peer("Right", (), make_peer(wears_out)))
    outcome = race(CONV, ["fake"], against="right", repeats=2)
    assert outcome.peers == () and len(outcome.results) == 1
    assert outcome.results[0].left_out == (("right", outcome.failures[0].reason),)
    assert "wrong result on Right (cpu) (call" in outcome.failures[0].reason


def test_a_peer_that_changes_the_inputs_spoils_the_race(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, some_peers: list[Any]
) -> None:
    def make(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
        right = correct(operator, tensors)

        def call(timings: Timings | None = None) -> np.ndarray:
            tensors[operator.source].ravel()[0] += 1
            return right.copy()

        return call

    monkeypatch.setitem(peers.PEERS, "right", Peer("Right", (), make))
    with pytest.raises(VerificationError, match=r"input tensor .* was changed by one of|wrong result"):
        dispatcher.benchmark(CONV, device="numpy", against="right", repeats=1)


@pytest.mark.parametrize("fails", ["", "make", "call"])
def test_a_peer_leaves_the_process_as_it_was(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, some_peers: list[Any], fails: str
) -> None:
    monkeypatch.setenv("PEER_GONE", "there")
    monkeypatch.setenv("PEER_CHANGED", "before")
    monkeypatch.delenv("PEER_NEW", raising=False)
    before = dict(os.environ), sys.getrecursionlimit()

    def spoil(fail: bool) -> None:
        os.environ.update(PEER_NEW="1", PEER_CHANGED="after")
        os.environ.pop("PEER_GONE", None)
        sys.setrecursionlimit(3000)
        if fail:
            raise RuntimeError("no more")

    def make(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
        spoil(fails == "make")
        right = correct(operator, tensors)

        def call(timings: Timings | None = None) -> np.ndarray:
            spoil(fails == "call")
            return right.copy()

        return call

    monkeypatch.setitem(peers.PEERS, "right", Peer("Right", (), make))
    outcome = race(CONV, ["fake"], against="right", repeats=1)
    assert [failure.reason for failure in outcome.failures] == (["RuntimeError: no more"] if fails else [])
    assert (dict(os.environ), sys.getrecursionlimit()) == before


@pytest.mark.parametrize("place", ["opencl", "cuda"])
@pytest.mark.parametrize("fails", ["compile", "call", ""])
def test_settings_of_torch_are_put_back(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch, place: str, fails: str
) -> None:
    """Switching TF32 on or off sets the precision of float32 products, as in PyTorch."""
    flags = types.SimpleNamespace
    settings = {"threads": 77, "precision": "medium"}

    class Switch:
        allow_tf32 = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            settings["precision"] = "high" if value else "highest"

    def fail(what: str) -> Any:
        if what == fails:
            raise RuntimeError("no more")
        return contextlib.nullcontext()

    def array(value: np.ndarray) -> Any:
        tensor = flags(numpy=lambda: right(value))
        tensor.to = tensor.contiguous = tensor.cpu = tensor.reshape = lambda *a, **b: tensor
        return tensor

    def right(value: np.ndarray) -> np.ndarray:
        assert settings["threads"] == machine.cores() and config.recompile_limit == 64
        assert place == "opencl" or (not matmul.allow_tf32 and torch.backends.cudnn.benchmark is True)
        return value.copy()

    event = flags(record=lambda: None, elapsed_time=lambda end: 1e-6)
    matmul, config = Switch(), flags(recompile_limit=8)
    torch = flags(
        get_num_threads=lambda: settings["threads"],
        set_num_threads=lambda count: settings.update(threads=count),
        get_float32_matmul_precision=lambda: settings["precision"],
        set_float32_matmul_precision=lambda precision: settings.update(precision=precision),
        backends=flags(cuda=flags(matmul=matmul), cudnn=flags(allow_tf32=True, benchmark=None)),
        cuda=flags(
            is_available=lambda: True, device=contextlib.nullcontext, Event=lambda **_: event, synchronize=lambda: None
        ),
        device=str, channels_last_3d="last", contiguous_format="contiguous", from_numpy=array,
        compile=lambda function, **_: fail("compile") and function, no_grad=lambda: fail("call"),
        _dynamo=flags(config=config),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers, "torch_pipeline", lambda operator, constant: lambda x: x)
    name = "torch-max-autotune" if place == "cuda" else "torch-compile"
    monkeypatch.setitem(peers.PEERS, name, replace(peers.PEERS[name], modules=()))
    install_backends(FakeBackend(place, kind="gpu" if place == "cuda" else "cpu"))
    outcome = race(CONV, [place], against=name, repeats=1)
    assert len(outcome.failures) == 1 and ("no more" in outcome.failures[0].reason) == bool(fails)
    assert settings == {"threads": 77, "precision": "medium"} and config.recompile_limit == 8
    assert matmul.allow_tf32 and vars(torch.backends.cudnn) == {"allow_tf32": True, "benchmark": None}


def test_peers_of_a_cuda_device_run_on_it(install_backends: Install, some_peers: list[Any]) -> None:
    install_backends(FakeBackend("cuda", devices=("One", "Two"), kind="gpu"), FakeBackend("opencl"))
    outcome = race(CONV, ["cuda:1", "numpy", "opencl:0"], against="right", repeats=1)
    assert [gpu for _, gpu in some_peers] == [1, None]
    assert [peer.place for peer in outcome.peers] == ["cuda:1", "cpu"]
    by_name = {result.name: result for result in outcome.results}
    assert [peer.place for peer in by_name["cuda:1"].peers] == ["cuda:1"]
    assert [peer.place for peer in by_name["numpy"].peers] == ["cpu"]
    assert by_name["opencl:0"].peers == ()
    assert "opencl:0 is neither" in outcome.failures[0].reason
    assert outcome.peers[0].clock == "device" and outcome.peers[1].clock == ""


@pytest.mark.parametrize(
    ("against", "reason"),
    [
        ("nobody", "against is 'nobody'; expected one of right, slow"),
        ("right,", "against is ''; expected one of"),
        ("missing", "needs no_such_module, which is not installed; pip install 'kernel-dispatcher[bench]'"),
    ],
)
def test_peers_that_are_not_there_end_it_at_once(
    fake: FakeBackend, some_peers: list[Any], capsys: pytest.CaptureFixture[str], against: str, reason: str
) -> None:
    code, out, err = bench(capsys, CONV, "--against", against)
    assert (code, out) == (2, "")
    assert reason in err and err.count("\n") == 1
    assert fake.probes == fake.calls == 0


@pytest.mark.parametrize("name", ["torch", "torch-channels-last", "onnxruntime", "openvino"])
def test_real_peers(name: str) -> None:
    for module in peers.PEERS[name].modules:
        pytest.importorskip(module)
    outcome = race(LAYERNORM, ["numpy"], against=name, repeats=1, batch_size=1)
    assert outcome.failures == ()
    (peer,) = outcome.peers
    assert peer.comparison is not None and peer.comparison.passed
    assert 0 <= peer.comparison.max_error_over_bound <= peers.PEER_SLACK
    reason = "float64" if name in ("onnxruntime", "openvino") else None
    outcome = race(LAYERNORM, ["numpy"], against=name, repeats=1, batch_size=1, dtype="float64")
    assert [failure.name for failure in outcome.failures] == ([name] if reason else [])


def test_torch_without_cuda_says_so(install_backends: Install) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this PyTorch sees a CUDA device")
    install_backends(FakeBackend("cuda", kind="gpu"))
    outcome = race(CONV, ["cuda"], against="torch,onnxruntime", repeats=1)
    reasons = {failure.name: failure.reason for failure in outcome.failures}
    (failure,) = race(CONV, ["numpy"], against="torch-cudnn", repeats=1).failures
    assert "cuDNN on NVIDIA's GPUs only" in failure.reason
    assert "this PyTorch sees no CUDA device" in reasons["torch"]
    assert "it runs on the CPU here, and the device is a GPU" in reasons["onnxruntime"]


@pytest.mark.parametrize("tf32", [False, True])
def test_torch_on_a_gpu_sets_tf32_and_takes_the_device_s_times(tf32: bool) -> None:
    now = iter([1.0, 3.0, 7.0, 8.0])  # milliseconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(now)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Tensor:
        def __init__(self) -> None:
            self.moves: list[Any] = []

        def to(self, place: Any = None, memory_format: Any = None) -> Tensor:
            self.moves.append(place or memory_format)
            return self

        def contiguous(self) -> Tensor:
            return self

        cpu = contiguous

        def numpy(self) -> str:
            return "the result"

    flags = types.SimpleNamespace
    torch = flags(
        backends=flags(cuda=flags(matmul=flags(allow_tf32=None)), cudnn=flags(allow_tf32=None)),
        cuda=flags(device=lambda device: contextlib.nullcontext(), Event=Event, synchronize=lambda: None),
        no_grad=contextlib.nullcontext,
    )
    source = Tensor()
    call = peers._on_gpu(torch, lambda x: x, source, "cuda:0", not tf32, tf32)
    timings = Timings()
    assert call(timings) == "the result"  # type: ignore[comparison-overlap]
    assert source.moves == ["cuda:0"]
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert vars(torch.backends.cudnn) == {"allow_tf32": tf32, "benchmark": not tf32}
    assert (timings.upload_s, timings.kernel_s, timings.download_s) == pytest.approx((2e-3, 4e-3, 1e-3))
    assert timings.clock == "device"


def test_importing_the_peers_loads_no_library() -> None:
    code = (
        "import sys\n"
        "from dispatcher.timing import charts, differences, peers, racing\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("torch", "onnx", "onnxruntime", "openvino", "matplotlib", "pyopencl", "pycuda"):
        assert f"'{name}'" not in loaded


# ---- a busy machine ----------------------------------------------------------------------------------------
def busy(monkeypatch: pytest.MonkeyPatch, *loads: float) -> None:
    """Let the machine be as busy as that, one moment after another."""
    found = iter(loads)
    monkeypatch.setattr(machine.LoadMeter, "foreign_cores", lambda self: next(found))


def test_a_busy_machine_is_refused_unless_it_is_forced(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = float(machine.cores())
    busy(monkeypatch, whole)
    code, out, err = bench(capsys, CONV)
    assert (code, out) == (3, "")
    assert "cores busy" in err and "--force" in err and err.count("\n") == 1
    assert fake.calls == 0
    busy(monkeypatch, whole)
    with pytest.raises(BusyError):
        dispatcher.benchmark(CONV)
    busy(monkeypatch, whole)
    code, out, err = bench(capsys, CONV, "--force", "--repeat", "1")
    assert code == 0 and out
    assert "trust no figure of it" in err


def test_wrong_arguments_are_told_before_a_busy_machine(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy(monkeypatch, *[float(machine.cores())] * 20)
    for arguments, expected, reason in (
        (["--device", "nope"], 3, "no backend 'nope'"),
        (["--device", "fake:5"], 3, "no device 5"),
        (["--set", "batch_size=0"], 2, "the batch is empty"),
        (["--case", "nope"], 2, "no case 'nope'"),
        (["--against", "nope"], 2, "against is 'nope'"),
    ):
        code, out, err = bench(capsys, CONV, *arguments)
        assert (code, out, err.count("\n")) == (expected, "", 1)
        assert reason in err
    with pytest.raises(DeviceError, match="no device 5"):
        dispatcher.benchmark(CONV, device="fake:5")
    with pytest.raises(InputError, match="the batch is empty"):
        dispatcher.benchmark(CONV, batch_size=0)
    assert fake.calls == 0


def test_load_that_comes_later_is_told(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy(monkeypatch, 0.0, float(machine.cores()))
    code, out, err = bench(capsys, CONV, "--repeat", "1", "--json")
    assert code == 0
    assert f"cores busy while {CONV} was timed" in err
    assert json.loads(out)["races"][0]["foreign_cores"] == machine.cores()


def test_what_counts_as_busy() -> None:
    assert machine.busy_reason(None) is None
    assert machine.busy_reason(0.4) is None
    assert "cores busy" in (machine.busy_reason(machine.cores() * 1.0) or "")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc/stat")
def test_other_processes_are_foreign_and_this_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            time.sleep(0.2)
            meter = machine.LoadMeter.start()
            time.sleep(0.5)
            foreign = foreign_cores(meter)
        finally:
            child.kill()
    assert foreign is not None and foreign > 0.4
    meter = machine.LoadMeter(time.perf_counter() - 1.0, time.process_time() - 1.0, 100.0)
    monkeypatch.setattr(machine, "_busy_seconds", lambda: 101.5)
    assert foreign_cores(meter) == pytest.approx(0.5, abs=0.05)
    monkeypatch.setattr(machine, "_busy_seconds", lambda: None)
    assert foreign_cores(meter) is None


# ---- JSON and charts ---------------------------------------------------------------------------------------
def test_a_chart_is_drawn(
    install_backends: Install, some_peers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    install_backends(Clocked())
    path = tmp_path / "chart.png"
    code, _, err = bench(
        capsys, CONV, MAXMAX, "--device", "all", "--against", "right", "--repeat", "1", "--plot", str(path)
    )
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")
    install_backends(FakeBackend(kind="cpu"), keep=())  # knows no roofline
    code, _, err = bench(capsys, CONV, "--repeat", "1", "--plot", str(path))
    assert (code, err) == (0, "")


def test_a_chart_that_cannot_be_drawn_ends_it_at_once(
    fake: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if Matplotlib were there
    for path in ("chart.gif", str(tmp_path / "none" / "chart.png")):
        code, out, err = bench(capsys, CONV, "--plot", path)
        assert (code, out, err.count("\n")) == (2, "", 1) and path in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = bench(capsys, CONV, "--plot", str(tmp_path / "chart.png"))
    assert (code, out) == (2, "")
    assert "needs matplotlib, which is not installed; pip install 'kernel-dispatcher[plot]'" in err
    assert fake.probes == fake.calls == 0
    project = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '\nplot = ["matplotlib' in project  # the extra that the message names


def test_wrong_options(fake: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--time-limit", "0"], ["--time-limit", "soon"], ["--repeat", "0"], ["--warmup", "-1"]):
        code, out, err = bench(capsys, CONV, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert arguments[0] in err
    assert fake.probes == 0


# ---- comparing ---------------------------------------------------------------------------------------------
@pytest.fixture
def report(fake: FakeBackend, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """A result with steady times of 1 ms."""
    code, out, _ = bench(capsys, CONV, MAXMAX, "--device", "fake", "--repeat", "1", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    for result in found["results"]:
        for state in ("warm", "cold"):
            result[state]["wall"]["seconds"] = [1e-3 * (1 + 0.001 * i) for i in range(9)]
    return found


def changed(report: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A copy of a report with something changed."""
    copy: dict[str, Any] = json.loads(json.dumps(report))
    change(copy)
    return copy


def scale(result: dict[str, Any], factor: float) -> None:
    for state in ("warm", "cold"):
        wall = result[state]["wall"]
        wall["seconds"] = [factor * seconds for seconds in wall["seconds"]]


def compared(
    capsys: pytest.CaptureFixture[str], folder: Path, old: Any, new: Any, *options: str
) -> tuple[int, str, str]:
    """`bench --compare` of two reports."""
    for name, content in (("a.json", old), ("b.json", new)):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return bench(capsys, "--compare", str(folder / "a.json"), str(folder / "b.json"), *options)


def test_differences_beyond_the_noise_are_named(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(copy: dict[str, Any]) -> None:
        scale(copy["results"][0], 1.1)
        scale(copy["results"][1], 0.5)

    code, out, err = compared(capsys, tmp_path, report, changed(report, other), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["schema"], found["command"]) == (1, "bench")
    differences = found["comparison"]["differences"]
    assert [each["verdict"] for each in differences] == ["slower"] * 2 + ["faster"] * 2
    assert differences[0]["ratio"] == pytest.approx(1.1)
    assert differences[0]["low"] > 1 and differences[2]["high"] < 1
    assert "bootstrap" in found["comparison"]["test"] and "quartiles" in found["comparison"]["test"]
    code, out, _ = compared(capsys, tmp_path, report, report)
    assert code == 0
    assert out.count("within the noise") == 4 and "bootstrap" in out

    def few(copy: dict[str, Any]) -> None:
        for state in ("warm", "cold"):
            copy["results"][0][state]["wall"]["seconds"] = [1.0] * 4

    code, out, _ = compared(capsys, tmp_path, report, changed(report, few))
    assert out.count("too few samples") == 2


LEFT_OUT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "case": (lambda copy: copy["results"][0].update(case="odd"), "case is sample and odd"),
    "dtype": (lambda copy: copy["results"][0].update(dtype="float64"), "dtype is float32 and float64"),
    "precision": (lambda copy: copy["results"][0].update(precision="tf32"), "precision is fp32 and tf32"),
    "size": (lambda copy: copy["results"][0]["sizes"].update(depth=99), "depth is"),
    "device": (lambda copy: copy["results"][0]["device"].update(name="Other"), "Fake One and Other"),
    "missing": (lambda copy: copy["results"].pop(0), "it is in the first result only"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_not_the_same_is_left_out_and_said(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, reason = LEFT_OUT[name]
    code, out, _ = compared(capsys, tmp_path, report, changed(report, change))
    assert code == 0
    assert f"{CONV} on fake:0: " in out and reason in out
    assert out.count("within the noise") == 2  # the other problem


def test_other_machines_and_versions(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(copy: dict[str, Any]) -> None:
        copy["machine"]["cpu"] = "Abacus"

    code, out, err = compared(capsys, tmp_path, report, changed(report, elsewhere))
    assert code == 2
    assert "the machines differ" in out and "nothing in common" in err

    def newer(copy: dict[str, Any]) -> None:
        copy["versions"]["numpy"] = "99"
        copy["races"][0]["foreign_cores"] = 64.0
        copy["results"][0]["device"]["facts"]["driver"] = "One"  # "Fake One" is "Fake ", driver One

    old = changed(report, lambda copy: copy["results"][0]["device"].update(name="Fake Two"))
    old["results"][0]["device"]["facts"]["driver"] = "Two"
    code, out, _ = compared(capsys, tmp_path, old, changed(report, newer))
    assert code == 0
    assert "version of numpy" in out
    assert "driver of fake:0: Two and One" in out
    assert "kept 64 cores busy while the second result was measured" in out


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "not JSON",
        "[" * 200_000,
        '{"a":' * 100_000,
        "1" * 10_000,
        '{"schema": 2, "command": "bench"}',
        '{"schema": 1, "command": "run"}',
    ],
)
def test_files_that_are_no_results(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    code, out, err = compared(capsys, tmp_path, report, content)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "b.json" in err


def first_seconds(copy: dict[str, Any], seconds: Any) -> None:
    copy["results"][0]["warm"]["wall"]["seconds"] = seconds


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "zero": (lambda copy: first_seconds(copy, [0.0, 1.0]), "results[0].warm.wall.seconds[0] is 0.0"),
    "nan": (lambda copy: first_seconds(copy, [math.nan]), "seconds[0] is NaN"),
    "too_long": (lambda copy: first_seconds(copy, [1.0, 1e308]), "seconds[1] is 1e+308"),
    "too_short": (lambda copy: first_seconds(copy, [5e-324]), "seconds[0] is 5e-324"),
    "texts": (lambda copy: first_seconds(copy, ["abc"]), "seconds[0] is 'abc'; expected a number of seconds"),
    "bool": (lambda copy: first_seconds(copy, [True]), "seconds[0] is true"),
    "no_seconds": (lambda copy: first_seconds(copy, []), "seconds is []; expected a list of one or more"),
    "one_text": (lambda copy: first_seconds(copy, "123456"), "seconds is '123456'; expected a list"),
    "mapping": (lambda copy: first_seconds(copy, {"1": 2.0}), "expected a list"),
    "twice": (lambda copy: copy["results"].append(copy["results"][0]), "is in one result twice"),
    "lacking": (lambda copy: copy["results"][0].pop("warm"), "results[0].warm is missing"),
    "null": (lambda copy: copy["results"][0].update(cold=None), "results[0].cold is null"),
    "number": (lambda copy: copy["results"][0].update(problem=5), "results[0].problem is 5; expected a text"),
    "surrogate": (lambda copy: copy["results"][0].update(problem="\ud800"), "results[0].problem is '\\ud800'"),
    "key": (lambda copy: copy["results"][0]["sizes"].update({"\ud800": 1}), "has the field '\\ud800'"),
    "escape": (lambda copy: copy["versions"].update(numpy="\x1b[31m"), "versions.numpy is '\\x1b[31m'"),
    "facts": (lambda copy: copy["results"][0]["device"].update(facts=None), "results[0].device.facts is null"),
    "machine": (lambda copy: copy.update(machine="x"), "machine is 'x'; expected a mapping"),
    "load": (lambda copy: copy["races"][0].update(foreign_cores=10**400), "races[0].foreign_cores is 1000"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_results(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, reason = DAMAGES[name]
    code, out, err = compared(capsys, tmp_path, report, changed(report, change))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err and (name == "twice" or "b.json" in err)


def test_files_that_cannot_be_read(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(report), encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(differences, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "large").write_text(" " * (differences.MAX_FILE_BYTES + 1))
    for path, reason in (
        (tmp_path / "fifo", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "bytes", "is not a text in UTF-8"),
        (tmp_path / "large", "more than 1 MiB"),
    ):
        code, out, err = bench(capsys, "--compare", str(tmp_path / "a.json"), str(path))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert reason in err and str(path) in err


def test_what_means_nothing_beside_compare_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capsys, CONV, "--compare", "a.json", "b.json")
    assert code == 2 and "PROBLEM" in err
    for options in (
        ["--against", "torch"], ["--case", "nonsense"], ["--time-limit", "abc"], ["--repeat", "-5"],
        ["--seed", "0"], ["--warmup", "2"], ["--no-verify"], ["--force"], ["--plot", "x.png"], ["--device", "all"],
        ["--set", "stride=1"], ["--dtype", "float32"], ["--precision", "fp32"], ["--algorithm", "direct"],
        ["--option", "box=2x8"], ["--no-self-test"],
    ):  # fmt: skip
        code, out, err = bench(capsys, "--compare", "a.json", "b.json", *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert options[0] in err and "--compare" in err


def test_what_bench_writes_can_be_compared_though_a_problem_was_named_twice(
    fake: FakeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = bench(capsys, CONV, CONV, "--device", "fake", "--repeat", "1", "--json")
    assert code == 0
    code, out, err = compared(capsys, tmp_path, out, out)
    assert (code, err) == (0, "") and "too few samples" in out


def test_the_test_seldom_finds_what_is_not_there_and_finds_what_is() -> None:
    from dispatcher.timing.differences import judge

    generator = np.random.default_rng(1)

    def draw(scale: float) -> Times:
        noise = generator.lognormal(0.0, 0.03, 15) + (generator.random(15) < 0.1) * 0.5
        return Times(tuple(scale * noise))

    same = [judge(("p", "d"), "warm wall", draw(1.0), draw(1.0)).verdict for _ in range(100)]
    assert sum(verdict != "within the noise" for verdict in same) <= 2
    slower = [judge(("p", "d"), "warm wall", draw(1.0), draw(1.2)).verdict for _ in range(50)]
    assert slower.count("slower") >= 35
    low, high = bootstrap_ratio(Times((2.0,) * 9), Times((1.0,) * 9), 0.99)
    assert low == high == 2.0


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_medians_of_resamples_are_distributed_as_those_of_whole_resamples(count: int) -> None:
    generator = np.random.default_rng(count)
    values = np.arange(1.0, count + 1)
    whole = np.median(values[generator.integers(0, count, (40_000, count))], axis=1)
    drawn = np.concatenate([resampled_medians(Times(tuple(values)), generator) for _ in range(10)])
    for value in np.unique(whole):
        assert np.mean(drawn <= value) == pytest.approx(np.mean(whole <= value), abs=0.015)
    assert set(drawn) == set(whole)


def test_many_samples_are_compared_at_once() -> None:
    many = Times(tuple(np.linspace(1.0, 2.0, 300_000)))
    start = time.perf_counter()
    low, high = bootstrap_ratio(many, Times((1.0,) * 9), 0.99)
    assert 1.49 < low < 1.5 < high < 1.51
    assert time.perf_counter() - start < 5


def test_a_race_without_results_is_a_race(install_backends: Install) -> None:
    install_backends(FakeBackend(unsupported="it cannot"))
    outcome = race(CONV, ["fake"], repeats=1)
    assert isinstance(outcome, Race)
    assert outcome.results == () and outcome.rounds == 0
    assert "it cannot" in outcome.failures[0].reason


def test_what_came_of_it_has_a_short_repr(fake: FakeBackend, some_peers: list[Any]) -> None:
    outcome = race(CONV, ["fake", "numpy"], against=["right"], repeats=1)
    assert repr(outcome) == "<Race of fake:0, numpy, right, 1 rounds>"
    text = repr(outcome.results[0])
    assert text.startswith(f"<Benchmark {CONV} on fake:0: median ") and "of 1 warm call, checked" in text
    assert repr(outcome.peers[0]).startswith(f"<PeerBenchmark {CONV} on right: median ")
