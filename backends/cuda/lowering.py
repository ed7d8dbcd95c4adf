"""From an operator to launches: the plan, the kernels with their defines, and their parameters with holes for
pointers.

A launch's parameters are one C structure. Its layout stands here once more as a NumPy dtype; the kernels
check the size. Pointers are filled in at each call, since a caller's tensors may live anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dispatcher.backends.cuda import chains
from dispatcher.backends.cuda import prologue as prologues
from dispatcher.backends.cuda.convolution import fma_tables, halo_tables
from dispatcher.backends.cuda.epilogue import Epilogue
from dispatcher.backends.cuda.fusion import CudaFusion, Target, positions_of
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.prologue import NO_PROLOGUE, Prologue
from dispatcher.backends.cuda.tiles import FmaTile, fma_tile, halo_tile
from dispatcher.backends.cuda.toolkit import Kernel
from dispatcher.interface import PlannedLaunch
from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Shape,
    Softmax,
    Step,
    TensorOperand,
    ValueOperand,
)
from dispatcher.plan.planner import Segment, plan
from dispatcher.problem.operator import Operator

MAX_GRID = 2**31 - 1
_GENERAL_BLOCK = 256

_C_TYPES = {"float16": "half_t", "float32": "float", "float64": "double"}
_STAGE = np.dtype([("a_channels", "u8"), ("b_channels", "u8"), ("a", "f8"), ("b", "f8")], align=True)
_PACK = np.dtype([("weight", "u8"), ("packed", "u8"), ("order", "u8"), ("count", "i8")], align=True)
_OPERAND = np.dtype(
    [("data", "u8"), ("number", "f8"), ("stride", "i8", 5), ("wide", "i4"), ("pad", "i4")], align=True
)
_ELEMENTWISE = np.dtype(
    [("x", _OPERAND), ("a", _OPERAND), ("b", _OPERAND), ("y", "u8"), ("count", "i8"), ("extent", "i4", 5),
     ("operation", "i4")],
    align=True,
)  # fmt: skip
_POOL = np.dtype(
    [("x", "u8"), ("y", "u8"), ("count", "i8"), ("in", "i4", 3), ("out", "i4", 3), ("window", "i4", 3),
     ("maximum", "i4")],
    align=True,
)  # fmt: skip
_AXES = np.dtype([("extent", "i8", 6), ("stride", "i8", 6), ("rank", "i4"), ("pad", "i4")], align=True)
_ROWS = np.dtype(
    [("x", "u8"), ("y", "u8"), ("weight", "u8"), ("bias", "u8"), ("row", _AXES), ("item", _AXES),
     ("rows", "i8"), ("items", "i8"), ("channel_stride", "i8"), ("eps", "f8"), ("channels", "i4"),
     ("function", "i4")],
    align=True,
)  # fmt: skip
_CONV = np.dtype(
    [("x", "u8"), ("w", "u8"), ("bias", "u8"), ("y", "u8"), ("phases", "u8"), ("slots", "u8"),
     ("terms", "u8"), ("voxels", "i8"), ("tiles", "i8"), ("first_chain", "u8"), ("second_chain", "u8"),
     ("phase_count", "i8"), ("groups", "i4"), ("in_channels", "i4"), ("out_channels", "i4"),
     ("padded_channels", "i4"), ("channel_tiles", "i4"), ("term_count", "i4"), ("in", "i4", 3),
     ("positions", "i4", 3), ("out", "i4", 3), ("stride", "i4", 3), ("residues", "i4", 3),
     ("axis_slots", "i4", 3), ("fold_maximum", "i4"), ("channel_sum", "i4"),
     ("stages", _STAGE, 2 * chains.MAX_STAGES)],
    align=True,
)  # fmt: skip
_HALO = np.dtype(
    [("x", "u8"), ("w", "u8"), ("bias", "u8"), ("y", "u8"), ("partial", "u8"), ("kept", "u8"),
     ("passes", "u8"), ("taps", "u8"), ("tile_weights", "i8"), ("pass_count", "i4"), ("step_count", "i4"),
     ("source", "i4", 3), ("in", "i4", 3), ("out", "i4", 3), ("limit", "i4", 3),
     ("stride", "i4", 3), ("tiles", "i4", 3), ("pair_stores", "i4"), ("softmax_bound", "f4"),
     ("stages", _STAGE, 4 * chains.MAX_STAGES)],
    align=True,
)  # fmt: skip
_ROW_FUNCTIONS = {"normalize": 0, "softmax": 1, "sum": 2, "mean": 3, "max": 4, "log_sum_exp": 5}


@dataclass(frozen=True)
class Reference:
    """What a pointer in a launch's parameters points to.

    Kinds: ``tensor`` a tensor argument, by name; ``value`` a value of the pipeline, by index; ``table`` a
    table of the program, ``packed`` its packed weights and ``scratch`` its scratch memory, by number.
    """

    kind: Literal["tensor", "value", "table", "packed", "scratch"]
    key: str | int


Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        name: of the kernel function.
        kernel: file and defines.
        blocks: launch size; the grid has one axis only, whose limit is 2^31 - 1.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        parameters: the structure, pointers zero.
        pointers: where the pointers go, and what they point to.
    """

    name: str
    kernel: Kernel
    blocks: int
    threads: int
    shared_bytes: int
    parameters: NDArray[np.void]
    pointers: tuple[tuple[Path, Reference], ...]


