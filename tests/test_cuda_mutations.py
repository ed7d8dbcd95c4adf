"""Faults put into the kernels on purpose: the checks must notice every one of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from backends.cuda import toolkit
from dispatcher.errors import KernelError
from dispatcher.operator import Operator
from tests.cuda_support import check, compiled, machine, poisoned, simulator_only
from tests.strategies import conv_operator, tensors_of

NORM = [{"op": "layer_norm", "eps": 1e-5}]
POOLS = [{"op": "max_pool3d", "window": 2}, {"op": "max_pool3d", "window": 3}]
OPERATORS = {
    "conv": conv_operator((1, 20, 3, 5, 8), 20, (3, 4, 3), stride=2, padding=1, output_padding=1),
    "norm": conv_operator((1, 2, 2, 2, 8), 18, (2, 2, 2), stride=2, after=NORM),
    "pool": conv_operator(
        (1, 3, 6, 6, 8), 4, (3, 3, 3), stride=2, padding=1, output_padding=1, after=POOLS[:1]
    ),
    "pools": conv_operator((1, 3, 6, 6, 8), 4, (2, 2, 2), stride=2, bias=True, after=POOLS),
}
SCHEDULES = [("forward", "late"), ("reverse", "late"), ("forward", "eager")]


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` becomes ``new``, its first occurrence, in ``file``; noticed on one of
    ``operators``."""

    file: str
    old: str
    new: str
    operators: str = "conv"
    kind: str = "signed"
    precision: str = "fp32"


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
        "const COMPUTE centred = values[c * BLOCK_M] - mean;\n"
        "        squares = multiply_add(centred, centred, squares);",
        "const COMPUTE v = values[c * BLOCK_M];\n        squares = multiply_add(v, v, squares);\n"
        "        squares -= mean * mean;",
        "norm",
        "large_mean",
    ),
    "fma maximum from zero": Mutant(
        "conv_fma.cu", "total = f == 0 ? value :", "total = f == 0 ? max_nan(value, COMPUTE(0)) :", "pool"
    ),
    "fma wrong stride of the store": Mutant(
        "conv_fma.cu", "y[(first + c) * plane]", "y[(first + c) * (plane - 1)]"
    ),
    "halo not zero along a line": Mutant(
        "conv_halo.cu", "const bool inside = row && x < p.in[2];", "const bool inside = row;"
    ),
    "halo not zero from line to line": Mutant(
        "conv_halo.cu", " && unsigned(iy) < unsigned(p.in[1]) && c <", " && c <"
    ),
    "halo phases swapped": Mutant(
        "conv_halo.cu", "+ group * STAGE_VOXELS", "+ (PHASE_GROUPS - 1 - group) * STAGE_VOXELS"
    ),
    "halo last chunk skipped": Mutant(
        "conv_halo.cu", "if (tap >= 0) multiply", "if (tap >= 0 && chunk + 1 < CHUNKS) multiply"
    ),
    "halo no barrier in the ring": Mutant(
        "conv_halo.cu", "copy_wait<STAGES - 2>();\n        __syncthreads();", "copy_wait<STAGES - 2>();"
    ),
    "halo one wait too few": Mutant("conv_halo.cu", "copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    "halo no barrier before the rounding": Mutant(
        "conv_halo.cu", "  __syncthreads();\n  round_x", "  round_x", precision="tf32"
    ),
    "halo no wait for x": Mutant("conv_halo.cu", "  copy_wait<STAGES - 1>();\n", "", precision="tf32"),
    "halo store without first barrier": Mutant(
        "conv_halo.cu",
        "    __syncthreads();\n    stage(staging, acc, n, first_voxel, group, g, t);",
        "    stage(staging, acc, n, first_voxel, group, g, t);",
    ),
    "halo store without second barrier": Mutant(
        "conv_halo.cu",
        "stage(staging, acc, n, first_voxel, group, g, t);\n    __syncthreads();",
        "stage(staging, acc, n, first_voxel, group, g, t);",
    ),
    "halo one-pass variance": Mutant(
        "conv_halo.cu",
        "v[i] -= mean;\n    const float centred = channel_of(i, t) < channels ? v[i] : 0.f;\n"
        "    squares = fmaf(centred, centred, squares);",
        "squares = fmaf(v[i], v[i], squares) - mean * mean;\n    v[i] -= mean;",
        "norm",
        "large_mean",
    ),
    "halo padded channels in the norm": Mutant(
        "conv_halo.cu",
        "const float centred = channel_of(i, t) < channels ? v[i] : 0.f;",
        "const float centred = v[i];",
        "norm",
    ),
    "halo maximum from zero": Mutant(
        "conv_halo.cu",
        "total = q == 0             ? acc[m][n][i]",
        "total = q == 0             ? max_nan(acc[m][n][i], 0.f)",
        "pool",
    ),
    "halo maximum drops NaN": Mutant(
        "device.cuh", "return b > a || b != b ? b : a;", "return b > a ? b : a;", "pool", "one_nan"
    ),
    "halo wrong stride of the store": Mutant("conv_halo.cu", "y[j][f] += plane;", "y[j][f] += plane - 1;"),
    "halo ragged rows stored": Mutant(
        "conv_halo.cu", "inside[j][f] = place.inside && voxel < TILE_M;", "inside[j][f] = voxel < TILE_M;"
    ),
    "halo one product instead of three": Mutant(
        "conv_halo.cu", "mma_tf32(acc[m][2 * pair + e], a_small[m], b[e]);", ";"
    ),
    "halo infinities split": Mutant(
        "conv_halo.cu", "if (!is_finite(value) && c < channels)", "if (false)", "conv", "one_inf"
    ),
    "fma infinities meet the halo": Mutant(
        "conv_fma.cu", "if (!is_finite(acc[i][j])) acc", "if (false) acc", "conv", "inf_weight"
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
                    check(op, tensors, algorithm=algorithm)
            except (AssertionError, KernelError):
                return True
    return False


@simulator_only
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    folder = tmp_path / "kernels"
    shutil.copytree(toolkit.KERNELS, folder)
    text = (folder / mutant.file).read_text()
    assert mutant.old in text, "the kernel no longer has the line that this mutant changes"
    (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new, 1))
    monkeypatch.setattr(toolkit, "KERNELS", folder)
    assert noticed(mutant)


@simulator_only
@pytest.mark.parametrize("algorithm", ["halo", "fma"])
def test_without_a_fault_the_same_checks_pass(algorithm: str) -> None:
    for name, op in OPERATORS.items():
        for kind in ("signed", "one_inf", "one_nan", *(["large_mean"] if name == "norm" else [])):
            for schedule, copies in SCHEDULES:
                with machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies):
                    check(op, tensors_of(op, kind), algorithm=algorithm)
                    if name == "conv" and algorithm == "halo":
                        check_rounding(op)
