"""The choice of tiles for CPUs: few work items are shared out evenly among the cores."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import lines, winograd
from dispatcher.backends.opencl.classes import device_class as class_of
from dispatcher.backends.opencl.implementations import choose, tasks_of
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.render import kernel_source
from dispatcher.backends.opencl.target import Facts, Limits, Target
from dispatcher.backends.opencl.tiles import Fold, LineLayout, imbalance, work
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry
from tests.strategies import operator_of

FACTS = Facts(
    cpu=True,
    compute_units=2,
    vec=16,
    vec_double=8,
    cache=900_000,
    global_memory=1 << 34,
    largest_buffer=1 << 32,
    unified=True,
    any_pointer=True,
)
UNITS = (2, 16, 128)


def cube(batch: int, channels: int, extent: int, kernel: int, stride: int, padding: int = 0) -> ConvGeometry:
    axes = [AxisGeometry(name, extent, kernel, stride, padding) for name in ("depth", "height", "width")]
    return ConvGeometry(batch, channels, 2 * channels, 1, axes[0], axes[1], axes[2])


def chosen(geometry: ConvGeometry, units: int, fold: Fold | None = None, **options: str) -> LineLayout:
    """The layout that a device with so many compute units gets."""
    facts = replace(FACTS, compute_units=units)
    runtime = cast(Any, SimpleNamespace(facts=facts, identity="a device that nothing was tuned on"))
    tile, _ = lines.choose(geometry, fold, runtime, np.dtype(np.float32), Options(tuned="ignore", **cast(Any, options)))
    return lines.layout_of(geometry, fold, tile)


def items_of(layout: LineLayout) -> int:
    return layout.boxes[0] * layout.boxes[1] * layout.geometry.batch


def makespan(layout: LineLayout, units: int) -> float:
    """Estimated time of the whole launch: rounds of equal boxes."""
    rounds, device = math.ceil(items_of(layout) / units), class_of(16)
    if isinstance(layout, winograd.WinogradLayout):
        return rounds * winograd.work(layout, device)
    return rounds * work(layout, device)


@pytest.mark.parametrize(
    ("items", "units", "expected"),
    [(1, 1, 1.0), (64, 64, 1.0), (40, 64, 1.6), (65, 64, 128 / 65), (1, 128, 128.0), (1000, 2, 1.0)],
)
def test_the_last_round_waits(items: int, units: int, expected: float) -> None:
    assert imbalance(items, units) == pytest.approx(expected)


GEOMETRIES = {
    "few_large_windows": (cube(1, 32, 32, 5, 2, 2), Fold("max", (6, 6, 6))),
    "one_image": (cube(1, 16, 40, 3, 1), None),
    "three_images": (cube(3, 16, 20, 3, 2, 1), None),
    "one_small_image": (cube(1, 8, 12, 3, 1), None),
}


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("algorithm", ["direct", "winograd"])
@pytest.mark.parametrize(("geometry", "fold"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_no_box_that_one_may_ask_for_ends_much_sooner(
    geometry: ConvGeometry, fold: Fold | None, algorithm: str, units: int
) -> None:
    layout = chosen(geometry, units, fold, algorithm=algorithm)
    tile = layout.tile
    unit_d, unit_h = {None: (1, 1), "max": (3, 3)}[fold and fold.function]
    for d in (1, 2, 4):
        for h in range(1, 9):
            deep, high = math.lcm(unit_d, tile.planes) * d, math.lcm(unit_h, tile.rows) * h
            other = lines.layout_of(geometry, fold, replace(tile, box_d=deep, box_h=high))
            size = 4 * (other.core_size + other.pooled_size(geometry.out_channels))
            if size <= FACTS.cache:
                assert makespan(layout, units) <= 1.03 * makespan(other, units)


def test_many_cores_get_smaller_boxes_where_items_are_few() -> None:
    geometry = cube(1, 32, 24, 3, 1)
    few, many = (chosen(geometry, units) for units in (2, 128))
    assert items_of(few) < 64
    assert items_of(many) >= 2 * items_of(few)
    assert makespan(many, 128) < 0.7 * makespan(few, 128)


def test_a_large_batch_gets_the_same_boxes_on_any_device() -> None:
    geometry = replace(GEOMETRIES["one_image"][0], batch=512)
    assert len({chosen(geometry, units).tile for units in UNITS}) == 1


def test_a_geometry_is_ranked_once_however_often_a_network_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking takes most of the time that a network takes to compile."""
    ranked, calls = lines.ranked, Counter[Any]()

    def count(geometry: ConvGeometry, *given: Any, **named: Any) -> Any:
        calls[geometry, named["transformed"]] += 1
        return ranked(geometry, *given, **named)

    monkeypatch.setattr(lines, "ranked", count)
    lines.best.cache_clear()
    block = [{"op": "conv3d", "weight": "w", "padding": 1}, "instance_norm", "relu"]
    operator = operator_of({"x": (1, 24, 16, 17, 18), "w": (24, 24, 3, 3, 3)}, 3 * block)
    target = Target(FACTS, Limits(1024, 48 << 10, 32, 4), "a device that nothing was tuned on")
    cores = {choose(task)[0].name for task in tasks_of(operator, target, Options(), []) if task.group.convolution}
    assert cores == {"lines-winograd"}
    assert list(calls.values()) == [1, 1]


def test_the_kernel_says_that_it_has_vectors_of_its_own() -> None:
    """Otherwise Intel's compiler makes a second kernel, over many work-items, that no launch runs."""
    assert "reqd_work_group_size(1, 1, 1), vec_type_hint(real_v)" in kernel_source("conv_transpose3d_lines.cl")
