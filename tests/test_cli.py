"""The command line: exit codes, streams, JSON, files, and one clear line for every error."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, MAXMAX, SOFTMAX, FakeBackend, conv_tensors

import dispatcher
from dispatcher import cli
from dispatcher.backends.numpy_ref.backend import NumpyExecutable
from dispatcher.device import diagnosis, machine
from dispatcher.errors import BuildError, InputError, VerificationError
from dispatcher.interface import Device
from dispatcher.report import layout, streams

ROOT = Path(__file__).resolve().parent.parent


class Ended:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> Any:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command in this process."""

    def run_command(*arguments: str) -> Ended:
        capsys.readouterr()
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run_command


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "dispatcher.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)


# ---- every command, in words and as JSON -------------------------------------------------------------------
COMMANDS = {
    "devices": ["devices"],
    "problems": ["problems"],
    "show": ["show", SOFTMAX],
    "run": ["run", MAXMAX, "--device", "numpy"],
    "explain": ["explain", CONV, "--device", "numpy"],
    "verify": ["verify", CONV, "--device", "numpy"],
    "bench": ["bench", CONV, "--device", "numpy", "--repeat", "2"],
}

OPERATOR_KEYS = {
    *("problem", "title", "dtype", "precision", "sizes", "scalars"),
    *("tensor_shapes", "output_shape", "flops", "ideal_bytes"),
}
KEYS = {
    "devices": {"devices", "auto"},
    "problems": {"problems"},
    "show": {
        *("name", "title", "origin", "note", "rank", "path", "tolerance"),
        *("parameters", "pipeline", "cases", "shorthands"),
    },
    "run": {
        *OPERATOR_KEYS,
        *("case", "seed", "device", "skipped", "inputs_s", "compile_s", "first_s", "warm_s"),
        *("warm_median_s", "gflops", "verified", "comparison", "output"),
    },
    "explain": {*OPERATOR_KEYS, "case", "device", "skipped", "convolutions", "launches"},
    "verify": {"passed", "only_reference", "results"},
    "bench": {"machine", "versions", "protocol", "results", "peers", "failures", "races"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_result_and_nothing_else(run: Any, name: str) -> None:
    ended = run(*COMMANDS[name])
    assert ended.code == 0
    assert ended.out.strip()
    assert ended.err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_the_promised_keys(run: Any, name: str) -> None:
    ended = run(*COMMANDS[name], "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.json["schema"] == 1
    assert ended.json["command"] == name
    assert set(ended.json) == {"schema", "command", *KEYS[name]}


def test_the_list_of_commands_is_complete(run: Any) -> None:
    ended = run("--help")
    assert ended.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in ended.out
        assert run(name, "--help").code == 0
    assert run().out == ended.out
    assert "..." not in ended.out.partition("Commands:")[2]  # every summary is whole
    assert run("--version").out == f"kernel-dispatcher {dispatcher.__version__}\n"


def test_help_says_what_holds_where_nothing_is_given(run: Any) -> None:
    words = " ".join(run("bench", "--help").out.split())
    assert "DISPATCHER_DEVICE, then auto" in words
    for command in ("bench", "verify", "tune", "explain"):
        words = " ".join(run(command, "--help").out.split())
        assert "Named case that gives the sizes; sample if left out" in words


@pytest.mark.parametrize(("available", "words"), [(24_261_140_480, "22.6 GiB are"), (1 << 29, "only 0.5 GiB are")])
def test_doctor_tells_memory_in_gib(
    run: Any, monkeypatch: pytest.MonkeyPatch, install_backends: Install, available: int, words: str
) -> None:
    install_backends()
    monkeypatch.setattr(diagnosis, "available_bytes", lambda: available)
    assert f" {words} available" in run("doctor").out


def test_a_problem_that_is_named_twice_is_taken_once(run: Any, tmp_path: Path) -> None:
    source = Path(str(dispatcher.load_problem(CONV).path))
    ended = run("verify", CONV, str(source), CONV, "--device", "numpy", "--inputs", "signed", "--json")
    assert [result["problem"] for result in ended.json["results"]] == [CONV]
    other = tmp_path / source.name
    other.write_text(source.read_text().replace("title: ", "title: Other "))
    for command in ("verify", "bench", "tune"):
        ended = run(command, CONV, str(other), "--device", "numpy")
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert str(other) in ended.err and "different problems of one name" in ended.err


def test_devices_says_why_not(run: Any, install_backends: Install) -> None:
    install_backends(FakeBackend("cuda", unavailable="no driver library libcuda.so.1"))
    ended = run("devices")
    assert "no driver library libcuda.so.1" in ended.out
    assert "auto picks numpy" in ended.out
    listed = run("devices", "--json").json
    assert listed["auto"] == "numpy"
    assert listed["devices"][0]["reason"] == "no driver library libcuda.so.1"
    install_backends(FakeBackend("cuda", unavailable="no driver"), keep=())
    assert run("devices").code == 0
    assert run("devices", "--json").json["auto"] is None


def test_show_renders_fields_for_people(run: Any) -> None:
    pipeline = run("show", SOFTMAX, "--json").json["pipeline"]
    assert pipeline[0]["op"] == "avg_pool3d"
    assert pipeline[3]["fields"] == {"axis": "spatial"}
    assert pipeline[1]["fields"]["stride"] == ["stride_d", "stride_h", "stride_w"]
    assert "avg_pool3d(window=pool_kernel)" in run("show", SOFTMAX).out


def test_numbers_that_json_lacks_are_texts(run: Any) -> None:
    assert run("show", SOFTMAX, "--json").json["cases"]["no_pool"]["clamp_max"] == "inf"
    report = run("run", SOFTMAX, "--device", "numpy", "--set", "clamp_min=-inf", "--json").json
    assert report["scalars"]["clamp_min"] == "-inf"
    assert type(report["gflops"]) is float
    assert type(report["flops"]) is int
    assert type(report["comparison"]["max_abs_error"]) is float


# ---- run ---------------------------------------------------------------------------------------------------
def test_run_reports_what_it_did(run: Any) -> None:
    report = run("run", MAXMAX, "--device", "numpy", "--seed", "7", "--repeat", "3", "--json").json
    assert (report["problem"], report["case"], report["seed"]) == (MAXMAX, "sample", 7)
    assert report["device"]["id"] == "numpy"
    assert report["verified"] is True
    assert len(report["warm_s"]) == 3
    assert min(report["warm_s"]) <= report["warm_median_s"] <= max(report["warm_s"])
    assert report["output_shape"] == [2, 1, 2, 2, 3]
    assert run("run", MAXMAX, "--device", "numpy", "--no-verify", "--json").json["verified"] is None


@pytest.mark.parametrize("options", [["--no-verify"], ["--repeat", "0"]], ids=lambda each: each[0])
def test_one_result_is_computed_once(run: Any, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    calls: list[None] = []
    compute = NumpyExecutable.__call__
    monkeypatch.setattr(
        NumpyExecutable, "__call__", lambda *given, **named: calls.append(None) or compute(*given, **named)
    )
    report = run("run", MAXMAX, "--device", "numpy", *options, "--json").json
    assert len(calls) == 1
    assert report["warm_s"] == []
    assert (report["warm_median_s"], report["gflops"]) == (None, None)
    assert "speed" not in run("run", MAXMAX, "--device", "numpy", *options).out


def test_settings_override_the_case(run: Any) -> None:
    report = run("run", CONV, "--device", "numpy", "--set", "stride=1,2,3", "--set", "padding=0", "--json",
                 "--set", "output_padding=0", "--case", "odd", "--dtype", "float64").json  # fmt: skip
    assert [report["sizes"][f"stride_{axis}"] for axis in "dhw"] == [1, 2, 3]
    assert report["sizes"]["groups"] == 3
    assert report["dtype"] == "float64"
    assert report["case"] == "odd"


def test_tensors_from_files_and_the_result_into_one(run: Any, tmp_path: Path) -> None:
    tensors = conv_tensors()
    np.save(tmp_path / "x.npy", np.asfortranarray(tensors["input"]))
    np.save(tmp_path / "w.npy", tensors["kernel"])
    output = tmp_path / "y.npy"
    output.write_bytes(b"old")
    command = ["run", CONV, "--device", "numpy", "--tensor", f"input={tmp_path}/x.npy", "--output", str(output)]
    ended = run(*command, "--tensor", f"kernel={tmp_path}/w.npy", "--set", "stride=2")
    assert (ended.code, ended.err) == (0, "")
    expected = dispatcher.run(CONV, device="numpy", **tensors, stride=2)
    np.testing.assert_array_equal(np.load(output), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.npy", "x.npy", "y.npy"]
    # Without a case the other tensor's sizes are unknown; with one they are its.
    assert "kernel_size" in run(*command).err
    assert run(*command, "--case", "sample").code == 0
    assert np.load(output).shape == (2, 6, 6, 8, 10)


def test_integer_files_are_converted(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 1, 2, 2, 2), ">i4"))
    ended = run("run", CONV, "--device", "numpy", "--tensor", f"input={tmp_path}/x.npy",
                "--set", "kernel_size=1", "--set", "out_channels=1")  # fmt: skip
    assert (ended.code, ended.err) == (0, "")


def test_a_failed_write_keeps_the_old_file(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "y.npy"
    output.write_bytes(b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    ended = run("run", MAXMAX, "--device", "numpy", "--output", str(output))
    assert ended.code == 2
    assert "--output" in ended.err
    assert "No space left" in ended.err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_what_is_read_is_not_overwritten(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(streams, "picture_path", partial(streams.output_path, "--plot"))  # whatever is installed
    folder = Path(dispatcher.__file__).parent / "problems"
    Path("p.json").write_bytes(next(folder.rglob(f"{CONV}.yaml")).read_bytes())
    np.save("x.npy", conv_tensors()["input"])
    for name in ("p.json", "x.npy"):
        Path(f"link.{name}").symlink_to(name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tensor = ["--tensor", "input=x.npy"]
    for arguments in (
        ["run", "p.json", "--output", "link.p.json"],
        ["run", CONV, *tensor, "--output", f"{tmp_path}/x.npy"],
        ["run", CONV, "--tensor", "input=link.x.npy", "--trace", "x.npy"],
        ["export", "p.json", "--to", "opencl", "--output", "p.json"],
        ["import", "p.json", "--trust", "--weights", "link.p.json"],
        *([command, "p.json", "--plot", "p.json"] for command in ("explain", "verify", "tune", "bench")),
        ["verify", CONV, "--kernel", "x.npy", "--plot", "x.npy"],
    ):
        ended = run(*arguments)
        assert (ended.code, ended.out) == (2, "")
        assert "which is read; give the output a place of its own" in ended.err
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_result_is_kept_though_verification_fails(run: Any, install_backends: Install, tmp_path: Path) -> None:
    install_backends(FakeBackend("bad", lambda operator, tensors: np.zeros(operator.output_shape, "f4")))
    assert run("run", MAXMAX, "--output", str(tmp_path / "y.npy")).code == 1
    assert not np.load(tmp_path / "y.npy").any()


def test_the_same_seed_gives_the_same_bytes_everywhere(tmp_path: Path) -> None:
    files = [tmp_path / "one.npy", tmp_path / "two.npy", tmp_path / "other.npy"]
    for path, seed, hash_seed in zip(files, "001", "120", strict=True):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = ["run", MAXMAX, "--device", "numpy", "--seed", seed, "--output", str(path), "--no-verify"]
        assert spawn(*command, env=environment).returncode == 0
    first, second, other = (path.read_bytes() for path in files)
    assert first == second != other


@pytest.mark.parametrize("command", ["run", "explain", "verify", "bench"])
def test_an_operator_is_bound_once(run: Any, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    from dispatcher.problem import arguments

    bound: list[Any] = []
    bind = arguments.bind
    monkeypatch.setattr(arguments, "bind", lambda *args, **more: bound.append(args) or bind(*args, **more))
    more = ["--repeat", "1", "--force"] if command == "bench" else []
    assert run(command, CONV, "--device", "numpy", *more).code == 0
    assert len(bound) == 1


# ---- errors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "stride=0"], 2, "stride"),
        (["--set", "stride=-1"], 2, "--set stride is -1"),
        (["--set", "stride=2,2"], 2, "--set stride has 2 values"),
        (["--set", "stride=2.5"], 2, "--set stride is '2.5'"),
        (["--set", "stride=true"], 2, "--set stride is 'true'"),
        (["--set", "dilation=0"], 2, "dilation"),
        (["--set", "groups=0"], 2, "groups"),
        (["--set", "groups=3"], 2, "in_channels is 4; it must be divisible by groups (3)"),
        (["--set", "stride=1", "--set", "stride=1"], 2, "given twice"),
        (["--set", "stride=1", "--set", "stride_d=2"], 2, "stride and stride_d contradict"),
        (["--set", "shape=1,1,2,2"], 2, "no parameter 'shape'"),
        (["--set", "padding=99"], 2, "output size on axis depth"),
        (["--repeat", "-1"], 2, "--repeat is '-1'"),
        (["--repeat", "nan"], 2, "--repeat is 'nan'"),
        (["--seed", "-1"], 2, "--seed is '-1'"),
        (["--seed", str(2**64)], 2, "--seed is '18446744073709551616'"),
        (["--seed", "1.5"], 2, "--seed is '1.5'"),
        (["--seed", "abc"], 2, "--seed is 'abc'"),
        (["--dtype", "float8"], 2, "--dtype is 'float8'"),
        (["--precision", "fp8"], 2, "--precision is 'fp8'"),
        (["--precision", "tf32", "--dtype", "float64"], 2, "tf32"),
        (["--case", "nope"], 2, "no case 'nope'"),
        (
            ["--tensor", "input=missing.npy"],
            2,
            "input: 'missing.npy' cannot be read: No such file or directory; expected a .npy file",
        ),
        (["--tensor", "input"], 2, "--tensor 'input' is not understood"),
        (["--tensor", "weight=x.npy"], 2, "--tensor weight"),
        (["--tensor", f"input={__file__}"], 2, "is not a .npy file"),
        (["--output", "no/such/folder/y.npy"], 2, "--output 'no/such/folder/y.npy'"),
        (["--output", "y.txt"], 2, "--output is 'y.txt'; expected a path that ends in .npy"),
        (["--output", "/dev/null"], 2, "not a regular file"),
        (["--output", "/"], 2, "--output '/'"),
        (["--device", "99"], 3, "'99'"),
        (["--device", "vulkan:0"], 3, "'vulkan'"),
        (["--device", "numpy:3"], 3, "no device 3; numpy has 1 device"),
        (["--device", ""], 3, "a name is missing"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["extra"], 2, "extra"),
        (["--device"], 2, "--device"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(run: Any, arguments: list[str], code: int, words: str) -> None:
    ended = run("run", CONV, *arguments)
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert words in ended.err
    assert ended.code == code


@pytest.mark.parametrize("text", ["clamp_min=nan", "clamp_max=low", "clamp_min=1,2"])
def test_wrong_scalars(run: Any, text: str) -> None:
    ended = run("run", SOFTMAX, "--set", text)
    assert ended.code == 2
    assert f"--set {text.partition('=')[0]}" in ended.err


@pytest.mark.parametrize("command", ["explain", "verify", "bench"])
def test_the_other_commands_check_as_well(run: Any, install_backends: Install, command: str) -> None:
    fake = FakeBackend()
    install_backends(fake)
    wrong = [["--set", "stride=0"], ["--case", "nope"], ["--dtype", "int8"], ["--precision", "x"]]
    if command != "explain":
        wrong.append(["--set", "batch_size=0"])  # nothing would be compared or timed
    for arguments in wrong:
        ended = run(command, CONV, *arguments)
        assert ended.code == 2, arguments
        assert ended.err.count("\n") == 1
    assert fake.probes == 0
    assert run(command, CONV, "--device", "fake:9").code == 3
    assert run(command, "nope").code == 2


def test_backend_names_are_case_blind(run: Any) -> None:
    assert run("run", MAXMAX, "--device", "NumPy").code == 0


def test_unknown_commands_and_missing_arguments(run: Any) -> None:
    for arguments in (["frobnicate"], ["run"], ["show"], ["--frob"]):
        ended = run(*arguments)
        assert ended.code == 2
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1


def test_a_broken_problem_file_is_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\nname: y\n")
    ended = run("run", str(tmp_path / "bad.yaml"))
    assert ended.code == 2
    assert "bad.yaml:2" in ended.err


def test_a_wrong_command_ends_before_anything_is_opened(run: Any, install_backends: Install, tmp_path: Path) -> None:
    fake = FakeBackend()
    install_backends(fake)
    start = time.perf_counter()
    huge = ["--set", "depth=100000", "--set", "height=100000"]
    assert run("run", CONV, *huge, "--output", str(tmp_path / "no" / "y.npy")).code == 2
    assert run("run", CONV, *huge, "--set", "groups=3").code == 2
    assert run("run", CONV, *huge, "--device", "fake:").code == 3
    assert time.perf_counter() - start < 2
    assert fake.probes == 0


def test_build_errors_exit_4_and_show_their_log_when_asked(run: Any, install_backends: Install) -> None:
    error = BuildError("kernel conv_transpose3d_direct did not build: expected ';'", log="line 1\nline 2")
    install_backends(FakeBackend("bad", build_error=error))
    ended = run("run", CONV, "--device", "bad")
    assert ended.code == 4
    assert ended.err == "error: kernel conv_transpose3d_direct did not build: expected ';'\n"
    ended = run("run", CONV, "--device", "bad", "--debug")
    assert "Traceback" in ended.err
    assert "line 2" in ended.err


def test_an_unexpected_error_is_one_line_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.problem import loader

    def broken() -> Any:
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr(loader, "problem_names", broken)
    ended = run("problems")
    assert ended.code == 4
    hint = "(run again with --debug for the traceback)"
    assert ended.err == f"error: unexpected ZeroDivisionError: a bug; of two lines {hint}\n"
    assert "Traceback" in run("problems", "--debug").err


def test_an_interrupt_exits_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.problem import loader

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "problem_names", interrupted)
    ended = run("problems")
    assert (ended.code, ended.out, ended.err) == (130, "", "error: interrupted\n")


def test_a_termination_exits_143_and_leaves_no_files(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dispatcher.problem import loader

    def terminated() -> Any:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            except Exception:
                return []

    monkeypatch.setattr(loader, "problem_names", terminated)
    before = signal.getsignal(signal.SIGTERM)
    ended = run("problems")
    assert (ended.code, ended.out, ended.err) == (143, "", "error: terminated\n")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# ---- errors as JSON ----------------------------------------------------------------------------------------
#: A command that fails, its exit code, and what the document calls the error.
FAILURES = [
    (["run", CONV, "--set", "stride=0"], 2, "input"),
    (["run", CONV, "--case", "nope"], 2, "input"),
    (["run", CONV, "--device"], 2, "usage"),
    (["run", CONV, "--frobnicate"], 2, "usage"),
    (["run"], 2, "usage"),
    (["frobnicate"], 2, "usage"),
    (["show", "nope"], 2, "input"),
    (["bench", CONV, "--compare", "missing.json", "missing.json"], 2, "input"),
    (["run", CONV, "--device", "99"], 3, "device"),
    (["explain", CONV, "--device", "numpy:3"], 3, "device"),
    (["verify", CONV, "--device", "vulkan"], 3, "device"),
    (["tune", CONV, "--device", "numpy"], 3, "device"),
    (["run", CONV, "--device", "bad"], 4, "kernel"),
    (["explain", CONV, "--device", "bad"], 4, "kernel"),
]


@pytest.mark.parametrize(("arguments", "code", "kind"), FAILURES)
def test_an_error_is_a_document_where_json_is_asked_for(
    run: Any, install_backends: Install, arguments: list[str], code: int, kind: str
) -> None:
    install_backends(FakeBackend("bad", build_error=BuildError("kernel k did not build", log="line 1")))
    ended = run(arguments[0], "--json", *arguments[1:])
    (message,) = [line for line in ended.err.splitlines() if not line.startswith("note: ")]
    error = {"kind": kind, "message": message.removeprefix("error: "), "exit_code": code}
    name = None if arguments[0] == "frobnicate" else arguments[0]
    assert ended.json == {"schema": 1, "command": name, "error": error}
    assert ended.code == code and message.startswith("error: ")
    words = run(*arguments)  # the same in words, but for the document
    assert (words.code, words.out, words.err) == (code, "", ended.err)


@pytest.mark.parametrize(
    ("raised", "code", "kind"),
    [
        (VerificationError("it is wrong"), 1, "verification"),
        (MemoryError(), 4, "memory"),
        (ZeroDivisionError("a bug"), 4, "unexpected"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
    ],
)
def test_whatever_happens_is_a_document(
    run: Any, monkeypatch: pytest.MonkeyPatch, raised: Any, code: int, kind: str
) -> None:
    from dispatcher.problem import loader

    def broken() -> Any:
        if isinstance(raised, BaseException):
            raise raised
        os.kill(os.getpid(), raised)
        time.sleep(10)

    monkeypatch.setattr(loader, "problem_names", broken)
    ended = run("problems", "--json")
    assert (ended.code, ended.json["error"]["kind"], ended.json["error"]["exit_code"]) == (code, kind, code)
    assert ended.err == f"error: {ended.json['error']['message']}\n"


@pytest.mark.parametrize("command", ["explain", "verify", "tune", "bench"])
def test_a_picture_that_fails_is_a_document_too(run: Any, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(streams, "picture_path", lambda plot, read: Path(plot))  # whatever is installed
    for name in ("device_to_tune", "tune_operator"):  # the reference has nothing to tune
        monkeypatch.setattr(f"dispatcher.timing.tuning.{name}", lambda *_, **__: None)

    def full(found: Any, path: Path | None) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(streams, "draw", full)
    more = {"verify": ["--inputs", "signed"], "bench": ["--repeat", "1", "--force"]}.get(command, [])
    ended = run(command, CONV, "--device", "numpy", "--plot", "x.svg", "--json", *more)
    assert (ended.code, ended.json["error"]["message"]) == (2, "the disk is full")


def test_a_result_that_is_wrong_is_one_document(run: Any, install_backends: Install) -> None:
    install_backends(FakeBackend("bad", lambda operator, tensors: np.zeros(operator.output_shape, "f4")))
    for command, key in (("run", "comparison"), ("verify", "results"), ("bench", "failures")):
        ended = run(command, CONV, "--device", "bad", "--json")
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert "error" not in ended.json and key in ended.json


def test_json_behind_a_double_dash_is_no_option(run: Any) -> None:
    ended = run("show", "--", "--json")
    assert (ended.code, ended.out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "s"], 2, "did you mean 's.yaml'?"),
        (["run", "s.yaml"], 2, "give them by name (--set n=... on the command line)"),
        (["problems", "--level", "9"], 0, "the levels are 1 and 2"),
        (["tune", CONV, "--device", "numpy"], 3, "error: numpy: there is nothing to tune"),
    ],
)
def test_the_next_step_is_said_in_one_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "busy_reason", lambda load: "other programs keep the machine busy")
    Path("s.yaml").write_text("{name: s, parameters: {x: [n, c, w], y: output}, pipeline: [relu]}")
    ended = run(*arguments)
    assert ended.code == code and words in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["run", CONV, "--case", "smple"], "sample"),
        (["run", CONV, "--tensor", "inptu=x.npy"], "input"),
        (["run", CONV, "--dtype", "flot32"], "float32"),
        (["run", CONV, "--precision", "tf23"], "tf32"),
        (["run", CONV, "--device", "numpi"], "numpy"),
        (["verify", CONV, "--inputs", "sigend"], "signed"),
        (["bench", CONV, "--against", "openvno"], "openvino"),
    ],
)
def test_what_was_meant_is_guessed(run: Any, arguments: list[str], meant: str) -> None:
    ended = run(*arguments)
    assert f"; did you mean {meant!r}?" in ended.err and ended.err.count("\n") == 1
    assert ended.code == (3 if "--device" in arguments else 2)


# ---- for people --------------------------------------------------------------------------------------------
def in_a_terminal(columns: int, *arguments: str, **environment: str) -> str:
    """What a command prints in a terminal of that many columns."""
    leader, follower = os.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}
    command = [sys.executable, "-m", "dispatcher", *arguments]
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, cwd=ROOT, env=variables)
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 4096):
            seen += chunk
    except OSError:  # how the end of a terminal shows on Linux
        pass
    os.close(leader)
    assert process.wait() == 0
    return seen.decode().replace("\r\n", "\n")


PRINTING = [
    ["devices"],
    ["problems"],
    ["show", SOFTMAX],
    ["run", SOFTMAX, "--device", "numpy"],
    ["explain", SOFTMAX, "--device", "numpy"],
    ["verify", CONV, "--device", "numpy"],
    ["bench", MAXMAX, "--device", "numpy", "--repeat", "1", "--force"],
]


@pytest.mark.parametrize("arguments", PRINTING, ids=[arguments[0] for arguments in PRINTING])
def test_a_terminal_of_80_columns_is_enough(arguments: list[str]) -> None:
    text = in_a_terminal(80, *arguments, NO_COLOR="1")
    assert "\x1b" not in text and "…" not in text
    for line in text.splitlines():  # a word that is longer than a line stands alone
        assert len(line) <= 80 or len(line.split()) <= 2, line
    if arguments[0] in ("problems", "verify"):
        whole = [line.split()[0] for line in text.splitlines() if line.strip()]
        assert "PROBLEM" in whole and CONV in whole


def test_tables_have_columns_in_80_columns(
    run: Any, monkeypatch: pytest.MonkeyPatch, install_backends: Install
) -> None:
    monkeypatch.setattr(layout, "columns", lambda: 80)
    install_backends(FakeBackend("cuda", unavailable=f"{'/a/folder' * 7}/libcuda.so.1 cannot be opened"))
    for arguments, columns in (
        (["doctor"], ["VERDICT", "ABOUT", "FOUND"]),
        (
            ["bench", MAXMAX, "--device", "numpy", "--repeat", "1"],
            ["DEVICE", "VERIFIED", "MEDIAN", "QUARTILES", "COLD"],
        ),
    ):
        lines = run(*arguments).out.splitlines()
        assert columns in [line.split()[-len(columns) :] for line in lines]  # short times leave room for the problem
        assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)


