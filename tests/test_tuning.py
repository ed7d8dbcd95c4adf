"""Tuning: candidates are verified, the winner is kept and used, wrong candidates lose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import FakeBackend

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
    assert PROBLEM in out and "GAIN" in out and "KEPT" in out
    assert f"candidates for {PROBLEM} on {opencl_device.id}" in out and "QUARTILES" in out
    assert sum(line.startswith(("the default ", "algorithm=")) for line in out.splitlines()) == 2
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


# ---- noise -------------------------------------------------------------------------------------------------
class Scripted(Liar):
    """A GPU whose kernels take the seconds that ``script`` says, from a candidate's number, the number of its calls
    until then and that of all calls."""

    def __init__(self, script: Callable[[int, int, int], float]) -> None:
        super().__init__()
        self.script, self.calls = script, [0, 0, 0]

    def compile(self, operator: Any, device: Any, options: Mapping[str, Any]) -> Any:
        number = options["n"]

        def run(tensors: Any, output: Any = None, timings: Timings | None = None) -> np.ndarray:
            if timings is not None:
                seconds = self.script(number, self.calls[number], sum(self.calls))
                timings.clock, timings.kernel_s = "device", seconds
                self.calls[number] += 1
            return np.full(1, number)

        return run

    def search(self, **given: Any) -> tuning.TuneResult:
        operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
        return tune(self, operator, Device("liar", 0, "liar", "gpu"), {}, lambda result: "", **given)


def noise(number: int, call: int, share: float) -> float:
    """1 us, give or take that share of it."""
    return 1e-6 * (1.0 + share * np.random.default_rng((number, call)).uniform(-1.0, 1.0))


FIRST_ROUNDS = tuning.HEATS + tuning.MOST_ROUNDS
SCRIPTS: dict[str, tuple[Callable[[int, int, int], float], dict[str, int], str]] = {
    "nothing but noise": (lambda n, call, _: noise(n, call, 0.4), {}, "by more than the noise"),
    "a gain within the noise": (
        lambda n, call, _: noise(n, call, 0.4) * (0.93 if n else 1.0),
        {},
        "more than the noise",
    ),
    "a gain that is too small": (lambda n, *_: 1e-6 if n == 0 else 0.98e-6, {}, "by more than the noise"),
    "the machine gets faster": (lambda n, call, every: noise(n, call, 0.01) / (1 + every), {}, "more than the noise"),
    "luck": (
        lambda n, call, _: noise(n, call, 0.1) * (0.5 if n == 1 and call < FIRST_ROUNDS else 1.0),
        {},
        "not so in a second round",
    ),
    "a gain": (lambda n, call, _: noise(n, call, 0.1) * (0.7 if n == 1 else 1.0), {"n": 1}, ""),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_winner_is_faster_by_more_than_the_noise_twice(name: str) -> None:
    script, best, note = SCRIPTS[name]
    backend = Scripted(script)
    result = backend.search()
    assert (result.best, result.kept, backend.kept) == (best, True, [best or {"n": 0}])
    assert note in result.note and bool(result.note) == (not best)
    assert result.gain == (pytest.approx(1 / 0.7, rel=0.05) if best else 1.0)
    low, high = result.candidates[0].quartiles_s or (1.0, 0.0)
    assert low <= result.default_s <= high


def test_calls_are_interleaved() -> None:
    order: list[int] = []

    def script(number: int, call: int, every: int) -> float:
        order.append(number)
        return noise(number, call, 0.1)

    Scripted(script).search()
    assert len(order) % 3 == 0 and all(set(order[at : at + 3]) == {0, 1, 2} for at in range(0, len(order), 3))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_kept_from_a_busy_machine(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([64.0, 0.0] if when == "before" else [0.0, 64.0])
    monkeypatch.setattr(machine.LoadMeter, "foreign_cores", lambda self: next(loads))
    backend = Scripted(lambda n, *_: 1e-6 / (1 + n))
    result = backend.search()
    assert result.best == {"n": 2} and not result.kept and backend.kept == []
    assert result.busy.startswith("other programs keep 64 of")


def test_an_interrupted_search_keeps_nothing() -> None:
    def script(number: int, call: int, every: int) -> float:
        if call == FIRST_ROUNDS + 3:
            raise KeyboardInterrupt
        return 1e-6 / (1 + number)

    backend = Scripted(script)
    with pytest.raises(KeyboardInterrupt):
        backend.search()
    assert backend.kept == []


@pytest.mark.parametrize("end", [KeyboardInterrupt, False])
def test_all_keys_are_stored_or_none(
    end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator with several convolutions has a key for each; ``end`` is what becomes of the second one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    winners.store(("b",), {"tile": "1x1"}, 1.5)
    put, done = winners.RESULTS.put, []

    def second_fails(key: str, data: bytes) -> bool:
        done.append(key)
        if len(done) == 2 and end is not False:
            raise end
        return len(done) != 2 and put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(winners.RESULTS, "put", second_fails)
        with pytest.raises(end) if end else contextlib.nullcontext():
            assert winners.store_all([("a",), ("b",), ("c",)], {"tile": "2x2"}, 2.0) is False
    assert winners.stored(("a",)) is None and winners.stored(("c",)) is None
    assert winners.stored(("b",)) == winners.Tuned({"tile": "1x1"}, 1.5)


# ---- what is kept ------------------------------------------------------------------------------------------
@pytest.fixture
def two_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Something is kept of PROBLEM and of a problem file that is gone, whose name this is; and something damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
    about = winners.measured_with(operator, "a device")
    winners.store(("1",), {"tile": "2x8"}, 1.25, about)
    winners.store(("2",), {"tuned": "ignore"}, 1.0, {**about, "problem": "gone"})
    winners.store(("3",), {}, 2.0)
    (winners.RESULTS.folder / "damaged").write_text("nothing")
    return "gone"


def test_what_is_kept_can_be_listed_and_forgotten(two_kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> Any:
        assert cli.main(["tune", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    kept = told("--list")["kept"]
    assert {each.get("problem") for each in kept} == {PROBLEM, two_kept, None}
    (ours,) = told("--list", PROBLEM)["kept"]
    assert (ours["device"], ours["options"], ours["gain"]) == ("a device", {"tile": "2x8"}, 1.25)
    assert ours["sizes"]["batch_size"] > 0 and ours["kept_at"]
    assert cli.main(["tune", "--list"]) == 0
    out = capsys.readouterr().out
    assert f"{PROBLEM}  a device" in out and "tile=2x8" in out and "the default" in out and "unknown" in out
    assert [each["problem"] for each in told("--forget", two_kept)["forgotten"]] == [two_kept]
    assert winners.stored(("1",)) and winners.stored(("2",)) is None
    assert cli.main(["tune", "--forget"]) == 0
    assert "2 forgotten" in capsys.readouterr().out
    assert told("--list") == {"schema": 1, "command": "tune", "kept": []}
    assert cli.main(["tune", "--forget"]) == 0
    assert capsys.readouterr().out == "nothing is kept\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--list", "--device", "numpy"], "--list measures nothing; leave --device out"),
        (["--forget", "--no-keep"], "--forget measures nothing; leave --keep/--no-keep out"),
        (["--forget", "--list"], "--forget measures nothing; leave --list out"),
        (["--list", "nonsense"], "nonsense"),
    ],
)
def test_listing_beside_other_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_tuning_leads_to_an_entry_that_says_what_it_is(
    opencl_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    operator = dispatcher.explain(PROBLEM, device="numpy", case="sample").operator
    assert registry.backend("opencl").remember(operator, opencl_device, {"tile": "2x8"}, 1.5)  # type: ignore[attr-defined]
    (tuned,) = winners.everything().values()
    assert (tuned.about["problem"], tuned.about["dtype"]) == (PROBLEM, "float32")
    assert str(tuned.about["device"]) in opencl_device.name


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


def test_a_busy_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], install_backends: Install
) -> None:
    monkeypatch.setattr(machine, "foreign_load", lambda: 64.0)
    cli.main(["tune", PROBLEM, "--device", "numpy"])
    assert capsys.readouterr().err.startswith("error: numpy: there is nothing to tune")

    class Tunable(FakeBackend):
        kept = False

        def candidates(self, operator: Any, device: Any) -> list[dict[str, int]]:
            return [{}]

        def remember(self, *given: Any) -> None:
            self.kept = True

    fake = Tunable(kind="cpu")
    install_backends(fake)
    for words, code, lines in (([], 3, 2), (["--no-keep"], 0, 1)):
        assert cli.main(["tune", PROBLEM, *words]) == code
        captured = capsys.readouterr()
        assert captured.err.startswith("note: other programs keep")
        assert "  no\n" in captured.out and captured.err.count("\n") == lines and not fake.kept
        assert "nothing is kept, since other programs keep 64" in captured.err or not code
