"""Numbers that tell a careful kernel from a careless one."""

from __future__ import annotations

from dataclasses import replace
from math import erf, sqrt
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda.epilogue import MAX_CLAMP_RANGE
from dispatcher.problem.operator import Operator, bind
from tests.cuda_support import check, compiled, device, machine, poisoned, simulator_only
from tests.strategies import conv_operator, operator_of, problem_of, tensors_of

BOTH = pytest.mark.parametrize("algorithm", ["halo", "fma"])
LAYER_NORM = {"op": "layer_norm", "eps": 1e-5}
INSTANCE = {"op": "instance_norm", "eps": 1e-5}
SPATIAL = {"op": "softmax", "axis": "spatial"}


def identity(shape: tuple[int, ...], after: list[Any]) -> tuple[Operator, np.ndarray]:
    """A convolution that changes nothing, with steps behind it, and its weights."""
    op = conv_operator(shape, shape[1], (1, 1, 1), after=after)
    return op, np.eye(shape[1], dtype=np.float32).reshape(shape[1], shape[1], 1, 1, 1)


def run(op: Operator, x: np.ndarray, w: np.ndarray, algorithm: str, **more: np.ndarray) -> np.ndarray:
    device()
    result: np.ndarray = compiled(op, algorithm=algorithm)({"x": x, "w": w, **more}, poisoned(op))
    return result


def test_tf32_only_on_request() -> None:
    if device().facts["compute_capability"] < "8.0":
        pytest.skip("TF32 needs compute capability 8.0")
    shapes = {"x": (1, 1, 1, 1, 1), "w": (1, 1, 1, 1, 1)}
    problem = problem_of(shapes, [{"op": "conv_transpose3d", "weight": "w"}])
    tensors = {"x": np.full(shapes["x"], 1 + 2.0**-12, np.float32), "w": np.ones(shapes["w"], np.float32)}
    for precision, wanted in (("tf32", 1.0), ("fp32", 1.000244140625)):
        op = bind(problem, {}, {}, precision=precision)
        assert compiled(op)(tensors).item() == wanted


@simulator_only
@pytest.mark.parametrize("mma", ["rn", "rz"])
@BOTH
def test_float32_accuracy_of_long_sums(algorithm: str, mma: str) -> None:
    """Error below 4*sqrt(K)*2^-24*sum|x||w|, which one TF32 product misses a hundredfold."""
    op = conv_operator((1, 64, 3, 3, 8), 16, (3, 3, 3), padding=1)
    generator = np.random.default_rng(7)
    x = generator.uniform(0, 1, op.tensor_shapes["x"]).astype(np.float32)
    w = generator.uniform(-0.5, 0.5, op.tensor_shapes["w"]).astype(np.float32)
    exact = operator_of(op.tensor_shapes, [{"op": "conv_transpose3d", "weight": "w", "padding": 1}], "float64")
    with machine(devices=1, arch="8.0", mma=mma):
        got = run(op, x, w, algorithm).astype(np.float64)
        wanted = run(exact, x.astype(np.float64), w.astype(np.float64), "fma")
        size = run(exact, np.abs(x).astype(np.float64), np.abs(w).astype(np.float64), "fma")
    bound = 4 * np.sqrt(64 * 27) * 2.0**-24 * size
    assert (np.abs(got - wanted) <= bound).all()
    assert np.abs(got - wanted).max() < 2e-5


@simulator_only
@pytest.mark.parametrize("mma", ["rn", "rz"])
def test_half_precision_accuracy_of_long_sums(mma: str) -> None:
    """A tensor core that cuts its own sums of 6912 exact products is too coarse."""
    op = conv_operator((1, 256, 4, 6, 10), 16, (3, 3, 3), padding=1, dtype="float16")
    with machine(devices=1, arch="8.0", mma=mma):
        check(op, tensors_of(op), algorithm="halo")


@pytest.mark.parametrize("huge", ["x", "w"])
def test_tf32_does_not_round_to_infinity(huge: str) -> None:
    op = replace(conv_operator((1, 4, 3, 4, 8), 4, (2, 2, 2)), precision="tf32")
    device()
    tensors = {name: np.full(shape, 1e-30, np.float32) for name, shape in op.tensor_shapes.items()}
    tensors[huge][:] = np.finfo(np.float32).max
    check(op, tensors)


