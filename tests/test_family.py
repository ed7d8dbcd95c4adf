"""Every bundled problem: on NumPy against stored values of PyTorch, and its sample on every device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import TELLING_SETS, meaningful_sets, random_tensors
from dispatcher.problem.loader import load_problem, problem_names
from tests import large
from tests.family import CASES, drawn_tensors, kept, operator_for
from tests.strategies import DEVICES, Place, call_on

STORED = np.load(Path(__file__).parent / "data" / "family_reference.npz")
ENTRIES: dict[str, Any] = json.loads(str(STORED["index"]))["entries"]

#: Whose result does not depend on the inputs, nor on other tensors than its last bias.
CONSTANT = ("conv3d-groupnorm-min-clamp-dropout",)


def assert_as_stored(entry: str, result: np.ndarray, rtol: float) -> None:
    """Close to what PyTorch computed, in relation to the largest value."""
    values = STORED[entry]
    assert list(result.shape) == ENTRIES[entry]["shape"]
    np.testing.assert_allclose(kept(result), values, rtol=0, atol=rtol * max(np.abs(values).max(), 1e-3))


def test_every_problem_has_stored_values() -> None:
    assert set(ENTRIES) == {f"{name}/{case}" for name in problem_names() for case in CASES}


@pytest.mark.parametrize("name", problem_names())
def test_the_reference_computes_what_pytorch_does(name: str) -> None:
    for case in CASES:
        operator = operator_for(name, case, "float64")
        assert {**operator.sizes, **operator.scalars} == ENTRIES[f"{name}/{case}"]["numbers"]
        tensors = {key: array.astype(np.float64) for key, array in drawn_tensors(operator, case).items()}
        assert_as_stored(f"{name}/{case}", call_on(operator, tensors, "numpy")(), 1e-12)


@pytest.mark.parametrize("name", problem_names())
@pytest.mark.parametrize("place", {place.backend: place for place in reversed(DEVICES)}.values(), ids=str)
def test_sample(place: Place, name: str) -> None:
    operator = operator_for(name, "sample")
    result, comparison = place.check(operator, drawn_tensors(operator, "sample"))
    assert comparison.passed, comparison.reason
    assert_as_stored(f"{name}/sample", result, 1e-4)


@pytest.mark.parametrize("name", [name for name in problem_names() if name not in CONSTANT])
def test_nothing_but_the_result_passes(name: str) -> None:
    """Published inputs let zeros, one number or the result of other inputs pass for some of the problems; ours do
    not, not even the few that large operators are checked with."""
    operator = operator_for(name, "odd")
    kinds = [kind for kind in meaningful_sets(operator) if kind in TELLING_SETS]
    wrong: dict[str, list[bool]] = {}
    for kind in kinds:
        tensors, others = (random_tensors(operator, seed, kind=kind) for seed in (0, 1))
        result, other = (call_on(operator, each, "numpy")() for each in (tensors, others))
        for fault, array in {"zeros": result * 0, "mean": result * 0 + result.mean(), "other": other}.items():
            wrong.setdefault(fault, []).append(verify_result(operator, tensors, array).passed)
    assert not any(all(passed) for passed in wrong.values()), wrong


def test_the_c_parameters_have_the_order_of_the_file() -> None:
    names = [parameter.name for parameter in load_problem("conv-transpose2d-maxpool-hardtanh-mean-tanh").parameters]
    assert names[-4:] == ["maxpool_kernel", "maxpool_stride", "hardtanh_min", "hardtanh_max"]


# ---- published sizes ---------------------------------------------------------------------------------------
def test_large_cases_are_checked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["conv-1d", "conv2d-mish-mish"]
    monkeypatch.setattr(large, "published", lambda name: (operator_for(name, "sample"), "sample"))
    monkeypatch.setattr(large, "lacking_memory", lambda operator: "too large" if operator.problem.rank == 1 else None)
    options = ["--lines", str(tmp_path / "lines"), "--device", "numpy", "--only", *names]
    assert large.main(options) == 0
    assert json.loads(capsys.readouterr().out)["passed"] == 1
    assert large.main(options) == 0
    assert "1 of 1, conv-1d" in capsys.readouterr().err
    monkeypatch.setattr(large, "lacking_memory", lambda operator: None)
    monkeypatch.setattr(large, "verify_operators", wrongly(large.verify_operators))
    assert large.main([*options, "--again"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 2


def wrongly(verify: Callable[..., Any]) -> Callable[..., Any]:
    """A verification in which every check failed."""

    def call(*arguments: Any) -> Any:
        (found,) = verify(*arguments)
        return [replace(found, checks=tuple(replace(check, outcome="failed") for check in found.checks))]

    return call
