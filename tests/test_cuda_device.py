"""The host side of the CUDA backend: probing, compiling, caching, memory, streams, threads and arrays that
stay put."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import hashlib
import importlib.util
import os
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dispatcher import run
from dispatcher.backends.cuda import BACKEND, driver, toolkit
from dispatcher.backends.cuda.driver import DeviceArray
from dispatcher.backends.numpy_ref import BACKEND as REFERENCE
from dispatcher.errors import BuildError, DeviceError, DeviceMemoryError, InputError, KernelError
from dispatcher.interface import Timings
from dispatcher.problem import dlpack
from dispatcher.problem.operator import Operator
from tests.cuda_support import OnDevice, check, compiled, device, machine, poisoned, simulator_only
from tests.cudasim.cache import cache_folder as simulator_cache
from tests.strategies import conv_operator, tensors_of

ROOT = Path(__file__).resolve().parents[1]
SMALL = conv_operator((2, 3, 3, 4, 8), 5, (3, 3, 3), stride=2, padding=1, bias=True)


def reference(op: Operator, tensors: dict[str, np.ndarray]) -> np.ndarray:
    result: np.ndarray = REFERENCE.compile(op, REFERENCE.probe()[0], {})(tensors)
    return result


def close(result: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


# ---- arrays on the device ----------------------------------------------------------------------------------
@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    device()
    return tensors_of(SMALL)


def test_arrays_are_used_in_place_and_the_result_stays(tensors: dict[str, np.ndarray]) -> None:
    run = compiled(SMALL)
    there = {name: OnDevice(array) for name, array in tensors.items()}
    result = run(there)
    assert isinstance(result, DeviceArray)
    interface = result.__cuda_array_interface__
    assert interface["shape"] == SMALL.output_shape and interface["typestr"] == "<f4" and interface["version"] == 3
    close(np.asarray(result), reference(SMALL, tensors))
    for name, array in there.items():
        np.testing.assert_array_equal(array.get(), tensors[name])
        array.free()


def test_a_result_feeds_the_next_call(tensors: dict[str, np.ndarray]) -> None:
    run = compiled(SMALL)
    x = OnDevice(tensors["x"])
    first = run({**tensors, "x": x})
    double = conv_operator(SMALL.output_shape, 5, (1, 1, 1))
    w = 2 * np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1, 1)
    second = compiled(double)({"x": first, "w": w})
    close(second.get(), 2 * reference(SMALL, tensors))
    x.free()


def test_a_result_that_is_bound_is_copied(tensors: dict[str, np.ndarray]) -> None:
    first = compiled(SMALL)({**tensors, "x": OnDevice(tensors["x"])})
    kept = first.copy()
    with kept._owner.active():
        kept._owner.driver.memset_d8(first._pointer, 0, first.nbytes)
    close(kept.get(), reference(SMALL, tensors))
    assert not first.get().any()


def _address(capsule: object) -> int:
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dltensor")


def test_a_result_as_dlpack(tensors: dict[str, np.ndarray]) -> None:
    result = compiled(SMALL)({**tensors, "x": OnDevice(tensors["x"])})
    assert result.__dlpack_device__() == (2, 0)
    capsule = result.__dlpack__()
    managed = dlpack.ManagedTensor.from_address(_address(capsule))
    tensor = managed.tensor
    assert tensor.data == result.__cuda_array_interface__["data"][0] and tensor.ndim == 5
    assert tuple(tensor.shape[:5]) == SMALL.output_shape and tensor.strides[4] == 1
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (2, 32, 1)
    kept = weakref.ref(result)
    del result
    gc.collect()
    assert kept() is not None  # the capsule holds it
    del capsule, managed, tensor
    gc.collect()
    assert kept() is None


class ByDlpack:
    """An array on the device that another library offers by DLPack alone."""

    def __init__(self, array: DeviceArray, kind: int = 2) -> None:
        self.array, self.kind, self.streams = array, kind, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 0)

    def __dlpack__(self, *, stream: int | None = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()


def test_an_argument_by_dlpack(tensors: dict[str, np.ndarray]) -> None:
    there = compiled(SMALL)({**tensors, "x": OnDevice(tensors["x"])})
    double = conv_operator(SMALL.output_shape, 5, (1, 1, 1)).problem
    w = 2 * np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1, 1)
    kept = weakref.ref(there)
    offered = ByDlpack(there)
    result = run(double, device="cuda", x=offered, w=w)
    assert isinstance(result, DeviceArray)
    close(result.get(), 2 * there.get())
    assert offered.streams == [1]
    del there, offered
    gc.collect()
    assert kept() is None  # it was given back


def test_a_dlpack_argument_of_another_type_is_refused(tensors: dict[str, np.ndarray]) -> None:
    there = compiled(SMALL)({**tensors, "x": OnDevice(tensors["x"])})
    kept = weakref.ref(there)

    class Integers(ByDlpack):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            capsule = super().__dlpack__(stream=stream)
            dlpack.ManagedTensor.from_address(_address(capsule)).tensor.dtype.code = 0
            return capsule

    with pytest.raises(InputError, match=r"tensor x has DLPack dtype .*\(0, 32, 1\); expected float16"):
        dlpack.take("x", Integers(there))
    del there
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("offset", [4, 8, 16])
def test_arrays_that_do_not_lie_on_a_round_address(tensors: dict[str, np.ndarray], offset: int) -> None:
    there = {name: OnDevice(array, offset=offset) for name, array in tensors.items()}
    target = OnDevice(poisoned(SMALL), offset=offset)
    assert compiled(SMALL)(there, target) is target
    close(target.get(), reference(SMALL, tensors))


def test_strided_arrays(tensors: dict[str, np.ndarray]) -> None:
    x = tensors["x"]
    swapped = np.ascontiguousarray(x.transpose(0, 2, 3, 4, 1))  # channels last in memory
    there = OnDevice(swapped)
    there.shape, there.strides = x.shape, swapped.transpose(0, 4, 1, 2, 3).strides
    close(compiled(SMALL)({**tensors, "x": there}).get(), reference(SMALL, tensors))


def test_elements_that_no_kernel_can_read_are_refused(tensors: dict[str, np.ndarray]) -> None:
    strides = (*tensors["x"].strides[:4], 6)
    for there in (OnDevice(tensors["x"], offset=2), OnDevice(tensors["x"], strides=strides)):
        with pytest.raises(InputError, match="x has elements at addresses that are no multiple of 4 bytes"):
            compiled(SMALL)({**tensors, "x": there})


def test_arrays_that_do_not_fit_are_named(tensors: dict[str, np.ndarray]) -> None:
    run = compiled(SMALL)
    with pytest.raises(InputError, match=r"x is .*expected float32 of"):
        run({**tensors, "x": OnDevice(tensors["x"][:1])})
    with pytest.raises(InputError, match=r"output is .*f8"):
        run(tensors, OnDevice(poisoned(SMALL).astype(np.float64)))


@simulator_only
def test_an_array_of_another_device_is_refused(tensors: dict[str, np.ndarray]) -> None:
    with machine(devices=2):
        other = OnDevice(tensors["x"], 1)
        with other.context.active():
            assert driver.device_of(other.address) == 1
        with pytest.raises(InputError, match="cuda:1"):
            compiled(SMALL)({**tensors, "x": other})
        other.free()


def test_streams(tensors: dict[str, np.ndarray]) -> None:
    context = driver.context(0)
    with context.active():
        stream = context.driver.Stream()
        run = compiled(SMALL, stream=int(stream.handle))
        close(run(tensors), reference(SMALL, tensors))
        there = OnDevice(tensors["x"])
        close(run({**tensors, "x": there}).get(), reference(SMALL, tensors))


# ---- weights -----------------------------------------------------------------------------------------------
def packs(run: object, tensors: dict[str, object]) -> bool:
    timings = Timings()
    run(tensors, None, timings)  # type: ignore[operator]
    assert timings.kernel_s > 0
    return "pack_weights" in [name for name, _ in timings.launches]


def test_weights_are_packed_when_their_bytes_change(tensors: dict[str, np.ndarray]) -> None:
    run = compiled(SMALL)
    assert packs(run, tensors)
    assert not packs(run, tensors)
    assert not packs(run, {**tensors, "w": tensors["w"].copy()})
    tensors["w"][0, 0, 0, 0, 0] += 1
    assert packs(run, tensors)
    close(run(tensors), reference(SMALL, tensors))
    tensors["w"][0, 0, 0, 0, 0] = np.nan
    assert packs(run, tensors) and not packs(run, tensors)
    there = OnDevice(tensors["w"])
    assert packs(run, {**tensors, "w": there}) and packs(run, {**tensors, "w": there})


# ---- threads, failures, memory -----------------------------------------------------------------------------
def test_threads_with_weights_of_their_own() -> None:
    device()
    run = compiled(SMALL)
    wrong: list[object] = []

    def work(number: int) -> None:
        tensors = tensors_of(SMALL)
        tensors["w"] = tensors["w"] + np.float32(number)
        wanted = reference(SMALL, tensors)
        for _ in range(5):
            result = run(tensors)
            if not np.allclose(result, wanted, rtol=1e-4, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_callers_context_is_left_alone(tensors: dict[str, np.ndarray]) -> None:
    context = driver.context(0)
    mine = context.driver.Device(0).make_context()
    try:
        compiled(SMALL)(tensors)
        assert context.driver.Context.get_current().handle == mine.handle
    finally:
        mine.pop()
        mine.detach()


def test_a_failed_launch_names_its_kernel(tensors: dict[str, np.ndarray]) -> None:
    run = compiled(SMALL)
    good = run._program.launches[0]
    run._program.launches[0] = dataclasses.replace(good, threads=2048)
    with pytest.raises(KernelError, match=good.name):
        run(tensors)
    run._program.launches[0] = good
    close(run(tensors), reference(SMALL, tensors))


@simulator_only
def test_life_after_too_much_memory(tensors: dict[str, np.ndarray]) -> None:
    large = conv_operator((1, 1, 2, 2, 2), 1, (1, 1, 1), stride=300)
    with machine(devices=1, memory_mb=64):
        left = []
        for _ in range(3):
            with pytest.raises(DeviceMemoryError, match=r"109\d+ bytes.* bytes are free"):
                compiled(large)(tensors_of(large))
            close(compiled(SMALL)(tensors), reference(SMALL, tensors))
            context = driver.context(0)
            with context.active():
                context.trim()
                left.append(context.driver.mem_get_info()[0])
        assert left[0] == left[1] == left[2]


def test_memory_is_reused(tensors: dict[str, np.ndarray]) -> None:
    run, context = compiled(SMALL), driver.context(0)
    run(tensors)
    with context.active():
        before = context.driver.mem_get_info()[0]
        for _ in range(5):
            run(tensors)
        assert context.driver.mem_get_info()[0] == before


def test_an_empty_batch() -> None:
    op = conv_operator((0, 2, 2, 2, 2), 3, (2, 2, 2))
    device()
    run = compiled(op)
    assert run(tensors_of(op)).shape == op.output_shape and not run.launches
    assert run({**tensors_of(op), "w": OnDevice(tensors_of(op)["w"])}).get().shape == op.output_shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, "option 'speed' is unknown"),
        ({"algorithm": "fast"}, "algorithm is 'fast'"),
        ({"algorithm": ["halo", "fma"]}, "algorithm is "),
        ({"prologue": "soon"}, "prologue is 'soon'"),
        ({"tile": (1, 2)}, "tile is"),
        ({"tile": "4,2,8"}, "tile is '4,2,8'"),
        ({"stream": "x"}, "stream is 'x'"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BACKEND.compile(SMALL, device(), options)


def test_a_tile_of_choice(tensors: dict[str, np.ndarray]) -> None:
    if device().facts["compute_capability"] >= "8.0":
        run = compiled(SMALL, tile=(2, 2, 16))
        assert "2x2x16" in str(run.launches[0].detail["tile"])
        close(run(tensors), reference(SMALL, tensors))
        with pytest.raises(InputError, match="tile is 5x5x5, which conv_transpose3d cannot have here"):
            compiled(SMALL, tile=(5, 5, 5))


# ---- the compiler and its cache ----------------------------------------------------------------------------
def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def counting_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that writes a line to a file for each compilation, with a cache of its own."""
    device()
    found = toolkit.find()
    assert isinstance(found, toolkit.Toolkit)
    log = tmp_path / "compilations"
    log.touch()
    body = f'case "$*" in *-cubin*) echo once >> {log};; esac\nexec {" ".join(found.command)} "$@"'
    monkeypatch.setenv("DISPATCHER_NVCC", str(script(tmp_path / "nvcc", body)))
    monkeypatch.setenv("DISPATCHER_CUDA_SIM_CACHE", str(simulator_cache()))  # it need not be built again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = dict(driver._contexts)
    driver._contexts.clear()
    yield log
    driver._contexts.clear()
    driver._contexts.update(before)


