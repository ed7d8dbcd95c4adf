"""Pools in launches of their own on OpenCL, with windows of all kinds in rows of all lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.strategies import PLACES, Place, operator_of, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND

everywhere = pytest.mark.parametrize(
    "place", [place for place in PLACES if place.backend == "opencl" and place.main], ids=str
)
WINDOWS = {
    "strided": ((2, 3, 4, 7, 37), "max_pool", {"window": [2, 3, 3], "stride": [1, 2, 2], "padding": [0, 1, 1]}),
    "uncounted": (
        (1, 2, 3, 5, 18),
        "avg_pool",
        {"window": [3, 2, 4], "stride": 1, "padding": [1, 0, [2, 1]], "count_include_pad": False},
    ),
    "ceiled": (
        (1, 3, 1, 9, 23),
        "avg_pool",
        {"window": [1, 3, 5], "stride": [1, 2, 3], "padding": [0, 0, 2], "ceil_mode": True},
    ),
    "narrow": ((2, 5, 1, 4, 3), "max_pool", {"window": [1, 2, 2], "stride": [1, 1, 2], "padding": [0, 0, [1, 0]]}),
    "long": ((1, 1, 1, 2, 2600), "max_pool", {"window": [1, 1, 3], "stride": [1, 1, 2], "padding": [0, 0, 1]}),
    "wide": ((1, 1, 1, 3, 5000), "avg_pool", {"window": [1, 2, 4300], "stride": [1, 1, 100]}),
    "side by side": ((1, 2, 6, 9, 41), "max_pool", {"window": 3, "stride": 3}),
}


@pytest.mark.parametrize("name", WINDOWS)
@everywhere
def test_pools_take_in_what_their_windows_hold(place: Place, name: str) -> None:
    shape, op, fields = WINDOWS[name]
    operator = operator_of({"x": shape}, [{"op": op, **fields}, "relu"], "float64" if name == "ceiled" else "float32")
    x = tensors_of(operator)["x"]
    if op == "max_pool":
        x.flat[:: x.size // 3] = np.resize([np.nan, np.inf, -np.inf], x.flat[:: x.size // 3].size)
    _, comparison = place.check(operator, {"x": x})
    assert comparison.passed, comparison.reason


@everywhere
def test_dilated_and_adaptive_pools_leave_statistics_of_their_rows(place: Place) -> None:
    pipeline: list[Any] = [
        {"op": "max_pool", "window": 2, "stride": [1, 1, 2], "dilation": [1, 3, 2], "padding": [0, 1, 1]},
        {"op": "adaptive_avg_pool", "size": [2, 5, 19]},
        {"op": "softmax", "axis": ["depth", "height", "width"]},
    ]
    operator = operator_of({"x": (2, 3, 4, 9, 77)}, pipeline)
    _, comparison = place.check(operator, tensors_of(operator))
    assert comparison.passed, comparison.reason


def test_a_cpu_runs_many_rows_in_a_work_group() -> None:
    device = next(device for device in BACKEND.probe() if device.kind == "cpu")
    pool = {"op": "max_pool", **WINDOWS["strided"][2]}
    for step, kernel in ((pool, "pool_step"), ("relu", "pointwise_step")):
        for shape, together in (((4, 64, 64, 56, 56), True), ((1, 1, 2, 8, 32), False)):
            executable = BACKEND.compile(operator_of({"x": shape}, [step]), device, {})
            (launch,) = executable._own.launches  # type: ignore[attr-defined]
            assert launch.lowered.kernel == kernel and (launch.lowered.local > 1) == together
