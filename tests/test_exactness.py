"""Results to the last bit, and what is around them: what is written, what is left alone, what is noticed."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from dispatcher.problem.operator import Operator
from tests.strategies import Place, conv_operator, every_brisk_place, operator_of, problem_of, tensors_of

IDENTITY = np.ones((1, 1, 1, 1, 1), np.float32)

#: Algorithms that transform their input, so that sums of small integers need not come out exact.
TRANSFORMING = ("winograd",)


def linear(dtype: str = "float32") -> dict[str, Operator]:
    """Operators that are exact on small integers: sums, maxima, and means over powers of two."""
    pools = [{"op": "avg_pool3d", "window": 2}, {"op": "max_pool3d", "window": 2}]
    return {
        "plain": conv_operator((2, 5, 4, 5, 19), 7, (3, 3, 3), dtype=dtype),
        "stride2": conv_operator(
            (2, 8, 4, 5, 11), 16, (3, 3, 3), stride=2, padding=1, output_padding=1, bias=True, dtype=dtype
        ),
        "odd_strides": conv_operator(
            (3, 5, 3, 4, 13), 33, (4, 2, 5), stride=[2, 3, 1], padding=[1, 0, 2], bias=True, dtype=dtype
        ),
        "dilated": conv_operator((1, 3, 3, 4, 7), 9, (2, 3, 2), stride=[1, 2, 3], dilation=3, dtype=dtype),
        "holes": conv_operator((2, 3, 2, 3, 5), 5, (1, 1, 1), stride=3, output_padding=2, bias=True, dtype=dtype),
        "depthwise": conv_operator((2, 7, 3, 4, 9), 7, (3, 3, 3), groups=7, padding=1, dtype=dtype),
        "wide_rows": conv_operator((2, 3, 2, 5, 53), 6, (1, 3, 4), groups=3, padding=[0, 1, 3], bias=True, dtype=dtype),
        "groups": conv_operator((1, 6, 3, 4, 9), 15, (3, 3, 3), groups=3, stride=2, bias=True, dtype=dtype),
        "one_channel": conv_operator((1, 1, 5, 5, 70), 1, (3, 3, 3), dtype=dtype),
        "many_channels": conv_operator((1, 257, 2, 2, 3), 67, (1, 2, 1), dtype=dtype),
        "pooled": conv_operator(
            (2, 4, 4, 4, 6), 8, (3, 3, 3), stride=2, padding=1, after=[pools[1], pools[0]], dtype=dtype
        ),
        "pooled_first": conv_operator((2, 4, 4, 6, 9), 8, (3, 3, 3), before=[pools[0]], dtype=dtype),
        "summed": conv_operator(
            (2, 4, 4, 4, 6),
            8,
            (3, 3, 3),
            bias=True,
            after=[{"op": "max_pool3d", "window": [1, 2, 3]}, {"op": "sum", "axis": "channel"}],
            dtype=dtype,
        ),
        "residual": conv_operator(
            (2, 4, 3, 4, 6),
            4,
            (3, 3, 3),
            padding=1,
            before=[{"op": "relu", "as": "start"}],
            after=[{"op": "add", "value": "start"}, {"op": "scale", "by": 2.0}, {"op": "subtract", "value": 1.0}],
            dtype=dtype,
        ),
        "reduced": conv_operator(
            (2, 4, 3, 4, 6), 5, (3, 3, 3), after=[{"op": "sum", "axis": ["batch", "height", "width"]}], dtype=dtype
        ),
    }


LINEAR = linear()
each_linear = pytest.mark.parametrize("name", LINEAR)


def exact(operator: Operator, tensors: dict[str, np.ndarray]) -> np.ndarray:
    return Place("numpy").run(operator.problem, **tensors)


def compiled(place: Place, operator: Operator) -> Callable[..., np.ndarray]:
    return place.compile(operator.problem, dtype=operator.dtype)


# ---- bit for bit -------------------------------------------------------------------------------------------
@each_linear
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_brisk_place
def test_small_integers_come_out_exact(place: Place, dtype: str, name: str) -> None:
    if place.slow and dtype == "float64":
        pytest.skip("compiling every kernel once more takes long on this device")
    operator = linear(dtype)[name]
    tensors = tensors_of(operator, "integers")
    result, comparison = place.check(operator, tensors)
    assert comparison.passed, comparison.reason
    if place.algorithm not in TRANSFORMING:
        np.testing.assert_array_equal(result, exact(operator, tensors))


@each_linear
@every_brisk_place
def test_repeated_calls_are_bit_equal(place: Place, name: str) -> None:
    operator = LINEAR[name]
    call, tensors = compiled(place, operator), tensors_of(operator)
    first = call(**tensors).copy()
    for _ in range(5):
        assert call(**tensors).tobytes() == first.tobytes()
    assert compiled(place, operator)(**tensors).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", ["stride2", "pooled", "residual"])
@every_brisk_place
def test_threads_may_share_an_operator(place: Place, name: str) -> None:
    operator = LINEAR[name]
    call = compiled(place, operator)
    inputs = [tensors_of(operator) for _ in range(8)]
    for number, tensors in enumerate(inputs):
        tensors["x"] = tensors["x"] * np.float32(number + 1)
    alone = [call(**tensors).tobytes() for tensors in inputs]
    wrong: list[tuple[int, Any]] = []

    def work(number: int) -> None:
        try:
            for _ in range(6):
                if call(**inputs[number]).tobytes() != alone[number]:
                    wrong.append((number, "another result"))
        except Exception as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- memory ------------------------------------------------------------------------------------------------
GUARD = 61  # elements: the output then starts neither on a page nor on a vector
POISON = -12345.0


@each_linear
@every_brisk_place
def test_nothing_is_written_beside_the_output(place: Place, name: str) -> None:
    operator = LINEAR[name]
    tensors = tensors_of(operator, "integers")
    size = math.prod(operator.output_shape)
    memory = np.full(size + 2 * GUARD, POISON, np.float32)
    output = memory[GUARD : GUARD + size].reshape(operator.output_shape)
    result = compiled(place, operator)(output=output, **tensors)
    assert result is output
    assert (memory[:GUARD] == POISON).all() and (memory[GUARD + size :] == POISON).all()
    if place.algorithm not in TRANSFORMING:
        np.testing.assert_array_equal(output, exact(operator, tensors))


@each_linear
@every_brisk_place
def test_every_element_of_the_output_is_written(place: Place, name: str) -> None:
    operator = LINEAR[name]
    tensors = tensors_of(operator)
    for poison in (math.nan, math.inf, 0.0):
        output = np.full(operator.output_shape, poison, np.float32)
        compiled(place, operator)(output=output, **tensors)
        assert output.tobytes() == compiled(place, operator)(**tensors).tobytes()


@each_linear
@every_brisk_place
def test_inputs_are_neither_changed_nor_shared(place: Place, name: str) -> None:
    operator = LINEAR[name]
    tensors = tensors_of(operator)
    before = {tensor: array.copy() for tensor, array in tensors.items()}
    result = compiled(place, operator)(**tensors)
    result.fill(7.0)
    for tensor, array in tensors.items():
        assert array.tobytes() == before[tensor].tobytes()
        assert not np.may_share_memory(result, array)


@every_brisk_place
def test_results_of_different_calls_are_different_memory(place: Place) -> None:
    operator = LINEAR["stride2"]
    call, tensors = compiled(place, operator), tensors_of(operator)
    first = call(**tensors)
    kept = first.copy()
    second = call(**{**tensors, "x": -tensors["x"]})
    assert not np.may_share_memory(first, second)
    np.testing.assert_array_equal(first, kept)


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def spread(array: np.ndarray) -> np.ndarray:
    """The same numbers as every second one along two axes of something larger."""
    shape = list(array.shape)
    shape[0], shape[-1] = 2 * shape[0], 2 * shape[-1]
    memory = np.full(shape, np.nan, array.dtype)
    view = memory[::2, ..., ::2] if array.ndim > 1 else memory[::2]
    view[...] = array
    return view


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def reverse(array: np.ndarray) -> np.ndarray:
    return array[..., ::-1].copy()[..., ::-1]


def permuted(array: np.ndarray) -> np.ndarray:
    order = np.random.default_rng(1).permutation(array.ndim)
    return array.transpose(order).copy().transpose(np.argsort(order))


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "fortran": np.asfortranarray,
    "reverse": reverse,
    "spread": spread,
    "permuted": permuted,
    "read_only": read_only,
    "unaligned": unaligned,
    "swapped_bytes": lambda array: array.astype(array.dtype.newbyteorder("S" if sys.byteorder else "=")),
    "subclass": lambda array: array.view(type("Tagged", (np.ndarray,), {})),
    "list": lambda array: array.tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_brisk_place
def test_any_memory_layout(place: Place, layout: str) -> None:
    operator = LINEAR["stride2"]
    tensors = tensors_of(operator, "integers")
    call = compiled(place, operator)
    arranged = {name: LAYOUTS[layout](array) for name, array in tensors.items()}
    np.testing.assert_array_equal(call(**arranged), call(**tensors))


@every_brisk_place
def test_broadcast_views_are_inputs_too(place: Place) -> None:
    operator = LINEAR["stride2"]
    tensors = tensors_of(operator, "integers")
    tensors["x"] = np.broadcast_to(tensors["x"][:, :, :1], tensors["x"].shape)
    call = compiled(place, operator)
    np.testing.assert_array_equal(call(**tensors), call(**{**tensors, "x": tensors["x"].copy()}))


# ---- numbers that are not finite ---------------------------------------------------------------------------
def check_not_finite(place: Place, operator: Operator, tensors: dict[str, np.ndarray]) -> np.ndarray:
    result, comparison = place.check(operator, tensors)
    assert comparison.passed, comparison.reason
    return result


ODD = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}
each_odd = pytest.mark.parametrize("odd", ODD)


@each_odd
@pytest.mark.parametrize("tensor", ["x", "w", "b"])
@pytest.mark.parametrize("name", ["stride2", "odd_strides", "holes", "groups", "summed"])
@every_brisk_place
def test_they_travel_through_a_convolution(place: Place, name: str, tensor: str, odd: str) -> None:
    """In any tensor, at the ends and in the middle."""
    operator = LINEAR[name]
    for position in (0, 0.4, 1):
        tensors = tensors_of(operator)
        flat = tensors[tensor].reshape(-1)
        flat[int(position * (flat.size - 1))] = ODD[odd]
        check_not_finite(place, operator, tensors)
    check_not_finite(place, operator, tensors_of(operator))


@pytest.mark.parametrize("fill", ["nan", "inf", "minus_inf"])
@every_brisk_place
def test_tensors_of_nothing_else(place: Place, fill: str) -> None:
    operator = LINEAR["summed"]
    for tensor in ("x", "w"):
        tensors = tensors_of(operator)
        tensors[tensor][...] = ODD[fill]
        check_not_finite(place, operator, tensors)


@each_odd
@pytest.mark.parametrize("op", ["max_pool3d", "avg_pool3d"])
@pytest.mark.parametrize("window", [(2, 2, 2), (3, 1, 3), (1, 3, 2)], ids=str)
@every_brisk_place
def test_they_travel_through_pools_from_any_place(
    place: Place, window: tuple[int, int, int], op: str, odd: str
) -> None:
    shape = (1, 1, *(2 * size + 1 for size in window))
    steps = {"before": [{"op": op, "window": list(window)}], "after": [{"op": op, "window": list(window)}]}
    for where, pool in steps.items():
        operator = conv_operator(shape, 1, (1, 1, 1), **{where: pool})
        for at in product(*(range(size) for size in window)):
            x = np.full(shape, -3.0, np.float32)
            x[0, 0, window[0] + at[0], window[1] + at[1], at[2]] = ODD[odd]
            result = check_not_finite(place, operator, {"x": x, "w": IDENTITY})
            assert np.isnan(result).sum() == (1 if odd == "nan" else 0)
            # The far ends, which no whole window holds, are dropped.
            x = np.full(shape, -3.0, np.float32)
            x[0, 0, -1, -1, -1] = ODD[odd]
            np.testing.assert_array_equal(check_not_finite(place, operator, {"x": x, "w": IDENTITY}), np.float32(-3.0))


@every_brisk_place
def test_maxima_of_minus_infinity(place: Place) -> None:
    pools = [{"op": "max_pool3d", "window": 2}, {"op": "max_pool3d", "window": 3}]
    after = [*pools, {"op": "max", "axis": ["channel", "width"]}]
    operator = conv_operator((1, 3, 6, 6, 12), 3, (1, 1, 1), groups=3, after=after)
    x = np.full((1, 3, 6, 6, 12), -np.inf, np.float32)
    result = place.run(operator.problem, x=x, w=np.ones((3, 1, 1, 1, 1), np.float32))
    np.testing.assert_array_equal(result, np.float32(-np.inf))


POINTWISE = [
    "gelu",
    "relu",
    "sigmoid",
    "tanh",
    "silu",
    "softplus",
    "hardswish",
    {"op": "leaky_relu", "slope": 0.25},
    {"op": "leaky_relu", "slope": -0.25},
    {"op": "clamp", "min": -1.0, "max": 1.0},
    {"op": "clamp", "min": 1.0, "max": -1.0},
    {"op": "clamp", "min": 0.5},
    {"op": "clamp", "max": 0.5},
    "clamp",
    {"op": "add", "value": -0.0},
    {"op": "scale", "by": 0.0},
]


def step_name(step: Any) -> str:
    return step if isinstance(step, str) else "_".join(str(part) for part in step.values())


#: Ends of every range, signed zeros, subnormal numbers, and what lies where approximations change over.
EXTREMES = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    *(sign * value for value in (1e-45, 1e-40, 1.2e-38, 1e-20, 1e-5, 3.4e38, 1e30) for sign in (1, -1)),
    *(sign * value for value in (0.5, 1, 3, 4, 5.65, 5.7, 6, 9, 10, 17, 20, 88, 89, 104, 800) for sign in (1, -1)),
]


@pytest.mark.parametrize("step", POINTWISE, ids=step_name)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "alone"])
@every_brisk_place
def test_pointwise_functions_at_their_ends(place: Place, fused: bool, step: Any) -> None:
    x = np.array(EXTREMES, np.float32).reshape(1, 1, 1, 1, -1)
    if fused:
        check_not_finite(place, conv_operator(x.shape, 1, (1, 1, 1), after=[step]), {"x": x, "w": IDENTITY})
    else:
        check_not_finite(place, operator_of({"x": x.shape}, [step]), {"x": x})


REDUCTIONS = ["softmax", "layer_norm", "sum", "mean", "max", "log_sum_exp"]


@each_odd
@pytest.mark.parametrize("axis", ["channel", "spatial", "width", "depth"])
@pytest.mark.parametrize("op", REDUCTIONS)
@every_brisk_place
def test_they_travel_through_reductions(place: Place, op: str, axis: str, odd: str) -> None:
    operator = conv_operator((1, 3, 2, 3, 21), 3, (1, 1, 1), groups=3, after=[{"op": op, "axis": axis}])
    for position in (0, 100, -1):
        tensors = tensors_of(operator)
        tensors["x"].reshape(-1)[position] = ODD[odd]
        check_not_finite(place, operator, tensors)


@each_odd
@pytest.mark.parametrize("op", REDUCTIONS)
@every_brisk_place
def test_reductions_of_nothing_else(place: Place, op: str, odd: str) -> None:
    operator = conv_operator((1, 3, 2, 3, 21), 3, (1, 1, 1), groups=3, after=[{"op": op, "axis": ["channel", "width"]}])
    x = np.full((1, 3, 2, 3, 21), ODD[odd], np.float32)
    check_not_finite(place, operator, {"x": x, "w": np.ones((3, 1, 1, 1, 1), np.float32)})


# ---- changes between calls ---------------------------------------------------------------------------------
@each_linear
@every_brisk_place
def test_changes_in_place_are_noticed(place: Place, name: str) -> None:
    operator = LINEAR[name]
    call, tensors = compiled(place, operator), tensors_of(operator, "integers")
    call(**tensors)
    for tensor in tensors:
        tensors[tensor][...] = tensors[tensor][::-1].copy()
        tensors[tensor].reshape(-1)[-1] += 1.0  # one element, the last one
        result = call(**tensors)
        fresh = compiled(place, operator)(**{key: array.copy() for key, array in tensors.items()})
        np.testing.assert_array_equal(result, fresh)
        if place.algorithm not in TRANSFORMING:
            np.testing.assert_array_equal(result, exact(operator, tensors))


@every_brisk_place
def test_operands_that_change_are_noticed(place: Place) -> None:
    channel, full = (1, 4, 1, 1, 1), (2, 4, 3, 4, 6)
    after = [{"op": "scale", "by": "s"}, {"op": "add", "value": "a"}, {"op": "sum", "axis": "channel"}]
    operator = conv_operator(full, 4, (1, 1, 1), after=after, extra={"s": channel, "a": full})
    call, tensors = compiled(place, operator), tensors_of(operator, "integers")
    for tensor in ("x", "w", "s", "a", "s", "w"):
        call(**tensors)
        tensors[tensor][..., -1] += 1.0
        np.testing.assert_array_equal(call(**tensors), exact(operator, tensors))


@every_brisk_place
def test_weights_may_become_infinite_and_finite_again(place: Place) -> None:
    operator = LINEAR["stride2"]
    call, tensors = compiled(place, operator), tensors_of(operator, "integers")
    first = call(**tensors).copy()
    kept = tensors["w"].copy()
    tensors["w"].reshape(-1)[5] = np.inf
    np.testing.assert_array_equal(call(**tensors), exact(operator, tensors))
    tensors["w"][...] = kept
    np.testing.assert_array_equal(call(**tensors), first)


@every_brisk_place
def test_scalars_that_change_are_noticed(place: Place) -> None:
    problem = "conv-transpose3d-layernorm-gelu-scaling"
    x = np.arange(1.0, 9.0, dtype=np.float32).reshape(1, 2, 1, 1, 4) ** 2
    w = np.array([[1, -2, 3], [2, 1, 0]], np.float32).reshape(2, 3, 1, 1, 1)
    call = place.compile(problem, input=None)
    results = [call(input=x, kernel=w, scaling_factor=factor) for factor in (1.0, 4.0, -0.0, 1.0)]
    np.testing.assert_array_equal(results[1], 4.0 * results[0])
    np.testing.assert_array_equal(results[2], -0.0 * results[0])
    np.testing.assert_array_equal(results[3], results[0])


@every_brisk_place
def test_shapes_may_change_between_calls(place: Place) -> None:
    problem = "conv-transpose-3d-asym-input-sq-kernel"
    call = place.compile(problem, stride=2)
    for batch, width in ((1, 3), (2, 9), (0, 3), (1, 3), (3, 17)):
        x = np.arange(batch * 2 * 2 * 3 * width, dtype=np.float32).reshape(batch, 2, 2, 3, width)
        w = np.ones((2, 3, 2, 2, 2), np.float32)
        expected = x.sum(axis=1, keepdims=True).repeat(2, 2).repeat(2, 3).repeat(2, 4)
        np.testing.assert_array_equal(call(input=x, kernel=w), expected.repeat(3, 1))


@every_brisk_place
def test_two_operators_do_not_disturb_each_other(place: Place) -> None:
    one, other = LINEAR["stride2"], LINEAR["groups"]
    first, second = compiled(place, one), compiled(place, other)
    tensors, others = tensors_of(one), tensors_of(other)
    alone, others_alone = first(**tensors).tobytes(), second(**others).tobytes()
    for _ in range(3):
        assert first(**tensors).tobytes() == alone
        assert second(**others).tobytes() == others_alone


@every_brisk_place
def test_the_input_may_be_used_in_several_ways(place: Place) -> None:
    """One tensor as the convolution's input, its weights and an operand."""
    problem = problem_of(
        {"x": (1, 1, 1, 1, 3)},
        [{"op": "conv_transpose3d", "weight": "x", "padding": [0, 0, 1]}, {"op": "add", "value": "x"}],
    )
    x = np.array([1.0, 2.0, 3.0], np.float32).reshape(1, 1, 1, 1, 3)
    np.testing.assert_array_equal(place.run(problem, x=x).ravel(), [4 + 1, 10 + 2, 12 + 3])