@BOTH
def test_layer_norm_with_a_large_mean(algorithm: str) -> None:
    op, w = identity((1, 4, 1, 1, 1), [LAYER_NORM])
    x = np.array([40000, 40001, 40002, 40003], np.float32).reshape(1, 4, 1, 1, 1)
    wanted = [-1.3416354, -0.4472118, 0.4472118, 1.3416354]
    np.testing.assert_allclose(run(op, x, w, algorithm).ravel(), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("norm", "shape", "along"), [(LAYER_NORM, (1, 17, 1, 2, 8), (1,)), (INSTANCE, (1, 8, 2, 4, 9), (2, 3, 4))]
)
@BOTH
def test_norms_of_awkward_rows(algorithm: str, norm: Any, shape: tuple[int, ...], along: tuple[int, ...]) -> None:
    """An outlier first, a fill value, equal values, an offset: of few bits, which the convolution does not change."""
    op, w = identity(shape, [norm])
    noise = np.round(np.random.default_rng(3).standard_normal(shape) * 64) / 64
    first = np.zeros(shape, bool)
    first[tuple(0 if axis in along else slice(None) for axis in range(5))] = True
    outliers = [np.where(first, far, noise) for far in (2.0**20, 2.0**66)]
    for x in (*outliers, noise * 2.0**100, noise + 2.0**12, noise):
        result = run(op, x.astype(np.float32), w, algorithm)
        apart = x - x.mean(along, keepdims=True)
        exact = apart / np.sqrt(np.square(apart).mean(along, keepdims=True) + 1e-5)
        assert (np.abs(result - exact) <= 6 * 2.0**-24 * np.abs(exact).max(along, keepdims=True)).all()
    assert (run(op, np.full(shape, 3.578125, np.float32), w, algorithm) == 0).all()


@pytest.mark.parametrize("channels", [4099, 400000])
def test_layer_norm_over_many_channels(channels: int) -> None:
    op = conv_operator((1, 1, 1, 1, 1), channels, (1, 1, 1), after=[LAYER_NORM])
    w = np.arange(channels, dtype=np.float32).reshape(1, channels, 1, 1, 1)
    result = run(op, np.ones((1, 1, 1, 1, 1), np.float32), w, "auto")
    assert result.ravel()[0] == pytest.approx({4099: -1.7316283, 400000: -1.7320465}[channels], abs=1e-6)


@BOTH
def test_layer_norm_of_a_constant(algorithm: str) -> None:
    op = conv_operator((1, 40, 2, 2, 2), 40, (1, 1, 1), after=[LAYER_NORM, {"op": "gelu"}])
    w = np.eye(40, dtype=np.float32).reshape(40, 40, 1, 1, 1)
    result = run(op, np.full((1, 40, 2, 2, 2), 1234, np.float32), w, algorithm)
    assert (result == 0).all()


@pytest.mark.parametrize("place", ["fused", "alone"])
def test_gelu(place: str) -> None:
    op, w = identity((1, 1, 1, 1, 4096), [{"op": "gelu"}])
    if place == "alone":
        op = operator_of({"x": (1, 1, 1, 1, 4096)}, [{"op": "gelu"}])
    x = np.linspace(-9, 9, 4096, dtype=np.float32)
    x[:6] = [-np.inf, np.inf, np.nan, -2.7, 2.7, 0]
    tensors = {"x": x.reshape(1, 1, 1, 1, -1)} | ({"w": w} if place == "fused" else {})
    got = compiled(op)(tensors).ravel()
    wanted = np.array([v * 0.5 * (1 + erf(v / sqrt(2))) for v in x[3:].astype(np.float64)])
    assert (np.abs(got[3:] - wanted) <= 2e-7 + 2.0**-22 * np.abs(x[3:])).all()
    assert got[0] == 0 and got[1] == np.inf and np.isnan(got[2])


@BOTH
def test_pools_keep_what_a_maximum_drops(algorithm: str) -> None:
    """All negative, minus infinity, and NaN at every place of its window; then the sum over channels."""
    after = [{"op": "max_pool3d", "window": 2}, {"op": "max_pool3d", "window": 3}, {"op": "sum", "axis": "channel"}]
    op = conv_operator((1, 2, 6, 3, 3), 2, (2, 2, 2), stride=2, after=after)  # each input becomes a box of eight
    w = np.zeros((2, 2, 2, 2, 2), np.float32)
    w[0, 0] = w[1, 1] = 1
    x = np.full((1, 2, 6, 3, 3), -5, np.float32)
    np.testing.assert_array_equal(run(op, x, w, algorithm).ravel(), [-10, -10])
    x[:] = -3e38
    np.testing.assert_array_equal(run(op, x / 2, w, algorithm).ravel(), [np.float32(-3e38)] * 2)
    for place in ((0, 0, 0), (1, 2, 1), (2, 2, 2)):
        x = np.full((1, 2, 6, 3, 3), -1, np.float32)
        x[0, 1][place] = np.nan
        # The zero weight of the other channel turns NaN into NaN there too.
        result = run(op, x, w, algorithm).ravel()
        assert np.isnan(result[0]) and result[1] == -2


