"""Tile sizes of the two convolution kernels, with their constraints and what they cost.

A tile knows the defines that its kernel is compiled with and the launch sizes that go with them, so that both
come from one place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.backends.cuda.options import TileChoice
from dispatcher.ops.geometry import ConvGeometry

Triple = tuple[int, int, int]
#: A number of things, or an array of such numbers: see :class:`HaloTile`.
Count = Any
Flag = Any

#: Most channels that one block of either kernel holds.
MAX_BLOCK_N = 64
#: Most voxels of a block of ``conv_fma.cu``.
FMA_VOXELS = 64


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
    block_n, thread_n = next(((n, t) for n, t in ((4, 1), (8, 2), (16, 4), (32, 8)) if channels <= n), (MAX_BLOCK_N, 8))
    return FmaTile(FMA_VOXELS if itemsize == 4 else 32, block_n, 16, thread_n, use_fold, itemsize)


@dataclass(frozen=True)
class HaloTile:
    """Tile of ``conv_halo.cu``, or many of them at once: then what distinguishes them is an array in each of the
    fields, and what follows from it is an array too.

    Attributes:
        tile: box of voxels a block owns, ``(z, y, x)``; ``x`` a multiple of 8.
        low: how far the taps reach below the input that a voxel starts from, in inputs; along x in places of a line.
        high: how far they reach above it.
        in_channels: all input channels of a group.
        slice_channels: input channels that are resident at a time, a multiple of ``block_k``.
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
        gather: numbers that a lane keeps of each of its channels, for statistics, and floats of each number.
        step: inputs from one voxel to the next, per axis. A row of inputs is ``step`` lines, by remainder, so that the
            inputs that neighbouring voxels read through one tap are neighbours.
    """

    tile: tuple[Count, Count, Count]
    low: Triple
    high: Triple
    in_channels: int
    slice_channels: Count
    block_n: int
    block_k: Count
    warp_m: Count
    paired: Flag
    steps: int
    softmax: bool
    fold_shared: Flag
    pooled: bool
    ahead: int
    resident: Count
    gather: tuple[int, int] = (0, 1)
    step: Triple = (1, 1, 1)

    def pick(self, which: Any) -> HaloTile:
        """Tile number ``which`` of many; with a mask or several numbers, those."""

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            if not isinstance(value, np.ndarray):
                return value
            return value[which].item() if np.ndim(which) == 0 else value[which]

        return replace(self, **{field.name: part(getattr(self, field.name)) for field in fields(self)})

    @property
    def voxels(self) -> Count:
        """Voxels of a block."""
        return self.tile[0] * self.tile[1] * self.tile[2]

    @property
    def warps(self) -> Count:
        """Warps of a block."""
        return -(-self.voxels // (16 * self.warp_m))

    @property
    def rows(self) -> Count:
        """Voxels that the warps of a block work on; those beyond ``voxels`` are idle."""
        return self.warps * 16 * self.warp_m

    @property
    def threads(self) -> Count:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def slices(self) -> Count:
        """Times that input channels are loaded for one phase."""
        return -(-self.in_channels // self.slice_channels)

    @property
    def chunks(self) -> Count:
        """Times ``block_k`` channels that one tap of a slice takes."""
        return self.slice_channels // self.block_k

    @property
    def pad_x(self) -> int:
        """Floats to the left of a line of x."""
        return -(-self.low[2] // 4) * 4

    @property
    def pitch_x(self) -> Count:
        """Floats from line to line; a right halo may lie in the left zone of the next line."""
        if self.high[2] + self.low[2] <= self.pad_x:
            return self.pad_x + self.tile[2]
        return -(-(self.pad_x + self.tile[2] + self.high[2]) // 4) * 4

    @property
    def rows_y(self) -> Count:
        """Rows of x in a plane of the tile, halo included."""
        return (self.tile[1] - 1) * self.step[1] + 1 + self.low[1] + self.high[1]

    @property
    def rows_z(self) -> Count:
        """Planes of x in the tile, halo included."""
        return (self.tile[0] - 1) * self.step[0] + 1 + self.low[0] + self.high[0]

    @property
    def pitch_c(self) -> Count:
        """Floats from channel to channel: 8 mod 32, which spreads a fragment over all banks."""
        lines = self.rows_y * self.rows_z * self.step[2]
        return (self.pitch_x * lines + self.high[2] + 23) // 32 * 32 + 8

    @property
    def stage_pitch(self) -> Count:
        """Floats from channel to channel where a second pooling reads its 8 channels."""
        return (self.rows + 27) // 32 * 32 + 4

    @property
    def tile_floats(self) -> Count:
        """Shared memory for x; a second pooling's staging takes its place."""
        return np.maximum(self.slice_channels * self.pitch_c, 8 * self.stage_pitch * self.pooled)

    @property
    def sum_floats(self) -> Count:
        """Shared memory for the sums of a softmax."""
        return np.maximum(self.warps * self.block_n, self.threads + 2 * self.block_n) * self.softmax

    @property
    def fold_floats(self) -> Count:
        """Shared memory for what is folded so far."""
        return self.rows * self.block_n * self.fold_shared

    @property
    def gather_floats(self) -> Count:
        """Shared memory for statistics: a lane's numbers of its channels, and a count."""
        numbers, floats = self.gather
        return self.threads * floats * (numbers * self.block_n // 4 + 1) * (numbers > 0)

    @cached_property
    def shared_bytes(self) -> Count:
        """Dynamic shared memory of a block; the taps' offsets lie at the end."""
        floats = self.tile_floats + self.sum_floats + self.fold_floats + self.gather_floats
        size = 4 * (floats + self.steps + 1)
        return size if np.ndim(size) else int(size)

    def shared_offset(self, offset: Triple) -> int:
        """Place in the x tile of the input that voxel 0 reads through a tap at ``offset``."""
        row = (offset[0] + self.low[0]) * self.rows_y + offset[1] + self.low[1]
        x, line = divmod(offset[2], self.step[2])
        return int((row * self.step[2] + line) * self.pitch_x + self.pad_x + x)

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
            "STEP_Z": self.step[0],
            "STEP_Y": self.step[1],
            "STEP_X": self.step[2],
            "IN_CHANNELS": self.in_channels,
            "SLICE_CHANNELS": self.slice_channels,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "WARP_M": self.warp_m,
            "PAIRED": int(self.paired),
            "FOLD_SHARED": int(self.fold_shared),
            "AHEAD": self.ahead,
            "RESIDENT": self.resident,
            "WARPS": self.warps,
            "PAD_X": self.pad_x,
            "PITCH_X": self.pitch_x,
            "PITCH_C": self.pitch_c,
            "STAGE_PITCH": self.stage_pitch,
            "TILE_FLOATS": int(self.tile_floats),
            "SUM_FLOATS": int(self.sum_floats),
            "FOLD_FLOATS": int(self.fold_floats),
            "GATHER_FLOATS": int(self.gather_floats),
        }


