"""What the Winograd core on CPUs reads and is built with: weights, tables, source text (kernels/core_winograd.cl)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, product

import numpy as np

from dispatcher.backends.opencl.render import section, table
from dispatcher.backends.opencl.tiles import LineLayout
from dispatcher.backends.opencl.transforms import Row, sums_of, transform
from dispatcher.backends.opencl.winograd import WinogradLayout, edge_lanes, reads
from dispatcher.ops.geometry import AxisGeometry, AxisPhase

#: Input channels that are added up in one sum.
SUM = 48


def even_weights(weight: np.ndarray, layout: LineLayout) -> bool:
    """Whether the taps of each output channel that transforms mix weigh as much as one another, and their channels.

    An output may read its tile through one tap alone, at a border or beside zeros, and its error comes from all taps of
    its tile. So the magnitudes of each tap's ``N`` input channels have to add up to ``sqrt(N)/4`` times the largest
    weight, ``N/16`` times where there are fewer than 16, and no more than an eighth of them may vanish beside it, lest
    the channels that hold the data be those. The kernel sees to the data (winograd_range.cl).

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
    # Of a strided convolution, the channels are phases of the input, and the last taps are not in all of them.
    present = channels * np.ones(1)
    for axis in geometry.axes:
        source = axis.strided or axis
        phases = np.minimum(source.kernel - source.step * np.arange(axis.kernel)[::-1], source.input_phases)
        present = np.multiply.outer(present, phases / source.input_phases)
    even = (sizes.sum(axis=1) >= np.minimum(np.sqrt(present) / 4.0, present / 16.0) * largest).all()
    vanishing = (sizes <= 2.0**-12 * largest[:, np.newaxis]).sum(axis=1) - (channels - present)
    return not mixed or bool(even and (vanishing <= present // 8).all())


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
    """A macro ``name(x, y)``: vectors ``y`` are the matrix ``rows`` times the vectors ``x``."""
    statements = []
    for step in sums_of(rows):
        # Begin with a term that needs no multiplication, if there is one.
        value = "" if step.terms else "SPLAT(R(0.0))"
        for source, factor in sorted(step.terms, key=lambda term: (abs(term[1]) != 1, term[1] < 0)):
            operand = f"(x)[{source[1:]}]" if source.startswith("x") else source
            if abs(factor) == 1:
                sign = "-" if factor < 0 else "+" if value else ""
                value = f"{value} {sign} {operand}".strip()
            elif value:
                value = f"fma({operand}, SPLAT(R({float(factor)!r})), {value})"
            else:
                value = f"{operand} * SPLAT(R({float(factor)!r}))"
        target = f"(y)[{step.name[1:]}]" if step.name.startswith("y") else f"const real_v {step.name}"
        statements.append(f"{target} = {value};")
    return f"#define {name}(x, y) do {{ {' '.join(statements)} }} while (0)\n"


def _source(axis: AxisGeometry) -> Iterator[tuple[str, int]]:
    """What the kernel has to know of the axis in memory, whose inputs may be dealt out to phases."""
    source = axis.strided or axis
    yield "SOURCE", source.input
    yield "APART", source.step
    yield "DEALT", source.input_phases
    yield "FULL", source.input_phases if axis.strided is None else source.kernel - source.step * (axis.kernel - 1)
    yield "LEAD", source.phase_lead


def _share(axis: AxisGeometry, outputs: int) -> list[int]:
    """For each phase the outputs that share products."""
    return [outputs if len(phase.taps) > 1 else 1 for phase in axis.phases]


def core(layout: WinogradLayout, direct_starts: Sequence[int]) -> tuple[dict[str, object], str, str]:
    """The core's defines, tables and source text.

    Args:
        layout: of the launch.
        direct_starts: where the weights of each phase of the direct core start, which lie before the others.
    """
    g, tile = layout.geometry, layout.tile
    depth, height, width = (axis.phases for axis in g.axes)
    starts = [0, *accumulate(layout.parts_sizes)]
    along_depth = [transform(tile.planes, len(phase.taps)) for phase in depth]
    most_parts = max(len(each.inputs) for each in along_depth)
    first = [[min(p for p, f in enumerate(row) if f) for row in each.outputs] for each in along_depth]
    last = [[max(p for p, f in enumerate(row) if f) for row in each.outputs] for each in along_depth]
    taps_d, taps_h = (sorted({len(phase.taps) for phase in phases}) for phases in (depth, height))
    dealt = {f"{name}_{axis}": value for axis, each in zip("DHW", g.axes, strict=True) for name, value in _source(each)}
    values: dict[str, object] = {
        "THREAD_W": tile.thread_w,
        "EDGE_LANES": edge_lanes(tile.thread_c),
        "LOW_W": g.width.offset_range[0],
        **dealt,
        "MOST_TAPS": max(axis.most_taps for axis, m in zip(g.axes, tile.outputs, strict=True) if m > 1),
        "M_D": tile.planes, "M_H": tile.rows, "M_W": tile.columns,
        "PHASES_W": g.width.stride,
        "PARTS_W": sum(layout.parts_w),
        "REACH_W": layout.reach_w,
        "WIDTH": layout.positions[2],
        "ROWS": layout.rows,
        "LOW_H": layout.low_h,
        "PITCH": layout.pitch,
        "EDGE": layout.edge,
        "SUB_LINES": layout.sub_lines,
        "CHANNEL": layout.channel,
        "ROW_LEAD": layout.row_lead,
        "PANEL": layout.panel,
        "PRODUCTS": layout.products,
        "BLOCK_C": layout.block,
        "SUM_IC": -(-(g.in_channels // g.groups) // -(-(g.in_channels // g.groups) // SUM)),
        "ENDS_W": 1 + (dealt["FULL_W"] < dealt["DEALT_W"]),
        "TAP_WEIGHTS": layout.weights_per_tap,
        "VECTORS": layout.vectors,
        "ROW_SIZE": layout.row_size,
        "USE_SHARE_W": max(_share(g.width, tile.columns)) > 1,
        "SCRATCH_ROW": starts[1],
        "SCRATCH_PANELS": starts[2],
        "SCRATCH_PRODUCTS": starts[3],
        "SCRATCH_SUMS": starts[4],
        "SCRATCH_MARKS": starts[5],
    }  # fmt: skip
    direct_size = g.kernel_volume * layout.weights_per_tap
    tables = (
        _sums("INPUT_SUMS_W", width_inputs(layout))
        + _sums("OUTPUT_SUMS_W", width_outputs(layout))
        + "".join(
            _sums(f"INPUT_SUMS_{taps}", transform(tile.rows, taps).inputs)
            + _sums(f"OUTPUT_SUMS_{taps}", transform(tile.rows, taps).outputs)
            for taps in taps_h
        )
        + "".join(_sums(f"INPUT_SUMS_D_{taps}", transform(tile.planes, taps).inputs) for taps in taps_d)
        + table("SHARE_D", _share(g.depth, tile.planes))
        + table("SHARE_H", _share(g.height, tile.rows))
        + table("SHARE_W", _share(g.width, tile.columns))
        + table("INPUT_H", [[offset - layout.low_h for offset in reads(phase, tile.rows)] for phase in height])
        + table(
            "INPUT_W", [[tap.offset - g.width.offset_range[0] for tap in phase.taps] or [0] for phase in width]
        )
        + table("INPUT_D", [reads(phase, tile.planes) for phase in depth])
        + table("PARTS_D", [len(each.inputs) for each in along_depth])
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
        + _for_each("FOR_TAPS_D", taps_d)
        + _for_each("FOR_WIDTHS", layout.widths)
    )  # fmt: skip
    text = section("winograd_pack.cl") + section("winograd_range.cl")
    text += "".join(section("winograd_planes.cl", f"#define TAPS {n}\n") + "#undef TAPS\n" for n in taps_d)
    text += "".join(section("winograd_transforms.cl", f"#define TAPS {n}\n") + "#undef TAPS\n" for n in taps_h)
    text += "".join(section("winograd_product.cl", f"#define TILE_W {n}\n") + "#undef TILE_W\n" for n in layout.widths)
    return values, tables, text + section("core_winograd.cl")


def _for_each(name: str, numbers: Sequence[int]) -> str:
    """A macro ``name(DO)``: ``DO`` for each number."""
    return f"#define {name}(DO) {' '.join(f'DO({number})' for number in numbers)}\n"
