"""What one launch, or one tight group of them, has to do: consecutive steps of an operator, in the parts that the
kernels know. A task says what; :mod:`~dispatcher.backends.cuda.implementations` says how."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from dispatcher.backends.cuda import epilogue as epilogues
from dispatcher.backends.cuda import prologue as prologues
from dispatcher.backends.cuda.driver import Context
from dispatcher.backends.cuda.epilogue import Epilogue
from dispatcher.backends.cuda.gathering import Gather
from dispatcher.backends.cuda.options import Options, TileChoice
from dispatcher.backends.cuda.prologue import NO_PROLOGUE, Prologue
from dispatcher.backends.cuda.sources import MAX_RIDERS, refuses
from dispatcher.backends.cuda.tiles import FMA_VOXELS, HaloTask, HaloTile, Triple, halo_tile
from dispatcher.errors import InputError
from dispatcher.ops.geometry import AxisGeometry
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax, Step
from dispatcher.problem.operator import Operator


@dataclass(frozen=True)
class Target:
    """What the lowering needs to know of a device.

    Attributes:
        architecture: compute capability as one number, such as 90.
        shared_limit: bytes of shared memory that a block may have.
        processors: multiprocessors.
    """

    architecture: int
    shared_limit: int
    processors: int

    @staticmethod
    def of(context: Context) -> Target:
        """An opened device as a target."""
        return Target(context.architecture, context.shared_limit, context.processors)


@dataclass(frozen=True, eq=False)
class Setting:
    """All that decisions depend on.

    Raises:
        InputError: the options name tiles for another number of convolutions.
    """

    operator: Operator
    target: Target
    options: Options

    def __post_init__(self) -> None:
        named, count = len(self.options.tile), len(self.operator.convolutions)
        if named not in (1, count):
            raise InputError(
                f"tile names {named} tiles, but {self.operator.problem.name} has {count} convolution(s); "
                "name one tile for all, or one for each"
            )


@dataclass(frozen=True, eq=False)
class Task:
    """Steps ``first .. last`` of an operator: one step, and the chain that its launch runs on what it stores.

    Subclasses say what the step may be and what else they hold.
    """

    setting: Setting
    first: int
    last: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them."""
        return self.setting.operator.steps[self.first : self.last + 1]

    @property
    def core(self) -> int:
        """Index of the step that the chain follows."""
        return self.first

    @property
    def riders(self) -> tuple[Step, ...]:
        """The chain."""
        return self.setting.operator.steps[self.core + 1 : self.last + 1]

    def extended(self, index: int) -> Task | str:
        """The task with step ``index`` too, or the reason why there is none."""
        step = self.setting.operator.steps[index]
        if not isinstance(step, Pointwise):
            return f"{step.op} is a kernel of its own"
        if len(self.riders) == MAX_RIDERS:
            return f"a chain holds {MAX_RIDERS} operations at most"
        return refuses(step, range(self.core + 1, index + 1), self.first) or replace(self, last=index)


class RowsTask(Task):
    """A normalisation, a softmax or a reduction, and its riders."""


class _Ahead(Task):
    """Steps that may become a convolution's prologue."""

    def before(self, index: int) -> Task | str:
        """The task of convolution ``index`` with these steps as its prologue, or the reason why not."""
        setting = self.setting
        step = self.steps[0]
        if setting.options.prologue == "separate":
            return "prologue separate was asked for"
        bare = ConvTask.of(setting, index)
        if bare.refusal is not None:
            return f"the general kernel would repeat {step.op} for every tap"
        prologue = prologues.describe(self.steps)
        if isinstance(prologue, str):
            return prologue
        task = replace(bare, first=self.first, prologue=prologue, epilogue=Epilogue(self.first, index + 1))
        reads = task.halo.reads(task.tile) if task.tile is not None else 0.0
        if task.tile is None:
            return f"no tile that holds {step.op} too fits this device"
        if setting.options.prologue == "auto" and not prologues.pays(prologue, reads):
            return f"{step.op} would be repeated, blocks read each input {reads:.1f} times"
        return task


