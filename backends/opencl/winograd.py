"""The Winograd core on CPUs: its layout, the choice of its tiles, its weights and its tables.

A work item's box is ``box_d`` x ``box_h`` positions along depth and height and all of width. For a tile's planes along
depth at a time, the core transforms input along all three axes, multiplies component by component, and transforms back
(kernels/core_winograd.cl). Lanes are the tiles of some tile rows, ``pitch`` apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from dispatcher.backends.opencl.classes import DeviceClass
from dispatcher.backends.opencl.render import section, table
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
from dispatcher.backends.opencl.transforms import MOST_OUTPUTS, Row, axis_reason, transform
from dispatcher.errors import InputError
from dispatcher.ops.geometry import AxisGeometry, AxisPhase, ConvGeometry

#: With fewer input channels a group Winograd is not chosen, nor F(3, n) where it is asked for: the transforms cost what
#: the products save, and an output with few products shows its neighbours' rounding.
WINOGRAD_CHANNELS = 16
#: Taps and inputs along an axis that is not transformed: what the macros of height and width hold in vectors.
MOST_PLAIN_TAPS = 5
MOST_REACH = 8
#: Output channels whose components are made before they are transformed back.
BLOCK = 32
#: Input channels that are added up in one sum.
SUM = 32
#: Between components of a panel, so that they start on different sets of the caches: elements.
SKEW = 80
#: Cost of one vector operation of packing and transforms, in multiply-adds of the core (measured).
TRANSFORM_COST = 1.5
#: Cost of a row on its way into sub-lines besides that of its vectors.
ROW_COST = 15.0
#: How many times as much one output of a tile may read as another one; beyond, winograd_range.cl computes it directly.
MOST_SPREAD = 4
#: Cost of a vector of output channels of such a tile, for each tap and input channel.
EDGE_COST = 1.0
#: How many sub-lines a row of results is interleaved from by whole vectors.
INTERLEAVED = (1, 2, 4)
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


def choices(geometry: ConvGeometry, fold: Fold | None) -> list[tuple[int, int, int]]:
    """Outputs along depth, height and width that transforms may yield at once, the fewest first."""
    few = geometry.in_channels // geometry.groups < WINOGRAD_CHANNELS
    each = [
        range(1, (2 if few else MOST_OUTPUTS) + 1) if axis_reason(axis) is None and axis.most_taps > 1 else (1,)
        for axis in geometry.axes
    ]

    def foldable(columns: int) -> bool:
        lanes = geometry.width.stride * columns
        return fold is None or lanes % fold.window[2] == 0 or fold.window[2] % lanes == 0

    found = [(d, h, w) for d, h, w in product(*each) if max(d, h, w) > 1 and foldable(w)]
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
    def rows(self) -> int:
        """Input rows of a box."""
        height, m = self.geometry.height, self.tile.rows
        last = max(reads(phase, m)[-1] for phase in height.phases)
        return last - self.low_h + 1 + m * (self.line_rows - 1)

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
    def pitch(self) -> int:
        """Distance between tile rows: the tiles of a row, and what the last ones read behind it."""
        pitch = self.line_positions + (self.reach_w - 1) // self.tile.columns
        return pitch if self.tile.flat else round_up(pitch, self.tile.vec)

    @property
    def row(self) -> int:
        return self.pitch

    @cached_property
    def vectors(self) -> int:
        """Vectors that hold all tiles of a box."""
        return -(-((self.line_rows - 1) * self.pitch + self.line_positions) // self.tile.vec)

    @property
    def chunk_count(self) -> int:
        """Chunks of ``thread_w`` vectors, the last of which may be narrower."""
        return -(-self.vectors // self.tile.thread_w)

    @property
    def widths(self) -> tuple[int, ...]:
        """Vectors of the chunks that occur."""
        wide, rest = divmod(self.vectors, self.tile.thread_w)
        return tuple(width for width in ((self.tile.thread_w,) if wide else ()) + ((rest,) if rest else ()))

    @cached_property
    def line(self) -> int:
        needed = (self.line_rows - 1) * self.pitch + round_up(self.line_positions, self.tile.vec)
        return odd_lines(max(self.vectors * self.tile.vec, needed))

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
        behind = (self.rows - 1) // self.tile.rows * self.pitch
        reach = self.vectors * self.tile.vec + behind + (self.reach_w - 1) // self.tile.columns
        return odd_lines(max(reach, behind + round_up(self.pitch, self.tile.vec)))

    @cached_property
    def channel(self) -> int:
        return odd_lines(self.tile.rows * self.tile.columns * self.edge)

    @cached_property
    def row_lead(self) -> int:
        """Zeros before a row of input."""
        return max(0, -self.geometry.width.offset_range[0])

    @cached_property
    def row_size(self) -> int:
        """A row of input between zeros, before it is dealt out."""
        width, m = self.geometry.width, self.tile.columns
        dealt = max(0, width.offset_range[0]) + m * round_up(self.pitch, self.tile.vec)
        return round_up(self.row_lead + max(width.input, dealt) + self.tile.vec, 16)

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
        sizes = (
            self.geometry.in_channels * self.channel,
            self.row_size,
            max(self.most_parts * self.panel, direct),
            self.most_parts * self.products,
            sums,
            self.vectors * self.tile.vec,
        )
        return tuple(round_up(size, 16) for size in sizes)

    @property
    def core_size(self) -> int:
        return sum(self.parts_sizes) + self.lines_size

    @property
    def hot_size(self) -> int:
        """What of that is read again soon after it was written: all but the packed input, which is read once."""
        return sum(self.parts_sizes[1:]) + self.lines_size


def work(layout: WinogradLayout, device: DeviceClass) -> float:
    """Cost of one box without the fused steps, in the units of :func:`dispatcher.backends.opencl.tiles.work`.

    The average over all boxes along height: tile rows beyond the last position are left out.
    """
    g, tile = layout.geometry, layout.tile
    group_ic = g.in_channels // g.groups
    channels = g.groups * round_up(g.out_channels // g.groups, tile.thread_c)
    full, rest = divmod(layout.vectors, tile.thread_w)
    step = full * device.tile_cost(tile.thread_c, tile.thread_w)
    step += device.tile_cost(tile.thread_c, rest) if rest else 0
    line = step * channels / tile.thread_c
    parts_w, reach, stride = sum(layout.parts_w), layout.reach_w, layout.stride_w
    inputs_w, outputs_w = _terms(width_inputs(layout)), _terms(width_outputs(layout))
    row_vectors = layout.pitch * tile.columns / tile.vec
    products = transforms = 0.0
    for d, h in product(g.depth.phases, g.height.phases):
        along_d, along_h = transform(tile.planes, len(d.taps)), transform(tile.rows, len(h.taps))
        parts_d, parts_h = len(along_d.inputs), len(along_h.inputs)
        products += parts_d * parts_h * parts_w * line * group_ic
        # Loads and sums of planes, then dealt out: loaded twice and stored twice.
        packing = layout.rows * (row_vectors * (2 * _terms(along_d.inputs) + 4 * parts_d) + ROW_COST * parts_d)
        # Loads, sums along height and width, and stores of a vector of each component.
        inputs = (parts_h + _terms(along_h.inputs)) * reach + (inputs_w + 2 * parts_w) * parts_h
        outputs = parts_h * (parts_w + outputs_w) + _terms(along_h.outputs) * stride
        added = 3 * _terms(along_d.outputs) * tile.rows * stride
        transforms += g.in_channels * (packing + parts_d * inputs * layout.vectors)
        transforms += channels * (parts_d * outputs + added) * layout.vectors
    store = 0.0
    planes = stride if layout.fold is None else layout.fold_planes
    if planes not in INTERLEAVED:
        stored = layout.positions[2] * g.width.stride * tile.rows * tile.planes * layout.line_rows / tile.vec
        store = SCATTERED_STORE * g.out_channels * stored * g.depth.stride * g.height.stride
        store *= 1 if layout.fold is None else 1 / math.prod(layout.fold.window)
    edge_taps = _edge_taps(g, layout.positions, tile.outputs)
    tiles = layout.line_rows * layout.line_positions * math.prod(tile.outputs)
    edges = EDGE_COST * edge_taps * tiles * group_ic * g.out_channels / tile.thread_c
    filled = round_up(layout.positions[1], tile.rows) / (layout.boxes[1] * tile.box_h)
    return filled * tile.box_d / tile.planes * (products + TRANSFORM_COST * transforms + store + edges)


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


def _terms(rows: Sequence[Row]) -> int:
    """Terms of all sums."""
    return sum(factor != 0 for row in rows for factor in row)


def ranked_tiles(
    geometry: ConvGeometry, fold: Fold | None, resources: Resources, wanted: Wanted
) -> list[tuple[float, Tile]]:
    """Legal tiles with their estimated work per image, least first, as in :mod:`dispatcher.backends.opencl.tiles`.

    Raises:
        InputError: a box that is asked for does not hold whole windows and Winograd tiles, or what transforms are to
            yield cannot be had.
    """
    device, vec = resources.device, resources.vec
    flat = wanted.flat is not False  # aligned rows gain nothing: panels are aligned in any case
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
    candidates: list[Candidate] = []
    for order, outputs in enumerate(outputs_choices):
        planes, rows, columns = outputs
        box = units(geometry, fold, outputs)
        smallest = WinogradLayout(
            geometry, fold, Tile(vec, *register_tiles[0], *box, True, rows, planes=planes, columns=columns)
        )
        for place, (box_d, box_h) in enumerate(boxes(smallest, wanted.box, (1,))):
            for number, register_tile in enumerate(register_tiles):
                tile = Tile(vec, *register_tile, box_d, box_h, flat, rows, planes=planes, columns=columns)
                layout = WinogradLayout(geometry, fold, tile)
                size = (layout.hot_size + layout.pooled_size(geometry.out_channels)) * resources.itemsize
                fits = size <= resources.cache_bytes
                if fits or place == 0:
                    items = math.prod(layout.boxes)
                    cost = items * work(layout, device) * imbalance(items * max(1, geometry.batch), resources.units)
                    # Within the error of the estimates transforms of fewer outputs win, which round less.
                    candidates.append((cost if fits else 1.5 * cost, (order, number, size), tile))
    return best_first(candidates)


# ---- weights -------------------------------------------------------------------------------------------------
def even_weights(weight: np.ndarray, layout: LineLayout) -> bool:
    """Whether the taps of each output channel that transforms mix weigh as much as one another, and their channels.

    An output may read its tile through one tap alone, at a border or beside zeros, and its error comes from all taps of
    its tile. So the magnitudes of each tap's ``N`` input channels have to add up to ``sqrt(N)/4`` times the largest
    weight, and no more than an eighth of them may vanish beside it, lest the channels that hold the data be those. The
    kernel sees to the data (winograd_range.cl).

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``, finite.
        layout: says which axes are transformed.
    """
    geometry = layout.geometry
    mixed = tuple(
        number
        for number, (axis, m) in enumerate(zip(geometry.axes, layout.tile.outputs, strict=True), start=3)
        if axis.most_taps > 1 and m > 1
    )
    channels = geometry.in_channels // geometry.groups
    sizes = np.abs(weight, dtype=np.float64).reshape(geometry.groups, channels, *weight.shape[1:])
    largest = sizes.max(axis=(1, *mixed), keepdims=True)[:, 0]
    even = (sizes.sum(axis=1) >= math.sqrt(channels) / 4.0 * largest).all()
    vanishing = (sizes <= 2.0**-12 * largest[:, np.newaxis]).sum(axis=1)
    return not mixed or bool(even and vanishing.max() <= channels // 8)


def winograd_starts(layout: WinogradLayout) -> list[int]:
    """Where the weights of each (rd, rh) start in what :func:`pack_winograd_weights` returns."""
    g, tile = layout.geometry, layout.tile
    sizes = [
        len(reads(d, tile.planes)) * len(reads(h, tile.rows)) * sum(layout.parts_w) * layout.weights_per_tap
        for d in g.depth.phases
        for h in g.height.phases
    ]
    return [0, *accumulate(sizes[:-1])]


def pack_winograd_weights(weight: np.ndarray, layout: WinogradLayout) -> np.ndarray:
    """Transformed weights in the order in which the kernel streams them.

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``.

    Returns:
        One-dimensional weights: for each (rd, rh, depth component)
        ``[group][block of channels][height component][width component][channel tile][IC/groups][thread_c]``.
    """
    g, tile = layout.geometry, layout.tile
    c = tile.thread_c
    group_ic, group_oc = g.in_channels // g.groups, g.out_channels // g.groups
    tiles, block = -(-group_oc // c), layout.block // c
    padded = np.zeros((g.groups, group_ic, tiles * c, *weight.shape[2:]), np.float64)
    padded[:, :, :group_oc] = weight.reshape(g.groups, group_ic, group_oc, *weight.shape[2:])
    padded = padded.reshape(g.groups, group_ic, tiles, c, *weight.shape[2:])

    def components(phase: AxisPhase, outputs: int, values: np.ndarray, axis: int) -> np.ndarray:
        picked = np.take(values, [tap.index for tap in phase.taps], axis=axis)
        factors = np.array(transform(outputs, len(phase.taps)).taps, np.float64)
        return np.moveaxis(np.tensordot(factors, picked, axes=(1, axis)), 0, axis)

    along_width = np.concatenate(
        [components(phase, tile.columns, padded, 6) for phase in g.width.phases if phase.taps], axis=6
    )
    result: list[np.ndarray] = []
    for phase_d in g.depth.phases:
        along_depth = components(phase_d, tile.planes, along_width, 4)
        for phase_h in g.height.phases:
            all_axes = components(phase_h, tile.rows, along_depth, 5).astype(weight.dtype)
            for part in range(all_axes.shape[4]):
                for group in range(g.groups):
                    for first in range(0, tiles, block):
                        # from [ic][tile][c][height][width] to [height][width][tile][ic][c]
                        values = all_axes[group, :, first : first + block, :, part]
                        result.append(values.transpose(3, 4, 1, 0, 2).ravel())
    return np.concatenate(result)


# ---- tables --------------------------------------------------------------------------------------------------
def width_inputs(layout: WinogradLayout) -> list[Row]:
    """B^T of all phases along width: rows for each phase's components, columns for a tile's inputs."""
    low, m = layout.geometry.width.offset_range[0], layout.tile.columns
    rows: list[Row] = []
    for phase in layout.geometry.width.phases:
        if phase.taps:
            places = [offset - low for offset in reads(phase, m)]
            for row in transform(m, len(phase.taps)).inputs:
                factors = [Fraction(0)] * layout.reach_w
                for place, factor in zip(places, row, strict=True):
                    factors[place] = factor
                rows.append(tuple(factors))
    return rows


def width_outputs(layout: WinogradLayout) -> list[Row]:
    """A^T of all phases along width: rows for each column of a tile and phase, columns for the components."""
    phases, m = layout.geometry.width.phases, layout.tile.columns
    starts = [0, *accumulate(layout.parts_w)]
    rows: list[Row] = []
    for j, (number, phase) in product(range(m), enumerate(phases)):
        factors = [Fraction(0)] * starts[-1]
        if phase.taps:
            factors[starts[number] : starts[number + 1]] = transform(m, len(phase.taps)).outputs[j]
        rows.append(tuple(factors))
    return rows


def _sums(name: str, rows: Sequence[Row]) -> str:
    """A macro ``name(source, target)``: vectors ``target`` are the matrix ``rows`` times the vectors ``source``."""
    statements = []
    for i, row in enumerate(rows):
        terms = [(k, factor) for k, factor in enumerate(row) if factor != 0]
        # Begin with a term that needs no multiplication, if there is one.
        terms.sort(key=lambda term: (abs(term[1]) != 1, term[1] < 0))
        value = "" if terms else "SPLAT(R(0.0))"
        for k, factor in terms:
            operand = f"(x)[{k}]"
            if abs(factor) == 1:
                sign = "-" if factor < 0 else "+" if value else ""
                value = f"{value} {sign} {operand}".strip()
            elif value:
                value = f"fma({operand}, SPLAT(R({float(factor)!r})), {value})"
            else:
                value = f"{operand} * SPLAT(R({float(factor)!r}))"
        statements.append(f"(y)[{i}] = {value};")
    return f"#define {name}(x, y) do {{ {' '.join(statements)} }} while (0)\n"


def _share(axis: AxisGeometry, outputs: int) -> list[int]:
    """For each phase the outputs that share products."""
    return [outputs if len(phase.taps) > 1 else 1 for phase in axis.phases]


def _thirds(vec: int) -> Iterator[tuple[str, str]]:
    """Masks that pick every third of three vectors: of the first two, then of the result and the third."""
    for s in range(3):
        picked = [3 * i + s for i in range(vec)]
        low = [k if k < 2 * vec else 0 for k in picked]
        high = [i if k < 2 * vec else k - vec for i, k in enumerate(picked)]
        for name, mask in (("LOW", low), ("HIGH", high)):
            yield f"THIRD_{s}_{name}", f"({', '.join(map(str, mask))})"


def depth_terms(layout: WinogradLayout) -> tuple[list[list[int]], list[tuple[int, Fraction]]]:
    """What planes each depth component is a sum of.

    Returns:
        For each phase where the terms of each component start, and where the last one's end; and all terms, planes
        relative to the tile's first position with their factors.
    """
    terms: list[tuple[int, Fraction]] = []
    starts: list[list[int]] = []
    for phase in layout.geometry.depth.phases:
        offsets, places = reads(phase, layout.tile.planes), []
        for row in transform(layout.tile.planes, len(phase.taps)).inputs:
            places.append(len(terms))
            terms += [(offset, factor) for offset, factor in zip(offsets, row, strict=True) if factor != 0]
        starts.append([*places, len(terms)])
    return starts, terms


def core(layout: WinogradLayout, direct_starts: Sequence[int]) -> tuple[dict[str, object], str, str]:
    """The core's defines, tables and source text.

    Args:
        layout: of the launch.
        direct_starts: where the weights of each phase of the direct core start, which lie before the others.
    """
    g, tile = layout.geometry, layout.tile
    depth, height, width = (axis.phases for axis in g.axes)
    starts = [0, *accumulate(layout.parts_sizes)]
    term_starts, terms = depth_terms(layout)
    along_depth = [transform(tile.planes, len(phase.taps)) for phase in depth]
    most_parts = max(len(each.inputs) for each in along_depth)
    first = [[min(p for p, f in enumerate(row) if f) for row in each.outputs] for each in along_depth]
    last = [[max(p for p, f in enumerate(row) if f) for row in each.outputs] for each in along_depth]
    taps_h = sorted({len(phase.taps) for phase in height})
    values: dict[str, object] = {
        "THREAD_W": tile.thread_w,
        "LOW_W": g.width.offset_range[0],
        "M_D": tile.planes, "M_H": tile.rows, "M_W": tile.columns,
        "PHASES_W": g.width.stride,
        "PARTS_W": sum(layout.parts_w),
        "REACH_W": layout.reach_w,
        "WIDTH": layout.positions[2],
        "ROWS": layout.rows,
        "LOW_H": layout.low_h,
        "PITCH": layout.pitch,
        "EDGE": layout.edge,
        "CHANNEL": layout.channel,
        "ROW_LEAD": layout.row_lead,
        "PANEL": layout.panel,
        "PRODUCTS": layout.products,
        "BLOCK_C": layout.block,
        "SUM_IC": -(-(g.in_channels // g.groups) // -(-(g.in_channels // g.groups) // SUM)),
        "TAP_WEIGHTS": layout.weights_per_tap,
        "VECTORS": layout.vectors,
        "CHUNKS": layout.chunk_count,
        "MOST_TERMS": max(b - a for each in term_starts for a, b in pairwise(each)),
        "USE_SHARE_W": max(_share(g.width, tile.columns)) > 1,
        "SCRATCH_ROW": starts[1],
        "SCRATCH_PANELS": starts[2],
        "SCRATCH_PRODUCTS": starts[3],
        "SCRATCH_SUMS": starts[4],
        "SCRATCH_MARKS": starts[5],
    }  # fmt: skip
    if tile.columns == 3 and tile.vec > 1:
        values |= dict(_thirds(tile.vec))
    direct_size = g.kernel_volume * layout.weights_per_tap
    tables = (
        _sums("INPUT_SUMS_W", width_inputs(layout))
        + _sums("OUTPUT_SUMS_W", width_outputs(layout))
        + "".join(
            _sums(f"INPUT_SUMS_{taps}", transform(tile.rows, taps).inputs)
            + _sums(f"OUTPUT_SUMS_{taps}", transform(tile.rows, taps).outputs)
            for taps in taps_h
        )
        + table("SHARE_D", _share(g.depth, tile.planes))
        + table("SHARE_H", _share(g.height, tile.rows))
        + table("SHARE_W", _share(g.width, tile.columns))
        + table("INPUT_H", [[offset - layout.low_h for offset in reads(phase, tile.rows)] for phase in height])
        + table(
            "INPUT_W", [[tap.offset - g.width.offset_range[0] for tap in phase.taps] or [0] for phase in width]
        )
        + table("INPUT_D", [reads(phase, tile.planes) for phase in depth])
        + table("PARTS_D", [len(each.inputs) for each in along_depth])
        + table("TERMS_D", term_starts)
        + table("TERM_D", [plane for plane, _ in terms])
        + f"constant REAL FACTOR_D[{len(terms)}] = {{{', '.join(f'R({float(factor)!r})' for _, factor in terms)}}};\n"
        + table("FIRST_PART", first)
        + table("LAST_PART", last)
        + "constant REAL OUTPUT_D"
        + f"[{len(depth)}][{most_parts}][{tile.planes}] = {{"
        + ", ".join(
            "{" + ", ".join(
                "{" + ", ".join(f"R({float(row[p])!r})" if p < len(row) else "R(0.0)" for row in each.outputs) + "}"
                for p in range(most_parts)
            ) + "}"
            for each in along_depth
        )
        + "};\n"
        + table("DIRECT_WEIGHTS", direct_starts)
        + table("PHASE_WEIGHTS", [direct_size + start for start in winograd_starts(layout)])
        + _for_each("FOR_TAPS", taps_h)
        + _for_each("FOR_WIDTHS", layout.widths)
    )  # fmt: skip
    text = section("winograd_pack.cl") + section("winograd_range.cl")
    text += "".join(section("winograd_transforms.cl", f"#define TAPS {n}\n") + "#undef TAPS\n" for n in taps_h)
    text += "".join(section("winograd_product.cl", f"#define TILE_W {n}\n") + "#undef TILE_W\n" for n in layout.widths)
    return values, tables, text + section("core_winograd.cl")


def _for_each(name: str, numbers: Sequence[int]) -> str:
    """A macro ``name(DO)``: ``DO`` for each number."""
    return f"#define {name}(DO) {' '.join(f'DO({number})' for number in numbers)}\n"
