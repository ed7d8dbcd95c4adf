"""Users' own CUDA code, on the simulator or a GPU: both forms, their signatures, and what nvcc is told."""

from __future__ import annotations

import ctypes
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_support import SIMULATED, device, machine, simulator_only
from fakes import CONV

from dispatcher import cli
from dispatcher.backends.cuda import BACKEND, toolkit, userkernel
from dispatcher.check import judging, kernelrun
from dispatcher.check.judging import Judgement, verify_kernel
from dispatcher.device import selection, selftest
from dispatcher.errors import BuildError, DeviceError, InputError
from dispatcher.interface import Device
from dispatcher.problem.loader import load_problem
from dispatcher.problem.userkernel import Kind, UserKernel
from tests import cheats, children, cudasim
from tests.strategies import SCALED_PRODUCT as PROBLEM

GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "your-kernel.md").read_text(encoding="utf-8")
KERNEL, HOST = re.findall(r"```cuda\n(.*?)```", GUIDE, re.DOTALL)

PARAMETERS = (
    "(const REAL* input, const REAL* weights, const REAL* scale, REAL* output, size_t n, size_t ic, size_t oc, "
    "size_t d, size_t h, size_t w, double factor)"
)
PRODUCT = f"""
extern "C" __global__ void solution{PARAMETERS} {{
    const size_t x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, z = blockIdx.z;
    const size_t voxels = d * h * w;
    if (x >= voxels || y >= oc || z >= n) return;
    REAL sum = 0;
    for (size_t c = 0; c < ic; ++c) sum += input[(z * ic + c) * voxels + x] * weights[c * oc + y];
    output[(z * oc + y) * voxels + x] = sum * scale[y] * (REAL)factor;
}}
"""
#: The same on the host: for the simulator, whose device memory is the host's.
ON_HOST = f"""
#include <cstddef>
#include <cstdlib>
void solution{PARAMETERS} {{
    const size_t voxels = d * h * w;
    for (size_t z = 0; z < n; ++z)
        for (size_t y = 0; y < oc; ++y)
            for (size_t x = 0; x < voxels; ++x) {{
                REAL sum = 0;
                for (size_t c = 0; c < ic; ++c) sum += input[(z * ic + c) * voxels + x] * weights[c * oc + y];
                output[(z * oc + y) * voxels + x] = sum * scale[y] * (REAL)factor;
            }}
}}
"""

Write = Callable[..., Path]

#: Kernels that end in good order, right or wrong, need no process of their own: starting one takes most of the time.
quick = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(autouse=True)
def _children_find_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    device()
    if SIMULATED:
        for name, value in cudasim.activate().child_environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(selftest.VARIABLE, "off")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children's functions are called here; what they report still goes through JSON."""
    monkeypatch.setattr(judging, "run_child", children.run_here)
    monkeypatch.setattr(kernelrun, "_dump_no_core", lambda: None)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a .cu file with texts replaced."""

    def write_file(source: str, *replaced: tuple[str, str]) -> Path:
        for old, new in replaced:
            assert old in source
            source = source.replace(old, new)
        path = tmp_path / "mine.cu"
        path.write_text(source, encoding="utf-8")
        return path

    return write_file


def judge(path: Path, **options: Any) -> Judgement:
    """The verdict on the guide's kernel, or on what became of it."""
    given = {"entry": "conv", "global_size": "output_elements", "local_size": 64, "inputs": "signed", **options}
    given = {"timeout_s": 60.0, **given}
    (judgement,) = verify_kernel(CONV, path, device="cuda:0", repeats=2, warmup=0, **given)
    return judgement


def judge_product(path: Path, dtype: str = "float32", **options: Any) -> Judgement:
    """The verdict on a kernel for :data:`PROBLEM`."""
    element = {"float32": "float", "float64": "double"}[dtype]
    given = {"build_options": [f"-DREAL={element}"], "timeout_s": 60.0, "repeats": 1, "warmup": 0,
             "inputs": "signed", **options}  # fmt: skip
    (judgement,) = verify_kernel(PROBLEM, path, device="cuda:0", dtype=dtype, **given)
    return judgement