def test_settings_of_the_compiler_count(
    counting_nvcc: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compilations() -> int:
        driver._contexts.clear()
        before = len(counting_nvcc.read_text().split())
        close(compiled(SMALL)(tensors), reference(SMALL, tensors))
        return len(counting_nvcc.read_text().split()) - before

    assert compilations() == 2
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert compilations() == 2
    assert compilations() == 0
    for unsafe in ("--use_fast_math", "-ftz=true", "-prec-div=false"):
        monkeypatch.setenv("NVCC_PREPEND_FLAGS", f"-O3 {unsafe}")
        found = toolkit.find()
        assert isinstance(found, str)
        assert f"NVCC_PREPEND_FLAGS is '-O3 {unsafe}'" in found
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ftz=false -prec-div=true")
    assert isinstance(toolkit.find(), toolkit.Toolkit)


def test_a_compiler_that_was_slow_to_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_NVCC", str(script(tmp_path / "nvcc", "exec sleep 9")))
    monkeypatch.setattr(toolkit, "_PROBE_TIMEOUT_S", 0.1)
    assert "did not work" in str(toolkit.find())
    script(tmp_path / "nvcc", "echo release 12.4,")
    monkeypatch.setattr(toolkit, "_PROBE_TIMEOUT_S", 30.0)
    assert isinstance(toolkit.find(), toolkit.Toolkit)


def test_cache(counting_nvcc: Path, tensors: dict[str, np.ndarray]) -> None:
    def compilations() -> int:
        driver._contexts.clear()  # forget the modules that are loaded
        before = len(counting_nvcc.read_text().split())
        close(compiled(SMALL)(tensors), reference(SMALL, tensors))
        return len(counting_nvcc.read_text().split()) - before

    assert compilations() == 2
    assert compilations() == 0
    folder = toolkit.CUBINS.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:100])  # cut short
    files[1].write_bytes(b"")
    assert compilations() == 2
    files[0].write_bytes(hashlib.sha256(b"junk").digest() + b"junk")  # whole, but no cubin
    assert compilations() == 1
    assert compilations() == 0


