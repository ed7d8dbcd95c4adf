"""What a convolution's launch does after the sum: which steps fit, and in what form.

An epilogue has six cuts: a chain of operations on each voxel's channels; a fold over the phases, where a pooling
window is exactly the set of phases; a second chain; a second pooling; a reduction of channels; and a chain on what
these store. :func:`extend` is the single place that knows the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dispatcher.backends.cuda.sources import MAX_STAGES, WINDOWS, keeps, refuses
from dispatcher.backends.cuda.tiles import MAX_BLOCK_N
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, ScalarOperand, Softmax, Step

#: Most phases that one block works through.
MAX_FOLDED_PHASES = 512

#: A softmax needs no pass for its maximum where a clamp keeps its argument within this distance of the upper
#: bound: the smallest exponential, exp(-60), is far from underflow.
MAX_CLAMP_RANGE = 60.0


@dataclass(frozen=True)
class Epilogue:
    """Steps that one convolution launch runs on its results.

    Attributes:
        opened: the launch's first step; values that it makes are in no memory.
        start: value that the convolution makes.
        first: on each voxel's channels, per phase.
        fold: the pooling over phases, or None.
        softmax: softmax over space between the chains.
        second: on each voxel's channels, after the fold or the softmax.
        pool: a second pooling, over boxes of folded voxels, or None.
        channels: the reduction of channels, or None.
        last: on each value that the second pooling or the reduction stores.
        bound: the clamp's upper bound, which the softmax subtracts.
    """

    opened: int
    start: int
    first: tuple[Step, ...] = ()
    fold: Pool | None = None
    softmax: bool = False
    second: tuple[Step, ...] = ()
    pool: Pool | None = None
    channels: Reduce | None = None
    last: tuple[Step, ...] = ()
    bound: float = 0.0

    @property
    def window(self) -> tuple[int, int, int]:
        """Box of the second pooling; ones where there is none."""
        return (1, 1, 1) if self.pool is None else self.pool.window

    @property
    def starts(self) -> tuple[int, int, int]:
        """The values that the three chains read."""
        second = self.start + len(self.first) + (self.fold is not None or self.softmax)
        last = second + len(self.second) + (self.pool is not None) + (self.channels is not None)
        return self.start, second, last

    @property
    def open(self) -> str:
        """The chain that a further step joins."""
        if self.pool is not None or self.channels is not None:
            return "last"
        return "second" if self.fold is not None or self.softmax else "first"


def _append(epilogue: Epilogue, step: Step, resident: bool) -> Epilogue | str:
    place = epilogue.open
    steps: tuple[Step, ...] = getattr(epilogue, place)
    if len(steps) == MAX_STAGES:
        return f"a chain holds {MAX_STAGES} operations at most"
    start = epilogue.starts[("first", "second", "last").index(place)]
    if isinstance(step, Pointwise):
        reason = refuses(step, range(start, start + len(steps) + 1), epilogue.opened)
        if reason is not None:
            return reason
    if not resident and keeps((*steps, step), start):
        return f"{step.op} takes a value from before a norm, which the general kernel does not keep"
    grown: Any = {place: (*steps, step)}
    return replace(epilogue, **grown)


def _whole_rows(convolution: Convolution) -> str | None:
    """None when one block holds all channels of a voxel."""
    geometry = convolution.geometry
    if geometry.groups > 1:
        return "the channels of a voxel are in several groups"
    if geometry.out_channels > MAX_BLOCK_N:
        return f"{geometry.out_channels} channels do not fit the {MAX_BLOCK_N} that a block holds"
    return None


def extend(epilogue: Epilogue, convolution: Convolution, step: Step, resident: bool) -> Epilogue | str:
    """``epilogue`` with ``step`` after it, or the reason why it does not fit.

    Args:
        resident: the convolution runs in ``conv_halo.cu``, which can do a little more than ``conv_fma.cu``.
    """
    if epilogue.channels is not None and not isinstance(step, Pointwise):
        return "the channels are already reduced"
    if epilogue.pool is not None and not isinstance(step, Reduce | Pointwise):
        return "only a reduction of channels follows a second pooling"
    match step:
        case Pointwise():
            return _append(epilogue, step, resident)
        case Normalize():
            if step.axes != (1,) or step.groups != 1:
                return f"{step.op} works over more than the channels of a voxel"
            return _whole_rows(convolution) or _append(epilogue, step, resident)
        case Pool():
            return _pool(epilogue, convolution, step, resident)
        case Reduce():
            if step.axes != (1,) or step.form.shifted:
                return f"{step.op} is not a plain reduction of channels"
            if epilogue.last:
                return "a chain after the second pooling ends the launch"
            return _whole_rows(convolution) or replace(epilogue, channels=step)
        case Softmax():
            return _softmax(epilogue, step, resident)
    return f"{step.op} is a kernel of its own"


def _pool(epilogue: Epilogue, convolution: Convolution, step: Pool, resident: bool) -> Epilogue | str:
    if not step.plain:
        return WINDOWS
    if epilogue.softmax:
        return "pooling does not follow a softmax in one launch"
    if epilogue.fold is not None:
        return replace(epilogue, pool=step) if resident else "a second pooling window spans several blocks"
    stride = tuple(axis.stride for axis in convolution.geometry.axes)
    if step.window != stride:
        return f"its window {step.window} is not the stride {stride}"
    if math.prod(stride) > MAX_FOLDED_PHASES:
        return f"{math.prod(stride)} phases are too many for one block"
    return replace(epilogue, fold=step)


def _softmax(epilogue: Epilogue, step: Softmax, resident: bool) -> Epilogue | str:
    if step.axes != (2, 3, 4):
        return "this softmax is not over space"
    if not resident or epilogue.fold is not None or epilogue.softmax:
        return "a softmax over space needs the sum of all blocks"
    clamp = epilogue.first[-1] if epilogue.first else None
    if not isinstance(clamp, Pointwise) or clamp.function != "clamp":
        return "a softmax over space needs its maximum first"
    low, high = clamp.arguments
    assert isinstance(low, ScalarOperand) and isinstance(high, ScalarOperand)
    # Where max < min every value is max.
    if not math.isfinite(high.value) or high.value - low.value > MAX_CLAMP_RANGE or abs(high.value) > 1e4:
        return "the clamp is too wide for a softmax without its maximum"
    return replace(epilogue, softmax=True, bound=high.value)