def test_run_says_which_inputs_were_made_up(run: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.npy" for name in ("input", "kernel")}
    for name, shape in dispatcher.explain(CONV, case="sample", device="numpy").operator.tensor_shapes.items():
        np.save(files[name], np.zeros(shape, np.float32))

    def told(*names: str) -> str:
        given = [word for name in names for word in ("--tensor", f"{name}={files[name]}")]
        (line,) = [line for line in run("run", CONV, "--case", "sample", *given).out.splitlines() if "inputs " in line]
        return str(line)

    assert "input, kernel made up from seed 0, in " in told() and "read" not in told()
    assert "kernel made up from seed 0, input read from a file, in " in told("input")
    assert "input, kernel read from files, in " in told("input", "kernel")


def test_tf32_on_numpy_is_not_called_that(run: Any, install_backends: Install) -> None:
    install_backends(FakeBackend("opencl", kind="cpu", unsupported="precision tf32 exists on CUDA tensor cores only"))
    out = run("run", MAXMAX, "--precision", "tf32").out
    assert "precision tf32 is not used: NumPy computes in float64" in " ".join(out.split())
    assert "skipped   opencl:0: precision tf32 exists on CUDA" in out
    assert "yes, though NumPy is the reference itself" in out
    assert "is not used" not in run("run", MAXMAX, "--device", "numpy").out


def test_long_reasons_are_cut_to_a_sentence(run: Any, install_backends: Install) -> None:
    reason = "the driver is missing; install it. " + "It comes from somewhere. " * 10
    install_backends(FakeBackend("cuda", unavailable=reason))
    short = "the driver is missing; `dispatcher doctor` or --json says more\n"
    assert f"skipped   cuda: {short}" in run("run", MAXMAX).out
    ended = run("run", MAXMAX, "--json")
    assert ended.err == f"note: cuda is passed over: {short}" and ended.json["skipped"][0]["reason"] == reason
    assert reason.strip() in run("devices").out


def test_long_work_tells_its_progress_in_a_pipe_in_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds, lines in ((15, 0), (400, 6)):
        now[0] = 0.0
        with streams.progress("tuning") as advance:
            advance(0.0)
            for second in range(1, seconds + 1):
                now[0] += 1.0
                advance(second / seconds)
        told = capsys.readouterr().err.splitlines()
        assert len(told) == lines
    assert told[0] == "note: tuning: 2 % done, about 6 min to go"
    assert told[-1] == "note: tuning: 80 % done, about 80 s to go"


def test_headings_are_bold_in_a_terminal_alone() -> None:
    assert "\x1b[1m" in in_a_terminal(200, "problems")
    assert "\x1b" not in spawn("problems", env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "40"}).stdout


