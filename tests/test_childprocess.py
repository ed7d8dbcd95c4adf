"""Functions in a process of their own: reports, prints, crashes, hangs, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispatcher.childprocess import KEPT_BYTES, Report, run_child


def talk(report: Report, *arguments: str) -> None:
    """Reports, and prints from Python and from C."""
    report({"arguments": arguments})
    print("on stdout")
    ctypes.CDLL(None).puts(b"from C")
    os.write(2, b"on stderr\n")
    report([1.5, None])


def flood(report: Report) -> None:
    """Prints more than a pipe holds, and more than is kept."""
    line = b"x" * 1023 + b"\n"
    for _ in range(4 * KEPT_BYTES // 1024):
        os.write(1, line)
    os.write(1, b"the end\n")
    report("done")


def crash(report: Report) -> None:
    """Dies of a null pointer."""
    report("before")
    ctypes.string_at(0)


def leave(report: Report) -> None:
    """Ends the process without a word."""
    os._exit(7)


def hang(report: Report, file: str) -> None:
    """Starts a process that would write a file later, and waits for ever."""
    late = "import sys, time; time.sleep(3); open(sys.argv[1], 'w')"
    subprocess.Popen([sys.executable, "-c", late, file])
    report("waiting")
    while True:
        time.sleep(1)


def test_reports_and_prints_are_kept_apart() -> None:
    ended = run_child("tests.test_childprocess:talk", ["a", "ä"], 60.0)
    assert (ended.code, ended.signal) == (0, "")
    assert ended.reports == ({"arguments": ["a", "ä"]}, [1.5, None])
    for line in ("on stdout", "from C", "on stderr"):
        assert line in ended.printed


def test_of_what_is_printed_the_end_is_kept() -> None:
    ended = run_child("tests.test_childprocess:flood", [], 60.0)
    assert ended.code == 0
    assert ended.reports == ("done",)
    assert len(ended.printed) == KEPT_BYTES
    assert ended.last_line == ": the end"


def test_a_crash_has_its_signal_and_what_was_reported_before() -> None:
    ended = run_child("tests.test_childprocess:crash", [], 60.0)
    assert ended.signal == "SIGSEGV"
    assert ended.reports == ("before",)


def test_an_exit_code_is_kept() -> None:
    ended = run_child("tests.test_childprocess:leave", [], 60.0)
    assert (ended.code, ended.signal, ended.reports) == (7, "", ())


def test_an_error_is_an_exit_code_and_its_last_line() -> None:
    ended = run_child("tests.test_childprocess:nothing", [], 60.0)
    assert ended.code == 1
    assert "AttributeError" in ended.last_line


def test_the_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_PARENT", "1")
    ended = run_child("tests.test_childprocess:variables", [], 60.0, {"FROM_CALLER": "2"})
    assert ended.reports == (["1", "2"],)


def variables(report: Report) -> None:
    """Reports two environment variables."""
    report([os.environ.get("FROM_PARENT"), os.environ.get("FROM_CALLER")])


def test_a_hang_ends_with_everything_it_started(tmp_path: Path) -> None:
    late = tmp_path / "late"
    start = time.monotonic()
    ended = run_child("tests.test_childprocess:hang", [str(late)], 2.0)
    assert time.monotonic() - start < 10
    assert ended.code is None
    assert ended.signal == ""
    assert ended.reports == ("waiting",)
    time.sleep(3)
    assert not late.exists()


def test_a_child_without_its_parent_ends_itself() -> None:
    code = (
        "from dispatcher import childprocess; childprocess._GRACE_S = 0; "
        "childprocess._child(1.0, 'tests.test_childprocess:wait', [])"
    )
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], timeout=30, check=False, capture_output=True)
    assert ended.returncode == -14  # SIGALRM
    assert time.monotonic() - start < 15


def wait(report: Report) -> None:
    """Waits in C, where no Python handler runs."""
    ctypes.CDLL(None).sleep(20)
