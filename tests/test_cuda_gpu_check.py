"""The program that checks a machine with a GPU: what it makes of its steps' outcomes. Its steps run in a rehearsal."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
    yield importlib.import_module("gpu_check")
    sys.modules.pop("gpu_check")


def times(**kernel_ms: float) -> dict[str, Any]:
    return {"times": {name.replace("_", " "): {"kernel_ms": ms} for name, ms in kernel_ms.items()}}


def test_the_worst_ratio_comes_first_against_the_best_of_the_peers(program: ModuleType) -> None:
    outcomes = {
        "fast": times(ours_fp32=1.0, ours_tf32=0.5, torch_eager_fp32=8.0, torch_compile_fp32=4.0, torch_eager_tf32=3.0),
        "slow": times(ours_fp32=2.0, torch_eager_fp32=3.0),
        "alone": times(ours_fp32=1.0),
        "device": {"seconds": 1},
    }
    lines = program.summary(outcomes)
    assert [line.split()[1:3] for line in lines] == [["slow", "fp32:"], ["fast", "fp32:"], ["fast", "tf32:"]]
    assert [float(line.split("x")[0]) for line in lines] == [1.5, 4.0, 6.0]
    assert "torch compile fp32" in lines[1]


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        ({"seconds": 1}, True),
        ({"skipped": "no library"}, True),
        ({"passed": True}, True),
        ({"passed": False}, False),
        ({"error": "not done after 60 s"}, False),
    ],
)
def test_an_error_and_a_failure_fail_the_check(
    outcome: dict[str, Any], good: bool, program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = {"one": (60, lambda case: {}), "two": (60, lambda case: {})}
    monkeypatch.setattr(program, "steps", lambda: steps)
    monkeypatch.setattr(program, "run_child", lambda name, *_: outcome if name == "two" else {"passed": True})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "check.json")])
    assert program.main() == (0 if good else 1)
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["passed"] == good and report["steps"]["two"] == outcome
