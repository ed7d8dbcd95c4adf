"""Tile sizes of the two convolution kernels, with their constraints and what they cost.

A tile knows the defines that its kernel is compiled with and the launch sizes that go with them, so that both
come from one place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
        block_n: output channels of a block, a multiple of 8.
        block_k: input channels whose products are added up before they join the result, a multiple of 8.
        warp_m: groups of 16 voxels that a warp owns.
        paired: a warp makes two phases that are neighbours along W before it stores them.
        steps: taps of all phases.
        softmax: the kernel is one of the two passes of a softmax.
        fold_shared: what is folded so far lies in shared memory, not in registers.
        pooled: a second pooling follows, which goes through shared memory.
        ahead: how many times 8 channels of weights are read before they are used.
        resident: blocks that share a multiprocessor; the compiler limits registers so that they can.
    """

    tile: Triple
    low: Triple
    high: Triple
    in_channels: int
    block_n: int
    block_k: int
    warp_m: int
    paired: bool
    steps: int
    softmax: bool
    fold_shared: bool
    pooled: bool
    ahead: int
    resident: int

    @property
    def voxels(self) -> int:
        """Voxels of a block."""
        return math.prod(self.tile)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.voxels // (16 * self.warp_m)

    @property
    def chunks(self) -> int:
        """Times ``block_k`` channels that one tap takes."""
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
        x = self.chunks * self.block_k * self.pitch_c
        staging = 8 * ((self.voxels + 27) // 32 * 32 + 4) if self.pooled else 0
        sums = max(self.threads // 32 * self.block_n, self.threads + 2 * self.block_n) if self.softmax else 0
        fold = self.voxels * self.block_n if self.fold_shared else 0
        return 4 * (max(x, staging) + sums + fold + self.steps + 1)

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
            "PAIRED": int(self.paired),
            "FOLD_SHARED": int(self.fold_shared),
            "AHEAD": self.ahead,
            "RESIDENT": self.resident,
        }


#: Boxes that :func:`halo_tile` considers, ``(z, y, x)`` and groups of 16 voxels a warp.
_BOXES: tuple[tuple[Triple, int], ...] = tuple(
    ((z, y, x), warp_m)
    for x in (8, 16, 24, 32, 48, 64)
    for y in (1, 2, 3, 4, 5, 6, 7, 8)
    for z in (1, 2, 3, 4, 5, 6, 7, 8)
    for warp_m in (1, 2, 3, 4)
    if z * y * x % (16 * warp_m) == 0 and 32 <= z * y * x <= 512
)

#: Times 8 channels of weights that are read ahead: the latency of the L2 cache.
_AHEAD = 1
#: Registers of a thread that hold no sums: addresses, and the fragments of 8 channels.
_OTHER_REGISTERS = 40
#: The same where the products of 24 or 32 channels are unrolled, for which more fragments are under way at a time: so
#: many, and one for each channel of the block.
_DEEP_REGISTERS = 66
#: And those of a softmax pass: its sums and exponentials.
_SOFTMAX_REGISTERS = 24
#: Shared memory of a multiprocessor that the driver keeps for each block.
_RESERVED_BYTES = 1024


def registers(threads: int, resident: int) -> int:
    """Registers that each thread may have when ``resident`` blocks share a multiprocessor: each quarter of it
    holds a quarter of the warps."""
    warps = resident * -(-threads // 32)
    return min(255, 65536 // 4 // (32 * -(-warps // 4)) // 8 * 8)


def block_k(channels: int, largest: int) -> int:
    """Channels that are added up at a time: as many as can be, up to ``largest``, without more padding than with 8."""
    return min((-(-channels // k) * k, -k) for k in range(8, largest + 1, 8))[1] * -1


def block_n(channels: int) -> int:
    """Output channels of a block: all where they fit, else equal shares."""
    return -(-channels // (-(-channels // MAX_BLOCK_N)) // 8) * 8


@dataclass(frozen=True)
class HaloTask:
    """What a launch of ``conv_halo.cu`` has to do, and on what.

    Attributes:
        geometry: the convolution, without groups.
        positions: voxels m per axis (of the longest phase, or folded ones).
        pool: box of a second pooling, which must not cross blocks; ones for none.
        folded: all phases are folded to one result.
        softmax: the launch is a pass of a softmax.
        split: three TF32 products instead of one.
        shared_limit: bytes of shared memory that a block may have.
        processors: multiprocessors of the device.
        box: consider this box only.
    """

    geometry: ConvGeometry
    positions: Triple
    pool: Triple
    folded: bool
    softmax: bool
    split: bool
    shared_limit: int
    processors: int
    box: Triple | None = None

    @property
    def paired_phases(self) -> bool:
        """The phases of a line come in pairs that are stored together."""
        width = self.geometry.width
        return not self.folded and width.stride == 2 and width.output > 1

    def sums(self, warp_m: int, block_n: int, paired: bool, fold_shared: bool) -> int:
        """Registers of a thread that hold sums."""
        return warp_m * block_n // 2 * (1 + self.split + paired + (self.folded and not fold_shared))

    def blocks(self, tile: HaloTile) -> int | None:
        """Blocks of the launch, or None where the tile does not go with the task's second pooling."""
        extents = list(zip(tile.tile, self.pool, self.positions, strict=True))
        if any(extent < window or (extent % window and extent < count) for extent, window, count in extents):
            return None
        boxes = math.prod(-(-count // extent) for extent, _, count in extents)
        return boxes * max(self.geometry.batch, 1) * -(-self.geometry.out_channels // tile.block_n)


def halo_tiles(task: HaloTask) -> Iterator[HaloTile]:
    """All tiles that fit the device."""
    geometry = task.geometry
    reach = [axis.offset_range for axis in geometry.axes]
    low = tuple(max(0, -first) for first, _ in reach)
    high = tuple(max(0, last) for _, last in reach)
    steps = math.prod(
        sum(phase.count > 0 and len(phase.taps) for phase in axis.phases) for axis in geometry.axes
    )
    n = block_n(geometry.out_channels)
    other = _OTHER_REGISTERS + (_SOFTMAX_REGISTERS if task.softmax else 0)
    pairs = (True, False) if task.paired_phases else (False,)
    shares = (False, True) if task.folded else (False,)
    for (extents, warp_m), paired, shared, resident in itertools.product(_BOXES, pairs, shares, (1, 2, 3, 4)):
        if task.box is not None and task.box != extents:
            continue
        sums = task.sums(warp_m, n, paired, shared)
        available = registers(2 * math.prod(extents) // warp_m, resident)
        if sums + other > available:
            continue
        k = block_k(geometry.in_channels, 32 if sums + _DEEP_REGISTERS + n <= available else 16)
        tile = HaloTile(
            extents, (low[0], low[1], low[2]), (high[0], high[1], high[2]), geometry.in_channels,
            n, k, warp_m, paired, steps, task.softmax, shared, task.pool != (1, 1, 1), _AHEAD, resident,
        )  # fmt: skip
        shared_bytes = resident * (tile.shared_bytes + _RESERVED_BYTES)
        if tile.threads <= 1024 and shared_bytes <= task.shared_limit + _RESERVED_BYTES:
            yield tile


def halo_tile(task: HaloTask) -> HaloTile | None:
    """The tile with the lowest estimated time, or None when none fits."""
    return min(estimates(task), key=lambda item: item[1], default=(None, 0.0))[0]


def estimates(task: HaloTask) -> Iterator[tuple[HaloTile, float]]:
    """All tiles that can be used, each with the cycles that the whole launch is estimated to take."""
    for tile in halo_tiles(task):
        blocks = task.blocks(tile)
        if blocks is not None and blocks < 2**31:
            waves = blocks / (task.processors * tile.resident)
            waves = math.ceil(waves) if waves < 4 else waves
            yield tile, estimated_cycles(task, tile) * waves


#: Costs in cycles, fitted to 148 tiles of the five problems timed on an H200: see bench/cuda_tiles.py. The estimates
#: were within 9 % of the times (root mean square), and the tile with the lowest one at most 19 % slower than the best.
_PRODUCT_CYCLES = 7.2  # one m16n8k8 on a quarter of a multiprocessor
_EPILOGUE_CYCLES = 22.0  # what follows a sum, for 32 lanes, on a quarter
_STORE_CYCLES = 0.62  # a float to memory
_HALF_SECTORS = 1.75  # times that, where the two phases of a line are stored one after the other
_LOAD_CYCLES = 0.44  # a float from memory, less where blocks share a multiprocessor
_LATENCY_CYCLES = 1.1  # a warp that is alone takes 1 + this many times as long
_FEW_WARPS = 1.15  # blocks of fewer than four warps, of which none was timed: a guess that they are no better
_WANTED_REGISTERS = 82  # besides sums; each one that is missing costs this share of the time:
_SHORTAGE = 0.0033


def estimated_cycles(task: HaloTask, tile: HaloTile) -> float:
    """Cycles in which a multiprocessor finishes ``tile.resident`` blocks.

    Tensor cores, first-level cache and instructions bound the main loop together (a 3-norm of their times).
    """
    columns, warps = tile.block_n / 8, tile.resident * tile.threads / 32
    in_quarter = math.ceil(warps / 4)
    k8 = tile.steps * tile.chunks * tile.block_k / 8
    products = tile.warp_m * columns * (3 if task.split else 1)
    fragments = 4 * tile.warp_m, 2 * columns  # floats of x and weights that a lane reads
    tensor = k8 * products * in_quarter * _PRODUCT_CYCLES
    cache = k8 * sum(fragments) * warps
    instructions = products + fragments[0] + fragments[1] / 4
    if task.split:
        instructions += 3 * sum(fragments) + tile.warp_m * columns * 32 / tile.block_k
    loop = float(np.linalg.norm((tensor, cache, k8 * instructions * in_quarter), 3))
    phases = math.prod(sum(phase.count > 0 for phase in axis.phases) for axis in task.geometry.axes)
    loop += phases * tile.warp_m * columns * 4 * in_quarter * _EPILOGUE_CYCLES
    sums = task.sums(tile.warp_m, tile.block_n, tile.paired, tile.fold_shared)
    missing = max(0, sums + _WANTED_REGISTERS - registers(tile.threads, tile.resident))
    loop *= (1 + _LATENCY_CYCLES / warps) * (1 + _SHORTAGE * missing)
    if tile.threads < 128:
        loop *= _FEW_WARPS
    stores = 0.0 if task.folded else tile.voxels * tile.block_n * phases * tile.resident * _STORE_CYCLES
    if task.paired_phases and not tile.paired:
        stores *= _HALF_SECTORS
    sectors = tile.tile[2] + 8 * (tile.low[2] > 0) + 8 * (tile.high[2] > 0)
    loads = tile.rows_y * tile.rows_z * sectors * tile.chunks * tile.block_k * _LOAD_CYCLES
    loads *= math.sqrt(tile.resident)
    return loop * (2 if tile.softmax else 1) + stores + loads * (2 if tile.softmax else 1)
