"""Steps before a convolution that run while its input is loaded, and inputs that are kept for a second pass."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda import prologue, tiles
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.prologue import Prologue
from dispatcher.backends.cuda.tasks import Target
from dispatcher.backends.cuda.tiles import HaloTask
from dispatcher.backends.numpy_ref import BACKEND as REFERENCE
from dispatcher.problem.operator import Operator
from tests.cuda_support import check, compiled, device, machine, only_tiles, operator, poisoned, simulator_only
from tests.strategies import conv_operator, in_dtype, tensors_of

SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
H100 = Target(90, 227 << 10, 132)
AVERAGE = {"op": "avg_pool3d", "window": 2}
MAXIMUM = {"op": "max_pool3d", "window": [1, 3, 2]}
CLAMP = {"op": "clamp", "min": -1.0, "max": 2.0}
PER_CHANNEL = {"op": "add", "value": "shift"}
SPREAD = [{"op": "clamp", "min": -4.0, "max": 4.0}, {"op": "softmax", "axis": "spatial"}]

#: Exact on small integers.
EXACT: dict[str, Operator] = {
    "average": conv_operator((2, 5, 7, 8, 10), 9, (3, 3, 3), stride=2, padding=1, bias=True, before=[AVERAGE]),
    "maximum": conv_operator((1, 3, 3, 9, 13), 12, (2, 3, 4), stride=[1, 2, 2], before=[MAXIMUM]),
    "four_neighbours": conv_operator(
        (1, 4, 3, 2, 24), 8, (3, 3, 3), padding=1, before=[{"op": "avg_pool3d", "window": [1, 1, 4]}]
    ),
    "relu": conv_operator((2, 20, 3, 4, 8), 8, (3, 3, 3), before=[{"op": "relu"}]),
    "chains_around_a_pool": conv_operator(
        (1, 6, 6, 7, 9), 10, (3, 2, 3), stride=2, before=[PER_CHANNEL, {"op": "relu"}, AVERAGE, CLAMP],
        extra={"shift": (6, 1, 1, 1)},
    ),
    "groups": conv_operator(
        (2, 24, 4, 6, 8), 20, (3, 3, 3), groups=2, padding=1, before=[PER_CHANNEL, AVERAGE],
        extra={"shift": (24, 1, 1, 1)},
    ),
    "ten_in_a_row": conv_operator((1, 3, 2, 3, 8), 8, (2, 2, 2), before=[{"op": "add", "value": 1.0}] * 10),
    "folded": conv_operator(
        (1, 4, 4, 4, 8), 6, (3, 3, 3), stride=2, padding=1, output_padding=1, before=[AVERAGE], after=[AVERAGE]
    ),
}  # fmt: skip
#: With the two passes of a softmax, the second of which reads what the first one kept.
KEPT: dict[str, Operator] = {
    "one_block": conv_operator((1, 3, 4, 4, 8), 5, (3, 3, 3), stride=2, padding=1, before=[AVERAGE], after=SPREAD),
    "many_blocks": conv_operator(
        (2, 4, 18, 10, 34), 7, (3, 3, 3), stride=2, padding=1, output_padding=1, before=[AVERAGE], after=SPREAD
    ),
    "cropped": conv_operator((1, 2, 12, 22, 20), 3, (2, 3, 4), padding=[1, 4, 3], before=[AVERAGE], after=SPREAD),
    "taps_on_both_sides": conv_operator(
        (1, 2, 10, 12, 40), 3, (5, 5, 5), stride=[1, 2, 2], dilation=[1, 2, 1], before=[AVERAGE], after=SPREAD
    ),
    "tiles_of_channels": conv_operator((1, 4, 6, 6, 10), 70, (2, 2, 2), before=[{"op": "relu"}], after=SPREAD),
    "groups": conv_operator(
        (2, 24, 4, 6, 34), 160, (2, 2, 2), groups=2, padding=1, before=[AVERAGE], after=SPREAD
    ),
    "whole_vectors": conv_operator((1, 3, 4, 6, 64), 4, (3, 3, 3), padding=1, before=[AVERAGE], after=SPREAD),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tensor_cores() -> None:
    if device().facts["compute_capability"] < "8.0":
        pytest.skip("tensor cores for TF32 need compute capability 8.0")


def fused_steps(op: Operator, **options: Any) -> list[tuple[str, ...]]:
    """Steps of each launch."""
    return [launch.steps for launch in compiled(op, **options).launches]


@pytest.mark.parametrize("name", EXACT)
def test_fused_and_separate_give_the_same_bits(name: str) -> None:
    op = EXACT[name]
    tensors = tensors_of(op, "integers")
    wanted = REFERENCE.compile(op, REFERENCE.probe()[0], {})(tensors)
    fused, separate = (compiled(op, prologue=where) for where in ("fused", "separate"))
    assert len(fused.launches) == 1 and len(separate.launches) > 1
    for run in (fused, separate):
        np.testing.assert_array_equal(run(tensors, poisoned(op)), wanted)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", KEPT)
def test_a_second_pass_reads_what_the_first_one_kept(name: str, precision: str) -> None:
    """Memory that no block wrote holds NaN."""
    op = KEPT[name]
    op = replace(op, precision=precision)
    steps = fused_steps(op, prologue="fused")
    assert len(steps) == 2 and all(len(each) == len(op.steps) for each in steps)
    check(op, tensors_of(op), prologue="fused")


@pytest.mark.parametrize("box", [(1, 4, 8), (2, 2, 8)], ids=str)
@pytest.mark.parametrize("name", ["many_blocks", "cropped", "taps_on_both_sides"])
def test_boxes_that_end_within_the_tensor(name: str, box: tuple[int, int, int]) -> None:
    check(KEPT[name], tensors_of(KEPT[name]), prologue="fused", tile=box)


@simulator_only
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_no_block_waits_for_what_another_one_keeps(schedule: str) -> None:
    with machine(devices=1, arch="8.0", schedule=schedule):
        check(KEPT["many_blocks"], tensors_of(KEPT["many_blocks"]), prologue="fused")


@pytest.mark.parametrize("first_without_taps", [False, True])
def test_slices_of_channels_are_kept_once(first_without_taps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first phase, which may have no use for them itself."""
    only_tiles(monkeypatch, lambda task, tile: tile.slice_channels == 32)
    options: dict[str, Any] = {"stride": 2, "padding": 1}
    kernel = (3, 3, 3)
    if first_without_taps:
        options, kernel = {"stride": 3, "padding": 1, "output_padding": 1}, (1, 1, 1)
    op = conv_operator((1, 70, 4, 4, 10), 8, kernel, before=[AVERAGE], after=SPREAD, **options)
    run = compiled(op, prologue="fused")
    assert {launch.detail["slices"] for launch in run.launches} == {"3 of 32 input channels"}
    check(op, tensors_of(op), prologue="fused")


