"""The comparison and the error bounds: honest results pass, and every kind of wrong result fails."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from dispatcher.backends.numpy_ref import BACKEND, reference
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.backends.opencl import transforms
from dispatcher.check.comparison import bounded_reference, compare, normwise_share, poisoned, verify_result
from dispatcher.check.inputs import INPUT_SETS, random_tensors
from dispatcher.ops.steps import Normalize
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator
from tests.family import FIVE
from tests.honest import StepFunction, compute, conv_transpose3d, replaced
from tests.mutants import half_conv, tf32_conv
from tests.strategies import Recipe, conv_operator, operator_of, pipelines, tensors_of, thorough

CONV = "conv-transpose-3d-asym-input-sq-kernel"
LAYERNORM = "conv-transpose3d-layernorm-gelu-scaling"


# ---- comparing ---------------------------------------------------------------------------------------------
SHAPE = (2, 1, 2, 2, 2)
REFERENCE = np.linspace(-1.0, 1.0, 16).reshape(SHAPE)
BOUND = np.full(SHAPE, 1e-6)


def changed(place: int, value: float) -> np.ndarray:
    """The reference as float32, with one other element."""
    result = REFERENCE.astype(np.float32)
    result.flat[place] = value
    return result


def test_equal_results_pass() -> None:
    found = compare(REFERENCE.astype(np.float32), REFERENCE, BOUND)
    assert found.passed and found.reason == "" and found.max_error_over_bound < 0.1
    assert 0 < found.max_abs_error < 1e-7 and 0 < found.normwise < 1e-7


def test_figures_of_a_wrong_element() -> None:
    found = compare(changed(9, 3.0), REFERENCE, BOUND)
    assert not found.passed
    assert found.worst_index == (1, 0, 0, 0, 1) and found.worst_value == 3.0
    assert found.worst_reference == REFERENCE.flat[9]
    assert found.max_abs_error == 3.0 - REFERENCE.flat[9]
    assert math.isclose(found.max_error_over_bound, found.max_abs_error / 1e-6)
    assert math.isclose(found.normwise, found.max_abs_error / np.linalg.norm(REFERENCE), rel_tol=1e-6)
    assert "1 of 16" in found.reason and "(1, 0, 0, 0, 1)" in found.reason


@pytest.mark.parametrize("result", [np.full(SHAPE, np.nan, np.float32), changed(3, np.nan)], ids=["all", "one"])
def test_nan_fails_where_the_reference_has_none(result: np.ndarray) -> None:
    found = compare(result, REFERENCE, BOUND)
    assert not found.passed and "NaN" in found.reason
    assert all(map(math.isnan, (found.max_abs_error, found.max_error_over_bound, found.normwise)))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinities_fail_where_the_reference_has_none(value: float) -> None:
    found = compare(changed(3, value), REFERENCE, BOUND)
    assert not found.passed and found.max_abs_error == math.inf and "infinite" in found.reason


def test_special_values_match_themselves_only() -> None:
    special = (np.nan, np.inf, -np.inf)
    for expected in special:
        truth = REFERENCE.copy()
        truth.flat[3] = expected
        for got in (*special, 0.5):
            found = compare(changed(3, got), truth, BOUND)
            same = got == expected or (np.isnan(got) and np.isnan(expected))
            assert found.passed == same, (expected, got)
            assert same or not found.max_abs_error < math.inf
    truth.flat[3], truth.flat[4] = np.nan, 0.0
    result = truth.astype(np.float32)
    result.flat[3], result.flat[4] = 0.0, np.nan
    assert not compare(result, truth, BOUND).passed


def test_overflow_of_the_results_dtype_is_no_error() -> None:
    truth = np.full(SHAPE, 1e39)
    assert compare(np.full(SHAPE, np.inf, np.float32), truth, BOUND).passed
    assert not compare(np.full(SHAPE, -np.inf, np.float32), truth, BOUND).passed
    assert not compare(np.full(SHAPE, 3e38, np.float32), truth, BOUND).passed
    assert not compare(np.full(SHAPE, np.inf, np.float32), np.full(SHAPE, 3e38), BOUND).passed


def test_small_errors_that_all_elements_share_fail() -> None:
    truth = np.ones((1, 1, 10, 10, 10))
    bound = np.full(truth.shape, 1e-3)
    spread = truth.copy()
    spread[..., 0, 0] += 9e-4  # one element in a hundred
    assert compare(spread, truth, bound).passed
    found = compare(truth + 5e-4, truth, bound)
    assert not found.passed and found.max_error_over_bound == pytest.approx(0.5)
    assert found.normwise_over_bound == pytest.approx(0.5 / normwise_share(1000))
    assert "every element is within its bound" in found.reason and "(0, 0, 0, 0, 0)" in found.reason
    assert found.severity == found.normwise_over_bound


def test_the_share_of_the_norm_falls_from_all_to_a_quarter() -> None:
    shares = [normwise_share(elements) for elements in (1, 4, 9, 100, 10**8)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    assert shares[2] == 0.5 and shares[-1] == pytest.approx(0.25, rel=1e-3)


def test_rounding_the_result_may_be_the_same_everywhere() -> None:
    truth = np.full((1, 1, 10, 10, 10), 1 + 2.0**-12)  # halfway between two float16 numbers, nearly
    found = compare(np.ones(truth.shape, np.float16), truth, 2.0**-11 * np.abs(truth))
    assert found.passed and found.normwise_over_bound > 0.4


def test_shapes_are_not_broadcast() -> None:
    truth = np.ones(SHAPE)
    for shape in ((1, 1, 1, 1, 1), (2, 1, 2, 2), (2, 1, 2, 2, 2, 1), (16,), (0, 1, 2, 2, 2), ()):
        found = compare(np.ones(shape, np.float32), truth, BOUND)
        assert not found.passed and str(shape) in found.reason and str(SHAPE) in found.reason
        assert found.max_abs_error == math.inf
    assert not compare(np.ones(SHAPE, np.float32), truth, np.ones((1, 1, 1, 1, 1))).passed


def test_dtypes() -> None:
    assert compare(REFERENCE, REFERENCE, BOUND).passed
    assert not compare(REFERENCE, REFERENCE, BOUND, dtype="float32").passed
    for odd in (REFERENCE.astype(np.int32), REFERENCE.astype(np.complex64), REFERENCE.astype(object)):
        assert "dtype" in compare(odd, REFERENCE, 10.0).reason
    assert "list" in compare([1.0], REFERENCE, BOUND).reason  # type: ignore[arg-type]


def test_nothing_agrees_with_nothing() -> None:
    empty = np.ones((0, 3, 2, 2, 2))
    found = compare(empty.astype(np.float32), empty, empty)
    assert found.passed and found.max_abs_error == 0 and found.worst_index is None
    assert not compare(np.ones((0, 4, 2, 2, 2), np.float32), empty, empty).passed


def test_a_bound_of_zero_wants_equality_and_a_bound_of_nan_fails() -> None:
    assert compare(REFERENCE, REFERENCE, 0.0).passed
    assert compare(changed(2, 5.0), REFERENCE, 0.0).max_error_over_bound == math.inf
    assert not compare(changed(2, 5.0), REFERENCE, math.nan).passed


def test_an_all_zero_softmax_fails() -> None:
    truth = np.full((1, 1, 32, 64, 64), 2.0**-17)
    operator = operator_of({"x": truth.shape}, [{"op": "softmax", "axis": "spatial"}])
    tensors = {"x": np.zeros(truth.shape, np.float32)}
    assert verify_result(operator, tensors, truth.astype(np.float32)).passed
    found = verify_result(operator, tensors, np.zeros(truth.shape, np.float32))
    assert not found.passed and found.max_error_over_bound > 100 and found.normwise == 1.0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_poison(dtype: str) -> None:
    array = poisoned((2, 3), dtype)
    assert array.shape == (2, 3) and array.dtype == dtype and np.isnan(array).all()
    assert not compare(array, np.zeros((2, 3)), 1e9).passed


# ---- an honest implementation in float32 -------------------------------------------------------------------
SIZES = {
    "batch_size": 2,
    "in_channels": 16,
    "out_channels": 24,
    "depth": 4,
    "height": 6,
    "width": 5,
    "kernel_d": 3,
    "kernel_h": 3,
    "kernel_w": 3,
    "stride_d": 2,
    "stride_h": 2,
    "stride_w": 2,
    "padding_d": 1,
    "padding_h": 1,
    "padding_w": 1,
}


def operator_for(name: str, dtype: str = "float32", **numbers: float) -> Operator:
    """A bundled problem at the sizes above, or others."""
    problem = load_problem(name)
    known = {parameter.name for parameter in problem.parameters}
    given = {key: value for key, value in {**SIZES, **numbers}.items() if key in known}
    for scalar in problem.scalars:
        if scalar.default is None:
            given.setdefault(scalar.name, 0.75)
    return bind_arguments(problem, sort_arguments(problem, given), dtype=dtype)


@pytest.mark.parametrize("kind", INPUT_SETS)
@pytest.mark.parametrize("name", FIVE)
def test_honest_results_pass(name: str, kind: str) -> None:
    operator = operator_for(name)
    for seed in range(5):
        tensors = random_tensors(operator, seed, kind=kind)
        found = verify_result(operator, tensors, compute(operator, tensors))
        assert found.passed, found.reason
        assert found.max_error_over_bound < 0.7


@pytest.mark.parametrize("name", FIVE)
def test_honest_half_precision_passes(name: str) -> None:
    operator = operator_for(name, "float16")
    for seed in range(5):
        tensors = random_tensors(operator, seed)
        found = verify_result(operator, tensors, compute(operator, tensors))
        assert found.passed, found.reason


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", FIVE)
def test_the_reference_passes_its_own_check(name: str, dtype: str) -> None:
    operator = operator_for(name, dtype)
    tensors = random_tensors(operator, 0)
    result = BACKEND.compile(operator, BACKEND.probe()[0], {})(tensors)
    assert verify_result(operator, tensors, result).passed


@thorough(150)
@given(pipelines())
def test_honest_pipelines_pass(recipe: Recipe) -> None:
    operator = recipe.bind()
    tensors = tensors_of(operator)
    working = np.float64 if operator.dtype == "float64" else np.float32
    found = verify_result(operator, tensors, compute(operator, tensors, working=working))
    assert found.passed, found.reason


@pytest.mark.parametrize("kind", ["one_nan", "one_inf"])
def test_beside_a_special_value_the_bound_stays_sharp(kind: str) -> None:
    operator = operator_for(CONV)
    values, bounds = bounded_reference(operator, random_tensors(operator, 0, kind=kind))
    special = ~np.isfinite(values)
    assert 0 < special.sum() < special.size / 2
    assert np.isfinite(bounds[~special]).all() and bounds[~special].max() < 1e-3


def test_bounds_do_not_depend_on_how_the_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operator_for(LAYERNORM, batch_size=5)
    tensors = random_tensors(operator, 0)
    values, bounds = bounded_reference(operator, tensors)
    wrong = compute(operator, tensors)
    wrong[3, 2, 1, 1, 1] += 1
    whole = verify_result(operator, tensors, wrong)
    monkeypatch.setattr("dispatcher.backends.numpy_ref.backend.CHUNK_ELEMENTS", 1)
    again = bounded_reference(operator, tensors)
    np.testing.assert_allclose(again[0], values, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(again[1], bounds, rtol=1e-4)
    parts = verify_result(operator, tensors, wrong)
    assert parts.worst_index == whole.worst_index == (3, 2, 1, 1, 1)
    assert math.isclose(parts.normwise, whole.normwise, rel_tol=1e-9)


def test_the_tolerance_of_a_problem_file_counts() -> None:
    mapping = {
        "name": "loose",
        "parameters": [
            {"name": "x", "type": "tensor", "const": True, "shape": [2, 2, 2, 2, 2]},
            {"name": "y", "type": "tensor", "const": False},
        ],
        "pipeline": ["tanh"],
    }
    strict = load_problem(mapping)
    loose = load_problem({**mapping, "tolerance": 3.0})
    bounds = []
    for problem in (strict, loose):
        operator = bind_arguments(problem, sort_arguments(problem, {}))
        bounds.append(bounded_reference(operator, tensors_of(operator))[1])
    np.testing.assert_allclose(bounds[1], 3 * bounds[0])


def test_progress_of_a_verification() -> None:
    operator = operator_for(CONV)
    tensors = random_tensors(operator, 0)
    seen: list[float] = []
    verify_result(operator, tensors, compute(operator, tensors), seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 2


def test_the_bound_grows_with_the_taps_and_stays_sharp() -> None:
    """Many taps: float32 is off by 1e-5, TF32 by 1e-2; the bound lies between."""
    operator = conv_operator((1, 256, 4, 4, 4), 8, (3, 3, 3))
    tensors = random_tensors(operator, 0, kind="uniform")
    tensors["w"] -= np.float32(0.5)
    values, bounds = bounded_reference(operator, tensors)
    honest = np.abs(compute(operator, tensors) - values)
    assert (honest < bounds).all() and honest.max() < 3e-5 and bounds.max() < 1e-3
    assert bounds.max() > 4 * bounds.min()  # corners have few taps
    wrong = compute(operator, tensors, replaced(Convolution=tf32_conv))
    assert not verify_result(operator, tensors, wrong).passed


@pytest.mark.parametrize("kernel", [1, 3])
def test_beside_large_outputs_the_bound_stays_that_of_an_output_alone(kernel: int) -> None:
    """Whatever an algorithm computes together."""
    operator = conv_operator((1, 4, 1, 1, 9), 1, (1, 1, kernel))
    tensors = random_tensors(operator, 0)
    bounds = []
    for factor in (1.0, 1e4):
        tensors["x"][..., 0] *= np.float32(factor)
        bounds.append(bounded_reference(operator, tensors)[1].reshape(-1))
    assert (bounds[1][:kernel] > 10 * bounds[0][:kernel]).all()  # the outputs that the large input reaches
    np.testing.assert_allclose(bounds[1][kernel:], bounds[0][kernel:], rtol=1e-3)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_equal_terms_whose_roundings_add_up_pass(value: float) -> None:
    operator = conv_operator((1, 128, 4, 4, 4), 2, (3, 3, 3))
    tensors = {name: np.full(shape, value, np.float32) for name, shape in operator.tensor_shapes.items()}
    result = np.zeros(operator.output_shape, np.float32)
    for channel in range(128):  # as slowly as sums can be taken
        for tap in np.ndindex(3, 3, 3):
            single = np.zeros_like(tensors["w"])
            single[(channel, slice(None), *tap)] = value
            result += compute(operator, {**tensors, "w": single})
    found = verify_result(operator, tensors, result)
    assert found.passed and found.max_error_over_bound > 0.05, found.reason


# ---- norms and transforms that lose digits ----------------------------------------------------------------
def deviations_norm(centred: Callable[[np.ndarray], np.ndarray]) -> StepFunction:
    """A layer norm over channels that takes its deviations from the mean in one way."""

    def norm(step: Normalize, x: np.ndarray) -> np.ndarray:
        apart = centred(x)
        return apart / np.sqrt(np.square(apart).mean(1, keepdims=True) + np.float32(step.eps))

    return norm


#: A mean rounded once is no fault; one whose sum grows with the offset is, and in float32 alone.
UNSHIFTED = deviations_norm(lambda x: x - x.mean(1, keepdims=True))
SHIFTED = deviations_norm(lambda x: x - (x[:, :1] + (x - x[:, :1]).mean(1, keepdims=True)))
NEARLY_EQUAL = {
    "phases_without_taps": conv_operator(
        (1, 4, 3, 3, 3), 17, (2, 2, 2), stride=3, after=[{"op": "add", "value": 3.58}, "layer_norm", "gelu"]
    ),
    "large_mean": operator_of({"x": (2, 64, 3, 4, 8)}, ["layer_norm"]),
}


@pytest.mark.parametrize("name", NEARLY_EQUAL)
def test_a_mean_without_a_shift_fails(name: str) -> None:
    operator = NEARLY_EQUAL[name]
    tensors = random_tensors(operator, 0, kind="large_mean" if name == "large_mean" else "signed")
    for norm, passes in ((UNSHIFTED, False), (SHIFTED, True), (reference_steps.normalize, True)):
        result = compute(operator, tensors, replaced(Normalize=norm))
        assert verify_result(operator, tensors, result).passed == passes


def test_a_constant_row_is_the_bias_exactly() -> None:
    pipeline = [{"op": "add", "value": 3.58}, {"op": "layer_norm", "bias": "b"}]
    operator = operator_of({"x": (1, 17, 1, 2, 2), "b": (17,)}, pipeline)
    tensors = {"x": np.zeros((1, 17, 1, 2, 2), np.float32), "b": np.linspace(-1, 1, 17, dtype=np.float32)}
    values, bounds = bounded_reference(operator, tensors)
    bias = tensors["b"].reshape(1, 17, 1, 1, 1).astype(np.float64)
    np.testing.assert_array_equal(values, np.broadcast_to(bias, values.shape))
    assert (bounds <= 2.0**-21 * np.abs(bias) + 1e-30).all()


def test_a_winograd_transform_with_bad_points_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """F(4, 4) along height and width at points whose powers grow: right in float64, too coarse in float32."""
    monkeypatch.setitem(transforms.POINTS, 7, (0, 1, -1, 2, -2, 3))
    transform = transforms.transform.__wrapped__(4, 4)
    operator = conv_operator((1, 16, 1, 5, 5), 8, (1, 4, 4))  # outputs: two tiles along each axis
    tensors = random_tensors(operator, 0)
    for dtype, passes in ((np.float64, True), (np.float32, False)):
        inputs, taps, outputs = (
            np.array(rows, np.float64).astype(dtype) for rows in (transform.inputs, transform.taps, transform.outputs)
        )
        x = np.pad(tensors["x"][0, :, 0].astype(dtype), ((0, 0), (3, 3), (3, 3)))
        weights = np.einsum("pk,iokl,ql->iopq", taps, tensors["w"][:, :, 0, ::-1, ::-1].astype(dtype), taps)
        result = np.empty((8, 8, 8), np.float32)
        for h, w in np.ndindex(2, 2):
            tile = np.einsum("pk,ikl,ql->ipq", inputs, x[:, 4 * h : 4 * h + 7, 4 * w : 4 * w + 7], inputs)
            product = np.einsum("ipq,iopq->opq", tile, weights)
            result[:, 4 * h : 4 * h + 4, 4 * w : 4 * w + 4] = np.einsum("jp,opq,kq->ojk", outputs, product, outputs)
        assert verify_result(operator, tensors, result.reshape(operator.output_shape)).passed == passes


# ---- what is just right and just wrong ---------------------------------------------------------------------
def test_tf32_passes_where_it_is_asked_for() -> None:
    problem = load_problem(LAYERNORM)
    operator = bind_arguments(problem, sort_arguments(problem, {**SIZES, "scaling_factor": 1.0}), precision="tf32")
    tensors = random_tensors(operator, 0)
    wrong = compute(operator, tensors, replaced(Convolution=tf32_conv))
    assert verify_result(operator, tensors, wrong).passed
    coarser = compute(
        operator,
        tensors,
        replaced(Convolution=lambda step, x, w: conv_transpose3d(step, x, np.round(w * 32) / np.float32(32))),
    )
    assert not verify_result(operator, tensors, coarser).passed


def test_half_precision_summed_in_half_precision_fails() -> None:
    operator = operator_for(CONV, "float16", in_channels=64)
    tensors = random_tensors(operator, 0)
    assert verify_result(operator, tensors, compute(operator, tensors)).passed
    wrong = compute(operator, tensors, replaced(Convolution=half_conv))
    assert not verify_result(operator, tensors, wrong).passed


def test_a_single_product_is_not_rounded_to_tf32() -> None:
    operator = conv_operator((1, 1, 1, 1, 1), 1, (1, 1, 1))
    tensors = {"x": np.full((1, 1, 1, 1, 1), 1 + 2.0**-12, np.float32), "w": np.ones((1, 1, 1, 1, 1), np.float32)}
    assert verify_result(operator, tensors, tensors["x"]).passed
    assert not verify_result(operator, tensors, tensors["w"]).passed


def test_flushed_denormals_pass() -> None:
    operator = conv_operator((1, 1, 1, 1, 1), 1, (1, 1, 1))
    tensors = {name: np.ones((1, 1, 1, 1, 1), np.float32) for name in ("x", "w")}
    tensors["x"] *= np.float32(1e-40)
    for result in (tensors["x"], np.zeros_like(tensors["x"])):
        assert verify_result(operator, tensors, result).passed
    assert not verify_result(operator, tensors, np.full_like(tensors["x"], 1e-37)).passed


def test_wrong_shapes_and_dtypes_of_results() -> None:
    operator = operator_for(CONV)
    tensors = random_tensors(operator, 0)
    honest = compute(operator, tensors)
    assert str(operator.output_shape) in verify_result(operator, tensors, honest[:1]).reason
    assert "float64" in verify_result(operator, tensors, reference(operator, tensors)).reason


def test_an_empty_batch_passes() -> None:
    operator = operator_for(LAYERNORM, batch_size=0)
    tensors = random_tensors(operator, 0)
    assert verify_result(operator, tensors, np.empty(operator.output_shape, np.float32)).passed
