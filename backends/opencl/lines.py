"""Lowering of one fused segment to a CPU convolution over lines, direct or Winograd.

It gives source text with its tables, packed weights, and sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from dispatcher.backends.opencl import tiles, tuned, winograd, winograd_core
from dispatcher.backends.opencl.channels import ChannelLayout, channel_tables, ranked_channel_tiles, suits
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
    thirds,
)
from dispatcher.backends.opencl.stages import LINE_STAGES, render_stages
from dispatcher.backends.opencl.steps import ROW, real_name, statistics_defines
from dispatcher.backends.opencl.target import Facts, Target
from dispatcher.backends.opencl.tiles import STORED_CHANNELS, Fold, LineLayout, Resources, Tile, Wanted, merged_shape
from dispatcher.backends.opencl.winograd import WINOGRAD_CHANNELS, WinogradLayout
from dispatcher.ops.geometry import ConvGeometry, unstrided_weight
from dispatcher.ops.steps import Pool

SOURCE = "conv_transpose3d_lines.cl"
#: Winograd rounds a little more, so it has to save something.
WORTHWHILE = 1.05
#: With one axis transformed, four weights stand for three and pass by once for each box, which estimates leave out.
WORTHWHILE_ONE_AXIS = 1.1
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


def resources_of(facts: Facts, real: np.dtype[Any]) -> Resources:
    """What a device offers to launches that compute in ``real``."""
    return Resources(facts.device_class, facts.lanes(real), real.itemsize, facts.cache, facts.compute_units)


def stores_early(layout: LineLayout, group: Group, resources: Resources) -> bool:
    """Whether rows are stored as soon as register tiles have made them, so that memory takes them meanwhile.

    Results that the caches hold gain nothing. Nothing may work on whole lines, and a line has to hold rows as they are.
    """
    tile, geometry = layout.tile, layout.geometry
    whole = len(group.parts) == 1 and not tile.winograd and all(axis.stride == 1 for axis in geometry.axes)
    return whole and tile.thread_c <= STORED_CHANNELS and not resources.hold(geometry)


def ranked(
    geometry: ConvGeometry,
    fold: Fold | None,
    facts: Facts,
    real: np.dtype[Any],
    options: Options,
    *,
    transformed: bool,
    whole_rows: bool = False,
) -> list[tuple[float, Tile]]:
    """Tiles of one core, Winograd's if ``transformed``, that ``options`` leave open, least estimated work first."""
    flat = None if options.line is None else options.line == "flat"
    channels = options.line == "channels"
    wanted = Wanted(pair("tile", options.tile), pair("box", options.box), flat, options.outputs, whole_rows)
    resources = resources_of(facts, real)
    if channels:
        return ranked_channel_tiles(geometry, fold, resources, wanted)
    if transformed:
        return winograd.ranked_tiles(geometry.unstrided, fold, resources, wanted)
    found = tiles.ranked_tiles(geometry, fold, resources, wanted)
    if wanted.register_tile is not None or options.line is not None or not suits(geometry, resources.vec):
        return found
    others = ranked_channel_tiles(geometry, fold, resources, wanted)
    return others + found if CHANNELS_WORTHWHILE * others[0][0] < found[0][0] else found + others


@lru_cache(maxsize=1024)
def best(
    geometry: ConvGeometry,
    fold: Fold | None,
    facts: Facts,
    real: np.dtype[Any],
    options: Options,
    *,
    transformed: bool,
    whole_rows: bool = False,
) -> tuple[float, Tile]:
    """The first of :func:`ranked`. Networks have many convolutions of one geometry, each asked for several times."""
    return ranked(geometry, fold, facts, real, options, transformed=transformed, whole_rows=whole_rows)[0]


def no_transform(geometry: ConvGeometry) -> str | None:
    """None when the Winograd core can run the geometry, else why not."""
    return APART if geometry.unstrided.skips else winograd.no_transform(geometry.unstrided)


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
            transformed = known[0].algorithm == "winograd"
            tile = best(geometry, fold, facts, real, known[0], transformed=transformed, whole_rows=whole_rows)[1]
            return tile, known[1]
    direct_work, direct = best(geometry, fold, facts, real, options, transformed=False, whole_rows=whole_rows)
    if options.algorithm == "direct" or options.line == "channels":
        return direct, "asked for"
    reason = no_transform(geometry)
    if reason is not None:
        return direct, f"no Winograd transform: {reason}"
    if options.algorithm == "winograd":
        return best(geometry, fold, facts, real, options, transformed=True)[1], "asked for"
    least = winograd.least_channels(geometry)
    if geometry.in_channels // geometry.groups < least:
        return direct, f"fewer than {least} input channels a group: too few for Winograd's accuracy"
    if geometry.out_channels // geometry.groups < WINOGRAD_CHANNELS:
        return direct, f"fewer than {WINOGRAD_CHANNELS} output channels a group: too few to tell Winograd's tiles apart"
    if geometry.flops < WINOGRAD_FLOPS * max(1, geometry.batch):
        return direct, "too little work an image for Winograd to matter"
    winograd_work, winograd_tile = best(geometry, fold, facts, real, options, transformed=True)
    ratio = direct_work / winograd_work
    one_axis = sum(outputs > 1 for outputs in winograd_tile.outputs) == 1
    if ratio < (WORTHWHILE_ONE_AXIS if one_axis else WORTHWHILE):
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


