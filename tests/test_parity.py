"""Every backend, device and algorithm agrees with the reference on every case of five problems."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import DTYPES, Operator
from tests.family import FIVE
from tests.strategies import PLACES, Place, conv_operator, every_device, every_place, tensors_of

#: Cases too large for a test (as are the published ones, whose names have spaces), those that every problem has, and
#: the one that shows most.
LARGE = ("kernelbench",)
SMALL = ("sample", "odd")
TELLING = ("odd",)


def short(name: str) -> str:
    """A problem's name without what all of them share."""
    for prefix in ("conv-transpose3d-", "conv-transpose-3d-"):
        name = name.removeprefix(prefix)
    return name.replace("-", "_")


def worth_it(place: Place, case: str, dtype: str) -> bool:
    """False for a combination that costs more to compile than it shows.

    Every way of computing runs some case of every problem in every dtype. float16 runs float32's kernels between two
    conversions; float64 is a build of its own.
    """
    if case in LARGE or " " in case or (place.precision == "tf32" and dtype != "float32"):
        return False
    if place.slow and not place.main and case not in SMALL:
        return False
    return dtype != "float64" or case in TELLING or (place.main and not place.slow)


def combinations() -> list[Any]:
    """Place, problem, case and dtype."""
    found = []
    for place, name in product(PLACES, FIVE):
        for case, dtype in product(load_problem(name).cases, DTYPES):
            if worth_it(place, case, dtype):
                kind = str(place).removeprefix(place.device)
                label = f"{place.device}-{short(name)}-{case}{kind}-{dtype}"
                found.append(pytest.param(place, name, case, dtype, id=label))
    return found


def operator_for(name: str, case: str, dtype: str) -> Operator:
    problem = load_problem(name)
    return bind_arguments(problem, sort_arguments(problem, {}), case=case, dtype=dtype)


@pytest.mark.parametrize(("place", "name", "case", "dtype"), combinations())
def test_parity(place: Place, name: str, case: str, dtype: str) -> None:
    operator = operator_for(name, case, dtype)
    result, comparison = place.check(operator, tensors_of(operator))
    assert comparison.passed, comparison.reason
    assert result.dtype == dtype and result.flags.c_contiguous


@pytest.mark.parametrize("kind", ["large_mean", "constant", "one_nan", "one_inf", "denormal"])
@pytest.mark.parametrize("name", FIVE)
@every_place
def test_parity_on_awkward_numbers(place: Place, name: str, kind: str) -> None:
    operator = operator_for(name, "sample", "float32")
    _, comparison = place.check(operator, tensors_of(operator, kind))
    assert comparison.passed, comparison.reason


@pytest.mark.parametrize("name", FIVE)
@every_place
def test_an_empty_batch_gives_an_empty_result(place: Place, name: str) -> None:
    operator = operator_for(name, "sample", "float32")
    tensors = tensors_of(operator)
    tensors[operator.source] = tensors[operator.source][:0]
    sizes = {size: value for size, value in operator.sizes.items() if size != "batch_size"}
    result = place.run(name, **sizes, **operator.scalars, **tensors)
    assert result.shape == (0, *operator.output_shape[1:]) and result.dtype == np.float32


def pool(function: str, window: list[int]) -> dict[str, Any]:
    return {"op": f"{function}_pool3d", "window": window}


def over(op: str, axis: str) -> dict[str, Any]:
    return {"op": op, "axis": axis}


#: Sizes far from the usual ones: input, output channels, kernel, and the rest.
EXTREMES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = {
    "dilation_1000": ((1, 2, 2, 2, 2), 3, (2, 2, 2), {"dilation": [1000, 1, 50], "stride": [3, 1, 2]}),
    "many_phases": ((1, 2, 2, 2, 3), 3, (2, 2, 2), {"stride": [37, 1, 41], "bias": True}),
    "padding_beyond_the_input": ((2, 3, 2, 3, 2), 4, (9, 11, 9), {"padding": [4, 5, 4]}),
    "kernel_beyond_the_input": ((1, 2, 1, 1, 2), 3, (7, 5, 31), {}),
    "width_1": ((3, 5, 7, 9, 1), 6, (3, 3, 1), {}),
    "ragged_pools": (
        (2, 3, 4, 5, 7),
        6,
        (3, 3, 3),
        {"stride": [1, 2, 3], "after": [pool("avg", [3, 2, 3]), pool("avg", [1, 2, 2])]},
    ),
    "wide_window": ((2, 3, 1, 1, 400), 2, (1, 1, 3), {"before": [pool("avg", [1, 1, 130])]}),
    "channels_in_4099": ((1, 4099, 1, 1, 3), 5, (1, 2, 1), {"bias": True}),
    "groups_4099": ((1, 4099, 1, 2, 3), 4099, (1, 2, 2), {"groups": 4099, "stride": 2}),
    "channels_out_400000": ((1, 1, 1, 1, 1), 400000, (1, 1, 1), {"after": [over("log_sum_exp", "channel")]}),
    "norm_of_400000": ((1, 1, 1, 1, 1), 400000, (1, 1, 1), {"after": [over("layer_norm", "channel")]}),
    "batch_70000": ((70000, 1, 1, 1, 1), 2, (1, 1, 2), {"after": [over("softmax", "spatial")]}),
    "width_100000": ((1, 1, 1, 1, 100000), 2, (1, 1, 3), {"after": [over("softmax", "width")]}),
    "depth_100000": ((1, 1, 100000, 1, 1), 2, (3, 1, 1), {"after": [over("mean", "depth")]}),
}


@pytest.mark.parametrize("name", EXTREMES)
@every_device
def test_parity_at_extreme_sizes(place: Place, name: str) -> None:
    shape, out_channels, kernel, options = EXTREMES[name]
    operator = conv_operator(shape, out_channels, kernel, **options)
    _, comparison = place.check(operator, tensors_of(operator))
    assert comparison.passed, comparison.reason
