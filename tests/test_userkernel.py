"""Users' own OpenCL kernels: every verdict, what is refused, and nothing left behind."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, MAXMAX, FakeBackend

import dispatcher
from dispatcher import cli
from dispatcher.check import judging, kernelfile, kernelrun
from dispatcher.check.judging import Judgement, verify_kernel
from dispatcher.check.kernelfile import size_names
from dispatcher.check.kernelrun import OTHER_MARGIN
from dispatcher.device.selection import backend_devices
from dispatcher.errors import BuildError, DeviceError, DeviceMemoryError, InputError, KernelError
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.userkernel import UserKernel
from dispatcher.report import streams
from tests import cheats, children
from tests.strategies import REQUIRED
from tests.strategies import SCALED_PRODUCT as PROBLEM

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "your-kernel.md").read_text(encoding="utf-8")
SOURCE = re.findall(r"```c\n(.*?)```", GUIDE, re.DOTALL)[0]
PRODUCT = """
#ifndef READ
#define READ(p, i) (p)[i]
#define WRITE(p, i, value) (p)[i] = (value)
#endif
#ifdef DOUBLE
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
__kernel void solution(__global const T* input, __global const T* weights, __global const T* scale,
                       __global T* output, ulong n, ulong ic, ulong oc, ulong d, ulong h, ulong w, double factor)
{
    const ulong x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);
    const ulong voxels = d * h * w;
    if (x >= voxels || y >= oc || z >= n) return;
    ACCUMULATOR sum = 0;
    for (ulong c = 0; c < ic; ++c)
        sum += READ(input, (z * ic + c) * voxels + x) * READ(weights, c * oc + y);
    WRITE(output, (z * oc + y) * voxels + x, sum * READ(scale, y) * (ACCUMULATOR)factor);
}
"""
TYPES = {
    "float32": ("-DT=float", "-DACCUMULATOR=float"),
    "float64": ("-DT=double", "-DACCUMULATOR=double"),
    "float16": (
        "-DT=half", "-DACCUMULATOR=float", "-DREAD(p,i)=vload_half((i),(p))", "-DWRITE(p,i,v)=vstore_half((v),(i),(p))",
    ),
}  # fmt: skip

Write = Callable[..., Path]

#: Kernels that end in good order, right or wrong, need no process of their own: starting one takes most of the time.
quick = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(scope="module")
def device() -> str:
    """An OpenCL device, or a skip."""
    found = backend_devices("opencl")
    usable = [each for each in found if each.available]
    if not usable:
        (pytest.fail if "opencl" in REQUIRED else pytest.skip)(f"opencl: {found[0].reason}")
    return usable[0].id


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a kernel file, the guide's unless said otherwise, with texts replaced."""

    def write_file(*replaced: tuple[str, str], source: str = SOURCE, name: str = "mine.cl") -> Path:
        for old, new in replaced:
            assert old in source
            source = source.replace(old, new)
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children's functions are called here; what they report still goes through JSON."""
    monkeypatch.setattr(judging, "run_child", children.run_here)
    monkeypatch.setattr(kernelrun, "_dump_no_core", lambda: None)


def judge(path: Path, device: str, **options: Any) -> Judgement:
    """The verdict on a kernel for the plain convolution."""
    given = {
        "global_size": "output_elements", "timeout_s": 40.0, "repeats": 2, "warmup": 0, "inputs": "signed", **options
    }  # fmt: skip
    (judgement,) = verify_kernel(CONV, path, device=device, **given)
    return judgement


# ---- right kernels -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["sample", "odd"])
def test_the_guide_s_kernel_is_right_and_timed(write: Write, device: str, case: str) -> None:
    judgement = judge(write(), device, case=case, repeats=3, local_size=32, inputs=None)
    assert (judgement.outcome, judgement.reason, judgement.exit_code) == ("passed", "", 0)
    assert judgement.device.id == device
    assert len(judgement.times_s) == len(judgement.kernel_s) == 3
    assert judgement.median_s is not None
    assert 0 < judgement.median_s <= max(judgement.times_s)
    assert judgement.kernel.global_size is not None
    assert judgement.kernel.global_size[0] % 32 == 0
    assert judgement.kernel.global_size[0] - 32 < judgement.operator.output_shape[0] * 10**6
    assert [check.inputs for check in judgement.checks][:2] == ["signed", "graded"]
    for check in judgement.checks:
        assert check.comparison is not None
        assert check.comparison.max_error_over_bound < 1


