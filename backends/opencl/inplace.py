"""The convolution that reads its input where it lies, for groups of few channels: what it can run, blocks, its cost.

Memory bounds such convolutions, so nothing is packed and no line is kept: a register tile of positions along width goes
over the taps and is stored. Its kernel is ``conv_in_place.cl``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dispatcher.backends.opencl.classes import DeviceClass
from dispatcher.backends.opencl.groups import Group
from dispatcher.backends.opencl.lines import WORKERS_PER_UNIT, pack_direct_weights
from dispatcher.backends.opencl.lowered import Counter, Lowered, Value, Weights, extra_arguments, planned
from dispatcher.backends.opencl.render import KernelOperands, Site, defines, kernel_text, section, tail_macro
from dispatcher.backends.opencl.steps import ROW, real_name
from dispatcher.backends.opencl.target import Target
from dispatcher.backends.opencl.tiles import LineLayout, Tile, imbalance, merged
from dispatcher.ops.geometry import ConvGeometry

#: Input channels of a group that are read again for each register tile of its output channels, at most. More of them
#: lie too far apart for the first-level cache, and packing costs little beside what is made of them.
MOST_CHANNELS = 8
#: Taps along a row times channels, and channels, whose products are written out one by one.
MOST_UNROLLED = 16
#: A product of a position that is summed up alone, in vector multiply-adds.
EDGE_COST = 1.5
#: Loading a vector of every second input, and of inputs further apart, in loads of neighbours.
HALVED_COST, APART_COST = 3.0, 10.0
#: Results of a work item, about, and positions of a part of a row.
ITEM_RESULTS, PART_POSITIONS = 1 << 14, 1 << 12


@dataclass(frozen=True)
class InPlaceLayout:
    """What follows from a geometry and a device.

    Attributes:
        geometry: all strides 1; see :func:`merged`.
        vec: lanes of a vector.
        device: its class.
        units: compute units.
    """

    geometry: ConvGeometry
    vec: int
    device: DeviceClass
    units: int

    @cached_property
    def group_channels(self) -> tuple[int, int]:
        """Input and output channels of a group."""
        g = self.geometry
        return g.in_channels // g.groups, g.out_channels // g.groups

    @cached_property
    def inside(self) -> tuple[int, int]:
        """The positions along width from the first one on whose taps all lie inside the row, and that behind the last
        vector of them, which reads ``step`` inputs a lane."""
        axis = self.geometry.width
        low, high = axis.offset_range
        first = max(0, -(low // axis.step))
        reach = high + (axis.step if axis.step == 2 else 1)
        return first, max(first, min(axis.output, (axis.input - reach) // axis.step + 1))

    @property
    def reach(self) -> int:
        """Inputs from the first tap of a row to the last one."""
        low, high = self.geometry.width.offset_range
        return high - low

    @property
    def shifts(self) -> bool:
        """Whether shuffles may make the inputs of each tap from vectors that a row of taps shares."""
        return self.geometry.width.step == 1 and 0 < self.reach < self.vec

    def row_cost(self, channels: int, width: int) -> float:
        """Products of a row of results, for one input channel and tap; those of positions that are summed up alone."""
        first, end = self.inside
        tiles, rest = divmod(-(-(end - first) // self.vec), width)
        step = self.geometry.width.step
        loads = (
            self.device.vector_load * ({1: 0.0, 2: HALVED_COST - 1}.get(step, APART_COST - 1)) * (tiles * width + rest)
        )
        alone = self.geometry.width.output - (end - first)
        vectors = tiles * self.device.tile_cost(channels, width) + rest * self.device.tile_cost(channels, 1)
        return vectors + loads + EDGE_COST * channels * alone

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Output channels and vectors along width of the register tile.

        With shuffles its sums, what a row of taps shares and the inputs of a tap are in registers at once.
        """
        most = self.group_channels[1]
        tiles = [(min(c, most), w) for c, w in self.device.register_tiles]
        if self.shifts:
            tiles = [(c, w) for c, w in tiles if (c + 2) * w <= self.device.registers]
        return min(tiles, key=lambda tile: self.row_cost(*tile) * -(-most // tile[0]))

    @cached_property
    def boxes(self) -> tuple[int, int, int]:
        """Groups of channels and rows along height of an item, and the parts of a row."""
        g = self.geometry
        per_row = g.width.output * self.group_channels[1]
        parts = -(-g.width.output // PART_POSITIONS)
        rows = min(g.height.output, max(1, ITEM_RESULTS // per_row))
        groups = min(g.groups, max(1, ITEM_RESULTS // (per_row * rows)))
        while self.items(groups, rows, parts) < 4 * self.units and groups * rows > 1:
            groups, rows = (groups // 2, rows) if groups > 1 else (groups, rows // 2)
        return groups, rows, parts

    def items(self, groups: int, rows: int, parts: int) -> int:
        """Work items of such a size."""
        g = self.geometry
        return max(1, g.batch) * -(-g.groups // groups) * g.depth.output * -(-g.height.output // rows) * parts

    @property
    def work(self) -> float:
        """Cost of an image, in the units of :func:`~dispatcher.backends.opencl.tiles.work`."""
        g, (group_ic, group_oc) = self.geometry, self.group_channels
        tiles = g.groups * -(-group_oc // self.tile[0])
        cost = tiles * g.depth.output * g.height.output * self.row_cost(*self.tile) * group_ic * g.kernel_volume
        return cost * imbalance(self.items(*self.boxes), self.units)


def in_place_reason(group: Group, layout: InPlaceLayout) -> str | None:
    """None when the kernel can run a group, else why not."""
    geometry = layout.geometry
    group_ic, group_oc = layout.group_channels
    if len(group.parts) > 1 or group.prologue or group.gathers is not None:
        return "steps before the convolution, over channels, or statistics of rows need lines"
    if any(axis.stride > 1 for axis in geometry.axes):
        return "results of several phases alternate"
    if group_ic > MOST_CHANNELS and group_oc > layout.tile[0]:
        return f"a group has more than {MOST_CHANNELS} input channels, and outputs for more than one register tile"
    first, end = layout.inside
    return "rows hold no vector of windows" if end - first < layout.vec else None


def layout_of(group: Group, target: Target, real: np.dtype[Any]) -> InPlaceLayout:
    """The layout of a group that begins with a convolution."""
    assert group.convolution is not None
    geometry, facts = group.convolution.geometry, target.facts
    if not group.at_store and all(axis.stride == 1 for axis in geometry.axes):
        geometry = merged(geometry)
    return InPlaceLayout(geometry, facts.lanes(real), facts.device_class, facts.compute_units)


def _shifts(layout: InPlaceLayout) -> str:
    """Macros that give the inputs of each tap of a row as parts of two vectors, and the list of the taps.

    The second vector follows the first one, or at the end of a tile ends with the last input that a tap reads.
    """
    text, taps = "", ""
    for number, shift in enumerate(range(0, layout.reach + 1, layout.geometry.width.dilation)):
        behind = range(shift, shift + layout.vec)
        ends = [lane if lane < layout.vec else lane + layout.vec - layout.reach for lane in behind]
        for name, lanes in ((f"SHIFT_{shift}", list(behind)), (f"SHIFT_END_{shift}", ends)):
            text += f"#define {name}(a, b) SHUFFLE_V((a), (b), {', '.join(map(str, lanes))})\n"
        taps += f" TAP({number}, SHIFT_{shift}, SHIFT_END_{shift})"
    return f"{text}#define TAPS_W{taps}\n"


def lower_in_place(group: Group, layout: InPlaceLayout, real: np.dtype[Any]) -> Lowered:
    """The launch of a group for which :func:`in_place_reason` has none against it."""
    convolution, g = group.convolution, layout.geometry
    assert convolution is not None
    (thread_c, thread_w), (box_g, box_h, parts) = layout.tile, layout.boxes
    group_ic, group_oc = layout.group_channels
    operands = KernelOperands(padding=thread_c)
    conv_text = operands.bias(convolution) + ("" if group.at_store else operands.tail(group.tail))
    store_text = operands.tail(group.tail, Site("c", ROW, "OUT_W - w")) if group.at_store else ""
    first, end = layout.inside
    values: dict[str, object] = {
        "THREAD_C": thread_c,
        "THREAD_W": thread_w,
        "BOX_G": box_g,
        "BOX_H": box_h,
        "BOXES_G": -(-g.groups // box_g),
        "BOXES_H": -(-g.height.output // box_h),
        "BOXES_W": parts,
        "GROUPS": g.groups,
        "GROUP_IC": group_ic,
        "GROUP_OC": group_oc,
        "TILES_C": -(-group_oc // thread_c),
        "CHANNEL": f"((size_t){math.prod(g.input_shape[2:])})",
        "OUT_CHANNEL": f"((size_t){math.prod(g.output_shape[2:])})",
        "LO": first,
        "HI": end,
        "MOST_UNROLLED": MOST_UNROLLED,
        "USE_SHIFTS": layout.shifts,
        "REACH_W": layout.reach,
        "PARAMETERS": operands.parameters,
        "ARGUMENTS": operands.arguments,
    }
    for letter, axis in zip("DHW", g.axes, strict=True):
        values |= {
            f"I{letter}": axis.input,
            f"OUT_{letter}": axis.output,
            f"K{letter}": axis.kernel,
            f"STEP_{letter}": axis.step,
            f"LOW_{letter}": f"({axis.offset_range[0]})",
            f"APART_{letter}": axis.dilation,
        }
    text = kernel_text(
        real_name(real),
        layout.vec,
        operands,
        defines(values),
        _shifts(layout) if layout.shifts else "",
        tail_macro("CONV_TAIL", conv_text),
        tail_macro("STORE_TAIL", store_text, "x"),
        section("conv_in_place.cl"),
    )
    items = layout.items(*layout.boxes) if g.batch else 0
    workers = min(layout.units * WORKERS_PER_UNIT, max(1, items))
    packed = LineLayout(convolution.geometry, None, Tile(layout.vec, thread_c, thread_w, 1, 1, False))

    def pack(weight: np.ndarray) -> np.ndarray:
        return pack_direct_weights(convolution.contraction_weight(weight), packed)

    detail: dict[str, str | int | float] = {
        "vector": layout.vec,
        "channels_x_vectors": f"{thread_c}x{thread_w}",
        "box": f"{box_g} groups x {box_h} rows",
        "items": items,
        "workers": workers,
    }
    return Lowered(
        "conv_in_place",
        text,
        (
            Value(group.source),
            Weights(convolution.weight.name, pack),
            operands,
            Value(group.output),
            Counter(guarded=False),
            np.int32(items),
            *extra_arguments(group, operands),
        ),
        workers,
        1,
        group.source,
        group.output,
        planned(group, "conv_in_place", "in place", detail),
    )
