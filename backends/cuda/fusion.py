"""What the convolution kernels can fuse, and with which tile: the backend's answers to the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispatcher.backends.cuda import epilogue as epilogues
from dispatcher.backends.cuda import prologue as prologues
from dispatcher.backends.cuda.driver import Context
from dispatcher.backends.cuda.epilogue import Epilogue
from dispatcher.backends.cuda.options import Options, TileChoice
from dispatcher.backends.cuda.prologue import NO_PROLOGUE, Prologue
from dispatcher.backends.cuda.tiles import HaloTask, HaloTile, Triple, halo_tile
from dispatcher.errors import InputError
from dispatcher.ops.steps import ConvTranspose3d, Step
from dispatcher.plan.planner import plan
from dispatcher.problem.operator import Operator

_MAX_HALO_PHASES = 64
#: Most products of the tensor-core kernel for each that counts, in groups: its 3xTF32 is about so much faster than
#: multiply-adds. (Without groups it has no rival that could use more lanes.)
_MOST_PADDING = 4
#: A box ends up to 64 voxels times a stride of up to 64 beyond an axis, and conv_halo.cu counts that in 32 bits too.
_MAX_HALO_EXTENT = 2**31 - 2**13


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


class CudaFusion:
    """What the convolution kernels can fuse; see :class:`dispatcher.plan.planner.Fusion`.

    Raises:
        InputError: the options name tiles for another number of convolutions; later, a tile that fits none.
    """

    def __init__(self, operator: Operator, target: Target, options: Options) -> None:
        self.operator, self.target, self.options = operator, target, options
        named, count = len(options.tile), len(operator.convolutions)
        if named not in (1, count):
            raise InputError(
                f"tile names {named} tiles, but {operator.problem.name} has {count} convolution(s); "
                "name one tile for all, or one for each"
            )

    def prologue(self, step: Step, fused: tuple[Step, ...], convolution: ConvTranspose3d) -> str | None:
        """May ``step`` run while the convolution loads its input, before the ``fused`` ones?"""
        if self.options.prologue == "separate":
            return "prologue separate was asked for"
        if self.refuses_halo(convolution) is not None:
            return f"the general kernel would repeat {step.op} for every tap"
        result = prologues.describe((step, *fused))
        if isinstance(result, str):
            return result
        task = self.task(convolution, Epilogue(), result)
        tile = halo_tile(task)
        assert tile is not None
        reads = task.reads(tile)
        if self.options.prologue == "auto" and not prologues.pays(result, reads):
            return f"{step.op} would be repeated, blocks read each input {reads:.1f} times"
        return None

    def epilogue(self, convolution: ConvTranspose3d, fused: tuple[Step, ...], step: Step) -> str | None:
        """May ``step`` follow ``fused`` in the convolution's launch?"""
        resident = self.refuses_halo(convolution) is None
        result = epilogues.extend(self.describe(convolution, fused), convolution, step, resident)
        if isinstance(result, str):
            return result
        if resident and halo_tile(self.task(convolution, result)) is None:
            return f"no tile that holds {step.op} too fits this device"
        return None

    def describe(self, convolution: ConvTranspose3d, fused: Sequence[Step]) -> Epilogue:
        """The epilogue made of steps that were accepted before."""
        resident = self.refuses_halo(convolution) is None
        result = Epilogue()
        for step in fused:
            extended = epilogues.extend(result, convolution, step, resident)
            assert isinstance(extended, Epilogue)
            result = extended
        return result

    def refuses_halo(self, convolution: ConvTranspose3d) -> str | None:
        """Why the tensor-core kernel cannot run this convolution, or None."""
        geometry = convolution.geometry
        if self.options.algorithm == "fma":
            return "algorithm fma was asked for"
        if self.operator.dtype == "float64":
            return "tensor cores are used for float32 and float16, not float64"
        if self.target.architecture < 80:
            return "TF32 tensor cores need compute capability 8.0"
        in_group, out_group = (
            geometry.in_channels // geometry.groups,
            geometry.out_channels // geometry.groups,
        )
        if geometry.groups > 1 and padding(in_group) * padding(out_group) > _MOST_PADDING:
            return f"groups of {in_group} to {out_group} channels leave tensor cores idle"
        if math.prod(len(axis.phases) for axis in geometry.axes) > _MAX_HALO_PHASES:
            return f"more than {_MAX_HALO_PHASES} phases take the general kernel"
        if max(*geometry.input_shape[2:], *geometry.output_shape[2:]) > _MAX_HALO_EXTENT:
            return f"extents of more than {_MAX_HALO_EXTENT} voxels take the general kernel"
        task = self.task(convolution, Epilogue())
        if halo_tile(task) is not None:
            return None
        if halo_tile(replace(task, wanted=None)) is not None:
            raise InputError(
                f"tile is {task.wanted}, which {convolution.op} cannot have here; expected a box of 32 to 512 voxels, "
                "z and y up to 8, x a multiple of 8, that fits the device; explain shows one, or leave tile out"
            )
        return "no box of inputs fits the shared memory"

    def wanted(self, convolution: ConvTranspose3d) -> TileChoice | None:
        """The tile that the options ask for."""
        place = next(n for n, step in enumerate(self.operator.convolutions) if step is convolution)
        return self.options.tile[place if len(self.options.tile) > 1 else 0]

    def tasks(self) -> list[HaloTask | None]:
        """What each convolution's launch has to do, with all that is fused; None where the general kernel runs it."""
        found: list[HaloTask | None] = []
        for segment in plan(self.operator, self):
            if segment.convolution is None:
                continue
            convolution = self.operator.steps[segment.convolution]
            assert isinstance(convolution, ConvTranspose3d)
            if self.refuses_halo(convolution) is not None:
                found.append(None)
                continue
            prologue = prologues.describe(segment.prologue(self.operator))
            assert isinstance(prologue, Prologue)
            epilogue = self.describe(convolution, segment.epilogue(self.operator))
            found.append(self.task(convolution, epilogue, prologue))
        return found

    def task(
        self, convolution: ConvTranspose3d, epilogue: Epilogue, prologue: Prologue = NO_PROLOGUE
    ) -> HaloTask:
        """What the tensor-core kernel would have to do.

        One TF32 product is enough where it was asked for, and for float16 inputs and weights, which it holds exactly.
        """
        fp32 = self.operator.precision == "fp32"
        exact = self.operator.dtype == "float16" and convolution.source == 0 and not prologue
        return HaloTask(
            convolution.geometry,
            positions_of(convolution, epilogue),
            epilogue.window,
            folded=epilogue.fold is not None,
            softmax=epilogue.softmax,
            split=fp32 and not exact,
            promoted=fp32,
            shared_limit=self.target.shared_limit,
            processors=self.target.processors,
            wanted=self.wanted(convolution),
            window=prologue.volume,
        )

    def choice(self, task: HaloTask, tile: HaloTile) -> dict[str, str]:
        """For people: the option that names the ``tile`` of ``task``, and why it was taken."""
        why = "lowest estimate" if task.wanted is None else self.options.why
        return {"option": f"tile={task.name(tile)}", "why": why}


def padding(channels: int) -> float:
    """How many times more channels a tensor core works on, 8 at a time."""
    return -(-channels // 8) * 8 / channels


def positions_of(convolution: ConvTranspose3d, epilogue: Epilogue) -> Triple:
    """Voxels m per axis that have to be computed."""
    geometry = convolution.geometry
    if epilogue.fold is None:
        counts = [axis.positions for axis in geometry.axes]
    else:
        counts = [axis.output // axis.stride for axis in geometry.axes]
    # A second pooling in floor mode leaves out the rest.
    counts = [count // window * window for count, window in zip(counts, epilogue.window, strict=True)]
    return (counts[0], counts[1], counts[2])
