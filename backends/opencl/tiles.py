"""Tile parameters of the CPU convolution: their meaning, their constraints, and how they are chosen.

A *line* is what vectors run along: the positions of several rows one behind another. In *row* form each row
starts on a vector of its own; in *flat* form rows follow each other with only the halo's gap between them,
which wastes fewer lanes when a row is not a multiple of the vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from dispatcher.backends.opencl.classes import DeviceClass
from dispatcher.backends.opencl.target import round_up
from dispatcher.errors import InputError
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry
from dispatcher.ops.steps import Shape


@dataclass(frozen=True)
class Fold:
    """Pooling folded into the convolution: ``window`` per axis, ``max`` or ``avg``."""

    function: str
    window: tuple[int, int, int]


@dataclass(frozen=True)
class Tile:
    """What a tuner may choose.

    Attributes:
        vec: lanes of a vector, 4, 8 or 16.
        thread_c: output channels held in registers at once; vec lanes each.
        thread_w: vectors along the line held in registers at once. thread_c * thread_w accumulators and
            thread_w + 1 more values must fit the register file (32 vectors with AVX-512, 16 with AVX2).
        box_d: positions along depth that a work item owns.
        box_h: positions along height that a work item owns.
        flat: rows of a line follow each other without alignment.
        rows: rows along height that a Winograd transform F(rows, n) yields at once; boxes hold multiples of it.
        box_w: positions along width that a work item owns; 0 for all of them.
        planes: the same along depth, and ``columns`` along width. Where all three are 1, the core is the direct one.
        channels: output channels are in the vector lanes, thread_c of them, and thread_w counts positions along a row
            (direct core); see :mod:`dispatcher.backends.opencl.channels`.
    """

    vec: int
    thread_c: int
    thread_w: int
    box_d: int
    box_h: int
    flat: bool
    rows: int = 1
    box_w: int = 0
    planes: int = 1
    columns: int = 1
    channels: bool = False

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Neighbouring outputs along depth, height and width that a Winograd transform yields at once."""
        return self.planes, self.rows, self.columns

    @property
    def winograd(self) -> bool:
        """Whether the core is Winograd's."""
        return max(self.outputs) > 1


#: Inputs of a row that axes are merged to, at most: the kernel counts them in 32 bits.
MOST_POSITIONS = 1 << 30


def merged(geometry: ConvGeometry) -> ConvGeometry:
    """The same convolution with the last axes as one, where no window leaves a row, or a plane.

    Where the kernel's extent along width is 1, rows one behind another are one long row, and taps lie whole rows apart.
    """
    while geometry.depth.input * geometry.height.input > 1:
        height, width = geometry.height, geometry.width
        if (
            width.kernel > 1
            or {height.step, width.step} != {1}
            or max(height.input, height.dilation) * width.input > MOST_POSITIONS
        ):
            break
        if (height.ordinary_padding, width.ordinary_padding) != ((0, 0), (0, 0)):
            break
        extent, apart = height.input * width.input, height.dilation * width.input
        row = AxisGeometry.ordinary("width", extent, height.kernel, dilation=apart)
        geometry = replace(geometry, depth=AxisGeometry.ordinary("depth", 1, 1), height=geometry.depth, width=row)
    return geometry


def merged_shape(shape: Shape, whole: Shape, into: Shape) -> Shape | None:
    """The shape of an operand of a value ``whole`` whose last axes :func:`merged` has made one, so that it is ``into``.

    None where the operand varies along some of these axes only.
    """
    first = 3 if into[3:] == (whole[2], whole[3] * whole[4]) else 2
    ends = shape[first:]
    if whole == into:
        return shape
    if ends != whole[first:] and math.prod(ends) > 1:
        return None
    return (*shape[:2], 1, shape[2] if first == 3 else 1, math.prod(ends))


