"""The benchmark programs: their statistics, what they do with those who fail, and that they run end to end."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED

from dispatcher.device import machine
from dispatcher.device.selection import backend_devices
from dispatcher.errors import DispatcherError
from dispatcher.interface import Timings
from dispatcher.ops.geometry import GeometryError
from dispatcher.problem.operator import bind
from dispatcher.timing import contenders as timing_contenders
from dispatcher.timing import sampling
from dispatcher.timing.peers import Peer, PeerCall
from dispatcher.timing.sampling import Sample

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import anatomy, choices, common, compare_checkouts, cpu_peers, family, isa, overhead, sweep  # noqa: E402
from bench.processes import Process  # noqa: E402
from tests.family import operator_for  # noqa: E402

SMALL = [f"{name}={value}" for name, value in {"depth": 4, "height": 6, "width": 10, "in_channels": 4}.items()]


# ---- statistics --------------------------------------------------------------------------------------------
def samples_of(*seconds: float, before: float = 100.0, after: float = 100.0) -> list[Sample]:
    return [Sample(each, before, after) for each in seconds]


def test_a_summary_takes_the_quiet_samples_only() -> None:
    samples = [
        *samples_of(1.0, 2.0, 3.0, 4.0, 5.0),
        Sample(0.1, before=60.0, after=100.0),
        Sample(99.0, before=100.0, after=60.0),
    ]
    found = sampling.quiet_times(samples, threshold=70.0)
    assert (found.median_s, found.quartiles_s, found.min_s) == (3.0, (2.0, 4.0), 1.0)
    assert (len(found.seconds), found.dropped, found.noisy) == (5, 2, False)
    result = {"samples": common.sample_lists(samples)}
    assert common.add_statistics(result, 70.0) == found
    written = {name: result[name] for name in ("low_s", "high_s", "kept", "dropped", "noisy")}
    assert written == {"low_s": 2.0, "high_s": 4.0, "kept": 5, "dropped": 2, "noisy": False}


def test_a_summary_without_a_quiet_sample_says_so() -> None:
    found = sampling.quiet_times(samples_of(1.0, 2.0, 6.0, before=10.0), threshold=70.0)
    assert (found.median_s, found.dropped, found.noisy) == (2.0, 3, True)
    result: dict[str, Any] = {"samples": [[1.0, 10.0, 10.0]]}
    common.add_statistics(result, 70.0)
    assert (result["kept"], result["dropped"], result["noisy"]) == (0, 1, True)
    with pytest.raises(ValueError, match="no samples"):
        sampling.quiet_times([], threshold=70.0)


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_of_the_quartiles() -> None:
    peer = sampling.quiet_times(samples_of(8.0, 10.0, 12.0, 10.0, 1000.0), 0.0)
    ours = sampling.quiet_times(samples_of(1.0, 2.0, 3.0, 2.0, 100.0), 0.0)
    found = sampling.ratio(peer, ours)
    assert found.value == peer.median_s / ours.median_s == 5.0
    assert found.low == peer.quartiles_s[0] / ours.quartiles_s[1] == 10.0 / 3.0
    assert found.high == peer.quartiles_s[1] / ours.quartiles_s[0] == 12.0 / 2.0
    assert not found.noisy
    noisy = sampling.quiet_times(samples_of(1.0, before=1.0), 70.0)
    assert sampling.ratio(peer, noisy).noisy and sampling.ratio(noisy, ours).noisy


def test_a_limit_is_a_share_or_a_rate() -> None:
    assert sampling.threshold_gflops(0.5, 200.0) == 100.0
    assert sampling.threshold_gflops(160.0, 200.0) == 160.0


# ---- sampling ----------------------------------------------------------------------------------------------
class ScriptedProbe:
    """Reads the given rates, one after another, and full speed once they are used up."""

    def __init__(self, *rates: float) -> None:
        self.best = 100.0
        self._rates = iter(rates)

    def read(self, limit: float) -> float:
        return next(self._rates, 100.0)


def sample(calls: dict[str, Callable[[], Any]], probe: sampling.Probe, repeats: int) -> sampling.Sampling:
    timed = {name: sampling.timed(call) for name, call in calls.items()}
    return sampling.sample_beside(probe, 0.7, timed, repeats, pause_s=0.0)


def test_slow_samples_are_repeated_and_counted() -> None:
    found = sample({"one": int}, ScriptedProbe(100.0, 30.0, 30.0, 100.0), repeats=3)
    assert [each.quiet(70.0) for each in found.samples["one"]] == [False, False, True, True, True]
    times = sampling.quiet_times(found.samples["one"], 70.0)
    assert (len(times.seconds), times.dropped) == (3, 2)


def test_sampling_ends_on_a_machine_that_never_is_quiet() -> None:
    found = sample({"one": int, "two": int}, ScriptedProbe(*[1.0] * 1000), repeats=2)
    counts = {name: len(samples) for name, samples in found.samples.items()}
    assert counts == {"one": 2 * sampling.ROUNDS_PER_REPEAT, "two": 2 * sampling.ROUNDS_PER_REPEAT}


def test_contenders_take_turns() -> None:
    order: list[str] = []
    calls: dict[str, Callable[[], Any]] = {name: (lambda name=name: order.append(name)) for name in "abc"}
    sample(calls, ScriptedProbe(), repeats=4)
    assert [sorted(order[i : i + 3]) for i in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert len(order) == 12


def test_a_contender_that_fails_in_the_middle_is_kept_with_its_reason() -> None:
    def fails() -> None:
        raise MemoryError("no memory\nmore")

    found = sample({"good": int, "bad": fails}, ScriptedProbe(), repeats=2)
    assert found.failures == {"bad": "MemoryError: no memory"}
    assert len(found.samples["good"]) == 2
    assert not found.samples["bad"]


def test_the_probe_tries_again_while_thread_pools_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PROBE_PAUSE_S", 0.0)
    rates = iter([30.0, 50.0, 90.0])
    probe = sampling.Probe(best=100.0, _run=lambda: next(rates))
    assert probe.read(0.7) == 90.0
    slow = sampling.Probe(best=100.0, _run=lambda: 30.0)
    assert slow.read(0.7) == 30.0
    assert sampling.Probe(best=100.0, _run=lambda: 120.0).read(0.7) == 120.0


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "foreign_load", lambda: float(machine.cores()))
    for program in (cpu_peers, sweep):
        with pytest.raises(SystemExit) as caught:
            program.main([])
        assert caught.value.code == 3
        assert "pass --force" in capsys.readouterr().err


def test_those_who_do_not_keep_to_a_limit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the code of a compiler, which keeps to it in another process alone, and by what peers say of themselves."""
    monkeypatch.setattr(isa, "SETTINGS", {"avx2": {"SOME_LIMIT": "avx2"}})
    monkeypatch.setenv("SOME_LIMIT", "")  # put back in the end
    monkeypatch.setattr(isa, "_PEER", "import sys; print('info,cpu,isa:Intel AVX2\\nisa:', sys.argv[1])")
    monkeypatch.setattr(
        isa, "PEERS", {name: Peer(name, (name[:4],), missing_peer) for name in ("AVX2", "AVX512", "AVX51")}
    )
    assert isa.peers_left_out(["AVX2", "AVX512", "AVX51"]).keys() == {"AVX512", "AVX51"}
    monkeypatch.setattr(isa, "_PEER", "import nothing")
    assert "No module named" in isa.peers_left_out(["AVX2"])["AVX2"]
    monkeypatch.setattr(isa, "devices_left_out", lambda devices: {device.id: "it is wide" for device in devices})
    with pytest.raises(SystemExit) as caught:
        cpu_peers.main(["--isa", "avx2", "--force", "--peers"])
    assert caught.value.code == 3 and "no OpenCL CPU device to measure" in capsys.readouterr().err