# ---- kernels -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["sample", "odd"])
def test_the_guide_s_kernel_is_right_and_timed(write: Write, case: str) -> None:
    judgement = judge(write(KERNEL), case=case, inputs=None)
    assert (judgement.outcome, judgement.reason) == ("passed", "")
    assert len(judgement.times_s) == len(judgement.kernel_s) == 2


@quick
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_kind_of_parameter_and_three_dimensions(write: Write, dtype: str) -> None:
    judgement = judge_product(
        write(PRODUCT), dtype, global_size="output_depth * output_height * output_width, oc, n", local_size="16, 2, 1",
    )  # fmt: skip
    assert (judgement.outcome, judgement.reason) == ("passed", "")
    assert judgement.kernel.global_size == (32, 8, 2)


WRITTEN = "output[place] = sum;"
FAULTS = {
    "value": (1, "wrong", "output[place] = 1.01f * sum;", "elements are wrong"),
    "tail": (1, "wrong", "if (place < 20000) output[place] = sum;", "160 are NaN"),
    "behind": (1, "wrong", "output[place] = sum; if (!place) output[20160] = 1;", "nearest 0 bytes behind"),
    "input": (1, "wrong", "output[place] = sum; if (!place) ((float*)input)[0] = 9.0f;", "the input tensor input"),
    "beside, as it was": (
        *(1, "wrong", "output[place] = sum; if (!place) ((unsigned*)output)[-1] = 0xffffffffu;"),
        "nearest 0 bytes in front",
    ),
    "does not build": (4, "build failed", "output[place] = total;", "total"),
}  # fmt: skip


@quick
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_verdicts(write: Write, fault: str) -> None:
    code, outcome, written, reason = FAULTS[fault]
    judgement = judge(write(KERNEL, (WRITTEN, written)))
    assert (judgement.outcome, judgement.exit_code) == (outcome, code)
    assert reason in judgement.reason
    if outcome == "build failed":
        line = KERNEL[: KERNEL.index(WRITTEN)].count("\n") + 1
        assert re.search(rf"mine\.cu[:(]{line}\b", judgement.log)


def test_a_crash_is_a_verdict(write: Write) -> None:
    judgement = judge(write(KERNEL, (WRITTEN, "output[place + (1 << 20)] = sum;")))
    assert (judgement.outcome, judgement.exit_code) == ("crashed", 1)
    assert "kernel conv failed" in judgement.reason


@quick
def test_the_output_is_full_of_nan_before_every_launch(write: Write) -> None:
    kernel = write(KERNEL, (WRITTEN, "output[place] = output[place] != output[place] ? sum : 0.0f;"))
    judgement = judge(kernel)
    assert (judgement.outcome, judgement.reason) == ("passed", "")


def test_a_hang_is_a_verdict(write: Write) -> None:
    kernel = write(KERNEL, (WRITTEN, "volatile int on = 1; while (on) ; output[place] = sum;"))
    judgement = judge(kernel, timeout_s=6.0)
    assert judgement.outcome == "timed out"
    assert judgement.reason.endswith("while running on inputs 'signed'")


@simulator_only
def test_no_memory_is_a_verdict(write: Write) -> None:
    with machine(memory_mb=1):
        judgement = judge(write(KERNEL), batch_size=64)
    assert (judgement.outcome, judgement.exit_code) == ("out of memory", 1)
    assert "does not fit into the 1048576 bytes" in judgement.reason


# ---- functions of the host ---------------------------------------------------------------------------------
@simulator_only
@quick
@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        *(("void", "float32"), ("void", "float64"), ('extern "C" void', "float32")),
        *(("static void", "float32"), ("void noexcept", "float32")),
    ],
)
def test_a_host_function_gets_device_pointers(write: Write, head: str, dtype: str) -> None:
    changes = [("void solution", f"{head} solution")]
    if head.endswith("noexcept"):
        changes = [("double factor)", "double factor) noexcept")]
    judgement = judge_product(write(ON_HOST, *changes), dtype)
    assert (judgement.outcome, judgement.reason) == ("passed", "")
    assert judgement.kernel_s == ()
    assert len(judgement.times_s) == 1
    assert judgement.kernel.global_size is None