def test_an_interrupt_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *others: Any) -> None:
            if name == "dispatcher.cli":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "path", list(sys.path))  # which it changes
    command = importlib.import_module("dispatcher.__main__")
    monkeypatch.delitem(sys.modules, "dispatcher.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert command.main() == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")
    assert f'\ndispatcher = "{command.__name__}:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_a_table_in_a_pipe_is_as_wide_as_it_is(run: Any, install_backends: Install) -> None:
    reason = f"the library {'/a/long/folder' * 20}/libcuda.so.1 cannot be opened: {'so it is ' * 40}"
    install_backends(FakeBackend("cuda", unavailable=reason.strip()))
    for command in (["devices"], ["run", MAXMAX], ["explain", MAXMAX], ["doctor"]):
        assert reason.strip() in run(*command).out


@pytest.mark.parametrize("columns", [24, 40])
def test_a_narrow_terminal(run: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(layout, "columns", lambda: columns)
    for command in (
        ["run", SOFTMAX, "--device", "numpy"],
        ["explain", SOFTMAX, "--device", "numpy"],
        ["show", SOFTMAX],
    ):
        for line in run(*command).out.splitlines():  # a word that is longer than a line stands alone
            assert len(line) <= columns or len(line.split()) == 1, line


def test_the_axes_are_those_of_the_problem(run: Any) -> None:
    text = run("explain", "conv2d-relu-biasadd", "--device", "numpy").out
    assert "TAPS H W" in text and re.search(r"^1 +3 3 +9 ", text, re.MULTILINE)


def test_explain_is_narrow_but_for_reasons(run: Any) -> None:
    assert max(map(len, run("explain", MAXMAX, "--device", "numpy").out.splitlines())) <= 100


# ---- in a process of its own -------------------------------------------------------------------------------
def test_the_package_is_the_command() -> None:
    for arguments in (["--version"], ["show", CONV], ["run", CONV, "--set", "stride=0", "--json"]):
        command = [sys.executable, "-m", "dispatcher", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        same = spawn(*arguments)
        assert (ended.returncode, ended.stdout, ended.stderr) == (same.returncode, same.stdout, same.stderr)


def test_exit_codes_reach_the_shell() -> None:
    for arguments, code in (
        (["problems"], 0),
        (["run", CONV, "--set", "stride=0"], 2),
        (["run", CONV, "--device", "99"], 3),
    ):
        ended = spawn(*arguments)
        assert ended.returncode == code
        assert "Traceback" not in ended.stderr


def into(place: int | IO[str], arguments: list[str], **environment: str) -> tuple[int, str]:
    """The exit code and stderr of a command whose stdout goes to ``place``."""
    ended = subprocess.run(
        [sys.executable, "-m", "dispatcher.cli", *arguments],
        stdout=place,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    return ended.returncode, ended.stderr


#: Every way to stdout: our own, and those of what parses the command line. An empty text is no variable.
OUTPUTS: list[tuple[list[str], dict[str, str]]] = [
    (["problems", "--json"], {}),
    (["show", CONV], {"PYTHONUNBUFFERED": ""}),
    (["--version"], {"PYTHONUNBUFFERED": "1"}),
    ([], {}),
    (["run", "--help"], {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "ascii"}),
    (["--help"], {"PYTHONUNBUFFERED": ""}),
    ([], {"_DISPATCHER_COMPLETE": "complete_bash", "COMP_WORDS": "dispatcher ", "COMP_CWORD": "1"}),
]


@pytest.mark.parametrize(("arguments", "environment"), OUTPUTS)
def test_a_closed_pipe_is_quiet_and_a_full_disk_is_one_line(arguments: list[str], environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert into(writer, arguments, **environment) == (141, "")
    os.close(writer)
    with open("/dev/full", "w") as full:
        code, err = into(full, arguments, **environment)
    assert code == 2
    assert err.startswith("error: stdout cannot be written") and err.count("\n") == 1


def test_a_stderr_that_nobody_reads_changes_nothing() -> None:
    command = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh", sys.executable, "-m", "dispatcher.cli"]
    ended = subprocess.run([*command, "--debug", "show", "nope"], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_cannot_be_encoded_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str) -> None:
    stray = os.fsdecode(b"stray\xff")  # a file name in no encoding
    file = tmp_path / f"{stray}.yaml"
    text = Path(str(dispatcher.load_problem(CONV).path)).read_text(encoding="utf-8")
    file.write_text(re.sub("(?m)^title: .*", "title: Größe → kleiner", text), encoding="utf-8")
    title = "Größe → kleiner".encode(encoding, "backslashreplace")

    def said(code: int, *arguments: str) -> tuple[bytes, bytes]:
        out, err = io.BytesIO(), io.BytesIO()
        for name, taken in (("stdout", out), ("stderr", err)):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(taken, encoding, "strict"))
        assert cli.main(arguments) == code
        return out.getvalue(), err.getvalue()

    output, plan = f"{file}.npy", ("--device", "numpy", "--no-verify")
    assert title in said(0, "show", str(file))[0]
    assert json.loads(said(0, "show", str(file), "--json")[0])["title"] == "Größe → kleiner"
    assert rb"stray\udcff.yaml.npy" in said(0, "run", str(file), *plan, "--output", output)[0]
    assert json.loads(said(0, "run", str(file), *plan, "--output", output, "--json")[0])["output"] == output
    assert rb"\udcffx.yaml" in said(2, "show", f"{tmp_path / stray}x.yaml")[1]
    assert rb"\udcff" in said(3, "run", str(file), "--device", stray)[1]


def test_a_closed_stdin_and_a_narrow_terminal() -> None:
    ended = spawn("problems", stdin=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "20", "NO_COLOR": "1"})
    assert ended.returncode == 0
    assert CONV in ended.stdout
    assert "\x1b" not in ended.stdout


def test_a_progress_bar_is_for_terminals_and_does_not_reach_stdout() -> None:
    leader, follower = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dispatcher.cli", "verify", CONV, "--device", "numpy", "--json"],
        stdout=subprocess.PIPE,
        stderr=follower,
        cwd=ROOT,
        env=environment,
    )
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 4096):
            seen += chunk
    except OSError:  # how the end of a terminal shows on Linux
        pass
    out, _ = process.communicate()
    os.close(leader)
    assert process.returncode == 0
    assert json.loads(out)["passed"] is True
    assert b"verifying" in seen