def test_a_cache_that_cannot_be_written(counting_nvcc: Path, tensors: dict[str, np.ndarray]) -> None:
    Path(os.environ["XDG_CACHE_HOME"]).write_text("a file where a folder should be")
    close(compiled(SMALL)(tensors), reference(SMALL, tensors))


def test_a_compiler_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting_nvcc: Path) -> None:
    fatal = "nvcc fatal   : Unsupported gpu architecture 'compute_1'"
    monkeypatch.setenv("DISPATCHER_NVCC", str(script(tmp_path / "refusing", f'echo "{fatal}" >&2; exit 1')))
    chosen = device()  # it answers no questions, so that only compiling shows it
    with pytest.raises(BuildError) as caught:
        BACKEND.compile(SMALL, chosen, {})
    text = str(caught.value)
    assert fatal in text and chosen.name in text and str(chosen.facts["compute_capability"]) in text
    assert "-cubin" in caught.value.log


# ---- probing -----------------------------------------------------------------------------------------------
def reason() -> str:
    """Why the first device is not available."""
    start = time.monotonic()
    found = BACKEND.probe()
    assert time.monotonic() - start < 5
    assert found and not found[0].available and found[0].reason
    return found[0].reason


def test_no_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert "PyCUDA is not installed; pip install" in reason()