@dataclass(frozen=True)
class PackedWeight:
    """A weight tensor in a convolution's order, ``elements`` computed values; ``launch`` makes it."""

    tensor: str
    elements: int
    launch: Launch


@dataclass
class Program:
    """All that running an operator needs, apart from a device.

    Attributes:
        launches: in order.
        planned: the same for people.
        tables: constant device memory.
        packed: weights to pack once.
        scratch_bytes: scratch memory blocks.
    """

    operator: Operator
    launches: list[Launch] = field(default_factory=list)
    planned: list[PlannedLaunch] = field(default_factory=list)
    tables: list[NDArray[Any]] = field(default_factory=list)
    packed: list[PackedWeight] = field(default_factory=list)
    scratch_bytes: list[int] = field(default_factory=list)

    def value_itemsize(self, index: int) -> int:
        """Bytes of an element of value ``index``."""
        return np.dtype(
            self.operator.dtype if index in (0, len(self.operator.steps)) else self.compute
        ).itemsize

    def value_bytes(self, index: int) -> int:
        """Bytes of value ``index``."""
        return math.prod(self.operator.steps[index - 1].shape) * self.value_itemsize(index)

    @property
    def compute(self) -> str:
        """The dtype that sums and values between launches have."""
        return "float64" if self.operator.dtype == "float64" else "float32"

    @property
    def values(self) -> tuple[int, ...]:
        """Values between launches: those that some launch writes, apart from the result."""
        written = {
            reference.key
            for launch in self.launches
            for path, reference in launch.pointers
            if reference.kind == "value" and path == ("y",)
        }
        return tuple(sorted(int(key) for key in written - {len(self.operator.steps)}))


def lower(operator: Operator, target: Target, options: Options) -> Program:
    """Plan ``operator`` for ``target`` and make its launches.

    Raises:
        InputError: the options name a tile that does not fit.
    """
    return _Lowering(operator, target, options).program


