"""What lowering makes: launches as plain data, with holes for pointers, and the memory that they need.

A launch's parameters are one C structure, whose layout is read from the kernel's source. Pointers are filled in at each
call, since a caller's tensors may live anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dispatcher.backends.cuda.convolution import FmaTables, HaloTables
from dispatcher.backends.cuda.gathering import Gather
from dispatcher.backends.cuda.layouts import structure
from dispatcher.backends.cuda.sources import Source, broadcast_strides, fill
from dispatcher.backends.cuda.toolkit import Kernel
from dispatcher.interface import PlannedLaunch
from dispatcher.ops.steps import Convolution, Shape, TensorOperand
from dispatcher.problem.operator import Operator

MAX_GRID = 2**31 - 1
BLOCK = 256  # threads, where a kernel has no tile

#: Of elements.
C_TYPES = {"float16": "half_t", "bfloat16": "bfloat_t", "float32": "float", "float64": "double"}


@dataclass(frozen=True)
class Reference:
    """What a pointer in a launch's parameters points to.

    Kinds: ``tensor`` a tensor argument, by name; ``value`` a value of the pipeline, by index; ``table`` a
    table of the program, ``packed`` its packed weights and ``scratch`` its scratch memory, by number.
    """

    kind: Literal["tensor", "value", "table", "packed", "scratch"]
    key: str | int


Path = tuple[str | int, ...]
#: Algorithm and details of a launch, for people.
Described = tuple[str, dict[str, str | int | float]]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        name: of the kernel function.
        kernel: file, defines and generated operations.
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
    """The weights of ``convolution`` in the order that ``tables`` have, ``elements`` computed values; ``launch`` makes
    them."""

    convolution: Convolution
    tables: FmaTables | HaloTables
    elements: int
    launch: Launch

    @property
    def tensor(self) -> str:
        """The weight tensor."""
        return self.convolution.weight.name


@dataclass
class Program:
    """All that running an operator needs, apart from a device.

    Attributes:
        launches: in order.
        planned: the same for people.
        tables: constant device memory.
        packed: weights to pack once.
        scratch_bytes: scratch memory blocks.
        gathered: where a value's statistics are, and of how many boxes of each batch item.
    """

    operator: Operator
    launches: list[Launch] = field(default_factory=list)
    planned: list[PlannedLaunch] = field(default_factory=list)
    tables: list[NDArray[Any]] = field(default_factory=list)
    packed: list[PackedWeight] = field(default_factory=list)
    scratch_bytes: list[int] = field(default_factory=list)
    gathered: dict[int, tuple[Reference, int]] = field(default_factory=dict)

    def value_dtype(self, index: int) -> str:
        """The dtype of value ``index``."""
        return self.operator.dtype if index in (0, len(self.operator.steps)) else self.compute

    def value_bytes(self, index: int) -> int:
        """Bytes of value ``index``."""
        return math.prod(self.operator.steps[index - 1].shape) * np.dtype(self.value_dtype(index)).itemsize

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

    # ---- what is added -------------------------------------------------------------------------------------
    def table(self, content: NDArray[Any]) -> Reference:
        """Constant memory."""
        self.tables.append(content)
        return Reference("table", len(self.tables) - 1)

    def scratch(self, size: int) -> Reference:
        """Memory for one call, of ``size`` bytes."""
        self.scratch_bytes.append(size)
        return Reference("scratch", len(self.scratch_bytes) - 1)

    def gather(self, value: int, boxes: int, gather: Gather, shape: Shape) -> Reference:
        """Memory for the statistics of ``value``, of ``boxes`` boxes of each batch item."""
        reference = self.scratch(8 * gather.numbers * shape[0] * boxes * shape[1])
        self.gathered[value] = (reference, boxes)
        return reference

    def value(self, index: int) -> Reference:
        """A value of the pipeline."""
        return Reference("tensor", self.operator.source) if index == 0 else Reference("value", index)

    def defines(self, x: str, y: str) -> dict[str, int | str]:
        """Defines that every kernel has: element types; ``x`` and ``y`` are the dtypes of input and output."""
        kinds = {"STORAGE": self.operator.dtype, "COMPUTE": self.compute, "INPUT": x, "OUTPUT": y}
        return {name: C_TYPES[dtype] for name, dtype in kinds.items()}

    def pack(self, convolution: Convolution, tables: FmaTables | HaloTables, use_tf32: bool) -> Reference:
        """A convolution's weights in another order, given as places in the contraction's."""
        tensor, order = convolution.weight.name, tables.order
        order = convolution.caller_order(order) if order.size else np.full(1, -1, np.int32)
        number = len(self.packed)
        draft = Draft(self, "pack.cu", "PackParams", Source())
        draft.parameters["count"] = order.size
        draft.defines.update(self.defines(self.operator.dtype, self.operator.dtype), USE_TF32=int(use_tf32))
        draft.pointers += [
            (("weight",), Reference("tensor", tensor)), (("packed",), Reference("packed", number)),
            (("order",), self.table(order)),
        ]  # fmt: skip
        launch = draft.launch("pack_weights", -(-order.size // BLOCK))
        self.packed.append(PackedWeight(convolution, tables, order.size, launch))
        return Reference("packed", number)


class Draft:
    """A launch in the making.

    Args:
        program: which it is for.
        file: of the kernel.
        parameters: name of the structure of its parameters.
        source: what is generated; complete by now.
    """

    def __init__(self, program: Program, file: str, parameters: str, source: Source) -> None:
        self.file, self.source = file, source
        slots = max(1, len(source.operands))
        self.parameters: Any = np.zeros((), structure(file, parameters, OPERANDS=slots))
        self.defines: dict[str, int | str] = {"PARAMS_BYTES": self.parameters.dtype.itemsize, "OPERANDS": slots}
        self.pointers: list[tuple[Path, Reference]] = []
        for number, operand in fill(self.parameters, source.operands):
            reference = (
                Reference("tensor", operand.name)
                if isinstance(operand, TensorOperand)
                else program.value(operand.value)
            )
            self.pointers.append((("operand", number, "data"), reference))

    def launch(
        self, name: str, blocks: int, threads: int = BLOCK, shared_bytes: int = 0, **defines: int | str
    ) -> Launch:
        """The launch as it is now, with other ``defines`` where these are given."""
        kernel = Kernel.of(self.file, {**self.defines, **defines}, self.source.text)
        return Launch(name, kernel, blocks, threads, shared_bytes, self.parameters.copy(), tuple(self.pointers))


def strided_copy(program: Program, shape: Sequence[int], strides: Sequence[int] | None) -> Launch:
    """A launch that copies tensor ``from``, with ``strides`` in elements (None: contiguous), to contiguous
    ``to``."""
    lead = 5 - len(shape)
    extents: Shape = (*([1] * lead), *shape)  # type: ignore[assignment]
    source = Source()
    source.chain("last_chain", (), 0)
    draft = Draft(program, "elementwise.cu", "ElementwiseParams", source)
    p, storage = draft.parameters, program.operator.dtype
    p["count"], p["extent"] = math.prod(shape), extents
    p["stride"] = broadcast_strides(extents) if strides is None else [*([0] * lead), *strides]
    draft.defines.update(program.defines(storage, storage), STRIDED=1)
    draft.pointers += [(("x",), Reference("tensor", "from")), (("y",), Reference("tensor", "to"))]
    return draft.launch("elementwise", max(1, min(-(-int(p["count"]) // BLOCK), MAX_GRID)))
