"""What runs as one launch: residuals, whole tensors as operands, statistics that a launch leaves for the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher.check.comparison import Comparison
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry
from dispatcher.problem.operator import Operator
from tests.strategies import PLACES, Place, call_on, checked_run, operator_of, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND, lines
from dispatcher.backends.opencl.implementations import IMPLEMENTATIONS, choose, tasks_of
from dispatcher.backends.opencl.lowered import Rows, Value
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.target import Facts, Limits, Target

HERE = [place for place in PLACES if place.backend == "opencl"]
DIRECT = next(place for place in HERE if place.algorithm == "direct")
elsewhere = pytest.mark.parametrize(
    "place", [place for place in HERE if place.algorithm in ("tiled", "gather")], ids=str
)
on_lines = pytest.mark.parametrize(
    "place", [place for place in HERE if place.algorithm in ("direct", "winograd")], ids=str
)
CPU = Facts(
    cpu=True,
    compute_units=4,
    vec=16,
    vec_double=8,
    cache=900_000,
    global_memory=1 << 34,
    largest_buffer=1 << 32,
    unified=True,
    any_pointer=True,
)
TARGET = Target(CPU, Limits(1024, 48 << 10, 32, 4), "a device that nothing was tuned on")


def over(op: str, *axes: str, **fields: Any) -> dict[str, Any]:
    return {"op": op, "axis": list(axes), **fields}


def add(value: str, **fields: Any) -> dict[str, Any]:
    return {"op": "add", "value": value, **fields}


def times(by: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "scale", "by": by, **fields}


@dataclass(frozen=True)
class Case:
    """Steps behind a convolution whose result is called ``c``, and the launches that they take on lines.

    Attributes:
        launches: names of the steps of each launch, without the convolution's; joined by spaces.
        shapes: of tensors besides ``x``, ``w`` and ``b``.
        tiled: the launches on devices with work-groups, where they differ.
    """

    after: Sequence[Any]
    launches: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tiled: tuple[str, ...] | None = None
    stride: Any = 2
    x: tuple[int, ...] = (2, 4, 4, 5, 17)
    before: Sequence[Any] = ()

    def operator(self, dtype: str = "float32") -> Operator:
        shapes = {"x": self.x, "w": (self.x[1], 6, 3, 3, 3), "b": (6,), **self.shapes}
        convolution = {
            "op": "conv_transpose3d",
            "weight": "w",
            "bias": "b",
            "stride": self.stride,
            "padding": 1,
            "as": "c",
        }
        return operator_of(shapes, [*self.before, convolution, *self.after], dtype)


FULL = (2, 6, 7, 9, 33)
CONV = "conv_transpose3d"
RESIDUALS = {
    "residual": Case(["gelu", add("c")], (f"{CONV} gelu add",)),
    "itself": Case([{"op": "relu", "as": "r"}, "tanh", times("r"), times("r")], (f"{CONV} relu tanh scale scale",)),
    "skip_tensor": Case(
        [add("t", **{"as": "s"}), "hardswish", times("s")], (f"{CONV} add hardswish scale",), {"t": FULL}
    ),
    "per_row": Case([add("t"), "gelu", times("c")], (f"{CONV} add gelu scale",), {"t": (2, 1, 7, 9, 1)}),
    "per_column": Case([add("t"), times("u")], (f"{CONV} add scale",), {"t": (33,), "u": (9, 1)}),
    "three_phases": Case([add("t"), times("c")], (f"{CONV} add scale",), {"t": (49,)}, stride=[2, 1, 3]),
    "one_phase": Case(
        [add("x"), times("t")], (f"{CONV} add scale",), {"t": (6, 4, 1, 17)}, stride=1, x=(2, 6, 4, 5, 17)
    ),
    "after_layer_norm": Case(
        ["layer_norm", add("t", **{"as": "s"}), "gelu", times("s")], (f"{CONV} layer_norm add gelu scale",), {"t": FULL}
    ),
    "after_a_pool": Case(
        [{"op": "max_pool3d", "window": 2}, add("t"), "relu"], (f"{CONV} max_pool3d add relu",), {"t": (6, 3, 4, 16)}
    ),
    "after_a_channel_sum": Case([over("sum", "channel"), add("t")], (f"{CONV} sum add",), {"t": (2, 1, 7, 9, 33)}),
    "across_a_norm": Case(["layer_norm", add("c")], (CONV, "layer_norm add")),
    "a_norm_after_a_skip": Case([add("t"), "layer_norm"], (f"{CONV} add", "layer_norm"), {"t": FULL}),
    "an_earlier_value": Case(
        [add("start"), "relu"],
        ("gelu", f"{CONV} add relu"),
        before=[{"op": "gelu", "as": "start"}],
        stride=1,
        x=(2, 6, 4, 5, 17),
    ),
    "to_an_earlier_value": Case(  # the steps read it, and their operand is what the convolution makes
        [{"op": "add", "from": "start", "value": "c", "as": "sum"}, {"op": "maximum", "from": "start", "value": "sum"}],
        ("gelu", f"{CONV} add maximum"),
        before=[{"op": "gelu", "as": "start"}],
        stride=1,
        x=(2, 6, 4, 5, 17),
    ),
    "riders_of_a_softmax": Case(
        [over("softmax", "height"), add("t"), times("c")], (CONV, "softmax add scale"), {"t": FULL}
    ),
    "riders_of_a_sum": Case(
        [over("sum", "depth", "height"), add("t"), "gelu"], (CONV, "sum add gelu"), {"t": (2, 1, 1, 1, 33)}
    ),
    "riders_of_a_pool": Case(
        [{"op": "avg_pool3d", "window": [1, 2, 5]}, add("t"), "gelu"],
        (CONV, "avg_pool3d add gelu"),
        {"t": (2, 6, 7, 4, 6)},
    ),
}
STATISTICS = {
    "group_norm": Case(
        ["silu", {"op": "group_norm", "groups": 3, "weight": "g", "bias": "h"}, "hardswish"],
        (f"{CONV} silu", "group_norm hardswish"),
        {"g": (6,), "h": (6,)},
    ),
    "instance_norm": Case(["instance_norm", add("t"), "relu"], (CONV, "instance_norm add relu"), {"t": FULL}),
    "batch_norm": Case([{"op": "batch_norm", "weight": "g"}, times("c")], (CONV, "batch_norm scale"), {"g": (6,)}),
    "layer_norm": Case([over("layer_norm", "channel", "spatial")], (CONV, "layer_norm")),
    "softmax": Case([over("softmax", "spatial"), times(2.0)], (CONV, "softmax scale")),
    "softmax_of_items": Case([over("softmax", "channel", "spatial")], (CONV, "softmax")),
    "softmax_of_a_range": Case(
        [{"op": "clamp", "min": -0.5, "max": 0.75}, over("softmax", "spatial"), times("t")],
        (f"{CONV} clamp", "softmax scale"),
        {"t": (6, 1, 1, 1)},
    ),
    "softmax_of_a_sigmoid": Case(["sigmoid", over("softmax", "channel", "spatial")], (f"{CONV} sigmoid", "softmax")),
    "softmax_far_from_zero": Case(
        [add(100.0), {"op": "clamp", "min": 99.0, "max": 101.0}, over("softmax", "spatial")],
        (f"{CONV} add clamp", "softmax"),
    ),
    "mean": Case([over("mean", "spatial"), "gelu"], (CONV, "mean gelu")),
    "max": Case([over("max", "batch", "spatial"), "gelu"], (CONV, "max gelu")),
    "min_of_items": Case([over("min", "channel", "spatial"), add("t")], (CONV, "min add"), {"t": (2, 1, 1, 1, 1)}),
    "log_sum_exp": Case([over("log_sum_exp", "spatial")], (CONV, "log_sum_exp")),
    "mean_of_batch_norm": Case(
        [{"op": "batch_norm", "weight": "g", "bias": "h"}, over("mean", "spatial"), add("t")],
        (CONV, "batch_norm mean add"),
        {"g": (6,), "h": (6,), "t": (2, 6, 1, 1, 1)},
    ),
    "sum_of_group_norm": Case(
        [{"op": "group_norm", "groups": 2, "bias": "h"}, over("sum", "spatial")], (CONV, "group_norm sum"), {"h": (6,)}
    ),
    "mean_of_a_curve": Case(["batch_norm", "relu", over("mean", "spatial")], (CONV, "batch_norm relu", "mean")),
    "pooled": Case([{"op": "max_pool3d", "window": 2}, "instance_norm"], (f"{CONV} max_pool3d", "instance_norm")),
    "a_pool_of_its_own": Case(
        [{"op": "avg_pool3d", "window": [3, 2, 2]}, "instance_norm"],
        (CONV, "avg_pool3d", "instance_norm"),
        stride=[2, 2, 3],
        x=(2, 4, 4, 5, 23),
    ),
    "a_chain": Case(
        [
            over("softmax", "width"),
            {"op": "relu", "as": "r"},
            {"op": "abs", "from": "c"},
            add("r"),
            over("max", "spatial"),
        ],
        (CONV, "softmax relu", "abs add", "max"),
    ),
    "narrow_rows": Case(["instance_norm"], (CONV, "instance_norm"), x=(2, 4, 9, 8, 5)),
    "one_phase_rows": Case(["instance_norm", "gelu"], (CONV, "instance_norm gelu"), stride=1, x=(2, 4, 5, 4, 47)),
}
CASES = RESIDUALS | STATISTICS


def launches(place: Place, operator: Operator) -> list[Any]:
    place.need()
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    return list(BACKEND.compile(operator, device, eagerly(place)).launches)


def eagerly(place: Place) -> dict[str, Any]:
    """Options with which statistics are left for the next launch, small as these tensors are."""
    return {**place.options, "fusion": "eager"}


def check(place: Place, operator: Operator, tensors: Any) -> tuple[np.ndarray, Comparison]:
    place.need()
    return checked_run(call_on(operator, tensors, place.device, eagerly(place)), tensors)


def agrees(place: Place, operator: Operator) -> None:
    kinds = ("signed", "large_mean", "one_nan", "one_inf", "constant")
    for kind in kinds if place is DIRECT else ("signed", "one_nan"):
        _, comparison = check(place, operator, tensors_of(operator, kind))
        assert comparison.passed, f"{kind}: {comparison.reason}"


@pytest.mark.parametrize("name", CASES)
@on_lines
def test_launches_and_results_on_lines(place: Place, name: str) -> None:
    case = CASES[name]
    operator = case.operator()
    assert [" ".join(launch.steps) for launch in launches(place, operator)] == list(case.launches)
    agrees(place, operator)


@pytest.mark.parametrize("name", RESIDUALS)
@elsewhere
def test_residuals_elsewhere(place: Place, name: str) -> None:
    """They ride on every store; what a pool or a norm joins depends on local memory."""
    case = RESIDUALS[name]
    operator = case.operator()
    if place.algorithm == "tiled" and name != "after_a_pool":
        assert [" ".join(launch.steps) for launch in launches(place, operator)] == list(case.launches)
    agrees(place, operator)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_other_dtypes(name: str, dtype: str) -> None:
    operator = CASES[name].operator(dtype)
    _, comparison = check(DIRECT, operator, tensors_of(operator))
    assert comparison.passed, comparison.reason


@pytest.mark.parametrize("name", STATISTICS)
def test_repeated_calls_give_the_same_bits(name: str) -> None:
    operator = CASES[name].operator()
    DIRECT.need()
    call = dispatcher.compile(operator.problem, device=DIRECT.device, options=eagerly(DIRECT))
    tensors = tensors_of(operator)
    first = call(**tensors).tobytes()
    assert all(call(**tensors).tobytes() == first for _ in range(3))


@on_lines
def test_statistics_take_the_place_of_results_that_nobody_else_reads(place: Place) -> None:
    first, second = launches(place, STATISTICS["mean_of_batch_norm"].operator())
    assert first.detail["gathers"] == "moments of rows, and stores nothing else"
    assert second.detail["given"] == "moments of rows"
    first, _ = launches(place, STATISTICS["batch_norm"].operator())
    assert first.detail["gathers"] == "moments of rows"


@pytest.mark.parametrize("rank", [1, 2])
def test_images_and_signals_leave_statistics_as_volumes_do(rank: int) -> None:
    shapes = {"x": (*(2, 4, 9)[: rank + 1], 43), "w": (6, 4, 3, 3)[: rank + 2]}
    convolution = {"op": f"conv{rank}d", "weight": "w"}
    for steps, given in (([over("mean", "spatial")], "total"), (["instance_norm", over("sum", "spatial")], "moments")):
        operator = operator_of(shapes, [convolution, *steps])
        first, second = launches(DIRECT, operator)
        assert first.detail["gathers"] == f"{given} of rows, and stores nothing else"
        assert second.detail["given"] == f"{given} of rows"
        agrees(DIRECT, operator)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("op", ["softmax", "log_sum_exp", "max", "mean", "instance_norm"])
def test_planes_of_nothing_finite(op: str, value: float) -> None:
    place = DIRECT
    step = op if op == "instance_norm" else over(op, "spatial")
    operator = operator_of({"x": (2, 3, 4, 5, 37), "t": (2, 3, 1, 1, 1)}, [add("t"), step])
    x, t = tensors_of(operator)["x"], np.zeros((2, 3, 1, 1, 1), np.float32)
    t[0, 1] = value
    assert launches(place, operator)[0].detail["gathers"]
    with np.errstate(invalid="ignore"):
        expected = Place("numpy").run(operator.problem, x=x, t=t)
    result = dispatcher.run(operator.problem, device=place.device, options=eagerly(place), x=x, t=t)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(-20.0, 40.0), (-1.0, 1.0), (990.0, 1050.0)])
def test_a_softmax_of_a_range_is_as_exact_as_one_with_a_maximum(low: float, high: float) -> None:
    """Also where all values lie far below the bound, or the last one alone is large; no row shows in another one."""
    DIRECT.need()
    operator = operator_of(
        {"x": (2, 5, 3, 4, 37)}, [{"op": "clamp", "min": low, "max": high}, over("softmax", "spatial")]
    )
    x = tensors_of(operator)["x"] + np.float32(max(0.0, low))
    x[0, 1] = 0.3  # all equal
    x[0, 2] = math.inf
    x[0, 3] = high - 0.25
    x[1, 0, 0, 0, 36] = 1e30
    x[1, 2, 2, 3, 5] = math.nan
    clamped = np.clip(x.astype(np.float64), low, high)
    exponentials = np.exp(clamped - clamped.max((2, 3, 4), keepdims=True))
    expected = exponentials / exponentials.sum((2, 3, 4), keepdims=True)
    result = dispatcher.run(operator.problem, device=DIRECT.device, options={"fusion": "eager"}, x=x)
    assert np.isnan(result[1, 2]).all() and np.isnan(result).sum() == result[1, 2].size
    np.testing.assert_allclose(result, expected, rtol=4e-7, atol=1e-37)


def test_fusion_can_be_switched_off() -> None:
    place = DIRECT
    place.need()
    operator = STATISTICS["group_norm"].operator()
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    executable = BACKEND.compile(operator, device, {**place.options, "fusion": "off"})
    assert [launch.steps for launch in executable.launches] == [(step.op,) for step in operator.steps]
    tensors = tensors_of(operator)
    np.testing.assert_allclose(executable(tensors), place.run(operator.problem, **tensors), rtol=1e-4, atol=1e-5)


# ---- lowering, without a device ----------------------------------------------------------------------------
def lowered(operator: Operator, **options: Any) -> list[Any]:
    tasks = tasks_of(operator, TARGET, Options(**options), [])
    return [choose(task)[0].lower(task) for task in tasks]


def test_lowering_needs_no_device() -> None:
    conv, mean = lowered(STATISTICS["mean_of_batch_norm"].operator())
    assert conv.arguments[0] == Value(0)
    assert mean.arguments[0] == conv.arguments[3] == Rows(1, 3 * 2 * 6 * 7 * 9)
    assert Value(1) not in conv.arguments and Value(1) not in mean.arguments
    assert mean.output == 4 and "op_add" in mean.text and "op_" not in conv.text


@pytest.mark.parametrize("algorithm", ["auto", "direct", "winograd", "tiled", "gather"])
def test_a_launch_names_all_other_implementations(algorithm: str) -> None:
    operator = RESIDUALS["a_norm_after_a_skip"].operator()
    for task in tasks_of(operator, TARGET, Options(algorithm), []):
        best, rejected = choose(task)
        assert {best.name, *(name for name, _ in rejected)} == {each.name for each in IMPLEMENTATIONS}
        assert len(rejected) == len(IMPLEMENTATIONS) - 1 and all(reason for _, reason in rejected)
        assert best.accepts(task) is None and best.estimate(task) > 0


def test_statistics_of_what_stays_in_the_cache_are_not_worth_their_while() -> None:
    def gathers(name: str, cache: int) -> list[bool]:
        operator = STATISTICS[name].operator()
        target = Target(replace(CPU, cache=cache), TARGET.limits, "")
        return [task.group.gathers is not None for task in tasks_of(operator, target, Options(), [])]

    plane = 4 * 7 * 9 * 33
    assert gathers("instance_norm", plane) == [False, False]
    assert gathers("instance_norm", plane - 1) == [True, False]
    assert gathers("batch_norm", plane) == [True, False]
    # No maximum is needed, and the next launch takes no exponentials.
    assert gathers("softmax_of_a_range", 1 << 30) == gathers("softmax_of_a_sigmoid", 1 << 30) == [True, False]
    # Nothing is stored here.
    assert gathers("mean", plane) == gathers("mean_of_batch_norm", 1 << 30) == [True, False]


@pytest.mark.parametrize(
    ("kernel", "stride", "least"), [((3, 3, 3), 1, 8), ((1, 3, 3), 1, 8), ((4, 4, 4), 2, 32), ((1, 5, 3), 1, 16)]
)
def test_fewest_channels(kernel: tuple[int, int, int], stride: int, least: int) -> None:
    """Few channels are enough where transforms round least; with two taps there have to be more."""
    axes = [
        AxisGeometry(name, 64, taps, stride) for name, taps in zip(("depth", "height", "width"), kernel, strict=True)
    ]
    for channels in (least - 1, least):
        tile, why = lines.choose(ConvGeometry(1, channels, 64, 1, *axes), None, TARGET, np.dtype(np.float32), Options())
        assert tile.winograd == (channels == least), why
        assert tile.winograd or why.startswith(f"fewer than {least} input channels a group")


def test_the_reason_of_a_rejection_says_what_is_missing() -> None:
    (task,) = tasks_of(RESIDUALS["residual"].operator(), TARGET, Options(), [])
    reasons = dict(choose(task)[1])
    assert reasons["lines-winograd"].startswith("fewer than 32 input channels a group")
    assert reasons["tiled"] == "the device is a CPU"


@pytest.mark.parametrize("width", [64, 512, 1024, 4096])
def test_an_outlier_at_the_start_of_a_row_spoils_no_variance(width: int) -> None:
    operator = operator_of({"x": (1, 2, 2, 3, width)}, ["abs", {"op": "instance_norm"}])
    tensors = tensors_of(operator)
    tensors["x"][..., 0] += 1e4
    _, found = checked_run(call_on(operator, tensors, DIRECT.device, {"fusion": "eager"}), tensors)
    assert found.passed, found.reason


@pytest.mark.parametrize("op", ["conv3d", "conv_transpose3d"])
def test_taps_that_lie_far_apart_take_no_room_between_them(op: str) -> None:
    far = 1 << 20
    step = {"op": op, "weight": "w", "dilation": [far, 1, 1], "padding": [far, 0, 0]}
    operator = operator_of({"x": (1, 2, 3, 4, 5), "w": (2, 2, 3, 1, 1)}, [step])
    tensors = tensors_of(operator)
    _, found = checked_run(call_on(operator, tensors, DIRECT.device, {}), tensors)
    assert found.passed, found.reason
