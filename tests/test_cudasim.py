"""The CUDA simulator tested by itself: PyCUDA runs on it, correct kernels pass, planted bugs are caught."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.cudasim import Activation, RealDriverError, activate, emulate, requested
from tests.cudasim.cache import SOURCES, cached_folder
from tests.cudasim.compiler import compile_file, module_table, rewrite

REPOSITORY = SOURCES.parents[1]
KERNELS = SOURCES / "kernels"

Array = npt.NDArray[Any]
Compile = Callable[..., bytes]


@pytest.fixture(scope="module")
def simulator() -> Activation:
    if not requested():
        pytest.skip("the CUDA simulator is not asked for: set DISPATCHER_CUDA_SIM=1")
    try:
        return activate()
    except RealDriverError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cuda(simulator: Activation) -> ModuleType:
    driver: ModuleType = pytest.importorskip("pycuda.driver", reason="PyCUDA is not installed")
    driver.init()
    return driver


@pytest.fixture
def context(cuda: ModuleType) -> Iterator[Any]:
    context = cuda.Device(0).retain_primary_context()
    context.push()
    yield context
    cuda.Context.pop()


@pytest.fixture(scope="module")
def compile_kernel(simulator: Activation, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles by the command line that the CUDA backend uses."""
    output = tmp_path_factory.mktemp("cubins") / "out.cubin"

    @functools.cache
    def compile_(source: Path, *defines: str, arch: str = "sm_80") -> bytes:
        command = [str(simulator.nvcc), "-cubin", f"-arch={arch}", "-std=c++17", "-I", str(KERNELS)]
        command += [f"-D{define}" for define in defines]
        command += ["-o", str(output), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return output.read_bytes()

    return compile_


@pytest.fixture
def load(cuda: ModuleType, context: Any, compile_kernel: Compile) -> Callable[..., Any]:
    """Loads one of the test kernel files by its stem."""
    return lambda stem, *defines: cuda.module_from_buffer(compile_kernel(KERNELS / f"{stem}.cu", *defines))


def random_matrix(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# ---- it loads only when asked, and never beside a real driver


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=merged, cwd=REPOSITORY, check=False
    )


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_does_not_load_unless_asked(value: str) -> None:
    code = "from tests import cudasim; cudasim.activate()"
    assert "loads only when DISPATCHER_CUDA_SIM=1" in run_python(code, DISPATCHER_CUDA_SIM=value).stderr


def test_library_itself_has_no_device_unless_asked(simulator: Activation) -> None:
    code = f"import ctypes; print(ctypes.CDLL({str(simulator.library)!r}).cuInit(0))"
    assert run_python(code, DISPATCHER_CUDA_SIM="").stdout.strip() == "100"  # CUDA_ERROR_NO_DEVICE
    assert run_python(code, DISPATCHER_CUDA_SIM="1").stdout.strip() == "0"


def test_refuses_to_load_beside_another_driver(simulator: Activation, tmp_path: Path) -> None:
    other = tmp_path / "libcuda.so.1"
    other.write_bytes(simulator.library.read_bytes())
    code = f"import ctypes; ctypes.CDLL({str(other)!r}); from tests import cudasim; cudasim.activate()"
    done = run_python(code)
    assert "does not load beside a real driver" in done.stderr and str(other) in done.stderr


def test_refuses_to_load_where_there_is_a_gpu(tmp_path: Path) -> None:
    code = f"from tests import cudasim; cudasim.DEVICE_FILES = [{str(tmp_path)!r}]; cudasim.activate()"
    done = run_python(code, DISPATCHER_CUDA_SIM="1")
    assert f"does not load beside a real driver: {tmp_path} exists" in done.stderr


def test_child_process_finds_the_simulator(cuda: ModuleType, simulator: Activation) -> None:
    code = "import pycuda.driver as cuda; cuda.init(); print(cuda.Device(1).name())"
    assert run_python(code, **simulator.child_environment()).stdout == "CUDA simulator 1 (sm_89)\n"


def test_folders_are_made_once_by_racing_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_CUDA_SIM_CACHE", str(tmp_path))

    def fill(folder: Path) -> None:
        time.sleep(0.05)
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=cached_folder, args=("kind", "name", fill)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (tmp_path / "kind").iterdir()] == ["name"]
    assert (tmp_path / "kind" / "name" / "file").read_text() == "whole"


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_CUDA_SIM_CACHE", str(tmp_path))

    def fill(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cached_folder("kind", "name", fill)
    assert not list((tmp_path / "kind").iterdir())


# ---- devices, contexts, memory, streams


def test_devices(cuda: ModuleType) -> None:
    assert cuda.Device.count() == 2
    with emulate(devices=3):
        assert cuda.Device.count() == 3
    device = cuda.Device(1)
    assert device.compute_capability() == (8, 9) and device.pci_bus_id() == "0000:02:00.0"
    assert device.total_memory() == 8 << 30
    assert device.get_attribute(cuda.device_attribute.MAX_THREADS_PER_BLOCK) == 1024
    with pytest.raises(cuda.LogicError, match="invalid device ordinal"):
        cuda.Device(2)


@pytest.mark.parametrize(
    ("arch", "optin"),
    [
        ("7.5", 65536),
        ("8.0", 166912),
        ("8.6", 101376),
        ("8.9", 101376),
        ("9.0", 232448),
        ("10.0", 232448),
        ("12.0", 101376),
    ],
)
def test_emulated_architectures(cuda: ModuleType, arch: str, optin: int) -> None:
    with emulate(arch=arch):
        device = cuda.Device(0)
        assert device.compute_capability() == tuple(int(part) for part in arch.split("."))
        assert device.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) == optin


