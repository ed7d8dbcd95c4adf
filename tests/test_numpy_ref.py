"""The reference itself, checked against plain loops, against PyTorch's stored results, and at its edges."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dispatcher.backends.numpy_ref.backend as numpy_backend
from dispatcher.backends.numpy_ref import BACKEND, chunks, reference
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.errors import InputError
from dispatcher.interface import Timings
from dispatcher.ops.steps import Pointwise, Reduce
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator, bind
from tests import strategies
from tests.reference import naive
from tests.strategies import Recipe, conv_operator, convolutions, operator_of, pipelines, tensors_of, thorough

FLOAT64 = st.just("float64")
STORED = np.load(Path(__file__).parent / "data" / "torch_reference.npz")
_INDEX = json.loads(str(STORED["index"]))
ENTRIES: list[dict[str, Any]] = _INDEX["entries"]
STEPS: dict[str, dict[str, Any]] = _INDEX["steps"]


def agree(result: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the rounding of float64, relative to the largest element."""
    assert result.shape == expected.shape
    finite = expected[np.isfinite(expected)]
    scale = max(1.0, float(np.abs(finite).max(initial=0.0)))
    np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-11 * scale)


def identity(x: Any, **options: Any) -> tuple[Operator, dict[str, np.ndarray]]:
    """A pipeline around a convolution that copies ``x``, and its tensors."""
    x = np.asarray(x, np.float32)
    channels = x.shape[1]
    operator = conv_operator(x.shape, channels, (1, 1, 1), groups=channels, **options)
    return operator, {"x": x, "w": np.ones((channels, 1, 1, 1, 1), np.float32)}


# ---- against plain loops -----------------------------------------------------------------------------------
def test_convolutions_against_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "MOST_PRODUCTS", 6_000)

    @thorough(150)
    @given(convolutions(FLOAT64))
    def check(recipe: Recipe) -> None:
        operator = recipe.bind()
        tensors = tensors_of(operator)
        agree(reference(operator, tensors), naive.run(operator, tensors))

    check()