HOST_FAULTS = {
    "wrong": ("wrong", "sum = 2 * input[0];", "elements are wrong"),
    "exit": ("crashed", "exit(5);", "while running"),  # PyCUDA may abort while the process ends
    "exit 0": ("crashed", "exit(0);", "while running"),
    "abort": ("crashed", "abort();", "it crashed with SIGABRT, while running"),
    "null": ("crashed", "*(volatile int*)(n - 2) = 1;", "it crashed with SIGSEGV, while running"),
    "hang": ("timed out", "for (volatile int on = 1; on;) ;", "while running"),
}


@simulator_only
@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_faults_of_host_functions_are_verdicts(write: Write, fault: str) -> None:
    outcome, text, reason = HOST_FAULTS[fault]
    kernel = write(ON_HOST, ("REAL sum = 0;", f"REAL sum = 0; {text}"))
    judgement = judge_product(kernel, timeout_s=5.0)
    assert judgement.outcome == outcome
    assert reason in judgement.reason


@quick
@pytest.mark.parametrize("cheat", [None, *cheats.CHEATS])
def test_a_kernel_that_cheats_is_wrong(write: Write, cheat: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(cheats.CUDA)
    cheats.check(cheat, cheats.judge(cheat, path, monkeypatch, device="cuda:0", global_size=420, local_size=84))


THREAD = f"""
#include <thread>
static void compute{PARAMETERS};
void solution{PARAMETERS} {{
    std::thread([=] {{
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        compute(input, weights, scale, output, n, ic, oc, d, h, w, factor);
    }}).detach();
}}
"""
CLOCK = f"""
#include <chrono>
#include <vector>
static void compute{PARAMETERS};
void solution{PARAMETERS} {{
    static std::vector<REAL> kept;
    static std::chrono::steady_clock::time_point before;
    const auto now = std::chrono::steady_clock::now();
    if (now - before < std::chrono::seconds(9) && !kept.empty()) {{
        for (size_t i = 0; i < kept.size(); ++i) output[i] = kept[i];
    }} else {{
        compute(input, weights, scale, output, n, ic, oc, d, h, w, factor);
        kept.assign(output, output + n * oc * d * h * w);
    }}
    before = now;
}}
"""


@simulator_only
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (THREAD, "it went on writing output after its end, while running on"),
        (CLOCK, "its result is that of an earlier launch"),
    ],
    ids=["leaves its work to a thread", "keeps results while the clock shows that it is timed"],
)
def test_a_host_function_that_cheats_is_wrong(write: Write, source: str, reason: str) -> None:
    judgement = judge_product(write(f"{source}{ON_HOST.replace('void solution', 'static void compute')}"))
    assert judgement.outcome == "wrong"
    assert reason in judgement.reason


def nvcc() -> toolkit.Toolkit:
    """The real nvcc, or a skip."""
    path = shutil.which("nvcc")
    if path is None:
        pytest.skip("there is no nvcc on PATH")
    return toolkit.Toolkit((path,), "", None)


def context() -> Any:
    return types.SimpleNamespace(architecture=90)


def user_kernel(text: str, *sizes: tuple[int, ...], **fields: Any) -> UserKernel:
    """A kernel for the plain convolution: with sizes for a launch, or a function of the host."""
    kinds: dict[str, Kind] = {"size_t": "size", "double": "double"}
    parameters = tuple(
        (each.name, kinds.get(each.type, "input" if each.const else "output")) for each in load_problem(CONV).parameters
    )
    given = {"entry": "conv" if sizes else "solution", "dtype": "float32", **fields}
    return UserKernel("mine.cu", text, "/", parameters=parameters, global_size=sizes[0] if sizes else None,
                      local_size=sizes[1] if sizes else None, **given)  # fmt: skip


def test_the_real_compiler_takes_the_guide_s_host_function(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(userkernel._compile(context(), nvcc(), user_kernel(KERNEL + HOST), tmp_path)))
    assert ctypes.c_void_p.in_dll(library, "kernel_dispatcher_entry").value
    assert library.kernel_dispatcher_error


def test_the_real_compiler_s_names_of_kernels_are_found(tmp_path: Path) -> None:
    for linkage, symbol in (("", "_Z4convPKfS0_Pf" + "m" * 22), ('extern "C" ', "conv")):
        text = KERNEL.replace("__global__ void", f"{linkage}__global__ void")
        cubin = userkernel._compile(context(), nvcc(), user_kernel(text, (64,), (64,)), tmp_path)
        assert userkernel._symbol(cubin.read_bytes(), "conv") == symbol