def test_one_architecture_per_device(cuda: ModuleType) -> None:
    with emulate(arch="7.5,9.0"):
        assert [cuda.Device(i).compute_capability() for i in range(2)] == [(7, 5), (9, 0)]


def test_no_device(cuda: ModuleType, simulator: Activation) -> None:
    environment = {**simulator.child_environment(), "DISPATCHER_CUDA_SIM_DEVICES": "0"}
    assert "no CUDA-capable device" in run_python("import pycuda.driver as c; c.init()", **environment).stderr


def test_primary_contexts_of_two_devices(cuda: ModuleType) -> None:
    contexts = [cuda.Device(i).retain_primary_context() for i in range(2)]
    for index, context in enumerate(contexts):
        context.push()
        assert cuda.Context.get_device() == cuda.Device(index)
        free_before = cuda.mem_get_info()[0]
        memory = cuda.mem_alloc(1 << 20)
        assert cuda.mem_get_info()[0] == free_before - (1 << 20)
        memory.free()
        cuda.Context.synchronize()
        cuda.Context.pop()
    with pytest.raises(cuda.Error, match=r"invalid device context|no currently active context"):
        cuda.mem_alloc(4)
    again = cuda.Device(0).retain_primary_context()
    again.push()
    cuda.Context.pop()


def test_own_context(cuda: ModuleType) -> None:
    context = cuda.Device(1).make_context()
    assert cuda.Context.get_device() == cuda.Device(1)
    context.pop()
    context.detach()


def test_memory(cuda: ModuleType, context: Any) -> None:
    free_before, total = cuda.mem_get_info()
    x = random_matrix(1000)
    first, second = cuda.mem_alloc(x.nbytes), cuda.mem_alloc(x.nbytes)
    out = np.zeros_like(x)
    cuda.memcpy_dtoh(out, first)
    assert np.isnan(out).all()  # fresh memory is poisoned
    cuda.memcpy_htod(first, x)
    cuda.memcpy_dtod(second, first, x.nbytes)
    cuda.memset_d32(first, 0x3F800000, x.size)
    cuda.memcpy_dtoh(out, second)
    np.testing.assert_array_equal(out, x)
    cuda.memcpy_dtoh(out, first)
    assert (out == 1).all()
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        cuda.memcpy_htod(first, np.zeros(1001, np.float32))
    first.free()
    second.free()
    assert cuda.mem_get_info() == (free_before, total)


