"""The direct convolution with output channels in the vector lanes: its layout, its register tiles, and what they cost.

Positions are then read one by one and broadcast, at any step, from rows packed as they are. So rows of any length fill
the lanes, and strided convolutions need no rows of every ``step``-th input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from dispatcher.backends.opencl.classes import DeviceClass
from dispatcher.backends.opencl.target import round_up
from dispatcher.backends.opencl.tiles import (
    PACKING_COST,
    Chunk,
    Fold,
    LineLayout,
    Resources,
    Tile,
    Wanted,
    boxes,
    imbalance,
    units,
    width_choices,
)
from dispatcher.errors import InputError
from dispatcher.ops.geometry import ConvGeometry

#: Taps along width whose products are written out one by one for the tiles at the ends of a row.
MOST_EDGE_TAPS = 9
LEAST_LANES = 4


@dataclass(frozen=True)
class ChannelLayout(LineLayout):
    """A layout whose tiles hold ``thread_c`` channels, a multiple of the vector, of ``thread_w`` positions of a row."""

    @cached_property
    def width_parts(self) -> dict[int, tuple[int, int]]:
        axis, (low, high) = self.geometry.width, self.width_range
        return {0: (0, (self.span - 1) * axis.step + 1 + high - low if self.tile.box_w else axis.input)}

    @cached_property
    def width_range(self) -> tuple[int, int]:
        return self.geometry.width.offset_range

    def width_offset(self, offset: int) -> int:
        return offset - (self.width_range[0] if self.tile.box_w else 0)

    @cached_property
    def halo(self) -> tuple[int, int]:
        if self.tile.box_w:
            return 0, 0
        axis, (low, high) = self.geometry.width, self.width_range
        return max(0, -low), max(0, (self.span - 1) * axis.step + high + 1 - axis.input)

    @cached_property
    def row_tiles(self) -> tuple[tuple[int, int], ...]:
        """First position and number of positions of the register tiles of a row."""
        width = self.tile.thread_w
        return tuple((start, min(width, self.span - start)) for start in range(0, self.span, width))

    @cached_property
    def row(self) -> int:
        return round_up(max(start + round_up(width, self.tile.vec) for start, width in self.row_tiles), self.tile.vec)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        step = self.geometry.width.step
        return tuple(
            Chunk(h * self.pitch + start * step, h * self.row + start, width, h, h)
            for h in range(self.line_rows)
            for start, width in self.row_tiles
        )

    @property
    def edges(self) -> bool:
        """Whether tiles at the ends of a row leave out what lies outside it."""
        width = self.geometry.width
        return not self.tile.box_w and width.stride == 1 and max(self.halo) > 0 and width.kernel <= MOST_EDGE_TAPS

    @property
    def inside(self) -> float:
        """Share of the products along a row that is computed."""
        width, extent = self.geometry.width, self.geometry.width.input
        if not self.edges:
            return 1.0
        taps = [tap.offset for tap in width.phases[0].taps]
        met = sum(0 <= m * width.step + offset < extent for m in range(self.span) for offset in taps)
        return met / (self.span * len(taps))

    @cached_property
    def line(self) -> int:
        return self.line_rows * self.row

    @cached_property
    def lanes_used(self) -> float:
        group_oc = self.geometry.out_channels // self.geometry.groups
        return group_oc / round_up(group_oc, self.tile.thread_c)

    def work(self, device: DeviceClass) -> float:
        """Cost of one box, in the units of :func:`~dispatcher.backends.opencl.tiles.work`."""
        g, vec = self.geometry, self.tile.vec
        vectors = self.tile.thread_c // vec
        group_ic, group_oc = g.in_channels // g.groups, g.out_channels // g.groups
        tiles = g.groups * -(-group_oc // self.tile.thread_c)
        phases = [[len(phase.taps) for phase in axis.phases] for axis in g.axes]
        taps = math.prod(sum(each) for each in phases)
        cost = self.inside * sum(device.channel_cost(vectors, chunk.width) for chunk in self.chunks)
        # A square of vec results is interleaved log2(vec) times, and stored.
        squares = vectors * sum(-(-chunk.width // vec) for chunk in self.chunks) * math.prod(map(len, phases))
        results = squares * vec * vec.bit_length()
        packing = len(self.depth.rows) * len(self.height.rows) * g.in_channels * round_up(self.pitch, vec) / vec
        return self.tile.box_d * tiles * (cost * group_ic * taps + results) + PACKING_COST * packing


def suits(geometry: ConvGeometry, vec: int) -> bool:
    """Whether a group's output channels fill half of a vector at least, of lanes enough to transpose."""
    return vec >= LEAST_LANES and 2 * (geometry.out_channels // geometry.groups) >= vec


def channel_tiles(geometry: ConvGeometry, span: int, vec: int, device: DeviceClass) -> list[tuple[int, int]]:
    """Register tiles to choose from: as many positions as registers allow, or fewer that share a row evenly."""
    group_oc = geometry.out_channels // geometry.groups
    found = []
    for vectors, most in device.channel_tiles:
        if vectors > 1 and (vectors - 1) * vec >= group_oc:
            break
        found.append((vectors * vec, -(-span // -(-span // most))))
    return found


def ranked_channel_tiles(
    geometry: ConvGeometry, fold: Fold | None, resources: Resources, wanted: Wanted
) -> list[tuple[float, Tile]]:
    """Legal tiles with their estimated work per image, least first; as :func:`tiles.ranked_tiles`.

    Raises:
        InputError: a vector, tile or box that is asked for does not suit this form.
    """
    vec, device = resources.vec, resources.device
    if vec < LEAST_LANES:
        raise InputError(f"line is 'channels'; expected rows or flat on a device with vectors of {vec}")
    if wanted.register_tile is not None and wanted.register_tile[0] % vec:
        raise InputError(
            f"tile is {wanted.register_tile[0]}x{wanted.register_tile[1]}; "
            f"expected a multiple of {vec} channels with line channels"
        )
    least = Tile(vec, vec, device.channel_tiles[0][1], *units(geometry, fold, (1, 1, 1)), False, channels=True)
    smallest = ChannelLayout(geometry, fold, least)
    widths = (0,) if wanted.whole_rows or fold else width_choices(geometry, smallest, resources)
    ranked: list[tuple[float, int, Tile]] = []
    for (place, box), width in product(enumerate(boxes(smallest, wanted.box)), widths):
        span = width or smallest.span
        tiles = channel_tiles(geometry, span, vec, device) if wanted.register_tile is None else [wanted.register_tile]
        for register_tile in tiles:
            tile = Tile(vec, *register_tile, *box, False, box_w=width, channels=True)
            layout = ChannelLayout(geometry, fold, tile)
            size = (layout.core_size + layout.pooled_size(geometry.out_channels)) * resources.itemsize
            if size <= resources.cache_bytes or place == 0:
                items = math.prod(layout.boxes)
                cost = items * layout.work(device) * imbalance(items * max(1, geometry.batch), resources.units)
                ranked.append((cost if size <= resources.cache_bytes else 1.5 * cost, size, tile))
    ranked.sort(key=lambda entry: entry[:2])
    return [(cost, tile) for cost, _, tile in ranked]


def channel_tables(layout: LineLayout) -> dict[str, object]:
    """What channels_tiles.cl is compiled with."""
    if not isinstance(layout, ChannelLayout):
        return {"USE_CHANNELS": False}
    return {
        "USE_CHANNELS": True,
        "USE_EDGES": layout.edges,
        "ALL_TAPS_W": layout.geometry.width.kernel,
        "ROW_TILES": len(layout.row_tiles),
        "FIRST_W": layout.row_tiles[0][1],
        "LAST_W": layout.row_tiles[-1][1],
        "LAST_START": layout.row_tiles[-1][0],
    }
