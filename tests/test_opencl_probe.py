"""What a CPU device's register tiles were measured to do, and what is chosen by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED
from test_opencl_tiles import FACTS, cube

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import classes, lines, probe, runtime
from dispatcher.backends.opencl.backend import OpenClBackend
from dispatcher.backends.opencl.classes import RATES, device_class, rates_text
from dispatcher.backends.opencl.options import Options
from dispatcher.device.selection import backend_devices
from dispatcher.interface import CALIBRATION

#: What compilers may do to a tile on a machine, and what noise may.
SPILLED, NOISY = 0.6, 0.93


def measured(vec: int, **shares: float) -> str:
    """Rates of all tiles that are measured, those of a name such as ``direct_4x4`` so slow."""
    found = probe.measured_tiles(device_class(vec))
    return rates_text({(core, c, w): shares.get(f"{core}_{c}x{w}", NOISY) for core, c, w in found})


@pytest.mark.parametrize("vec", [4, 8, 16])
def test_what_was_measured_counts_where_it_is_clearly_worse(vec: int) -> None:
    shipped = device_class(vec)
    noisy = device_class(vec, measured(vec))
    tiles = [("direct", *tile) for tile in shipped.register_tiles] + [("winograd", *t) for t in shipped.winograd_tiles]
    assert all(noisy.tile_cost(c, w, core) == shipped.tile_cost(c, w) for core, c, w in tiles)
    assert not noisy.slower()
    c, w = shipped.register_tiles[0]
    spilled = device_class(vec, measured(vec, **{f"direct_{c}x{w}": SPILLED}))
    assert spilled.tile_cost(c, w) == pytest.approx(c * w / SPILLED)
    assert list(spilled.slower()) == [("direct", c, w)]
    assert spilled.tile_cost(c, w, "winograd") == shipped.tile_cost(c, w)  # the loop of another core
    assert device_class(vec, measured(vec, **{f"direct_{c}x{w}": 0.0})).tile_cost(c, w) == pytest.approx(100 * c * w)


def test_tiles_that_spill_are_not_chosen() -> None:
    def chosen(transformed: bool, **shares: float) -> tuple[tuple[int, int], Any]:
        facts = replace(FACTS, rates=measured(16, **shares) if shares else "")
        geometry = cube(8, 64, 32, 3, 1)
        found = lines.ranked(geometry, None, facts, np.dtype(np.float32), Options(line="rows"), transformed=transformed)
        return (found[0][1].thread_c, found[0][1].thread_w), found

    for transformed, core in ((False, "direct"), (True, "winograd")):
        tile, shipped = chosen(transformed)
        spilled = f"{core}_{tile[0]}x{tile[1]}"
        assert chosen(transformed, other=1.0)[1] == shipped  # noise changes no plan
        assert chosen(transformed, **{spilled: SPILLED})[0] != tile


def test_those_that_may_spill_are_measured_and_single_vectors() -> None:
    for entry in classes.device_classes():
        tiles = probe.measured_tiles(entry)
        assert len(set(tiles)) == len(tiles) <= 16
        assert {("direct", *entry.register_tiles[0]), ("winograd", *entry.winograd_tiles[0])} <= set(tiles)
        assert all((core, c, 1) in tiles for core, c, w in tiles if c >= 4)


@pytest.mark.parametrize("index", [0, 1])
def test_rates_of_a_device_are_measured_and_known_when_it_is_opened(index: int) -> None:
    devices = [each for each in backend_devices("opencl") if each.available and each.kind == "cpu"]
    if index >= len(devices):
        (pytest.fail if index == 0 and "opencl" in REQUIRED else pytest.skip)("opencl: no such CPU device")
    backend, device = OpenClBackend(), devices[index]
    backend.probe()
    facts = backend.calibrate(device)
    vec = backend._runtime(device).facts.vec
    rates = device_class(vec, str(facts[RATES])).rates
    assert list(rates) == probe.measured_tiles(device_class(vec))
    assert max(rates.values()) == 1.0 and min(rates.values()) > 0.0
    assert str(facts[CALIBRATION]).startswith(f"{len(rates)} register tiles were measured")
    text = measured(vec, direct_4x4=SPILLED)
    opened = OpenClBackend()._runtime(replace(device, facts={**device.facts, RATES: text}))
    assert opened.facts.device_class == device_class(vec, text)


def test_a_loop_that_does_more_is_found_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    device = next((each for each in backend_devices("opencl") if each.available and each.kind == "cpu"), None)
    if device is None:
        pytest.skip("opencl: no usable CPU device")
    backend = OpenClBackend()
    opened = backend._runtime(device)
    tiles = probe.measured_tiles(device_class(opened.facts.vec))
    section, (core, c, w) = probe.section, tiles[0]

    def slowed(file: str, prefix: str = "") -> str:
        text = section(file, prefix)
        slow = file == "conv_tile.cl" and f"THREAD_C {c}\n#define TILE_W {w}\n" in prefix
        return text.replace("fma(xv[v], wc, acc[c][v])", "fma(xv[v], wc, acc[c][v] / wc)") if slow else text

    monkeypatch.setattr(probe, "section", slowed)
    rates = probe.measure(opened)
    assert replace(device_class(opened.facts.vec), rates=rates).slower()[core, c, w] > 1.5


@pytest.mark.parametrize(
    ("size", "sharers", "share"),
    [
        ("1024K", "1", 1 << 20),
        ("2048K", "00000000,00000003", 1 << 20),  # two threads of a core
        ("4096K", "f0", 1 << 20),  # a cluster
        ("0K", "1", runtime.COMMON_CORE_CACHE),
        ("65536K", "1", runtime.COMMON_CORE_CACHE),  # what a host passes on
        ("?", "1", runtime.COMMON_CORE_CACHE),
        (None, "1", runtime.COMMON_CORE_CACHE),
    ],
)
def test_the_share_of_a_core_in_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str | None, sharers: str, share: int
) -> None:
    for level, found in (("1", "32K"), ("2", size), ("3", "32768K")):
        folder = tmp_path / f"index{level}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "shared_cpu_map").write_text(f"{sharers}\n")
        if found is not None:
            (folder / "size").write_text(f"{found}\n")
    monkeypatch.setattr(runtime, "CACHES", tmp_path)
    assert runtime.core_cache() == share