@pytest.mark.parametrize("name", ["average", "chains_around_a_pool", "groups", "folded", "many_blocks", "relu"])
def test_half_precision(name: str) -> None:
    op = in_dtype({**EXACT, **KEPT}[name], "float16")
    assert len(compiled(op, prologue="fused").launches) == (2 if name in KEPT else 1)
    for kind in ("signed", "one_inf"):
        check(op, tensors_of(op, kind), prologue="fused")


# ---- where they run ----------------------------------------------------------------------------------------
def test_the_softmax_problem_takes_two_launches() -> None:
    for precision in ("fp32", "tf32"):
        for target in (H100, Target(80, 163 << 10, 108), Target(89, 99 << 10, 128)):
            program = lower(operator(SOFTMAX, "kernelbench", precision), target, Options())
            assert [launch.name for launch in program.launches] == ["conv_halo", "conv_halo"]
    assert len(fused_steps(operator(SOFTMAX))) == 2


def test_only_the_inputs_lie_in_memory_between_the_passes() -> None:
    op = operator(SOFTMAX, "kernelbench")
    program = lower(op, H100, Options())
    pooled = 4 * 32 * 32 * 16 * 32 * 32
    assert program.values == () and pooled in program.scratch_bytes
    assert sum(program.scratch_bytes) < 1.1 * pooled


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (conv_operator((1, 4, 2, 2, 130), 4, (1, 1, 2), before=[{"op": "avg_pool3d", "window": [1, 1, 65]}]),
         "65 elements"),
        (conv_operator((1, 4, 4, 4, 8), 4, (2, 2, 2), before=[AVERAGE, AVERAGE]), "fused already"),
        (conv_operator((1, 4, 4, 4, 8), 4, (2, 2, 2), before=[{"op": "layer_norm"}]),
         "layer_norm needs more"),
        (conv_operator((1, 4, 2, 2, 8), 4, (2, 2, 2), before=[{"op": "scale", "by": "m"}],
                       extra={"m": (1, 1, 2, 2, 8)}), "operand of scale"),
        (conv_operator((1, 4, 2, 2, 8), 4, (2, 2, 2), before=[{"op": "relu"}] * 17), "8 operations"),
    ],
    ids=["large_window", "two_pools", "layer_norm", "operand_of_space", "long_chain"],
)  # fmt: skip
def test_what_does_not_fit_runs_before(op: Operator, reason: str) -> None:
    described = prologue.describe(op.steps[:-1])
    assert isinstance(described, str) and reason in described
    run = compiled(op, prologue="fused")
    assert len(run.launches) > 1
    check(op, tensors_of(op), prologue="fused")


