"""The Winograd core on CPUs: its layout, and the choice of its tiles.

A work item's box is ``box_d`` x ``box_h`` positions along depth and height and all of width. For a tile's planes along
depth at a time, the core transforms input along all three axes, multiplies component by component, and transforms back
(kernels/core_winograd.cl). Lanes are the tiles of some tile rows, ``pitch`` apart.
"""

from __future__ import annotations

import math
from functools import cache, cached_property
from itertools import product
from operator import mod

from dispatcher.backends.opencl.classes import DeviceClass
from dispatcher.backends.opencl.target import round_up
from dispatcher.backends.opencl.tiles import (
    Candidate,
    Fold,
    LineLayout,
    Resources,
    Tile,
    Wanted,
    best_first,
    boxes,
    imbalance,
    odd_lines,
    units,
)
from dispatcher.backends.opencl.transforms import MOST_OUTPUTS, axis_growth, axis_reason, most_outputs, terms
from dispatcher.errors import InputError
from dispatcher.ops.geometry import AxisGeometry, AxisPhase, ConvGeometry

#: With fewer input channels a group, by the most taps of a phase along an axis, Winograd is not chosen: an output with
#: few products shows its neighbours' rounding. F(2, 3) rounds least.
LEAST_CHANNELS = {2: 32, 3: 8, 4: 16, 5: 16}
#: With fewer of them there is no F(3, n), also where it is asked for, and with fewer output channels Winograd is not
#: chosen: they are too few to tell its tiles apart.
WINOGRAD_CHANNELS = 16
#: :func:`~dispatcher.backends.opencl.transforms.growth` along all axes, beside the root of the number of taps: more
#: exceeds what ``dispatcher verify`` allows where most inputs are small beside few that are large.
MOST_GROWTH = 3.0
#: Taps and inputs along an axis that is not transformed: what the macros of height and width hold in vectors.
MOST_PLAIN_TAPS = 5
MOST_REACH = 8
#: Output channels whose components are made before they are transformed back.
BLOCK = 32
#: Between components of a panel, so that they start on different sets of the caches: elements.
SKEW = 80
#: Cost of one vector operation of packing and transforms, in multiply-adds of the core (measured).
TRANSFORM_COST = 1.5
#: How much less than in the direct core the loop of a register tile costs, which reads two streams.
LOOP_SAVED = 0.5
#: Cost of a row on its way into sub-lines besides that of its vectors.
ROW_COST = 15.0
#: How many times as much one output of a tile may read as another one; beyond, winograd_range.cl computes it directly.
MOST_SPREAD = 4
#: Cost of a vector of output channels of such a tile, for each tap and input channel.
EDGE_COST = 1.0
#: How much longer a box takes that fills more than a share of the cache; input, weights and results pass it as well.
SPILL_COST, SPILL_SHARE = 1.05, 0.75
#: Cost of a vector of packed input for each time that scratch, but for the lines, fills the cache, from so many on.
FAR_COST, NEAR = 25.0, 1.8
#: The same where all but the packed input fits the cache no more, for each time that the cache is filled; and the most.
OVERFLOW_COST, MOST_OVERFLOW = 0.05, 1.5
#: How many sub-lines a row of results is interleaved from by whole vectors.
INTERLEAVED = (1, 2, 3, 4, 6)
#: Cost of storing a vector of results element by element, in multiply-adds.
SCATTERED_STORE = 40.0


def no_transform(geometry: ConvGeometry) -> str | None:
    """None when the Winograd core can run the geometry, else why not."""
    reasons = [axis_reason(axis) for axis in geometry.axes]
    if not any(reason is None and axis.most_taps > 1 for reason, axis in zip(reasons, geometry.axes, strict=True)):
        return next((reason for reason in reasons if reason is not None), "no phase has more than one tap")
    for axis, most in zip(geometry.axes, (MOST_PLAIN_TAPS, MOST_PLAIN_TAPS, MOST_REACH), strict=True):
        if axis is not geometry.width and any(not phase.taps for phase in axis.phases):
            return f"{axis.name}: a phase has 0 taps"
        low, high = axis.offset_range
        if axis.most_taps > most or high - low >= MOST_REACH:
            return f"{axis.name}: the taps of a phase are too many or too far apart"
    return None


