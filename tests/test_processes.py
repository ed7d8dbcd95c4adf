"""Many processes, forks, threads, broken caches, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM

import dispatcher
from dispatcher.check.inputs import random_tensors
from dispatcher.device.filecache import FileCache
from dispatcher.device.selection import backend_devices
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem

ROOT = Path(__file__).resolve().parent.parent

#: Run a small operator and compare with NumPy; the exit code says how it went.
WORK = """
import sys
import numpy as np, dispatcher
generator = np.random.default_rng(0)
x = generator.standard_normal((3, 4, 3, 4, 5)).astype(np.float32)
w = generator.standard_normal((4, 6, 3, 3, 3)).astype(np.float32)
options = {"algorithm": sys.argv[2]} if sys.argv[2:] else None
problem = "conv-transpose3d-layernorm-gelu-scaling"
compiled = dispatcher.compile(problem, device=sys.argv[1], stride=2, options=options)
result = compiled(input=x, kernel=w)
expected = dispatcher.run(compiled.problem, device="numpy", input=x, kernel=w, stride=2)
assert np.allclose(result, expected, rtol=1e-4, atol=1e-4)
print(compiled.device.id)
"""


@pytest.fixture(scope="module")
def device() -> str:
    """An OpenCL device, or a skip."""
    usable = [found for found in backend_devices("opencl") if found.available]
    if not usable:
        pytest.skip("there is no usable OpenCL device")
    return usable[-1].id


@pytest.fixture
def lasting_device(backend_device: Device) -> Device:
    """A device that other processes have as well, which a simulated one is not."""
    if backend_device.backend == "cuda" and os.environ.get("DISPATCHER_CUDA_SIM") == "1":
        pytest.skip("the CUDA simulator is in this process only")
    return backend_device


def environment(cache: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")}
    return {**kept, "XDG_CACHE_HOME": str(cache), **more}


def start(code: str, *arguments: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )


def work(device: str, cache: Path, code: str = WORK, **more: str) -> tuple[int, str, str]:
    process = start(code, device, env=environment(cache, **more))
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# ---- many processes at once --------------------------------------------------------------------------------
@pytest.mark.slow
def test_eight_processes_start_at_once_on_empty_caches(device: str, tmp_path: Path) -> None:
    for number in range(2):
        # The self-tests, for which the processes take turns, are left out later on, to save time.
        env = environment(tmp_path / str(number), DISPATCHER_SELF_TEST="off" if number else "on")
        processes = [start(WORK, device, "gather", env=env) for _ in range(8)]
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert (process.returncode, out.strip(), err) == (0, device, "")
    tested = [file for file in (tmp_path / "0" / "kernel-dispatcher" / "selftest").iterdir()]
    assert len([file for file in tested if len(file.name) == 64]) == 2  # the listing, and the device, once


def test_asking_for_help_is_quick() -> None:
    def seconds(*command: str) -> float:
        times = []
        for _ in range(3):
            before = os.times()
            subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            after = os.times()
            times.append(after.children_user + after.children_system - before.children_user - before.children_system)
        return min(times)

    base = seconds("-c", "import numpy")
    assert seconds("-m", "dispatcher.cli", "--help") < base + 0.3
    assert seconds("-c", "import numpy, dispatcher; dispatcher.run, dispatcher.doctor") < base + 0.3


# ---- caches that are not as they should be -----------------------------------------------------------------
def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "a file in the way"
    blocked.touch()
    for found in backend_devices("opencl"):
        if found.available:  # PoCL, left alone, would list no device here
            code, out, err = work(found.id, blocked, DISPATCHER_SELF_TEST="off")
            assert (code, out.strip()) == (0, found.id)
            assert not err or (err.startswith(f"{blocked}/") and err.count("\n") == 1 and "compiled anew" in err)


def test_cut_and_foreign_cache_entries_are_made_again(lasting_device: Device, tmp_path: Path) -> None:
    if lasting_device.kind == "reference":
        pytest.skip("the reference keeps nothing")
    assert work(lasting_device.id, tmp_path, DISPATCHER_SELF_TEST="off")[0] == 0
    files = [file for file in (tmp_path / "kernel-dispatcher").rglob("*") if file.is_file()]
    files = [file for file in files if len(file.name) == 64]
    if not files:
        pytest.skip("this runtime keeps compiled programs itself")
    for spoil in (cut, foreign):
        for file in files:
            spoil(file)
        assert work(lasting_device.id, tmp_path, DISPATCHER_SELF_TEST="off")[0] == 0
        assert all(file.read_bytes() != b"" for file in files)


def test_cut_files_in_pocl_s_cache_do_not_kill_the_process(tmp_path: Path) -> None:
    pocl = [found.id for found in backend_devices("opencl") if "PoCL" in found.name]
    if not pocl:
        pytest.skip("there is no PoCL here")
    env = {"DISPATCHER_SELF_TEST": "off"}
    assert work(pocl[0], tmp_path, **env)[0] == 0
    for suffix in ("so", "bc"):
        files = list((tmp_path / "pocl").rglob(f"*.{suffix}"))
        assert files
        for file in files:
            cut(file)
        assert work(pocl[0], tmp_path, **env) == (0, f"{pocl[0]}\n", "")


def cut(file: Path) -> None:
    """As after a full disk."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def foreign(file: Path) -> None:
    """An intact entry whose content another version wrote."""
    import hashlib

    content = b"\x7fELF of another kind"
    file.write_bytes(hashlib.sha256(content).digest() + content)


