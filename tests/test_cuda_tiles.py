"""Tiles of the tensor-core convolution: their sizes, the estimates, and the program that times them."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

from backends.cuda import fusion, tiles
from backends.cuda.fusion import Options, Target
from backends.cuda.lowering import lower
from backends.cuda.tiles import HaloTask, HaloTile, block_k, block_n, registers
from tests.cuda_support import device, operator

LGS = "conv-transpose3d-layernorm-gelu-scaling"
MAXMAX = "conv-transpose3d-max-max-sum"
ASYM = "conv-transpose-3d-asym-input-sq-kernel"
H100 = Target(90, 227 << 10, 132)
CONSUMER = Target(89, 99 << 10, 128)


@pytest.mark.parametrize(
    ("channels", "largest", "wanted"), [(3, 32, 8), (32, 32, 32), (48, 32, 24), (48, 16, 16), (33, 32, 8)]
)
def test_channels_that_are_added_up_at_a_time(channels: int, largest: int, wanted: int) -> None:
    assert block_k(channels, largest) == wanted


@pytest.mark.parametrize(("channels", "wanted"), [(1, 8), (24, 24), (64, 64), (65, 40), (130, 48)])
def test_channels_of_a_block(channels: int, wanted: int) -> None:
    assert block_n(channels) == wanted


def test_registers_follow_from_the_warps_of_a_quarter() -> None:
    # 9 warps: one quarter of the multiprocessor has 3 of them, each with a third of its 16384 registers.
    assert [registers(32 * warps, 1) for warps in (8, 9, 12, 16)] == [255, 168, 168, 128]
    assert registers(128, 3) == registers(384, 1)


def chosen(
    name: str, precision: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> tuple[HaloTask, HaloTile]:
    """The task and the tile of the convolution's launch."""
    found: list[tuple[HaloTask, HaloTile | None]] = []
    choose = fusion.halo_tile
    monkeypatch.setattr(fusion, "halo_tile", lambda task: found.append((task, choose(task))) or found[-1][1])
    program = lower(operator(name, "kernelbench", precision), target, Options())
    launch = next(launch for launch in program.launches if launch.name == "conv_halo")
    for task, tile in reversed(found):
        if tile is not None and tile.shared_bytes == launch.shared_bytes and tile.threads == launch.threads:
            return task, tile
    raise AssertionError("the launch's tile was not asked for")


@pytest.mark.parametrize("target", [H100, CONSUMER], ids=["h100", "consumer"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", [LGS, MAXMAX, ASYM])
def test_the_choice_fits_and_has_the_lowest_estimate(
    name: str, precision: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, tile = chosen(name, precision, target, monkeypatch)
    assert tile.resident * (tile.shared_bytes + 1024) <= target.shared_limit + 1024
    assert tile.threads % 32 == 0 and tile.tile[2] % 8 == 0 and tile.voxels >= 0.95 * tile.rows
    estimates = dict(tiles.estimates(task))
    assert estimates[tile] == min(estimates.values())
    assert all(math.isfinite(cycles) and cycles > 0 for cycles in estimates.values())


def test_two_phases_of_a_line_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(LGS, "tf32", H100, monkeypatch)[1].paired


def test_a_second_pooling_is_fused_with_what_is_folded_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, tile = chosen(MAXMAX, "fp32", H100, monkeypatch)
    assert task.pool == (3, 3, 3) and tile.pooled and tile.fold_shared


def test_the_program_that_times_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
    program = importlib.import_module("cuda_tiles")
    try:
        table = list(program.rows(MAXMAX, "tf32", "sample", 3, device()))
    finally:
        sys.modules.pop("cuda_tiles")
    assert len(table) == 3 and len({str(row["tile"]) for row in table}) == 3
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in table)
    assert table[0]["estimated_cycles"] == min(row["estimated_cycles"] for row in table)
    line = program.summary(table)
    assert MAXMAX in line and float(line.split()[-1]) >= 1.0
