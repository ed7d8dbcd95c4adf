"""Tile sizes of the two convolution kernels, with their constraints and what they cost.

A tile knows the defines that its kernel is compiled with and the launch sizes that go with them, so that both
come from one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dispatcher.geometry import ConvGeometry

Triple = tuple[int, int, int]

#: Most channels that one block of either kernel holds.
MAX_BLOCK_N = 64


@dataclass(frozen=True)
class FmaTile:
    """Tile of ``conv_fma.cu``.

    Attributes:
        block_m: voxels of a block, a multiple of 32.
        block_n: channels of a block.
        block_k: pairs of tap and channel that are loaded together.
        thread_n: channels of a thread; a thread has 4 voxels. ``4 * block_n / thread_n`` must be a multiple
        of 4, so
            that every voxel has a thread of its own in the epilogue.
        use_fold: a second set of results, for pooling over the phases.
        itemsize: bytes of a computed value.
    """

    block_m: int
    block_n: int
    block_k: int
    thread_n: int
    use_fold: bool
    itemsize: int

    THREAD_M = 4

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.THREAD_M * (self.block_n // self.thread_n)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        operands = self.block_k * (self.block_m + self.block_n)
        results = self.block_m * self.block_n * (2 if self.use_fold else 1)
        return (operands + results + self.threads) * self.itemsize

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's defines."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "THREAD_M": self.THREAD_M,
            "THREAD_N": self.thread_n,
            "USE_FOLD": int(self.use_fold),
        }


def fma_tile(channels: int, itemsize: int, use_fold: bool) -> FmaTile:
    """The tile for ``channels`` output channels a group; it fits 48 KB of shared memory."""
    block_n, thread_n = next(
        ((n, t) for n, t in ((4, 1), (8, 2), (16, 4), (32, 8)) if channels <= n), (MAX_BLOCK_N, 8)
    )
    return FmaTile(64 if itemsize == 4 else 32, block_n, 16, thread_n, use_fold, itemsize)


@dataclass(frozen=True)
class HaloTile:
    """Tile of ``conv_halo.cu``.

    Attributes:
        tile: box of voxels a block owns, ``(z, y, x)``; ``x`` a multiple of 8, the volume of ``16 * warp_m``.
        low: how far the taps reach below a voxel, per axis.
        high: how far they reach above it.
        in_channels: all input channels; they are resident.
        block_n: output channels of a block, a multiple of 16.
        block_k: input channels of one step of the weight ring, a multiple of 8.
        warp_m: groups of 16 voxels that a warp owns.
        phase_groups: 2 where the two phases of a line meet in one store, else 1.
        stages: buffers of the weight ring.
        steps: rows of the tap program.
        softmax: the kernel is one of the two passes of a softmax.
        resident: blocks that share a multiprocessor; the compiler limits registers so that they can.
    """

    tile: Triple
    low: Triple
    high: Triple
    in_channels: int
    block_n: int
    block_k: int
    warp_m: int
    phase_groups: int
    stages: int
    steps: int
    softmax: bool
    resident: int = 1

    @property
    def voxels(self) -> int:
        """Voxels of a block."""
        return math.prod(self.tile)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.voxels // (16 * self.warp_m) * self.phase_groups

    @property
    def chunks(self) -> int:
        """Steps of ``block_k`` channels that one tap takes."""
        return -(-self.in_channels // self.block_k)

    @property
    def pad_x(self) -> int:
        """Floats to the left of a line of x."""
        return -(-self.low[2] // 4) * 4

    @property
    def pitch_x(self) -> int:
        """Floats from line to line; a right halo may lie in the left zone of the next line."""
        if self.high[2] + self.low[2] <= self.pad_x:
            return self.pad_x + self.tile[2]
        return -(-(self.pad_x + self.tile[2] + self.high[2]) // 4) * 4

    @property
    def rows_y(self) -> int:
        """Lines of x in a plane of the tile, halo included."""
        return self.tile[1] + self.low[1] + self.high[1]

    @property
    def rows_z(self) -> int:
        """Planes of x in the tile, halo included."""
        return self.tile[0] + self.low[0] + self.high[0]

    @property
    def pitch_c(self) -> int:
        """Floats from channel to channel: 8 mod 32, which spreads a fragment over all banks."""
        return (self.pitch_x * self.rows_y * self.rows_z + self.high[2] + 23) // 32 * 32 + 8

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stage_voxels = self.voxels if self.voxels % 32 == 16 else self.voxels + 16
        staging = 8 * ((self.phase_groups * stage_voxels + 27) // 32 * 32 + 4)
        ring = self.stages * self.phase_groups * self.block_k * self.block_n
        softmax = self.threads + self.block_n + self.threads // 32 * self.block_n if self.softmax else 0
        program = self.steps * self.phase_groups
        return 4 * (self.chunks * self.block_k * self.pitch_c + ring + staging + softmax + program)

    def shared_offset(self, offset: Triple) -> int:
        """Place in the x tile of the input that voxel 0 reads through a tap at ``offset``."""
        z, y, x = (o + low for o, low in zip(offset, (self.low[0], self.low[1], self.pad_x), strict=True))
        return (z * self.rows_y + y) * self.pitch_x + x

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's defines that follow from the tile."""
        return {
            "TILE_Z": self.tile[0],
            "TILE_Y": self.tile[1],
            "TILE_X": self.tile[2],
            "LOW_Z": self.low[0],
            "LOW_Y": self.low[1],
            "LOW_X": self.low[2],
            "HIGH_Z": self.high[0],
            "HIGH_Y": self.high[1],
            "HIGH_X": self.high[2],
            "IN_CHANNELS": self.in_channels,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "WARP_M": self.warp_m,
            "PHASE_GROUPS": self.phase_groups,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
        }


