"""Cutting pipelines into groups: a group takes what it can, and stores every value that is read after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dispatcher.ops.binding import Binding, Bound
from dispatcher.ops.steps import ScalarOperand
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.plan.groups import Flow, split
from dispatcher.problem.operator import Operator
from tests.strategies import operator_of

SHAPE = (2, 3, 2, 3, 4)


class Greedy:
    """Takes any step that ``refuses`` does not name."""

    def __init__(self, operator: Operator, first: int, refuses: Callable[[str], bool]) -> None:
        self.operator, self.first, self.last, self.note = operator, first, first, ""
        self.refuses = refuses

    def take(self, index: int) -> str | None:
        assert index == self.last + 1
        op = self.operator.steps[index].op
        if self.refuses(op):
            return f"{op} is not wanted"
        self.last = index
        return None


def cut(pipeline: list[Any], refuses: str = "") -> list[tuple[str, str]]:
    """Names of the steps of each group, and why it ends."""
    operator = operator_of({"x": SHAPE, "t": SHAPE} if "'t'" in repr(pipeline) else {"x": SHAPE}, pipeline)
    groups = split(operator, lambda first: Greedy(operator, first, refuses.split().__contains__))
    assert [g.first for g in groups] == [0, *(g.last + 1 for g in groups[:-1])]
    assert groups[-1].last == len(operator.steps) - 1
    return [(" ".join(s.op for s in operator.steps[g.first : g.last + 1]), g.note) for g in groups]


def test_a_group_takes_what_it_can() -> None:
    assert cut(["relu", "gelu", {"op": "add", "value": "t"}]) == [("relu gelu add", "")]
    assert cut(["relu", "gelu", {"op": "add", "value": "t"}], "gelu") == [
        ("relu", "gelu is not wanted"),
        ("gelu add", ""),
    ]


def test_a_value_may_be_read_again_inside() -> None:
    pipeline = [{"op": "relu", "as": "r"}, "gelu", {"op": "add", "value": "r"}, {"op": "scale", "by": "t"}]
    assert cut(pipeline) == [("relu gelu add scale", "")]


def test_a_value_that_is_read_after_the_group_ends_it() -> None:
    pipeline = ["tanh", {"op": "relu", "as": "r"}, "gelu", "abs", {"op": "add", "value": "r"}, "square"]
    assert cut(pipeline, "add") == [
        ("tanh relu", "the result of relu is read again later"),
        ("gelu abs", "add is not wanted"),
        ("add square", ""),
    ]


def test_a_step_that_reads_an_earlier_value_begins_a_group() -> None:
    pipeline = [{"op": "relu", "as": "r"}, {"op": "mean", "axis": "spatial", "as": "m"},
                {"op": "subtract", "from": "r", "value": "m"}, "abs"]  # fmt: skip
    assert cut(pipeline) == [
        ("relu", "the result of relu is read again later"),
        ("mean", "subtract reads an earlier value"),
        ("subtract abs", ""),
    ]


def test_who_reads_what() -> None:
    pipeline = [{"op": "relu", "as": "r"}, {"op": "scale", "by": "r"}, {"op": "add", "value": "x"}]
    operator = operator_of({"x": SHAPE}, pipeline)
    flow = Flow(operator)
    assert flow.last_reader == {0: 2, 1: 1, 2: 2}
    assert flow.open_values(0, 0) == [] and flow.open_values(0, 1) == []


def test_a_builder_s_slip_is_noticed() -> None:
    pipeline = Bound(VOCABULARY, [SHAPE])
    with pytest.raises(TypeError, match="divide takes no value; expected by"):
        Binding("new", 1, 0, {}, pipeline).then("divide", value=ScalarOperand(2.0))
