"""Tuning: candidates are verified, the winner is kept and used, wrong candidates lose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher import cli, registry
from dispatcher.device import machine
from dispatcher.device.splitting import join
from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device, Timings
from dispatcher.timing import tuning, winners
from dispatcher.timing.tuning import tune, tune_problem

PROBLEM = "conv-transpose3d-layernorm-gelu-scaling"


@pytest.fixture
def opencl_device(backend_device: Device) -> Device:
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    return backend_device


def launch(device: Device, **options: str) -> Any:
    explanation = dispatcher.explain(PROBLEM, device=device.id, case="sample", options=options)
    return explanation.launches[0]


def test_the_winner_is_kept_and_used(opencl_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = registry.backend("opencl")
    compiled = dispatcher.compile(PROBLEM, device=opencl_device.id, case="sample")
    operator = compiled.explain().operator
    wanted = {"algorithm": "direct", "tile": "2x8", "box": "3x4", "line": "flat"}
    backend.remember(operator, opencl_device, wanted, 1.5)  # type: ignore[attr-defined]
    detail = launch(opencl_device).detail
    assert (detail["channels_x_vectors"], detail["box"], detail["line"]) == ("2x8", "3x4", "flat")
    assert "1.50 times" in str(detail["why"])
    assert launch(opencl_device, tuned="ignore").detail["box"] != "3x4"
    backend.remember(operator, opencl_device, {"tuned": "ignore"}, 1.0)  # type: ignore[attr-defined]
    assert launch(opencl_device).detail == launch(opencl_device, tuned="ignore").detail
    backend.remember(operator, opencl_device, wanted, 1.5)  # type: ignore[attr-defined]
    assert dispatcher.verify(PROBLEM, device=opencl_device.id)[0].outcome == "passed"


def test_a_search_verifies_and_ranks(opencl_device: Device) -> None:
    result = tune_problem(PROBLEM, device=opencl_device.id, case="sample", keep=False)
    timed = [candidate for candidate in result.candidates if candidate.time_s is not None]
    assert len(timed) >= 5 and all(candidate.time_s > 0 for candidate in timed)
    assert {candidate.options.get("algorithm") for candidate in timed} >= {"direct", "winograd"}
    assert result.gain >= 1.0 and result.best_s <= result.default_s


def test_the_command(
    opencl_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = registry.backend("opencl")
    every = backend.candidates  # type: ignore[attr-defined]
    monkeypatch.setattr(type(backend), "candidates", lambda self, *given: list(every(*given))[:2])
    assert cli.main(["tune", PROBLEM, "--device", opencl_device.id, "--no-keep"]) == 0
    out = capsys.readouterr().out
    assert PROBLEM in out and "GAIN" in out
    assert cli.main(["tune", PROBLEM, "--device", opencl_device.id, "--no-keep", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert len(result["candidates"]) == 2 and result["gain"] >= 1


class Liar:
    """A backend whose second candidate is fastest and wrong, and whose third is right."""

    name = "liar"

    def __init__(self) -> None:
        self.kept: list[Mapping[str, Any]] = []

    def candidates(self, operator: Any, device: Any) -> list[dict[str, int]]:
        return [{"n": 0}, {"n": 1}, {"n": 2}]

    def remember(self, operator: Any, device: Any, options: Mapping[str, Any], gain: float) -> None:
        self.kept.append(options)

    def compile(self, operator: Any, device: Any, options: Mapping[str, Any]) -> Any:
        import time

        def run(tensors: Any, output: Any = None, timings: Timings | None = None) -> np.ndarray:
            time.sleep({0: 0.004, 1: 0.0, 2: 0.001}[options["n"]])
            return np.full(1, options["n"])

        return run

    def probe(self) -> list[Device]:
        return []

    def supports(self, operator: Any, device: Any) -> None:
        return None


def test_a_wrong_candidate_never_wins() -> None:
    backend = Liar()
    operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
    device = Device("liar", 0, "liar", "cpu")

    def wrong(result: np.ndarray) -> str:
        return "wrong" if result[0] == 1 else ""

    result = tune(backend, operator, device, {}, wrong)
    assert result.best == {"n": 2} and backend.kept == [{"n": 2}] and result.gain > 1.5
    assert [c.reason for c in result.candidates if c.options == {"n": 1}] == ["wrong"]


@pytest.mark.parametrize(("kind", "clock"), [("cpu", "host"), ("gpu", "device")])
def test_gpus_are_compared_on_their_own_clock(kind: Any, clock: str) -> None:
    """A call of the second candidate is the fastest one, its kernels are the slowest."""

    class Gpu(Liar):
        def compile(self, operator: Any, device: Any, options: Mapping[str, Any]) -> Any:
            call = super().compile(operator, device, options)

            def run(tensors: Any, output: Any = None, timings: Timings | None = None) -> np.ndarray:
                result: np.ndarray = call(tensors)
                if timings is not None:
                    timings.clock, timings.kernel_s = "device", {0: 2e-6, 1: 3e-6, 2: 1e-6}[options["n"]]
                return result

            return run

    operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
    result = tune(Gpu(), operator, Device("liar", 0, "liar", kind), {}, lambda result: "")
    assert result.clock == result.as_dict()["clock"] == clock
    assert result.best == ({"n": 1} if kind == "cpu" else {"n": 2})
    if kind == "gpu":
        assert (result.default_s, result.gain, result.best_s) == (2e-6, 2.0, 1e-6)


def test_a_default_that_is_best_replaces_what_was_kept() -> None:
    backend = Liar()
    operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
    device = Device("liar", 0, "liar", "cpu")
    result = tune(backend, operator, device, {}, lambda result: "wrong" if result[0] > 0 else "")
    assert result.best == {} and result.gain == 1.0 and backend.kept == [{"n": 0}]
    tune(backend, operator, device, {}, lambda result: "", keep=False)
    assert len(backend.kept) == 1


def test_what_cannot_be_tuned_says_so() -> None:
    with pytest.raises(DeviceError, match="nothing to tune"):
        tune_problem(PROBLEM, device="numpy", case="sample")


@pytest.mark.parametrize(
    "options", [{"box": "2"}, {"tile": "0x2"}, {"line": "round"}, {"algorithm": "fast"}, {"boxes": "1x1"}]
)
def test_bad_options_are_refused(opencl_device: Device, options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        launch(opencl_device, **options)


def test_a_precision_that_the_device_lacks(opencl_device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", PROBLEM, "--device", opencl_device.id, "--precision", "tf32"]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"error: {opencl_device.id} cannot run {PROBLEM}: precision tf32 exists on CUDA")


def test_what_was_left_out_is_said(
    opencl_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = registry.backend("opencl")
    monkeypatch.setattr(type(backend), "candidates", lambda self, *given: [{"tuned": "ignore"}, {"box": "round"}])
    assert cli.main(["tune", PROBLEM, "--device", opencl_device.id, "--no-keep"]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"note: {PROBLEM} with box=round was left out: box is 'round'; expected")


def test_several_devices_are_tuned_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", PROBLEM, "--device", "all-of:numpy"]) in (2, 3)
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "unexpected" not in error
    member = Device("numpy", 0, "NumPy", "cpu", True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match=r"several devices; .* such as numpy:0"):
        patch.setattr(tuning, "first_usable", lambda request: (join("all-of:numpy", [member]), []))
        tune_problem(PROBLEM, device="all-of:numpy", case="sample")


def test_a_winner_that_cannot_be_kept_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    winners.store(("a",), {"tile": "1x1"}, 1.5)
    assert "is not kept" in caplog.text and str(in_the_way) in caplog.text
    assert winners.stored(("a",)) is None


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "foreign_load", lambda: 64.0)
    cli.main(["tune", PROBLEM, "--device", "numpy"])
    assert capsys.readouterr().err.startswith("note: other programs keep")
