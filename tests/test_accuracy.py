"""Errors of functions and sums, beside what correct rounding costs: PyTorch's are of the same size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.numpy_ref import reference
from tests.strategies import PLACES, call_on, operator_of

HERE = next((each for each in PLACES if each.device == "opencl:0" and each.algorithm == "direct"), None)
pytestmark = pytest.mark.skipif(HERE is None, reason="there is no OpenCL device")
SHAPE = (1, 2, 2, 33, 211)

#: Function in float64, and the largest root of the mean square and maximum of errors, in units in the last place.
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    "tanh": (np.tanh, 0.305, 1.3),
    "silu": (lambda x: x / (1.0 + np.exp(-x)), 0.555, 2.7),
    "selu": (lambda x: np.where(x > 0, 1.0507009873554805 * x, 1.7580993408473769 * np.expm1(x)), 0.485, 2.0),
    "mish": (lambda x: x * np.tanh(np.log1p(np.exp(x))), 0.66, 3.5),
    "sigmoid": (lambda x: 1.0 / (1.0 + np.exp(-x)), 0.6, 2.4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_nearly_rounded_once(name: str) -> None:
    function, rms, most = FUNCTIONS[name]
    generator = np.random.default_rng(1)
    x = np.exp(generator.uniform(-2.5, 2.5, SHAPE)) * generator.choice([-1.0, 1.0], SHAPE)
    x = np.append(x.ravel()[:-2], [100.0, -30.0]).astype(np.float32).reshape(SHAPE)
    operator, exact = operator_of({"x": SHAPE}, [{"op": name}]), function(x.astype(float))
    result = call_on(operator, {"x": x}, "opencl:0")()
    errors = np.abs(result - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert np.sqrt(np.square(errors).mean()) <= rms
    assert errors.max() <= most


@pytest.mark.parametrize(
    ("channels", "options", "most"), [(32, {"line": "rows"}, 3.0), (32, {"line": "channels"}, 3.0), (3, {}, 2.0)]
)
def test_direct_sums_are_made_in_blocks(channels: int, options: dict[str, Any], most: float) -> None:
    """A running sum of n products has errors of about sqrt(n) / 4 roundings of the result: here 7.8 and 2.4."""
    generator = np.random.default_rng(5)
    shapes = {"x": (1, channels, 5, 6, 33), "w": (channels, 32, 3, 3, 3)}
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    operator = operator_of(shapes, [{"op": "conv_transpose3d", "weight": "w", "padding": 1}])
    result = call_on(operator, tensors, "opencl:0", {"algorithm": "direct", **options})()
    exact = reference(operator, tensors)
    errors = np.sqrt(np.square(result - exact).mean() / np.square(exact).mean()) * 2.0**24
    assert errors <= most