def test_out_of_memory(cuda: ModuleType, context: Any) -> None:
    with emulate(memory_mb=16):
        half = cuda.mem_alloc(8 << 20)
        with pytest.raises(cuda.MemoryError, match="out of memory"):
            cuda.mem_alloc((8 << 20) + 1)
        assert cuda.mem_get_info()[1] == 16 << 20
        half.free()
        cuda.mem_alloc(16 << 20).free()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_large_allocation_takes_memory_only_where_it_is_written(cuda: ModuleType, context: Any) -> None:
    size, x = 1 << 40, random_matrix(1000)
    with emulate(memory_mb=1 << 21):
        before = resident_bytes()
        memory = cuda.mem_alloc(size)
        out = np.zeros_like(x)
        for at in (0, size // 2 + 4, size - x.nbytes):
            cuda.memcpy_dtoh(out, int(memory) + at)
            assert np.isnan(out).all()
            cuda.memcpy_htod(int(memory) + at, x)
            cuda.memcpy_dtoh(out, int(memory) + at)
            np.testing.assert_array_equal(out, x)
        assert resident_bytes() - before < 256 << 20
        with pytest.raises(cuda.LogicError, match="invalid argument"):
            cuda.memcpy_htod(int(memory) + size - x.nbytes + 4, x)
        memory.free()


@pytest.mark.parametrize("index", [-(1 << 31), (1 << 31) - 1])
def test_an_access_far_outside_a_large_allocation(cuda: ModuleType, load: Callable[..., Any], index: int) -> None:
    """What lies within the reach of a 32-bit offset belongs to nobody else."""
    others = [cuda.mem_alloc(100 << 20) for _ in range(3)]
    with pytest.raises(cuda.Error, match=r"\d{10,} bytes (before|past the end of) an allocation"):
        load("faulty").get_function("write_at")(others[1], np.int32(index), block=(1, 1, 1))
    for other in others:
        other.free()


def test_poison(cuda: ModuleType, context: Any) -> None:
    out = np.zeros(1000, np.uint8)
    for size in (out.nbytes, 100 << 20):
        with emulate(poison=0x4F):
            memory = cuda.mem_alloc(size)
        cuda.memcpy_dtoh(out, memory)
        assert (out == 0x4F).all()
        memory.free()


@pytest.mark.parametrize("schedule", ["forward", "reverse"])
@pytest.mark.parametrize("chosen", [slice(None), slice(3), slice(-2, None), slice(2, -1), slice(4, 4), slice(-9, 9)])
def test_some_blocks(cuda: ModuleType, load: Callable[..., Any], chosen: slice, schedule: Any) -> None:
    blocks, n = 6, 32
    x, sums = np.ones((blocks, n), np.float32), np.zeros(blocks, np.float32)
    with emulate(blocks=chosen, schedule=schedule):
        load("correct").get_function("sum_rows")(
            np.int8(0), cuda.In(x), np.int16(0), np.float64(1), cuda.InOut(sums), np.int32(n),
            grid=(blocks, 1, 1), block=(n, 1, 1), shared=128,
        )  # fmt: skip
    wanted = np.zeros(blocks)
    wanted[chosen] = n
    np.testing.assert_array_equal(sums, wanted)


def test_processors(cuda: ModuleType) -> None:
    count = cuda.device_attribute.MULTIPROCESSOR_COUNT
    with emulate(processors=132):
        assert cuda.Device(0).get_attribute(count) == 132
    assert cuda.Device(0).get_attribute(count) == 4


def test_streams_and_events(cuda: ModuleType, context: Any) -> None:
    x = cuda.pagelocked_empty(1000, np.float32)
    x[:] = random_matrix(1000)
    out = cuda.pagelocked_empty(1000, np.float32)
    stream, start, end = cuda.Stream(), cuda.Event(), cuda.Event()
    memory = cuda.mem_alloc(x.nbytes)
    start.record(stream)
    cuda.memcpy_htod_async(memory, x, stream)
    cuda.memcpy_dtoh_async(out, memory, stream)
    end.record(stream)
    stream.wait_for_event(end)
    stream.synchronize()
    end.synchronize()
    np.testing.assert_array_equal(out, x)
    assert end.time_since(start) > 0 and end.query() and stream.is_done()


def test_cuda_array_interface(cuda: ModuleType, context: Any, load: Callable[..., Any]) -> None:
    gpuarray = pytest.importorskip("pycuda.gpuarray")
    a, b = random_matrix(16, 16), random_matrix(16, 16)

    class Borrowed:
        """Any object that carries the interface, as other libraries' arrays do."""

        def __init__(self, values: Array) -> None:
            self.memory = cuda.to_device(values)
            self.__cuda_array_interface__ = {
                "shape": values.shape,
                "typestr": values.dtype.str,
                "data": (int(self.memory), False),
                "version": 3,
            }

    out = gpuarray.empty((16, 16), np.float32)
    assert out.__cuda_array_interface__["data"][0] == int(out.gpudata)
    function = load("correct").get_function("matmul_16")
    function(Borrowed(a), gpuarray.to_gpu(b), out, *map(np.int32, (16, 16, 16)), block=(16, 16, 1))
    np.testing.assert_allclose(out.get(), a @ b, rtol=1e-5, atol=1e-5)


def test_unsupported_calls_say_so(cuda: ModuleType, context: Any) -> None:
    with pytest.raises(cuda.Error, match="not supported"):
        cuda.mem_alloc_pitch(64, 64, 4)


# ---- correct kernels

MODES = [
    pytest.param({"schedule": schedule, "async_copy": copies, "threads": threads}, id=f"{schedule}-{copies}-{threads}")
    for schedule in ("forward", "reverse")
    for copies in ("late", "eager")
    for threads in (1, 3)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [8, 16])
def test_matmul(cuda: ModuleType, load: Callable[..., Any], tile: int, mode: dict[str, Any]) -> None:
    m, n, k = 70, 53, 91
    a, b, c = random_matrix(m, k), random_matrix(k, n), np.empty((m, n), np.float32)
    with emulate(**mode):
        load("correct").get_function(f"matmul_{tile}")(
            cuda.In(a),
            cuda.In(b),
            cuda.Out(c),
            *map(np.int32, (m, n, k)),
            block=(tile, tile, 1),
            grid=(-(-n // tile), -(-m // tile)),
        )
    np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [32, 96, 256, 1024])
def test_reduction_with_device_variables(cuda: ModuleType, load: Callable[..., Any], block: int) -> None:
    x, sums, finished = random_matrix(7, 1111), np.empty(7, np.float32), np.empty(1, np.int32)
    module = load("correct")
    counter, counter_bytes = module.get_global("finished_rows")
    scale, scale_bytes = module.get_global("row_scale")
    assert (counter_bytes, scale_bytes) == (4, 16)
    cuda.memset_d32(counter, 0, 1)
    cuda.memcpy_htod(scale, np.array([1, 2, 9, 4], np.float32))
    function = module.get_function("sum_rows")
    function.prepare("bPhdPi")
    source, out = cuda.to_device(x), cuda.mem_alloc(sums.nbytes)
    function.prepared_call((7, 1), (block, 1, 1), 2, source, 5, 0.5, out, 1111, shared_size=128)
    cuda.memcpy_dtoh(sums, out)
    cuda.memcpy_dtoh(finished, counter)
    np.testing.assert_allclose(sums, x.sum(1) * 0.5 * 9 + 5, rtol=1e-4, atol=1e-4)
    assert finished[0] == 7


def test_votes(cuda: ModuleType, load: Callable[..., Any]) -> None:
    out = np.zeros(6, np.uint32)
    load("correct").get_function("votes")(cuda.Out(out), block=(64, 1, 1))
    assert list(out) == [sum(1 << lane for lane in range(0, 32, 3)), 1, 0, 1, 1, 32]


@pytest.mark.parametrize("threads", [1, 4])
def test_atomics(cuda: ModuleType, load: Callable[..., Any], threads: int) -> None:
    counter, total, largest = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    with emulate(threads=threads):
        load("correct").get_function("count_threads")(
            cuda.InOut(counter), cuda.InOut(total), cuda.InOut(largest), block=(64, 1, 1), grid=(50, 3)
        )
    assert (counter[0], total[0], largest[0]) == (64 * 150, 32 * 150, 64 * 50 - 1)


def run_gemm(cuda: ModuleType, module: Any, k: int = 40) -> tuple[Array, Array]:
    """The tensor-core product, and the exact one of the operands rounded to tf32."""
    m, n = 128, 96
    a, b, c = random_matrix(m, k), random_matrix(k, n), np.empty((m, n), np.float32)
    module.get_function("tensor_core_gemm")(
        cuda.In(a), cuda.In(b), cuda.Out(c), *map(np.int32, (m, n, k)), block=(128, 1, 1), grid=(n // 32, m // 64)
    )
    rounded = [
        ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).astype(float) for x in (a, b)
    ]
    return c, rounded[0] @ rounded[1]


@pytest.mark.parametrize("mode", MODES)
def test_tensor_core_gemm(cuda: ModuleType, load: Callable[..., Any], mode: dict[str, Any]) -> None:
    with emulate(**mode):
        c, exact = run_gemm(cuda, load("tensor_core_gemm"))
    np.testing.assert_allclose(c, exact, rtol=1e-5, atol=1e-5)


def test_truncating_accumulation_is_biased_and_less_accurate(cuda: ModuleType, load: Callable[..., Any]) -> None:
    errors = {}
    for mma in ("rn", "rz"):
        with emulate(mma=mma):
            c, exact = run_gemm(cuda, load("tensor_core_gemm"), k=1024)
        errors[mma] = c - exact
        shrinks = np.mean(np.sign(errors[mma]) == -np.sign(exact))
        assert shrinks > 0.8 if mma == "rz" else 0.4 < shrinks < 0.6
    rms = {mma: float(np.sqrt(np.mean(error**2))) for mma, error in errors.items()}
    assert 2 * rms["rn"] < rms["rz"] < 1e-3


# ---- planted bugs


@pytest.mark.parametrize("index", [1024, 1023 + 2048, -1, -1000])
def test_out_of_bounds_write(cuda: ModuleType, load: Callable[..., Any], index: int) -> None:
    function, x = load("faulty").get_function("write_at"), cuda.mem_alloc(4096)
    function(x, np.int32(1023), block=(1, 1, 1))
    with pytest.raises(cuda.Error, match=r"illegal memory access.*allocation of 4096 bytes"):
        function(x, np.int32(index), block=(1, 1, 1))
    function(x, np.int32(0), block=(1, 1, 1))  # the process and its context go on


def test_out_of_bounds_write_of_one_element_past_an_odd_size(cuda: ModuleType, load: Callable[..., Any]) -> None:
    with pytest.raises(cuda.Error, match="a write 0 bytes past the end of an allocation of 4 bytes"):
        load("faulty").get_function("write_at")(cuda.mem_alloc(4), np.int32(1), block=(1, 1, 1))


def test_out_of_bounds_read(cuda: ModuleType, load: Callable[..., Any]) -> None:
    function, y = load("faulty").get_function("read_at"), cuda.mem_alloc(4)
    with pytest.raises(cuda.Error, match="illegal memory access"):
        function(cuda.mem_alloc(4096), y, np.int32(1024), block=(1, 1, 1))
    with emulate(alignment=16), pytest.raises(cuda.Error, match="0 bytes past"):
        function(cuda.mem_alloc(400), y, np.int32(100), block=(1, 1, 1))
    near = cuda.to_device(np.zeros(3, np.float32))  # within the padding of its own allocation: reads NaN
    function(near, y, np.int32(3), block=(1, 1, 1))
    out = np.zeros(1, np.float32)
    cuda.memcpy_dtoh(out, y)
    assert np.isnan(out[0])


def test_use_after_free(cuda: ModuleType, load: Callable[..., Any]) -> None:
    memory = cuda.mem_alloc(64)
    address = np.uintp(int(memory))
    memory.free()
    with pytest.raises(cuda.Error, match="illegal memory access"):
        load("faulty").get_function("write_at")(address, np.int32(0), block=(1, 1, 1))


def test_memory_of_another_device(cuda: ModuleType, load: Callable[..., Any]) -> None:
    other = cuda.Device(1).retain_primary_context()
    other.push()
    memory = cuda.mem_alloc(64)
    cuda.Context.pop()
    with pytest.raises(cuda.Error, match="on another device"):
        load("faulty").get_function("write_at")(memory, np.int32(0), block=(1, 1, 1))


@pytest.mark.parametrize(("schedule", "step"), [("forward", 1), ("reverse", 63)])
def test_removed_barrier(cuda: ModuleType, load: Callable[..., Any], schedule: Any, step: int) -> None:
    out = np.zeros(64, np.float32)
    with emulate(schedule=schedule):
        load("faulty").get_function("neighbour_without_barrier")(cuda.Out(out), np.int32(step), block=(64, 1, 1))
    assert np.isnan(out).any()


@pytest.mark.parametrize(
    "bug", ["NO_COPY_WAIT", "NO_BARRIER_AFTER_LOAD", "NO_BARRIER_BEFORE_REUSE", "LOADS_INTO_STAGE_IN_USE"]
)
def test_broken_pipeline(cuda: ModuleType, load: Callable[..., Any], bug: str) -> None:
    module = load("tensor_core_gemm", f"BUG_{bug}")
    wrong = False
    for schedule in ("forward", "reverse"):
        for copies in ("late", "eager"):
            with emulate(schedule=schedule, async_copy=copies):
                c, exact = run_gemm(cuda, module)
            wrong = wrong or not np.allclose(c, exact, rtol=1e-5, atol=1e-5)
    assert wrong


@pytest.mark.parametrize("kernel", ["barrier_in_one_branch", "barrier_against_warp_sync", "shuffle_in_one_branch"])
def test_divergence(cuda: ModuleType, load: Callable[..., Any], kernel: str) -> None:
    with pytest.raises(cuda.Error, match=r"launch failure.*(divergent barrier|different warp functions)"):
        load("faulty").get_function(kernel)(cuda.mem_alloc(256), block=(64, 1, 1))


def test_misaligned_vector_access(cuda: ModuleType, load: Callable[..., Any]) -> None:
    function, x, y = load("faulty").get_function("vector_load_at"), cuda.mem_alloc(256), cuda.mem_alloc(4)
    function(x, y, np.int32(4), block=(1, 1, 1))
    with pytest.raises(cuda.Error, match=r"misaligned address.*faulty\.cu:\d+.*float4.*16-byte"):
        function(x, y, np.int32(1), block=(1, 1, 1))


def test_misaligned_async_copy(cuda: ModuleType, load: Callable[..., Any]) -> None:
    with pytest.raises(cuda.Error, match="misaligned address"):
        load("faulty").get_function("async_copy_from")(
            cuda.mem_alloc(64), cuda.mem_alloc(4), np.int32(1), block=(1, 1, 1)
        )


def test_static_shared_overrun(cuda: ModuleType, load: Callable[..., Any]) -> None:
    function, y = load("faulty").get_function("static_shared_at"), cuda.mem_alloc(4)
    function(y, np.int32(63), block=(1, 1, 1))
    with pytest.raises(
        cuda.Error, match=r"illegal memory access.*faulty\.cu:\d+: index 64 is out of bounds of 'float \[64\]'"
    ):
        function(y, np.int32(64), block=(1, 1, 1))


@pytest.mark.parametrize("index", [100, 128, 5000])
def test_dynamic_shared_overrun(cuda: ModuleType, load: Callable[..., Any], index: int) -> None:
    function, y = load("faulty").get_function("dynamic_shared_at"), cuda.mem_alloc(4)
    function(y, np.int32(99), block=(1, 1, 1), shared=400)
    with pytest.raises(cuda.Error, match="illegal memory access"):
        function(y, np.int32(index), block=(1, 1, 1), shared=400)


def test_unwritten_shared_memory_is_nan(cuda: ModuleType, load: Callable[..., Any]) -> None:
    out = np.zeros(64, np.float32)
    load("faulty").get_function("reads_unwritten_shared")(cuda.Out(out), block=(64, 1, 1), grid=(3, 1))
    assert list(np.flatnonzero(np.isnan(out))) == [0]


def test_other_faults(cuda: ModuleType, load: Callable[..., Any]) -> None:
    module, y = load("faulty"), cuda.mem_alloc(4)
    with pytest.raises(cuda.Error, match="assertion failed: n == 1"):
        module.get_function("asserts")(np.int32(2), block=(1, 1, 1))
    with pytest.raises(cuda.Error, match="launch failure"):
        module.get_function("divides")(y, np.int32(0), block=(1, 1, 1))
    with pytest.raises(cuda.Error, match="illegal memory access"):
        module.get_function("deep_recursion")(y, np.int32(1000), block=(1, 1, 1))


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        ({"block": (1025, 1, 1)}, "a block of 1025 x 1 x 1 threads"),
        ({"block": (32, 33, 1)}, "a block of 32 x 33 x 1 threads"),
        ({"block": (1, 1, 65)}, "a block of 1 x 1 x 65 threads"),
        ({"block": (1, 1, 1), "grid": (1, 65536)}, "a grid of 1 x 65536 x 1 blocks"),
        ({"block": (1, 1, 1), "shared": 49153}, "49153 bytes of dynamic shared memory"),
    ],
)
def test_launch_limits(cuda: ModuleType, load: Callable[..., Any], launch: dict[str, Any], reason: str) -> None:
    with pytest.raises(cuda.LogicError, match=reason):
        load("faulty").get_function("write_at")(cuda.mem_alloc(4), np.int32(0), **launch)