#: Boxes that :func:`halo_tile` considers, ``(z, y, x)`` and groups of 16 voxels a warp.
_BOXES: tuple[tuple[Triple, int], ...] = tuple(
    ((z, y, x), warp_m)
    for x in (8, 16, 24, 32, 48, 64)
    for y in (1, 2, 3, 4, 6, 8)
    for z in (1, 2, 3, 4, 6, 8)
    for warp_m in (1, 2, 4)
    if z * y * x % (16 * warp_m) == 0 and 32 <= z * y * x <= 512
)

#: Registers that a thread needs besides its accumulators.
_OTHER_REGISTERS = 40
#: And those of a softmax pass: sums and exponentials.
_SOFTMAX_REGISTERS = 64
#: Registers of the folded results that may lie in local memory where a second pooling asks for an odd box: they
#: are touched once a phase.
_SPILLED_REGISTERS = 64


def _registers(threads: int) -> int:
    """Registers that each thread of a block may have: a quarter of a multiprocessor holds a quarter of its
    warps."""
    return min(255, 65536 // 4 // (32 * -(-threads // 128)) // 8 * 8)


def halo_tile(
    geometry: ConvGeometry,
    positions: Triple,
    pool: Triple,
    *,
    folded: bool,
    softmax: bool,
    split: bool,
    shared_limit: int,
    processors: int,
    box: Triple | None = None,
) -> HaloTile | None:
    """The box with the lowest estimated time, or None when none fits.

    Args:
        geometry: the convolution, without groups.
        positions: voxels m per axis (of the longest phase, or folded ones).
        pool: box of a second pooling, which must not cross blocks; ones for none.
        folded: all phases are folded to one result.
        softmax: the kernel is a pass of a softmax.
        split: three TF32 products instead of one.
        shared_limit: bytes of shared memory that a block may have.
        processors: multiprocessors of the device.
        box: consider this box only.
    """
    reach = [axis.offset_range for axis in geometry.axes]
    low = tuple(max(0, -first) for first, _ in reach)
    high = tuple(max(0, last) for _, last in reach)
    groups = 2 if not folded and geometry.width.stride == 2 and geometry.width.output > 1 else 1
    phases = [[phase for phase in axis.phases if phase.count] for axis in geometry.axes]
    steps = sum(len(z.taps) * len(y.taps) for z in phases[0] for y in phases[1])
    if groups == 2:
        steps *= max(len(phase.taps) for phase in phases[2])
    else:
        steps *= sum(len(phase.taps) for phase in phases[2])
    phase_count = math.prod(len(axis) for axis in phases)
    block_n = min(MAX_BLOCK_N, -(-geometry.out_channels // 16) * 16)
    tiles = -(-geometry.out_channels // block_n)

    def candidates() -> Iterator[tuple[float, HaloTile]]:
        for (z, y, x), warp_m in _BOXES:
            if box is not None and box != (z, y, x):
                continue
            tile = HaloTile(
                (z, y, x), (low[0], low[1], low[2]), (high[0], high[1], high[2]),
                geometry.in_channels, block_n,
                16 if geometry.in_channels > 8 else 8, warp_m, groups, 3, steps, softmax,
            )  # fmt: skip
            results = warp_m * block_n // 2
            registers = _registers(tile.threads) - _OTHER_REGISTERS - (_SOFTMAX_REGISTERS if softmax else 0)
            if results * (1 + split) > registers:
                continue
            spilled = _SPILLED_REGISTERS if pool != (1, 1, 1) else 0
            if results * (1 + split + folded) > registers + spilled or (softmax and warp_m > 2):
                continue
            if tile.threads > 1024 or tile.shared_bytes > shared_limit:
                continue
            crossing = any(
                extent % window and extent < count
                for extent, window, count in zip(tile.tile, pool, positions, strict=True)
            )
            if crossing or any(extent < window for extent, window in zip(tile.tile, pool, strict=True)):
                continue
            boxes = math.prod(-(-count // extent) for count, extent in zip(positions, tile.tile, strict=True))
            blocks = boxes * max(geometry.batch, 1) * tiles
            if blocks >= 2**31:
                continue
            # Costs in multiply-adds of a tensor core, of which some 600 go by while 3 floats come from or go
            # to memory.
            products = (
                tile.voxels * steps * groups * tile.chunks * tile.block_k * block_n * (3 if split else 1)
            )
            sectors = x + 8 * (low[2] > 0) + 8 * (high[2] > 0)
            loads = tile.rows_y * tile.rows_z * sectors * tile.chunks * tile.block_k
            stores = tile.voxels * block_n * (1 if folded else phase_count) * (1 + 8 / (x * groups))
            warps = tile.threads / 32
            resident = max(1, min(shared_limit // max(tile.shared_bytes, 1), int(16 / warps)))
            busy = min(1.0, resident * warps / 8)
            fragments = 0.5 if warp_m == 1 else 0.25 if warp_m == 2 else 0.15  # reads of weights a product
            block_time = products * (1 + fragments) / busy + 100 * loads + 200 * stores + 200000 / busy
            waves = max(1.0, blocks / (processors * resident))
            yield block_time * waves * resident, tile

    return min(candidates(), key=lambda item: item[0], default=(0.0, None))[1]
