"""Lowering of one fused segment to a CPU convolution over lines, direct or Winograd.

It gives source text with its tables, packed weights, and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from dispatcher.backends.opencl import tuned
from dispatcher.backends.opencl.channels import channel_tables, layout_of, ranked_channel_tiles, suits
from dispatcher.backends.opencl.classes import device_class
from dispatcher.backends.opencl.groups import APART, Group, Part
from dispatcher.backends.opencl.lowered import (
    Counter,
    Lowered,
    Scratch,
    Value,
    Weights,
    extra_arguments,
    planned,
    rows_of,
)
from dispatcher.backends.opencl.options import Options, pair
from dispatcher.backends.opencl.render import (
    KernelOperands,
    Site,
    defines,
    kernel_text,
    reduction_defines,
    section,
    table,
    tail_macro,
)
from dispatcher.backends.opencl.stages import LINE_STAGES, render_stages
from dispatcher.backends.opencl.steps import ROW, real_name, statistics_defines
from dispatcher.backends.opencl.target import Facts, Target
from dispatcher.backends.opencl.tiles import WINOGRAD_CHANNELS, Fold, LineLayout, Resources, Tile, Wanted, ranked_tiles
from dispatcher.backends.opencl.winograd import (
    MOST_TAPS,
    Row,
    axis_reason,
    even_weights,
    pack_winograd_weights,
    pair_sums,
    transform,
    winograd_starts,
)
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.ops.steps import Pool

SOURCE = "conv_transpose3d_lines.cl"
#: Winograd rounds a little more, so it has to save something.
WORTHWHILE = 1.05
#: Output channels in the lanes have to save something: estimates are no better, and compilers take longer over them.
CHANNELS_WORTHWHILE = 1.08
#: Below this, Winograd is not chosen: a call is too short to matter.
WINOGRAD_FLOPS = 1 << 26


#: Workers for each compute unit. A worker that finds no item left ends at once, so more than one costs
#: nothing, and no runtime can then pile all of them onto one thread.
WORKERS_PER_UNIT = 4
#: A result larger than this is written past the caches. A value that the next launch reads has to be
#: larger than any cache first.
STREAM_BYTES = 8 << 20
STREAM_INTERMEDIATE_BYTES = 48 << 20


def ranked(
    geometry: ConvGeometry,
    fold: Fold | None,
    facts: Facts,
    real: np.dtype[Any],
    options: Options,
    *,
    winograd: bool,
    whole_rows: bool = False,
) -> list[tuple[float, Tile]]:
    """Tiles of one algorithm that ``options`` leave open, least estimated work first."""
    vec = facts.lanes(real)
    flat = None if options.line is None else options.line == "flat"
    channels = options.line == "channels"
    rows = None if options.rows is None else int(options.rows)
    wanted = Wanted(pair("tile", options.tile), pair("box", options.box), flat, rows, whole_rows)
    resources = Resources(device_class(facts.vec), vec, real.itemsize, facts.cache, facts.compute_units)
    if channels:
        return ranked_channel_tiles(geometry, fold, resources, wanted)
    found = ranked_tiles(geometry, fold, resources, winograd=winograd, wanted=wanted)
    fixed = winograd or wanted.register_tile is not None or options.line is not None
    if fixed or not suits(geometry, vec):
        return found
    others = ranked_channel_tiles(geometry, fold, resources, wanted)
    return others + found if CHANNELS_WORTHWHILE * others[0][0] < found[0][0] else found + others


def no_transform(geometry: ConvGeometry) -> str | None:
    """None when the Winograd core can run the geometry, else why not."""
    if geometry.skips:
        return APART
    return axis_reason(geometry.depth) or axis_reason(geometry.height)


def choose(
    geometry: ConvGeometry,
    fold: Fold | None,
    target: Target,
    real: np.dtype[Any],
    options: Options,
    *,
    whole_rows: bool = False,
) -> tuple[Tile, str]:
    """The tile for a segment, and why its algorithm was chosen.

    Args:
        options: fix the algorithm (``winograd`` where it applies) or the tile; ``auto`` takes what was tuned on
            this device, else the algorithm with less estimated work.
        whole_rows: each work item has to make whole rows, of which it gathers statistics.
    """
    facts = target.facts
    if replace(options, fusion=None) == Options():
        known = tuned.recall(target.identity, geometry, fold, real.name)
        if known is not None:
            winograd = known[0].algorithm == "winograd"
            tile = ranked(geometry, fold, facts, real, known[0], winograd=winograd, whole_rows=whole_rows)[0][1]
            return tile, known[1]
    direct_work, direct = ranked(geometry, fold, facts, real, options, winograd=False, whole_rows=whole_rows)[0]
    if options.algorithm == "direct" or options.line == "channels":
        return direct, "asked for"
    reason = no_transform(geometry)
    if reason is not None:
        return direct, f"no Winograd transform: {reason}"
    winograd_work, winograd_tile = ranked(geometry, fold, facts, real, options, winograd=True)[0]
    if options.algorithm == "winograd":
        return winograd_tile, "asked for"
    if geometry.in_channels // geometry.groups < WINOGRAD_CHANNELS:
        return direct, f"fewer than {WINOGRAD_CHANNELS} input channels a group: too few for Winograd"
    if geometry.out_channels // geometry.groups < WINOGRAD_CHANNELS:
        return direct, f"fewer than {WINOGRAD_CHANNELS} output channels a group: too few to tell Winograd's tiles apart"
    if geometry.flops < WINOGRAD_FLOPS * max(1, geometry.batch):
        return direct, "too little work an image for Winograd to matter"
    ratio = direct_work / winograd_work
    if ratio < WORTHWHILE:
        return direct, f"Winograd would save too little (estimated {ratio:.2f} times the speed)"
    return winograd_tile, f"estimated {ratio:.2f} times the speed of the direct core"


def direct_starts(layout: LineLayout) -> list[int]:
    """Where the weights of each phase start in what :func:`pack_direct_weights` returns."""
    g = layout.geometry
    sizes = [
        len(d.taps) * len(h.taps) * len(w.taps) * layout.weights_per_tap
        for d in g.depth.phases
        for h in g.height.phases
        for w in g.width.phases
    ]
    return [0, *accumulate(sizes[:-1])]


def pack_direct_weights(weight: np.ndarray, layout: LineLayout) -> np.ndarray:
    """Weights in the order in which the kernel streams them.

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``.

    Returns:
        One-dimensional weights: for each phase
        ``[group][channel tile][KD taps][KH taps][KW taps][IC/groups][thread_c]``.
    """
    g, c = layout.geometry, layout.tile.thread_c
    group_ic, group_oc = g.in_channels // g.groups, g.out_channels // g.groups
    tiles = -(-group_oc // c)
    padded = np.zeros((g.groups, group_ic, tiles * c, *weight.shape[2:]), weight.dtype)
    padded[:, :, :group_oc] = weight.reshape(g.groups, group_ic, group_oc, *weight.shape[2:])
    parts: list[np.ndarray] = []
    for phase_d in g.depth.phases:
        for phase_h in g.height.phases:
            for phase_w in g.width.phases:
                picked = padded
                for axis, phase in enumerate((phase_d, phase_h, phase_w), start=3):
                    picked = np.take(picked, [tap.index for tap in phase.taps], axis=axis)
                taps = picked.shape[3:]
                ordered = picked.reshape(g.groups, group_ic, tiles, c, *taps).transpose(0, 2, 4, 5, 6, 1, 3)
                parts.append(ordered.ravel())
    return np.concatenate(parts)


def lower_lines(group: Group, target: Target, real: np.dtype[Any], tile: Tile, reason: str) -> Lowered:
    """Lower a group that begins with a convolution.

    Args:
        group: what to run.
        target: the device.
        real: float32 or float64.
        tile: its core and its blocks.
        reason: why that one, for people.
    """
    convolution = group.convolution
    assert convolution is not None
    layout = layout_of(convolution.geometry, None if group.fold is None else group.fold[0], tile)
    shape = group.steps[-1].shape
    final = group.output == len(group.operator.steps)
    stays = STREAM_BYTES if final else STREAM_INTERMEDIATE_BYTES
    stream = math.prod(shape) * real.itemsize > stays
    kernel = f"conv_transpose3d_{'winograd' if tile.winograd else 'direct'}"
    text, operands, scratch = render(layout, group, kernel, stream=stream, real=real)
    items = math.prod(layout.boxes) * shape[0]
    workers = min(target.facts.compute_units * WORKERS_PER_UNIT, max(1, items))

    def pack(weight: np.ndarray) -> np.ndarray:
        weight = convolution.contraction_weight(weight)
        direct = pack_direct_weights(weight, layout)
        return np.concatenate((direct, pack_winograd_weights(weight, layout))) if tile.winograd else direct

    def suited(weight: np.ndarray) -> bool:
        return not tile.winograd or even_weights(convolution.contraction_weight(weight), layout.geometry)

    detail: dict[str, str | int | float] = {
        "why": reason,
        "vector": tile.vec,
        "channels_x_vectors": f"{tile.thread_c}x{tile.thread_w}",
        "box": f"{tile.box_d}x{tile.box_h}" + (f"x{tile.box_w}" if tile.box_w else ""),
        "line": "channels" if tile.channels else "flat" if tile.flat else "rows",
        **({"rows": tile.rows} if tile.winograd else {}),
        "lanes_used": round(layout.lanes_used, 3),
        "scratch_bytes_per_worker": scratch * real.itemsize,
        "items": items,
        "workers": workers,
    }
    return Lowered(
        kernel,
        text,
        (
            Value(group.source),
            Weights(convolution.weight.name, pack, suited),
            operands,
            Value(group.output) if group.stored else rows_of(group),
            Scratch(workers * scratch),
            Counter(guarded=tile.winograd),
            np.int32(items),
            *extra_arguments(group, operands),
        ),
        workers,
        1,
        group.source,
        group.output,
        planned(group, kernel, "winograd" if tile.winograd else "direct", detail),
    )


def render(
    layout: LineLayout, group: Group, kernel: str, *, stream: bool, real: np.dtype[Any]
) -> tuple[str, KernelOperands, int]:
    """Source text of a group, what it reads, and the elements of scratch that a worker needs.

    Args:
        layout: geometry, fold and tile.
        group: what to run.
        kernel: its name.
        stream: write the result past the caches.
        real: float32 or float64.
    """
    convolution, output = group.convolution, group.steps[-1].shape
    assert convolution is not None
    g, tile = layout.geometry, layout.tile
    operands = KernelOperands(padding=tile.thread_c)
    width = g.width
    line = layout.line
    first, *rest = group.parts
    pools = [number for number, part in enumerate(rest) if isinstance(part.step, Pool)]
    before_fold = rest[: pools[0]] if pools else rest
    after_fold = rest[pools[-1] + 1 :] if pools else []
    at_store = group.tail if group.at_store else []

    def tail_of(part: Part) -> str:
        return "" if group.at_store and part is group.parts[-1] else operands.tail(part.tail)

    prologue_text = operands.tail(group.prologue)
    conv_text = operands.bias(convolution) + tail_of(first)
    before, before_calls, channels = render_stages(
        LINE_STAGES, operands, before_fold, 1, g.out_channels, tail_of, STAGE_RUN=width.stride * line
    )
    operands.gathers = group.gathers is not None
    tables: dict[str, object] = {
        "KERNEL_NAME": kernel,
        "THREAD_C": tile.thread_c,
        "THREAD_W": tile.thread_w,
        "BOX_D": tile.box_d,
        "BOX_H": tile.box_h,
        "STEP_D": layout.step_d,
        "BOXES_D": layout.boxes[0],
        "BOXES_H": layout.boxes[1],
        "BOXES_W": layout.boxes[2],
        "BOX_W": tile.box_w,
        "LOW_W": layout.width_range[0],
        "IC": g.in_channels,
        "OC": g.out_channels,
        "GROUPS": g.groups,
        "GROUP_IC": g.in_channels // g.groups,
        "GROUP_OC": g.out_channels // g.groups,
        "ID": g.depth.input,
        "IH": g.height.input,
        "IW": g.width.input,
        "APART_D": g.depth.step,
        "APART_H": g.height.step,
        "APART_W": 1 if tile.channels else width.step,
        "STEP_W": width.step,
        **channel_tables(layout),
        "STRIDE_D": g.depth.stride,
        "STRIDE_H": g.height.stride,
        "STRIDE_W": g.width.stride,
        "PLANES": len(layout.depth.rows),
        "ROWS": len(layout.height.rows),
        "PITCH": layout.pitch,
        "CHANNEL": layout.channel,
        "PLANE": layout.plane,
        "LEAD": layout.lead,
        "LOADS": layout.load_size,
        "POSITIONS_D": layout.positions[0],
        "POSITIONS_H": layout.positions[1],
        "POSITIONS_W": layout.positions[2],
        "LINE": line,
        "ROW": layout.row,
        "LINE_CHANNELS": layout.line_channels,
        "CHUNKS": len(layout.chunks),
        "WIDE_CHUNKS": sum(chunk.width > 1 for chunk in layout.chunks),
        "LINES_H": layout.lines_h,
        "EDGE": layout.edge,
        "SCRATCH_EDGE": layout.packed_size,
        "SCRATCH_LOADS": layout.packed_size + layout.edge_size + layout.lead,
        "SCRATCH_SUMS": layout.core_size - layout.lines_size - layout.marks_size - layout.sums_size,
        "SCRATCH_DIRECT": layout.core_size - layout.lines_size - layout.marks_size,
        "SCRATCH_LINES": layout.core_size - layout.lines_size,
        "SCRATCH_POOLED": layout.core_size,
        "OUT_C": output[1],
        "OUT_D": output[2],
        "OUT_H": output[3],
        "OUT_W": output[4],
        "USE_FOLD": layout.fold is not None,
        "USE_STREAM": stream,
    }
    scratch = layout.core_size
    fold, after, after_calls = "", "", ""
    if layout.fold is not None:
        window = layout.fold.window
        run = layout.fold_planes * layout.fold_line
        scratch += layout.pooled_size(channels)
        number = 1 + len(before_fold)
        after, after_calls, _ = render_stages(
            LINE_STAGES, operands, after_fold, number, channels, tail_of, STAGE_RUN=run
        )
        assert group.fold is not None
        fold = section(
            "pool_fold.cl",
            defines(
                {
                    "WINDOW_D": window[0],
                    "WINDOW_H": window[1],
                    "FOLD_CHANNELS": channels,
                    "FOLD_PLANES": layout.fold_planes,
                    "FOLD_NEIGHBOURS": layout.fold_neighbours,
                    "FOLD_BOX_D": layout.fold_box[0],
                    "FOLD_BOX_H": layout.fold_box[1],
                    "FOLD_ROW": layout.fold_row,
                    "FOLD_LINE": layout.fold_line,
                    **reduction_defines(group.fold[1], f"{math.prod(window)}", "FOLD"),
                }
            )
            + tail_macro("FOLD_TAIL", tail_of(rest[pools[-1]])),
        )
        tables |= {"STORE_PLANES": layout.fold_planes, "STORE_LINE": layout.fold_line}
    else:
        tables |= {"STORE_PLANES": width.stride, "STORE_LINE": line}
    tables["SCRATCH"] = scratch
    taps = "".join(
        table(f"TAPS_{letter}", [len(phase.taps) for phase in axis.phases])
        for letter, axis in zip("DHW", g.axes, strict=True)
    )
    offsets = [tuple(layout.width_offset(tap.offset) for tap in phase.taps) for phase in width.phases]
    tables_text = (
        taps
        + table("INPUT_D", layout.depth.rows)
        + table("INPUT_H", layout.height.rows)
        + table("OFFSET_W", offsets)
        + (_winograd_tables(layout) if tile.winograd else _direct_tables(layout))
        + table("CHUNK_X", [chunk.x for chunk in layout.chunks])
        + table("CHUNK_LINE", [chunk.line for chunk in layout.chunks])
    )
    store = operands.tail(at_store, Site("c", ROW, "OUT_W - w"))
    tables |= {
        "USE_ROWS": bool(at_store) or group.gathers is not None,
        "PARAMETERS": operands.parameters,
        "ARGUMENTS": operands.arguments,
        **statistics_defines(group),
    }
    text = kernel_text(
        real_name(real),
        tile.vec,
        operands,
        defines(tables),
        tables_text,
        tail_macro("PROLOGUE", prologue_text),
        tail_macro("CONV_TAIL", conv_text),
        before,
        fold,
        after,
        f"#define STAGES_BEFORE_FOLD(line) do {{ {before_calls} }} while (0)\n",
        f"#define STAGES_AFTER_FOLD(line) do {{ {after_calls} }} while (0)\n",
        tail_macro("STORE_TAIL", store, "x"),
        section("row_statistics.cl"),
        section("rows.cl"),
        section("core_winograd.cl" if tile.winograd else "core_direct.cl"),
        section(SOURCE),
    )
    return text, operands, scratch


def _direct_tables(layout: LineLayout) -> str:
    slots = table("SLOT_D", layout.depth.slots) + table("SLOT_H", layout.height.slots)
    parts = layout.width_parts
    return (
        slots
        + table("PHASE_WEIGHTS", direct_starts(layout))
        + table("CHUNK_FIRST_H", [chunk.first_h for chunk in layout.chunks])
        + table("CHUNK_LAST_H", [chunk.last_h for chunk in layout.chunks])
        + defines({"PARTS_W": len(parts)})
        + table("PART_W", list(parts))
        + table("PART_EXTENT", [extent for _, extent in parts.values()])
    )


def _sums(name: str, rows: Sequence[Row], source: str, target: str) -> str:
    """A macro ``name(source, target)``: vectors ``target`` are the matrix ``rows`` times the vectors ``source``."""
    statements = []
    for i, row in enumerate(rows):
        terms = [(k, factor) for k, factor in enumerate(row) if factor != 0]
        # Begin with a term that needs no multiplication, if there is one.
        terms.sort(key=lambda term: (abs(term[1]) != 1, term[1] < 0))
        value = ""
        for k, factor in terms:
            operand = f"({source})[{k}]"
            if abs(factor) == 1:
                sign = "-" if factor < 0 else "+" if value else ""
                value = f"{value} {sign} {operand}".strip()
            elif value:
                value = f"fma({operand}, SPLAT(R({float(factor)!r})), {value})"
            else:
                value = f"{operand} * SPLAT(R({float(factor)!r}))"
        statements.append(f"({target})[{i}] = {value};")
    return f"#define {name}({source}, {target}) do {{ {' '.join(statements)} }} while (0)\n"


def _winograd_tables(layout: LineLayout) -> str:
    depth, height = layout.geometry.depth.phases, layout.geometry.height.phases
    occurring = {len(phase.taps) for phase in height}
    text = defines({f"USE_TAPS_{taps}": taps in occurring for taps in range(1, MOST_TAPS + 1)})
    for taps in sorted(occurring):
        matrices = transform(layout.tile.rows, taps)
        text += _sums(f"INPUT_SUMS_{taps}", matrices.inputs, "x", "z")
        text += _sums(f"OUTPUT_SUMS_{taps}", matrices.outputs, "z", "y")
    text += table("START_H", [phase.taps[0].offset - layout.height.rows[0] for phase in height])
    sums = [(phase.taps[0].offset, pair_sums(len(phase.taps))) for phase in depth]
    text += table("FIRST_D", [phase.taps[0].offset for phase in depth])
    text += table("DIRECT_WEIGHTS", direct_starts(layout))
    direct = layout.geometry.kernel_volume * layout.weights_per_tap
    text += table("PHASE_WEIGHTS", [direct + start for start in winograd_starts(layout)])
    text += table("PARTS_D", [len(parts) for _, parts in sums])
    text += table("ROW_A_D", [[start + part.a for part in parts] for start, parts in sums])
    text += table("ROW_B_D", [[start + part.b for part in parts] for start, parts in sums])
    text += table("SIGN_D", [[part.sign for part in parts] for _, parts in sums])
    second = [transform(2, len(phase.taps)).outputs[1] for phase in depth]
    return text + table("NEGATE_D", [[int(factor < 0) for factor in row] for row in second])