def test_the_real_compiler_s_errors_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not have the problem's parameters: .*a parameter has another type"):
        text = KERNEL.replace("size_t groups", "int groups")
        userkernel._compile(context(), nvcc(), user_kernel(text, (64,), (64,)), tmp_path)
    with pytest.raises(InputError, match="undefined"):
        userkernel._compile(context(), nvcc(), user_kernel(KERNEL + HOST, entry="other"), tmp_path)
    with pytest.raises(BuildError) as caught:
        userkernel._compile(context(), nvcc(), user_kernel(KERNEL.replace(WRITTEN, "x = 1"), (64,), (64,)), tmp_path)
    assert "mine.cu(" in caught.value.log


def test_what_the_compiler_is_told(tmp_path: Path) -> None:
    compiler = toolkit.Toolkit(("nvcc",), "", None)
    source, output = tmp_path / "a.cu", tmp_path / "a.so"

    def line(kernel: UserKernel) -> list[str]:
        return userkernel.command_line(kernel, 90, compiler, tmp_path, source, output)

    assert line(user_kernel("")) == [
        "nvcc", "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90", "-std=c++17", "-O3", "-I", "/",
        "-o", str(output), str(source),
    ]  # fmt: skip
    kernel = user_kernel("", (64,), (64,), build_options=("-std=c++20", "-DX=1"))
    assert line(kernel) == [
        "nvcc", "-cubin", "-arch=sm_90", "-O3", "-I", "/", "-std=c++20", "-DX=1", "-o", str(output), str(source),
    ]  # fmt: skip


# ---- what is refused ---------------------------------------------------------------------------------------
SIGNATURES = {
    "name": (("void conv(", "void convolve("), "has no __global__ kernel 'conv'"),
    "count": (("size_t groups)", "size_t groups, size_t more)"), "it has another number of parameters; expected conv("),
    "type": (("size_t groups)", "int groups)"), "a parameter has another type; expected conv(const float* input,"),
    "double": (("size_t groups)", "double groups)"), "a parameter has another type"),
    "pointer": (("const float* input", "const int* input"), "a parameter has another type"),
    "number for a pointer": (("float* output", "size_t output"), "a parameter has another type"),
}


@quick
@pytest.mark.parametrize("fault", SIGNATURES)
def test_another_parameter_list_is_refused(write: Write, fault: str) -> None:
    change, message = SIGNATURES[fault]
    changes = [change]
    if fault == "double":
        changes += [("in_channels / groups", "in_channels"), ("out_channels / groups", "out_channels")]
    if fault == "number for a pointer":
        changes.append((WRITTEN, ""))
    with pytest.raises(InputError) as caught:
        judge(write(KERNEL, *changes))
    assert message in str(caught.value)


@quick
def test_types_of_the_same_size_will_do(write: Write) -> None:
    kernel = write(
        KERNEL,
        ("const float* input", "const float4* vectors"),
        ("size_t groups)", "unsigned long long groups)"),
        ("    const long OD", "    const float* input = (const float*)vectors;\n    const long OD"),
    )
    if SIMULATED:  # it has no vector types of its own here
        kernel.write_text(f"struct float4 {{ float x, y, z, w; }};\n{kernel.read_text()}".replace("float4", "quad"))
    assert judge(kernel).passed


@quick
def test_the_form_follows_the_sizes(write: Write) -> None:
    with pytest.raises(InputError, match=r"conv in .*mine\.cu is a __global__ kernel; give global_size and local_size"):
        judge(write(KERNEL), global_size=None, local_size=None)
    with pytest.raises(InputError, match="has no __global__ kernel 'solution'; leave global_size and local_size out"):
        judge_product(write(ON_HOST), global_size=64, local_size=64)
    for place in ("{} __global__ void conv(", "__global__ void {} conv("):
        clustered = write(KERNEL, ("__global__ void conv(", place.format("__cluster_dims__(2, 1, 1)")))
        with pytest.raises(
            InputError, match=r"conv in .* has __cluster_dims__; kernels are launched here without clust"
        ):
            judge(clustered)
    with pytest.raises(InputError, match=r"global_size is given without local_size, which \.cu files need"):
        judge(write(KERNEL), local_size=None)
    with pytest.raises(InputError, match="local_size is given without global_size; give both"):
        judge(write(KERNEL), global_size=None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("__global__ void conv(int a) {}", True),
        ("template <int N> __global__ void __launch_bounds__(128)\nconv (int a) {}", True),
        ("__global__ void other(int a); void conv(int a) {}", False),
        ("__global__ void other(int a) {} void conv(int a) {}", False),
        ("/* __global__ */ void conv(int a) {}", False),
        ("// __global__\nvoid conv(int a) {}", False),
        ("__global__ void convolve(int a) {}", False),
    ],
)
def test_kernels_are_told_from_functions(text: str, found: bool) -> None:
    assert userkernel.is_global(user_kernel(text, (1,), (1,))) == found


