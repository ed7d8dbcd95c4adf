"""Groups of steps that run as one launch: what can join, and what a launch hands to the next one.

A group is a chain of pointwise steps, or *parts*: a step that is more than pointwise and the pointwise steps on its
results, its tail. A group of several parts is a convolution with the steps behind it, whose results one worker holds.
A pointwise step may read, besides numbers and per-channel tensors,

- a value that the same tail (or chain) has made, which is still in registers;
- a tensor or an earlier value of any broadcast shape, read where results are stored. The whole tail then runs there,
  and the part is the last one of its group.

Afterwards neighbours agree on statistics (:func:`share_statistics`): a launch that stores whole rows can leave the
moments or totals of each row for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dispatcher.backends.opencl.render import combinable, in_operands
from dispatcher.backends.opencl.tiles import Fold, box_unit
from dispatcher.ops.forms import SUM, PointwiseForm, ReductionForm
from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Softmax,
    Step,
    ValueOperand,
)
from dispatcher.plan.groups import Flow, split
from dispatcher.problem.operator import Operator

CHANNEL, SPATIAL = (1,), (2, 3, 4)
#: Positions per axis that a box may need to hold whole pooling windows.
LARGEST_BOX_UNIT = 12
#: Phases of a convolution, each with weights and a table entry of its own; with more, most are holes.
MOST_PHASES = 512
#: Inputs that the taps of an axis may lie apart at most in a layout of lines, which has room for all between them.
MOST_REACH = 1 << 12
#: A softmax of values no further apart than this needs no maximum: no exponential gets lost below others, or overflows.
WIDEST_RANGE = 60.0
EXP_FROM = PointwiseForm("exp_from", "exp_near_v(x - a)", arguments=1)
EXP_NEAR = PointwiseForm("exp_near", "exp_near_v(x)")


@dataclass
class Part:
    """A step that is more than pointwise, and the pointwise steps on its results."""

    step: Step
    tail: list[Pointwise] = field(default_factory=list)


@dataclass(frozen=True)
class Statistics:
    """What the launch that makes a value leaves of each of its rows (n, c, d, h).

    Attributes:
        kind: ``moments``, the mean in two parts and the sum of squared deviations from it; ``total``, the values
            combined by a reduction without its finish; ``exponentials``, the largest value and the sum of exponentials
            below it.
        form: the reduction of a ``total``.
    """

    kind: Literal["moments", "total", "exponentials"]
    form: ReductionForm | None = None

    @property
    def numbers(self) -> int:
        """Numbers for each row."""
        return {"moments": 3, "exponentials": 2, "total": 1}[self.kind]


class Group:
    """See :class:`dispatcher.plan.groups.Group`; opened with one step.

    Args:
        operator: whose steps.
        first: index of the first step.
        rules: what joins a convolution.

    Attributes:
        prologue: pointwise steps before the first part; the whole group where there is none.
        parts: the rest.
        at_store: the last tail runs where results are stored, for instance since it reads whole tensors.
        declined: why the convolution runs alone, element by element; None otherwise.
        gathers: what is left of each row of the result for the next launch.
        stored: False when nobody reads the result itself.
        given: what the launch before has left of the source.
        reduction: of the normalised value over space, which needs the given moments alone.
    """

    def __init__(self, operator: Operator, first: int, rules: Rules) -> None:
        self.operator, self.rules = operator, rules
        self.first = self.last = first
        self.note = ""
        self.prologue: list[Pointwise] = []
        self.parts: list[Part] = []
        self.at_store = False
        self.declined: str | None = None
        self.gathers: Statistics | None = None
        self.stored = True
        self.given: Statistics | None = None
        self.reduction: Reduce | None = None
        step = operator.steps[first]
        if isinstance(step, Pointwise):
            reason = self._join_tail(step)
            assert reason is None, reason
        else:
            if isinstance(step, Convolution):
                self.declined = rules.opens(step)
            self.parts.append(Part(step))

    # ---- what is in it -------------------------------------------------------------------------------------
    @property
    def steps(self) -> tuple[Step, ...]:
        """All its steps."""
        return self.operator.steps[self.first : self.last + 1]

    @property
    def source(self) -> int:
        """Number of the value it reads."""
        return self.steps[0].source

    @property
    def output(self) -> int:
        """Number of the value it makes."""
        return self.last + 1

    @property
    def convolution(self) -> Convolution | None:
        """The convolution that its parts begin with."""
        step = self.parts[0].step if self.parts else None
        return step if isinstance(step, Convolution) else None

    @property
    def tail(self) -> list[Pointwise]:
        """The pointwise steps behind the last part; the chain where there is none."""
        return self.parts[-1].tail if self.parts else self.prologue

    @property
    def fold(self) -> tuple[Fold, ReductionForm] | None:
        """The pools among its parts as one fold, and their form."""
        pools = [part.step for part in self.parts[1:] if isinstance(part.step, Pool)]
        return fold_of(pools) if pools else None

    # ---- growing -------------------------------------------------------------------------------------------
    def take(self, index: int) -> str | None:
        step = self.operator.steps[index]
        reason = self.rules.forbids or self._join(step)
        if reason is None:
            self.last = index
        return reason

    def _join(self, step: Step) -> str | None:
        if isinstance(step, Pointwise):
            return self._join_tail(step)
        if not self.parts:
            if not isinstance(step, Convolution):
                return f"{step.op} is not pointwise"
            reason = self.rules.opens(step) or self._prologue_reason()
        elif self.convolution is None:
            return "a step of its own"
        elif self.declined is not None:
            return self.declined
        elif self.at_store:
            return f"{step.op} follows an operand that is read where results are stored"
        else:
            reason = self.rules.joins(self, step)
        if reason is None:
            self.parts.append(Part(step))
        return reason

    def _prologue_reason(self) -> str | None:
        if self.at_store:
            return "a step before the convolution has an operand that varies along more than the channel axis"
        return next((reason for step in self.prologue if (reason := self.rules.precedes(step))), None)

    def _join_tail(self, step: Pointwise) -> str | None:
        at_hand = {earlier.source for earlier in self.tail} | {step.source}
        skips = False
        for operand in step.arguments:
            if in_operands(operand) or (isinstance(operand, ValueOperand) and operand.value in at_hand):
                continue
            if isinstance(operand, ValueOperand) and operand.value > self.first:
                made_by = self.operator.steps[operand.value - 1].op
                return f"{step.op} reads the result of {made_by}, which is not at hand any more"
            skips = True
        self.at_store |= skips
        self.tail.append(step)
        return None

    # ---- statistics ----------------------------------------------------------------------------------------
    def gather(self, consumer: Group, lanes: int) -> Statistics | str:
        """What this launch can leave of each row of its result for ``consumer``, or why it can leave nothing.

        Args:
            consumer: the launch behind it, which reads the result.
            lanes: of a vector; a row of statistics has to be long enough to pay.
        """
        wanted = wanted_statistics(consumer.steps[0])
        if isinstance(wanted, str):
            return wanted
        if self.rules.cache is None:
            return "work-groups do not store whole rows"
        if self.declined is not None or (
            self.parts and not isinstance(self.parts[0].step, Convolution | Pool) and self.given is None
        ):
            return f"{self.steps[0].op} does not store row by row"
        if self.reduction is not None or isinstance(self.parts[0].step if self.parts else None, Reduce):
            return "the result is small"
        width = self.steps[-1].shape[4]
        if width < lanes:
            return "rows are shorter than a vector"
        return wanted


def fold_of(pools: Sequence[Pool]) -> tuple[Fold, ReductionForm]:
    """Consecutive pools of one kind as one fold: the windows multiply, since floor(floor(n/a)/b) is floor(n/(a*b))."""
    d, h, w = (math.prod(pool.window[axis] for pool in pools) for axis in range(3))
    return Fold(pools[0].function, (d, h, w)), pools[0].form


#: Why only the direct CPU kernel and the gather kernel run a convolution of which :attr:`ConvGeometry.skips` is true.
APART = "its windows lie more than one input apart"
#: Why a pooling is no fold.
WINDOWS = "its windows overlap, leave gaps or reach into padding"


# ---- rules -------------------------------------------------------------------------------------------------
class Rules:
    """What joins a convolution: nothing, where every result is computed by itself.

    Attributes:
        forbids: why no step joins another one; None where some do.
        cache: bytes that a launch finds again without reading memory; statistics of what fits are not worth their
            while. None where launches cannot leave any.
    """

    forbids: str | None = None
    cache: int | None = None

    def opens(self, step: Convolution) -> str | None:
        """None when a kernel of these rules can run the convolution, else why it is gathered by element."""
        return "every result is computed by itself"

    def precedes(self, step: Pointwise) -> str | None:
        """None when ``step`` may run while a convolution reads its input."""
        return "every result is computed by itself"

    def joins(self, group: Group, step: Step) -> str | None:
        """None when ``step``, which is not pointwise, may work on the results that ``group`` holds."""
        return "every result is computed by itself"


class Unfused(Rules):
    """Every step a launch of its own."""

    forbids = "fusion off was asked for"

    def opens(self, step: Convolution) -> str | None:
        return _phases_reason(step)


class LineRules(Rules):
    """What the CPU kernel does, which keeps whole lines of all channels in cache.

    Args:
        cache: as in :class:`Rules`; None where launches behind it are not those of CPUs, which use statistics.
    """

    def __init__(self, cache: int | None = 0) -> None:
        self.cache = cache

    def opens(self, step: Convolution) -> str | None:
        reach = max(high - low for low, high in (axis.offset_range for axis in step.geometry.axes))
        if reach > MOST_REACH:
            return f"taps that lie {reach} inputs apart leave lines empty"
        return _phases_reason(step)

    def precedes(self, step: Pointwise) -> str | None:
        return None

    def joins(self, group: Group, step: Step) -> str | None:
        return self.pool(group, step) if isinstance(step, Pool) else channel_reason(step)

    def pool(self, group: Group, step: Pool) -> str | None:
        """None when the pool folds into the lines."""
        if not step.plain:
            return WINDOWS
        if not step.form.plain or not combinable(step.form.monoid):
            return f"{step.op} is not a plain reduction"
        earlier = [part.step for part in group.parts if isinstance(part.step, Pool)]
        if earlier and (group.parts[-1].step is not earlier[-1] or group.tail or earlier[-1].function != step.function):
            return "one pooling is folded already"
        assert group.convolution is not None
        geometry = group.convolution.geometry
        window = fold_of([*earlier, step])[0].window
        stride = geometry.width.stride
        if window[2] % stride and stride % window[2]:
            return f"pool window {window[2]} along width does not fit stride {stride}"
        for axis, extent in zip(geometry.axes, window, strict=True):
            if box_unit(axis, extent) > LARGEST_BOX_UNIT:
                return f"pool window {extent} along {axis.name} is too large to fold"
        return None


def _phases_reason(step: Convolution) -> str | None:
    phases = math.prod(axis.stride for axis in step.geometry.axes)
    return f"more than {MOST_PHASES} phases" if phases > MOST_PHASES else None


def channel_reason(step: Step) -> str | None:
    """None when ``step`` combines the channels of one voxel, in a form that every kernel runs."""
    match step:
        case Normalize(axes=axes, groups=groups):
            alone = axes == CHANNEL and groups == 1
            return None if alone else "normalises over more than one voxel's channels"
        case Softmax(axes=axes):
            return None if axes == CHANNEL else "softmax needs sums beyond one voxel's channels"
        case Reduce(axes=axes, form=form):
            if axes != CHANNEL or form.shifted or not combinable(form.monoid):
                return f"{step.op} reduces beyond one voxel's channels or needs two passes"
            return None
    return f"{step.op} has no fused form"


# ---- statistics --------------------------------------------------------------------------------------------
def _whole_planes(step: Normalize | Softmax | Reduce) -> bool:
    """Whether ``step`` is over all of space; with fewer than three axes, those that stand in have one place."""
    return all(axis in step.axes or step.input_shape[axis] == 1 for axis in SPATIAL)


def wanted_statistics(step: Step) -> Statistics | str:
    """What of its source's rows would spare ``step`` a pass over them, or why nothing would."""
    match step:
        case Normalize():
            wanted = Statistics("moments")
        case Softmax():
            wanted = Statistics("exponentials")
        case Reduce(form=form) if form.shifted:
            if form.lift != "exp_v(x)" or form.monoid is not SUM:
                return f"{step.op} needs two passes"
            wanted = Statistics("exponentials")
        case Reduce(form=form):
            wanted = Statistics("total", form)
        case _:
            return f"{step.op} needs no statistics"
    if not _whole_planes(step):
        return f"{step.op} is not over whole planes"
    return wanted


