"""Exported OpenCL programs, run by a program that knows nothing of this package; what an export refuses."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher import cli
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import InputError
from dispatcher.export.formats import export
from dispatcher.problem.loader import load_problem, problem_names
from tests.family import operator_for
from tests.strategies import DEVICES

#: Every kind of buffer and launch; ``DISPATCHER_TEST_EXPORTS=all`` takes all problems besides.
PROGRAMS: tuple[tuple[str, str, str], ...] = (
    ("conv-transpose3d-max-max-sum", "cpu-avx512", "float64"),
    ("conv-transpose3d-avgpool-clamp-softmax-multiply", "cpu", "float32"),
    ("conv2d-instancenorm-divide", "gpu", "float32"),
)
if os.environ.get("DISPATCHER_TEST_EXPORTS") == "all":
    KINDS = itertools.product(("float32", "float64"), ("cpu", "cpu-avx512", "gpu"))
    PROGRAMS += tuple((name, *kind[::-1]) for name, kind in zip(problem_names(), itertools.cycle(KINDS)))
PLACE = next((place for place in reversed(DEVICES) if place.backend == "opencl"), None)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or PLACE is None or PLACE.missing:
        pytest.skip("needs a C++ compiler and an OpenCL device")
    program = tmp_path_factory.mktemp("host") / "opencl_host"
    source = Path(__file__).with_name("opencl_host.cpp")
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", str(program), str(source), "-ldl"], check=True)
    return program


@pytest.mark.parametrize(("name", "device_class", "dtype"), PROGRAMS)
def test_the_program_of_somebody_else_computes_it(
    host: Path, tmp_path: Path, name: str, device_class: str, dtype: str
) -> None:
    import pyopencl as cl

    file, operator = tmp_path / "fused.json", operator_for(name, "odd", dtype)
    made = export(operator.problem, "opencl", file, cases=["odd"], dtype=dtype, device_class=device_class)
    for path, content in made.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tensors = random_tensors(operator, 0)
    for key, tensor in tensors.items():
        (tmp_path / f"{key}.raw").write_bytes(tensor.tobytes())
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libOpenCL" in line)
    platform = next(each for each in cl.get_platforms() if each.get_devices())
    subprocess.run([host, library, platform.name, file, tmp_path], check=True)
    result = np.frombuffer((tmp_path / "output.raw").read_bytes(), dtype).reshape(operator.output_shape)
    comparison = verify_result(operator, tensors, result)
    assert comparison.passed, comparison.reason


@pytest.mark.parametrize(
    ("to", "file", "options", "reason"),
    [
        ("tensara", "s.cu", {"device_class": "h10"}, "device class is 'h10'"),
        ("tensara", "s.cl", {}, "a file for tensara ends in .cu"),
        ("tensora", "s.cu", {}, "did you mean 'tensara'?"),
        ("tensara", "s.cu", {"cases": ["sampel"]}, "has no case 'sampel'"),
        ("opencl", "s.json", {"cases": ["sample", "odd"]}, "2 cases are given"),
        ("opencl", "s.json", {"precision": "tf32"}, "float32 or float64, and precision fp32"),
        ("opencl", "s.json", {"device_class": "h100"}, "device class is 'h100'"),
    ],
)
def test_what_cannot_be_exported(to: str, file: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        export(load_problem("conv-1d"), to, Path(file), **options)


def test_the_command_writes_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "fused.cu"
    assert cli.main(["export", "conv-1d", "--to", "cuda", "-o", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [str(target.with_suffix(".h")), str(target)]
    for line in ("// conv-1d: ", "precision fp32", "device class h100", "// Build: nvcc"):
        assert line in target.read_text()
    assert cli.main(["export", "conv-1d", "--to", "cuda", "-o", str(tmp_path / "no" / "s.cu")]) == 2