def counted(geometry: ConvGeometry) -> float:
    """The input channels a group of :data:`LEAST_CHANNELS`.

    Phases of one channel's input, which may be large together, count half; where some have fewer taps than transforms
    mix, an output reads less, beside more that rounds.
    """
    channels, phases = geometry.in_channels / geometry.groups, 1
    for axis in geometry.axes:
        if axis.strided is not None:
            phases *= axis.strided.input_phases
            channels *= (axis.strided.kernel / (axis.strided.input_phases * axis.kernel)) ** 2
    return channels / min(2, phases)


def least_channels(geometry: ConvGeometry) -> int:
    """The fewest input channels a group with which Winograd may be chosen, where it can run the unstrided geometry."""
    axes = geometry.unstrided.axes
    least = max(LEAST_CHANNELS[axis.most_taps] for axis in axes if axis.most_taps in LEAST_CHANNELS)
    return math.ceil(least * geometry.in_channels / geometry.groups / counted(geometry.unstrided))


def choices(geometry: ConvGeometry, fold: Fold | None) -> list[tuple[int, int, int]]:
    """Outputs along depth, height and width that transforms may yield at once, the fewest first."""
    few = counted(geometry) < WINOGRAD_CHANNELS
    ranges = [
        range(1, min(2 if few else MOST_OUTPUTS, most_outputs(axis.most_taps)) + 1)
        if axis_reason(axis) is None and axis.most_taps > 1
        else (1,)
        for axis in geometry.axes
    ]

    def foldable(columns: int) -> bool:
        lanes = geometry.width.stride * columns
        return fold is None or lanes % fold.window[2] == 0 or fold.window[2] % lanes == 0

    several = sum(axis.most_taps > 1 for axis in geometry.axes)
    most_growth = MOST_GROWTH * math.sqrt(math.prod(axis.most_taps for axis in geometry.axes))

    def rounds_little(*outputs: int) -> bool:
        # F(3, 3) along all axes that have taps rounds more than twice as much as PyTorch's sums do.
        spared = sum(m == 3 <= axis.most_taps for m, axis in zip(outputs, geometry.axes, strict=True)) < several
        return spared and math.prod(map(axis_growth, geometry.axes, outputs)) <= most_growth

    found = [(d, h, w) for d, h, w in product(*ranges) if max(d, h, w) > 1 and foldable(w) and rounds_little(d, h, w)]
    return sorted(found, key=lambda outputs: (math.prod(outputs), outputs))


def reads(phase: AxisPhase, outputs: int) -> list[int]:
    """Input offsets of the components of a phase of which ``outputs`` neighbouring results are made."""
    if outputs == 1:
        return [tap.offset for tap in phase.taps]
    return [phase.taps[0].offset + i for i in range(len(phase.taps) + outputs - 1)]