def odd_lines(elements: int) -> int:
    """So many elements in an odd number of cache lines, multiples of which spread over the sets of a cache."""
    return (round_up(elements, 16) // 16 | 1) * 16


@dataclass(frozen=True)
class AxisTables:
    """Which input rows a box needs along one axis, and which of them each tap reads.

    Attributes:
        rows: input index, relative to that of the box's first position, of each packed row.
        slots: for each phase and tap, the packed row that position 0 of the box reads; position b reads
            row ``slot + b``.
    """

    rows: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def polyphase(axis: AxisGeometry) -> dict[int, list[int]]:
    """The tap offsets as ``quotient * step + remainder``: the quotients by remainder, both in order.

    Inputs of one remainder lie side by side for a tap that moves on by ``step`` from one position to the next.
    """
    parts: dict[int, set[int]] = {}
    for offset in (tap.offset for phase in axis.phases for tap in phase.taps):
        parts.setdefault(offset % axis.step, set()).add(offset // axis.step)
    return {remainder: sorted(parts[remainder]) for remainder in sorted(parts)}


def axis_tables(axis: AxisGeometry, box: int) -> AxisTables:
    """The packed rows of a box of ``box`` positions, those of one remainder together.

    With one position only the rows that some tap reads are packed, so that a large dilation costs nothing;
    with more, rows of a remainder are contiguous.
    """
    rows: list[int] = []
    for remainder, quotients in polyphase(axis).items():
        packed = quotients if box == 1 else range(quotients[0], quotients[-1] + box)
        rows += [quotient * axis.step + remainder for quotient in packed]
    slots = tuple(tuple(rows.index(tap.offset) for tap in phase.taps) for phase in axis.phases)
    return AxisTables(tuple(rows), slots)


@dataclass(frozen=True)
class Chunk:
    """One register tile along the line: where it reads, where it writes, how many vectors, its first and last row."""

    x: int
    line: int
    width: int
    first_h: int
    last_h: int


@dataclass(frozen=True)
class LineLayout:
    """Everything that follows from a geometry, an optional fold and a tile. All extents are in elements."""

    geometry: ConvGeometry
    fold: Fold | None
    tile: Tile

    @cached_property
    def positions(self) -> tuple[int, int, int]:
        """Positions per axis that anything stored depends on (floor-mode pooling drops the rest)."""
        result = []
        for index, axis in enumerate(self.geometry.axes):
            needed = axis.output
            if self.fold is not None:
                needed -= needed % self.fold.window[index]
            result.append(-(-needed // axis.stride))
        return (result[0], result[1], result[2])

    @property
    def span(self) -> int:
        """Positions along width of a work item."""
        return self.tile.box_w or self.positions[2]

    @property
    def lines_h(self) -> int:
        """Lines that a box's rows along height are dealt out to: those of a Winograd tile go to one each."""
        return self.tile.rows

    @property
    def step_d(self) -> int:
        """Planes along depth that the core computes before the fused steps work on them: all, or a Winograd tile's."""
        return self.tile.planes if self.tile.winograd else self.tile.box_d

    @property
    def stride_w(self) -> int:
        """Sub-lines that rows of results are dealt out to: for each phase along width and column of a Winograd tile."""
        return self.geometry.width.stride * self.tile.columns

    @property
    def line_positions(self) -> int:
        """Positions of a sub-line."""
        return -(-self.positions[2] // self.tile.columns)

    @property
    def line_rows(self) -> int:
        """Rows that a line holds."""
        return self.tile.box_h // self.lines_h

    @cached_property
    def depth(self) -> AxisTables:
        return axis_tables(self.geometry.depth, self.tile.box_d)

    @cached_property
    def height(self) -> AxisTables:
        return axis_tables(self.geometry.height, self.tile.box_h)

    @cached_property
    def width_parts(self) -> dict[int, tuple[int, int]]:
        """By remainder along width: place of its packed rows among those of all remainders, and their extent.

        A box of all positions packs the whole row, a smaller one what its taps reach, zeros outside included.
        """
        axis, (low, high) = self.geometry.width, self.width_range
        return {
            remainder: (
                number,
                self.span + high - low if self.tile.box_w else max(0, -(-(axis.input - remainder) // axis.step)),
            )
            for number, remainder in enumerate(polyphase(axis))
        }

    @cached_property
    def width_range(self) -> tuple[int, int]:
        """Smallest and largest distance of a tap along a packed row."""
        quotients = [quotient for each in polyphase(self.geometry.width).values() for quotient in each]
        return min(quotients), max(quotients)

    def width_offset(self, offset: int) -> int:
        """Where, from a position's place in the first packed row, the input at that tap offset along width is."""
        quotient, remainder = divmod(offset, self.geometry.width.step)
        quotient -= self.width_range[0] if self.tile.box_w else 0
        return self.width_parts[remainder][0] * len(self.height.rows) * self.pitch + quotient

    @cached_property
    def halo(self) -> tuple[int, int]:
        """Zeros needed left and right of a packed row for the taps along width."""
        if self.tile.box_w:
            return 0, 0
        low, high = self.width_range
        shortest = min(extent for _, extent in self.width_parts.values())
        return max(0, -low), max(0, self.positions[2] + high - shortest)

    @cached_property
    def pitch(self) -> int:
        """Distance between packed input rows: the row and the gap that serves both neighbours as halo."""
        pitch = max(extent for _, extent in self.width_parts.values()) + max(self.halo)
        return pitch if self.tile.flat else round_up(pitch, self.tile.vec)

    @cached_property
    def channel(self) -> int:
        """Distance between packed channels: an odd number of cache lines, so they spread over the sets."""
        extent = len(self.width_parts) * len(self.height.rows) * self.pitch
        return extent if extent < 4 * self.tile.vec else odd_lines(extent)

    @cached_property
    def plane(self) -> int:
        return self.geometry.in_channels * self.channel

    @cached_property
    def row(self) -> int:
        """Distance between rows of a result line."""
        return self.pitch if self.tile.flat else round_up(self.span, self.tile.vec)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The register tiles of one line, in order."""
        vec, wide = self.tile.vec, self.tile.thread_w
        if self.tile.flat:
            spans = [(0, 0, 0, (self.line_rows - 1) * self.pitch + self.span)]
        else:
            spans = [(h, h * self.pitch, h * self.row, self.span) for h in range(self.line_rows)]
        chunks = []
        for h, x, line, extent in spans:
            vectors, done = -(-extent // vec), 0
            while done < vectors:
                width = wide if vectors - done >= wide else 1
                ends = (done * vec, min((done + width) * vec, extent) - 1)
                # A row of results may be longer than a packed one; what lies beyond reads nothing but zeros.
                rows = [min(end // self.pitch, self.line_rows - 1) if self.tile.flat else h for end in ends]
                chunks.append(Chunk(x + done * vec, line + done * vec, width, *rows))
                done += width
        return tuple(chunks)

    @cached_property
    def rows_done(self) -> tuple[int, ...]:
        """After each register tile, the rows of a line that no later one computes a part of."""
        return (*(chunk.first_h for chunk in self.chunks[1:]), self.line_rows)

    @cached_property
    def line(self) -> int:
        """Length of a result line, a multiple of the vector."""
        return max(chunk.line + chunk.width * self.tile.vec for chunk in self.chunks)

    @cached_property
    def lanes_used(self) -> float:
        """Share of computed lanes that are results."""
        computed = sum(chunk.width for chunk in self.chunks) * self.tile.vec
        return self.line_rows * self.span / computed

    @property
    def line_channels(self) -> int:
        """Channels of room in a line: all, and what a ragged last register tile writes beyond."""
        return self.geometry.out_channels + self.tile.thread_c - 1

    @property
    def weights_per_tap(self) -> int:
        """Packed weights of one tap: all channel pairs, each group's outputs in whole register tiles."""
        g = self.geometry
        return g.in_channels * round_up(g.out_channels // g.groups, self.tile.thread_c)

    @property
    def lead(self) -> int:
        """Zeros before the first packed row."""
        return round_up(max(1, self.halo[0]), 16)

    @cached_property
    def over_read(self) -> int:
        """Slack behind packed lines that vector loads may touch."""
        low, high = self.width_range
        vectors = self.tile.vec * self.tile.thread_w
        return self.line + self.pitch + sum(self.halo) + vectors + max(0, high) - min(0, low)

    @cached_property
    def packed_size(self) -> int:
        """The core's input lines of one box, the zeros before them, and what loads touch behind them."""
        return round_up(self.lead + len(self.depth.rows) * self.plane + self.over_read, 16)

    @cached_property
    def lines_size(self) -> int:
        """Result lines of one (rd, rh), and what loads touch behind them."""
        lines = self.step_d * self.lines_h * self.line_channels
        return round_up(lines * self.stride_w * self.line + self.tile.vec, 16)

    @property
    def core_size(self) -> int:
        """All scratch but the folded lines."""
        return self.packed_size + self.lines_size

    @property
    def fold_planes(self) -> int:
        """Width phases that stay apart in a folded line."""
        assert self.fold is not None
        return max(1, self.stride_w // self.fold.window[2])

    @property
    def fold_neighbours(self) -> int:
        """Neighbouring positions that a window folds together."""
        assert self.fold is not None
        return max(1, self.fold.window[2] // self.stride_w)

    @property
    def fold_row(self) -> int:
        return round_up(self.line_positions, self.tile.vec)

    @property
    def fold_box(self) -> tuple[int, int]:
        """Window rows of a box along depth and height."""
        assert self.fold is not None
        g, t = self.geometry, self.tile
        return t.box_d * g.depth.stride // self.fold.window[0], t.box_h * g.height.stride // self.fold.window[1]

    @property
    def fold_line(self) -> int:
        return self.fold_box[1] * self.fold_row

    def pooled_size(self, channels: int) -> int:
        """Scratch of the folded lines of one box."""
        if self.fold is None:
            return 0
        return round_up(self.fold_box[0] * channels * self.fold_planes * self.fold_line, 16)

    @property
    def boxes(self) -> tuple[int, int, int]:
        """Work items per image along depth, height and width."""
        own = self.tile.box_d, self.tile.box_h, self.span
        d, h, w = (-(-positions // box) for positions, box in zip(self.positions, own, strict=True))
        return d, h, w


def box_unit(axis: AxisGeometry, window: int) -> int:
    """Fewest positions along ``axis`` whose outputs are whole windows."""
    return math.lcm(axis.stride, window) // axis.stride


#: Output channels of a register tile, at most, whose rows go to memory while the next tile is computed. With more, too
#: much goes there at once.
STORED_CHANNELS = 4
#: Estimates that differ by less do not say which tile is faster.
NEARLY_EQUAL = 1.02
#: How much longer packing takes where neighbours in a packed row are two apart in memory, or more.
STRIDED_COST, GATHERED_COST = 4.0, 16.0
#: Cost of one vector operation of packing, in multiply-adds of the core.
PACKING_COST = 2.0


def work(layout: LineLayout, device: DeviceClass) -> float:
    """Cost of one box of the direct core without the fused steps: products, and what packing adds.

    An estimate in units of one vector multiply-add, for comparing tiles and algorithms of one geometry.
    """
    g, tile = layout.geometry, layout.tile
    group_ic = g.in_channels // g.groups
    channels = g.groups * round_up(g.out_channels // g.groups, tile.thread_c)
    # One tap and input channel of a line: all its register tiles, for all output channels.
    line = sum(device.tile_cost(tile.thread_c, chunk.width) for chunk in layout.chunks) * channels / tile.thread_c
    taps_w = sum(len(phase.taps) for phase in g.width.phases)
    taps = taps_w * sum(len(d.taps) * len(h.taps) for d in g.depth.phases for h in g.height.phases)
    rows = len(layout.depth.rows) * len(layout.height.rows) * len(layout.width_parts)
    row_vectors = round_up(layout.pitch, tile.vec) / tile.vec
    apart = {1: 1.0, 2: STRIDED_COST}.get(g.width.step, GATHERED_COST)
    packing = rows * g.in_channels * row_vectors * apart
    return tile.box_d * line * group_ic * taps + PACKING_COST * packing


@dataclass(frozen=True)
class Wanted:
    """Tile parameters that are fixed from outside; None leaves one open."""

    register_tile: tuple[int, int] | None = None
    box: tuple[int, int] | None = None
    flat: bool | None = None
    outputs: tuple[int | None, int | None, int | None] = (None, None, None)
    whole_rows: bool = False


def imbalance(items: int, units: int) -> float:
    """How much longer ``items`` equal work items take on ``units`` compute units than the same work shared evenly.

    The last round leaves units idle: 40 items on 64 units take as long as 64, 65 items as long as 128.
    """
    return -(-items // units) * units / items


@dataclass(frozen=True)
class Resources:
    """What a device offers to a launch.

    Attributes:
        device: its class.
        vec: lanes of a vector of the type that is computed in.
        itemsize: bytes of an element of that type.
        cache_bytes: of a core, for the scratch of a worker.
        units: compute units.
    """

    device: DeviceClass
    vec: int
    itemsize: int
    cache_bytes: int
    units: int

    def hold(self, geometry: ConvGeometry) -> bool:
        """Whether the cores' caches hold a convolution's results."""
        return math.prod(geometry.output_shape) * self.itemsize <= self.units * self.cache_bytes


def units(geometry: ConvGeometry, fold: Fold | None, outputs: tuple[int, int, int]) -> tuple[int, int]:
    """What a box's positions along depth and height are multiples of: whole windows and whole Winograd tiles."""
    window = fold.window if fold is not None else (1, 1, 1)
    return (
        math.lcm(outputs[0], box_unit(geometry.depth, window[0])),
        math.lcm(outputs[1], box_unit(geometry.height, window[1])),
    )


def boxes(
    smallest: LineLayout, wanted: tuple[int, int] | None, planes: tuple[int, ...] = (1, 2, 4)
) -> list[tuple[int, int]]:
    """Boxes to choose from, the smallest first; ``wanted`` alone if given.

    Args:
        smallest: a layout with the smallest legal box.
        wanted: the box that is asked for.
        planes: multiples of the smallest box along depth.

    Raises:
        InputError: a box that is asked for does not hold whole windows or whole Winograd tiles.
    """
    unit_d, unit_h = smallest.tile.box_d, smallest.tile.box_h
    if wanted is not None:
        if wanted[0] % unit_d or wanted[1] % unit_h:
            raise InputError(
                f"box is {wanted[0]}x{wanted[1]}; expected multiples of {unit_d}x{unit_h} for this operator"
            )
        return [wanted]
    depth, height, _ = smallest.positions
    # A box is of no use where the next smaller one holds all positions.
    return [
        (unit_d * d, unit_h * h)
        for d, h in product(planes, range(1, 17))
        if (d == 1 or unit_d * d // 2 < depth) and (h == 1 or unit_h * (h - 1) < height)
    ]


#: What a candidate is ranked by where estimates are nearly equal, before numbers of its own.
Candidate = tuple[float, tuple[int, ...], Tile]


def best_first(candidates: list[Candidate]) -> list[tuple[float, Tile]]:
    """Candidates by estimated work; those within the error of the least by their preference."""
    near = NEARLY_EQUAL * min(cost for cost, _, _ in candidates)
    ordered = sorted(candidates, key=lambda entry: (0.0, *entry[1]) if entry[0] <= near else (entry[0], *entry[1]))
    return [(cost, tile) for cost, _, tile in ordered]


#: Positions along width that a box may have where whole rows are too long for the cache, or too few to share.
WIDTHS = (256, 512, 1024, 2048)


def width_choices(geometry: ConvGeometry, smallest: LineLayout, resources: Resources) -> tuple[int, ...]:
    """What :attr:`Tile.box_w` is chosen from, by the layout of the smallest box of whole rows."""
    short = smallest.core_size * resources.itemsize <= resources.cache_bytes
    many = math.prod(smallest.boxes) * max(1, geometry.batch) >= 4 * resources.units
    parts = tuple(width for width in WIDTHS if 2 * width <= smallest.positions[2])
    if short:
        return (0,) if many else (0, *parts)
    return parts or (0,)


def ranked_tiles(
    geometry: ConvGeometry, fold: Fold | None, resources: Resources, wanted: Wanted = Wanted()
) -> list[tuple[float, Tile]]:
    """Legal tiles of the direct core with their estimated work per image, least first.

    Only boxes whose scratch fits the cache; the smallest box in any case, and a box that is asked for. Large
    boxes pack less input twice, but a small batch may then leave some of the compute units idle; the
    time that they wait counts as work. Boxes of parts of rows are left out with a fold.

    Raises:
        InputError: a box that is asked for does not hold whole windows.
    """
    device, vec = resources.device, resources.vec
    forms = (False, True) if wanted.flat is None else (wanted.flat,)
    register_tiles = device.register_tiles if wanted.register_tile is None else (wanted.register_tile,)
    smallest = LineLayout(geometry, fold, Tile(vec, *register_tiles[0], *units(geometry, fold, (1, 1, 1)), False))
    widths: tuple[int, ...] = (0,)
    if not (wanted.whole_rows or fold):
        widths = width_choices(geometry, smallest, resources)
    candidates: list[Candidate] = []
    for (place, box), width, flat in product(enumerate(boxes(smallest, wanted.box)), widths, forms):
        for number, register_tile in enumerate(register_tiles):
            tile = Tile(vec, *register_tile, *box, flat, box_w=width)
            layout = LineLayout(geometry, fold, tile)
            size = (layout.core_size + layout.pooled_size(geometry.out_channels)) * resources.itemsize
            fits = size <= resources.cache_bytes
            if fits or place == 0:
                items = math.prod(layout.boxes)
                cost = items * work(layout, device) * imbalance(items * max(1, geometry.batch), resources.units)
                # Within the error of the estimates tiles win with which memory keeps up where it has to, then aligned
                # rows, the class's order of register tiles, and the box that leaves most of the cache to the rest.
                late = fold is None and tile.thread_c > STORED_CHANNELS and not resources.hold(geometry)
                candidates.append((cost if fits else 1.5 * cost, (late, flat, number, size), tile))
    return best_first(candidates)
