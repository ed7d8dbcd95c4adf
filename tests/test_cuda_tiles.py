"""Tiles of the tensor-core convolution: their sizes, the estimates, and the program that times them."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda import tasks, tiles
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.tasks import Target
from dispatcher.backends.cuda.tiles import HaloTask, HaloTile, block_k, block_n, registers
from tests.cuda_support import device, operator

ROOT = Path(__file__).resolve().parents[1]
LGS = "conv-transpose3d-layernorm-gelu-scaling"
SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
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


def chosen(name: str, precision: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> tuple[HaloTask, HaloTile]:
    """The task and the tile of the convolution's launch."""
    found: list[tuple[HaloTask, HaloTile]] = []

    def noted(task: HaloTask) -> HaloTile:
        tile = tiles.halo_tile(task)
        assert tile is not None
        found.append((task, tile))
        return tile

    monkeypatch.setattr(tasks, "halo_tile", noted)
    program = lower(operator(name, "kernelbench", precision), target, Options())
    launch = next(launch for launch in program.launches if launch.name == "conv_halo")
    task, tile = found[-1]  # that of the task as far as it grew
    assert (tile.shared_bytes, tile.threads) == (launch.shared_bytes, launch.threads)
    return task, tile


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


def test_a_second_pooling_is_fused_with_what_is_folded_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task, tile = chosen(MAXMAX, "fp32", H100, monkeypatch)
    assert task.pool == (3, 3, 3) and tile.pooled and tile.fold_shared


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("target", [H100, Target(80, 163 << 10, 108), CONSUMER], ids=["h100", "a100", "consumer"])
def test_both_pools_and_the_sum_are_one_launch(target: Target, precision: str) -> None:
    program = lower(operator(MAXMAX, "kernelbench", precision), target, Options())
    assert [launch.name for launch in program.launches] == ["conv_halo"]


@pytest.fixture
def bench_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a program of the bench folder."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("cuda_"):
            del sys.modules[name]


def test_the_guide_has_the_tables_that_the_model_makes(
    bench_program: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = bench_program("cuda_model")
    monkeypatch.setattr(sys, "argv", ["cuda_model.py"])
    assert program.main() == 0
    errors, measured, expected = capsys.readouterr().out.strip().split("\n\n")
    guide = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    assert measured in guide and expected in guide
    typical, largest, clock = re.findall(r"([\d.]+) (?:%|GHz)", errors.splitlines()[0])
    assert f"by {typical} % (root mean square), by {largest} % at most" in " ".join(guide.split())
    assert f"the {clock} GHz" in guide
    slowest = max(line.split()[-1] for line in errors.splitlines()[1:])
    assert f"at most {slowest} times slower" in " ".join(guide.split())


def test_the_guide_says_what_is_spilled() -> None:
    table = (ROOT / "bench" / "results" / "cuda-resources.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    spilled = {
        name: [(int(row[6]), int(row[10] or 0)) for row in rows if len(row) > 2 and row[2].startswith(name)]
        for name in ("conv_halo", "conv_fma")
    }
    most = {name: max(size for size, _ in found) for name, found in spilled.items()}
    in_loops = sum(count for found in spilled.values() for _, count in found)
    guide = " ".join((ROOT / "docs" / "cuda.md").read_text(encoding="utf-8").split())
    assert f"at most {most['conv_halo']} bytes a thread in `conv_halo` and {most['conv_fma']} in `conv_fma`" in guide
    assert f"but for {in_loops} access to one register" in guide


def test_the_model_notices_wrong_constants(
    bench_program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = bench_program("cuda_model")
    found = list(program.samples(json.loads(program.MEASURED.read_text(encoding="utf-8"))))
    good = program.errors(found, program.clock_ghz(found))
    assert len(found) == 148 and np.sqrt(np.mean(good**2)) < 0.12
    with program.constants({"store_cycles": 6.2}):
        bad = program.errors(found, program.clock_ghz(found))
    assert np.sqrt(np.mean(bad**2)) > 3 * np.sqrt(np.mean(good**2))


def test_the_program_that_times_tiles(bench_program: Callable[[str], Any]) -> None:
    program = bench_program("cuda_tiles")
    table = list(program.rows(MAXMAX, "tf32", "sample", 3, device()))
    assert len(table) == 3 and len({str(row["tile"]) for row in table}) == 3
    assert all(row["prologue"] == "separate" and row["convolution_ms"] <= row["max_ms"] for row in table)
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in table)
    assert table[0]["estimated_cycles"] == min(row["estimated_cycles"] for row in table)
    both = list(program.rows(SOFTMAX, "tf32", "sample", 2, device()))
    assert [row["prologue"] for row in both] == ["separate", "separate", "fused", "fused"]
    assert all(row["convolution_ms"] < row["median_ms"] for row in both[:2])
    line = program.summary(table)
    assert MAXMAX in line and float(line.split()[-1]) >= 1.0