class ChainTask(_Ahead):
    """Pointwise steps."""

    @property
    def core(self) -> int:
        return self.first - 1

    def extended(self, index: int) -> Task | str:
        step = self.setting.operator.steps[index]
        if isinstance(step, Convolution):
            return self.before(index)
        if isinstance(step, Pool):
            prologue = prologues.describe((*self.steps, step))
            return prologue if isinstance(prologue, str) else PoolTask(self.setting, self.first, index, index)
        return super().extended(index)


@dataclass(frozen=True, eq=False)
class PoolTask(_Ahead):
    """A pooling, with a chain on the elements that it reads, and its riders.

    Attributes:
        pool: index of the pooling.
    """

    pool: int

    @property
    def core(self) -> int:
        return self.pool

    def extended(self, index: int) -> Task | str:
        step = self.setting.operator.steps[index]
        return self.before(index) if isinstance(step, Convolution) else super().extended(index)


@dataclass(frozen=True, eq=False)
class GatheredTask(Task):
    """A step over all of space whose statistics were gathered by the launch before it, and its riders.

    Attributes:
        end: index of the last step that the statistics serve: the first one, or the mean over space of what it makes.
        gather: what was gathered.
    """

    end: int
    gather: Gather

    @property
    def core(self) -> int:
        return self.end