@quick
@pytest.mark.parametrize("dtype", TYPES)
def test_every_dtype_and_every_kind_of_parameter(write: Write, device: str, dtype: str) -> None:
    (judgement,) = verify_kernel(
        PROBLEM, write(source=PRODUCT), device=device, dtype=dtype, build_options=TYPES[dtype], repeats=1,
        inputs="signed", global_size=["output_depth * output_height * output_width", "output_channels", 2],
        local_size="8, 1, 1",
    )  # fmt: skip
    assert (judgement.outcome, judgement.reason) == ("passed", "")
    assert judgement.kernel.global_size == (32, 7, 2)


@quick
def test_tensors_may_be_called_what_our_files_are(write: Write, device: str) -> None:
    problem = json.loads(json.dumps(PROBLEM).replace('"input"', '"result"').replace('"weights"', '"request"'))
    (judgement,) = verify_kernel(
        problem, write(source=PRODUCT), device=device, build_options=TYPES["float32"], repeats=1,
        global_size="30, 7, 2", inputs="signed,integers",
    )  # fmt: skip
    assert (judgement.outcome, judgement.reason) == ("passed", "")


@quick
def test_several_kinds_of_inputs(write: Write, device: str) -> None:
    # A kernel that treats NaN as zero is right on numbers alone.
    drops = write(("output[place] = sum", "output[place] = isnan(sum) ? 0.0f : sum"))
    judgement = judge(drops, device, inputs=["integers", "one_nan", "one_inf"])
    assert (judgement.outcome, judgement.exit_code) == ("wrong", 1)
    assert judgement.reason.startswith("on inputs 'one_nan': ")
    assert [(check.inputs, check.passed) for check in judgement.checks] == [
        ("integers", True), ("one_nan", False), ("one_inf", True),
    ]  # fmt: skip


