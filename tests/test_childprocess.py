"""Functions in a process of their own: reports, prints, crashes, hangs, and nothing left behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispatcher.device.childprocess import KEPT_BYTES, LONGEST_S, Report, run_child, sigchld_ignored, unwound_by_signals
from tests.children import heeding, soon

ROOT = Path(__file__).resolve().parent.parent


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


def hang(report: Report, folder: str) -> None:
    """Starts another process, says so in files, and waits for ever."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    report("waiting")
    for pid in (os.getpid(), other.pid):
        (Path(folder) / str(pid)).touch()
    while True:
        time.sleep(1)


def fork(report: Report, folder: str) -> None:
    """Starts another process, and ends itself."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (Path(folder) / str(other.pid)).touch()


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


def running(pid: int) -> bool:
    """Whether a process is there, and not only its entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def test_a_hang_ends_with_everything_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = run_child("tests.test_childprocess:hang", [str(tmp_path)], 1.5)
    assert time.monotonic() - start < 10
    assert ended.code is None
    assert ended.signal == ""
    assert ended.reports == ("waiting",)
    assert 0 < ended.starved_s < 1.5 or not Path("/proc/self/schedstat").exists()
    assert len(pids_in(tmp_path)) == 2
    assert soon(lambda: not any(map(running, pids_in(tmp_path))))


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    ended = run_child("tests.test_childprocess:fork", [str(tmp_path)], 60.0)
    assert ended.code == 0
    (other,) = pids_in(tmp_path)
    assert soon(lambda: not running(other))


PARENT = """
import sys, tempfile
from pathlib import Path
from dispatcher.device.childprocess import run_child, unwound_by_signals
with unwound_by_signals(), tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    run_child("tests.test_childprocess:hang", [sys.argv[2]], 60.0, None, Path(folder))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL", "SIGINT"])
def test_nothing_outlives_a_parent_that_is_ended(tmp_path: Path, name: str) -> None:
    scratch, told = tmp_path / "scratch", tmp_path / "told"
    scratch.mkdir()
    told.mkdir()
    number = signal.Signals[name]

    parent = subprocess.Popen(heeding(number, ["-c", PARENT, str(scratch), str(told)]), stderr=subprocess.DEVNULL)
    assert soon(lambda: len(pids_in(told)) == 2)
    assert len(list(scratch.iterdir())) == 1
    parent.send_signal(number)
    assert parent.wait(10) == -number
    assert soon(lambda: not any(map(running, pids_in(told))))
    assert soon(lambda: list(scratch.iterdir()) == [])


def test_signals_that_somebody_handles_stay_theirs() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with unwound_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with unwound_by_signals(), unwound_by_signals():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_any_limit_will_do() -> None:
    assert run_child("tests.test_childprocess:leave", [], 1e300).code == 7
    assert LONGEST_S < 2**31  # what alarm() takes


def test_a_child_that_cannot_see_its_parent_go_ends_itself() -> None:
    code = (
        "from dispatcher.device import childprocess; childprocess._GRACE_S = 0; "
        "childprocess._child(0.5, 'tests.test_childprocess:wait', [], None)"
    )
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert child.wait(30) == -signal.SIGALRM
    assert child.stdin is not None
    child.stdin.close()
    assert time.monotonic() - start < 15


def wait(report: Report) -> None:
    """Waits in C, where no Python handler runs."""
    ctypes.CDLL(None).sleep(20)


# ---- the same in any folder, and like the parent -----------------------------------------------------------
def surroundings(report: Report) -> None:
    """Reports what it can import, its flags, and whether it is told of its children."""
    import numpy
    import yaml

    flags = [sys.flags.isolated, sys.flags.utf8_mode, sys.warnoptions, sigchld_ignored()]
    report([Path(yaml.__file__).parent.name, Path(numpy.__file__).parent.name, *flags])


FLAGS = """
import json, os, pathlib, shutil, signal, sys
root, folder = sys.argv[1:]
sys.path += [root]
from dispatcher.device.childprocess import run_child
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sys.path[:0] = ["", pathlib.Path("some"), None, "nowhere", "relative", "archive.zip"]
sys.path[:0] = [folder]  # another package of our name: ours is loaded already
os.chdir(folder)
for gone in (False, True):
    if gone:
        shutil.rmtree(folder)
    ended = run_child("tests.test_childprocess:surroundings", [], 60.0)
    print(json.dumps(ended.reports), ended.printed)
"""


def test_a_child_is_like_its_parent_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("json", "yaml", "numpy", "signal", "dispatcher"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    command = [sys.executable, "-I", "-X", "utf8", "-W", "error::UserWarning", "-c", FLAGS, str(ROOT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    wanted = [["yaml", "numpy", 1, 1, ["error::UserWarning"], True]]
    assert (done.stdout.splitlines(), done.stderr) == ([f"{json.dumps(wanted)} "] * 2, "")


def test_the_command_line_is_the_same_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('imported from the current folder')")
    command = [sys.executable, "-m", "dispatcher", "problems"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_in_the_way_of_the_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "dispatcher").mkdir()
    # The list stands for the import hook of an editable installation.
    more = f"dispatcher.__path__ = [*dispatcher.__path__, {str(ROOT / 'dispatcher')!r}]"
    command = [sys.executable, "-S", "-c", f"import dispatcher; {more}; import dispatcher.cli"]
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path.endswith("site-packages"))])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'dispatcher'} is in the way of the package dispatcher; rename")
