"""Operators that are bound to symbols: what their texts say of other sizes is what binding says of these."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from dispatcher.export.request import make_request
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.ops.symbols import ScalarSymbol, Symbol, larger, smaller
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.loader import load_problem, problem_names
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import spelled

WORDS = {"smaller": min, "larger": max, "floor_div": lambda a, b: a // b, "INFINITY": float("inf")}


def numbers(value: Any, space: dict[str, Any]) -> Any:
    """All of a step, with the numbers that its symbols' texts are in ``space``."""
    if isinstance(value, Symbol | ScalarSymbol):
        return eval(value.text, space)
    if isinstance(value, tuple):
        return tuple(numbers(each, space) for each in value)
    if dataclasses.is_dataclass(value):
        found = {each.name: numbers(getattr(value, each.name), space) for each in dataclasses.fields(value)}
        more = {"output": numbers(value.output_shape, space)} if isinstance(value, ConvGeometry) else {}
        return type(value), found, more
    return value


def compared(problem: Problem, traced: str, others: list[str]) -> None:
    request = make_request(problem, [traced], None, "fp32", "", general=True)
    for case in others:
        operator = bind_numbers(problem, {}, "compare", case=case)
        known = {spelled(name, "cu"): value for name, value in {**operator.sizes, **operator.scalars}.items()}
        space = {**WORDS, "a": types.SimpleNamespace(**known)}
        (symbolic,) = (
            bound for fixed, bound in request.general if all(operator.sizes[name] == at for name, at in fixed.items())
        )
        assert numbers(shapes(symbolic), space) == shapes(operator)
        for step, wanted in zip(symbolic.steps, operator.steps, strict=True):
            assert numbers(step, space) == numbers(wanted, {})


def shapes(operator: Operator) -> tuple[Any, ...]:
    return (operator.output_shape, *operator.tensor_shapes.values())


@pytest.mark.parametrize("name", problem_names())
def test_the_texts_hold_for_other_sizes(name: str) -> None:
    problem = load_problem(name)
    compared(problem, "sample", list(problem.cases))
    compared(problem, "odd", ["sample"])


def test_arithmetic_makes_texts() -> None:
    n = Symbol(7, "n")
    made = [n + 0, 1 * n, n // 1, n - 2, 2 - n, -n, 3 * n // 2, -(-n // 2), smaller(n, 3), larger(2, n), smaller(2, 3)]
    assert [int(each) for each in made] == [7, 7, 7, 5, -5, -7, 10, 4, 3, 7, 2]
    texts = [each.text for each in made if isinstance(each, Symbol)]
    assert texts[:6] == ["n", "n", "n", "(n - 2)", "(2 - n)", "(0 - n)"]
    assert [eval(text, {**WORDS, "n": 9}) for text in texts] == [9, 9, 9, 7, -7, -9, 13, 5, 3, 9]
