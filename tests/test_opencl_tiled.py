"""The tiled convolution for GPUs: its tiles, its fusion, and its results on the devices that are here.

What every algorithm has to pass (all cases of all problems, random pipelines, exact sums) is tested elsewhere for this
one too. Here are the limits of devices that are not here: small work-groups, little local memory, no tile at all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator
from tests.family import FIVE
from tests.strategies import PLACES, Place, conv_operator, convolutions, pipelines, tensors_of, thorough

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND, executable, launches, tiled
from dispatcher.backends.opencl.groups import Group, plan
from dispatcher.backends.opencl.implementations import Tiled, tasks_of
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.target import Limits, Target

#: What the smallest GPUs allow, and what common ones do.
TINY = Limits(work_items=64, local_memory=8 << 10, multiple=16, compute_units=2)
SMALL = Limits(work_items=256, local_memory=32 << 10, multiple=32, compute_units=8)
LARGE = Limits(work_items=1024, local_memory=48 << 10, multiple=32, compute_units=132)
NOTHING = Limits(work_items=64, local_memory=64, multiple=16, compute_units=2)
LIMITS = {"tiny": TINY, "small": SMALL, "large": LARGE}

HERE = [place for place in PLACES if place.backend == "opencl" and place.algorithm in (None, "tiled")]
everywhere = pytest.mark.parametrize("place", HERE, ids=str)
each_limits = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)

Emulate = Callable[[Limits], None]


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """A function that makes every device claim some limits."""
    return lambda limits: monkeypatch.setattr(executable, "limits_of", lambda runtime: limits)


def operator_for(name: str, case: str, dtype: str = "float32") -> Operator:
    problem = load_problem(name)
    return bind_arguments(problem, sort_arguments(problem, {}), case=case, dtype=dtype)


def agrees(place: Place, operator: Operator, kind: str = "signed") -> np.ndarray:
    result, comparison = place.check(operator, tensors_of(operator, kind))
    assert comparison.passed, comparison.reason
    return result


def launches_of(place: Place, operator: Operator, options: dict[str, Any] | None = None) -> list[Any]:
    """The launches that the backend plans for an operator."""
    place.need()
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    executable = BACKEND.compile(operator, device, place.options if options is None else options)
    return list(executable.launches)


# ---- results -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["sample", "odd"])
@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("limits", [TINY, SMALL], ids=["tiny", "small"])
@everywhere
def test_problems_within_limits(place: Place, limits: Limits, name: str, case: str, emulate: Emulate) -> None:
    emulate(limits)
    agrees(place, operator_for(name, case))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", FIVE)
@everywhere
def test_other_dtypes_within_tiny_limits(place: Place, name: str, dtype: str, emulate: Emulate) -> None:
    emulate(TINY)
    agrees(place, operator_for(name, "odd", dtype))


@everywhere
def test_random_convolutions_within_limits(place: Place, emulate: Emulate) -> None:
    place.need()

    @thorough(6 if place.slow else 25)
    @given(convolutions(), st.sampled_from(list(LIMITS.values())))
    def check(recipe: Any, limits: Limits) -> None:
        emulate(limits)
        agrees(place, recipe.bind())

    check()


@everywhere
def test_random_pipelines_within_limits(place: Place, emulate: Emulate) -> None:
    place.need()

    @thorough(6 if place.slow else 25)
    @given(pipelines(), st.sampled_from(list(LIMITS.values())), st.sampled_from(("signed", "one_nan")))
    def check(recipe: Any, limits: Limits, kind: str) -> None:
        emulate(limits)
        agrees(place, recipe.bind(), kind)

    check()


FUSED = {
    "plain": conv_operator((2, 5, 3, 4, 7), 6, (3, 3, 3), stride=2, padding=1, bias=True),
    "grouped": conv_operator(
        (1, 6, 3, 3, 9), 15, (2, 3, 3), groups=3, stride=[1, 2, 4], after=[{"op": "layer_norm"}, "gelu"]
    ),
    "folded": conv_operator(
        (2, 17, 3, 3, 5),
        20,
        (3, 3, 3),
        stride=2,
        bias=True,
        after=[{"op": "softmax", "axis": "channel"}, {"op": "max_pool3d", "window": 2}, {"op": "layer_norm"}],
    ),
}


@pytest.mark.parametrize("name", FUSED)
@everywhere
def test_any_tile_gives_the_right_results(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = FUSED[name]
    ranked = tiled.ranked_layouts
    picks = random.Random(name)
    for _ in range(3 if place.slow else 12):
        monkeypatch.setattr(tiled, "ranked_layouts", lambda *asked: [picks.choice(ranked(*asked))])
        agrees(place, operator)


@everywhere
def test_long_rows_of_small_integers_are_exact(place: Place, emulate: Emulate) -> None:
    emulate(SMALL)
    operator = conv_operator((3, 16, 3, 5, 67), 24, (3, 3, 3), stride=[1, 1, 2], bias=True)
    tensors = tensors_of(operator, "integers")
    result, comparison = place.check(operator, tensors)
    assert comparison.passed, comparison.reason
    np.testing.assert_array_equal(result, Place("numpy").run(operator.problem, **tensors))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@everywhere
def test_weights_that_are_not_finite_stay_where_they_are(place: Place, value: float) -> None:
    operator = FUSED["plain"]
    tensors = tensors_of(operator)
    tensors["w"][1, 2, 0, 1, 2] = value
    _, comparison = place.check(operator, tensors)
    assert comparison.passed, comparison.reason


# ---- what runs where ---------------------------------------------------------------------------------------
@everywhere
def test_a_device_that_can_launch_no_tile_gathers(place: Place, emulate: Emulate) -> None:
    emulate(NOTHING)
    operator = FUSED["grouped"]
    first = launches_of(place, operator)[0]
    assert first.algorithm == "gather" and "no tile" in first.note
    agrees(place, operator)


@everywhere
def test_a_gpu_gets_the_tiled_kernel(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.need()
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    runtime = BACKEND._runtime(device)
    monkeypatch.setitem(runtime.__dict__, "facts", replace(runtime.facts, cpu=False, vec=1, vec_double=1))
    for name in FIVE:
        operator = operator_for(name, "sample")
        assert "tiled" in [launch.algorithm for launch in launches_of(place, operator, {})]
        agrees(Place(place.device), operator)


class Refusing:
    """Stands for a runtime whose compiler needs so many registers that only ``most`` work-items fit."""

    def __init__(self, most: int, local_bytes: int) -> None:
        self.most, self.local_bytes, self.builds = most, local_bytes, 0
        self.device = self.raw = self

    def kernel(self, text: str, name: str) -> Any:
        self.builds += 1
        return self

    def copy(self) -> Refusing:
        return self

    def set_arg(self, *_: Any) -> None:
        pass

    def get_work_group_info(self, name: int, device: Any) -> int:
        import pyopencl as cl

        return self.most if name == cl.kernel_work_group_info.WORK_GROUP_SIZE else self.local_bytes


@pytest.fixture
def built_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Refusing], launches.Launch | None]:
    """A function that builds a convolution on such a runtime."""
    operator = operator_for("conv-transpose3d-layernorm-gelu-scaling", "kernelbench")
    target = Target(cast(Any, SimpleNamespace(cpu=False, lanes=lambda real: 1)), LARGE, "")
    (task,) = tasks_of(operator, target, Options("tiled"), [])
    return lambda runtime: launches.build(cast(Any, runtime), task)


def test_a_kernel_that_needs_too_much_is_built_again_with_a_smaller_tile(built_on: Any) -> None:
    runtime = Refusing(most=32, local_bytes=1024)
    built = built_on(runtime)
    assert built is not None and built.lowered.local <= 32 and runtime.builds > 1


@pytest.mark.parametrize("allowed", [(0, 1024), (1024, LARGE.local_memory + 1)])
def test_building_ends(allowed: tuple[int, int], built_on: Any) -> None:
    runtime = Refusing(*allowed)
    assert built_on(runtime) is None
    assert 1 <= runtime.builds <= Tiled.most_builds


# ---- tiles -------------------------------------------------------------------------------------------------
@each_limits
@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("case", ["sample", "odd", "kernelbench"])
@pytest.mark.parametrize("name", FIVE)
def test_every_tile_keeps_the_limits(name: str, case: str, itemsize: int, limits: Limits) -> None:
    operator = operator_for(name, case)
    for group in groups_of(operator, limits, itemsize):
        if group.convolution is None:
            continue
        task = tiled.task_of(group, itemsize)
        layouts = tiled.ranked_layouts(task, limits)
        assert layouts
        for layout in layouts:
            assert layout.tile.work_items <= limits.work_items
            assert layout.local_bytes <= limits.local_memory


def groups_of(operator: Operator, limits: Limits, itemsize: int = 4) -> list[Group]:
    return plan(operator, tiled.TiledRules(limits, itemsize), 1)


def fused(operator: Operator, limits: Limits) -> list[tuple[str, ...]]:
    return [tuple(step.op for step in group.steps) for group in groups_of(operator, limits)]


def test_what_fuses() -> None:
    def steps(name: str) -> list[tuple[str, ...]]:
        return fused(operator_for(f"conv-transpose3d-{name}", "kernelbench"), LARGE)

    assert steps("layernorm-gelu-scaling") == [("conv_transpose3d", "layer_norm", "gelu", "scale")]
    assert steps("sum-layernorm-avgpool-gelu") == [("conv_transpose3d", "add", "layer_norm", "avg_pool3d", "gelu")]
    assert steps("max-max-sum") == [("conv_transpose3d", "max_pool3d"), ("max_pool3d",), ("sum",)]
    assert steps("avgpool-clamp-softmax-multiply") == [
        ("avg_pool3d",),
        ("conv_transpose3d", "clamp"),
        ("softmax", "scale"),
    ]


def test_too_many_channels_for_local_memory_are_not_combined() -> None:
    operator = conv_operator((1, 4, 2, 2, 3), 257, (1, 2, 1), after=[{"op": "layer_norm"}])
    assert fused(operator, TINY) == [("conv_transpose3d",), ("layer_norm",)]
    assert fused(operator, LARGE) == [("conv_transpose3d", "layer_norm")]


def test_only_cheap_steps_run_before_the_convolution() -> None:
    def steps(op: str) -> list[tuple[str, ...]]:
        return fused(conv_operator((1, 4, 2, 2, 3), 4, (2, 2, 2), before=[op]), LARGE)

    assert steps("relu") == [("relu", "conv_transpose3d")]
    assert steps("gelu") == [("gelu",), ("conv_transpose3d",)]


def test_packed_weights_hold_every_weight_once() -> None:
    geometry = FUSED["grouped"].convolutions[0].geometry
    layout = tiled.ranked_layouts(tiled.Task(geometry, False, False, 4), SMALL)[0]
    weight = np.arange(1, 1 + math.prod(geometry.weight_shape), dtype=np.float32)
    packed = tiled.pack_weights(weight.reshape(geometry.weight_shape), layout)
    np.testing.assert_array_equal(np.sort(packed[packed != 0]), weight)
    phases, taps = tiled.phase_tables(geometry)
    assert phases[:, 1].sum() == len(taps) == geometry.kernel_volume