def lower_lines(
    group: Group, geometry: ConvGeometry, target: Target, real: np.dtype[Any], tile: Tile, reason: str
) -> Lowered:
    """Lower a group that begins with a convolution.

    Args:
        group: what to run.
        geometry: the convolution's, or the same with its last axes as one, where nothing tells the rows apart.
        target: the device.
        real: float32 or float64.
        tile: its core and its blocks.
        reason: why that one, for people.
    """
    convolution = group.convolution
    assert convolution is not None
    layout = layout_of(geometry, None if group.fold is None else group.fold[0], tile)
    shape = group.steps[-1].shape
    final = group.output == len(group.operator.steps)
    stays = STREAM_BYTES if final else STREAM_INTERMEDIATE_BYTES
    stream = math.prod(shape) * real.itemsize > stays
    kernel = "conv_winograd" if tile.winograd else "conv_direct"
    early = stores_early(layout, group, resources_of(target.facts, real))
    fetch = group.stored and not stream and target.facts.any_pointer
    text, operands, scratch = render(layout, group, kernel, stream=stream, early=early, fetch=fetch, real=real)
    items = math.prod(layout.boxes) * shape[0]
    workers = min(target.facts.compute_units * WORKERS_PER_UNIT, max(1, items))

    def contraction(weight: np.ndarray) -> np.ndarray:
        weight = convolution.contraction_weight(weight).reshape(geometry.weight_shape)
        return unstrided_weight(weight, geometry) if tile.winograd else weight

    def pack(weight: np.ndarray) -> np.ndarray:
        weight = contraction(weight)
        direct = pack_direct_weights(weight, layout)
        if isinstance(layout, WinogradLayout):
            return np.concatenate((direct, winograd_core.pack_winograd_weights(weight, layout)))
        return direct

    def suited(weight: np.ndarray) -> bool:
        return not tile.winograd or winograd_core.even_weights(contraction(weight), layout)

    detail: dict[str, str | int | float] = {
        "why": reason,
        "vector": tile.vec,
        "channels_x_vectors": f"{tile.thread_c}x{tile.thread_w}",
        "box": f"{tile.box_d}x{tile.box_h}" + (f"x{tile.box_w}" if tile.box_w else ""),
        "line": "channels" if tile.channels else "flat" if tile.flat else "rows",
        **({"outputs": "x".join(map(str, tile.outputs))} if tile.winograd else {}),
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
    layout: LineLayout, group: Group, kernel: str, *, stream: bool, early: bool, fetch: bool, real: np.dtype[Any]
) -> tuple[str, KernelOperands, int]:
    """Source text of a group, what it reads, and the elements of scratch that a worker needs.

    Args:
        layout: geometry, fold and tile.
        group: what to run.
        kernel: its name.
        stream: write the result past the caches.
        early: store rows as soon as they are complete; see :func:`stores_early`.
        fetch: then have the cache bring in the lines that will be written.
        real: float32 or float64.
    """
    convolution, output = group.convolution, group.steps[-1].shape
    assert convolution is not None
    g, tile = layout.geometry, layout.tile
    if layout.fold is None:
        output = (*output[:2], *g.output_shape[2:])
    whole = convolution.shape
    operands = KernelOperands(tile.thread_c, lambda shape: merged_shape(shape, whole, g.output_shape))
    line = layout.line
    core, core_tables, core_text = _core(layout)
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
        LINE_STAGES, operands, before_fold, 1, g.out_channels, tail_of, STAGE_RUN=layout.stride_w * line
    )
    operands.gathers = group.gathers is not None
    tables: dict[str, object] = {
        "KERNEL_NAME": kernel,
        "THREAD_C": tile.thread_c,
        "BOX_D": tile.box_d,
        "BOX_H": tile.box_h,
        "STEP_D": layout.step_d,
        "BOXES_D": layout.boxes[0],
        "BOXES_H": layout.boxes[1],
        "BOXES_W": layout.boxes[2],
        "BOX_W": tile.box_w,
        "IC": g.in_channels,
        "IMAGE": math.prod(convolution.geometry.input_shape[1:]),
        "OC": g.out_channels,
        "GROUPS": g.groups,
        "GROUP_IC": g.in_channels // g.groups,
        "GROUP_OC": g.out_channels // g.groups,
        "ID": g.depth.input,
        "IH": g.height.input,
        "IW": g.width.input,
        "STRIDE_D": g.depth.stride,
        "STRIDE_H": g.height.stride,
        "STRIDE_W": layout.stride_w,
        "POSITIONS_D": layout.positions[0],
        "POSITIONS_H": layout.positions[1],
        "POSITIONS_W": layout.line_positions,
        "LINE": line,
        "ROW": layout.row,
        "LINE_CHANNELS": layout.line_channels,
        "LINES_H": layout.lines_h,
        "SCRATCH_LINES": layout.core_size - layout.lines_size,
        "SCRATCH_POOLED": layout.core_size,
        "OUT_C": output[1],
        "OUT_D": output[2],
        "OUT_H": output[3],
        "OUT_W": output[4],
        "USE_FOLD": layout.fold is not None,
        "USE_STREAM": stream,
        "USE_PREFETCH": fetch,
        "STORE_EARLY": early,
        **core,
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
        tables |= {"STORE_PLANES": layout.stride_w, "STORE_LINE": line}
    if tile.columns == 3 or tables["STORE_PLANES"] in (3, 6):
        tables |= dict(thirds(tile.vec))
    tables["SCRATCH"] = scratch
    taps = "".join(
        table(f"TAPS_{letter}", [len(phase.taps) for phase in axis.phases])
        for letter, axis in zip("DHW", g.axes, strict=True)
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
        taps + core_tables,
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
        section("line_store.cl"),
        core_text,
        section(SOURCE),
    )
    return text, operands, scratch


def layout_of(geometry: ConvGeometry, fold: Fold | None, tile: Tile) -> LineLayout:
    """The layout of a tile."""
    if tile.winograd:
        return WinogradLayout(geometry.unstrided, fold, tile)
    return (ChannelLayout if tile.channels else LineLayout)(geometry, fold, tile)


def _core(layout: LineLayout) -> tuple[dict[str, object], str, str]:
    """Defines, tables and source text of a layout's core."""
    g = layout.geometry
    if isinstance(layout, WinogradLayout):
        return winograd_core.core(layout, direct_starts(layout))
    parts = layout.width_parts
    offsets = [tuple(layout.width_offset(tap.offset) for tap in phase.taps) for phase in g.width.phases]
    values: dict[str, object] = {
        "THREAD_W": layout.tile.thread_w,
        "LOW_W": layout.width_range[0],
        "APART_D": g.depth.step,
        "APART_H": g.height.step,
        "APART_W": 1 if layout.tile.channels else g.width.step,
        "STEP_W": g.width.step,
        **channel_tables(layout),
        "PLANES": len(layout.depth.rows),
        "ROWS": len(layout.height.rows),
        "PITCH": layout.pitch,
        "CHANNEL": layout.channel,
        "PLANE": layout.plane,
        "LEAD": layout.lead,
        "PARTS_W": len(parts),
        "CHUNKS": len(layout.chunks),
        "WIDE_CHUNKS": sum(chunk.width > 1 for chunk in layout.chunks),
    }
    tables = (
        table("INPUT_D", layout.depth.rows)
        + table("INPUT_H", layout.height.rows)
        + table("OFFSET_W", offsets)
        + table("SLOT_D", layout.depth.slots)
        + table("SLOT_H", layout.height.slots)
        + table("PHASE_WEIGHTS", direct_starts(layout))
        + table("CHUNK_FIRST_H", [chunk.first_h for chunk in layout.chunks])
        + table("CHUNK_LAST_H", [chunk.last_h for chunk in layout.chunks])
        + table("PART_W", list(parts))
        + table("PART_EXTENT", [extent for _, extent in parts.values()])
        + table("CHUNK_X", [chunk.x for chunk in layout.chunks])
        + table("CHUNK_LINE", [chunk.line for chunk in layout.chunks])
        + table("CHUNK_WIDE", [int(chunk.width > 1) for chunk in layout.chunks])
        + table("CHUNK_ROWS", layout.rows_done)
    )
    return values, tables, section("core_direct.cl")