class _Lowering:
    def __init__(self, operator: Operator, target: Target, options: Options) -> None:
        self.operator, self.target = operator, target
        self.fusion = CudaFusion(operator, target, options)
        self.program = Program(operator)
        for segment in plan(operator, self.fusion):
            if segment.convolution is None:
                self.single(segment)
            else:
                self.convolution(segment)

    # ---- shared parts --------------------------------------------------------------------------------------
    def defines(
        self, parameters: np.dtype[Any], source: int | None, result: int | None
    ) -> dict[str, int | str]:
        """Defines that every kernel has: element types, and the size of its parameters."""
        compute = _C_TYPES[self.program.compute]
        storage = _C_TYPES[self.operator.dtype]
        last = len(self.operator.steps)
        return {
            "STORAGE": storage,
            "COMPUTE": compute,
            "INPUT": storage if source in (0, None) else compute,
            "OUTPUT": storage if result in (last, None) else compute,
            "PARAMS_BYTES": parameters.itemsize,
        }

    def table(self, content: NDArray[Any]) -> Reference:
        self.program.tables.append(content)
        return Reference("table", len(self.program.tables) - 1)

    def scratch(self, size: int) -> Reference:
        self.program.scratch_bytes.append(size)
        return Reference("scratch", len(self.program.scratch_bytes) - 1)

    def value(self, index: int) -> Reference:
        return Reference("tensor", self.operator.source) if index == 0 else Reference("value", index)

    def pack(self, tensor: str, order: NDArray[np.int32], use_tf32: bool) -> Reference:
        if order.size == 0:
            order = np.full(1, -1, np.int32)
        number = len(self.program.packed)
        parameters = np.zeros((), _PACK)
        parameters["count"] = order.size
        defines = {**self.defines(_PACK, None, None), "USE_TF32": int(use_tf32)}
        launch = Launch(
            "pack_weights", Kernel.of("pack.cu", defines),
            -(-order.size // _GENERAL_BLOCK), _GENERAL_BLOCK, 0, parameters,
            ((("weight",), Reference("tensor", tensor)), (("packed",), Reference("packed", number)),
             (("order",), self.table(order))),
        )  # fmt: skip
        self.program.packed.append(PackedWeight(tensor, order.size, launch))
        return Reference("packed", number)

    def grid(self, threads: int) -> int:
        """Blocks of a kernel whose threads take several items in turn."""
        return max(1, min(-(-threads // _GENERAL_BLOCK), 32 * self.target.processors))

    def stages(
        self, parameters: NDArray[np.void], each: Sequence[Sequence[Step]]
    ) -> list[tuple[Path, Reference]]:
        """Fill in the operands of the chains of a launch; returns their pointers."""
        pointers: list[tuple[Path, Reference]] = []
        for number, steps in enumerate(each):
            for place, step in enumerate(steps, start=number * chains.MAX_STAGES):
                if isinstance(step, Normalize):
                    parameters["stages"][place]["a"] = step.eps
                for name, operand in zip(("a", "b"), chains.operands(step), strict=False):
                    if isinstance(operand, ScalarOperand):
                        parameters["stages"][place][name] = operand.value
                    elif isinstance(operand, TensorOperand):
                        pointers.append(
                            (("stages", place, f"{name}_channels"), Reference("tensor", operand.name))
                        )
        return pointers

    # ---- convolutions --------------------------------------------------------------------------------------
    def convolution(self, segment: Segment) -> None:
        assert segment.convolution is not None
        convolution = self.operator.steps[segment.convolution]
        assert isinstance(convolution, ConvTranspose3d)
        epilogue = self.fusion.describe(convolution, segment.epilogue(self.operator))
        refusal = self.fusion.refuses_halo(convolution)
        if refusal is None:
            prologue = prologues.describe(segment.prologue(self.operator))
            assert isinstance(prologue, Prologue)
            self.halo(segment, convolution, prologue, epilogue)
        else:
            self.fma(segment, convolution, epilogue, refusal)

    def fma(self, segment: Segment, convolution: ConvTranspose3d, epilogue: Epilogue, refusal: str) -> None:
        geometry, source, result = convolution.geometry, convolution.source, segment.last + 1
        channels = geometry.out_channels // geometry.groups
        folded = epilogue.fold is not None
        tile: FmaTile = fma_tile(channels, np.dtype(self.program.compute).itemsize, folded)
        channel_tiles = -(-channels // tile.block_n)
        tables = fma_tables(geometry, channel_tiles * tile.block_n)
        positions = positions_of(convolution, epilogue)
        p = np.zeros((), _CONV)
        p["voxels"] = geometry.batch * math.prod(positions)
        p["phase_count"] = math.prod(tables.residues)
        p["tiles"] = -(-int(p["voxels"]) // tile.block_m) * geometry.groups * channel_tiles
        p["tiles"] *= 1 if folded else p["phase_count"]
        p["first_chain"], p["second_chain"] = (
            chains.code(epilogue.first),
            chains.code(epilogue.second),
        )
        p["groups"], p["in_channels"] = geometry.groups, geometry.in_channels // geometry.groups
        p["out_channels"], p["padded_channels"] = channels, channel_tiles * tile.block_n
        p["channel_tiles"], p["term_count"] = channel_tiles, len(tables.terms)
        p["in"], p["positions"] = geometry.input_shape[2:], positions
        p["out"] = positions if folded else geometry.output_shape[2:]
        p["stride"] = [axis.stride for axis in geometry.axes]
        p["residues"], p["axis_slots"] = tables.residues, tables.axis_slots
        p["fold_maximum"] = epilogue.fold is not None and epilogue.fold.function == "max"
        p["channel_sum"] = epilogue.channel_sum
        pointers: list[tuple[Path, Reference]] = [
            (("x",), self.value(source)),
            (("w",), self.pack(convolution.weight.name, tables.order, False)),
            (("y",), Reference("value", result)),
            (("phases",), self.table(tables.phases)),
            (("slots",), self.table(tables.slots)),
            (("terms",), self.table(tables.terms)),
            *self.stages(p, (epilogue.first, epilogue.second)),
        ]
        if convolution.bias is not None:
            pointers.append((("bias",), Reference("tensor", convolution.bias.name)))
        kernel = Kernel.of("conv_fma.cu", {**self.defines(_CONV, source, result), **tile.defines})
        blocks = min(int(p["tiles"]), MAX_GRID)
        self.program.launches.append(
            Launch("conv_fma", kernel, blocks, tile.threads, tile.shared_bytes, p, tuple(pointers))
        )
        detail: dict[str, str | int | float] = {
            "tile": f"{tile.block_m} voxels x {tile.block_n} channels",
            "phases": int(p["phase_count"]),
            "threads": tile.threads,
            "shared_bytes": tile.shared_bytes,
            "why": refusal,
        }
        algorithm = f"phase-decomposed implicit GEMM, {self.program.compute} FMA"
        self.describe("conv_fma", segment, algorithm, detail)

    def halo(
        self, segment: Segment, convolution: ConvTranspose3d, prologue: Prologue, epilogue: Epilogue
    ) -> None:
        geometry, result = convolution.geometry, segment.last + 1
        before = self.operator.steps[segment.first]  # the convolution itself where there is no prologue
        task = self.fusion.task(convolution, epilogue, prologue)
        tile = halo_tile(task)
        assert tile is not None
        stored = self.operator.dtype if before.source == 0 else self.program.compute
        tables = halo_tables(geometry, tile)
        positions = positions_of(convolution, epilogue)
        out = self.operator.steps[segment.last].shape
        boxes = [-(-count // extent) for count, extent in zip(positions, tile.tile, strict=True)]
        p = np.zeros((), _HALO)
        p["tile_weights"] = tables.tile_weights
        p["pass_count"], p["step_count"] = len(tables.passes), tile.steps
        p["source"], p["in"] = before.input_shape[2:], geometry.input_shape[2:]
        p["out"] = out[2:]
        p["limit"] = positions if epilogue.fold is not None else geometry.output_shape[2:]
        p["stride"], p["tiles"] = [axis.stride for axis in geometry.axes], boxes
        p["pair_stores"] = geometry.width.output % 2 == 0
        p["softmax_bound"] = epilogue.bound
        pointers: list[tuple[Path, Reference]] = [
            (("x",), self.value(before.source)),
            (("w",), self.pack(convolution.weight.name, tables.order, not task.split)),
            (("y",), Reference("value", result)),
            (("passes",), self.table(tables.passes)),
            (("taps",), self.table(tables.taps)),
            *self.stages(p, (epilogue.first, epilogue.second, prologue.first, prologue.second)),
        ]
        if convolution.bias is not None:
            pointers.append((("bias",), Reference("tensor", convolution.bias.name)))
        blocks = task.blocks(tile)
        fold = 0 if epilogue.fold is None else 1 + (epilogue.fold.function == "max")
        base: dict[str, int | str] = {
            **self.defines(_HALO, before.source, result),
            **tile.defines,
            "USE_3XTF32": int(task.split),
            "PROMOTE": int(task.promoted),
            "USE_VECTOR_X": int(geometry.width.input % 4 == 0),
            **_x_defines(prologue, before.input_shape[4], stored, task.split),
            "KEEP_X": 0,
            "SOFTMAX": 0,
            "OUT_CHANNELS": geometry.out_channels // geometry.groups,
            "GROUPS": geometry.groups,
            "HAS_BIAS": int(convolution.bias is not None),
            "FOLD": fold,
            "POOL_Z": epilogue.window[0],
            "POOL_Y": epilogue.window[1],
            "POOL_X": epilogue.window[2],
            "CHANNEL_SUM": int(epilogue.channel_sum),
            "FIRST_CHAIN": chains.define(epilogue.first),
            "SECOND_CHAIN": chains.define(epilogue.second),
        }
        detail: dict[str, str | int | float] = {
            "tile": "x".join(map(str, tile.tile)) + f" voxels x {tile.block_n} channels, all phases",
            **(
                {"slices": f"{tile.slices} of {tile.slice_channels} input channels"}
                if tile.slices > 1
                else {}
            ),
            "phases": math.prod(
                len([phase for phase in axis.phases if phase.count]) for axis in geometry.axes
            ),
            "threads": tile.threads,
            "shared_bytes": tile.shared_bytes,
            **self.fusion.choice(task, tile),
        }
        products = ("3xTF32" if task.split else "TF32") + (" with promoted sums" if task.promoted else "")
        algorithm = f"resident halo on tensor cores, {products}"

        def launch(
            what: str, places: list[tuple[Path, Reference]], changed: dict[str, int | str] | None = None
        ) -> None:
            kernel = Kernel.of("conv_halo.cu", {**base, **(changed or {})})
            self.program.launches.append(
                Launch("conv_halo", kernel, blocks, tile.threads, tile.shared_bytes, p.copy(), tuple(places))
            )
            self.describe("conv_halo", segment, algorithm + what, detail)

        if not epilogue.softmax:
            launch("", pointers)
            return
        partial = (("partial",), self.scratch(4 * blocks * tile.block_n))
        pointers.append(partial)
        first, second = "; first pass: sums of exponentials", "; second pass: the result"
        if not prologue:
            launch(first, pointers, {"SOFTMAX": 1})
            launch(second, pointers, {"SOFTMAX": 2})
            return
        kept = self.scratch(4 * math.prod(geometry.input_shape))
        launch(first, [*pointers, (("kept",), kept)], {"SOFTMAX": 1, "KEEP_X": 1})
        p["source"] = p["in"]
        pointers[0] = (("x",), kept)  # the second pass reads the inputs that the first one made
        read = {"INPUT": "float", **_x_defines(NO_PROLOGUE, 1, "float32", task.split)}
        launch(second, pointers, {"SOFTMAX": 2, **read})

    def describe(
        self, name: str, segment: Segment, algorithm: str, detail: dict[str, str | int | float]
    ) -> None:
        steps = tuple(step.op for step in self.operator.steps[segment.first : segment.last + 1])
        self.program.planned.append(PlannedLaunch(name, steps, algorithm, detail, segment.note))

    # ---- steps of their own --------------------------------------------------------------------------------
    def single(self, segment: Segment) -> None:
        step = self.operator.steps[segment.first]
        result = segment.first + 1
        if isinstance(step, Pointwise):
            self.elementwise(step, result)
        elif isinstance(step, Pool):
            self.pool(step, result)
        else:
            assert isinstance(step, Normalize | Softmax | Reduce)
            self.rows(step, result)
        launch = self.program.launches[-1]
        self.describe(
            launch.name,
            segment,
            "one kernel for the step",
            {"blocks": launch.blocks, "threads": launch.threads},
        )

    def elementwise(self, step: Pointwise, result: int) -> None:
        p = np.zeros((), _ELEMENTWISE)
        p["count"], p["extent"] = math.prod(step.shape), step.shape
        p["operation"] = chains.OPERATIONS[step.function]
        pointers: list[tuple[Path, Reference]] = [(("y",), Reference("value", result))]
        source = ValueOperand(step.source, step.input_shape)
        for name, operand in zip(("x", "a", "b"), (source, *step.arguments), strict=False):
            if isinstance(operand, ScalarOperand):
                p[name]["number"] = operand.value
                continue
            p[name]["stride"] = broadcast_strides(operand.shape)
            if isinstance(operand, ValueOperand):
                p[name]["wide"] = operand.value > 0
                pointers.append(((name, "data"), self.value(operand.value)))
            else:
                pointers.append(((name, "data"), Reference("tensor", operand.name)))
        kernel = Kernel.of("elementwise.cu", self.defines(_ELEMENTWISE, None, result))
        self.program.launches.append(
            Launch("elementwise", kernel, self.grid(int(p["count"])), _GENERAL_BLOCK, 0, p, tuple(pointers))
        )

    def pool(self, step: Pool, result: int) -> None:
        p = np.zeros((), _POOL)
        p["count"], p["in"], p["out"] = math.prod(step.shape), step.input_shape[2:], step.shape[2:]
        p["window"], p["maximum"] = step.window, step.function == "max"
        unrolled = math.prod(step.window) <= prologues.MAX_WINDOW
        window = step.window if unrolled else (0, 0, 0)
        itemsize = self.program.value_itemsize(step.source)
        defines = {
            **self.defines(_POOL, step.source, result),
            **dict(zip(("WINDOW_Z", "WINDOW_Y", "WINDOW_X"), window, strict=True)),
            "VECTOR": _neighbours(step.window[2], step.input_shape[4], itemsize) if unrolled else 1,
        }
        kernel = Kernel.of("pool.cu", defines)
        pointers = ((("x",), self.value(step.source)), (("y",), Reference("value", result)))
        self.program.launches.append(
            Launch("pool", kernel, self.grid(int(p["count"])), _GENERAL_BLOCK, 0, p, pointers)
        )

    def rows(self, step: Normalize | Softmax | Reduce, result: int) -> None:
        groups = step.groups if isinstance(step, Normalize) else 1
        kept, items = split_axes(step.input_shape, step.axes, groups)
        p = np.zeros((), _ROWS)
        p["rows"], p["items"] = math.prod(e for e, _ in kept), math.prod(e for e, _ in items)
        for name, axes in (("row", kept), ("item", items)):
            p[name]["rank"] = len(axes)
            for axis, (extent, stride) in enumerate(axes):
                p[name]["extent"][axis], p[name]["stride"][axis] = extent, stride
        p["channels"], p["channel_stride"] = step.input_shape[1], math.prod(step.input_shape[2:])
        pointers: list[tuple[Path, Reference]] = [
            (("x",), self.value(step.source)),
            (("y",), Reference("value", result)),
        ]
        if isinstance(step, Normalize):
            p["function"], p["eps"] = _ROW_FUNCTIONS["normalize"], step.eps
            for field_name, operand in (("weight", step.weight), ("bias", step.bias)):
                if operand is not None:
                    pointers.append(((field_name,), Reference("tensor", operand.name)))
        else:
            p["function"] = _ROW_FUNCTIONS["softmax" if isinstance(step, Softmax) else step.function]
        rows, length = int(p["rows"]), int(p["items"])
        by_block = length > 1 and (items[-1][1] == 1 or rows < 32 * self.target.processors)
        if by_block:
            threads = min(_GENERAL_BLOCK, max(32, 1 << (length - 1).bit_length()))
            blocks = min(rows, MAX_GRID)
        else:
            threads, blocks = _GENERAL_BLOCK, self.grid(rows)
        name = "rows_by_block" if by_block else "rows_by_thread"
        kernel = Kernel.of("rows.cu", self.defines(_ROWS, step.source, result))
        self.program.launches.append(Launch(name, kernel, blocks, threads, 0, p, tuple(pointers)))


def _neighbours(window_x: int, width: int, itemsize: int) -> int:
    """Elements of a line of a window that can be read at once: 1, 2 or 4, and 16 bytes at most."""
    return next(n for n in (4, 2, 1) if window_x % n == 0 and width % n == 0 and n * itemsize <= 16)


def _x_defines(prologue: Prologue, width: int, dtype: str, split: bool) -> dict[str, int | str]:
    """The defines of ``conv_halo.cu`` for an input made by a prologue from lines of ``width`` elements of ``dtype``.

    Args:
        split: three TF32 products are made.
    """
    z, y, x = prologue.window
    return {
        "ASYNC_X": int(not prologue and dtype == "float32"),
        "ROUND_X": int(not split and (bool(prologue) or dtype == "float32")),
        "PRE_Z": z,
        "PRE_Y": y,
        "PRE_X": x,
        "PRE_VECTOR": _neighbours(x, width, np.dtype(dtype).itemsize),
        "PRE_MAXIMUM": int(prologue.pool is not None and prologue.pool.function == "max"),
        "PRE_FIRST_CHAIN": chains.define(prologue.first),
        "PRE_SECOND_CHAIN": chains.define(prologue.second),
    }


def broadcast_strides(shape: Shape) -> list[int]:
    """Element strides of a contiguous tensor that broadcasts: 0 where an extent is 1."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(0 if extent == 1 else step)
        step *= extent
    return strides[::-1]


Axes = list[tuple[int, int]]


def split_axes(shape: Shape, reduced: Sequence[int], groups: int) -> tuple[Axes, Axes]:
    """Extent and stride of the kept and the reduced axes of a contiguous tensor, neighbours merged, none
    empty.

    With ``groups > 1`` the channel axis counts as two: groups, which are kept, and the channels of one.
    """
    kept: Axes = []
    items: Axes = []
    step = math.prod(shape)
    parts: list[tuple[int, bool]] = []
    for axis, extent in enumerate(shape):
        if axis == 1 and groups > 1:
            parts += [(groups, False), (extent // groups, True)]
        else:
            parts.append((extent, axis in reduced))
    for extent, is_item in parts:
        step //= extent
        if extent == 1:
            continue
        axes = items if is_item else kept
        if axes and axes[-1][1] == extent * step:
            axes[-1] = (axes[-1][0] * extent, step)
        else:
            axes.append((extent, step))
    return kept or [(1, 0)], items or [(1, 0)]


def strided_copy(program: Program, shape: Sequence[int], strides: Sequence[int] | None) -> Launch:
    """A launch that copies tensor ``from``, with ``strides`` in elements (None: contiguous), to contiguous
    ``to``."""
    lead = 5 - len(shape)
    extents: Shape = (*([1] * lead), *shape)  # type: ignore[assignment]
    p = np.zeros((), _ELEMENTWISE)
    p["count"], p["extent"] = math.prod(shape), extents
    p["x"]["stride"] = broadcast_strides(extents) if strides is None else [*([0] * lead), *strides]
    storage = _C_TYPES[program.operator.dtype]
    defines: dict[str, int | str] = {
        "STORAGE": storage, "COMPUTE": _C_TYPES[program.compute], "INPUT": storage, "OUTPUT": storage,
        "PARAMS_BYTES": _ELEMENTWISE.itemsize,
    }  # fmt: skip
    pointers: tuple[tuple[Path, Reference], ...] = (
        (("x", "data"), Reference("tensor", "from")),
        (("y",), Reference("tensor", "to")),
    )
    blocks = max(1, min(-(-int(p["count"]) // _GENERAL_BLOCK), MAX_GRID))
    return Launch("elementwise", Kernel.of("elementwise.cu", defines), blocks, _GENERAL_BLOCK, 0, p, pointers)