def _exponential(group: Group) -> tuple[PointwiseForm, tuple[ScalarOperand, ...]] | None:
    """What a softmax of the group's result adds up, where its last step keeps values near enough to need no maximum."""
    if not group.tail:
        return None
    last = group.tail[-1]
    ends = last.arguments if last.function == "clamp" else tuple(map(ScalarOperand, last.form.limits or ()))
    match ends:
        case (ScalarOperand(low), ScalarOperand(high)) if -WIDEST_RANGE <= low <= high <= WIDEST_RANGE:
            return EXP_NEAR, ()  # exact, where the distance from a bound far off would be rounded
        case (ScalarOperand(low), ScalarOperand(high)) if 0 <= high - low <= WIDEST_RANGE:
            return EXP_FROM, (ScalarOperand(high),)
    return None


def share_statistics(groups: list[Group], lanes: int, cache: int) -> list[Group]:
    """Let each group leave for the next one what that one would otherwise read its source once more for.

    Returns:
        The groups, without those that the group before makes superfluous.
    """
    if not groups:
        return groups
    flow = Flow(groups[0].operator)
    result = [groups[0]]
    for number, consumer in enumerate(groups[1:], start=1):
        producer = result[-1]
        if consumer.source != producer.output:
            result.append(consumer)
            continue
        alone = flow.readers[consumer.source] == 1
        first = consumer.steps[0]
        if alone and _from_moments(producer, first):
            # The mean of normalised values follows from the moments of what was normalised.
            assert isinstance(first, Reduce)
            producer.reduction, producer.note = first, consumer.note
            producer.tail.extend(consumer.tail)
            producer.last, producer.at_store = consumer.last, consumer.at_store
            result[-2].stored = flow.readers[producer.source] > 1
            continue
        found = producer.gather(consumer, lanes)
        result.append(consumer)
        # A pass over memory is spared where the result need not be stored, or a place of it does not fit the cache.
        spared = alone and isinstance(first, Reduce)
        following = groups[number + 1].steps[0] if number + 1 < len(groups) else None
        spared |= alone and isinstance(first, Normalize) and len(consumer.steps) == 1 and _over_space(following)
        exponential = _exponential(producer) if alone and isinstance(first, Softmax) else None
        spared |= exponential is not None
        if isinstance(found, str) or not (spared or _place_bytes(first) > cache):
            continue
        if exponential is not None:
            shape = producer.steps[-1].shape
            producer.at_store = True
            producer.tail.append(Pointwise("softmax", producer.output, shape, shape, *exponential))
            found = Statistics("total", ReductionForm("sum", SUM))
        producer.gathers, consumer.given = found, found
        producer.stored = not (isinstance(first, Reduce) and alone)
    return result


def _from_moments(producer: Group, step: Step) -> bool:
    """Whether ``step`` is the mean or sum over space of what ``producer`` normalises with moments that it was given."""
    normalised = producer.parts[0].step if producer.parts else None
    if not isinstance(normalised, Normalize) or producer.given is None or len(producer.steps) > 1:
        return False
    return _over_space(step)


def _over_space(step: Step | None) -> bool:
    """Whether ``step`` is a mean or sum over space."""
    if not isinstance(step, Reduce) or step.form.monoid is not SUM or not step.form.plain:
        return False
    return _whole_planes(step) and set(step.axes) <= set(SPATIAL)


def _place_bytes(step: Step) -> int:
    """Bytes of what one result of a reduction, a normalisation or a softmax is made from, in float32."""
    assert isinstance(step, Normalize | Softmax | Reduce)
    groups = step.groups if isinstance(step, Normalize) else 1
    return 4 * math.prod(step.input_shape[axis] for axis in step.axes) // groups


def plan(operator: Operator, rules: Rules, lanes: int) -> list[Group]:
    """The groups of an operator under some rules, with their statistics."""
    groups = split(operator, lambda first: Group(operator, first, rules))
    return groups if rules.cache is None else share_statistics(groups, lanes, rules.cache)
