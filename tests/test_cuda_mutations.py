"""Faults put into the kernels on purpose: the checks must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda.tiles import HaloTask, HaloTile
from dispatcher.errors import KernelError
from dispatcher.problem.operator import Operator
from tests.cuda_support import check, compiled, machine, only_tiles, plant, poisoned, simulator_only
from tests.strategies import conv_operator, tensors_of

NORM = [{"op": "layer_norm", "eps": 1e-5}]
POOLS = [{"op": "max_pool3d", "window": 2}, {"op": "max_pool3d", "window": 3}]
AVERAGE = {"op": "avg_pool3d", "window": 2}
SHIFT, LOWER, RELU = {"op": "add", "value": "s"}, {"op": "add", "value": -9.0}, {"op": "relu"}
SPREAD = [{"op": "clamp", "min": -4.0, "max": 4.0}, {"op": "softmax", "axis": "spatial"}]
OPERATORS = {
    "conv": conv_operator((1, 20, 3, 5, 12), 20, (3, 4, 5), stride=2, padding=(1, 1, 2), output_padding=1),
    "norm": conv_operator((1, 2, 2, 2, 8), 18, (2, 2, 2), stride=2, after=NORM),
    "pool": conv_operator((1, 3, 6, 6, 8), 4, (3, 3, 3), stride=2, padding=1, output_padding=1, after=POOLS[:1]),
    "pools": conv_operator((1, 3, 6, 6, 8), 4, (2, 2, 2), stride=2, bias=True, after=POOLS),
    "pool_first": conv_operator(
        (1, 3, 4, 6, 10), 4, (3, 3, 3), padding=1, before=[SHIFT, AVERAGE, RELU], extra={"s": (3, 1, 1, 1)}
    ),
    "maximum_first": conv_operator((1, 3, 4, 6, 10), 4, (1, 1, 1), before=[LOWER, POOLS[0]]),
    "kept": conv_operator((1, 2, 8, 10, 20), 3, (3, 3, 3), padding=2, before=[AVERAGE], after=SPREAD),
    "kept_slices": conv_operator(
        (1, 40, 4, 4, 6), 3, (1, 1, 1), stride=3, padding=1, output_padding=1, before=[AVERAGE], after=SPREAD
    ),
    "groups": conv_operator((1, 14, 2, 3, 8), 10, (2, 2, 3), groups=2, stride=[1, 1, 2]),
    "slices": conv_operator((1, 70, 2, 3, 8), 9, (2, 2, 3), stride=[1, 1, 2]),
    "idle": conv_operator((1, 3, 4, 4, 24), 4, (3, 2, 2), after=SPREAD),
    "steps": conv_operator((1, 5, 5, 9, 45), 9, (3, 3, 3), op="conv3d", stride=[1, 2, 2], padding=1),
    "kept_steps": conv_operator(
        (1, 2, 8, 10, 72), 3, (2, 2, 3), op="conv3d", stride=2, padding=1, before=[AVERAGE], after=SPREAD
    ),
}
#: Tiles that some of them must have.
TILES: dict[str, Callable[[HaloTask, HaloTile], Any]] = {
    "slices": lambda task, tile: (tile.slices > 1) & (tile.warps > 1),
    "kept_slices": lambda task, tile: tile.slices > 1,
    "idle": lambda task, tile: (tile.voxels < tile.rows) & (tile.tile[0] < 4),
}
SCHEDULES = [("forward", "late"), ("reverse", "late"), ("forward", "eager")]


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` becomes ``new``, its first occurrence, in ``file``; noticed on one of
    ``operators``.

    Memory that was not written holds NaN in the simulator, and conv_halo makes sums again that are not finite. So
    ``repaired=False`` takes that out too.
    """

    file: str
    old: str
    new: str
    operators: str = "conv"
    kind: str = "signed"
    precision: str = "fp32"
    repaired: bool = True


