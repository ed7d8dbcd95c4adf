"""What is exported: operators of some cases, and the problem bound to symbols, for all other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from dispatcher.errors import InputError
from dispatcher.interface import ExportRequest
from dispatcher.ops.symbols import ScalarSymbol, Symbol
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator, bind, check_c_type
from dispatcher.problem.userkernel import spelled

#: The case that is taken where none is named: what others publish times of.
PUBLISHED = ("kernelbench", "sample")


def make_request(
    problem: Problem, cases: Sequence[str], dtype: str | None, precision: str, device_class: str, *, general: bool
) -> ExportRequest:
    """What to export of ``problem``.

    Args:
        cases: named cases; none for the published one.
        dtype: of every tensor; float32 if None.
        precision: ``fp32`` or ``tf32``.
        device_class: what the cases are tuned for; empty for the backend's usual one.
        general: other sizes are wanted too.

    Raises:
        InputError: the problem has no such case, or none at all.
    """
    named = list(dict.fromkeys(cases)) or [name for name in PUBLISHED if name in problem.cases][:1]
    if not named:
        raise InputError(f"{problem.name} has neither a case {' nor '.join(PUBLISHED)}; name one with --case")
    check_c_type(dtype, "an exported program")
    operators = {
        name: bind_numbers(problem, {}, "export", case=name, dtype=dtype, precision=precision) for name in named
    }
    first = operators[named[0]]
    return ExportRequest(problem, operators, tuple(_for_any_sizes(first)) if general else (), device_class)


def _for_any_sizes(operator: Operator) -> Iterator[tuple[Mapping[str, int], Operator]]:
    """The operator's problem bound to symbols, for each value of the sizes that are numbers of axes."""
    problem = operator.problem
    axes = {
        value: len(operator.steps[0].shape)
        for step in problem.pipeline
        for each in VOCABULARY[step.op].fields
        if each.kind == "axes" and isinstance(value := step.fields.get(each.name), str)
    }
    sizes = {name: Symbol(value, f"a.{spelled(name, 'cu')}") for name, value in operator.sizes.items()}
    scalars = {name: ScalarSymbol(value, f"a.{spelled(name, 'cu')}") for name, value in operator.scalars.items()}
    for values in itertools.product(*map(range, axes.values())):
        fixed = dict(zip(axes, values, strict=True))
        try:
            bound = bind(problem, {**sizes, **fixed}, scalars, dtype=operator.dtype, precision=operator.precision)
        except InputError:
            if not fixed:
                raise
            continue  # the problem has no such axis
        yield fixed, bound