def test_convolutions_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with blocks of a plane or less, and chunks of one batch item."""
    monkeypatch.setattr(strategies, "MOST_PRODUCTS", 2_000)
    monkeypatch.setattr(reference_steps, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(numpy_backend, "CHUNK_ELEMENTS", 1)

    @thorough(60)
    @given(convolutions(FLOAT64))
    def check(recipe: Recipe) -> None:
        operator = recipe.bind()
        tensors = tensors_of(operator)
        agree(reference(operator, tensors), naive.run(operator, tensors))

    check()


def test_pipelines_against_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "MOST_PRODUCTS", 3_000)
    monkeypatch.setattr(strategies, "MOST_ELEMENTS", 1_500)

    @thorough(150)
    @given(pipelines(FLOAT64))
    def check(recipe: Recipe) -> None:
        operator = recipe.bind()
        tensors = tensors_of(operator)
        agree(reference(operator, tensors), naive.run(operator, tensors))

    check()


EVERY_STEP: dict[str, dict[str, Any]] = {
    "conv_transpose": {"weight": "w", "bias": "c"},
    "conv_transpose3d": {"weight": "w", "bias": "c", "stride": [2, 1, 3]},
    "conv": {"weight": "w", "bias": "c", "stride": 2, "padding": "same"},
    "conv3d": {"weight": "w", "bias": "c", "padding": [1, 0, [2, 1]]},
    "divide": {"by": "t"},
    "maximum": {"value": "t"},
    "minimum": {"value": 0.125},
    "greater": {"value": "t"},
    "greater_equal": {"value": 0.125},
    "where": {"value": "t", "other": -0.5},
    "elu": {"alpha": 0.75},
    "instance_norm": {"weight": "c"},
    "batch_norm": {"weight": "c", "bias": "c"},
    "rms_norm": {"axis": ["channel", "depth"], "weight": "c"},
    "log_softmax": {"axis": "spatial"},
    "min": {"axis": ["channel", "height"]},
    "product": {"axis": "spatial"},
    "add": {"value": "t"},
    "subtract": {"value": "t"},
    "scale": {"by": "t"},
    "clamp": {"min": -0.5, "max": 0.25},
    "leaky_relu": {"slope": -0.3},
    "layer_norm": {"axis": "channel", "weight": "c", "bias": "c"},
    "group_norm": {"groups": 2, "weight": "c", "bias": "c"},
    "softmax": {"axis": ["channel", "width"]},
    "adaptive_avg_pool": {"size": [2, 1, 2]},
    "adaptive_avg_pool3d": {"size": [3, 2, 5]},
    "adaptive_max_pool": {"size": [1, 3, 2]},
    "adaptive_max_pool3d": {"size": [2, 2, 3]},
    "avg_pool": {"window": [2, 2, 3], "stride": [1, 2, 2], "padding": 1, "ceil_mode": True, "count_include_pad": False},
    "avg_pool3d": {"window": [2, 1, 3]},
    "max_pool": {"window": 2, "stride": 1, "padding": [0, 1, [1, 0]], "dilation": [1, 2, 1]},
    "max_pool3d": {"window": [1, 2, 2]},
    "sum": {"axis": ["batch", "height"]},
    "mean": {"axis": "spatial"},
    "max": {"axis": ["batch", "channel"]},
    "log_sum_exp": {"axis": "depth"},
}


#: Those that compute something, in problems with three spatial axes.
EVERY_OP = [op for op, operation in VOCABULARY.items() if operation.rank in (None, 3) and op != "squeeze"]


def single(op: str, dtype: str) -> Operator:
    """A pipeline of this one step."""
    fields = EVERY_STEP.get(op, {})
    shapes = {"x": (3, 4, 2, 3, 4), "w": (4, 4, 2, 1, 2), "c": (4,), "t": (3, 1, 1, 3, 1)}
    used = {name: shape for name, shape in shapes.items() if name == "x" or name in fields.values()}
    return operator_of(used, [{"op": op, **fields}], dtype)


@pytest.mark.parametrize("op", EVERY_OP)
def test_every_step_against_loops(op: str) -> None:
    operator = single(op, "float64")
    tensors = tensors_of(operator)
    if op in ("log", "sqrt"):
        tensors = {name: np.abs(tensor) for name, tensor in tensors.items()}
    agree(reference(operator, tensors), naive.run(operator, tensors))


@pytest.mark.parametrize("axis", ["batch", "channel", "spatial", ["batch", "depth", "width"]])
@pytest.mark.parametrize("op", ["layer_norm", "softmax", "sum", "mean", "max", "log_sum_exp"])
def test_steps_over_any_axes(op: str, axis: str | list[str]) -> None:
    operator = operator_of({"x": (3, 4, 2, 3, 2)}, [{"op": op, "axis": axis}], "float64")
    tensors = tensors_of(operator)
    agree(reference(operator, tensors), naive.run(operator, tensors))


def test_residuals_and_the_input_as_an_operand() -> None:
    pipeline = [
        {"op": "conv_transpose3d", "weight": "w", "padding": 1, "as": "y"},
        "gelu",
        {"op": "add", "value": "x"},
        {"op": "scale", "by": "y"},
        {"op": "mean", "axis": ["batch", "spatial"], "as": "m"},
        {"op": "subtract", "from": "y", "value": "m"},
    ]
    operator = operator_of({"x": (3, 4, 3, 3, 3), "w": (4, 4, 3, 3, 3)}, pipeline, "float64")
    tensors = tensors_of(operator)
    agree(reference(operator, tensors), naive.run(operator, tensors))


# ---- against PyTorch ---------------------------------------------------------------------------------------
def stored(position: int) -> tuple[Operator, dict[str, np.ndarray], np.ndarray]:
    """An entry of the stored results: operator, tensors, what PyTorch computed."""
    problem = load_problem(ENTRIES[position]["problem"])
    numbers = ENTRIES[position]["numbers"]
    sizes = {size.name: numbers.get(size.name, size.default) for size in problem.sizes}
    scalars = {scalar.name: numbers.get(scalar.name, scalar.default) for scalar in problem.scalars}
    tensors = {tensor.name: STORED[f"{position}/tensor/{tensor.name}"] for tensor in problem.tensors}
    return bind(problem, sizes, scalars), tensors, STORED[f"{position}/result"]


@pytest.mark.parametrize(
    "position", range(len(ENTRIES)), ids=[f"{i}-{entry['problem']}" for i, entry in enumerate(ENTRIES)]
)
def test_against_pytorch(position: int) -> None:
    operator, tensors, expected = stored(position)
    agree(reference(operator, tensors), expected)


@pytest.mark.parametrize("op", STEPS)
def test_steps_against_pytorch(op: str) -> None:
    tensors = {name.split("/")[1]: STORED[name] for name in STORED.files if name.startswith("step tensor/")}
    used = {name: array for name, array in tensors.items() if name == "x" or name in STEPS[op].values()}
    operator = operator_of({name: array.shape for name, array in used.items()}, [{"op": op, **STEPS[op]}])
    agree(reference(operator, used), STORED[f"step/{op}"])


# ---- functions ---------------------------------------------------------------------------------------------
def test_the_normal_distribution_is_accurate() -> None:
    """To 1e-15, relative, also where the textbook formula cancels. ``math.erfc`` is good to 1 or 2 units."""
    x = np.concatenate([np.linspace(-37.0, 9.0, 40_001), [0.0, -0.0, 1e-300, -1e-300, -5.0 + 2**-50]])
    expected = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    # The argument -v/sqrt(2) is rounded, which erfc amplifies by about v**2.
    allowed = 1e-15 + np.where(x < 0, x * x, 0.0) * 2.0**-52
    assert (np.abs(reference_steps.normal_cdf(x) / expected - 1) <= allowed).all()


def test_the_normal_distribution_against_long_arithmetic() -> None:
    """Values computed with 50 digits."""
    exact = {
        -37.0: 5.725571222524577e-300,
        -20.0: 2.7536241186062337e-89,
        -8.0: 6.220960574271784e-16,
        -3.3: 4.834241423837775e-4,
        -1.0: 0.15865525393145705,
        -0.125: 0.4502617751698871,
        0.7: 0.758036347776927,
        2.5: 0.9937903346742238,
    }
    result = reference_steps.normal_cdf(np.array(list(exact)))
    np.testing.assert_allclose(result, list(exact.values()), rtol=1e-15)


def test_gelu_at_its_ends() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -0.0, 1e300, -1e300, -40.0])
    with np.errstate(all="ignore"):
        result = reference_steps.gelu(x)
    np.testing.assert_array_equal(result, [np.inf, 0.0, np.nan, 0.0, 1e300, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 4, 5)])
def test_gelu_keeps_any_shape_and_layout(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_array_equal(
        reference_steps.gelu(np.moveaxis(x, 0, -1)), np.moveaxis(reference_steps.gelu(x), 0, -1)
    )


# ---- NaN, infinities, empty batches ------------------------------------------------------------------------
def test_silu_and_sigmoid_where_an_exponential_overflows() -> None:
    x = np.array([-745.0, -710.0, 710.0])
    np.testing.assert_allclose(reference_steps.POINTWISE["sigmoid"](x)[1:], [np.exp(-710.0), 1.0], rtol=1e-13)
    np.testing.assert_allclose(reference_steps.POINTWISE["silu"](x)[1:], [-710.0 * np.exp(-710.0), 710.0], rtol=1e-13)
    assert -1e-320 < reference_steps.POINTWISE["silu"](x)[0] < 0.0


def test_max_pool_and_clamp_keep_nan() -> None:
    x = np.full((1, 1, 1, 1, 4), -1.0)
    x[..., 2] = np.nan
    operator, tensors = identity(x, after=[{"op": "max_pool3d", "window": [1, 1, 2]}])
    np.testing.assert_array_equal(reference(operator, tensors).ravel(), [-1.0, np.nan])
    operator, tensors = identity(x, after=[{"op": "clamp", "min": 0.0, "max": 1.0}])
    np.testing.assert_array_equal(reference(operator, tensors).ravel(), [0.0, 0.0, np.nan, 0.0])


def test_clamp_with_crossed_bounds_gives_the_upper_one() -> None:
    operator, tensors = identity(np.zeros((1, 1, 1, 1, 1)), after=[{"op": "clamp", "min": 2.0, "max": 1.0}])
    assert reference(operator, tensors).item() == 1.0


def test_padding_does_not_touch_infinities() -> None:
    """A tap that is cut off is not multiplied by zero, which would make NaN."""
    operator = conv_operator((1, 1, 1, 1, 2), 1, (1, 1, 3), padding=[0, 0, 1])
    tensors = {"x": np.ones((1, 1, 1, 1, 2), np.float32), "w": np.array([np.inf, 1, 1], np.float32)}
    tensors["w"] = tensors["w"].reshape(1, 1, 1, 1, 3)
    np.testing.assert_array_equal(reference(operator, tensors).ravel(), [np.inf, 2.0])


def test_layer_norm_works_over_channels() -> None:
    values = np.array([[1.0, 3.0], [5.0, 11.0]]).reshape(1, 2, 1, 1, 2)
    operator, tensors = identity(values, after=[{"op": "layer_norm", "axis": "channel"}])
    result = reference(operator, tensors).reshape(2, 2)
    np.testing.assert_allclose(result, [[-1, -1], [1, 1]], atol=1e-5)


@pytest.mark.parametrize(
    ("after", "shape"),
    [
        ([], (0, 2, 2, 2, 2)),
        ([{"op": "layer_norm", "axis": "channel"}, "gelu", {"op": "max", "axis": "channel"}], (0, 1, 2, 2, 2)),
        ([{"op": "softmax", "axis": ["batch", "width"]}], (0, 2, 2, 2, 2)),
    ],
    ids=["conv", "per_item", "over_batch"],
)
def test_an_empty_batch_gives_an_empty_result(after: list[Any], shape: tuple[int, ...]) -> None:
    operator, tensors = identity(np.zeros((0, 2, 2, 2, 2)), after=after)
    result = BACKEND.compile(operator, BACKEND.probe()[0], {})(tensors)
    assert result.shape == shape and result.dtype == np.float32


@pytest.mark.parametrize(("function", "expected"), [("sum", 0.0), ("mean", np.nan), ("max", -np.inf)])
def test_reducing_an_empty_batch(function: str, expected: float) -> None:
    operator, tensors = identity(np.zeros((0, 1, 1, 1, 1)), after=[{"op": function, "axis": "batch"}])
    np.testing.assert_array_equal(reference(operator, tensors).ravel(), [expected])


# ---- the backend -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_result_is_rounded_once(dtype: str) -> None:
    operator = conv_operator((2, 3, 3, 3, 3), 4, (2, 2, 2), after=["gelu"], dtype=dtype)
    tensors = tensors_of(operator)
    result = BACKEND.compile(operator, BACKEND.probe()[0], {})(tensors)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, reference(operator, tensors).astype(dtype))


def test_the_device() -> None:
    (device,) = BACKEND.probe()
    assert device.id == "numpy" and device.kind == "reference" and device.available
    assert BACKEND.supports(conv_operator((1, 1, 1, 1, 1), 1, (1, 1, 1)), device) is None


def test_an_output_and_timings() -> None:
    operator = conv_operator((2, 3, 3, 3, 3), 4, (2, 2, 2))
    tensors = tensors_of(operator)
    executable = BACKEND.compile(operator, BACKEND.probe()[0], {})
    output, timings = np.full(operator.output_shape, np.nan, np.float32), Timings()
    assert executable(tensors, output, timings) is output
    np.testing.assert_array_equal(output, executable(tensors))
    assert timings.kernel_s > 0 and [name for name, _ in timings.launches] == [executable.launches[0].name]


def test_unknown_options_are_refused() -> None:
    operator = conv_operator((1, 1, 1, 1, 1), 1, (1, 1, 1))
    with pytest.raises(InputError, match="algorithm"):
        BACKEND.compile(operator, BACKEND.probe()[0], {"algorithm": "direct"})


def test_progress_rises_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(reference_steps, "BLOCK_ELEMENTS", 1)
    operator = conv_operator((4, 3, 3, 3, 3), 4, (2, 2, 2))
    seen: list[float] = []
    BACKEND.compile(operator, BACKEND.probe()[0], {"progress": seen.append})(tensors_of(operator))
    assert len(seen) > 8 and seen == sorted(seen) and 0 < seen[0] < 0.2 and seen[-1] == 1.0


def test_threads_share_the_batch_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(numpy_backend, "cores", lambda: 3)
    operator = conv_operator((5, 3, 3, 3, 3), 4, (2, 2, 2), after=["gelu"])
    tensors = tensors_of(operator)
    assert len(chunks(operator)) == 5
    threads = set()
    barrier = threading.Barrier(3, timeout=30)

    def note(chunk: slice) -> None:
        threads.add(threading.get_ident())
        if chunk.start < 3:
            barrier.wait()

    numpy_backend.for_each_chunk(operator, note)
    assert len(threads) == 3
    together = reference(operator, tensors)
    monkeypatch.setattr(numpy_backend, "BUSY_ELEMENTS", 1)
    threads.clear()
    numpy_backend.for_each_chunk(operator, lambda chunk: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}
    np.testing.assert_array_equal(reference(operator, tensors), together)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    operator = conv_operator((4, 1, 1, 1, 1), 1, (1, 1, 1))

    def fail(chunk: slice) -> None:
        raise MemoryError(chunk)

    with pytest.raises(MemoryError):
        numpy_backend.for_each_chunk(operator, fail)


def test_every_function_of_the_vocabulary_has_an_entry() -> None:
    functions: dict[type, set[str]] = {Pointwise: set(), Reduce: set()}
    for op in EVERY_OP:
        for step in single(op, "float32").steps:
            if isinstance(step, Pointwise | Reduce):
                functions[type(step)].add(step.function)
            assert type(step) in reference_steps.TABLE
    assert functions[Pointwise] == set(reference_steps.POINTWISE)
    assert functions[Reduce] == set(reference_steps.REDUCTIONS)