@dataclass(frozen=True, eq=False)
class ConvTask(Task):
    """A convolution with steps before and after it.

    Attributes:
        convolution: its index.
        prologue: steps before it.
        epilogue: steps after it.
        refusal: why the tensor-core kernel cannot run the convolution, or None.
        gather: statistics that the launch gathers, or None.
    """

    convolution: int
    prologue: Prologue
    epilogue: Epilogue
    refusal: str | None = None
    gather: Gather | None = None

    @staticmethod
    def of(setting: Setting, index: int) -> ConvTask:
        """A convolution alone.

        Raises:
            InputError: the options name a tile that it cannot have.
        """
        task = ConvTask(setting, index, index, index, NO_PROLOGUE, Epilogue(index, index + 1))
        return replace(task, refusal=_refuses_halo(task))

    @property
    def step(self) -> Convolution:
        """The convolution."""
        step = self.setting.operator.steps[self.convolution]
        assert isinstance(step, Convolution)
        return step

    def extended(self, index: int) -> Task | str:
        step = self.setting.operator.steps[index]
        resident = self.refusal is None
        epilogue = epilogues.extend(self.epilogue, self.step, step, resident)
        if isinstance(epilogue, str):
            return epilogue
        task = replace(self, last=index, epilogue=epilogue)
        if resident and task.tile is None:
            return f"no tile that holds {step.op} too fits this device"
        return task

    def gathering(self, gather: Gather) -> ConvTask | str:
        """The task with statistics of its result, or the reason why it cannot gather them."""
        if self.epilogue.open == "last" or self.epilogue.softmax:
            return "the launch does not hold its result by voxels and channels"
        task = replace(self, gather=gather)
        if self.refusal is None:
            return task if task.tile is not None else "no tile that holds the statistics too fits this device"
        # A block of the general kernel has voxels of several batch items, unless these are padded to whole blocks.
        batch, voxels = self.step.geometry.batch, math.prod(self.positions)
        padded = -(-voxels // FMA_VOXELS) * FMA_VOXELS
        if padded * batch > 2 * (batch * voxels + FMA_VOXELS):
            return f"blocks of {FMA_VOXELS} voxels hold several batch items"
        return task

    @cached_property
    def halo(self) -> HaloTask:
        """What the tensor-core kernel has to do.

        One TF32 product is enough where it was asked for, and for 16-bit inputs and weights, which it holds exactly.
        """
        operator, target, epilogue = self.setting.operator, self.setting.target, self.epilogue
        fp32 = operator.precision == "fp32"
        exact = operator.dtype in ("float16", "bfloat16") and self.step.source == 0 and not self.prologue
        return HaloTask(
            self.step.geometry,
            self.positions,
            epilogue.window,
            folded=epilogue.fold is not None,
            softmax=epilogue.softmax,
            split=fp32 and not exact,
            promoted=fp32,
            shared_limit=target.shared_limit,
            processors=target.processors,
            wanted=self.wanted,
            window=self.prologue.volume,
            gather=(0, 1) if self.gather is None else (self.gather.numbers, 1 + self.gather.wide),
        )

    @cached_property
    def tile(self) -> HaloTile | None:
        """The tile of the tensor-core kernel, or None where none fits."""
        return halo_tile(self.halo)

    @property
    def wanted(self) -> TileChoice | None:
        """The tile that the options ask for."""
        tiles = self.setting.options.tile
        place = next(n for n, step in enumerate(self.setting.operator.convolutions) if step is self.step)
        return tiles[place if len(tiles) > 1 else 0]

    @property
    def positions(self) -> Triple:
        """Voxels m per axis that have to be computed."""
        axes, epilogue = self.step.geometry.axes, self.epilogue
        folded = epilogue.fold is not None
        counts = [axis.output // axis.stride if folded else axis.positions for axis in axes]
        # A second pooling in floor mode leaves out the rest.
        counts = [count // window * window for count, window in zip(counts, epilogue.window, strict=True)]
        return (counts[0], counts[1], counts[2])


_MAX_HALO_PHASES = 64
#: Most products of the tensor-core kernel for each that counts, in groups: its 3xTF32 is about so much faster than
#: multiply-adds. (Without groups it has no rival that could use more lanes.)
_MOST_PADDING = 4
#: Least share of a box's inputs that windows read where they lie more than one input apart.
_LEAST_USED = 0.3
#: A box ends up to 64 voxels times a stride or step of up to 64 beyond an axis, which conv_halo.cu counts in 32 bits.
MAX_HALO_EXTENT = 2**31 - 2**13


def _used(axis: AxisGeometry) -> float:
    """Share of the inputs along an axis that some window reads."""
    return len({tap.offset % axis.step for phase in axis.phases for tap in phase.taps}) / axis.step


def _refuses_halo(task: ConvTask) -> str | None:
    """Why the tensor-core kernel cannot run this convolution, or None."""
    geometry, setting = task.step.geometry, task.setting
    if setting.options.algorithm == "fma":
        return "algorithm fma was asked for"
    if setting.operator.dtype == "float64":
        return "tensor cores are used for float32, float16 and bfloat16, not float64"
    if setting.target.architecture < 80:
        return "TF32 tensor cores need compute capability 8.0"
    in_group, out_group = geometry.in_channels // geometry.groups, geometry.out_channels // geometry.groups
    if geometry.groups > 1 and padding(in_group) * padding(out_group) > _MOST_PADDING:
        return f"groups of {in_group} to {out_group} channels leave tensor cores idle"
    if math.prod(len(axis.phases) for axis in geometry.axes) > _MAX_HALO_PHASES:
        return f"more than {_MAX_HALO_PHASES} phases take the general kernel"
    if any(axis.step > _MAX_HALO_PHASES for axis in geometry.axes):
        return f"a stride of more than {_MAX_HALO_PHASES} takes the general kernel"
    if math.prod(map(_used, geometry.axes)) < _LEAST_USED:
        return "its windows leave out most of the inputs between them"
    if max(*geometry.input_shape[2:], *geometry.output_shape[2:]) > MAX_HALO_EXTENT:
        return f"extents of more than {MAX_HALO_EXTENT} voxels take the general kernel"
    if task.tile is not None:
        return None
    if task.halo.wanted is not None and halo_tile(replace(task.halo, wanted=None)) is not None:
        raise InputError(
            f"tile is {task.wanted}, which {task.step.op} cannot have here; expected a box of 32 to 512 voxels, "
            "z and y up to 8, x a multiple of 8, that fits the device; explain shows one, or leave tile out"
        )
    return "no box of inputs fits the shared memory"


def padding(channels: int) -> float:
    """How many times more channels a tensor core works on, 8 at a time."""
    return -(-channels // 8) * 8 / channels


def opened(setting: Setting, index: int) -> Task:
    """The task of step ``index`` alone."""
    match setting.operator.steps[index]:
        case Convolution():
            return ConvTask.of(setting, index)
        case Pool():
            return PoolTask(setting, index, index, index)
        case Pointwise():
            return ChainTask(setting, index, index)
        case Normalize() | Softmax() | Reduce():
            return RowsTask(setting, index, index)
    raise TypeError(setting.operator.steps[index])  # the backend's `supports` lets no other class through
