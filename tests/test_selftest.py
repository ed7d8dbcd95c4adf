"""Devices are tried out in a child process first: what kills, hangs or lies never reaches the user's process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Install
from fakes import CONV, FakeBackend
from faulty_icd import FaultyRuntimes, build

import dispatcher
from dispatcher import cli
from dispatcher.check import trial
from dispatcher.device import childprocess, machine, selection, selftest
from dispatcher.device.childprocess import Ended
from dispatcher.device.selftest import SelfTest
from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses Linux' OpenCL loader")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return build(tmp_path_factory.mktemp("faulty"))


@pytest.fixture
def faulty(library: tuple[Path, str], tmp_path: Path) -> FaultyRuntimes:
    return FaultyRuntimes(*library, tmp_path)


# ---- real processes with a real fault ----------------------------------------------------------------------
def test_a_runtime_that_aborts_never_does_so_here(faulty: FaultyRuntimes) -> None:
    runtime = faulty("abort")
    ended = runtime.dispatcher("run", CONV, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["device"]["id"] == "numpy"
    assert report["verified"] is True
    reasons = [entry["reason"] for entry in report["skipped"] if entry["device"].startswith("opencl")]
    assert len(reasons) == 1
    assert "crashed with SIGABRT" in reasons[0]
    assert ended.stderr.count("SIGABRT") == 1
    assert ended.stderr.count("note: opencl is passed over: its self-test crashed") == 1
    assert runtime.contexts == 1  # the child's
    named = runtime.dispatcher("run", CONV, "--device", "opencl")
    assert named.returncode == 3
    assert named.stderr.startswith("error: device opencl: its self-test crashed with SIGABRT")
    assert named.stderr.count("\n") == 1
    assert runtime.contexts == 1  # the outcome was known
    (device,) = runtime.devices()
    assert not device["available"]
    assert "SIGABRT" in device["reason"]


def test_a_runtime_that_hangs_is_ended_in_time(faulty: FaultyRuntimes) -> None:
    runtime = faulty("hang")
    start = time.monotonic()
    (device,) = runtime.devices(DISPATCHER_SELF_TEST="4")
    assert time.monotonic() - start < 30
    assert not device["available"]
    assert "its self-test hung: no answer within 4 s" in device["reason"]
    assert runtime.contexts == 1
    ended = runtime.dispatcher("run", CONV, DISPATCHER_SELF_TEST="4")
    assert ended.returncode == 0
    assert "device    numpy" in ended.stdout
    assert runtime.contexts == 1


def test_a_runtime_that_lies_is_found_out(faulty: FaultyRuntimes) -> None:
    (device,) = faulty("lie").devices()
    assert not device["available"]
    assert "its self-test gave a wrong result" in device["reason"]


def test_a_device_that_cannot_be_opened_is_unavailable(faulty: FaultyRuntimes) -> None:
    (device,) = faulty("closed").devices()
    assert not device["available"]
    assert "could not open it" in device["reason"]


def test_a_runtime_that_kills_whoever_lists_it(faulty: FaultyRuntimes) -> None:
    runtime = faulty("list-abort")
    (device,) = runtime.devices()
    assert not device["available"]
    assert "looking for opencl devices crashed with SIGABRT in a child process" in device["reason"]
    ended = runtime.dispatcher("doctor")
    assert ended.returncode == 3
    assert "accelerated devices that work: none" in ended.stdout


def test_a_runtime_that_kills_whoever_lists_it_is_left_out(faulty: FaultyRuntimes) -> None:
    runtime = faulty("list-abort")
    (runtime.folder / "sound.icd").write_text(f"{runtime.real}\n")
    (device,) = runtime.devices(DISPATCHER_SELF_TEST="50")
    assert device["available"], device["reason"]
    ended = runtime.dispatcher("run", CONV, "--device", "opencl")
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = runtime.dispatcher("doctor", "--json")
    assert ended.returncode == 0
    findings = {finding["subject"]: finding for finding in json.loads(ended.stdout)["findings"]}
    finding = findings[str(runtime.folder / "faulty.icd")]
    assert finding["verdict"] == "problem"
    assert "it kills a process that lists its devices" in finding["detail"]


def test_a_device_whose_kernels_do_not_build_is_barred_while_that_lasts(faulty: FaultyRuntimes) -> None:
    runtime = faulty("refuse")
    (device,) = runtime.devices()
    assert not device["available"]
    assert device["facts"]["self_test"].startswith("failed: ")
    named = runtime.dispatcher("run", CONV, "--device", "opencl")
    assert named.returncode == 3
    assert "error: device opencl: its self-test failed: " in named.stderr
    assert "the OpenCL compiler refused a kernel" in named.stderr
    (device,) = runtime.devices(FAULTY_MODE="refuse-once")  # and silence is no refusal: a build is tried again
    assert device["facts"]["self_test"] == "ok"


def test_outcomes_are_kept_and_forgotten_on_demand(faulty: FaultyRuntimes) -> None:
    runtime = faulty("none")
    (device,) = runtime.devices("--no-self-test")
    assert device["available"]
    assert "self_test" not in device["facts"]
    assert runtime.devices(DISPATCHER_SELF_TEST="off") == [device]
    (hurried,) = runtime.devices(DISPATCHER_SELF_TEST="0.1")
    assert not hurried["available"]  # which is no fault of the device
    assert runtime.contexts == 0
    (first,) = runtime.devices()
    assert first["available"]
    assert first["facts"]["self_test"] == "ok"
    assert first["facts"]["self_test_gflops"] > 0
    assert runtime.contexts == 1
    assert runtime.devices() == [first]
    assert runtime.contexts == 1
    runtime.devices("--retest")
    assert runtime.contexts == 2
    for entry in (runtime.cache / "kernel-dispatcher" / "selftest").iterdir():
        entry.write_bytes(entry.read_bytes()[:-3])  # cut short, as by a full disk
    runtime.devices()
    assert runtime.contexts == 3


# ---- in this process ---------------------------------------------------------------------------------------
DEVICE = Device("opencl", 0, "Fake", "cpu", facts={"driver": "1.0"})


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What child processes were asked; they answer ``ok``."""
    asked: list[Any] = []

    def run(arguments: Any, limit_s: float) -> tuple[SelfTest, bool]:
        asked.append((*arguments, limit_s))
        return SelfTest("ok", "", 12.5), True

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(selftest.VARIABLE, raising=False)
    monkeypatch.setattr(selftest, "_run_child", run)
    return asked