def test_the_environment_names_the_device() -> None:
    ended = spawn("run", MAXMAX, "--json", env={**os.environ, "DISPATCHER_DEVICE": "numpy"})
    assert json.loads(ended.stdout)["device"]["id"] == "numpy"
    ended = spawn("run", MAXMAX, env={**os.environ, "DISPATCHER_DEVICE": "nope"})
    assert ended.returncode == 3
    assert "DISPATCHER_DEVICE" in ended.stderr


def test_a_machine_without_opencl_still_works() -> None:
    environment = {**os.environ, "OCL_ICD_VENDORS": "/nonexistent"}
    ended = spawn("devices", "--json", env=environment)
    assert ended.returncode == 0
    report = json.loads(ended.stdout)
    assert report["devices"][-1]["id"] == "numpy"
    if all(device["backend"] != "opencl" or not device["available"] for device in report["devices"]):
        ended = spawn("run", MAXMAX, "--device", "opencl", env=environment)
        assert ended.returncode == 3
        assert "OCL_ICD_VENDORS is '/nonexistent'" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_a_run_without_a_traceback(sent: signal.Signals, code: int, word: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dispatcher.cli", "run", MAXMAX, "--device", "numpy", "--repeat", "1000000", "-v"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    assert "runs on numpy" in process.stderr.readline()
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", f"error: {word}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["devices"],
        ["problems", "--json"],
        ["--help"],
        ["verify", CONV, "--device", "numpy"],
        ["bench", CONV, "--device", "numpy"],
    ],
)
def test_a_closed_stdout_is_one_line_at_once(arguments: list[str]) -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "dispatcher.cli", *arguments],
        stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: stdout is closed")


def test_with_a_closed_stderr_nothing_else_reaches_stdout() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "dispatcher.cli"]
    ended = subprocess.run([*command, "show", "nope"], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")
    ended = subprocess.run([*command, "problems"], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    assert ended.returncode == 0 and CONV.encode() in ended.stdout


def test_explain_says_what_was_rejected(run: Any, backend_device: Device) -> None:
    if backend_device.backend == "numpy":
        pytest.skip("the reference has one implementation")
    words = ["explain", CONV, "--device", backend_device.id]
    printed = run(*words).out
    (launch,) = json.loads(run(*words, "--json").out)["launches"]
    assert len(launch["rejected"]) >= (2 if backend_device.backend == "opencl" else 0)
    for name, reason in launch["rejected"]:
        if reason in ("a convolution", "not a convolution", "not a reduction"):  # of another kind of step
            continue
        assert f"{name}: {reason.split()[0]}" in printed