def test_a_kill_in_the_middle_of_a_write_leaves_no_entry(tmp_path: Path) -> None:
    code = """
import os, signal
from dispatcher.device.filecache import FileCache
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
FileCache("trial").put("key", b"x" * 100_000)
"""
    process = start(code, env=environment(tmp_path))
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    check = """
from dispatcher.device.filecache import FileCache
cache = FileCache("trial")
assert cache.get("key") is None
cache.put("key", b"whole")
assert cache.get("key") == b"whole"
"""
    process = start(check, env=environment(tmp_path))
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_killed_writers_and_readers_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = """
import itertools
from dispatcher.device.filecache import FileCache
cache = FileCache("trial")
print("ready", flush=True)
for number in itertools.count():
    cache.put("key", bytes([number % 256]) * 1_000_000)
"""
    writers = [start(code, env=environment(tmp_path)) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    cache = FileCache("trial")
    end, seen = time.monotonic() + 1.0, 0
    while time.monotonic() < end:
        data = cache.get("key")
        if data is not None:
            seen += 1
            assert len(data) == 1_000_000
            assert data == data[:1] * 1_000_000
    for writer in writers:
        writer.kill()
        writer.communicate()
    assert seen
    assert cache.get("key") is not None


# ---- forks -------------------------------------------------------------------------------------------------
FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, dispatcher
x = np.ones((2, 1, 2, 2, 2), np.float32)
compiled = dispatcher.compile("conv-transpose-3d-asym-input-sq-kernel", device=sys.argv[1], kernel=x[:1])
before = compiled(input=x)
child = os.fork()
if child == 0:
    try:
        np.testing.assert_array_equal(compiled(input=x), before)
        print("works on", compiled.device.id)
    except dispatcher.DeviceError as error:
        print(error)
    sys.exit(0)
_, status = os.waitpid(child, 0)
np.testing.assert_array_equal(compiled(input=x), before)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("request_", ["device", "auto"])
def test_a_forked_child_works_or_says_why_not(lasting_device: Device, request_: str) -> None:
    request_ = lasting_device.id if request_ == "device" else f"{lasting_device.id},numpy"
    process = start(FORK, request_, env=dict(os.environ))
    out, err = process.communicate(timeout=60)  # a hang is what this test is about
    assert (process.returncode, err) == (0, "")
    (line,) = out.splitlines()
    if request_.endswith("numpy"):
        assert line == "works on numpy"
    else:
        assert line.startswith(f"device {request_}: this process was forked")
        assert "use the multiprocessing method 'spawn'" in line


def test_a_process_that_forks_first_uses_devices_in_its_children(device: str, tmp_path: Path) -> None:
    code = """
import multiprocessing, sys
import dispatcher, numpy as np
def job(number):
    x = np.full((1, 1, 2, 2, 2), number, np.float32)
    return dispatcher.run("conv-transpose-3d-asym-input-sq-kernel", device=sys.argv[1], input=x, kernel=x * 0 + 1)
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for number, result in enumerate(pool.map(job, range(4))):
            assert result[0, 0, 1, 1, 1] == 8 * number, result
"""
    process = start(code, device, env=dict(os.environ))
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


FORKED = """
import os, sys, warnings
import numpy as np, dispatcher
x = np.ones((2, 1, 2, 2, 2), np.float32)
conv, request = "conv-transpose-3d-asym-input-sq-kernel", sys.argv[1]
compiled = dispatcher.compile(conv, device=request, kernel=x[:1])
compiled(input=x)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
for call in (
    lambda: dispatcher.run(conv, device=request, input=x, kernel=x[:1]),
    lambda: compiled(input=x),
    lambda: dispatcher.compile(conv, device=request, case="sample"),
    lambda: dispatcher.compile(conv, device=request).device,
    lambda: dispatcher.explain(conv, device=request, case="sample"),
    lambda: dispatcher.verify([conv], device=request, case="sample"),
    lambda: dispatcher.verify([conv], device="all", case="sample"),
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {each.category for each in caught} == {dispatcher.FallbackWarning}, caught
    assert any("this process was forked" in str(each.message) for each in caught)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_no_call_in_a_forked_child_falls_back_silently(device: str) -> None:
    for request_ in ("auto", f"{device},numpy"):
        process = start(FORKED, request_, env=dict(os.environ))
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


# ---- threads -----------------------------------------------------------------------------------------------
def calls(problems: list[str], seeds: range) -> list[tuple[str, dict[str, Any]]]:
    result = []
    for problem in problems:
        loaded = load_problem(problem)
        operator = bind_arguments(loaded, sort_arguments(loaded, {}), case="sample")
        result += [(problem, random_tensors(operator, seed)) for seed in seeds]
    return result


@pytest.mark.parametrize("problems", [[LAYERNORM], [CONV, LAYERNORM, SUM, SOFTMAX, MAXMAX]], ids=["one", "many"])
def test_eight_threads_give_equal_bits(backend_device: Device, problems: list[str]) -> None:
    compiled = {name: dispatcher.compile(name, device=backend_device.id, case="sample") for name in problems}
    jobs = calls(problems, range(4))
    expected = [compiled[name](**tensors) for name, tensors in jobs]

    def run(number: int) -> list[np.ndarray]:
        order = [(place + number) % len(jobs) for place in range(len(jobs))]
        results = {place: compiled[jobs[place][0]](**jobs[place][1]) for place in order}
        return [results[place] for place in range(len(jobs))]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(run, range(16)):
            for result, wanted in zip(results, expected, strict=True):
                assert result.tobytes() == wanted.tobytes()


# ---- a clean end -------------------------------------------------------------------------------------------
QUIET = """
import sys, threading, warnings
warnings.simplefilter("default")
import numpy as np, dispatcher
for dtype in ("float32", "float16"):
    x, w = np.ones((2, 2, 3, 3, 3), dtype), np.ones((2, 2, 3, 3, 3), dtype)
    compiled = dispatcher.compile("conv-transpose-3d-asym-input-sq-kernel", device=sys.argv[1], stride=2)
    for _ in range(3):
        kept = compiled(input=x, kernel=w)
    thread = threading.Thread(target=compiled, kwargs={"input": x, "kernel": w})
    thread.start()
    thread.join()
"""


def test_a_process_ends_cleanly_and_silently(lasting_device: Device, tmp_path: Path) -> None:
    for _ in range(2):  # with an empty cache, and with a full one
        process = subprocess.run(
            [sys.executable, "-X", "dev", "-c", QUIET, lasting_device.id],
            capture_output=True, text=True, cwd=ROOT, env=environment(tmp_path), timeout=200, check=False,
        )  # fmt: skip
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
