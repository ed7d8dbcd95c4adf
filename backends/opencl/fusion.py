"""What the CPU convolution can fuse, and the fused steps sorted into stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.backends.opencl.render import combinable, in_operands
from dispatcher.backends.opencl.tiles import Fold, box_unit
from dispatcher.ops.forms import ReductionForm
from dispatcher.ops.steps import (
    ConvTranspose3d,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    Softmax,
    Step,
    ValueOperand,
)
from dispatcher.ops.vocabulary import MAXIMUM
from dispatcher.problem.operator import Operator

CHANNEL = (1,)
#: Positions per axis that a box may need to hold whole pooling windows.
LARGEST_BOX_UNIT = 12


@dataclass
class Stage:
    """A step that works on whole lines, and the pointwise steps that ride on its store."""

    step: Step
    tail: list[Pointwise] = field(default_factory=list)


@dataclass
class Epilogue:
    """The fused steps behind a convolution, in order of execution.

    Attributes:
        tail: pointwise steps that ride on the convolution's store.
        before: stages on the convolution's lines.
        fold: pooling, or None.
        fold_tail: pointwise steps that ride on the end of the fold.
        after: stages on the folded lines.
    """

    tail: list[Pointwise] = field(default_factory=list)
    before: list[Stage] = field(default_factory=list)
    fold: Fold | None = None
    fold_form: ReductionForm = MAXIMUM
    fold_tail: list[Pointwise] = field(default_factory=list)
    after: list[Stage] = field(default_factory=list)


def sort_epilogue(steps: tuple[Step, ...]) -> Epilogue:
    """Sort fused steps into stages; consecutive pools of one kind become one fold."""
    result = Epilogue()
    tail = result.tail
    for step in steps:
        if isinstance(step, Pointwise):
            tail.append(step)
        elif isinstance(step, Pool):
            window = step.window
            if result.fold is not None:
                d, h, w = result.fold.window
                window = (d * window[0], h * window[1], w * window[2])
            result.fold, result.fold_form = Fold(step.function, window), step.form
            tail = result.fold_tail
        else:
            stage = Stage(step)
            (result.before if result.fold is None else result.after).append(stage)
            tail = stage.tail
    return result


class LineFusion:
    """Fusion rules of the kernel that keeps whole lines of all channels in cache."""

    def prologue(self, step: Step, fused: tuple[Step, ...], convolution: ConvTranspose3d) -> str | None:
        del fused, convolution
        return _pointwise_reason(step) if isinstance(step, Pointwise) else f"{step.op} is not pointwise"

    def epilogue(self, convolution: ConvTranspose3d, fused: tuple[Step, ...], step: Step) -> str | None:
        match step:
            case Pointwise():
                return _pointwise_reason(step)
            case Normalize(axes=axes, groups=groups):
                return (
                    None
                    if axes == CHANNEL and groups == 1
                    else "normalises over more than one voxel's channels"
                )
            case Softmax(axes=axes):
                return None if axes == CHANNEL else "softmax needs sums beyond one voxel's channels"
            case Reduce(axes=axes, form=form):
                if axes != CHANNEL or form.shifted or not combinable(form.monoid):
                    return f"{step.op} reduces beyond one voxel's channels or needs two passes"
                return None
            case Pool():
                return _pool_reason(convolution, fused, step)
        return f"{step.op} has no fused form"


def _pointwise_reason(step: Pointwise) -> str | None:
    if not all(in_operands(operand) for operand in step.arguments):
        return f"{step.op} has an operand that varies along more than the channel axis"
    return None


def _pool_reason(convolution: ConvTranspose3d, fused: tuple[Step, ...], step: Pool) -> str | None:
    if not step.form.plain or not combinable(step.form.monoid):
        return f"{step.op} is not a plain reduction"
    earlier = [other for other in fused if isinstance(other, Pool)]
    if earlier and (fused[-1] is not earlier[-1] or earlier[-1].function != step.function):
        return "one pooling is folded already"
    window = sort_epilogue((*fused, step)).fold
    assert window is not None
    stride = convolution.geometry.width.stride
    if window.window[2] % stride and stride % window.window[2]:
        return f"pool window {window.window[2]} along width does not fit stride {stride}"
    for axis, extent in zip(convolution.geometry.axes, window.window, strict=True):
        if box_unit(axis, extent) > LARGEST_BOX_UNIT:
            return f"pool window {extent} along {axis.name} is too large to fold"
    return None


def riders(operator: Operator, first: int, limit: int) -> int:
    """Index of the last pointwise step that can ride on the store of step ``first``, not beyond ``limit``.

    A step rides when it reads nothing but its predecessor's result, nobody else reads that result, and its
    operands are scalars or per-channel tensors.
    """
    read = {
        operand.value
        for step in operator.steps
        for operand in step.operands
        if isinstance(operand, ValueOperand)
    }
    last = first
    while last < limit:
        following = operator.steps[last + 1]
        sources = [step.source for step in operator.steps].count(last + 1)
        if following.source != last + 1 or sources != 1 or last + 1 in read:
            break
        if not isinstance(following, Pointwise) or _pointwise_reason(following) is not None:
            break
        last += 1
    return last