def test_the_general_kernel_takes_none() -> None:
    op = EXACT["average"]
    assert [launch.name for launch in compiled(op, algorithm="fma").launches] == ["pool", "conv_fma"]


def test_a_value_that_is_read_again_is_stored() -> None:
    op = conv_operator(
        (1, 4, 3, 4, 8), 4, (1, 1, 1), before=[{"op": "relu", "as": "start"}],
        after=[{"op": "add", "value": "start"}],
    )  # fmt: skip
    assert fused_steps(op, prologue="fused")[0] == ("relu",)
    check(op, tensors_of(op), prologue="fused")


def test_a_prologue_that_is_repeated_too_often_does_not_pay() -> None:
    pool = EXACT["average"].steps[0]
    pooled, plain = prologue.describe([pool]), prologue.describe(EXACT["relu"].steps[:1])
    assert isinstance(pooled, Prologue) and isinstance(plain, Prologue)
    assert [prologue.pays(pooled, reads) for reads in (1.0, 3.2, 3.3)] == [True, True, False]
    assert [prologue.pays(plain, reads) for reads in (1.0, 5.0, 5.1)] == [True, True, False]
    far = conv_operator((1, 16, 40, 40, 40), 64, (9, 9, 9), before=[AVERAGE])
    assert [launch.name for launch in lower(far, H100, Options()).launches] == ["pool", "conv_halo"]
    assert [launch.name for launch in lower(far, H100, Options(prologue="fused")).launches] == ["conv_halo"]


def test_reads_are_counted_within_the_tensor() -> None:
    """By hand: boxes of 4 in a line of 10 outputs, taps at m and m + 1, in 8 inputs."""
    op = conv_operator((1, 1, 1, 1, 8), 8, (1, 1, 3), padding=[0, 0, 0])
    geometry = op.convolutions[0].geometry
    task = HaloTask(geometry, (1, 1, 10), (1, 1, 1), False, False, True, True, 99 << 10, 1)
    found = tiles.halo_tiles(task)
    tile = found.pick(int(np.flatnonzero((found.tile[2] == 8) & (found.slices == 1))[0]))
    assert (tile.low[2], tile.high[2]) == (2, 0)
    # Boxes at 0 and 8 read inputs 0..7 and 6..7.
    assert task.reads(tile) == (8 + 2) / 8


def test_the_boxes_of_a_long_axis_are_not_counted_one_by_one() -> None:
    op = conv_operator((1, 8, 1 << 30, 1, 1), 8, (3, 1, 1), before=[{"op": "relu"}])
    tracemalloc.start()
    try:
        assert [launch.name for launch in lower(op, H100, Options()).launches] == ["conv_halo"]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