NO_REPAIR = ("if (!(zeros[m] == 0.f))", "if (false)")
MUTANTS = {
    "fma halo not zero": Mutant("conv_fma.cu", "if (reads(p, v, term))", "if (v.inside)"),
    "fma phases swapped": Mutant(
        "conv_fma.cu", "p.slots[start + residue[axis]]", "p.slots[start + (residue[axis] ^ 1)]"
    ),
    "fma last chunk skipped": Mutant(
        "conv_fma.cu", "k0 < phase.count; k0 += BLOCK_K", "k0 + BLOCK_K < phase.count; k0 += BLOCK_K"
    ),
    "fma no barrier after the products": Mutant("conv_fma.cu", "    __syncthreads();\n  }\n}", "  }\n}"),
    "fma no barrier before the products": Mutant(
        "conv_fma.cu",
        "    __syncthreads();\n#pragma unroll\n    for (int k = 0;",
        "#pragma unroll\n    for (int k = 0;",
    ),
    "fma one-pass variance": Mutant(
        "conv_fma.cu",
        "rest.add(centred);\n        squares.add(centred * centred);",
        "const COMPUTE v = values[c * BLOCK_M];\n        squares.add(v * v - mean * mean);",
        "norm",
        "large_mean",
    ),
    "fma maximum from zero": Mutant(
        "conv_fma.cu", "f == 0 ? fold_lift(value) :", "f == 0 ? max_v(value, COMPUTE(0)) :", "pool"
    ),
    "fma wrong stride of the store": Mutant("conv_fma.cu", "y[(first + c) * plane]", "y[(first + c) * (plane - 1)]"),
    "halo not zero along a line": Mutant(
        "conv_halo.cu", "const bool inside = row && x < p.in[2];", "const bool inside = row;"
    ),
    "halo not zero from line to line": Mutant(
        "conv_halo.cu", " && unsigned(iy) < unsigned(p.in[1])\n                     && channel", " && channel"
    ),
    "halo steps too short": Mutant(
        "conv_halo.cu",
        "(box.m[2] - LOW_X) * STEP_X + u;\n      const bool",
        "box.m[2] - LOW_X + u;\n      const bool",
        "steps",
    ),
    "halo exact sums beside the window": Mutant(
        "conv_halo.cu", "at[2] * STEP_X + tap", "at[2] + tap", "steps", "one_inf"
    ),
    "halo keeps no inputs between boxes": Mutant(
        "conv_halo.cu", ">= box.m[axis] * STEP[axis] - LOW[axis]", ">= box.m[axis] * STEP[axis]", "kept_steps"
    ),
    "halo phases swapped": Mutant("conv_halo.cu", "if (f == 0) {", "if (f == 1) {"),
    "halo last channels skipped": Mutant("conv_halo.cu", "k < BLOCK_K / 8; k++", "k + 1 < BLOCK_K / 8; k++"),
    "halo last tap skipped": Mutant(
        "conv_halo.cu", "s < steps; s++) {\n    const float *a", "s + 1 < steps; s++) {\n    const float *a"
    ),
    "halo tap read too late": Mutant("conv_halo.cu", "tap = program[s + 1];", "tap = program[s];"),
    "halo weights not moved on": Mutant("conv_halo.cu", "        weights += SLAB;\n", ""),
    "halo weights in the wrong slot": Mutant("conv_halo.cu", "(k + AHEAD) % SLOTS", "(k + AHEAD + 1) % SLOTS"),
    "halo odd column block at the pairs' place": Mutant(
        "conv_halo.cu", "from + NT / 2 * 128 - lane * 2", "from + NT / 2 * 128"
    ),
    "halo no barrier after loading": Mutant(
        "conv_halo.cu", "  copy_wait<0>();\n  __syncthreads();\n", "  copy_wait<0>();\n", repaired=False
    ),
    "halo no wait for x": Mutant("conv_halo.cu", "  copy_wait<0>();\n", "", repaired=False),
    "halo no barrier after the rounding": Mutant(
        "conv_halo.cu", "round_tf32(tile[i]));\n  __syncthreads();\n", "round_tf32(tile[i]));\n", precision="tf32"
    ),
    "halo pool without second barrier": Mutant(
        "conv_halo.cu",
        "rows[m][n][i];\n    __syncthreads();\n#pragma unroll\n    for (int j = 0;",
        "rows[m][n][i];\n#pragma unroll\n    for (int j = 0;",
        "pools",
    ),
    "halo one-pass variance": Mutant(
        "conv_halo.cu",
        "rest += centred;\n        parts[i % 4] = fmaf(centred, centred, parts[i % 4]);",
        "parts[i % 4] += exists(box, i, t) ? v[i] * v[i] - mean * mean : 0.f;",
        "norm",
        "large_mean",
    ),
    "halo padded channels in the norm": Mutant(
        "conv_halo.cu", "exists(box, i, t) ? (v[i] - mean) * factor : 0.f;", "(v[i] - mean) * factor;", "norm"
    ),
    "halo maximum from zero": Mutant(
        "conv_halo.cu", "total = q == 0 ? fold_lift(acc[m][n][i])", "total = q == 0 ? max_v(acc[m][n][i], 0.f)", "pool"
    ),
    "halo maximum drops NaN": Mutant(
        "device.cuh", "return b > a || b != b ? b : a;", "return b > a ? b : a;", "pool", "one_nan"
    ),
    "halo wrong stride of the store": Mutant("conv_halo.cu", "y[0] += i == 0 ? plane", "y[0] += i == 0 ? plane - 1"),
    "halo ragged rows stored": Mutant("conv_halo.cu", "inside[f] = place.exists;", "inside[f] = true;"),
    "halo one product instead of three": Mutant("conv_halo.cu", "mma_tf32(acc[m][first + e], a_small[m], b[e]);", ";"),
    "halo infinities split": Mutant("conv_halo.cu", *NO_REPAIR, "conv", "one_inf"),
    "halo not zero left of a line": Mutant(
        "conv_halo.cu", "const bool inside = row && unsigned(x) < unsigned(p.in[2]);", "const bool inside = row;"
    ),
    "prologue on what is not there": Mutant(
        "conv_halo.cu", "inside && c < IN_CHANNELS ? made : 0.f;", "made;", "pool_first"
    ),
    "prologue chain skipped": Mutant(
        "conv_halo.cu", "return pre_second_chain(p.operand, v, at);", "return v;", "pool_first"
    ),
    "prologue with another channel's operand": Mutant(
        "conv_halo.cu", "const VoxelAt at{0, c, {}, true};", "const VoxelAt at{0, 0, {}, true};", "pool_first"
    ),
    "prologue window a line too far": Mutant(
        "conv_halo.cu", "+ index_t(y) * PRE_Y)\n", "+ index_t(y) * (PRE_Y - 1))\n", "pool_first"
    ),
    "window summed, not averaged": Mutant(
        "window.cuh",
        "return pool_finish(result, Share",
        "return true ? result : pool_finish(result, Share",
        "pool_first",
    ),
    "window maximum from zero": Mutant("window.cuh", "z + y + x + i == 0 ? value", "false ? value", "maximum_first"),
    "kept inputs behind the last box lost": Mutant(
        "conv_halo.cu", " || end >= p.tiles[axis] * TILE[axis])", ")", "kept"
    ),
    "kept inputs of the wrong plane": Mutant(
        "conv_halo.cu", "c) * p.in[0] + at[0]) * p.in[1]", "c) * p.in[0]) * p.in[1]", "kept"
    ),
    "kept inputs lost where the first phase has no taps": Mutant(
        "conv_halo.cu", "steps > 0 || keeps ?", "steps > 0 ?", "kept_slices"
    ),
    "slices not waited for": Mutant(
        "conv_halo.cu", "__syncthreads();  // all warps are done with the slice before", ";", "slices", repaired=False
    ),
    "slices' weights of the first one": Mutant(
        "conv_halo.cu", "(index_t(slice) * p.step_count + first)", "index_t(first)", "slices"
    ),
    "last slice skipped": Mutant("conv_halo.cu", "? SLICES : 0); slice++", "? SLICES - 1 : 0); slice++", "slices"),
    "slices made exact with the first one's weights": Mutant(
        "conv_halo.cu", "c / SLICE_CHANNELS * slice_k8 + index_t(s)", "index_t(s)", "slices", "one_inf"
    ),
    "no barrier before a phase without taps": Mutant(
        "conv_halo.cu", "__syncthreads();  // a phase without taps", ";  //", "kept_slices"
    ),
    "groups with the first one's inputs": Mutant(
        "conv_halo.cu", "box.in_channel = group * IN_CHANNELS", "box.in_channel = 0", "groups"
    ),
    "groups with the first one's weights": Mutant(
        "conv_halo.cu", "p.w + box.tile * p.tile_weights + lane", "p.w + lane", "groups"
    ),
    "groups made exact with other inputs": Mutant(
        "conv_halo.cu", "const int channel = box.in_channel + c;", "const int channel = c;", "groups", "one_inf"
    ),
    "idle voxels stored": Mutant("conv_halo.cu", "{}, TILE_M == ROWS_M || voxel < TILE_M};", "{}, true};", "idle"),
    "fma infinities meet the halo": Mutant(
        "conv_fma.cu", "if (!is_finite(value)) value", "if (false) value", "conv", "inf_weight"
    ),
}