def test_large_dynamic_shared_memory_needs_opting_in(cuda: ModuleType, load: Callable[..., Any]) -> None:
    function, y = load("faulty").get_function("dynamic_shared_at"), cuda.mem_alloc(4)
    limit = cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert function.get_attribute(limit) == 49152
    function.set_attribute(limit, 101376)
    assert function.get_attribute(limit) == 101376
    function(y, np.int32(101376 // 4 - 1), block=(1, 1, 1), shared=101376)
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        function.set_attribute(limit, 101377)


def test_static_and_dynamic_shared_memory_count_together(
    cuda: ModuleType, context: Any, compile_kernel: Compile, tmp_path: Path
) -> None:
    source = tmp_path / "one_kernel.cu"
    source.write_text(
        'extern "C" __global__ void one(float *y) {\n'
        "    __shared__ float s[1000];\n"
        "    s[threadIdx.x] = 1; __syncthreads(); y[0] = s[0];\n"
        "}"
    )
    function = cuda.module_from_buffer(compile_kernel(source)).get_function("one")
    assert function.shared_size_bytes == 4000
    assert function.get_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES) == 49152 - 4000


def test_wrong_arguments(cuda: ModuleType, load: Callable[..., Any]) -> None:
    with pytest.raises(cuda.LogicError, match="the argument buffer has 8 bytes, the kernel's parameters 12"):
        load("faulty").get_function("write_at")(cuda.mem_alloc(4), block=(1, 1, 1))
    with pytest.raises(cuda.LogicError, match="named symbol not found"):
        load("faulty").get_function("no_such_kernel")


def test_module_of_another_context(cuda: ModuleType, load: Callable[..., Any]) -> None:
    function = load("correct").get_function("votes")
    other = cuda.Device(1).retain_primary_context()
    other.push()
    with pytest.raises(cuda.Error, match="its module belongs to another context"):
        function(cuda.mem_alloc(64), block=(64, 1, 1))
    cuda.Context.pop()


# ---- the compiler stand-in


@pytest.mark.parametrize(
    ("built_for", "device", "runs"),
    [
        ("sm_80", "8.9", True),
        ("sm_89", "8.6", False),
        ("sm_80", "9.0", False),
        ("sm_90a", "9.0", True),
        ("sm_120", "12.0", True),
    ],
)
def test_architectures_must_match(
    cuda: ModuleType, context: Any, compile_kernel: Compile, built_for: str, device: str, runs: bool
) -> None:
    cubin = compile_kernel(KERNELS / "correct.cu", arch=built_for)
    with emulate(arch=device):
        if runs:
            cuda.module_from_buffer(cubin)
        else:
            with pytest.raises(cuda.Error, match=r"no kernel image.*compiled for sm_"):
                cuda.module_from_buffer(cubin)


def test_tensor_cores_and_async_copies_need_sm_80(cuda: ModuleType, context: Any, compile_kernel: Compile) -> None:
    cubins = [compile_kernel(KERNELS / f"{stem}.cu", arch="sm_75") for stem in ("faulty", "tensor_core_gemm")]
    with emulate(arch="7.5"):
        faulty, gemm = map(cuda.module_from_buffer, cubins)
        x, y = cuda.mem_alloc(64), cuda.mem_alloc(4)
        with pytest.raises(cuda.Error, match=r"launch failure.*needs sm_80; compiled for sm_75"):
            faulty.get_function("async_copy_from")(x, y, np.int32(0), block=(1, 1, 1))
        with pytest.raises(cuda.Error, match=r"launch failure.*needs sm_80; compiled for sm_75"):
            run_gemm(cuda, gemm)


def test_errors_name_the_users_file_and_line(compile_kernel: Compile, tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('\n#line 7 "original.cu"\nextern "C" __global__ void k(float *x) { undeclared(x); }\n')
    with pytest.raises(RuntimeError, match=r"original\.cu:7.*undeclared"):
        compile_kernel(source)


def test_command_line(simulator: Activation, tmp_path: Path) -> None:
    version = subprocess.run([simulator.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    assert "release 13.0" in version
    listed = subprocess.run([simulator.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    assert listed.split()[:2] == ["sm_75", "sm_80"]
    output = tmp_path / "out.cubin"
    options = ["-cubin", "-arch=sm_80", "-std=c++17", "-Xptxas", "-v", "-lineinfo", "-DA", "-D", "B=1", f"-I{KERNELS}"]
    subprocess.run([simulator.nvcc, *options, "-o", output, KERNELS / "correct.cu"], check=True)
    assert output.stat().st_size > 1000
    refused = subprocess.run(
        [simulator.nvcc, *options, "--use_fast_math", "-o", output, KERNELS / "correct.cu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2 and "--use_fast_math" in refused.stderr
    wrong = subprocess.run(
        [simulator.nvcc, "-cubin", "-arch=compute_80", "-o", output, KERNELS / "correct.cu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 1 and "sm_NN" in wrong.stderr


def test_compiled_modules_are_cached(simulator: Activation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_CUDA_SIM_CACHE", str(tmp_path / "cache"))
    for name in ("first.cu", "elsewhere/second.cu"):
        source = tmp_path / name
        source.parent.mkdir(exist_ok=True)
        source.write_text('extern "C" __global__ void k(float *x) { x[0] = 1; }')
        compile_file(source, architecture="80")
    assert len(list((tmp_path / "cache" / "modules").iterdir())) == 1


def test_rewriting() -> None:
    text, kernels = rewrite(
        'extern "C" __global__ void first(int n) {\n'
        "    extern __shared__ __attribute__((aligned(16))) unsigned char raw[]; }\n"
        "template <int N> __global__ void second() { __shared__ float s[N], t; }\n"
        '__global__\n# 3 "x.cu"\nvoid third();'
    )
    assert kernels == ["first", "third"]
    assert "unsigned char *raw = reinterpret_cast<unsigned char *>(cusim::dynamic_shared);" in text
    assert "static float s[N], t;" in text and "__global__" not in text
    assert "90, true" in module_table(kernels, "90a") and "&third" in module_table(kernels, "80")


def test_kernels_have_the_names_of_their_namespaces() -> None:
    kernel = "__global__ void {}() {{ if (1) {{}} }}"
    text = f"namespace a {{ {kernel.format('k')} namespace {{ {kernel.format('l')} }} }} {kernel.format('m')}"
    assert rewrite(text)[1] == ["a::k", "a::l", "m"]


def test_options_of_the_host_compiler_are_passed_on(simulator: Activation, tmp_path: Path) -> None:
    source, library = tmp_path / "host.cu", tmp_path / "host.so"
    source.write_text('extern "C" int answer() { return ANSWER; }')
    command = [simulator.nvcc, "-shared", "-arch=sm_80", "-Xcompiler", "-DANSWER=42", "-o", library, source]
    subprocess.run(command, check=True)
    assert ctypes.CDLL(str(library)).answer() == 42


def test_real_cubins_are_refused(cuda: ModuleType, context: Any) -> None:
    header = bytearray(64)
    header[:20] = b"\x7fELF\x02\x01\x01" + bytes(9) + (2).to_bytes(2, "little") + (190).to_bytes(2, "little")  # EM_CUDA
    with pytest.raises(cuda.Error, match="no kernel image"):
        cuda.module_from_buffer(bytes(header))
    with pytest.raises(cuda.Error, match="image is invalid"):
        cuda.module_from_buffer(b"// PTX text is not run" + bytes(64))
