"""Several devices on one batch: shares by speed, results joined, one device's failure is the call's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, FakeBackend, correct

import dispatcher
from dispatcher import cli
from dispatcher.check.inputs import random_tensors
from dispatcher.device import selftest
from dispatcher.device.selection import backend_devices
from dispatcher.device.selftest import SelfTest
from dispatcher.device.splitting import shares
from dispatcher.errors import DeviceError, InputError, KernelError
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator


def bound(problem: str, batch: int) -> Operator:
    loaded = load_problem(problem)
    return bind_arguments(loaded, sort_arguments(loaded, {"batch_size": batch}), case="sample")


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, SelfTest]:
    """Self-tests by device id; empty to begin with."""
    found: dict[str, SelfTest] = {}
    monkeypatch.setattr(selftest, "try_device", lambda device, module, again=False: found.get(device.id))
    return found


@pytest.fixture
def pair(install_backends: Install) -> FakeBackend:
    """Two stand-in GPUs."""
    backend = FakeBackend("cuda", devices=["GPU one", "GPU two"])
    install_backends(backend)
    return backend


# ---- shares ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batch", "speeds_", "expected"),
    [
        (8, [1.0, 1.0], [4, 4]),
        (8, [3.0, 1.0], [6, 2]),
        (7, [1.0, 2.0], [2, 5]),
        (5, [1.0, 1.0], [3, 2]),
        (1, [1.0, 5.0], [0, 1]),
        (3, [0.0, 9.0], [2, 1]),
        (10, [1.0, 1.0, 8.0], [1, 1, 8]),
        (2, [1.0, 1.0, 1.0], [1, 1, 0]),
    ],
)
def test_shares_go_with_speed(batch: int, speeds_: list[float], expected: list[int]) -> None:
    assert shares(batch, speeds_) == expected


def test_shares_add_up(rng: np.random.Generator) -> None:
    for _ in range(300):
        batch, count = int(rng.integers(0, 50)), int(rng.integers(1, 6))
        counts = shares(batch, list(rng.random(count) + 1e-3))
        assert sum(counts) == batch
        assert min(counts) >= 0


# ---- two stand-in GPUs -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "how", [{"device": "all-of:cuda"}, {"device": "ALL-OF:CUDA"}, {"devices": ["cuda:0", "cuda:two"]}]
)
def test_each_device_works_on_its_share(
    install_backends: Install, speeds: dict[str, SelfTest], how: dict[str, Any]
) -> None:
    backend = FakeBackend("cuda", devices=["GPU one", "GPU two"])
    install_backends(backend)
    speeds.update({"cuda:0": SelfTest("ok", "", 300.0), "cuda:1": SelfTest("ok", "", 100.0)})
    operator = bound(LAYERNORM, 8)
    tensors = random_tensors(operator, 0)
    compiled = dispatcher.compile(LAYERNORM, case="sample", batch_size=8, **how)
    np.testing.assert_array_equal(compiled(**tensors), correct(operator, tensors))
    assert sorted(len(seen["input"]) for seen in backend.seen) == [2, 6]
    assert compiled.device.id == ("all-of:cuda" if "device" in how else "cuda:0+cuda:two")
    assert compiled.device.name == "cuda:0 GPU one + cuda:1 GPU two"
    notes = [launch.note for launch in compiled.explain().launches]
    assert notes == ["batch items 0 to 5 on cuda:0", "batch items 6 to 7 on cuda:1"]
    again = dispatcher.compile(LAYERNORM, case="sample", batch_size=8, device=compiled.device)
    assert again.device.name == compiled.device.name


def test_shares_are_worked_on_at_the_same_time(install_backends: Install) -> None:
    together = threading.Barrier(2)

    def meet(operator: Operator, tensors: Any) -> np.ndarray:
        together.wait(20)
        return correct(operator, tensors)

    install_backends(FakeBackend("cuda", meet, devices=["one", "two"]))
    operator = bound(CONV, 4)
    tensors = random_tensors(operator, 0)
    result = dispatcher.run(CONV, device="all-of:cuda", case="sample", batch_size=4, **tensors)
    np.testing.assert_array_equal(result, correct(operator, tensors))


def test_a_batch_smaller_than_the_devices_leaves_some_out(pair: FakeBackend) -> None:
    operator = bound(CONV, 1)
    tensors = random_tensors(operator, 0)
    result = dispatcher.run(CONV, device="all-of:cuda", case="sample", batch_size=1, **tensors)
    np.testing.assert_array_equal(result, correct(operator, tensors))
    assert pair.calls == 1
    assert dispatcher.run(CONV, device="all-of:cuda", case="sample", batch_size=0,
                          input=tensors["input"][:0], kernel=tensors["kernel"]).shape[0] == 0  # fmt: skip


def test_one_device_s_failure_is_the_call_s(install_backends: Install) -> None:
    def fail(operator: Operator, tensors: Any) -> np.ndarray:
        if len(tensors["input"]) == 2:
            raise KernelError("kernel conv failed on GPU two")
        return correct(operator, tensors)

    install_backends(FakeBackend("cuda", fail, devices=["one", "two"]))
    operator = bound(CONV, 5)
    tensors = random_tensors(operator, 0)
    with pytest.raises(KernelError, match="kernel conv failed on GPU two"):
        dispatcher.run(CONV, device="all-of:cuda", case="sample", batch_size=5, **tensors)
    with pytest.warns(dispatcher.FallbackWarning, match="all-of:cuda .* is passed over"):
        result = dispatcher.run(CONV, device="all-of:cuda,numpy", case="sample", batch_size=5, **tensors)
    np.testing.assert_array_equal(result, correct(operator, tensors))


def test_a_device_that_is_not_usable_is_left_out_and_told(pair: FakeBackend, speeds: dict[str, SelfTest]) -> None:
    speeds["cuda:1"] = SelfTest("crashed", "crashed with SIGSEGV")
    operator = bound(CONV, 2)
    compiled = dispatcher.compile(CONV, device="all-of:cuda", case="sample")
    np.testing.assert_array_equal(
        compiled(**random_tensors(operator, 0)), correct(operator, random_tensors(operator, 0))
    )
    assert [label for label, _ in compiled.skipped] == ["cuda:1"]
    with pytest.raises(DeviceError, match="crashed with SIGSEGV"):
        dispatcher.compile(CONV, devices=["cuda:0", "cuda:1"], case="sample")


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"device": "all-of:"}, DeviceError, "all-of: wants the name of a backend"),
        ({"device": "all-of:vulkan"}, DeviceError, "all-of: wants the name of a backend, and 'vulkan' is none"),
        ({"device": "all-of"}, DeviceError, "all-of: wants the name of a backend"),
        ({"devices": []}, InputError, r"devices is \[\]; expected a list such as"),
        ({"devices": "cuda"}, InputError, "devices is 'cuda'; expected a list"),
        ({"devices": [1]}, InputError, "devices holds 1; expected texts"),
        ({"devices": ["auto", "cuda"]}, DeviceError, "expected names of single devices"),
        ({"devices": ["cuda:0", "cuda:0"]}, DeviceError, "names cuda:0 twice"),
        ({"devices": ["cuda:0", "cuda:7"]}, DeviceError, "there is no device 7"),
        ({"devices": ["cuda:0"], "device": "numpy"}, InputError, "give one of them"),
    ],
)
def test_what_cannot_be_joined(pair: FakeBackend, how: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        dispatcher.compile(CONV, case="sample", **how)
    assert "\n" not in str(caught.value)


def test_an_operator_that_mixes_batch_items_is_refused(pair: FakeBackend) -> None:
    problem = {
        "name": "made-up",
        "title": "Made up",
        "parameters": [
            {"name": "x", "type": "tensor", "const": True, "shape": ["n", "c", "d", "h", "w"]},
            {"name": "y", "type": "tensor", "const": False},
            *({"name": name, "type": "size_t"} for name in "ncdhw"),
        ],
        "pipeline": [{"op": "softmax", "axis": "batch"}],
    }
    x = np.ones((4, 1, 2, 2, 2), np.float32)
    with pytest.raises(DeviceError, match="it cannot be split over the batch: a step mixes batch items"):
        dispatcher.run(problem, device="all-of:cuda", x=x)


def test_the_command_line_knows_it_too(pair: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", SOFTMAX, "--device", "all-of:cuda", "--set", "batch_size=3"]) == 0
    captured = capsys.readouterr()
    assert "device    all-of:cuda (cuda:0 GPU one + cuda:1 GPU two)" in captured.out
    assert captured.err == ""


# ---- this machine's devices --------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["opencl", "cuda"])
@pytest.mark.parametrize("problem", [CONV, LAYERNORM, SUM, SOFTMAX, MAXMAX])
def test_real_devices_share_a_batch(problem: str, backend: str) -> None:
    usable = [device for device in backend_devices(backend) if device.available]
    if len(usable) < 2:
        pytest.skip(f"there are fewer than two usable {backend} devices")
    operator = bound(problem, 7)
    tensors = random_tensors(operator, 5)
    numbers = {**operator.sizes, **operator.scalars}
    alone = [dispatcher.run(problem, device=device.id, **numbers, **tensors) for device in usable]
    compiled = dispatcher.compile(problem, devices=[device.id for device in usable], **numbers)
    joined = compiled(**tensors)
    counts = shares(7, [selftest.speed(device) for device in usable])
    start = 0
    for count, result in zip(counts, alone, strict=True):
        np.testing.assert_array_equal(joined[start : start + count], result[start : start + count])
        start += count
    results = dispatcher.verify(problem, device=f"all-of:{backend}", batch_size=7)
    assert [result.outcome for result in results] == ["passed"], results[0].reason