def test_files_beside_the_kernel_and_in_folders_of_options_can_be_included(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "with space, and comma", tmp_path / "current, one"
    for each in (folder, here, here / "more"):
        each.mkdir()
    head, tail = SOURCE.split("{", 1)
    (folder / "head.h").write_text(head)
    (here / "head.h").write_text("#error this is not the header in the kernel's folder\n")
    (here / "more" / "tail.h").write_text("{" + tail)
    (folder / "mine.cl").write_text('#include "head.h"\n#include "tail.h"\n')
    monkeypatch.chdir(here)
    judgement = judge(folder / "mine.cl", device, build_options=["-I", "more"])
    assert (judgement.outcome, judgement.reason) == ("passed", "")


def test_folders_of_options_count_from_where_the_caller_is(tmp_path: Path) -> None:
    def seen(*options: str) -> tuple[str, ...]:
        return user_kernel("", build_options=options).seen_from("/a", tmp_path).build_options

    assert seen() == ()
    assert seen("-Ib", "-I", "../c", "-I d -DX", "-I/e", "-DY=-If", "-w") == (
        "-I/a/b", "-I", "/c", "-I /a/d -DX", "-I/e", "-DY=-If", "-w",
    )  # fmt: skip


@quick
@pytest.mark.parametrize("name", [b"\xff.cl", 'ü "x".cl'.encode(), b"a\x1b[31m.cl"])
def test_any_name_will_do_and_a_byte_order_mark_too(
    tmp_path: Path, device: str, name: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.write_bytes(b"\xef\xbb\xbf" + SOURCE.encode())
    words = ["verify", CONV, "--kernel", str(path), "--global-size", "output_elements", "--device", device]
    assert cli.main([*words, "--inputs", "signed"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert name.decode("utf-8", "backslashreplace").replace("\x1b", "\\x1b") in captured.out


@quick
def test_timing_stops_in_time(write: Write, device: str) -> None:
    judgement = judge(write(), device, repeats=10**9, timeout_s=5.0)
    assert judgement.passed
    assert len(judgement.times_s) > 10


@quick
def test_the_output_is_full_of_nan_before_every_launch(write: Write, device: str) -> None:
    kernel = write(("output[place] = sum;", "output[place] = isnan(output[place]) ? sum : 0.0f;"))
    assert judge(kernel, device, repeats=3, warmup=1).passed


# ---- wrong kernels -----------------------------------------------------------------------------------------
WRITTEN = "output[place] = sum;"
WRONG = {
    "value": ((WRITTEN, "output[place] = 1.001f * sum;"), "elements are wrong; the worst, at ("),
    "one element": ((WRITTEN, "output[place] = place == 77 ? 2.0f : sum;"), "1 of 20160 elements are wrong"),
    "unwritten tail": ((WRITTEN, "if (place < 20000) output[place] = sum;"), "160 are NaN where the reference is a n"),
    "added to what was there": ((WRITTEN, "output[place] += sum;"), "20160 are NaN"),
    "input": (
        (WRITTEN, "output[place] = sum; if (place == 0) ((__global float*)input)[3] = 0.5f;"),
        "the run changed the input tensor input",
    ),
    "behind": (
        (WRITTEN, "output[place] = sum; if (place == 0) output[20160] = output[20161] = 0.5f;"),
        "it wrote beside output: 8 bytes, the nearest 0 bytes behind the end of it",
    ),
    "in front": (
        (WRITTEN, "output[place] = sum; if (place == 0) ((__global float*)kernel_)[-2] = 0.5f;"),
        "it wrote beside kernel: 4 bytes, the nearest 4 bytes in front of it",
    ),
    "reads behind": ((WRITTEN, "output[place] = sum + 1e-9f * input[1680];"), "20160 are NaN"),
    "second launch": (
        (WRITTEN, "output[place] = isnan(input[-1]) ? sum : sum + 1.0f;"),
        "a repeated launch did something else than the first: 20160 of 20160",
    ),
    "beside, as it was": (
        (WRITTEN, "output[place] = sum; if (place == 0) ((__global uint*)output)[20161] = 0xffffffff;"),
        "a repeated launch did something else than the first: it wrote beside output: 4 bytes, the nearest 4 bytes",
    ),
}  # fmt: skip


@quick
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_wrong(write: Write, device: str, fault: str) -> None:
    change, reason = WRONG[fault]
    judgement = judge(write(change), device)
    assert (judgement.outcome, judgement.exit_code) == ("wrong", 1)
    assert reason in judgement.reason
    assert next(check.launch for check in judgement.checks if not check.passed) == (
        "repeated" if fault in ("second launch", "beside, as it was") else "first"
    )
    assert judgement.times_s == ()
    assert judgement.median_s is judgement.gflops is None


def test_a_crash_is_a_verdict(write: Write, device: str) -> None:
    judgement = judge(write((WRITTEN, "*(volatile __global float*)(place + 8) = sum;")), device)
    assert (judgement.outcome, judgement.exit_code) == ("crashed", 1)
    assert re.search(r"it crashed with SIG(SEGV|BUS|ABRT).*while running on inputs 'signed'", judgement.reason)


#: How a kernel on the CPU ends its process: Intel's compiler finds the C library's function, and PoCL's takes assembly.
LEAVES = {
    "a call of _exit": "{ void _exit(int status); _exit(0); }",
    "x86-64 assembly for Linux": '__asm__ volatile("syscall" : : "a"(231L), "D"(0L) : "rcx", "r11", "memory");',
}


def test_the_end_of_the_process_is_a_verdict(write: Write, device: str) -> None:
    refused = []
    for way, leave in LEAVES.items():
        if "assembly" in way and (platform.machine() != "x86_64" or not sys.platform.startswith("linux")):
            continue
        judgement = judge(write((WRITTEN, f"output[place] = sum; if (place == 9) {leave}")), device)
        if judgement.outcome != "build failed":
            assert (judgement.outcome, judgement.exit_code) == ("crashed", 1)
            assert judgement.reason == "the process ended before it was done, while running on inputs 'signed'"
            return
        refused.append(f"{way}: {judgement.reason}")
    pytest.skip(f"{device} has no way for a kernel to end its process: {'; '.join(refused)}")


HANGS = (WRITTEN, "volatile int on = 1; while (on) ; output[place] = sum;")


def test_a_hang_is_a_verdict_and_leaves_nothing(
    write: Write, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(judging.tempfile, "tempdir", str(scratch))
    start = time.monotonic()
    judgement = judge(write(HANGS), device, timeout_s=4.0)
    assert time.monotonic() - start < 30
    assert (judgement.outcome, judgement.exit_code) == ("timed out", 1)
    assert judgement.reason == "no end within 4 s, while running on inputs 'signed'"
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_command_that_is_ended_leaves_nothing(write: Write, device: str, tmp_path: Path, name: str) -> None:
    number, scratch = signal.Signals[name], tmp_path / "scratch"
    scratch.mkdir()
    words = ["verify", CONV, "--kernel", str(write(HANGS)), "--global-size", "output_elements", "--device", device]
    parent = subprocess.Popen(
        children.heeding(number, ["-m", "dispatcher.cli", *words, "--inputs", "signed", "--timeout", "50"]),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
    )
    assert children.soon(lambda: bool(list(scratch.glob("*/empty"))))
    time.sleep(0.5)  # it builds, or hangs
    parent.send_signal(number)
    assert parent.wait(10) == (streams.TERMINATED if name == "SIGTERM" else -number)
    assert children.soon(lambda: list(scratch.iterdir()) == [])
    assert parent.stderr is not None
    assert parent.stderr.read() == (b"error: terminated\n" if name == "SIGTERM" else b"")


@quick
def test_a_kernel_that_does_not_build_shows_the_compiler_s_log(write: Write, device: str) -> None:
    judgement = judge(write((WRITTEN, "output[place] = total;")), device)
    assert (judgement.outcome, judgement.exit_code) == ("build failed", 4)
    assert "total" in judgement.reason
    assert f"mine.cl:{SOURCE[: SOURCE.index(WRITTEN)].count(chr(10)) + 1}" in judgement.log
    assert judgement.checks == ()


def test_a_long_log_is_cut() -> None:
    log = "\n".join(f"line {number}" for number in range(100))
    assert judging.trimmed(log).splitlines()[-1] == "... and 70 more lines"
    assert judging.trimmed("one\ntwo") == "one\ntwo"


def test_what_a_kernel_prints_does_no_harm(write: Write, device: str) -> None:
    kernel = write((WRITTEN, 'output[place] = sum; if (place < 9) printf("{\\"stage\\": 1}\\n");'))
    assert judge(kernel, device, build_options=["-cl-std=CL1.2"]).passed


def test_no_room_on_the_device_is_a_verdict(device: str, tmp_path: Path) -> None:
    from dispatcher.backends.opencl import BACKEND

    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1 << 44,), (0,))
    kernel = user_kernel(SOURCE)
    loaded = BACKEND.load_kernel(kernel, next(each for each in BACKEND.probe() if each.id == device), tmp_path)
    with pytest.raises(DeviceMemoryError, match="input takes 70368744185856 bytes"):
        loaded.place("input", huge)


# ---- kernels that cheat ------------------------------------------------------------------------------------
@quick
@pytest.mark.parametrize("cheat", [None, *cheats.CHEATS])
def test_a_kernel_that_cheats_is_wrong(
    write: Write, device: str, cheat: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = cheats.judge(cheat, write(source=cheats.OPENCL), monkeypatch, device=device,
                             global_size=420, build_options=["-cl-std=CL2.0"])  # fmt: skip
    if "program scope variable" in judgement.reason:
        pytest.skip(f"{device} has no variables that outlive a launch")
    cheats.check(cheat, judgement)


# ---- what is refused ---------------------------------------------------------------------------------------
def user_kernel(text: str, **fields: Any) -> UserKernel:
    """A kernel for the plain convolution."""
    problem = load_problem(CONV)
    kinds: Any = {"size_t": "size", "double": "double"}
    parameters = tuple((p.name, kinds.get(p.type, "input" if p.const else "output")) for p in problem.parameters)
    given = {"global_size": (64,), **fields}
    return UserKernel("mine.cl", text, "/nowhere", "solution", parameters, "float32", **given)


def test_without_a_device_nothing_compiles_an_opencl_kernel(tmp_path: Path) -> None:
    from dispatcher.backends.opencl import BACKEND

    none = Device("opencl", 0, "no OpenCL device", "unknown", False, "no OpenCL platform")
    with pytest.raises(DeviceError, match=r"^OpenCL has no compiler but a device's own$"):
        BACKEND.check_kernel(user_kernel("kernel void solution() {}"), none, tmp_path)


SIGNATURES = {
    "name": (("void solution(", "void convolve("), "has no __kernel 'solution'; it has convolve"),
    "count": (("ulong groups", "ulong groups, ulong more"), "has 26 parameters; expected 25: solution(__global const"),
    "size": (("ulong depth, ulong", "uint depth, ulong"), "parameter 7 (depth) is uint; expected ulong, as in"),
    "double": (("ulong depth, ulong", "double depth, ulong"), "parameter 7 (depth) is double; expected ulong"),
    "pointer": (("const float* input", "const int* input"), "(input) is int*; expected __global const float*"),
    "number for a pointer": (("ulong groups)", "__global float* groups)"), "(groups) is float*; expected ulong"),
    "space": (("__global const float* kernel_", "__local const float* kernel_"), "parameter 2 (kernel)"),
}  # fmt: skip


@quick
@pytest.mark.parametrize("fault", SIGNATURES)
def test_another_parameter_list_is_refused(write: Write, device: str, fault: str) -> None:
    change, message = SIGNATURES[fault]
    changes = [change]
    if fault == "number for a pointer":
        changes += [("in_channels / groups", "in_channels"), ("out_channels / groups", "out_channels")]
    with pytest.raises(InputError) as caught:
        judge(write(*changes), device)
    assert message in str(caught.value)


@quick
def test_vectors_and_types_of_one_s_own_will_do(write: Write, device: str) -> None:
    kernel = write(
        ("__global const float* input", "__global const float4* vectors"),
        ("    const long OD", "    __global const float* input = (__global const float*)vectors;\n    const long OD"),
    )
    assert judge(kernel, device).passed


@quick
@pytest.mark.parametrize(
    ("declared", "sizes", "wanted"),
    [
        ("64, 1, 1", {"local_size": 64}, ""),
        ("64, 1, 1", {}, ""),
        ("8, 4, 1", {"global_size": "output_elements, 4", "local_size": "8, 4"}, ""),
        ("64, 1, 1", {"local_size": 32}, "local_size is (32,), and solution in"),
        ("64, 1, 1", {"local_size": 32}, "is declared with reqd_work_group_size(64, 1, 1); give local_size 64 (--l"),
        ("64, 1, 1", {"global_size": 20161}, "local_size is None, and solution in"),
        ("8, 4, 1", {}, "reqd_work_group_size(8, 4, 1); give local_size 8,4 (--local-size)"),
        ("64, 1, 1", {"global_size": "output_elements, 4", "local_size": "64, 4"}, "give local_size 64 (--local-size)"),
    ],
)
def test_the_size_of_a_group_is_the_one_that_a_kernel_declares(
    write: Write, device: str, declared: str, sizes: dict[str, Any], wanted: str
) -> None:
    kernel = write(("__kernel void", f"__kernel __attribute__((reqd_work_group_size({declared}))) void"))
    if not wanted:
        assert judge(kernel, device, **sizes).passed
        return
    with pytest.raises(InputError, match=re.escape(wanted)):
        judge(kernel, device, **sizes)


@quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_size": None}, "global_size is missing, which .cl files need"),
        ({"global_size": "output_elements, 1, 1, 1"}, "expected one to three sizes"),
        ({"global_size": "elements"}, "global_size 'elements': there is no size 'elements'; there are output_batch,"),
        ({"global_size": "output_elements / 11"}, "is not divisible by 11"),
        ({"global_size": 0}, "global_size 0 is 0; expected 1 or more"),
        ({"global_size": 1.5}, "global_size"),
        ({"global_size": [True]}, "expected numbers or expressions"),
        ({"local_size": "8, 8"}, "expected as many sizes in both"),
        ({"local_size": 1 << 20}, "local_size is (1048576,); this device takes"),
        ({"entry": "a b"}, "entry is 'a b'; expected the name of a function"),
        ({"build_options": "-DX"}, "build_options is '-DX'; expected a list"),
        ({"timeout_s": 0}, "timeout_s is 0; expected a number of seconds above 0 and up to 604800"),
        ({"timeout_s": 10**400}, "timeout_s is 1000"),
        ({"timeout_s": 10**5000}, "timeout_s is a int too long to print"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
        ({"repeats": 1.0}, "repeats is 1.0"),
        ({"entry": ""}, "entry is ''"),
        ({"entry": b"solution"}, "entry is b'solution'"),
        ({"build_options": None}, "build_options is None; expected a list of texts"),
        ({"build_options": 5}, "build_options is 5; expected a list of texts"),
        ({"build_options": [1]}, "build_options is [1]; expected a list of texts"),
        ({"build_options": ["-DX=\0"]}, "build option '-DX=\\x00' has a NUL"),
        ({"build_options": ["-DX=\udcff"]}, "or bytes that are no text here"),
        ({"inputs": 5}, "inputs is 5; expected a list of texts"),
        ({"inputs": [None]}, "inputs is [None]"),
        ({"global_size": b"a"}, "global_size is b'a'; expected numbers or expressions"),
        ({"input": np.zeros((2, 4, 5, 6, 7), np.float32)}, "tensor input cannot be given here"),
        ({"output": np.zeros(3, np.float32)}, "tensor output cannot be given here"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"repeats": 0}, "repeats is 0"),
        ({"inputs": ["odd"]}, "inputs is 'odd'; expected all, or some of signed"),
        ({"inputs": []}, "inputs is empty"),
        ({"batch_size": 0}, "the batch is empty"),
    ],
)
def test_a_wrong_argument_is_refused(write: Write, device: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        judge(write(), device, **options)
    assert message in str(caught.value)


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.cl"

    def refused(kernel: Any) -> str:
        with pytest.raises(InputError) as caught:
            judge(kernel, "opencl")
        return str(caught.value)

    assert "expected a file that ends in .cl or .cu" in refused(tmp_path / "mine.py")
    for value in (None, 5, b"mine.cl"):
        assert refused(value) == f"kernel is {value!r}; expected the path of a .cl or .cu file"
    assert "cannot be read: No such file" in refused(path)
    assert "cannot be read: no file can have this name: embedded null byte" in refused("go\0od.cl")
    for content, reason in (
        (b"\xff\xfe\x00", "it is not a text in UTF-8"),
        (b"a\n\nb\0c", "has a NUL in line 3, where compilers would stop reading"),
        (b" " * (kernelfile.LARGEST_FILE + 1), "has more than 16777216 bytes"),
    ):
        path.write_bytes(content)
        assert reason in refused(path)
    path.unlink()
    os.mkfifo(path)
    (tmp_path / "zero.cl").symlink_to("/dev/zero")
    (tmp_path / "folder.cl").mkdir()
    for each in (path, tmp_path / "zero.cl", tmp_path / "folder.cl"):
        assert refused(each).startswith(f"kernel '{each}' is not a regular file; expected one with")


@quick
def test_numbers_of_numpy_will_do(write: Write, device: str) -> None:
    judgement = judge(
        write(), device, global_size=np.int64(20160), local_size=(np.int32(16),), repeats=np.int64(3),
        warmup=np.uint8(0), timeout_s=np.float32(40), seed=np.int64(3), batch_size=np.int64(2),
        build_options=(option for option in ["-w"]),
    )  # fmt: skip
    assert (judgement.outcome, judgement.reason, len(judgement.times_s)) == ("passed", "", 3)
    assert (judgement.kernel.local_size, judgement.kernel.build_options) == ((16,), ("-w",))


def test_a_device_of_another_backend_is_refused(write: Write, device: str) -> None:
    with pytest.raises(DeviceError, match=r"numpy: it cannot run \.cl files; name a device of opencl"):
        judge(write(), "numpy")
    with pytest.raises(DeviceError, match="opencl:99"):
        judge(write(), "opencl:99")
    places = judging._places("opencl", f"numpy,{device}", "mine.cl")
    assert [(found.id, skipped) for found, skipped in places] == [(device, (("numpy", "it cannot run .cl files"),))]
    assert [found.id for found, _ in judging._places("opencl", "auto", "mine.cl")] == [device]


def test_a_backend_may_have_no_such_kernels(
    write: Write, install_backends: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backends(FakeBackend("opencl", unavailable="nothing here"))
    with pytest.raises(DeviceError, match="nothing here"):
        judge(write(), "all")


def test_doubles_need_double_precision(tmp_path: Path) -> None:
    pytest.importorskip("pyopencl")
    from dispatcher.backends.opencl.userkernel import load_kernel

    runtime: Any = types.SimpleNamespace(facts=types.SimpleNamespace(vec_double=0))
    device: Any = types.SimpleNamespace(id="opencl:7", name="Tiny")
    kernel = user_kernel(SOURCE)
    doubled = UserKernel("m.cl", "", "/", "f", (("factor", "double"),), "float32", (1,))
    with pytest.raises(DeviceError, match=r"opencl:7 \(Tiny\) has no double precision .* parameter factor, a double,"):
        load_kernel(runtime, doubled, device, tmp_path)
    with pytest.raises(DeviceError, match="which float64 needs"):
        load_kernel(runtime, UserKernel(**{**vars(kernel), "dtype": "float64"}), device, tmp_path)


def test_one_of_several_devices_may_not_be_able_to(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Device("opencl", index, f"Device {index}", "gpu") for index in range(2))
    monkeypatch.setattr(judging, "_places", lambda backend, device, file: [(one, ()), (two, ())])
    unable: Any = {"failure": {"kind": "DeviceError", "message": "no doubles", "log": ""}}
    broken: Any = {"failure": {"kind": "BuildError", "message": "refused", "log": ""}}

    def outcomes(*reports: Any) -> list[tuple[str, int]]:
        left = list(reports)
        monkeypatch.setattr(judging, "run_child", lambda *arguments: ended(0, "", left.pop(0)))
        found = verify_kernel(CONV, write(), device="all", global_size=1)
        return [(each.outcome, each.exit_code) for each in found]

    assert outcomes(unable, broken) == [("unsupported", 0), ("build failed", 4)]
    assert outcomes(broken, unable) == [("build failed", 4), ("unsupported", 0)]
    with pytest.raises(DeviceError, match="no doubles"):
        outcomes(unable, unable)


OUTPUT_SIZES = ("output_batch", "output_channels", "output_depth", "output_height", "output_width")


def test_the_names_of_sizes() -> None:
    problem = load_problem(MAXMAX)
    names = size_names(bind_arguments(problem, sort_arguments(problem, {}), case="sample"))
    assert [names[name] for name in OUTPUT_SIZES] == [2, 1, 2, 2, 3]
    assert names["output_elements"] == 24
    assert names["out_channels"] == 6


# ---- how a child's end becomes a verdict -------------------------------------------------------------------
def ended(code: int | None, signal: str, *reports: Any, printed: str = "") -> Any:
    from dispatcher.device.childprocess import Ended

    return Ended(code, signal, reports, printed)


def verdict(end: Any) -> dict[str, Any]:
    device: Any = types.SimpleNamespace(id="opencl:0", name="One")
    trial = judging._ChildRun(None, user_kernel(""), device, Path(), [], 0)  # type: ignore[arg-type]
    return trial.judge(end, 5.0, None)


def test_an_exit_is_a_crash() -> None:
    found = verdict(ended(3, "", {"stage": "building"}, {"stage": "running"}, printed="bye\n"))
    assert found == {"outcome": "crashed", "reason": "the process ended with exit code 3: bye, while running"}
    found = verdict(ended(-9, "SIGKILL", {"stage": "running"}))
    assert "which systems send when memory runs out" in found["reason"]


def test_what_happens_before_the_kernel_is_not_its_fault() -> None:
    for end in (*(ended(None, ""), ended(0, "")), ended(-11, "SIGSEGV", {"stage": "opening the device"})):
        with pytest.raises(DeviceError, match="could not be opened"):
            verdict(end)


class Flaky:
    """A kernel that counts: for its launch number ``n``, from 1 on, ``results[n]`` where there is one, else zeros."""

    def __init__(self, results: dict[int, list[float]]) -> None:
        self.results, self.launches, self.margin, self.poisoned = results, 0, 0, False

    def place(self, name: str, array: np.ndarray, margin: int) -> None:
        assert margin == OTHER_MARGIN

    def poison(self, name: str) -> None:
        self.poisoned = True

    def launch(self, numbers: Any) -> float:
        assert self.poisoned
        self.launches, self.poisoned = self.launches + 1, False
        return 0.5

    def fetch(self, name: str, array: np.ndarray) -> tuple[bytes, bytes]:
        array[...] = self.results.get(self.launches, [0.0, 0.0])
        found = bytes([OTHER_MARGIN]) * 8
        return found, (b"\0" + found[1:] if self.launches == self.margin else found)


def test_repeated_launches_are_kept_for_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = UserKernel("m.cl", "", "/", "f", (("output", "output"),), "float32", (1,))
    request = {"numbers": {}, "output_shape": [2], "warmup": 1, "repeats": 5, "timing_s": 60.0, "share": 2, "keep": 100}

    def repeated(margin: int, launches: int = 9, timed: int = 5, **results: list[float]) -> Any:
        loaded: Any = Flaky({int(name[1:]): values for name, values in results.items()})
        loaded.margin = margin
        found = kernelrun._Runs(loaded, kernel, tmp_path, request).repeat(zlib.crc32(bytes(8)))
        assert (loaded.launches, len(found["times_s"]), found["kernel_s"]) == (launches, timed, [0.5] * timed)
        return found["repeated"]

    # The first differs from inputs before in a few elements, the next six are new, then one that differs in a few.
    found = repeated(0, n3=[0.0, 1.0], n4=[2.0, 0.0], n5=[0.0, 1.0])
    assert [[way for way, _ in each["inputs"]] for each in found] == [["near"], *[["new"]] * 6, ["new", "near"]]
    assert [each["recalled"] for each in found] == [True, True, False, False, True, True, True, True]
    values = [np.load(tmp_path / f"result-{each['result']}.npy").tolist() for each in found]
    assert values == [[0, 0], [0, 0], [0, 1], [2, 0], [0, 1], *[[0, 0]] * 3]
    # The last has the first launch's inputs, and is looked at where its result is another one.
    assert repeated(0, n9=[1.0, 0.0])[-1]["inputs"] == []
    found = repeated(2, launches=2, timed=0)
    assert found[-1]["beside"] == ["it wrote beside output: 1 bytes, the nearest 0 bytes behind the end of it"]
    found = repeated(0, launches=4, timed=2, n4=[0.0, np.frombuffer(b"\xff" * 4, np.float32)[0]])
    assert [each["unwritten"] for each in found] == [0, 0, 0, 1]
    for limit, share in ((8, 2), (4, 1)):
        monkeypatch.setattr(kernelrun, "KEPT_RESULTS", limit)
        monkeypatch.setitem(request, "share", share)
        (kept,) = repeated(0)
        assert np.load(tmp_path / f"result-{kept['result']}.npy").shape == (share,)
    monkeypatch.setitem(request, "timing_s", 0.0)
    assert len(repeated(0, launches=1, timed=1)) == 1


def test_how_much_is_compared_with_the_reference() -> None:
    def checked(launches: int, case: str = "kernelbench", **numbers: Any) -> tuple[int, int]:
        problem = load_problem(CONV)
        return judging._to_check(bind_arguments(problem, sort_arguments(problem, numbers), case=case), launches)

    assert checked(14, "sample")[0] == 2  # all of it, of all launches
    assert checked(14, "sample")[1] >= 14
    assert checked(14) == (1, 8)  # one item each, together as many as the batch has
    assert checked(4) == (2, 4)
    assert checked(14, batch_size=1) == (1, 3)


@quick
def test_a_launch_may_be_checked_in_some_of_its_batch_items(
    write: Write, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_to_check", lambda operator, launches: (1, launches))
    assert judge(write(), device, repeats=5).passed
    changed = write(("output[place] = sum;", "output[place] = isnan(input[-1]) ? sum : 1.01f * sum;"))
    judgement = judge(changed, device)
    assert " of 10080 elements are wrong" in judgement.reason


def test_caught_errors() -> None:
    def failure(error: Exception) -> Any:
        reports: list[Any] = [{"stage": "building"}]

        def fail(report: Any, folder: Path) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernelrun, "_try_out", fail)
            patch.setattr(kernelrun, "_dump_no_core", lambda: None)
            kernelrun.child(reports.append, "")
        return verdict(ended(0, "", *json.loads(json.dumps(reports))))

    assert failure(BuildError("refused", "a\nlog")) == {
        "outcome": "build failed", "reason": "refused", "log": "a\nlog",
    }  # fmt: skip
    assert failure(DeviceMemoryError("too big"))["outcome"] == "out of memory"
    assert failure(MemoryError())["reason"] == "MemoryError, while building"
    assert failure(KernelError("illegal address"))["outcome"] == "crashed"
    with pytest.raises(InputError, match="no such function"):
        failure(InputError("no such function"))
    with pytest.raises(DeviceError, match="no doubles"):
        failure(DeviceError("no doubles"))
    with pytest.raises(KernelError, match="opencl:0 failed while building: odd"):
        failure(RuntimeError("odd"))


# ---- the command line --------------------------------------------------------------------------------------
@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs ``verify`` and returns its exit code and what it printed."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["verify", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def test_the_command_reports_in_words_and_as_json(run: Any, write: Write, device: str) -> None:
    words = [CONV, "--kernel", str(write()), "--global-size", "ceil(output_elements / 1)", "--local-size", "16",
             "--device", device, "--repeat", "3", "--inputs", "signed,integers"]  # fmt: skip
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "verdict   passed" in out
    assert "global size 20160, local size 16" in out
    assert "on the device's clock (median of 3" in out
    code, out, err = run(*words, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["schema"], report["command"], report["passed"]) == (1, "verify", True)
    (result,) = report["results"]
    assert result["outcome"] == "passed"
    assert result["global_size"] == [20160]
    assert len(result["times_s"]) == 3
    assert [check["inputs"] for check in result["checks"]] == ["signed", "integers"]
    assert set(result) >= {"problem", "case", "seed", "device", "kernel", "entry", "median_s", "gflops", "log"}


@quick
def test_exit_codes(run: Any, write: Write, device: str) -> None:
    def code(path: Path, *more: str) -> tuple[int, str]:
        found, out, err = run(
            *(CONV, "--kernel", str(path), "--global-size", "output_elements", "--inputs", "signed"),
            *("--device", device, *more),
        )
        assert "Traceback" not in out + err
        assert err.count("\n") == 1
        return found, err

    assert code(write((WRITTEN, "output[place] = 0.0f;")), "--json")[0] == 1
    assert code(write((WRITTEN, "output[place] = nothing;")))[0] == 4
    assert code(write(), "--entry", "other")[0] == 2
    assert code(write(), "--device", "numpy")[0] == 3
    assert code(Path("missing.cl"))[0] == 2
    for text in ("soon", "", "1e300", "99999999999", "1_0", "nan", "0"):
        assert code(write(), "--timeout", text) == (
            2,
            f"error: --timeout is '{text}'; expected a number of seconds above 0 and up to 604800\n",
        )
    assert code(write(), "--entry", "")[1].startswith("error: entry is ''; expected the name of a function")
    assert code(write(), "--repeat", "")[1].startswith("error: --repeat is ''; expected a whole number")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([CONV, "--entry", "f"], "--entry is given without --kernel"),
        ([CONV, "--timeout", ""], "--timeout is given without --kernel"),
        ([CONV, "--kernel", "a.cl", "--algorithm", "direct"], "--algorithm and --kernel are both given"),
        ([CONV, "--kernel", "a.cl", "--option", "box=1x1"], "--option and --kernel are both given"),
        (["--kernel", "a.cl"], "--kernel is for one problem, and 0 are given"),
        ([CONV, MAXMAX, "--kernel", "a.cl"], "--kernel is for one problem, and 2 are given"),
    ],
)
def test_options_that_do_not_go_together(run: Any, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_the_guide_s_python_runs(write: Write, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(name="conv.cl")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    assert namespace["verdict"].passed
    assert isinstance(namespace["verdict"], dispatcher.Judgement)


def test_the_guide_names_every_verdict_and_option() -> None:
    from typing import get_args

    for name in (*get_args(judging.Outcome), *OUTPUT_SIZES, "output_length", "output_elements"):
        assert f"`{name}`" in GUIDE
    for option in ("entry", "global-size", "local-size", "build-option", "timeout", "inputs", "repeat", "kernel"):
        assert f"--{option}" in GUIDE
