"""The programs in the guides run as they stand."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import MAXMAX

import dispatcher
from dispatcher import cli
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.interface import Device
from dispatcher.ops import vocabulary
from dispatcher.ops.geometry import ConvGeometry

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_s_programs_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISPATCHER_DEVICE", "numpy")
    first, second = python_blocks("README.md")
    namespace: dict[str, Any] = {}
    exec(first, namespace)
    assert namespace["y"].shape == (2, 6, 13, 17, 21)
    tensors = {"input": (2, 4, 7, 8, 9), "kernel": (4, 6, 5, 5, 5), "conv_bias": (6,)}
    x, w, b = (np.ones(shape, np.float32) for shape in tensors.values())
    # Checking every device takes too long here; what matters is that the call is right.
    exec(second.replace('verify(case="sample")', 'verify(case="sample", device="numpy")'),
         {"dispatcher": dispatcher, "x": x, "w": w, "b": b})  # fmt: skip
    assert "reference" in capsys.readouterr().out


def test_the_readme_names_every_problem_and_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in dispatcher.problems():
        assert f"`{name}`" in text
    for command in ("devices", "problems", "show", "run", "explain", "verify", "bench", "doctor"):
        assert f"dispatcher {command}" in text


def scatter(x: np.ndarray, weight: np.ndarray, geometry: ConvGeometry, output: np.ndarray) -> None:
    """A transposed convolution, one tap at a time."""
    sizes = [axis.dilation * (axis.kernel - 1) + 1 + (axis.input - 1) * axis.stride for axis in geometry.axes]
    whole = np.zeros((geometry.batch, geometry.out_channels, *(s + 99 for s in sizes)))
    for tap in np.ndindex(*weight.shape[2:]):
        places = tuple(
            slice(k * axis.dilation, k * axis.dilation + (axis.input - 1) * axis.stride + 1, axis.stride)
            for k, axis in zip(tap, geometry.axes, strict=True)
        )
        whole[(slice(None), slice(None), *places)] += np.einsum("ncdhw,co->nodhw", x, weight[(..., *tap)])
    cut = (slice(axis.padding, axis.padding + axis.output) for axis in geometry.axes)
    output[...] = whole[(slice(None), slice(None), *cut)]


def test_the_guide_s_backend_works(install_backends: Install, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = python_blocks("docs/adding-a-backend.md")
    library = types.SimpleNamespace(list_devices=lambda: ["One", "Two"], conv_transpose3d=scatter)
    namespace: dict[str, Any] = {"my_library": library}
    exec(program, namespace)
    install_backends(namespace["BACKEND"])
    conv = "conv-transpose-3d-asym-input-sq-kernel"
    for case in ("gaps", "dilated", "pointwise"):
        assert cli.main(["run", conv, "--device", "mine:two", "--case", case]) == 0
    capsys.readouterr()
    assert cli.main(["run", conv, "--device", "mine", "--case", "odd"]) == 3
    assert "only convolutions without bias and groups" in capsys.readouterr().err
    assert cli.main(["run", MAXMAX]) == 0
    assert "skipped   mine:1" in capsys.readouterr().out


def test_the_guide_s_steps_run_everywhere(backend_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that stand in the table and in the reference, and nowhere else."""
    for table in (vocabulary.VOCABULARY, reference_steps.POINTWISE, reference_steps.REDUCTIONS):
        for name in ("softshrink", "mean_square", "tanhshrink"):
            monkeypatch.setitem(table, name, None)  # gone again when the test ends
    program = "\n".join(python_blocks("docs/adding-a-step.md"))
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