def check_rounding(op: Operator) -> None:
    """TF32 rounds x to the nearest value: 1 + 2^-11 becomes 1 + 2^-10, to the bit, where truncation gives
    1."""
    tensors = tensors_of(op, "integers")
    tensors["x"].fill(1 + 2.0**-11)
    got = compiled(replace(op, precision="tf32"))(tensors, poisoned(op))
    tensors["x"].fill(1 + 2.0**-10)
    np.testing.assert_array_equal(got, compiled(op, algorithm="fma")(tensors, poisoned(op)))


def restrict(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let an operator have only the tiles that it is there for."""
    if name in TILES:
        only_tiles(monkeypatch, TILES[name])


def noticed(mutant: Mutant) -> bool:
    """Does some check fail under some order of threads and copies?"""
    op = OPERATORS[mutant.operators]
    tensors = tensors_of(op, "signed" if mutant.kind == "inf_weight" else mutant.kind)
    if mutant.kind == "inf_weight":
        tensors["w"][0, 0, 0, 0, 0] = float("inf")
    algorithm = "fma" if mutant.file == "conv_fma.cu" else "halo"
    for schedule, copies in SCHEDULES:
        with machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies):
            try:
                if mutant.precision == "tf32":
                    check_rounding(op)
                else:
                    check(op, tensors, algorithm=algorithm, prologue="fused")
            except (AssertionError, KernelError):
                return True
    return False


@simulator_only
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    repair = [] if mutant.repaired else [NO_REPAIR]
    plant(monkeypatch, tmp_path / "kernels", mutant.file, (mutant.old, mutant.new), *repair)
    restrict(monkeypatch, mutant.operators)
    assert noticed(mutant)


@simulator_only
def test_finite_data_needs_no_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a missing wait or barrier could hide behind sums that are made again."""
    plant(monkeypatch, tmp_path / "kernels", "conv_halo.cu", NO_REPAIR)
    for name, op in OPERATORS.items():
        for schedule, copies in SCHEDULES:
            with (
                monkeypatch.context() as meanwhile,
                machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies),
            ):
                restrict(meanwhile, name)
                check(op, tensors_of(op, "signed"), algorithm="halo", prologue="fused")


@simulator_only
@pytest.mark.parametrize("algorithm", ["halo", "fma"])
@pytest.mark.parametrize("name", OPERATORS)
def test_without_a_fault_the_same_checks_pass(name: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS[name]
    restrict(monkeypatch, name)
    for kind in ("signed", "one_inf", "one_nan", *(["large_mean"] if name == "norm" else [])):
        for schedule, copies in SCHEDULES:
            with machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies):
                check(op, tensors_of(op, kind), algorithm=algorithm, prologue="fused")
                if name == "conv" and algorithm == "halo":
                    check_rounding(op)