class WinogradLayout(LineLayout):
    """What follows from a geometry, an optional fold and a Winograd tile. All extents are in elements."""

    @cached_property
    def low_h(self) -> int:
        """Input row, relative to the box's first position, of the first packed row."""
        return self.geometry.height.offset_range[0]

    @cached_property
    def _tile_reach(self) -> int:
        """Input rows of a tile of all phases, from the first one's offset on."""
        return max(reads(phase, self.tile.rows)[-1] for phase in self.geometry.height.phases) - self.low_h + 1

    @cached_property
    def rows(self) -> int:
        """Input rows of a box."""
        return self._tile_reach + self.tile.rows * (self.line_rows - 1)

    @cached_property
    def reach_w(self) -> int:
        """Inputs along width of a tile of all phases, from the first one's offset on."""
        width, m = self.geometry.width, self.tile.columns
        low = width.offset_range[0]
        return max(reads(phase, m)[-1] - low + 1 for phase in width.phases if phase.taps)

    @cached_property
    def parts_w(self) -> tuple[int, ...]:
        """Components along width of each phase."""
        return tuple(len(reads(phase, self.tile.columns)) if phase.taps else 0 for phase in self.geometry.width.phases)

    @cached_property
    def sub_lines(self) -> int:
        """Sub-lines that a row of input is dealt out to.

        One for each remainder, which tiles then read some lanes on as well; in flat form one for each input along width
        of a tile, so that tile rows need no gap between them.
        """
        return round_up(self.reach_w, self.tile.columns) if self.tile.flat else self.tile.columns

    @cached_property
    def pitch(self) -> int:
        """Distance between tile rows: the tiles of a row, and what the last ones read behind it."""
        return self.line_positions + (0 if self.tile.flat else (self.reach_w - 1) // self.tile.columns)

    @property
    def row(self) -> int:
        return self.pitch

    def _vectors(self, rows: int) -> int:
        """Vectors that hold so many tile rows."""
        return -(-((rows - 1) * self.pitch + self.line_positions) // self.tile.vec)

    @cached_property
    def vectors(self) -> int:
        """Vectors that hold all tiles of a box."""
        return self._vectors(self.line_rows)

    @property
    def box_vectors(self) -> list[tuple[int, int]]:
        """How many boxes along height take how many vectors: the last one may have fewer tile rows."""
        full, rest = divmod(-(-self.positions[1] // self.tile.rows), self.line_rows)
        return [(full, self.vectors)] * (full > 0) + [(1, self._vectors(rest))] * (rest > 0)

    def chunk_widths(self, vectors: int) -> list[int]:
        """Vectors of each chunk: ``thread_w``, and what is left."""
        wide, rest = divmod(vectors, self.tile.thread_w)
        return [self.tile.thread_w] * wide + [rest] * (rest > 0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Vectors of the chunks that occur."""
        return tuple(sorted({width for _, vectors in self.box_vectors for width in self.chunk_widths(vectors)}))

    @cached_property
    def line(self) -> int:
        needed = (self.line_rows - 1) * self.pitch + round_up(self.line_positions, self.tile.vec)
        return round_up(max(self.vectors * self.tile.vec, needed), self.tile.vec)

    @property
    def lanes_used(self) -> float:
        return self.line_rows * self.positions[2] / (self.vectors * self.tile.vec * self.tile.columns)

    @property
    def line_channels(self) -> int:
        """One more than there are, so that lines of neighbouring rows start on different sets of the caches."""
        return self.geometry.out_channels + 1

    @cached_property
    def edge(self) -> int:
        """A packed sub-line of one row of each tile row, and what loads and stores touch behind it."""
        tile_rows, rows = (count // self.tile.rows for count in (self._tile_reach - 1, self.rows - 1))
        reach = self.vectors * self.tile.vec + tile_rows * self.pitch + (self.reach_w - 1) // self.tile.columns
        return odd_lines(max(reach, rows * self.pitch + round_up(self.pitch, self.tile.vec)))

    @cached_property
    def channel(self) -> int:
        return odd_lines(self.tile.rows * self.sub_lines * self.edge)

    def source_w(self, place: int) -> int:
        """Input along width, in memory, of the first phase of an input of the geometry's."""
        source = self.geometry.width.strided
        return place if source is None else source.step * place - source.phase_lead

    @cached_property
    def row_lead(self) -> int:
        """Zeros before a row of input."""
        width = self.geometry.width
        return max(0, -self.source_w(width.offset_range[0]))

    @cached_property
    def row_size(self) -> int:
        """A row of input between zeros, before it is dealt out."""
        width, m = self.geometry.width, self.tile.columns
        dealt = max(0, width.offset_range[0]) + m * round_up(self.pitch, self.tile.vec) + self.sub_lines
        source = width.strided or width
        return round_up(self.row_lead + max(source.input, source.step * dealt) + self.tile.vec, 16)

    @property
    def most_parts(self) -> int:
        """Components along height and width of the phase that has most."""
        height = max(len(reads(phase, self.tile.rows)) for phase in self.geometry.height.phases)
        return height * sum(self.parts_w)

    @property
    def block(self) -> int:
        """Output channels of a block, whole register tiles."""
        c = self.tile.thread_c
        return min(round_up(self.geometry.out_channels // self.geometry.groups, c), max(c, BLOCK // c * c))

    @property
    def chunk_lanes(self) -> int:
        return min(self.tile.thread_w, self.vectors) * self.tile.vec

    @property
    def panel(self) -> int:
        """Distance between components of transformed input of a chunk."""
        return self.geometry.in_channels * self.chunk_lanes + SKEW

    @property
    def products(self) -> int:
        """Distance between components of products of a chunk."""
        return self.block * self.chunk_lanes + SKEW

    @cached_property
    def parts_sizes(self) -> tuple[int, ...]:
        """Sizes of what scratch holds before the lines: packed input, a row, panels, products, magnitudes, marks."""
        sums = self.geometry.groups * self.step_d * self.lines_h * self.stride_w * self.line
        height = max(len(reads(phase, self.tile.rows)) for phase in self.geometry.height.phases)
        direct = height * self.reach_w * self.geometry.in_channels
        depth = max(len(reads(phase, self.tile.planes)) for phase in self.geometry.depth.phases)
        sizes = (
            depth * self.geometry.in_channels * self.channel,
            depth * self.row_size,
            max(self.most_parts * self.panel, direct),
            self.most_parts * self.products,
            sums,
            self.vectors * self.tile.vec,
        )
        return tuple(round_up(size, 16) for size in sizes)

    @property
    def core_size(self) -> int:
        return sum(self.parts_sizes) + self.lines_size


def work(layout: WinogradLayout, device: DeviceClass, filled: float = 0.0) -> float:
    """Cost of one box without the fused steps, in the units of :func:`dispatcher.backends.opencl.tiles.work`.

    The average over all boxes along height: tile rows beyond the last position are left out.

    Args:
        layout: of the box.
        device: that it runs on.
        filled: how many times scratch but for the lines fills the cache.
    """
    g, tile = layout.geometry, layout.tile
    group_ic = g.in_channels // g.groups
    channels = g.groups * round_up(g.out_channels // g.groups, tile.thread_c)
    boxes_h = layout.boxes[1]
    vectors = sum(count * number for count, number in layout.box_vectors) / boxes_h
    steps = sum(
        count * (device.tile_cost(tile.thread_c, width, "winograd") - LOOP_SAVED)
        for count, number in layout.box_vectors
        for width in layout.chunk_widths(number)
    )
    line = steps / boxes_h * channels / tile.thread_c
    parts_w, reach, stride = sum(layout.parts_w), layout.reach_w, layout.stride_w
    along_w = [terms(tile.columns, len(phase.taps)) for phase in g.width.phases if phase.taps]
    inputs_w, outputs_w = sum(each[0] for each in along_w), sum(each[1] for each in along_w)
    row_vectors = layout.pitch * tile.columns / tile.vec
    products = transforms = 0.0
    for d in g.depth.phases:
        inputs_d, outputs_d = terms(tile.planes, len(d.taps))
        parts_d = len(reads(d, tile.planes))
        # Loads, sums, and what memory takes; a row of each sum is stored, loaded and dealt out, again with a flat form.
        dealt = 4 + (3 if tile.columns == 3 else 1) * (layout.sub_lines // tile.columns - 1)
        packing = row_vectors * (2 * inputs_d + dealt * parts_d) + ROW_COST * parts_d
        transforms += g.in_channels * layout.rows * packing
        for h in g.height.phases:
            inputs_h, outputs_h = terms(tile.rows, len(h.taps))
            parts_h = len(reads(h, tile.rows))
            products += parts_d * parts_h * parts_w * line * group_ic
            # Loads, sums along height and width, and stores of a vector of each component.
            inputs = (parts_h + inputs_h) * reach + (inputs_w + 2 * parts_w) * parts_h
            outputs = parts_h * (parts_w + outputs_w) + outputs_h * stride
            added = 3 * outputs_d * tile.rows * stride
            transforms += (g.in_channels * parts_d * inputs + channels * (parts_d * outputs + added)) * vectors
    # What follows is the same for all positions: the average over boxes.
    tile_rows = -(-layout.positions[1] // tile.rows) / boxes_h
    store = 0.0
    planes = stride if layout.fold is None else layout.fold_planes
    if planes not in INTERLEAVED:
        stored = layout.positions[2] * g.width.stride * tile.rows * tile.planes * tile_rows / tile.vec
        store = SCATTERED_STORE * g.out_channels * stored * g.depth.stride * g.height.stride
        store *= 1 if layout.fold is None else 1 / math.prod(layout.fold.window)
    edge_taps = _edge_taps(g, layout.positions, tile.outputs)
    tiles = tile_rows * layout.line_positions * math.prod(tile.outputs)
    edges = EDGE_COST * edge_taps * tiles * group_ic * g.out_channels / edge_lanes(tile.thread_c)
    far = FAR_COST * max(0.0, filled - NEAR) * g.depth.stride * layout.parts_sizes[0] / tile.vec
    return tile.box_d / tile.planes * (products + TRANSFORM_COST * transforms + far + store + edges)


def edge_lanes(channels: int) -> int:
    """Lanes of the vectors that so many output channels of such a tile are cut into: the widest that they fill."""
    return min(16, channels & -channels)


@cache
def _edge_taps(geometry: ConvGeometry, positions: tuple[int, int, int], outputs: tuple[int, int, int]) -> float:
    """Taps of all phases, each times the share of its tiles that are computed directly for lying at an edge."""
    total = 0.0
    for phases in product(*(axis.phases for axis in geometry.axes)):
        axes = zip(geometry.axes, phases, outputs, positions, strict=True)
        for found in product(*(_spreads(axis, phase, m, n).items() for axis, phase, m, n in axes)):
            if math.prod(ratio for ratio, _ in found) > MOST_SPREAD:
                total += math.prod(share for _, share in found) * math.prod(len(phase.taps) for phase in phases)
    return total


def _spreads(axis: AxisGeometry, phase: AxisPhase, outputs: int, positions: int) -> dict[int, float]:
    """How unevenly the outputs of a tile read along an axis, as in winograd_range.cl, and the share of such tiles."""
    taps, tiles = len(phase.taps), -(-positions // outputs)
    if taps < 2 or outputs == 1:
        return {1: 1.0}
    found: dict[int, float] = {}
    for tile in range(tiles):
        first = tile * outputs + phase.taps[0].offset
        count = min(outputs, positions - tile * outputs)
        inside = [min(first + j + taps, axis.input) - max(first + j, 0) for j in range(count)]
        ratio = max(1, *inside) // min(taps, *inside) if min(inside) > 0 else taps
        found[ratio] = found.get(ratio, 0.0) + 1 / tiles
    return found


def ranked_tiles(
    geometry: ConvGeometry, fold: Fold | None, resources: Resources, wanted: Wanted
) -> list[tuple[float, Tile]]:
    """Legal tiles with their estimated work per image, least first, as in :mod:`dispatcher.backends.opencl.tiles`.

    Raises:
        InputError: a box that is asked for does not hold whole windows and Winograd tiles, or what transforms are to
            yield cannot be had.
    """
    device, vec = resources.device, resources.vec
    forms = (False, True) if wanted.flat is None else (wanted.flat,)
    register_tiles = device.winograd_tiles if wanted.register_tile is None else (wanted.register_tile,)
    legal = choices(geometry, fold)
    outputs_choices = [
        outputs
        for outputs in legal
        if all(want is None or m == want for m, want in zip(outputs, wanted.outputs, strict=True))
    ]
    if not outputs_choices:
        text = ", ".join("x".join(map(str, outputs)) for outputs in legal)
        raise InputError(f"no transform yields the planes, rows and columns that are asked for; there are {text}")
    if wanted.box is not None:  # any transform whose tiles fill it; else boxes() refuses it
        fill = [o for o in outputs_choices if not any(map(mod, wanted.box, units(geometry, fold, o)))]
        outputs_choices = fill or outputs_choices
    candidates: list[Candidate] = []
    for order, outputs in enumerate(outputs_choices):
        planes, rows, columns = outputs
        box = units(geometry, fold, outputs)
        smallest = WinogradLayout(
            geometry, fold, Tile(vec, *register_tiles[0], *box, True, rows, planes=planes, columns=columns)
        )
        for (place, (box_d, box_h)), flat in product(enumerate(boxes(smallest, wanted.box, (1,))), forms):
            if flat and box_h == rows and wanted.flat is None:
                continue  # there is no gap in a single tile row
            for number, register_tile in enumerate(register_tiles):
                tile = Tile(vec, *register_tile, box_d, box_h, flat, rows, planes=planes, columns=columns)
                layout = WinogradLayout(geometry, fold, tile)
                size = (layout.core_size + layout.pooled_size(geometry.out_channels)) * resources.itemsize
                fits = size - layout.parts_sizes[0] * resources.itemsize <= resources.cache_bytes
                spills = SPILL_COST if size > SPILL_SHARE * resources.cache_bytes else 1.0
                if fits or place == 0:
                    items = math.prod(layout.boxes)
                    busy = imbalance(items * max(1, geometry.batch), resources.units)
                    filled = sum(layout.parts_sizes) * resources.itemsize / resources.cache_bytes
                    cost = spills * items * work(layout, device, filled) * busy
                    if not fits:
                        cost *= min(MOST_OVERFLOW, 1.0 + OVERFLOW_COST * size / resources.cache_bytes)
                    # Within the error of the estimates transforms of fewer outputs win, which round less; then those
                    # whose rows are not dealt out, nor interleaved, by three.
                    candidates.append((cost, (math.prod(outputs), columns == 3, order, number, size), tile))
    return best_first(candidates)
