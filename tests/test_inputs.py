"""Random inputs: the same bytes everywhere, and of the kind that was asked for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.numpy_ref import reference
from dispatcher.check.inputs import INPUT_SETS, meaningful_sets, random_tensors, varied
from dispatcher.errors import InputError
from dispatcher.problem.operator import Operator, bind
from dispatcher.problem.schema import problem_from_mapping
from tests.honest import compute
from tests.strategies import conv_operator, operator_of

REPOSITORY = Path(__file__).resolve().parent.parent


def small(dtype: str = "float32") -> Operator:
    return conv_operator((2, 4, 3, 4, 5), 6, (2, 3, 2), bias=True, dtype=dtype)


def digest(tensors: dict[str, np.ndarray]) -> str:
    """A fingerprint of all bytes, names and shapes."""
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(f"{name}{tensor.shape}{tensor.dtype}".encode() + tensor.tobytes())
    return state.hexdigest()


#: Made once, on Linux with NumPy 2.4: other machines and releases must make the same.
DIGESTS = {
    ("signed", "float16"): "f8f1d2709437f363",
    ("signed", "float32"): "051f3aeb105eae8d",
    ("signed", "float64"): "e9bdacb1dec5d65b",
    ("graded", "float16"): "34a4231f64901339",
    ("graded", "float32"): "fbfdf24e315f642b",
    ("graded", "float64"): "f32855c8f841bf2f",
    ("large_mean", "float16"): "5fab14b6d4993754",
    ("large_mean", "float32"): "22e144b076880971",
    ("large_mean", "float64"): "f8c632c4cea9cf15",
    ("large", "float16"): "ae42955c82841456",
    ("large", "float32"): "1b90e3cf8e871938",
    ("large", "float64"): "050d27990a96fb26",
    ("small", "float16"): "619e520d7fa58e15",
    ("small", "float32"): "f00cc33fbb85d973",
    ("small", "float64"): "6dbe205391e1be09",
    ("negative", "float16"): "6820ad2c931783c5",
    ("negative", "float32"): "3fe8f2d876b34ff2",
    ("negative", "float64"): "8e485f80ba055be6",
    ("positive", "float16"): "3dd2de2a4084d3be",
    ("positive", "float32"): "d158187e9df6cee0",
    ("positive", "float64"): "8d07aceb00d35c42",
    ("constant", "float16"): "cddd70de1d885341",
    ("constant", "float32"): "ab641ec7486f2bd6",
    ("constant", "float64"): "059e61f2f14cf9c6",
    ("integers", "float16"): "5aec908a1130cf0d",
    ("integers", "float32"): "9c320c0095b4eb74",
    ("integers", "float64"): "84af240c1757fe8b",
    ("denormal", "float16"): "61ff90ae76ac3e45",
    ("denormal", "float32"): "46153304b5a4fd95",
    ("denormal", "float64"): "b741f7d092469448",
    ("spikes", "float16"): "25c2ba1a4ab4b77d",
    ("spikes", "float32"): "51aae9863d588272",
    ("spikes", "float64"): "8e8304c93e46f971",
    ("gaps", "float16"): "c910460bc82bc0bc",
    ("gaps", "float32"): "2d68895ab93896c0",
    ("gaps", "float64"): "dffa5706d1a64cd1",
    ("one_nan", "float16"): "c4c293b6754087d0",
    ("one_nan", "float32"): "711d117583a041d8",
    ("one_nan", "float64"): "64bf91f81423b1f8",
    ("one_inf", "float16"): "d11af8016c9c3372",
    ("one_inf", "float32"): "ee371650f0616e93",
    ("one_inf", "float64"): "9087ad491ba79066",
    ("uniform", "float16"): "292eabc47165723e",
    ("uniform", "float32"): "283520d8ef08bd1e",
    ("uniform", "float64"): "b6486f634165ee6a",
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", INPUT_SETS)
def test_the_bytes_never_change(kind: str, dtype: str) -> None:
    assert digest(random_tensors(small(dtype), 0, kind=kind))[:16] == DIGESTS[kind, dtype]


def test_a_fresh_process_makes_the_same_bytes() -> None:
    code = "from tests.test_inputs import *; print(digest(random_tensors(small(), 7)))"
    expected = digest(random_tensors(small(), 7))
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.strip() == expected


def test_a_tensor_depends_on_its_name_and_shape_only() -> None:
    tensors = random_tensors(small(), 3)
    shapes = {"x": (2, 4, 3, 4, 5), "extra": (2, 4, 3, 4, 5)}
    other = random_tensors(operator_of(shapes, [{"op": "add", "value": "extra"}]), 3)
    np.testing.assert_array_equal(tensors["x"], other["x"])
    assert not np.array_equal(other["x"], other["extra"])


def test_seeds_differ_and_repeat() -> None:
    zero, one = random_tensors(small(), 0), random_tensors(small(), 1)
    for name in zero:
        assert not np.array_equal(zero[name], one[name])
        np.testing.assert_array_equal(zero[name], random_tensors(small(), 0)[name])


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(5)
    expected = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    random_tensors(small(), 0)
    np.testing.assert_array_equal(np.random.get_state()[1], expected)  # type: ignore[index]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, np.int64(4), np.uint64(2**64 - 1)])
def test_good_seeds(seed: Any) -> None:
    random_tensors(small(), seed)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, 1.0, "abc", "1", True, False, None, np.bool_(True), [1]])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(InputError, match="seed"):
        random_tensors(small(), seed)


def test_an_unknown_kind() -> None:
    with pytest.raises(InputError, match="kind is 'normal'"):
        random_tensors(small(), 0, kind="normal")


def test_order_layout_and_empty_batches() -> None:
    operator = conv_operator((0, 4, 3, 4, 5), 6, (2, 3, 2), bias=True)
    for kind in INPUT_SETS:
        tensors = random_tensors(operator, 0, kind=kind)
        assert list(tensors) == list(operator.tensor_shapes)
        for name, tensor in tensors.items():
            assert tensor.shape == operator.tensor_shapes[name] and tensor.dtype == np.float32
            assert tensor.flags.c_contiguous and tensor.flags.writeable


@pytest.mark.parametrize("before", [[], [{"op": "avg_pool3d", "window": 2}]], ids=["plain", "pooled"])
@pytest.mark.parametrize("stride", [1, 2])
def test_signed_inputs_give_outputs_of_deviation_one(before: list[Any], stride: int) -> None:
    operator = conv_operator((2, 16, 16, 16, 16), 16, (4, 4, 4), before=before, stride=stride, padding=1)
    tensors = random_tensors(operator, 0)
    assert abs(tensors["x"].mean()) < 0.02 and abs(tensors["x"].std() - 1) < 0.02
    result = reference(operator, tensors)
    result = result[..., 3:-3, 3:-3, 3:-3]  # where all taps take part
    assert 0.8 < result.std() < 1.2
    inside = ((result > 0) & (result < 1)).mean()
    assert 0.2 < inside < 0.5  # a clamp to [0, 1] is partly active, at both ends
    assert (result < 0).mean() > 0.3 and (result > 1).mean() > 0.1


def test_signed_factors_are_away_from_zero_and_terms_have_both_signs() -> None:
    shapes = {"x": (1, 64, 1, 1, 1), "f": (64, 1, 1, 1), "t": (64,), "g": (64,)}
    pipeline = [{"op": "scale", "by": "f"}, {"op": "layer_norm", "axis": "channel", "weight": "g", "bias": "t"}]
    tensors = random_tensors(operator_of(shapes, pipeline), 0)
    for name in ("f", "g"):
        assert np.abs(tensors[name]).min() >= 0.5
    for name in ("f", "g", "t"):
        assert (tensors[name] > 0).any() and (tensors[name] < 0).any()


def test_float32_data_does_not_fit_fewer_bits() -> None:
    """Else a backend that rounds its inputs would go unnoticed."""
    for tensor in random_tensors(small(), 0).values():
        kept = (tensor.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        assert (kept != tensor).mean() > 0.9


def test_integers() -> None:
    tensors = random_tensors(small(), 0, kind="integers")
    for tensor in tensors.values():
        assert (tensor == np.rint(tensor)).all() and np.abs(tensor).max() <= 3
    assert set(np.unique(tensors["x"])) == set(range(-3, 4))


def test_uniform() -> None:
    tensors = random_tensors(conv_operator((2, 16, 12, 12, 12), 3, (3, 3, 3)), 0, kind="uniform")
    for tensor in tensors.values():
        assert tensor.min() >= 0 and tensor.max() < 1
    assert abs(tensors["x"].mean() - 0.5) < 0.01


def test_large_mean() -> None:
    operator = conv_operator((1, 32, 6, 6, 6), 32, (3, 3, 3), padding=1, bias=True)
    result = reference(operator, random_tensors(operator, 0, kind="large_mean"))
    middle = result[..., 2:-2, 2:-2, 2:-2]
    assert (np.abs(middle.mean(axis=1)) > 50 * middle.std(axis=1)).all() and middle.std(axis=1).min() > 0


def test_constant_makes_channels_equal() -> None:
    operator = conv_operator((1, 24, 3, 3, 3), 5, (3, 3, 3), bias=True)
    tensors = random_tensors(operator, 0, kind="constant")
    assert all(len(np.unique(tensor)) == 1 for tensor in tensors.values())
    result = reference(operator, tensors)
    assert (result == result[:, :1]).all()
    np.testing.assert_array_equal(result, result.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_one_nan_one_infinity_and_denormals(dtype: str) -> None:
    signed = random_tensors(small(dtype), 0)
    for kind, odd in (("one_nan", np.isnan), ("one_inf", np.isposinf)):
        places = set()
        for seed in range(20):
            tensors = random_tensors(small(dtype), seed, kind=kind)
            ((place,),) = [np.argwhere(odd(tensors["x"]))]
            places.add(tuple(int(index) for index in place))
            for index, extent in zip(place, tensors["x"].shape, strict=True):
                assert extent // 4 <= index < max(1, extent - extent // 4)
        assert len(places) > 5
        tensors = random_tensors(small(dtype), 0, kind=kind)
        np.testing.assert_array_equal(tensors["x"][~odd(tensors["x"])], signed["x"][~odd(tensors["x"])])
        np.testing.assert_array_equal(tensors["w"], signed["w"])
    denormal = random_tensors(small(dtype), 0, kind="denormal")
    assert (np.abs(denormal["x"]) < np.finfo(dtype).tiny).all() and (denormal["x"] != 0).mean() > 0.9
    np.testing.assert_array_equal(denormal["w"], signed["w"])


def test_graded_input_halves_with_each_step() -> None:
    signed, graded = (random_tensors(small(), 0, kind=kind) for kind in ("signed", "graded"))
    np.testing.assert_array_equal(graded["w"], signed["w"])
    for d, h, w in ((0, 0, 0), (0, 0, 3), (2, 3, 4)):
        np.testing.assert_array_equal(
            graded["x"][..., d, h, w], signed["x"][..., d, h, w] * np.float32(2.0 ** -(d + h + w))
        )


@pytest.mark.parametrize(("dtype", "spike"), [("float16", 2.0**12), ("float32", 2.0**40), ("float64", 2.0**40)])
def test_spikes_are_few_and_gaps_are_zero(dtype: str, spike: float) -> None:
    operator = conv_operator((1, 16, 8, 16, 16), 6, (2, 3, 2), dtype=dtype)
    signed, spikes, gaps = (random_tensors(operator, 0, kind=kind) for kind in ("signed", "spikes", "gaps"))
    odd = np.abs(spikes["x"]) == spike
    assert 5 < odd.sum() < 40 and (spikes["x"][odd] > 0).any() and (spikes["x"][odd] < 0).any()
    np.testing.assert_array_equal(spikes["x"][~odd], signed["x"][~odd])
    np.testing.assert_array_equal(spikes["w"], signed["w"])
    assert not gaps["w"][:, ::2, :, 0].any() and not gaps["x"].reshape(1, 16, 8, 4, 4, 16)[:, :, :, :, 2:].any()
    np.testing.assert_array_equal(gaps["w"][:, :, :, 1:], signed["w"][:, :, :, 1:])
    np.testing.assert_array_equal(gaps["w"][:, 1::2], signed["w"][:, 1::2])
    assert (gaps["x"] == signed["x"]).mean() > 0.49


@pytest.mark.parametrize(("kind", "factor"), [("large", 256), ("small", 1 / 256)])
def test_large_and_small_weights(kind: str, factor: float) -> None:
    signed, scaled = random_tensors(small(), 0), random_tensors(small(), 0, kind=kind)
    np.testing.assert_array_equal(scaled["x"], signed["x"])
    np.testing.assert_array_equal(scaled["w"], signed["w"] * np.float32(factor))
    terms = factor if kind == "small" else 1  # a bias would hide what is small
    np.testing.assert_array_equal(scaled["b"], signed["b"] * np.float32(terms))


def test_negative_makes_the_convolution_negative() -> None:
    for seed in range(5):
        result = reference(small(), random_tensors(small(), seed, kind="negative"))
        assert result.max() < 0 and result.std() > 0.1


def test_positive_makes_the_convolution_positive() -> None:
    for seed in range(5):
        result = reference(small(), random_tensors(small(), seed, kind="positive"))
        assert result.min() > 0 and result.std() > 0.1


@pytest.mark.parametrize("shape", [(20,), (2, 3, 20), (2, 3, 5, 20)])
def test_graded_falls_along_the_spatial_axes_of_any_rank(shape: tuple[int, ...]) -> None:
    axes = {"x": [f"n{place}" for place in range(len(shape))], "output": "output"}
    problem = problem_from_mapping(
        {"name": "test", "rank": max(1, len(shape) - 2), "parameters": axes, "pipeline": ["relu"]}
    )
    operator = bind(problem, {f"n{place}": extent for place, extent in enumerate(shape)}, {})
    graded, signed = (random_tensors(operator, 0, kind=kind)["x"] for kind in ("graded", "signed"))
    factors = (graded / signed)[(0,) * (len(shape) - 1)]
    np.testing.assert_array_equal(factors, 0.5 ** (np.arange(20) % 12))


def test_which_sets_show_something() -> None:
    def sets(*pipeline: Any) -> set[str]:
        operator = conv_operator((1, 4, 4, 4, 4), 4, (3, 3, 3), after=list(pipeline))
        return set(meaningful_sets(operator)) - {"signed", "graded", "spikes", "gaps", "denormal", "one_nan", "one_inf"}

    softmax = {"op": "softmax", "axis": "spatial"}
    norm = {"op": "layer_norm", "axis": "channel"}
    assert sets() == {"large_mean", "integers"}
    assert sets({"op": "max_pool3d", "window": 3}) == {"large_mean", "integers", "negative"}
    assert sets({"op": "avg_pool3d", "window": 2}) == {"large_mean", "integers"}
    assert sets({"op": "avg_pool3d", "window": 3}) == {"large_mean"}  # sevenths are not exact, nor 27ths
    assert sets({"op": "scale", "by": 0.3}) == {"large_mean"}
    assert sets({"op": "clamp", "min": 0.0, "max": 1.0}) == {"integers"}
    assert sets(norm) == {"large_mean", "small", "constant"}
    assert sets(norm, "gelu") == {"large_mean", "small", "constant"}
    assert sets("gelu") == {"large_mean", "large"}
    assert sets({"op": "sum", "axis": "height"}, "relu") == {"large_mean", "integers", "positive"}
    assert sets(softmax) == {"large", "constant"}
    assert next(iter(INPUT_SETS)) == "signed" == meaningful_sets(small())[0]


def test_integers_are_exact_where_they_are_meaningful() -> None:
    pipelines: list[list[Any]] = [
        [],
        [{"op": "avg_pool3d", "window": 2}, {"op": "sum", "axis": "channel"}],
        [{"op": "clamp", "min": -5.0, "max": 7.0}, {"op": "max_pool3d", "window": 2}],
    ]
    for after in pipelines:
        operator = conv_operator((1, 33, 4, 4, 4), 4, (3, 3, 3), after=after)
        assert "integers" in meaningful_sets(operator)
        tensors = random_tensors(operator, 0, kind="integers")
        np.testing.assert_array_equal(compute(operator, tensors), reference(operator, tensors))


def test_varied_tensors_are_new_or_nearly_the_same() -> None:
    generator = np.random.default_rng(3)
    shapes = {"input": (4, 8, 5, 6, 7), "scale": (1, 6, 1, 1, 1)}
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    before = {name: array.copy() for name, array in tensors.items()}
    new, near, both = (varied(tensors, steps) for steps in ([("new", 1)], [("near", 1)], [("new", 1), ("near", 1)]))
    for name, array in tensors.items():
        assert np.array_equal(array, before[name])
        assert not np.isin(new[name], array).any()
        assert np.array_equal(np.sort(near[name], axis=None), np.sort(array, axis=None))
        assert np.array_equal(varied(new, [("near", 1)])[name], both[name])
    assert 8 <= (near["input"] != tensors["input"]).sum() <= 32
    assert 8 <= (both["input"] != new["input"]).sum() <= 32
    assert not np.isin(varied(tensors, [("new", 2)])["input"], new["input"]).any()
    assert all(array is tensors[name] for name, array in varied(tensors, []).items())
