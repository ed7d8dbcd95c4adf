"""Layer, group, instance and batch norms of awkward rows, on every device and by every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dispatcher.problem.operator import Operator
from tests.strategies import PLACES, Place, operator_of, tensors_of

#: TF32 rounds what a norm is to see; the second device of a kind has the same kernels.
HERE = [each for each in PLACES if each.precision == "fp32" and (each.backend != "cuda" or each.device == "cuda:0")]
everywhere = pytest.mark.parametrize("place", HERE, ids=str)
EPS = 1e-5
#: Half units in the last place: 1 is one rounding; PyTorch has up to 2.7. CUDA gathers statistics in float.
MOST = {"numpy": 1.0, "opencl": 1.6, "cuda": 2.2}

#: Rows of a norm, longer ones as well: what is said of n elements.
ROWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "signed": lambda noise: noise,
    "first_is_an_outlier": lambda noise: np.where(np.arange(noise.shape[1]) == 0, 1e6, noise),
    "last_is_an_outlier": lambda noise: np.where(np.arange(noise.shape[1]) == noise.shape[1] - 1, -1e4, noise),
    "outlier_before_equals": lambda noise: np.where(np.arange(noise.shape[1]) == 0, 1e5, np.full_like(noise, 0.75)),
    "offset": lambda noise: noise + 1e6,
    "nearly_equal": lambda noise: 3.58 * (1.0 + np.round(noise) * 2.0**-22),
    "fill_value": lambda noise: np.where(np.arange(noise.shape[1]) == 3, 1e20, noise),
    "huge": lambda noise: noise * 1e30,
}
#: A step, the shape of its input, and the axes that a row lies along, with groups apart from channels.
NORMS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "layer": ({"op": "layer_norm"}, (1, 17, 2, 1, 19), (1, 2)),
    "group": ({"op": "group_norm", "groups": 2}, (2, 8, 2, 3, 33), (2, 3, 4, 5)),
    "instance": ({"op": "instance_norm"}, (1, 3, 1, 4, 600), (3, 4, 5)),
    "batch": ({"op": "batch_norm"}, (3, 4, 2, 3, 19), (0, 3, 4, 5)),
}


def operator_for(step: dict[str, Any], shape: tuple[int, ...]) -> Operator:
    """A norm behind a convolution with one tap."""
    shapes = {"x": shape, "w": (shape[1], shape[1], 1, 1, 1)}
    return operator_of(shapes, [{"op": "conv_transpose3d", "weight": "w"}, {**step, "eps": EPS}])


def normalised(place: Place, name: str, rows: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Results and exact results of a norm behind a convolution that changes nothing, both with a row in each line."""
    step, shape, along = NORMS[name]
    groups = step.get("groups", 1)
    parted = (shape[0], groups, shape[1] // groups, *shape[2:])
    length = int(np.prod([parted[axis] for axis in along]))
    order = [*(axis for axis in range(6) if axis not in along), *along]
    noise = np.random.default_rng(3).standard_normal((int(np.prod(shape)) // length, length))
    x = rows(noise).astype(np.float32)
    placed = x.reshape([parted[axis] for axis in order]).transpose(np.argsort(order)).reshape(shape)
    weight = np.eye(shape[1], dtype=np.float32).reshape(shape[1], shape[1], 1, 1, 1)
    result = place.run(operator_for(step, shape).problem, x=np.ascontiguousarray(placed), w=weight)
    long = x.astype(np.longdouble) - x[:, :1]
    long -= long.mean(1, keepdims=True)
    exact = long / np.sqrt(np.square(long).mean(1, keepdims=True) + EPS)
    return result.reshape(parted).transpose(order).reshape(x.shape), exact.astype(np.float64)


def holds(place: Place, name: str) -> None:
    """Errors are some roundings of the largest deviation in a row, hardly more than one where rows are longer than
    the channels; equal values leave exactly 0."""
    most = 6.0 if name == "layer" or place.algorithm == "tiled" else MOST[place.backend]
    for kind, rows in ROWS.items():
        result, exact = normalised(place, name, rows)
        ratio = np.abs(result - exact) / (2.0**-24 * np.abs(exact).max(1, keepdims=True))
        assert ratio.max() <= most, (kind, ratio.max())
    result, _ = normalised(place, name, lambda noise: np.full_like(noise, 3.58))
    assert (result == 0).all()


@pytest.mark.parametrize("name", ["layer", "group", "batch"])
@everywhere
def test_norms_of_awkward_rows(place: Place, name: str) -> None:
    holds(place, name)


@pytest.mark.parametrize("name", ["group", "instance"])
def test_norms_by_what_the_launch_before_left_of_each_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a row does not fit a cache; one of them is longer than 32 vectors."""
    pytest.importorskip("pyopencl")
    from dispatcher.backends.opencl import groups

    monkeypatch.setattr(groups, "_place_bytes", lambda step: 1 << 40)
    place = next((each for each in PLACES if each.backend == "opencl" and each.algorithm == "direct"), None)
    if place is None:
        pytest.skip("there is no OpenCL device")
    step, shape, _ = NORMS[name]
    launches = place.compile(operator_for(step, shape).problem).explain().launches
    if [launch.name for launch in launches][1:] != ["normalize_given"]:
        pytest.skip(f"{place} has no launches that leave statistics")
    holds(place, name)


@pytest.mark.parametrize("axis", ["channel", ["channel", "depth"]])
@pytest.mark.parametrize("place", [each for each in HERE if each.algorithm not in ("winograd", "gather")], ids=str)
def test_squares_may_overflow_beside_a_row_that_is_not_finite(place: Place, axis: Any) -> None:
    """The rows are neighbours in a vector or a warp, whose squares are made again together."""
    shape = (1, 9, 2, 1, 19)
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    step = {"op": "layer_norm", "axis": axis, "eps": 0.0}
    operator = operator_of({"x": shape, "w": (9, 9, 1, 1, 1)}, [{"op": "conv_transpose3d", "weight": "w"}, step])
    tensors = {"x": x * np.float32(1e30), "w": np.eye(9, dtype=np.float32).reshape(9, 9, 1, 1, 1)}
    tensors["x"][..., 3], tensors["x"][:, 0, :, :, 7] = np.nan, np.inf
    result = np.delete(place.run(operator.problem, **tensors), [3, 7], axis=4)
    along = (1,) if axis == "channel" else (1, 2)
    apart = x - x.mean(along, keepdims=True, dtype=np.float64)
    wanted = np.delete(apart / np.sqrt(np.square(apart).mean(along, keepdims=True)), [3, 7], axis=4)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6)


#: Without a convolution, all algorithms of a device are the same.
once = pytest.mark.parametrize("place", [each for each in HERE if each.main], ids=str)
OVER_PLANES: dict[str, dict[str, Any]] = {
    "group": {"op": "group_norm", "groups": 2},
    "batch": {"op": "batch_norm"},
    "softmax": {"op": "softmax", "axis": "spatial"},
    "sum": {"op": "sum", "axis": "spatial"},
}
RIDERS: dict[str, tuple[int, ...]] = {
    "channel": (6, 1, 1, 1),
    "plane": (6, 3, 5, 7),
    "rows": (6, 3, 5, 1),
    "width": (6, 1, 1, 7),
}


@pytest.mark.parametrize("name", OVER_PLANES)
@once
def test_operands_behind_a_step_over_planes_of_any_kind(place: Place, name: str) -> None:
    """Planes are one long row to a kernel where operands lie as they do, which those that vary along parts do not."""
    for rider in ["channel"] if name == "sum" else RIDERS:
        pipeline = [OVER_PLANES[name], {"op": "scale", "by": "t"}, "silu"]
        operator = operator_of({"x": (2, 6, 3, 5, 7), "t": RIDERS[rider]}, pipeline)
        tensors = tensors_of(operator)
        expected = Place("numpy").run(operator.problem, **tensors)
        result = place.run(operator.problem, **tensors)
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())


@once
def test_activations_of_exponentials_keep_their_digits_until_they_are_subnormal(place: Place) -> None:
    """Of values below -87 exponentials are subnormal; a device may make those zero, but no others."""
    x = np.concatenate([np.linspace(-110.0, 110.0, 881), [-np.inf, np.inf, np.nan, -3e38, -0.0]]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        sigmoid = np.where(wide < 0, np.exp(-np.abs(wide)), 1.0) / (1.0 + np.exp(-np.abs(wide)))
        wanted = {"softplus": np.log1p(np.exp(-np.abs(wide))) + np.maximum(wide, 0.0), "silu": wide * sigmoid}
    for op, exact in wanted.items():
        operator = operator_of({"x": (1, 1, 1, 1, x.size)}, [op])
        result = place.run(operator.problem, x=x.reshape(1, 1, 1, 1, -1)).ravel()
        np.testing.assert_allclose(result, exact, rtol=3e-6, atol=2.0**-125)