def test_neither_driver_nor_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(driver, "_library", missing)
    assert reason().startswith("the NVIDIA driver library is missing (libcuda.so.1: no such file); install the")


def test_no_driver_library() -> None:
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("needs PyCUDA")
    program = (
        "import sys; from dispatcher.backends.cuda import BACKEND;"
        "assert not any('pycuda' in name for name in sys.modules);"
        "d = BACKEND.probe()[0]; print(d.available, d.reason)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    if done.stdout.startswith("True"):
        pytest.skip("this machine has the driver library")
    assert "NVIDIA driver" in done.stdout or "no CUDA device" in done.stdout


@simulator_only
def test_no_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with machine(devices=0):
        assert "CUDA_VISIBLE_DEVICES is '-1'" in reason()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert "CUDA_VISIBLE_DEVICES" not in reason()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = device()
    monkeypatch.setenv("DISPATCHER_NVCC", str(tmp_path / "nvcc"))
    assert "DISPATCHER_NVCC is" in reason()
    with pytest.raises(DeviceError, match="DISPATCHER_NVCC"):
        BACKEND.compile(SMALL, chosen, {})
    monkeypatch.delenv("DISPATCHER_NVCC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(toolkit, "from_pypi", list)
    assert "nvcc is not on PATH; run python -m dispatcher.backends.cuda.install" in reason()


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device()
    newer = script(tmp_path / "newer", "echo 'Cuda compilation tools, release 99.1, V99.1.0'")
    monkeypatch.setenv("DISPATCHER_NVCC", str(newer))
    assert "older than nvcc's 99.1" in reason()


def test_an_architecture_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device()
    other = script(tmp_path / "other", 'case "$1" in --version) echo release 1.0;; *) echo sm_10; echo sm_11;; esac')
    monkeypatch.setenv("DISPATCHER_NVCC", str(other))
    assert "it knows 1.0, 1.1" in reason()


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(DeviceError, match=r"cuda:7 does not exist; this machine has \d CUDA"):
        BACKEND.compile(SMALL, dataclasses.replace(device(), index=7), {})


def test_importing_loads_nothing() -> None:
    program = (
        "import sys, dispatcher, dispatcher.backends.cuda;"
        "print([m for m in sys.modules if m.startswith(('pycuda', 'tests'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exit_is_clean() -> None:
    """A program that ends with arrays and operators alive says nothing on its way out."""
    device()
    program = (
        "from tests.cuda_support import *; from tests.strategies import conv_operator, tensors_of;"
        "op = conv_operator((1, 1, 1, 1, 2), 1, (1, 1, 1));"
        "run = compiled(op, algorithm='fma'); t = tensors_of(op);"
        "kept = run({**t, 'x': OnDevice(t['x'])}); print(kept.get().shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "(1, 1, 1, 1, 2)"
    assert "PyCUDA" not in done.stderr


def test_float64_and_float16_arrays_on_the_device() -> None:
    for dtype in ("float16", "float64"):
        op = conv_operator((1, 2, 2, 2, 4), 3, (2, 2, 2), dtype=dtype)
        device()
        tensors = tensors_of(op)
        there = {name: OnDevice(array) for name, array in tensors.items()}
        result = compiled(op)(there)
        np.testing.assert_array_equal(result.get(), check(op, tensors))
