"""Both convolution kernels on geometries from one end to the other; small integers make every bit count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from dispatcher.backends.cuda.tiles import HaloTask, HaloTile
from dispatcher.backends.numpy_ref import BACKEND as REFERENCE
from dispatcher.check.comparison import verify_result
from dispatcher.problem.operator import Operator
from tests.cuda_support import check, compiled, device, only_tiles, poisoned
from tests.strategies import Recipe, conv_operator, convolutions, in_dtype, pipelines, tensors_of, thorough

POOL = {"op": "max_pool3d", "window": 2}
MEAN = {"op": "avg_pool3d", "window": 2}
SUM = {"op": "sum", "axis": "channel"}


def exact(op: Operator, **options: Any) -> list[str]:
    """Compare to the last bit on small integers; returns the names of the launches."""
    device()
    tensors = tensors_of(op, "integers")
    run = compiled(op, **options)
    wanted = REFERENCE.compile(op, REFERENCE.probe()[0], {})(tensors)
    np.testing.assert_array_equal(run(tensors, poisoned(op)), wanted)
    return [launch.name for launch in run.launches]


RESIDENT: dict[str, Operator] = {
    "one": conv_operator((1, 1, 1, 1, 1), 1, (1, 1, 1)),
    "odd_everything": conv_operator((3, 5, 3, 5, 7), 33, (3, 4, 5), stride=[2, 1, 2], padding=[1, 0, 2], bias=True),
    "stride3": conv_operator((1, 9, 2, 3, 5), 17, (3, 2, 4), stride=3, output_padding=2, bias=True),
    "holes": conv_operator((2, 2, 3, 2, 2), 5, (1, 1, 1), stride=3, output_padding=2, bias=True),
    "dilated": conv_operator((1, 4, 3, 4, 12), 9, (3, 3, 3), stride=2, dilation=2, padding=1),
    "far_taps": conv_operator((1, 3, 2, 2, 16), 4, (1, 1, 5), dilation=3, padding=[0, 0, 6]),
    "many_channels": conv_operator((1, 20, 2, 3, 8), 130, (2, 2, 2), stride=2),
    "pairs_of_lines": conv_operator((2, 16, 3, 4, 24), 24, (4, 4, 4), stride=2, padding=1),
    "odd_lines": conv_operator((1, 8, 2, 3, 12), 8, (3, 3, 3), stride=2, padding=1),
    "two_pools": conv_operator(
        (2, 8, 7, 7, 20), 20, (5, 5, 5), stride=2, padding=2, after=[POOL, {**POOL, "window": 3}, SUM]
    ),
    "two_pools_stored": conv_operator(
        (1, 3, 4, 5, 6), 9, (3, 3, 3), stride=2, after=[POOL, {**POOL, "window": [2, 1, 3]}]
    ),
    "groups": conv_operator((2, 24, 3, 4, 5), 20, (3, 2, 3), groups=2, stride=2, bias=True),
    "groups_of_tiles": conv_operator((1, 24, 2, 3, 8), 210, (2, 2, 2), groups=3, stride=[1, 1, 2]),
    "mean_then_sum": conv_operator((1, 8, 4, 4, 6), 8, (3, 3, 3), stride=2, padding=1, after=[MEAN, SUM]),
    "sum_unfolded": conv_operator((1, 8, 3, 4, 6), 8, (3, 3, 3), stride=[1, 2, 2], padding=1, after=[SUM]),
    "steps": conv_operator((2, 5, 7, 9, 37), 9, (3, 3, 3), op="conv3d", stride=2, padding=1, bias=True),
    "odd_steps": conv_operator((1, 9, 8, 7, 29), 17, (2, 3, 5), op="conv3d", stride=[1, 2, 3], padding=[0, 1, 2]),
    "long_steps": conv_operator((1, 3, 1, 43, 51), 8, (1, 11, 11), op="conv3d", stride=[1, 4, 4], padding=[0, 2, 2]),
    "patches": conv_operator((2, 8, 4, 8, 64), 24, (2, 4, 4), op="conv3d", stride=[2, 4, 4]),
    "dilated_steps": conv_operator((1, 4, 3, 9, 40), 9, (1, 3, 3), op="conv3d", stride=[1, 2, 2], dilation=[1, 1, 3]),
    "grouped_steps": conv_operator((2, 16, 3, 9, 19), 48, (3, 2, 3), op="conv3d", groups=2, stride=[2, 1, 2]),
    "summed_steps": conv_operator((2, 8, 5, 5, 21), 16, (3, 3, 3), op="conv3d", stride=2, padding=1, after=[SUM]),
}
GENERAL: dict[str, Operator] = {
    "small_groups": conv_operator((2, 6, 3, 4, 5), 15, (3, 2, 3), groups=3, stride=2, bias=True),
    "depthwise": conv_operator((1, 7, 3, 4, 5), 7, (3, 3, 3), groups=7, padding=1),
    "wide_groups": conv_operator((1, 4, 2, 3, 3), 140, (2, 2, 2), groups=2),
    "long_stride": conv_operator((1, 2, 2, 2, 2), 3, (1, 1, 2), stride=[9, 2, 7], bias=True),
    "sparse_windows": conv_operator((1, 8, 9, 9, 33), 8, (2, 2, 2), op="conv3d", stride=4),
    "very_long_steps": conv_operator((1, 8, 1, 1, 260), 8, (1, 1, 65), op="conv3d", stride=[1, 1, 65]),
}


def needs_tensor_cores() -> None:
    """Skip where the device has none for TF32."""
    if device().facts["compute_capability"] < "8.0":
        pytest.skip("tensor cores for TF32 need compute capability 8.0")


@pytest.mark.parametrize("name", RESIDENT)
def test_halo(name: str) -> None:
    needs_tensor_cores()
    assert set(exact(RESIDENT[name], algorithm="halo")) == {"conv_halo"}


@pytest.mark.parametrize("warp_m", [1, 2, 3])
@pytest.mark.parametrize("other", [False, True], ids=["plain", "paired_or_shared"])
@pytest.mark.parametrize("name", ["odd_everything", "pairs_of_lines", "odd_lines", "two_pools", "mean_then_sum"])
def test_every_kind_of_tile(name: str, other: bool, warp_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensor_cores()

    def wanted(task: HaloTask, tile: HaloTile) -> Any:
        kind = np.logical_or(tile.paired, tile.fold_shared)
        return (tile.warp_m == warp_m) & (kind == (other and (task.folded | tile.paired)))

    offered = only_tiles(monkeypatch, wanted)
    assert set(exact(RESIDENT[name], algorithm="halo")) == {"conv_halo"}
    assert any(np.any(tile.paired) or np.any(tile.fold_shared) for tile in offered) == other


@pytest.mark.parametrize(
    "name", ["odd_everything", "pairs_of_lines", "odd_lines", "two_pools", "groups", "sum_unfolded", "steps"]
)
def test_half_precision_takes_tensor_cores(name: str) -> None:
    """With one product, since TF32 holds float16 exactly."""
    needs_tensor_cores()
    op = in_dtype(RESIDENT[name], "float16")
    assert set(exact(op, algorithm="halo")) == {"conv_halo"}
    assert compiled(op).launches[0].algorithm.endswith(" TF32 with promoted sums")
    for kind in ("signed", "one_inf", "one_nan"):
        check(op, tensors_of(op, kind))


def test_half_precision_between_launches_is_float32() -> None:
    """So a convolution of a value takes three products."""
    needs_tensor_cores()
    scale = [{"op": "scale", "by": 1 / 3}]
    op = conv_operator((1, 8, 3, 4, 8), 8, (3, 3, 3), before=scale, dtype="float16")
    for where in ("fused", "separate"):
        run = compiled(op, prologue=where)
        assert "3xTF32" in run.launches[-1].algorithm
        check(op, tensors_of(op), prologue=where)


SLICED: dict[str, Operator] = {
    "plain": conv_operator((2, 70, 2, 3, 9), 12, (3, 3, 3), padding=1, bias=True),
    "paired": conv_operator((1, 96, 2, 3, 8), 8, (3, 2, 3), stride=2, padding=1, output_padding=1),
    "relu_first": conv_operator((1, 40, 2, 3, 8), 70, (2, 2, 2), before=[{"op": "relu"}]),
    "two_pools": conv_operator(
        (1, 40, 3, 3, 6), 8, (3, 3, 3), stride=2, padding=1, output_padding=1,
        after=[POOL, {**POOL, "window": 3}, SUM],
    ),
    "holes": conv_operator((1, 33, 2, 2, 2), 5, (1, 1, 1), stride=3, output_padding=2, bias=True),
    "groups": conv_operator((1, 105, 2, 2, 8), 24, (2, 2, 2), groups=3, padding=1, bias=True),
    "steps": conv_operator((1, 70, 3, 5, 19), 8, (3, 3, 3), op="conv3d", stride=2, before=[{"op": "relu"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICED)
def test_input_channels_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensor_cores()
    only_tiles(monkeypatch, lambda task, tile: tile.slices > 1)
    op = SLICED[name]
    assert set(exact(op, algorithm="halo")) == {"conv_halo"}
    assert "slices" in compiled(op).launches[0].detail
    for kind in ("one_inf", "one_nan"):
        check(op, tensors_of(op, kind))
    check(replace(op, precision="tf32"), tensors_of(op))


@pytest.mark.parametrize(
    "name", ["odd_everything", "pairs_of_lines", "two_pools", "mean_then_sum", "sum_unfolded", "two_pools_stored"]
)
def test_boxes_that_leave_warps_idle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensor_cores()
    only_tiles(monkeypatch, lambda task, tile: tile.voxels < tile.rows)
    op = RESIDENT[name]
    assert set(exact(op, algorithm="halo")) == {"conv_halo"}
    for kind in ("one_inf", "one_nan"):
        check(op, tensors_of(op, kind))


SPREAD = [{"op": "clamp", "min": -4.0, "max": 4.0}, {"op": "softmax", "axis": "spatial"}]


def test_a_softmax_over_boxes_that_leave_warps_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensor_cores()
    only_tiles(monkeypatch, lambda task, tile: tile.voxels < tile.rows)
    op = conv_operator((2, 4, 3, 5, 20), 9, (3, 3, 3), stride=2, padding=1, after=SPREAD)
    assert len(compiled(op).launches) == 2
    check(op, tensors_of(op))


def test_a_softmax_behind_steps_keeps_the_inputs_of_its_first_pass() -> None:
    """Those between windows and behind the last one too: every box reads its whole halo again."""
    needs_tensor_cores()
    halves = [{"op": "avg_pool3d", "window": [1, 1, 2]}]
    op = conv_operator(
        (2, 8, 5, 6, 84), 9, (3, 2, 3), op="conv3d", stride=[2, 1, 2], padding=[1, 0, 1], before=halves, after=SPREAD
    )
    assert [launch.steps[0] for launch in compiled(op).launches] == ["avg_pool3d"] * 2
    check(op, tensors_of(op))


@pytest.mark.parametrize("kind", ["one_inf", "one_nan"])
def test_steps_meet_what_is_not_finite(kind: str) -> None:
    needs_tensor_cores()
    for name in ("steps", "odd_steps"):
        check(RESIDENT[name], tensors_of(RESIDENT[name], kind), algorithm="halo")


@pytest.mark.parametrize("name", [*RESIDENT, *GENERAL])
def test_fma(name: str) -> None:
    assert "conv_fma" in exact({**RESIDENT, **GENERAL}[name], algorithm="fma")


@pytest.mark.parametrize("name", GENERAL)
def test_what_does_not_fit_the_tensor_cores_takes_the_general_kernel(name: str) -> None:
    assert "conv_fma" in exact(GENERAL[name])


def test_a_halo_that_no_shared_memory_holds_takes_the_general_kernel() -> None:
    op = conv_operator((1, 3, 1, 2, 2), 8, (1, 2, 2), dilation=[1, 400, 1])
    run = compiled(op)
    assert [launch.name for launch in run.launches] == ["conv_fma"]
    assert "shared memory" in str(run.launches[0].detail["why"])
    check(op, tensors_of(op))


@pytest.mark.parametrize("dilation", [1 << 28, 1 << 30])
def test_taps_too_far_apart_to_count_a_halo_in_64_bits(dilation: int) -> None:
    op = conv_operator((1, 8, 1, 1, 1), 8, (2, 2, 2), dilation=dilation, padding=dilation // 2)
    assert exact(op) == ["conv_fma"]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["odd_everything", "small_groups", "two_pools", "mean_then_sum"])
def test_other_types(name: str, dtype: str) -> None:
    device()
    op = {**RESIDENT, **GENERAL}[name]
    again = in_dtype(op, dtype)
    check(again, tensors_of(again))


@thorough(60)
@given(convolutions())
def test_random_convolutions(recipe: Recipe) -> None:
    device()
    op = recipe.bind()
    check(op, tensors_of(op), algorithm="fma")


@thorough(25)
@given(pipelines())
def test_random_pipelines(recipe: Recipe) -> None:
    device()
    op = recipe.bind()
    check(op, tensors_of(op), algorithm="fma")


@pytest.mark.parametrize(
    ("shape", "channels", "after"),
    [
        ((70000, 1, 1, 1, 1), 1, []),
        ((35000, 1, 1, 1, 1), 2, []),
        ((1, 1, 1, 1, 1), 70000, []),
        ((1, 1, 2, 2, 2), 70000, [POOL]),
        ((1, 1, 1, 1, 2), 70000, [{"op": "softmax", "axis": "spatial"}]),
    ],
    ids=["batch", "batch_and_channels", "channels", "pooled", "softmax"],
)
def test_more_blocks_than_a_grid_axis_has(shape: tuple[int, ...], channels: int, after: list[Any]) -> None:
    device()
    op = conv_operator(shape, channels, (1, 1, 1), bias=True, after=after)
    tensors = tensors_of(op)
    result = compiled(op, algorithm="fma")(tensors, poisoned(op))
    assert verify_result(op, tensors, result).passed
