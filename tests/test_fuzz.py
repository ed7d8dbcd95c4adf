"""The program that looks for wrong results finds those that are there."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from dispatcher.call.compiled import CompiledOperator
from tests import fuzz

NUMBER = 5  # an example whose calls are broken off


def test_an_example_is_the_same_each_time() -> None:
    first, second = (fuzz.draw(NUMBER).bind() for _ in range(2))
    assert first == second
    names = [fuzz.inputs(first, np.random.default_rng(NUMBER)) for _ in range(2)]
    assert names[0][0] == names[1][0]
    np.testing.assert_array_equal(names[0][1][first.source], names[1][1][first.source])


def test_decades() -> None:
    """Twenty of them, in one tensor or another."""
    operator = next(op for op in (fuzz.draw(n).bind() for n in range(20)) if op.dtype == "float32")
    magnitudes = np.abs(
        np.concatenate([fuzz.spread(operator, np.random.default_rng(n))["x"].ravel() for n in range(9)])
    )
    smallest, largest = magnitudes[magnitudes > 0.0].min(), magnitudes.max()
    assert largest / smallest > 1e15


def found(monkeypatch: pytest.MonkeyPatch, call: Any) -> bool:
    """Does the program find that calls are made this way?"""
    monkeypatch.setattr(CompiledOperator, "__call__", call)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--device", "numpy", "--only", str(NUMBER)])
    return fuzz.main() == 1


honest = CompiledOperator.__call__


def test_nothing_is_found_where_all_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(monkeypatch, honest)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(monkeypatch, lambda self, **arguments: 1.001 * honest(self, **arguments))
    assert f"--device numpy --only {NUMBER}" in capsys.readouterr().out


def test_what_a_broken_call_leaves_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks its arguments as seen before it has their result."""
    kept: dict[str, Any] = {}

    def forgetful(self: CompiledOperator, **arguments: Any) -> Any:
        seen = [id(value) for value in arguments.values()]
        if kept.get("seen") != seen:
            kept["seen"] = seen
            kept["result"] = honest(self, **arguments)
        return kept["result"]

    assert found(monkeypatch, forgetful)
