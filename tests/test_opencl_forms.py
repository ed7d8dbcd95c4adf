"""The operator table is all that this backend knows of an operation: what is added there runs, fused and alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.numpy_ref import steps as reference
from dispatcher.ops.binding import Field, Operation, pointwise, reduction
from dispatcher.ops.binding import pool as pool_of
from dispatcher.ops.forms import MAX, PRODUCT, SUM, PointwiseForm, ReductionForm
from dispatcher.ops.steps import Pool, Step
from dispatcher.ops.vocabulary import VOCABULARY
from tests.strategies import PLACES, Place, conv_operator, operator_of, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND

HERE = [place for place in PLACES if place.backend == "opencl"]
everywhere = pytest.mark.parametrize("place", HERE, ids=str)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that nobody else has heard of."""
    scaled = PointwiseForm("scaled_cube", "x * squared * a", let=(("squared", "x * x"),), arguments=1)
    forms = {
        "sum_abs": ReductionForm("sum_abs", SUM, lift="abs_v(x)"),
        "root_mean_square": ReductionForm("root_mean_square", SUM, lift="x * x", finish="sqrt_v(t * share)"),
        "product_of_halves": ReductionForm("product_of_halves", PRODUCT, lift="x * C(0.5)"),
        "largest_size": ReductionForm("largest_size", MAX, lift="abs_v(x)"),
    }
    functions: dict[str, Any] = {
        "sum_abs": lambda x, axis: np.abs(x).sum(axis, keepdims=True),
        "root_mean_square": lambda x, axis: np.sqrt((x * x).mean(axis, keepdims=True)),
        "product_of_halves": lambda x, axis: (0.5 * x).prod(axis, keepdims=True),
        "largest_size": lambda x, axis: np.abs(x).max(axis, keepdims=True),
    }
    monkeypatch.setitem(VOCABULARY, "scaled_cube", pointwise(scaled, "", Field("by", "operand", "", default=1.0)))
    monkeypatch.setitem(reference.POINTWISE, "scaled_cube", lambda x, by: x * x * x * by)
    for name, form in forms.items():
        monkeypatch.setitem(VOCABULARY, name, reduction(form, ""))
        monkeypatch.setitem(reference.REDUCTIONS, name, functions[name])


def close(place: Place, operator: Any) -> None:
    tensors = tensors_of(operator)
    expected = Place("numpy").run(operator.problem, **tensors)
    result = place.run(operator.problem, **tensors)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5 * np.abs(expected).max())


REDUCTIONS = ("sum_abs", "root_mean_square", "product_of_halves", "largest_size", "product", "min")


@everywhere
def test_a_new_pointwise_step_runs_everywhere(place: Place) -> None:
    cube = {"op": "scaled_cube", "by": "t"}
    close(
        place,
        conv_operator(
            (2, 4, 3, 4, 9),
            5,
            (2, 3, 3),
            before=["scaled_cube"],
            after=["scaled_cube", "layer_norm", {"op": "scaled_cube", "by": -0.5}],
        ),
    )
    close(place, operator_of({"x": (2, 3, 4, 5, 19), "t": (3, 1, 1, 1)}, [cube, "gelu", cube]))


@pytest.mark.parametrize("op", REDUCTIONS)
@everywhere
def test_a_new_reduction_runs_everywhere(place: Place, op: str) -> None:
    """Over channels behind a convolution, and over any axes in a launch of its own."""
    over = {"op": op, "axis": ["channel"]}
    close(place, conv_operator((2, 4, 3, 4, 9), 5, (2, 3, 3), stride=2, bias=True, after=[over, "gelu"]))
    for axes in (["height", "width"], ["batch", "channel", "depth"], ["spatial", "channel"], ["depth"]):
        close(place, operator_of({"x": (3, 2, 2, 3, 19)}, [{"op": op, "axis": axes}, "relu"]))


UFUNCS = {"sum_abs": np.add, "root_mean_square": np.add, "min": np.minimum, "product": np.multiply}


@pytest.mark.parametrize("op", UFUNCS)
@everywhere
def test_a_new_pool_runs_everywhere(place: Place, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a launch of its own and, where it is plain, folded into a convolution."""
    form = form_of(op)
    new = Operation(VOCABULARY["max_pool3d"].fields, pool_of(form), "")
    monkeypatch.setitem(VOCABULARY, "new_pool3d", new)

    def pooled(step: Pool, x: np.ndarray) -> np.ndarray:
        lifted = {"sum_abs": np.abs, "root_mean_square": np.square}.get(op, lambda each: each)(x)
        total = reference.windows(step, lifted, UFUNCS[op])
        return np.sqrt(total / 8) if op == "root_mean_square" else total

    monkeypatch.setitem(reference.TABLE, Pool, pooled)
    pool = {"op": "new_pool3d", "window": [2, 2, 2]}
    close(place, operator_of({"x": (2, 3, 4, 5, 37)}, [pool, "relu"]))
    close(place, conv_operator((2, 4, 3, 4, 9), 5, (2, 3, 3), stride=2, after=[pool, "relu"]))


def form_of(op: str) -> ReductionForm:
    step = operator_of({"x": (1, 2, 1, 1, 1)}, [{"op": op, "axis": "channel"}]).steps[0]
    return step.form  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Strange(Step):
    """A step that no kernel is for."""


def test_what_has_no_form_here_is_declined_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = BACKEND.probe()[0]
    strange = Operation((), lambda binding: binding.append(Strange(**binding.base(binding.input_shape))), "")
    monkeypatch.setitem(VOCABULARY, "strange", strange)
    operator = operator_of({"x": (1, 2, 3, 4, 5)}, ["strange"])
    reason = BACKEND.supports(operator, device)
    assert reason is not None and "strange" in reason and "opencl" in reason
    shifted = Operation(VOCABULARY["max_pool3d"].fields, pool_of(form_of("log_sum_exp")), "")
    monkeypatch.setitem(VOCABULARY, "shifted_pool3d", shifted)
    operator = operator_of({"x": (1, 2, 4, 4, 4)}, [{"op": "shifted_pool3d", "window": 2}])
    assert isinstance(operator.steps[0], Pool)
    reason = BACKEND.supports(operator, device)
    assert reason is not None and "shifted_pool3d" in reason and "opencl" in reason