LIMITED = """
from bench import isa
isa.limit("avx2")
from dispatcher.device.selection import backend_devices
devices = [each for each in backend_devices("opencl") if each.available and each.kind == "cpu"]
left_out = isa.devices_left_out(devices)
print({each.facts["vector_width_float"] for each in devices if each.id not in left_out}, len(devices) - len(left_out))
print([each.name for each in devices if each.id in left_out])
"""


def test_intel_s_compiler_keeps_to_a_limit(opencl_cpu: None) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, left_out = done.stdout.splitlines()
    assert kept in ("{8} 1", "set() 0") and "Intel" not in left_out, done.stdout


# ---- those who fail ----------------------------------------------------------------------------------------
def reference_peer(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
    import dispatcher

    result = dispatcher.run(operator.problem, device="numpy", **operator.sizes, **operator.scalars, **tensors)
    return lambda timings=None: np.array(result)


def missing_peer(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
    raise ModuleNotFoundError("No module named 'nothing'")


def wrong_peer(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
    right = reference_peer(operator, tensors, threads)
    return lambda timings=None: right() * np.float32(1.001)


def unwritten_peer(operator: Any, tensors: Any, threads: int, gpu: int | None = None) -> PeerCall:
    """Leaves a batch item unwritten that is not among those compared with the reference."""
    right = reference_peer(operator, tensors, threads)

    def call(timings: Timings | None = None) -> np.ndarray:
        result = right()
        result[1] = np.nan
        return result

    return call


def test_peers_that_are_missing_or_wrong_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"right": reference_peer, "missing": missing_peer, "wrong": wrong_peer, "unwritten": unwritten_peer}
    monkeypatch.setattr(timing_contenders, "PEERS", {name: Peer(name, (), maker) for name, maker in made.items()})
    monkeypatch.setattr(cpu_peers, "OWN_SHARE", 0.0)
    contenders = [cpu_peers.Contender(name, name) for name in made]
    sizes = {name: int(value) for name, value in (text.split("=") for text in SMALL)}
    operator = cpu_peers.bind_case("conv-transpose3d-layernorm-gelu-scaling", 5, sizes)
    settings = argparse.Namespace(repeats=2, quiet_limit=0.7)
    case = cpu_peers.race(operator, "a case", contenders, ScriptedProbe(), settings)
    assert case["verified_images"] == [0, 2, 4]
    assert set(case["results"]) == {"right"}
    assert case["results"]["right"]["error_over_bound"] <= 1.0
    assert case["failures"]["missing"] == "not installed (ModuleNotFoundError: No module named 'nothing')"
    assert "elements are wrong" in case["failures"]["wrong"]
    assert "not finite" in case["failures"]["unwritten"]


def test_a_process_carries_results_and_errors_and_starts_anew() -> None:
    process = Process(importlib.import_module, "builtins")
    assert process.ask("eval", "__import__('numpy').arange(4.0)").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert process.ask("eval", "__import__('signal').getsignal(2)") == signal.SIG_IGN
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing'"):
        process.ask("eval", "__import__('nothing')")
    with pytest.raises(DispatcherError, match=r"^ZeroDivisionError: division by zero$"):
        process.ask("eval", "1 / 0")
    with pytest.raises(DispatcherError, match=r"^its process ended$"):
        process.ask("eval", "__import__('os')._exit(1)")
    assert process.ask("abs", -1) == 1
    process.close()


def test_a_process_ends_with_its_parent() -> None:
    """In the middle of a call, and though the parent is killed: nobody is left who could write to its output."""
    script = """
import threading
from bench.processes import Process
process = Process(threading.Event)
print(process.ask("is_set"), flush=True)
process.ask("wait", 100)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "False\n"
        parent.kill()
        assert parent.communicate(timeout=30)[0] == ""


def test_the_family_s_run_goes_on_where_it_was_broken_off(
    opencl_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["conv2d-mish-mish"]

    def breaks(operator: Any, *rest: Any) -> PeerCall:
        if operator.problem.name in broken:
            raise KeyboardInterrupt
        return reference_peer(operator, *rest)

    made = {"torch": breaks, "torch-channels-last": wrong_peer, "torch-compile": missing_peer}
    peers = {name: Peer(name, (), maker) for name, maker in made.items()}
    peers["torch-compile-channels-last"] = peers["torch"]
    monkeypatch.setattr(timing_contenders, "PEERS", peers)
    monkeypatch.setattr(family, "published", lambda name: (operator_for(name, "sample"), "sample"))
    monkeypatch.setattr(common, "probe_on", lambda index: sampling.Probe("a probe", 100.0, 1.0, lambda: 100.0))
    monkeypatch.setattr(family, "NEAR", math.inf)
    monkeypatch.setattr(family, "FAR", math.inf)
    files = ["--lines", str(tmp_path / "lines.jsonl"), "--output", str(tmp_path / "family.json")]
    options = [*files, "--repeats", "1", "--quiet-limit", "0.01", "--force", "--budget", "1"]
    names = ["--only", "conv-2d", "conv2d-mish-mish", "conv3d-min-softmax"]

    def lines() -> dict[str, dict[str, Any]]:
        report = json.loads((tmp_path / "family.json").read_text(encoding="utf-8"))
        assert report["overview"]["count"] == sum(line.get("ratio") is not None for line in report["lines"])
        return {line["problem"]: line for line in report["lines"]}

    assert family.main([*options, *names]) == 0
    assert list(lines()) == ["conv-2d", "conv2d-mish-mish"] and "ratio" not in lines()["conv2d-mish-mish"]
    assert "goes on from here" in capsys.readouterr().err
    broken.clear()
    monkeypatch.setattr(family, "lacking_memory", lambda operator: "too large" if operator.problem.rank == 3 else None)
    first = lines()["conv-2d"]
    assert family.main([*options, *names]) == 0
    assert lines()["conv-2d"] == first and lines()["conv3d-min-softmax"]["skipped"] == "too large"
    line = lines()["conv2d-mish-mish"]
    assert set(line["results"]) == {line["device"], "torch", "torch-compile-channels-last"}
    assert "differs from ours" in line["failures"]["torch-channels-last"]
    assert line["failures"]["torch-compile"].startswith("not installed")
    text = capsys.readouterr().out
    assert "conv2d 2->3 k3" in text and "`conv3d-min-softmax`: too large" in text


# ---- geometries of the sweep -------------------------------------------------------------------------------
def test_the_sweep_s_geometries_follow_from_the_seed_and_cover_the_options() -> None:
    found = sweep.geometries(40, seed=0)
    assert found == sweep.geometries(40, seed=0) != sweep.geometries(40, seed=1)
    assert sweep.geometries(50, seed=0)[:40] == found
    for sizes in found:
        flops = bind(sweep.load_problem(sweep.PROBLEM), sizes, {}).flops
        assert sweep.LEAST_FLOPS <= flops <= sweep.MOST_FLOPS
        assert sizes["in_channels"] % sizes["groups"] == sizes["out_channels"] % sizes["groups"] == 0
    for axis in "dhw":
        assert {sizes[f"stride_{axis}"] for sizes in found} == {1, 2, 3}
        assert {sizes[f"kernel_{axis}"] for sizes in found} == {1, 2, 3, 4, 5}
        assert {sizes[f"dilation_{axis}"] for sizes in found} == {1, 2}
    assert any(sizes["groups"] > 1 for sizes in found)
    assert any(sizes["in_channels"] % 2 for sizes in found) and any(sizes["out_channels"] % 2 for sizes in found)
    with pytest.raises(GeometryError):
        bind(sweep.load_problem(sweep.PROBLEM), {**found[0], "output_padding_d": 9}, {})


# ---- end to end --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def opencl_cpu() -> None:
    """Skips, or fails where OpenCL is required, without an OpenCL CPU device."""
    reasons = []
    for device in backend_devices("opencl"):
        if device.available and device.kind == "cpu":
            return
        reasons.append(device.reason or f"{device.name} is not a CPU")
    message = f"opencl: {'; '.join(reasons)}"
    if "opencl" in REQUIRED:
        pytest.fail(message)
    pytest.skip(message)


def run_program(name: str, output: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the text of a program, which runs in a process of its own."""
    command = [sys.executable, str(ROOT / "bench" / name), "--force", "--repeats", "1", "--quiet-limit", "0.01"]
    done = subprocess.run(
        [*command, "--output", str(output), *arguments], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert report["schema"] == 1 and report["program"] == output.stem
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    assert report["busy"] is None or "cores busy" in report["busy"]
    assert report["machine"]["cores"] == machine.cores()
    assert {"python", "numpy", "pyopencl", "kernel-dispatcher"} <= set(report["versions"])
    assert report["probe"]["peak_gflops"] > 0 and report["probe"]["copy_gbytes_per_s"] > 0
    return report, done.stdout


@pytest.fixture(scope="module")
def peers_run(opencl_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """A run of cpu_peers on tiny sizes, with a README of its own."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "README.md").write_text(f"Before.\n\n<!-- cpu-peers: -->\n{cpu_peers.END}\n\nAfter.\n")
    sets = [part for text in SMALL for part in ("--set", text)]
    report, text = run_program(
        "cpu_peers.py",
        folder / "cpu_peers.json",
        *("--peers", "torch", "torch-channels-last", "onnxruntime", "openvino"),
        *("--table", "--readme", str(folder / "README.md")),
        *sets,
    )
    yield folder, report, text


def test_cpu_peers_runs(peers_run: tuple[Path, dict[str, Any], str]) -> None:
    folder, report, _ = peers_run
    mine = [each["name"] for each in report["contenders"] if each["device"] is not None]
    peers = [each["name"] for each in report["contenders"] if each["device"] is None]
    assert mine and peers == ["torch", "torch-channels-last", "onnxruntime", "openvino"]
    assert len(report["cases"]) == 5
    for case in report["cases"]:
        assert case["batch"] == (1 if "asym" in case["problem"] else 2)
        assert not set(case["failures"]) & set(mine)
        for name in peers:
            assert (name in case["results"]) != (name in case["failures"])
            assert case["failures"].get(name, "not installed").startswith("not installed")
        for name in mine:
            assert case["results"][name]["error_over_bound"] <= 1.0
            assert case["results"][name]["launches"]
    if "matplotlib" in sys.modules or _installed("matplotlib"):
        assert (folder / "cpu_peers.png").read_bytes().startswith(b"\x89PNG")


def _installed(name: str) -> bool:
    return len(machine.versions([name])) > 1


def check_statistics(report: dict[str, Any], entry: dict[str, Any]) -> None:
    """Everything derived in an entry follows from its samples."""
    threshold = report["probe"]["threshold_gflops"]
    summaries = {}
    for name, result in entry["results"].items():
        summaries[name] = sampling.quiet_times([Sample(*each) for each in result["samples"]], threshold)
        assert result["median_s"] == summaries[name].median_s
        assert result["gflops"] == pytest.approx(entry["flops"] / summaries[name].median_s / 1e9)
    mine = {each["name"] for each in report["contenders"] if each["device"] is not None}
    peers = {name: summary.median_s for name, summary in summaries.items() if name not in mine}
    assert entry["best_peer"] == (min(peers, key=peers.__getitem__) if peers else None)
    for name, found in entry["ratios"].items():
        assert found["value"] == peers[entry["best_peer"]] / summaries[name].median_s
        assert found["low"] <= found["value"] <= found["high"]


def test_the_ratios_of_cpu_peers_come_from_medians(peers_run: tuple[Path, dict[str, Any], str]) -> None:
    for case in peers_run[1]["cases"]:
        check_statistics(peers_run[1], case)


def test_cpu_peers_writes_the_table_between_the_markers(peers_run: tuple[Path, dict[str, Any], str]) -> None:
    folder, report, text = peers_run
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("Before.\n\n<!-- cpu-peers: cpu_peers.json -->\n")
    assert readme.endswith(f"{cpu_peers.END}\n\nAfter.\n")
    assert text.strip() == cpu_peers.table(report)
    assert cpu_peers.table(report) in readme
    assert cpu_peers.with_table(readme, "cpu_peers.json", report) == readme
    for case in report["cases"]:
        assert f"`{case['problem']}`, batch {case['batch']}" in readme
        for reason in case["failures"].values():
            assert reason in readme
    (folder / "other.md").write_text("no markers")
    taken = ["--table", "--from", str(folder / "cpu_peers.json"), "--readme", str(folder / "other.md")]
    assert cpu_peers.main(taken) == 2


def test_a_table_says_what_not_to_trust() -> None:
    result = {"kept": 0, "dropped": 3, "noisy": True}
    assert common.drop_note({"busy": None}, [{**result, "noisy": False, "kept": 5}]) == (
        "3 of 8 samples were dropped, since the machine was slow beside them."
    )
    note = common.drop_note({"busy": "the load average is 9"}, [result])
    assert "`~`" in note and "Take no figure from here" in note and "the load average is 9" in note


def test_results_of_another_program_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"program": "sweep", "schema": 1}')
    assert cpu_peers.main(["--from", str(other)]) == 2
    assert "expected cpu_peers, schema 1" in capsys.readouterr().err


def test_the_sweep_runs(opencl_cpu: None, tmp_path: Path) -> None:
    report, text = run_program("sweep.py", tmp_path / "sweep.json", "--count", "3", "--scale", "0.002")
    assert len(report["entries"]) == 3
    for entry in report["entries"]:
        check_statistics(report, entry)
        assert entry["geometry"] in text
    for name, found in report["overviews"].items():
        ratios = [entry["ratios"][name]["value"] for entry in report["entries"] if name in entry["ratios"]]
        assert found["count"] == len(ratios)
        if ratios:
            assert found["min"] == min(ratios)
            assert report["entries"][found["worst"][0]]["ratios"][name]["value"] == min(ratios)


def test_choices_are_compared_with_what_else_there_is(opencl_cpu: None) -> None:
    device = common.cpu_devices(None)[0][0]
    ways = choices.alternatives(device, bind(sweep.load_problem(sweep.PROBLEM), sweep.geometries(8, 0)[7], {}))
    assert [name[:2] for name in ways] == sorted((name[:2] for name in ways), key=["ch", "di", "F("].index)
    assert {"ch", "di", "F("} == {name[:2] for name in ways}
    entry = {"geometry": "g", "label": "ours", "plans": {"chosen": {"why": "cheap"}}}
    entry["results"] = {name: {"samples": [[t, 9.0, 9.0]]} for name, t in (("chosen", 0.003), ("direct 4x4", 0.002))}
    choices.conclude(entry, 1.0)
    assert entry["fastest"] == "direct 4x4" and entry["lost"] == pytest.approx(1.5)
    text = choices.report_text({"entries": [entry], "busy": None})
    assert "| g | ours | 2 | 3.00 | cheap | 2.00 | direct 4x4 | 1.50 |" in text
    assert "ours: within 1.15 on 0 of 1, geometric mean 1.500" in text


@pytest.mark.parametrize(
    "core, problem, empty",
    [
        ("winograd", "conv-transpose-2d-square-input-sq-kernel", ()),
        ("direct", "conv2d-subtract-tanh-subtract-avgpool", ("input sums", "output sums", "edges")),
        ("in place", "conv2d-hardswish-relu", ("packing", "input sums", "output sums")),
    ],
)
def test_the_parts_of_a_call_add_up(opencl_cpu: None, core: str, problem: str, empty: tuple[str, ...]) -> None:
    """Times of a core's parts come from the processor's clock, the whole from the device's: they have to agree."""
    device = common.cpu_devices(None)[0][0].id
    operator = common.bind_case(problem, 1, {"height": 64, "width": 64})
    settings, options = (
        argparse.Namespace(quiet_limit=1e-9, repeats=3),
        {} if core == "in place" else {"algorithm": core},
    )
    entry = anatomy.measure(operator, device, sampling.Probe(), settings, options, pause_s=0.0)
    parts = {part: seconds for part, seconds in entry["split_s"].items() if part in anatomy.MARKS.values()}
    assert entry["core"] == core and tuple(entry["split_s"]) == anatomy.PARTS
    assert {part for part, seconds in parts.items() if seconds <= 0.0} - {"fused steps", "stores"} == set(empty)
    clocked = entry["results"]["clocked"]["median_s"] / entry["marks_cost"]
    assert 0.1 < sum(parts.values()) / clocked < 1.3
    assert entry["products_gflops"] > 0


def test_overhead_runs(opencl_cpu: None, tmp_path: Path) -> None:
    report, text = run_program("overhead.py", tmp_path / "overhead.json", "--calls", "5")
    assert report["entries"]
    for entry in report["entries"]:
        split = entry["split_us"]
        assert entry["label"] in text
        assert split["call"] == pytest.approx(split["dispatcher"] + split["backend"])
        assert split["backend"] == pytest.approx(split["backend_kernels"] + split["backend_host"])
        parts = entry["parts_us"]
        assert tuple(parts) == overhead.PARTS and sum(parts.values()) == pytest.approx(entry["fastest_us"])
        assert min(parts[name] for name in overhead.PARTS[:-1]) > 0
        assert 0 < entry["results"]["bare"]["min_s"] < entry["results"]["call"]["median_s"]


@pytest.fixture(scope="module")
def comparison(opencl_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """This checkout against itself, on a bundled problem and on a problem file."""
    folder = tmp_path_factory.mktemp("compare")
    bundled = "conv-transpose3d-layernorm-gelu-scaling"
    text = next((ROOT / "problems").rglob(f"{bundled}.yaml")).read_text(encoding="utf-8")
    (folder / "other.yaml").write_text(text.replace(f"name: {bundled}", "name: other"), encoding="utf-8")
    return run_program(
        "compare_checkouts.py",
        folder / "compare_checkouts.json",
        *(str(ROOT), str(ROOT), "--batch", "2", "--problems", bundled, str(folder / "other.yaml")),
        *(part for text in SMALL for part in ("--set", text)),
    )


def test_two_checkouts_are_compared(comparison: tuple[dict[str, Any], str]) -> None:
    report, text = comparison
    assert set(report["checkouts"]) == {"old", "new"}
    assert {case["problem"] for case in report["cases"]} == {"conv-transpose3d-layernorm-gelu-scaling", "other"}
    for case in report["cases"]:
        assert case["failures"] == {} and case["batch"] == 2
        assert f"`{case['problem']}`, batch 2" in text
        for result in case["results"].values():
            assert result["error_over_bound"] <= 1.0 and result["launches"]
            assert len(result["kernel_seconds"]) == len(result["samples"]) == result["kept"] == 1
        for what in ("wall", "kernel"):
            found = case["differences"][what]
            assert found["ratio"]["value"] == found["new_s"] / found["old_s"]
            assert found["verdict"] == "too few samples"


def test_a_checkout_with_a_wrong_result_is_named(
    opencl_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "dispatcher"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"""
import importlib.machinery, importlib.util, sys
import numpy as np
spec = importlib.util.spec_from_file_location(
    "dispatcher", {str(ROOT / "dispatcher" / "__init__.py")!r},
    submodule_search_locations=[{str(ROOT / "dispatcher")!r}],
)
real = importlib.util.module_from_spec(spec)
sys.modules["dispatcher"] = real
spec.loader.exec_module(real)
real.__file__ = {str(package / "__init__.py")!r}
from dispatcher.call.compiled import PreparedCall
right = PreparedCall.__call__
def wrong(self, output=None, timings=None):
    result = right(self, output, timings)
    result *= np.float32(1.01)
    return result
PreparedCall.__call__ = wrong
""",
        encoding="utf-8",
    )
    arguments = [str(ROOT), str(tmp_path), "--problems", "conv-transpose3d-max-max-sum", "--force"]
    arguments += ["--repeats", "1", "--quiet-limit", "0.01", "--output", str(tmp_path / "found.json")]
    sets = [part for text in SMALL for part in ("--set", text)]
    assert compare_checkouts.main([*arguments, *sets]) == 1
    report = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    for case in report["cases"]:
        assert set(case["results"]) == {"old"} and case["differences"] == {}
        assert "wrong result on the new checkout" in case["failures"]["new"]
    assert "wrong result on the new checkout" in capsys.readouterr().out
    (package / "__init__.py").unlink()
    package.rmdir()
    assert compare_checkouts.main([*arguments, *sets]) == 2
    assert "is no checkout" in capsys.readouterr().err


# ---- README ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", ["README.md", "docs/opencl-cpu.md"])
def test_the_tables_of_peers_are_those_of_the_results_they_name(page: str) -> None:
    readme = (ROOT / page).read_text(encoding="utf-8")
    first, end, name = cpu_peers.table_region(readme)
    if name:
        assert cpu_peers.with_table(readme, name, cpu_peers.read_report(ROOT / name)) == readme
        assert (ROOT / name).with_suffix(".png").is_file()
    else:
        assert not readme[first:end].partition("-->")[2].strip(), "a table without the name of its results"
        found = sorted(common.RESULTS.glob("cpu_peers-*.json"))
        assert not found, "results without a table: python bench/cpu_peers.py --table --from FILE"


def test_bench_s_readme_knows_every_program_and_field(peers_run: tuple[Path, dict[str, Any], str]) -> None:
    text = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    for program in sorted(path.name for path in (ROOT / "bench").glob("*.py")):
        assert f"`{program}`" in text
    report = peers_run[1]
    case = report["cases"][0]
    (result, *_) = [result for result in case["results"].values() if "launches" in result]
    for field in {*report, *case["ratios"].keys() & set(), *result, *("results", "failures", "best_peer", "ratios")}:
        assert f"`{field}`" in text, field
