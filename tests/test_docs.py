"""The programs in the guides run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import MAXMAX

import dispatcher
from dispatcher import cli
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.interface import Device
from dispatcher.ops import vocabulary

ROOT = Path(__file__).resolve().parent.parent


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_readme_s_programs_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DISPATCHER_DEVICE", "numpy")
    first, second = blocks("README.md", "python")
    namespace: dict[str, Any] = {}
    exec(first, namespace)
    assert namespace["y"].shape == (2, 6, 13, 17, 21)
    tensors = {"input": (2, 4, 7, 8, 9), "kernel": (4, 6, 5, 5, 5), "conv_bias": (6,)}
    x, w, b = (np.ones(shape, np.float32) for shape in tensors.values())
    # Checking every device takes too long here; what matters is that the call is right.
    exec(second.replace('verify(case="sample")', 'verify(case="sample", device="numpy")'),
         {"dispatcher": dispatcher, "x": x, "w": w, "b": b})  # fmt: skip
    assert "reference" in capsys.readouterr().out


def test_the_readme_counts_the_problems_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [dispatcher.load_problem(name).group for name in dispatcher.problems()]
    assert f"{len(found)} problems" in text
    for group in set(found):
        assert f"| `{group}` | {found.count(group)} |" in text
    for command in ("devices", "problems", "show", "run", "explain", "verify", "bench", "doctor", "export", "map"):
        assert f"dispatcher {command}" in text


def test_targets_and_files_that_the_contributing_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"run", "quick", "test", "check"} <= set(re.findall(r"`make ([a-z]+)`", text)) | {"run"} <= set(targets)
    files = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"\b((?:tests|bench)/\w+\.py)\b", text)
    assert len(files) > 8
    for file in files:
        assert (ROOT / file).is_file(), file


@pytest.fixture(scope="module")
def taps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the backend of docs/adding-a-backend.md is installed, from the two files of the page."""
    (program,), (project,) = (blocks("docs/adding-a-backend.md", kind) for kind in ("python", "toml"))
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "taps_backend.py").write_text(program, encoding="utf-8")
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, cwd=source)
    return target


def test_the_guide_s_backend_works_as_its_page_says(
    taps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (commands,) = (block for block in blocks("docs/adding-a-backend.md", "") if "dispatcher verify" in block)
    install, *others = commands.splitlines()
    assert install == "pip install ."  # what the fixture did
    paths = os.pathsep.join([str(taps), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}
    printed = []
    for command in others:
        program, *words = shlex.split(command)
        assert program == "dispatcher"
        child = [sys.executable, "-m", "dispatcher.cli", *words]
        subprocess.run(child, check=True, env=environment, cwd=tmp_path)
        printed.append(capfd.readouterr().out)
    devices, verified, explained = printed
    assert re.search(r"^taps:0 .*NumPy, tap by tap", devices, re.MULTILINE)
    assert re.search(r"taps:0 .*pass", verified)
    assert "conv_transpose3d" in explained


def test_the_guide_s_backend_runs_what_it_supports_and_says_what_not(
    taps: Path, install_distributions: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install_distributions(taps)
    conv = "conv-transpose-3d-asym-input-sq-kernel"
    for case in ("gaps", "dilated", "pointwise"):
        assert cli.main(["run", conv, "--device", "taps:tap by tap", "--case", case]) == 0
    capsys.readouterr()
    assert cli.main(["run", conv, "--device", "taps", "--case", "odd"]) == 3
    assert "only convolutions without bias and groups" in capsys.readouterr().err
    assert cli.main(["run", conv, "--device", "taps", "--case", "gaps", "--algorithm", "fma"]) == 2
    assert "unknown to taps" in capsys.readouterr().err
    assert cli.main(["run", MAXMAX, "--device", "taps,numpy"]) == 0
    assert "skipped   taps:0" in capsys.readouterr().out


def test_the_guide_s_steps_run_everywhere(backend_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that stand in the table and in the reference, and nowhere else."""
    for table in (vocabulary.VOCABULARY, reference_steps.POINTWISE, reference_steps.REDUCTIONS):
        for name in ("softshrink", "mean_square", "tanhshrink"):
            monkeypatch.setitem(table, name, None)  # gone again when the test ends
    program = "\n".join(blocks("docs/adding-a-step.md", "python"))
    call = 'dispatcher.verify(problem, case="sample")'
    assert call in program
    namespace: dict[str, Any] = {}
    exec(program.replace(call, f"{call[:-1]}, device={backend_device.id!r})"), namespace)
    (result,) = namespace["results"]
    assert result.device.id == backend_device.id
    alone = {**namespace["problem"], "pipeline": ["softshrink", {"op": "mean_square", "axis": "spatial"}]}
    alone["parameters"] = [p for p in alone["parameters"] if p["name"] not in ("w", "outs")]
    alone["cases"] = {"sample": {"batch": 2, "ins": 4}}
    (result,) = dispatcher.verify(alone, case="sample", device=backend_device.id)
    assert result.outcome == "passed", result.reason
