"""Exported CUDA programs: compiled and verified as the kernels of anybody else."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
from cuda_support import SIMULATED, OnDevice, device, operator, poisoned

from dispatcher.backends.cuda import driver, toolkit
from dispatcher.check import judging, kernelrun
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.check.judging import verify_kernel
from dispatcher.device import selftest
from dispatcher.export.formats import export
from dispatcher.problem.loader import load_problem, problem_names
from tests import children, cudasim
from tests.cudasim import toolkit as real_toolkit

#: Whether nvcc from PyPI compiles all problems, not just an nvcc that is there one of them.
ALL = os.environ.get("DISPATCHER_TEST_EXPORTS") == "all"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device()
    if SIMULATED:
        for name, value in cudasim.activate().child_environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(selftest.VARIABLE, "off")
    monkeypatch.setattr(judging, "run_child", children.run_here)
    monkeypatch.setattr(kernelrun, "_dump_no_core", lambda: None)


def verified(problem: object, folder: Path, cases: tuple[str, ...] = ("sample", "odd"), **options: str) -> str:
    """Export with kernels for the first of the cases, and verify it in all of them; returns the text."""
    loaded = load_problem(problem)
    target = folder / "solution.cu"
    text = export(loaded, "tensara", target, cases=cases[:1], **options)[target]
    target.write_text(text)
    quickly = ["-Xcompiler", "-O1"]  # most of the time goes into compiling, on the simulator
    shared = {name: options[name] for name in ("dtype", "precision") if name in options}
    for case in cases:
        (judged,) = verify_kernel(
            loaded, target, case=case, device="cuda", inputs="signed", repeats=1, warmup=0,
            build_options=quickly, **shared,
        )  # fmt: skip
        assert judged.passed, f"{case}: {judged.outcome}: {judged.reason}\n{judged.log}"
    return text


@pytest.mark.parametrize("name", problem_names())
def test_a_solution_for_tensara_is_right(name: str, tmp_path: Path) -> None:
    verified(name, tmp_path)


@pytest.mark.parametrize("name", problem_names() if ALL else ["conv-transpose3d-max-max-sum"])
def test_the_real_compiler_takes_it_for_several_architectures(name: str, tmp_path: Path) -> None:
    compiler = real_toolkit.nvcc() if ALL else shutil.which("nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc")
    target = tmp_path / "solution.cu"
    target.write_text(export(load_problem(name), "tensara", target)[target])
    wanted = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)]
    options = ["-std=c++20", "-Xcicc=-O0", "-Xptxas=-O0", *wanted, "-c"]
    command = [compiler, *options, "-o", tmp_path / "s.o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


#: Sizes that follow from others in every way there is: ceil mode, padding "same", windows of a given number, an axis by
#: its number, a value that is read again, numbers of the caller's.
ANY_SIZES: dict[str, Any] = {
    "name": "any-sizes",
    "title": "what general kernels have to find out when they are called",
    "origin": "the tests",
    "rank": 2,
    "parameters": {
        "input": ["n", "c", "h", "w"],
        "taps": ["oc", "c / groups", "kh", "kw"],
        "gain": ["oc"],
        "output": "output",
        "n, c, oc, h, w, kh, kw, stride": "size_t",
        "groups": "size_t = 1",
        "axis": "size_t = 1",
        "slope, eps": "double",
    },
    "pipeline": [
        {"op": "conv2d", "weight": "taps", "groups": "groups", "padding": "same", "stride": ["stride", 1], "as": "x"},
        {"op": "instance_norm"},
        {"op": "rms_norm", "eps": "eps", "weight": "gain"},
        {"op": "leaky_relu", "slope": "slope"},
        {"op": "add", "value": "x"},
        {"op": "max_pool2d", "window": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        {"op": "adaptive_avg_pool2d", "size": [2, 3]},
        {"op": "log_softmax", "axis": "axis"},
    ],
    "cases": {
        "sample": {"n": 2, "c": 4, "oc": 6, "h": 9, "w": 8, "kh": 3, "kw": 4, "stride": 1, "slope": 0.1, "eps": 1e-3},
        "odd": {
            "n": 1, "c": 4, "oc": 6, "h": 12, "w": 7, "kh": 2, "kw": 3, "stride": 3, "groups": 2, "axis": 3,
            "slope": -0.5, "eps": 1e-2,
        },
        "odd2": {"n": 3, "c": 1, "oc": 1, "h": 5, "w": 10, "kh": 1, "kw": 1, "stride": 2, "slope": 2.0, "eps": 0.5},
    },
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "other"), [("float16", "odd2"), ("float64", "odd")])
def test_sizes_that_follow_from_others(dtype: str, other: str, tmp_path: Path) -> None:
    text = verified(ANY_SIZES, tmp_path, ("sample", other), dtype=dtype)
    assert ("::conv_halo" in text) == (dtype == "float16")
    assert "::gathered" in text


def test_the_c_functions_say_what_they_need_and_compute(tmp_path: Path) -> None:
    problem = load_problem("conv-transpose3d-layernorm-gelu-scaling")
    op = operator(problem.name, precision="tf32")
    made = export(problem, "cuda", tmp_path / "fused.cu", cases=["sample"], precision="tf32")
    for path, text in made.items():
        path.write_text(text)
    library = tmp_path / "fused.so"
    compiler = toolkit.find()
    assert isinstance(compiler, toolkit.Toolkit)
    context = driver.context(device().index)
    toolkit.run(
        [*compiler.command, "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{context.architecture}", "-std=c++17", "-O3",
         "-o", str(library), str(tmp_path / "fused.cu")], library, "fused.cu",
    )  # fmt: skip
    header = (tmp_path / "fused.h").read_text()
    assert "size_t conv_transpose3d_layernorm_gelu_scaling_memory_bytes(size_t batch_size" in header
    numbers = [
        (ctypes.c_double if parameter.type == "double" else ctypes.c_size_t)({**op.sizes, **op.scalars}[parameter.name])
        for parameter in problem.parameters
        if parameter.type != "tensor"
    ]
    tensors = random_tensors(op, 0)
    places = [OnDevice(array) for array in (*tensors.values(), poisoned(op))]
    with context.active():
        functions = ctypes.CDLL(str(library))
        functions.conv_transpose3d_layernorm_gelu_scaling_memory_bytes.restype = ctypes.c_size_t
        need = functions.conv_transpose3d_layernorm_gelu_scaling_memory_bytes(*numbers)
        memory = context.driver.mem_alloc(need)
        call = functions.conv_transpose3d_layernorm_gelu_scaling
        pointers = [ctypes.c_void_p(place.address) for place in places]
        last = [ctypes.c_void_p(int(memory)), None]
        assert call(*pointers, *numbers, *last) == 0
        off = ctypes.c_void_p(places[0].address + 4)
        assert call(off, *pointers[1:], *numbers, *last) == 716  # cudaErrorMisalignedAddress
    comparison = verify_result(op, tensors, places[-1].get())
    assert comparison.passed, comparison.reason


# ---- KernelBench -----------------------------------------------------------------------------------------------------
#: What its evaluator refuses in a text without comments, and what it looks for.
FORBIDDEN = (
    r"\btry\s*:", r"\bexcept\b", r"\bpass\b", r"\bthreading\b", r"multiprocessing", r"concurrent\.futures", r"Executor",
    r"_make_subclass", r"class\s+\w+.*\((torch\.)?Tensor\)", r"torch\.nn\.", r"functional", r"\.half\s*\(",
    r"\(\s*__half\s*\)", r"static_cast\s*<\s*(__half|half)\s*>", r"torch\.\w*(conv|pool|norm|softmax|relu|clamp)\w*\b",
)  # fmt: skip
WANTED = ("__global__", "load_inline", "threadIdx.", "class ModelNew(nn.Module)")


def model_new(name: str, folder: Path, cases: tuple[str, ...] = ("sample",)) -> str:
    target = folder / "model_new.py"
    return export(load_problem(name), "kernelbench", target, cases=cases)[target]


@pytest.mark.parametrize("name", problem_names())
def test_a_model_for_kernelbench_keeps_its_rules(name: str, tmp_path: Path) -> None:
    text = model_new(name, tmp_path)
    code = re.sub(r"(#|//)[^\n]*", "", text)
    assert not [pattern for pattern in FORBIDDEN if re.search(pattern, code)]
    assert all(each in code for each in WANTED)
    made = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert [node.name for node in made.body if isinstance(node, ast.FunctionDef)] == ["__init__", "forward"]
    assert all(ord(character) < 128 for character in text)


def test_the_layers_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.utils import cpp_extension

    called: list[Any] = []
    monkeypatch.setattr(
        cpp_extension, "load_inline", lambda **_: types.SimpleNamespace(forward=lambda *tensors: called.append(tensors))
    )
    space: dict[str, Any] = {}
    exec(model_new("conv-transpose2d-batchnorm-tanh-maxpool-groupnorm", tmp_path), space)
    torch.manual_seed(42)
    sizes = operator("conv-transpose2d-batchnorm-tanh-maxpool-groupnorm").sizes
    channels, out, kernel = sizes["in_channels"], sizes["out_channels"], sizes["kernel_h"]
    convolution = nn.ConvTranspose2d(channels, out, kernel, bias=False)
    wanted = [convolution, nn.BatchNorm2d(out), nn.GroupNorm(sizes["num_groups"], out)]
    torch.manual_seed(42)
    model = space["ModelNew"](1, 2, 3)
    for given, layer in zip(model.children(), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(given.parameters(), layer.parameters(), strict=True))
    model(torch.zeros(1))
    assert len(called[0]) == 6
