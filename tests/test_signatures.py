"""Names of the interface that no parameter may have, and sizes that no table may have."""

from __future__ import annotations

import inspect
import time

import pytest

import dispatcher
from dispatcher.errors import GeometryError
from dispatcher.ops.geometry import MAX_PHASES, MAX_TAPS, AxisGeometry
from dispatcher.problem.arguments import shorthands
from dispatcher.problem.schema import INTERFACE_NAMES

CALLS = (
    dispatcher.run,
    dispatcher.compile,
    dispatcher.explain,
    dispatcher.verify,
    dispatcher.verify_kernel,
    dispatcher.tune_problem,
    dispatcher.benchmark,
    dispatcher.CompiledOperator.__call__,
    dispatcher.CompiledOperator.prepare,
    dispatcher.CompiledOperator.explain,
)


def test_every_argument_of_the_interface_is_reserved_and_nothing_else() -> None:
    names = {
        name
        for call in CALLS
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert names - {"output", "kernel"} == INTERFACE_NAMES  # output may be the result's name, and kernel a tensor's


def test_no_shorthand_of_the_bundled_problems_hides_a_parameter_or_an_argument() -> None:
    for problem in map(dispatcher.load_problem, dispatcher.problems()):
        assert not set(shorthands(problem)) & ({parameter.name for parameter in problem.parameters} | INTERFACE_NAMES)


@pytest.mark.parametrize(("field", "most"), [("stride", MAX_PHASES), ("kernel", MAX_TAPS)])
def test_a_geometry_of_any_size_ends_at_once(field: str, most: int) -> None:
    start = time.perf_counter()
    sizes = {"kernel": 3, "stride": 2, field: most}
    axis = AxisGeometry("width", 2, sizes["kernel"], sizes["stride"])
    assert len(axis.phases) == axis.stride
    assert sum(len(phase.taps) for phase in axis.phases) == axis.kernel
    assert sum(phase.count for phase in axis.phases) == axis.output
    assert axis.most_taps == max(len(phase.taps) for phase in axis.phases)
    for size in (most + 1, 10**9, 2**63 - 1):
        sizes[field] = size
        with pytest.raises(GeometryError, match=f"{field} on axis width is {size}; it must be {most} or less"):
            AxisGeometry("width", 2, sizes["kernel"], sizes["stride"])
    assert time.perf_counter() - start < 5
