"""The convolution for GPUs, a tiled implicit GEMM: tiles, fusion rules, lowering."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from dispatcher.backends.opencl.groups import APART, MOST_PHASES, WINDOWS, Group, Part, Rules, channel_reason
from dispatcher.backends.opencl.lowered import Lowered, Table, Value, Weights, extra_arguments, planned
from dispatcher.backends.opencl.render import (
    KernelOperands,
    Site,
    combinable,
    defines,
    kernel_text,
    reduction_defines,
    section,
    tail_macro,
)
from dispatcher.backends.opencl.stages import TILE_STAGES, render_stages
from dispatcher.backends.opencl.target import Limits, Target, power_above, round_up
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.ops.steps import Convolution, Pointwise, Pool, Step

SOURCE = "conv_transpose3d_tiled.cl"
KERNEL = "conv_tiled"
#: Words that a work-item's sums may take; what it folds takes as many again. LLVM then needs 83 to 132 registers for
#: NVIDIA (sm_80) and 149 to 197 for AMD (gfx90a) and spills nothing; with 64 words two wavefronts fit AMD's units.
SUM_WORDS = 32
#: Channels that are combined in one plain sum at most; errors would grow with more.
MOST_CHANNELS = 512


# ---- tiles -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """What a tuner may choose. Every number is a power of two.

    Attributes:
        block_m: positions of a work-group.
        block_n: output channels of a channel tile.
        block_c: input channels of a step of K.
        block_t: taps of a step of K; above 1 only when block_c holds all channels of a group.
        thread_m: consecutive positions that a work-item holds in registers, at most 8.
        thread_n: consecutive channels that a work-item holds in registers, at most 8; thread_m * thread_n
            sums have to fit SUM_WORDS.
        planes: phases along width whose results are stored together: 1, or the stride.
    """

    block_m: int
    block_n: int
    block_c: int
    block_t: int
    thread_m: int
    thread_n: int
    planes: int

    @property
    def block_k(self) -> int:
        """Rows of a step of K."""
        return self.block_t * self.block_c

    @property
    def work_items(self) -> int:
        """Work-items of a work-group."""
        return self.block_m * self.block_n // (self.thread_m * self.thread_n)

    @property
    def stage_slices(self) -> int:
        """Rows of K that are staged at once; they have to divide block_k."""
        return max(1, self.work_items // self.block_m)

    @property
    def stage_elements(self) -> tuple[int, int]:
        """Elements of A and of B that a work-item stages in a step of K, at most 16 each."""
        staged = (self.block_k * self.block_m, self.block_k * self.block_n)
        return max(1, staged[0] // self.work_items), max(1, staged[1] // self.work_items)

    @property
    def columns(self) -> int:
        """Columns of results."""
        return self.block_m * self.planes

    @property
    def lanes(self) -> int:
        """Work-items side by side along the columns of results."""
        return min(self.work_items, self.columns)

    @property
    def slices(self) -> int:
        """Work-items that share a column of results."""
        return self.work_items // self.lanes


@dataclass(frozen=True)
class Task:
    """What a segment asks of a tile.

    Attributes:
        geometry: of the convolution.
        fold: the pooling window is the set of phases, and is folded.
        all_channels: some step combines the channels of a voxel.
        itemsize: bytes of an element.
    """

    geometry: ConvGeometry
    fold: bool
    all_channels: bool
    itemsize: int

    @property
    def positions(self) -> tuple[int, int, int]:
        """Positions m along depth, height, width; whole windows only, when folded."""
        d, h, w = (axis.output // axis.stride if self.fold else axis.positions for axis in self.geometry.axes)
        return d, h, w

    @property
    def all_positions(self) -> int:
        """The GEMM's M: positions of all images."""
        return self.geometry.batch * math.prod(self.positions)

    @property
    def phases(self) -> int:
        """Phases of all axes."""
        return math.prod(axis.stride for axis in self.geometry.axes)

    @property
    def most_taps(self) -> int:
        """Taps of the largest phase."""
        g = self.geometry
        return max(1, g.longest_sum // (g.in_channels // g.groups))


@dataclass(frozen=True)
class TileLayout:
    """A task cut with a tile: everything that follows from the two."""

    task: Task
    tile: Tile

    @property
    def group_ic(self) -> int:
        """Input channels of a group."""
        return self.task.geometry.in_channels // self.task.geometry.groups

    @property
    def group_oc(self) -> int:
        """Output channels of a group."""
        return self.task.geometry.out_channels // self.task.geometry.groups

    @property
    def padded_ic(self) -> int:
        """Input channels of a group with the zeros behind them."""
        return round_up(self.group_ic, self.tile.block_c)

    @property
    def tiles(self) -> int:
        """Channel tiles of a group."""
        return -(-self.group_oc // self.tile.block_n)

    @property
    def tap_rows(self) -> int:
        """Taps of a channel tile's weights, with those that the last step of K reads past the end."""
        return self.task.geometry.kernel_volume + self.tile.block_t - 1

    @property
    def channel_blocks(self) -> int:
        """Work-groups side by side along the channels."""
        return 1 if self.task.all_channels else self.task.geometry.groups * self.tiles

    @property
    def phases_per_group(self) -> int:
        """Phases that a work-group computes one after another."""
        return self.task.phases if self.task.fold else self.tile.planes

    @property
    def work_groups(self) -> int:
        """Work-groups of the launch."""
        blocks = -(-self.task.all_positions // self.tile.block_m)
        return blocks * self.channel_blocks * (self.task.phases // self.phases_per_group)

    @property
    def result_rows(self) -> int:
        """Rows of results: channels that a work-group holds at once."""
        g = self.task.geometry
        return g.out_channels if self.task.all_channels else min(self.tile.block_n, self.group_oc)

    @property
    def results_at(self) -> int:
        """Where results start in local memory, in elements; 0 where they may lie over A and B."""
        held = self.tile.planes > 1 or (self.task.all_channels and self.task.geometry.groups * self.tiles > 1)
        return self._staging if held else 0

    @property
    def _staging(self) -> int:
        """Elements of A and B, twice: a step of K is filled while another one is multiplied."""
        return 2 * self.tile.block_k * (self.tile.block_m + self.tile.block_n)

    @property
    def local_elements(self) -> int:
        """Elements of A, B and results."""
        return max(self._staging, self.results_at + self.result_rows * self.tile.columns)

    @property
    def partial_elements(self) -> int:
        """Elements of the partial sums of slices."""
        return self.tile.work_items if self.task.all_channels and self.tile.slices > 1 else 1

    @property
    def local_bytes(self) -> int:
        """Local memory of a work-group; a little more than needed, for alignment."""
        places = self.tile.block_m * 16
        return (self.local_elements + self.partial_elements) * self.task.itemsize + places + 64

    def refusal(self, limits: Limits) -> str | None:
        """None when the tile keeps its constraints and the device's limits, else which one it breaks."""
        tile, words = self.tile, self.task.itemsize // 4
        if not 1 <= tile.work_items <= limits.work_items:
            return f"{tile.work_items} work-items; the device allows {limits.work_items}"
        if tile.thread_m > tile.block_m or tile.thread_n > tile.block_n:
            return "a work-item's share is larger than the block"
        if tile.block_t > 1 and tile.block_c < self.group_ic:
            return "a step of several taps has to hold all channels"
        if tile.block_k % tile.stage_slices:
            return "a step of K has fewer rows than are staged at once"
        if self.task.phases > MOST_PHASES:
            return f"more than {MOST_PHASES} phases"
        if self.task.all_channels and self.task.geometry.out_channels > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels to combine"
        if max(tile.stage_elements) > 16:
            return "a work-item would stage more elements than it can hold on to"
        if tile.thread_m * tile.thread_n * words > SUM_WORDS:
            return "too many sums for a work-item's registers"
        if self.task.fold and self.task.all_channels and self.task.geometry.groups * self.tiles > 1:
            return "folding all channels of a voxel needs them in one channel tile"
        if self.local_bytes > limits.local_memory:
            return f"{self.local_bytes} bytes of local memory; the device has {limits.local_memory}"
        return None

    def cost(self, limits: Limits) -> float:
        """Estimated time, in multiply-adds of one lane: a guide for choosing, not a prediction.

        A product costs one multiply-add plus its share of local loads (of B, which all lanes read alike, half
        of what A costs) and of staging: index arithmetic, a global load and a local store for each element.
        """
        tile, task = self.tile, self.task
        product_cost = 1 + 1 / tile.thread_n + 0.5 / tile.thread_m + 8 / tile.block_n + 4 / tile.block_m
        depth = self.padded_ic * self.task.geometry.kernel_volume
        if tile.block_t > 1:
            depth = round_up(task.most_taps, tile.block_t) * self.padded_ic * task.phases
        blocks = -(-task.all_positions // tile.block_m) * tile.block_m
        products = blocks * task.geometry.groups * self.tiles * tile.block_n * depth
        # Lanes that idle in a work-group's last wavefront, and compute units that idle in the last round.
        wavefront = round_up(tile.work_items, limits.multiple) / tile.work_items
        rounds = round_up(self.work_groups, limits.compute_units) / max(1, self.work_groups)
        # A work-group that leaves no room for a second one has nothing to hide its barriers behind.
        alone = 1.3 if self.local_bytes * 2 > limits.local_memory else 1.0
        few = 1.2 if tile.work_items < 2 * limits.multiple else 1.0
        # Results of one phase at a time fill only every stride-th element of a memory line.
        scattered = 1.1 if tile.planes < task.geometry.width.stride and not task.fold else 1.0
        return products * product_cost * wavefront * rounds * alone * few * scattered


def _candidates(task: Task) -> Iterator[Tile]:
    """Every tile worth a thought."""
    group_ic = task.geometry.in_channels // task.geometry.groups
    group_oc = task.geometry.out_channels // task.geometry.groups
    steps = set()
    for block_k in (8, 16):
        block_c = min(block_k, power_above(group_ic))
        # Rows of K that no tap or no channel fills still serve to give every work-item something to stage.
        steps.add((block_c, block_k // block_c))
    stride = task.geometry.width.stride
    planes = {1, stride} if not task.fold and power_above(stride) == stride else {1}
    blocks_n = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= power_above(group_oc)]
    threads = (1, 2, 4, 8)
    for block_m, block_n, thread_m, thread_n in product((8, 16, 32, 64, 128, 256), blocks_n, threads, threads):
        for (block_c, block_t), together in product(sorted(steps), sorted(planes)):
            yield Tile(block_m, block_n, block_c, block_t, thread_m, thread_n, together)


def ranked_layouts(task: Task, limits: Limits) -> list[TileLayout]:
    """Layouts that the device can run, the best estimate first; empty when there is none."""
    layouts = [TileLayout(task, tile) for tile in _candidates(task)]
    fitting = [layout for layout in layouts if layout.refusal(limits) is None]
    return sorted(fitting, key=lambda layout: layout.cost(limits))


# ---- fusion ------------------------------------------------------------------------------------------------
def task_of(group: Group, itemsize: int, further: Step | None = None) -> Task:
    """What a convolution with the steps behind it asks of a tile, and one further step."""
    assert group.convolution is not None
    steps = [part.step for part in group.parts[1:]] + ([] if further is None else [further])
    fold = any(isinstance(step, Pool) for step in steps)
    stages = any(not isinstance(step, Pool) for step in steps)
    return Task(group.convolution.geometry, fold, stages, itemsize)


class TiledRules(Rules):
    """What the tiled kernel does.

    Args:
        limits: of the device: the channels of a block of voxels have to fit its local memory.
        itemsize: bytes of an element.
        refused: convolutions for which the device has turned out to launch no tile.
    """

    def __init__(self, limits: Limits, itemsize: int, refused: Collection[Convolution] = ()) -> None:
        self._limits, self._itemsize, self._refused = limits, itemsize, refused

    def opens(self, step: Convolution) -> str | None:
        if step.geometry.skips:
            return APART
        fits = step not in self._refused and self._fits(Task(step.geometry, False, False, self._itemsize))
        return None if fits else "the device can launch no tile of the tiled kernel"

    def precedes(self, step: Pointwise) -> str | None:
        return None if step.form.cheap else f"{step.op} would be computed again for every tap"

    def joins(self, group: Group, step: Step) -> str | None:
        reason = self._pool(group, step) if isinstance(step, Pool) else channel_reason(step)
        if reason is None and not self._fits(task_of(group, self._itemsize, step)):
            reason = "no work-group can hold all channels of its voxels"
        return reason

    def _pool(self, group: Group, step: Pool) -> str | None:
        assert group.convolution is not None
        stride = tuple(axis.stride for axis in group.convolution.geometry.axes)
        if not step.plain:
            return WINDOWS
        if not step.form.plain or not combinable(step.form.monoid):
            return f"{step.op} is not a plain reduction"
        if any(isinstance(part.step, Pool) for part in group.parts):
            return "one pooling is folded already"
        if step.window != stride:
            return f"pool window {step.window} is not the set of phases, stride {stride}"
        return None

    def _fits(self, task: Task) -> bool:
        return any(TileLayout(task, tile).refusal(self._limits) is None for tile in _candidates(task))


# ---- lowering ----------------------------------------------------------------------------------------------
def pack_weights(weight: np.ndarray, layout: TileLayout) -> np.ndarray:
    """Weights in the order in which the kernel reads them, with zeros in the padding.

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``.

    Returns:
        ``(groups, channel tiles, tap_rows, padded_ic, block_n)``.
    """
    g, tile = layout.task.geometry, layout.tile
    depth, height, width = (axis.kernel for axis in g.axes)
    order = [(d * height + h) * width + w for d, h, w, *_ in _taps(g)]
    packed = np.zeros((g.groups, layout.tiles * tile.block_n, layout.tap_rows, layout.padded_ic), weight.dtype)
    taps = weight.reshape(g.groups, layout.group_ic, layout.group_oc, depth * height * width)
    packed[:, : layout.group_oc, : len(order), : layout.group_ic] = taps[..., order].transpose(0, 2, 3, 1)
    split = packed.reshape(g.groups, layout.tiles, tile.block_n, layout.tap_rows, layout.padded_ic)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def _taps(geometry: ConvGeometry) -> list[tuple[int, int, int, int, int, int]]:
    """Every tap, phase after phase: its three indices in the kernel, its three offsets."""
    return [
        (d.index, h.index, w.index, d.offset, h.offset, w.offset)
        for phases in product(*(axis.phases for axis in geometry.axes))
        for d, h, w in product(*(phase.taps for phase in phases))
    ]


def phase_tables(geometry: ConvGeometry) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel knows of the geometry's phases.

    Returns:
        phases ``(phases, 2)``: first tap and number of taps; taps ``(kernel volume, 4)``: offsets along
        depth, height and width, and a zero. Both int32.
    """
    counts = [math.prod(len(p.taps) for p in phases) for phases in product(*(a.phases for a in geometry.axes))]
    firsts = np.cumsum([0, *counts[:-1]])
    taps = np.array([(*offsets, 0) for *_, d, h, w in _taps(geometry) for offsets in [(d, h, w)]], np.int32)
    return np.stack([firsts, counts], axis=1).astype(np.int32), taps


def render(layout: TileLayout, group: Group) -> tuple[str, KernelOperands]:
    """Source text of a group, and what it reads."""
    task, tile, g = layout.task, layout.tile, layout.task.geometry
    convolution, output = group.convolution, group.steps[-1].shape
    assert convolution is not None
    operands = KernelOperands()
    first, *rest = group.parts
    pool = next((number for number, part in enumerate(rest) if isinstance(part.step, Pool)), None)
    before_fold, after_fold = (rest, []) if pool is None else (rest[:pool], rest[pool + 1 :])

    def tail_of(part: Part) -> str:
        return "" if group.at_store and part is group.parts[-1] else operands.tail(part.tail)

    before, before_calls, folded = render_stages(TILE_STAGES, operands, before_fold, 1, g.out_channels, tail_of)
    after, after_calls, left = render_stages(TILE_STAGES, operands, after_fold, 1 + len(before_fold), folded, tail_of)
    small = task.all_positions + tile.block_m < 1 << 32
    real = "double" if task.itemsize == 8 else "float"
    values: dict[str, object] = {
        "IC": g.in_channels,
        "GROUPS": g.groups,
        "GROUP_IC": layout.group_ic,
        "GROUP_OC": layout.group_oc,
        "PADDED_IC": layout.padded_ic,
        "TILES": layout.tiles,
        "TAP_ROWS": layout.tap_rows,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_C": tile.block_c,
        "BLOCK_T": tile.block_t,
        "BLOCK_K": tile.block_k,
        "THREAD_M": tile.thread_m,
        "THREAD_N": tile.thread_n,
        "STAGE_A_ELEMENTS": tile.stage_elements[0],
        "STAGE_B_ELEMENTS": tile.stage_elements[1],
        "PLANES": tile.planes,
        "WORK_ITEMS": tile.work_items,
        "COLUMNS": tile.columns,
        "LANES": tile.lanes,
        "SLICES": tile.slices,
        "RESULTS_AT": layout.results_at,
        "LOCAL_ELEMENTS": layout.local_elements,
        "PARTIAL_ELEMENTS": layout.partial_elements,
        "USE_ALL_CHANNELS": task.all_channels,
        "CHANNEL_BLOCKS": layout.channel_blocks,
        "PHASES_PER_GROUP": layout.phases_per_group,
        "PHASE_BLOCKS": task.phases // layout.phases_per_group,
        "INDEX": "uint" if small else "ulong",
        "POSITIONS": f"{task.all_positions}{'u' if small else 'ul'}",
        "OUT_C": output[1],
        "OUT_CHANNEL": 0 if left < g.out_channels else "first_channel",
        "OUT_ROWS": 1 if left < g.out_channels else "channels",
        "USE_FOLD": task.fold,
    }
    for letter, axis, positions, extent in zip("DHW", g.axes, task.positions, output[2:], strict=True):
        values |= {
            f"I{letter}": axis.input,
            f"OUT_{letter}": extent,
            f"STRIDE_{letter}": axis.stride,
            f"POSITIONS_{letter}": positions,
        }
    fold = ""
    if pool is not None:
        pooling = rest[pool].step
        assert isinstance(pooling, Pool)
        fold = defines(
            {
                "FOLD_CHANNELS": 1 if folded < g.out_channels else "channels",
                **reduction_defines(pooling.form, f"{task.phases}", "FOLD"),
            }
        ) + tail_macro("FOLD_TAIL", tail_of(rest[pool]))
    prologue_text = operands.tail(group.prologue)
    conv_text = operands.bias(convolution) + tail_of(first)
    channel = "OUT_CHANNEL + row"
    at_store = Site(channel, ("place.w", channel, "d", "h", "w"))
    store = operands.tail(group.tail if group.at_store else [], at_store)
    values["PARAMETERS"] = operands.parameters
    text = kernel_text(
        real,
        1,
        operands,
        defines(values),
        tail_macro("PROLOGUE", prologue_text),
        tail_macro("CONV_TAIL", conv_text),
        tail_macro("STORE_TAIL", store, "x"),
        section("slices.cl") if task.all_channels else "",
        before,
        fold,
        after,
        f"#define STAGES_BEFORE_FOLD do {{ {before_calls} }} while (0)\n",
        f"#define STAGES_AFTER_FOLD do {{ {after_calls} }} while (0)\n",
        section(SOURCE),
    )
    return text, operands


def lower_tiled(group: Group, target: Target, real: np.dtype[Any]) -> Lowered | None:
    """Lower a group that begins with a convolution to its best tile; None when no tile fits the target."""
    convolution = group.convolution
    assert convolution is not None
    layout = next(iter(ranked_layouts(task_of(group, real.itemsize), target.limits)), None)
    if layout is None:
        return None
    text, operands = render(layout, group)
    tile = layout.tile
    detail: dict[str, str | int | float] = {
        "block": f"{tile.block_m}x{tile.block_n}x{tile.block_k}",
        "thread": f"{tile.thread_m}x{tile.thread_n}",
        "taps_x_channels": f"{tile.block_t}x{tile.block_c}",
        "phases_per_group": layout.phases_per_group,
        "phases_stored_together": tile.planes,
        "all_channels": "yes" if layout.task.all_channels else "no",
        "local_bytes": layout.local_bytes,
        "work_items": tile.work_items,
        "work_groups": layout.work_groups,
    }
    return Lowered(
        KERNEL,
        text,
        (
            Value(group.source),
            Weights(
                convolution.weight.name, lambda weight: pack_weights(convolution.contraction_weight(weight), layout)
            ),
            operands,
            *(Table(table) for table in phase_tables(layout.task.geometry)),
            Value(group.output),
            *extra_arguments(group, operands),
        ),
        layout.work_groups * tile.work_items,
        tile.work_items,
        group.source,
        group.output,
        planned(group, KERNEL, "tiled", detail),
        local_bytes=layout.local_bytes,
    )
