"""The JSON documents of ``--json``: their text, and those that no object of the library makes itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatcher.problem.model import Problem
    from dispatcher.problem.operator import Operator
    from dispatcher.timing.results import Race

SCHEMA = 1  # of every document; raised when a key changes its meaning or goes away


def as_text(command: str | None, content: Mapping[str, Any]) -> str:
    """A document as text."""
    document = {"schema": SCHEMA, "command": command, **content}
    return json.dumps(_json_ready(document), indent=2, allow_nan=False)


def _json_ready(value: Any) -> Any:
    """``value`` with numbers that JSON does not have as texts: ``"nan"``, ``"inf"``, ``"-inf"``."""
    match value:
        case Mapping():
            return {str(key): _json_ready(part) for key, part in value.items()}
        case list() | tuple():
            return [_json_ready(part) for part in value]
        case float() if not math.isfinite(value):
            return str(float(value))
        case str() | bool() | int() | float() | None:
            return value
        case _:  # a NumPy number among a backend's facts, for instance
            return _json_ready(value.item()) if hasattr(value, "item") else str(value)


# ---- problems ----------------------------------------------------------------------------------------------
def problems_document(problems: Sequence[Problem]) -> dict[str, Any]:
    """The names of problems, and what they are."""
    from dispatcher.problem.messages import picked

    fields = ("name", "title", "origin", "rank", "group")
    return {"problems": [{**picked(each, *fields), "cases": list(each.cases)} for each in problems]}


def problem_document(problem: Problem) -> dict[str, Any]:
    """All that a problem file says, with what can be given for several parameters at once."""
    from dispatcher.problem.arguments import shorthands
    from dispatcher.problem.messages import picked

    parameters = [
        {
            **picked(parameter, "name", "type"),
            "input": parameter.type != "tensor" or parameter.const,
            "shape": None if parameter.shape is None else [_extent(extent) for extent in parameter.shape],
            **picked(parameter, "default", "unused"),
        }
        for parameter in problem.parameters
    ]
    steps = [
        {
            **picked(step, "op", "source", "result"),
            "fields": {key: _field(key, step.fields[key], problem.rank) for key in step.fields},
        }
        for step in problem.pipeline
    ]
    return {
        **picked(problem, "name", "title", "origin", "note", "rank"),
        "path": None if problem.path is None else str(problem.path),
        "tolerance": problem.tolerance,
        "parameters": parameters,
        "pipeline": steps,
        "cases": problem.cases,
        "shorthands": shorthands(problem),
    }


def _extent(value: Any) -> int | str:
    """An integer expression: a number where it is one, else its text."""
    text = str(value)
    return int(text) if text.isdecimal() else text


def _field(name: str, value: Any, rank: int) -> Any:
    """A step's field: expressions as texts, axes by name."""
    from dispatcher.ops.steps import axis_names

    if name in ("axis", "along") and isinstance(value, tuple):
        names = axis_names(rank)
        whole = next((axis for axis, numbers in names.items() if numbers == value), None)
        return whole or [axis for axis, numbers in names.items() if len(numbers) == 1 and numbers[0] in value]
    if isinstance(value, tuple):
        return [_field("", part, rank) for part in value]
    return value if isinstance(value, int | float | str) else _extent(value)


# ---- benchmarks --------------------------------------------------------------------------------------------
def bench_document(bound: Sequence[tuple[Operator, str | None]], races: Sequence[Race]) -> dict[str, Any]:
    """What ``bench`` measured: a race for each operator with its case."""
    from dispatcher.problem.messages import picked
    from dispatcher.timing.racing import environment, protocol

    runs = [(operator.problem.name, case, race) for (operator, case), race in zip(bound, races, strict=True)]
    failures = [
        {"problem": name, "device": failure.name, "reason": failure.reason}
        for name, _, race in runs
        for failure in race.failures
    ]
    return {
        **environment(),
        "protocol": protocol(),
        "results": [{**each.as_dict(), "case": case} for _, case, race in runs for each in race.results],
        "peers": [{**each.as_dict(), "case": case} for _, case, race in runs for each in race.peers],
        "failures": failures,
        "races": [
            {"problem": name, "case": case, **picked(race, "rounds", "settled", "foreign_cores")}
            for name, case, race in runs
        ],
    }
