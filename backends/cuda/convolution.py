"""Tables that turn a convolution's geometry into what the kernels read: taps, phases and the order of the
weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dispatcher.backends.cuda.layouts import structure
from dispatcher.backends.cuda.tiles import HaloTile, Triple
from dispatcher.ops.geometry import AxisPhase, ConvGeometry


@dataclass(frozen=True)
class FmaTables:
    """Tables of ``conv_fma.cu``.

    Attributes:
        phases: one row for each combination of residues that have taps, depth outermost.
        slots: row of a residue among those of its axis that have taps, or -1; axes one after another.
        terms: pairs of tap and input channel, by phase.
        places: of each tap of all phases, the offset and the index in the kernel; its terms are one for each channel.
        order: where each packed weight, ``(groups, terms, padded channels)``, comes from; -1 for padding.
        residues: residues per axis that have outputs.
        axis_slots: those of them that have taps.
    """

    phases: NDArray[np.void]
    slots: NDArray[np.int32]
    terms: NDArray[np.void]
    places: NDArray[np.int64]
    order: NDArray[np.int32]
    residues: Triple
    axis_slots: Triple


def fma_tables(geometry: ConvGeometry, padded_channels: int) -> FmaTables:
    """Tables for a convolution whose output channels of a group are padded to ``padded_channels``."""
    in_group = geometry.in_channels // geometry.groups
    out_group = geometry.out_channels // geometry.groups
    extents = [axis.input for axis in geometry.axes]
    kernel = [axis.kernel for axis in geometry.axes]
    channel_stride = int(np.prod(extents, dtype=np.int64))
    phase_type, term_type = structure("conv_fma.cu", "Phase"), structure("conv_fma.cu", "Term")
    slots: list[int] = []
    used: list[list[AxisPhase]] = []
    residues: list[int] = []
    for axis in geometry.axes:
        live = [phase for phase in axis.phases if phase.count]
        filled = [phase for phase in live if phase.taps]
        numbers = {phase.residue: number for number, phase in enumerate(filled)}
        slots += [numbers.get(phase.residue, -1) for phase in live]
        used.append(filled)
        residues.append(len(live))
    phases = np.zeros(int(np.prod([len(axis) for axis in used])), phase_type)
    blocks: list[NDArray[np.void]] = [np.zeros(0, term_type)]
    places: list[NDArray[np.int64]] = [np.zeros((0, 4), np.int64)]
    first = 0
    for row, combination in enumerate(itertools.product(*used)):
        combined = list(itertools.product(*(phase.taps for phase in combination)))
        count = len(combined) * in_group
        offsets = np.array([[tap.offset for tap in triple] for triple in combined], np.int64)
        index = np.array([(z.index * kernel[1] + y.index) * kernel[2] + x.index for z, y, x in combined], np.int64)
        spatial = (offsets[:, 0] * extents[1] + offsets[:, 1]) * extents[2] + offsets[:, 2]
        channels = np.tile(np.arange(in_group), len(combined))
        block = np.zeros(count, term_type)
        block["delta"] = np.repeat(spatial, in_group) + channels * channel_stride
        block["offset"] = np.repeat(offsets, in_group, axis=0)
        block["channel"] = channels
        phases[row] = (first, count)
        blocks.append(block)
        places.append(np.column_stack([offsets, index]))
        first += count
    terms, every = np.concatenate(blocks), np.concatenate(places)
    group, column = np.arange(geometry.groups)[:, None, None], np.arange(padded_channels)
    source = (group * in_group + terms["channel"][:, None]) * out_group + column
    order = source * geometry.kernel_volume + np.repeat(every[:, 3], in_group)[:, None]
    order[..., out_group:] = -1
    return FmaTables(
        phases,
        np.array(slots, np.int32),
        terms,
        every,
        order.astype(np.int32).ravel(),
        (residues[0], residues[1], residues[2]),
        (len(used[0]), len(used[1]), len(used[2])),
    )


@dataclass(frozen=True)
class HaloTables:
    """Tables of ``conv_halo.cu``.

    Attributes:
        passes: phases in order of work, one or two at a time.
        taps: the program, one row more than there are steps, since the kernel reads ahead.
        order: where each packed weight comes from; -1 for padding, some of which follows the last channel tile for
            the same reason.
        tile_weights: packed weights of one channel tile.
        indices: in the kernel, of each step.
        tile: of the kernel that reads them.
    """

    passes: NDArray[np.void]
    taps: NDArray[np.void]
    order: NDArray[np.int32]
    tile_weights: int
    indices: tuple[int, ...]
    tile: HaloTile


def halo_tables(geometry: ConvGeometry, tile: HaloTile) -> HaloTables:
    """Tables for a convolution in boxes of ``tile``."""
    kernel = [axis.kernel for axis in geometry.axes]
    live = [[phase for phase in axis.phases if phase.count] for axis in geometry.axes]
    together = [tuple(live[2])] if tile.paired else [(phase,) for phase in live[2]]
    passes = []
    program: list[tuple[int, tuple[int, int, int]]] = []
    indices: list[int] = []  # in the kernel, of each step
    for z, y, xs in itertools.product(live[0], live[1], together):
        first, steps = [], []
        for x in xs:
            first.append(len(program))
            for tz, ty, tx in itertools.product(z.taps, y.taps, x.taps):
                offset = (tz.offset, ty.offset, tx.offset)
                program.append((tile.shared_offset(offset), offset))
                indices.append((tz.index * kernel[1] + ty.index) * kernel[2] + tx.index)
            steps.append(len(program) - first[-1])
        residues = [[z.residue, y.residue, x.residue] for x in xs]
        rest = 2 - len(xs)
        passes.append((residues + residues[:1] * rest, first + [0] * rest, steps + [0] * rest))
    in_group, out_group = (n // geometry.groups for n in (geometry.in_channels, geometry.out_channels))
    tiles = -(-out_group // tile.block_n)
    channel, column = _fragments(tile.block_n)
    # Axes: group, channel tile, slice, step, 8 channels, place.
    k8 = np.arange(0, tile.slices * tile.slice_channels, 8).reshape(tile.slices, 1, -1, 1)
    channels = k8 + channel
    columns = np.arange(tiles).reshape(-1, 1, 1, 1, 1) * tile.block_n + column
    groups = np.arange(geometry.groups).reshape(-1, 1, 1, 1, 1, 1)
    source = ((groups * in_group + channels) * out_group + columns) * geometry.kernel_volume
    source = source + np.array(indices, np.int64).reshape(-1, 1, 1)
    source = np.where((channels < in_group) & (columns < out_group), source, -1)
    ahead = np.full(tile.ahead * 8 * tile.block_n, -1, np.int32)
    return HaloTables(
        np.array(passes, structure("conv_halo.cu", "Pass")),
        np.array([*program, (0, (0, 0, 0))], structure("conv_halo.cu", "Tap")),
        np.concatenate([source.astype(np.int32).ravel(), ahead]),
        len(indices) * tile.slices * tile.slice_channels * tile.block_n,
        tuple(indices),
        tile,
    )


def _fragments(block_n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Channel (of 8) and column of each of the packed weights that belong together: for each pair of 8 columns
    ``[lane][column block][half of the channels]``, then the same for an odd column block."""
    channels, columns = [], []
    for first in range(0, block_n, 16):
        blocks = min(2, (block_n - first) // 8)
        lane, block, half = np.meshgrid(np.arange(32), np.arange(blocks), np.arange(2), indexing="ij")
        channels.append((lane % 4 + 4 * half).ravel())
        columns.append((first + lane // 4 + 8 * block).ravel())
    return np.concatenate(channels), np.concatenate(columns)