def test_an_outcome_belongs_to_a_device_a_driver_and_our_version(
    children: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(device: Device) -> int:
        assert selftest.try_device(device, "dispatcher.backends.opencl") == SelfTest("ok", "", 12.5)
        return len(children)

    assert [ask(DEVICE), ask(DEVICE)] == [1, 1]
    assert ask(Device("opencl", 0, "Fake", "cpu", facts={"driver": "1.1"})) == 2
    assert ask(Device("opencl", 0, "Other", "cpu", facts={"driver": "1.0"})) == 3
    assert ask(Device("opencl", 1, "Fake", "cpu", facts={"driver": "1.0"})) == 4
    assert ask(Device("opencl", 0, "Fake", "cpu", facts={"driver": "1.0", "memory_bytes": 5})) == 4
    monkeypatch.setattr(dispatcher, "__version__", "99")
    assert ask(DEVICE) == 5


def test_an_entry_of_another_format_is_made_again(children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest._cache, "get", lambda key: b'{"outcome": "splendid"}')
    selftest.try_device(DEVICE, "dispatcher.backends.opencl")
    monkeypatch.setattr(selftest._cache, "get", lambda key: b'{"score": 7}')
    selftest.try_device(DEVICE, "dispatcher.backends.opencl")
    assert len(children) == 2


@pytest.mark.parametrize("outcome", ["wrong", "error"])
def test_what_can_be_mended_is_not_kept(children: list[Any], monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    answer = SelfTest(outcome, "something of ours")
    monkeypatch.setattr(selftest, "_run_child", lambda *_: (answer, True))
    assert selftest.try_device(DEVICE, "dispatcher.backends.opencl") == answer
    answer = SelfTest("ok", "", 1.0)
    assert selftest.try_device(DEVICE, "dispatcher.backends.opencl") == answer


def test_what_came_from_outside_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number, kept in ((signal.SIGKILL, False), (signal.SIGSEGV, True)):
        monkeypatch.setattr(childprocess, "_START", f"import os; os.kill(os.getpid(), {int(number)})")
        found = selftest.try_device(DEVICE, "dispatcher.backends.opencl", again=True)
        assert found is not None
        assert found.outcome == "crashed"
        assert signal.Signals(number).name in found.reason
        monkeypatch.setattr(childprocess, "_START", "raise SystemExit('another answer')")
        found = selftest.try_device(DEVICE, "dispatcher.backends.opencl")
        assert found is not None
        assert found.outcome == ("crashed" if kept else "error")
        assert kept or "another answer" in found.reason


BEGUN = ("begins",)
CLOSED = (*BEGUN, {"outcome": "closed", "reason": "no room"})


@pytest.mark.parametrize(
    ("ended", "outcome", "asked_again"),
    [
        (Ended(None, "", BEGUN, ""), "hung", "with a longer limit"),
        (Ended(None, "", (), ""), "hung", "always"),
        (Ended(None, "", BEGUN, "", starved_s=3.0), "hung", "always"),
        (Ended(-11, "SIGSEGV", BEGUN, ""), "crashed", "when memory or a setting changes"),
        (Ended(-24, "SIGXCPU", BEGUN, ""), "crashed", "always"),
        (Ended(-1, "SIGHUP", BEGUN, ""), "crashed", "always"),
        (Ended(0, "", CLOSED, ""), "closed", "always"),
        (Ended(0, "", BEGUN, ""), "crashed", "always"),  # so it looks where SIGCHLD is ignored
        (Ended(1, "", BEGUN, ""), "failed", "always"),
        (Ended(1, "", (), ""), "error", "always"),
    ],
)
def test_a_failure_is_kept_for_what_it_was_found_under(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: Ended, outcome: str, asked_again: str
) -> None:
    asked: list[float] = []

    def run_child(function: str, arguments: Any, limit_s: float, environment: Any) -> Ended:
        asked.append(limit_s)
        return ended

    def ask(limit_s: int) -> int:
        monkeypatch.setenv(selftest.VARIABLE, str(limit_s))
        found = selftest.try_device(DEVICE, "dispatcher.backends.opencl")
        assert found is not None and found.outcome == outcome
        return len(asked)

    monkeypatch.setattr(selftest, "run_child", run_child)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    scarce = ask(5)
    monkeypatch.setattr(machine, "available_bytes", lambda: None)
    assert ask(5) - scarce == (asked_again != "with a longer limit")
    before = ask(5)
    again = asked_again == "always"
    assert [ask(5) - before, ask(4) - before] == [again, 2 * again]
    before = ask(4)
    assert ask(6) - before == (again or asked_again == "with a longer limit")
    before = ask(6)
    monkeypatch.setenv("CL_CONFIG_SOMETHING", "1")
    assert ask(6) - before == 1


PASSED = {"outcome": "ok", "reason": "", "gflops": 50.0, "spread": None, "facts": {}}


@pytest.mark.parametrize(
    ("ended", "outcome", "facts"),
    [
        (Ended(0, "", (*BEGUN, PASSED), ""), "ok", {}),
        (Ended(0, "", (*BEGUN, PASSED, "measures", {"rates": "4x4 99"}), ""), "ok", {"rates": "4x4 99"}),
        (Ended(-14, "SIGALRM", (*BEGUN, PASSED, "measures"), ""), "ok", "could not be measured: SIGALRM"),
        (Ended(None, "", (*BEGUN, PASSED, "measures"), ""), "ok", "could not be measured: took too long"),
        (Ended(1, "", (*BEGUN, PASSED, "measures"), "no room"), "ok", "could not be measured: exit code 1: no room"),
        (Ended(-11, "SIGSEGV", (*BEGUN, PASSED, "measures", {}), ""), "crashed", {}),  # afterwards, as without it
        (Ended(-11, "SIGSEGV", (*BEGUN, PASSED), ""), "crashed", {}),
    ],
)
def test_a_device_that_cannot_be_measured_is_not_barred(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: Ended, outcome: str, facts: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(selftest.VARIABLE, raising=False)
    monkeypatch.setattr(selftest, "run_child", lambda *_: ended)
    facts = {"calibration": facts} if isinstance(facts, str) else facts
    found = selftest.try_device(DEVICE, "dispatcher.backends.opencl")
    assert found is not None and (found.outcome, found.facts) == (outcome, facts)
    assert facts.items() <= selftest.apply(DEVICE, found).facts.items()
    monkeypatch.setattr(selftest, "run_child", None)
    assert selftest.try_device(DEVICE, "dispatcher.backends.opencl") == found  # kept


@pytest.mark.parametrize(
    ("gflops", "said"), [(50.0, "Fake One does"), (0.1, "what kernels are chosen by is not measured"), (None, None)]
)
def test_a_device_that_passed_is_measured(
    monkeypatch: pytest.MonkeyPatch, gflops: float | None, said: str | None
) -> None:
    class Measured(FakeBackend):
        def calibrate(self, device: Device) -> dict[str, str]:
            return {"calibration": f"{device.name} does what is expected"}

    fakes = [Measured(kind="cpu"), FakeBackend(kind="cpu")]
    monkeypatch.setattr(trial.registry, "load", lambda module: fakes[0])
    monkeypatch.setattr(trial, "_test", lambda *_: SelfTest("ok", "", gflops))
    for known in (said, None):
        reports: list[Any] = []
        trial.child(reports.append, "fake", "device", "0", "Fake One")
        assert len(reports) == (2 if known is None else 4)
        assert known is None or (reports[2] == "measures" and reports[3]["calibration"].startswith(known))
        fakes.pop(0)


def test_a_frozen_application_is_not_started_again(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(selftest.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    install_backends(FakeBackend("cuda"))
    assert cli.main(["devices"]) == 0
    assert "was left out: this application is frozen" in capsys.readouterr().out
    findings = {finding.subject: finding for finding in dispatcher.doctor().findings}
    assert "this application is frozen" in findings["self-tests"].detail
    with pytest.raises(OSError, match="frozen"):
        childprocess.run_child("tests.test_childprocess:leave", [], 1.0)
    monkeypatch.setattr(sys, "frozen", False)
    monkeypatch.setattr(sys, "executable", "")
    found = selftest.try_device(DEVICE, "dispatcher.backends.opencl")
    assert found is not None and "this Python is embedded" in found.reason


def test_the_switch(children: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for text, limit in (("", 60.0), ("on", 60.0), ("OFF", None), ("0", None), ("2.5", 2.5)):
        monkeypatch.setenv(selftest.VARIABLE, text)
        assert selftest.time_limit_s() == limit
    for text in ("-1", "nan", "sometimes"):
        monkeypatch.setenv(selftest.VARIABLE, text)
        with pytest.raises(InputError, match=rf"DISPATCHER_SELF_TEST is '{text}'; expected on, off, or a time"):
            selftest.try_device(DEVICE, "dispatcher.backends.opencl")
    assert children == []


def test_an_option_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selftest.VARIABLE, "33")
    assert cli.main(["devices", "--no-self-test"]) == 0
    assert selftest.time_limit_s() == 33.0


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, SelfTest]:
    """Outcomes of the self-tests by device id, for fake backends; empty to begin with."""
    found: dict[str, SelfTest] = {}
    monkeypatch.setattr(selftest, "try_device", lambda device, module, again=False: found.get(device.id))
    return found


def test_devices_of_a_class_are_ranked_by_speed(install_backends: Install, outcomes: dict[str, SelfTest]) -> None:
    gpus = FakeBackend("cuda", devices=["slow", "fast"])
    cpus = FakeBackend("opencl", devices=["one", "two", "three"], kind="cpu")
    install_backends(gpus, cpus)
    outcomes.update({"cuda:0": SelfTest("ok", "", 5.0), "cuda:1": SelfTest("ok", "", 7.0)})
    outcomes.update({"opencl:1": SelfTest("ok", "", 900.0), "opencl:2": SelfTest("ok", "", 1000.0)})
    order = [label for label, _ in selection.candidates(selection.parse_request("auto"))]
    assert order == ["cuda:1", "cuda:0", "opencl:2", "opencl:1", "opencl:0", "numpy"]
    assert dispatcher.compile(CONV, device="cuda", case="sample").device.id == "cuda:0"


@pytest.mark.parametrize("swapped", [False, True])
def test_speeds_that_are_the_same_within_their_spreads_leave_the_order(
    install_backends: Install, outcomes: dict[str, SelfTest], swapped: bool
) -> None:
    """Whichever of the two equals was a little faster this time, the slow one comes last and the fast one first."""
    install_backends(FakeBackend("opencl", devices=["slow", "one", "two", "fast"], kind="cpu"))
    speeds = {"opencl:1": 100.0, "opencl:2": 104.0}
    if swapped:
        speeds = dict(zip(speeds, reversed(speeds.values()), strict=True))
    speeds |= {"opencl:0": 50.0, "opencl:3": 150.0}
    outcomes.update({name: SelfTest("ok", "", speed, (speed - 3.0, speed + 1.0)) for name, speed in speeds.items()})
    order = [label for label, _ in selection.candidates(selection.parse_request("auto"))]
    assert order == ["opencl:3", "opencl:1", "opencl:2", "opencl:0", "numpy"]


def test_a_speed_is_the_median_of_several_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call that is much faster than the others, and a few that are slower, change nothing."""
    now, calls, flops = [0.0], [0], [0]

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    class Fake(FakeBackend):
        def compile(self, *given: Any) -> Any:
            executable = super().compile(*given)
            flops[0] = given[0].flops
            results = []  # of tensors that are always the same

            def run(tensors: Any, output: Any = None) -> Any:
                calls[0] += 1
                now[0] += {5: 1e-6, 7: 0.05}.get(calls[0], 0.001 * (1 + calls[0] % 3 / 100))
                results.extend([] if results else [executable(tensors)])
                output[...] = results[0]

            return run

    monkeypatch.setattr(trial, "time", Clock)
    fake = Fake(kind="cpu")
    found = trial._test(fake, 0, fake.probe()[0].name)
    readings = [1e9 * reading / flops[0] for reading in (found.gflops or 0.0, *(found.spread or ()))]
    assert readings == pytest.approx([1e3 / 1.01] * 3, rel=0.02) and calls[0] > 100


@pytest.mark.parametrize("outcome", sorted(selftest.BARRED))
def test_a_barred_device_is_passed_over_and_named_in_vain(
    install_backends: Install, outcomes: dict[str, SelfTest], outcome: Any
) -> None:
    backend = FakeBackend("cuda", devices=["bad", "good"])
    install_backends(backend)
    outcomes["cuda:0"] = SelfTest(outcome, "went up in smoke")
    for request in ("auto", "cuda", "cuda:good", "cuda:0,cuda:1"):
        assert dispatcher.compile(CONV, device=request, case="sample").device.id == "cuda:1"
    skipped = dispatcher.compile(CONV, device="auto", case="sample").skipped
    assert [label for label, _ in skipped] == ["cuda:0"]
    assert "its self-test went up in smoke" in skipped[0][1]
    with pytest.raises(DeviceError, match=r"cuda:0 \(bad\) is not usable: its self-test went up in smoke"):
        dispatcher.compile(CONV, device="cuda:bad", case="sample")


@pytest.mark.parametrize("request_", ["auto", "cuda:7,cuda,numpy"])
@pytest.mark.parametrize(
    "command", [["run", CONV], ["run", CONV, "--json"], ["explain", CONV], ["verify"], ["bench", "--repeat", "1"]]
)
def test_what_was_passed_over_is_said_once(
    install_backends: Install, capsys: pytest.CaptureFixture[str], request_: str, command: list[str]
) -> None:
    install_backends(FakeBackend("cuda", unavailable="no driver library libcuda.so.1"))
    assert cli.main([*command, "--device", request_]) == 0
    captured = capsys.readouterr()
    labels = ["cuda"] if request_ == "auto" else ["cuda:7", "cuda"]
    notes = [f"note: {label} is passed over: no driver library libcuda.so.1" for label in labels]
    said = [f"skipped   {label}: no driver library libcuda.so.1" for label in labels]
    if command[0] in ("run", "explain") and "--json" not in command:  # their reports have a line for it
        notes = []
        assert [line for line in captured.out.splitlines() if "no driver" in line] == said
    # On a busy machine, a long command also says how long it will take.
    assert [line for line in captured.err.splitlines() if not line.endswith("to go")] == notes
    assert "numpy" in captured.out


def test_only_what_is_asked_for_is_tested(install_backends: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(selftest, "try_device", lambda device, module, again=False: asked.append(device.id))
    install_backends(FakeBackend("cuda", devices=["one", "two"]), FakeBackend("opencl", kind="cpu"))
    dispatcher.compile(CONV, device="cuda:1", case="sample")
    dispatcher.compile(CONV, device="cuda:1", case="sample")
    assert asked == ["cuda:1"]
    dispatcher.compile(CONV, device="numpy", case="sample")
    dispatcher.compile(CONV, device="auto", case="sample")
    assert asked == ["cuda:1", "cuda:0"]