@quick
def test_sizes_that_the_device_refuses(write: Write) -> None:
    with pytest.raises(InputError, match=r"local_size is \(2048,\); a block of this kernel has 1024 threads at most"):
        judge(write(KERNEL), local_size=2048)
    for bounds in ("__launch_bounds__(32) void", "void __launch_bounds__(8 * (2 + 2), 2)"):
        with pytest.raises(InputError, match=r"local_size is \(64,\); a block of this kernel has 32 threads at most"):
            judge(write(KERNEL, ("void conv(", f"{bounds} conv(")))
    with pytest.raises(InputError, match="makes 65536 blocks along y"):
        judge(write(KERNEL), global_size="1, 65536", local_size="1, 1")


def test_without_a_device_nothing_runs(write: Write) -> None:
    with pytest.raises(DeviceError, match=r"numpy: it cannot run \.cu files; name a device of cuda"):
        verify_kernel(CONV, write(KERNEL), entry="conv", device="numpy", global_size=64, local_size=64)
    with pytest.raises(DeviceError, match="cuda:99"):
        verify_kernel(CONV, write(KERNEL), entry="conv", device="cuda:99", global_size=64, local_size=64)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no CUDA device is usable."""
    unusable = Device("cuda", 0, "CUDA", "unknown", False, "the driver is missing")
    monkeypatch.setattr(BACKEND, "probe", lambda: [unusable])
    monkeypatch.setattr(selection, "_probed", {})


@quick
@pytest.mark.usefixtures("no_device")
def test_without_a_device_it_is_compiled_and_its_parameters_are_checked(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(path: Path, *more: str) -> tuple[int, str, str]:
        code = cli.main(["verify", CONV, "--kernel", str(path), "--entry", "conv", "--global-size", "output_elements",
                         "--local-size", "64", *more])  # fmt: skip
        return (code, *capsys.readouterr())

    monkeypatch.setattr(userkernel, "GlobalKernel", None)
    for request in ("all", "cuda:0,numpy"):
        code, out, err = verdict(write(KERNEL), "--device", request)
        assert (code, out) == (3, "")
        assert "the driver is missing" in err
        assert "mine.cu compiles for compute capability 9.0 and has the problem's parameters, but it could not" in err
    code, _, err = verdict(write(KERNEL, ("size_t groups)", "int groups)")))
    assert (code, err.count("\n")) == (2, 1)
    assert "does not have the problem's parameters: " in err
    code, out, err = verdict(write(KERNEL, (WRITTEN, "output[place] = total;")))
    assert (code, err.count("\n")) == (4, 1)
    assert "verdict   build failed" in out
    assert "mine.cu:" in out
    monkeypatch.setenv(toolkit.ENVIRONMENT_VARIABLE, "no-such-program")
    code, out, err = verdict(write(KERNEL))
    assert (code, err.count("\n")) == (3, 1)
    assert "the driver is missing" in err
    assert "; it was not compiled either: DISPATCHER_NVCC is 'no-such-program', which is not a program" in err


def test_the_command(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", CONV, "--kernel", str(write(KERNEL)), "--entry", "conv", "--global-size", "output_elements",
             "--local-size", "64", "--device", "cuda:0"]  # fmt: skip
    assert cli.main(words) == 0
    assert "verdict   passed" in capsys.readouterr().out
    assert cli.main([*words, "--entry", "other"]) == 2
    assert "has no __global__ kernel 'other'" in capsys.readouterr().err