def test_maxima_of_minus_infinity() -> None:
    for step in ({"op": "max_pool3d", "window": 2}, {"op": "max", "axis": "spatial"}):
        op = operator_of({"x": (1, 2, 2, 2, 2)}, [step])
        x = np.full((1, 2, 2, 2, 2), -np.inf, np.float32)
        assert (compiled(op)({"x": x}) == -np.inf).all()


@BOTH
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_special_inputs_travel_as_far_as_they_should(algorithm: str, special: float) -> None:
    """Exactly the outputs whose taps meet the special value change, be it in x or in w."""
    op = conv_operator((1, 3, 3, 4, 5), 5, (3, 3, 3), stride=2, padding=1, output_padding=1)
    for name in ("x", "w"):
        tensors = tensors_of(op)
        tensors[name].reshape(-1)[tensors[name].size // 2] = special
        check(op, tensors, algorithm=algorithm)


@BOTH
def test_the_largest_number_is_not_taken_for_infinity(algorithm: str) -> None:
    """Rounded to 10 bits it would be."""
    op = conv_operator((1, 1, 1, 1, 4), 1, (1, 1, 1))
    x = np.array([3.4028235e38, -3.4028235e38, 1, 2], np.float32).reshape(1, 1, 1, 1, 4)
    for factor in (1, 0.5, -0.25):
        result = run(op, x, np.full((1, 1, 1, 1, 1), factor, np.float32), algorithm)
        np.testing.assert_array_equal(result, x * np.float32(factor))


@BOTH
def test_infinity_stays_infinity(algorithm: str) -> None:
    op = conv_operator((1, 1, 1, 1, 3), 1, (1, 1, 1))
    x = np.array([1, np.inf, 3], np.float32).reshape(1, 1, 1, 1, 3)
    result = run(op, x, np.full((1, 1, 1, 1, 1), 0.5, np.float32), algorithm)
    np.testing.assert_array_equal(result.ravel(), np.float32([0.5, np.inf, 1.5]))


@pytest.mark.parametrize("low", [-1e4, -MAX_CLAMP_RANGE + 1, 0.0])
@BOTH
def test_softmax_needs_its_maximum(algorithm: str, low: float) -> None:
    high = -low if low == -1e4 else 1.0
    op, w = identity((1, 2, 1, 1, 4), [{"op": "clamp", "min": low, "max": high}, SPATIAL])
    launches = [launch.name for launch in compiled(op, algorithm=algorithm).launches]
    if algorithm == "halo" and device().facts["compute_capability"] >= "8.0":
        assert launches == (["conv_halo", "gathered"] if low == -1e4 else ["conv_halo"] * 2)
    x = np.array([[8000, 7999, 2, 1], [-8000] * 4], np.float32).reshape(1, 2, 1, 1, 4)
    result = run(op, x, w, algorithm).reshape(2, 4)
    if low == -1e4:
        np.testing.assert_allclose(result[0], [0.7310586, 0.2689414, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(result[1], 0.25, rtol=1e-6)
    x[0, 0, 0, 0, 2] = np.nan
    result = run(op, x, w, algorithm).reshape(2, 4)
    assert np.isnan(result[0]).all()


def test_half_precision_sums_in_float() -> None:
    shapes = {"x": (1, 2, 1, 1, 2), "w": (2, 1, 1, 1, 1)}
    steps = [{"op": "conv_transpose3d", "weight": "w"}, {"op": "softmax", "axis": "batch"}, {"op": "scale", "by": 2.0}]
    tensors = {"x": np.full(shapes["x"], 60000, np.float16), "w": np.ones(shapes["w"], np.float16)}
    assert (compiled(operator_of(shapes, steps, "float16"))(tensors) == 2).all()  # inf would give NaN
    steps = [steps[0], {"op": "scale", "by": 0.25}]
    assert (compiled(operator_of(shapes, steps, "float16"))(tensors) == 30000).all()