@lru_cache
def _boxes() -> tuple[NDArray[np.int64], ...]:
    """Boxes that :func:`halo_tile` considers and groups of 16 voxels a warp: z, y, x, groups. A twentieth of the
    voxels that the warps work on may be idle."""
    eight = range(1, 9)
    every = np.meshgrid([8, 16, 24, 32, 48, 64], eight, eight, [1, 2, 3, 4], indexing="ij")
    x, y, z, groups = (axis.ravel() for axis in every)
    voxels, row = z * y * x, 16 * groups
    wanted = (voxels >= 32) & (voxels <= 512) & (20 * voxels >= 19 * (-(-voxels // row) * row))
    return z[wanted], y[wanted], x[wanted], groups[wanted]


#: Input channels that are resident at a time where not all of them are.
_SLICES = (32, 64, 128)
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


#: Voxels of an axis whose boxes are counted one by one; the rest of a longer one is like them.
_LONG_AXIS = 1 << 20


def registers(threads: Count, resident: Count) -> Count:
    """Registers that each thread may have when ``resident`` blocks share a multiprocessor: each quarter of it
    holds a quarter of the warps."""
    warps = resident * -(-threads // 32)
    return np.minimum(255, 65536 // 4 // (32 * -(-warps // 4)) // 8 * 8)


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
        geometry: the convolution.
        positions: voxels m per axis (of the longest phase, or folded ones).
        pool: box of a second pooling, which must not cross blocks; ones for none.
        folded: all phases are folded to one result.
        softmax: the launch is a pass of a softmax.
        split: three TF32 products instead of one.
        promoted: the sums of each ``block_k`` channels join the result by ordinary additions.
        shared_limit: bytes of shared memory that a block may have.
        processors: multiprocessors of the device.
        wanted: consider only tiles that match this.
        window: elements from which a prologue makes each input.
        gather: see :class:`HaloTile`.
    """

    geometry: ConvGeometry
    positions: Triple
    pool: Triple
    folded: bool
    softmax: bool
    split: bool
    promoted: bool
    shared_limit: int
    processors: int
    wanted: TileChoice | None = None
    window: int = 1
    gather: tuple[int, int] = (0, 1)

    @property
    def paired_phases(self) -> bool:
        """The phases of a line come in pairs that are stored together."""
        width = self.geometry.width
        return not self.folded and width.stride == 2 and width.output > 1

    @property
    def phases(self) -> int:
        """Phases that have outputs."""
        return math.prod(sum(phase.count > 0 for phase in axis.phases) for axis in self.geometry.axes)

    def sums(self, warp_m: Count, block_n: int, paired: Flag, fold_shared: Flag) -> Count:
        """Registers of a thread that hold sums."""
        in_registers = 1 - np.asarray(fold_shared, np.int64) if self.folded else 0
        return warp_m * block_n // 2 * (1 + self.promoted + np.asarray(paired, np.int64) + in_registers)

    def matches(self, tile: HaloTile) -> Flag:
        """Is ``tile`` one that is wanted? Where no phases are folded, ``fold_shared`` says nothing."""
        if self.wanted is None:
            return True
        good: Flag = True
        for extent, number in zip(tile.tile, self.wanted.box, strict=True):
            good = good & (extent == number)
        for name in ("warp_m", "resident", "slice_channels", "paired", "fold_shared"):
            number = getattr(self.wanted, name)
            if number is not None and (self.folded or name != "fold_shared"):
                good = good & (getattr(tile, name) == number)
        return good

    def name(self, tile: HaloTile) -> TileChoice:
        """The choice that only ``tile`` matches, of the tiles for this task."""
        return TileChoice(
            tile.tile,
            tile.warp_m,
            tile.resident,
            tile.slice_channels,
            int(tile.paired) if self.paired_phases else None,
            int(tile.fold_shared) if self.folded else None,
        )

    def holds_windows(self, tile: HaloTile) -> Flag:
        """Are all windows of the second pooling within a block?"""
        good: Flag = True
        for extent, window, count in zip(tile.tile, self.pool, self.positions, strict=True):
            good = good & (extent >= window) & ((extent % window == 0) | (extent >= count))
        return good

    def blocks(self, tile: HaloTile) -> Count:
        """Blocks of the launch."""
        z, y, x = (-(-count // extent) for count, extent in zip(self.positions, tile.tile, strict=True))
        return z * y * x * max(self.geometry.batch, 1) * self.geometry.groups * self.channel_tiles(tile)

    def reads(self, tile: HaloTile) -> float:
        """How often the blocks read each input, on average."""
        total = float(self.fills(tile)) * self.channel_tiles(tile)
        reach = _reach(self.geometry)
        axes = zip(self.geometry.axes, self.positions, tile.tile, reach, strict=True)
        for axis, count, extent, (low, high) in axes:
            inputs = min(axis.input, _LONG_AXIS)
            first = np.arange(0, min(count, _LONG_AXIS), extent)
            last = (first + extent - 1) * axis.step + 1 + high
            inside = np.minimum(last, inputs) - np.maximum(first * axis.step - low, 0)
            total *= np.maximum(inside, 0).sum() / inputs
        return total

    def channel_tiles(self, tile: HaloTile) -> int:
        """Tiles of the output channels of a group."""
        return -(-self.geometry.out_channels // self.geometry.groups // tile.block_n)

    def fills(self, tile: HaloTile) -> Count:
        """Times that a block loads each of its inputs: once, or for each phase where channels come in slices."""
        return np.where(tile.slices > 1, self.phases, 1)


def _reach(geometry: ConvGeometry) -> list[tuple[int, int]]:
    """How far, in inputs, taps reach below and above the input that a voxel starts from, per axis."""
    return [(max(0, -first), max(0, last)) for first, last in (axis.offset_range for axis in geometry.axes)]


def halo_tiles(task: HaloTask) -> HaloTile:
    """All tiles that fit the device and the task."""
    geometry = task.geometry
    step = geometry.depth.step, geometry.height.step, geometry.width.step
    reach = _reach(geometry)
    low, high = zip(*reach[:2], (-(-reach[2][0] // step[2]), reach[2][1] // step[2]), strict=True)
    steps = math.prod(sum(phase.count > 0 and len(phase.taps) for phase in axis.phases) for axis in geometry.axes)
    n = block_n(geometry.out_channels // geometry.groups)
    channels = geometry.in_channels // geometry.groups
    other = _OTHER_REGISTERS + (_SOFTMAX_REGISTERS if task.softmax else 0)
    z, y, x, warp_m = _boxes()
    if task.wanted is not None:
        box_z, box_y, box_x = task.wanted.box
        wanted = (z == box_z) & (y == box_y) & (x == box_x)
        z, y, x, warp_m = z[wanted], y[wanted], x[wanted], warp_m[wanted]
    box, slice_channels, paired, shared, resident = (
        axis.ravel()
        for axis in np.meshgrid(
            np.arange(len(z)),
            [0, *(slice_ for slice_ in _SLICES if slice_ < channels)],
            [True, False] if task.paired_phases else [False],
            [False, True] if task.folded else [False],
            [1, 2, 3, 4],
            indexing="ij",
        )
    )
    z, y, x, warp_m = z[box], y[box], x[box], warp_m[box]
    sums = task.sums(warp_m, n, paired, shared)
    available = registers(32 * -(-z * y * x // (16 * warp_m)), resident)
    deep = sums + _DEEP_REGISTERS + n <= available
    whole = np.where(deep, block_k(channels, 32), block_k(channels, 16))
    k = np.where(slice_channels > 0, np.where(deep, 32, 16), whole)
    slice_channels = np.where(slice_channels > 0, slice_channels, -(-channels // k) * k)
    tiles = HaloTile(
        (z, y, x), low, high, channels, slice_channels,
        n, k, warp_m, paired, steps, task.softmax, shared, task.pool != (1, 1, 1), _AHEAD, resident,
        task.gather, step,
    )  # fmt: skip
    fits = (sums + other <= available) & (tiles.threads <= 1024) & task.holds_windows(tiles)
    fits &= task.matches(tiles)
    fits &= resident * (tiles.shared_bytes + _RESERVED_BYTES) <= task.shared_limit + _RESERVED_BYTES
    # Where taps reach so far that those sizes overflow, not even 8 channels of one voxel and its halo fit.
    halo = step[2] * math.prod(1 + below + above for below, above in zip(low, high, strict=True))
    fits &= 4 * 8 * halo <= task.shared_limit
    return tiles.pick(fits & (task.blocks(tiles) < 2**31))


def halo_tile(task: HaloTask) -> HaloTile | None:
    """The tile with the lowest estimated time, or None when none fits."""
    tiles = halo_tiles(task)
    cycles = launch_cycles(task, tiles)
    return tiles.pick(int(np.argmin(cycles))) if cycles.size else None


def estimates(task: HaloTask) -> Iterator[tuple[HaloTile, float]]:
    """All tiles that can be used, each with the cycles that the whole launch is estimated to take."""
    tiles = halo_tiles(task)
    for number, cycles in enumerate(launch_cycles(task, tiles)):
        yield tiles.pick(number), float(cycles)


def launch_cycles(task: HaloTask, tile: HaloTile) -> NDArray[np.float64]:
    """Cycles that the whole launch is estimated to take."""
    waves = task.blocks(tile) / (task.processors * tile.resident)
    waves = np.where(waves < 4, np.ceil(waves), waves)
    return np.asarray(estimated_cycles(task, tile) * waves, np.float64)


@dataclass(frozen=True)
class Costs:
    """Costs of ``conv_halo.cu`` in cycles, fitted to measured times; ``python bench/cuda_model.py`` says how well they
    fit, and fits them anew.

    Attributes:
        product_cycles: one m16n8k8 on a quarter of a multiprocessor.
        epilogue_cycles: what follows a sum, for 32 lanes, on a quarter.
        store_cycles: a float to memory.
        half_sectors: times that, where the two phases of a line are stored one after the other.
        load_cycles: a float from memory, less where blocks share a multiprocessor.
        latency_cycles: a warp that is alone takes 1 + this many times as long.
        few_warps: blocks of fewer than four warps.
        wanted_registers: besides sums; each one that is missing costs the share ``shortage`` of the time.
        shortage: see ``wanted_registers``.
        fill_cycles: until a slice of channels is there, where they come in slices.
        hidden_reads: share of the reads of a prologue's windows, beyond one an input, that other blocks' products hide.
    """

    product_cycles: float
    epilogue_cycles: float
    store_cycles: float
    half_sectors: float
    load_cycles: float
    latency_cycles: float
    few_warps: float
    wanted_registers: float
    shortage: float
    fill_cycles: float
    hidden_reads: float


#: The file says on which device they were fitted, when, by which program, and which of them are guesses.
COSTS = Costs(**json.loads((Path(__file__).parent / "costs.json").read_text(encoding="utf-8"))["costs"])


def estimated_cycles(task: HaloTask, tile: HaloTile) -> Any:
    """Cycles in which a multiprocessor finishes ``tile.resident`` blocks.

    Tensor cores, first-level cache and instructions bound the main loop together (a 3-norm of their times).
    """
    columns, warps = tile.block_n / 8, tile.resident * tile.warps
    in_quarter = np.ceil(warps / 4)
    k8 = tile.steps * tile.slices * tile.slice_channels / 8
    products = tile.warp_m * columns * (3 if task.split else 1)
    fragments = 4 * tile.warp_m, 2 * columns  # floats of x and weights that a lane reads
    tensor = k8 * products * in_quarter * COSTS.product_cycles
    cache = k8 * sum(fragments) * warps
    instructions = products + fragments[0] + fragments[1] / 4
    if task.split:
        instructions = instructions + 3 * sum(fragments)
    if task.promoted:
        instructions = instructions + tile.warp_m * columns * 32 / tile.block_k
    loop = np.cbrt(tensor**3 + cache**3 + (k8 * instructions * in_quarter) ** 3)
    loop = loop + task.phases * tile.warp_m * columns * 4 * in_quarter * COSTS.epilogue_cycles
    sums = task.sums(tile.warp_m, tile.block_n, tile.paired, tile.fold_shared)
    missing = np.maximum(0, sums + COSTS.wanted_registers - registers(tile.threads, tile.resident))
    loop = loop * (1 + COSTS.latency_cycles / warps) * (1 + COSTS.shortage * missing)
    loop = loop * np.where(tile.threads < 128, COSTS.few_warps, 1)
    stores: Any = 0.0
    if not task.folded:
        stores = tile.voxels * tile.block_n * task.phases * tile.resident * COSTS.store_cycles
        if task.paired_phases:
            stores = stores * np.where(tile.paired, 1, COSTS.half_sectors)
    sectors = tile.step[2] * tile.tile[2] + 8 * (tile.low[2] > 0) + 8 * (tile.high[2] > 0)
    loads = tile.rows_y * tile.rows_z * sectors * tile.slices * tile.slice_channels * COSTS.load_cycles
    loads = loads * task.fills(tile) * np.sqrt(tile.resident)
    fills = np.where(tile.slices > 1, task.fills(tile) * tile.slices * COSTS.fill_cycles, 0)
    first_loads = loads * (1 + (1 - COSTS.hidden_reads) * (task.window - 1))
    if tile.softmax:  # the second pass reads what the first one made of the windows
        return 2 * (loop + fills) + stores + first_loads + loads
    return loop + fills + stores + first_loads
