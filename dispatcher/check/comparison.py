"""Comparing a result with the reference, within an error bound for every element.

Beside the reference goes a bound on the error that a correct implementation in the operator's arithmetic may make
(see :mod:`dispatcher.backends.numpy_ref.bounds`, which computes both).

Two things must hold: no element is further from the reference than its bound, and the Euclidean norm of all
errors is not more than :func:`normwise_share` of the norm of all bounds, since errors that are independent
do not all come near their bounds at once. The first finds single wrong elements, the second small faults that
all elements have in common.

The bounds scale with the data, so a check needs no tolerance of its own: a softmax whose values are near 1e-5
is checked as sharply as one whose values are near 1. Numbers below the smallest normal one may be flushed to
zero.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher import registry
from dispatcher.interface import Tensors
from dispatcher.problem.operator import DTYPES, Operator, limits_of

Array = NDArray[np.float64]
Progress = Callable[[float], None]


def part(progress: Progress, number: int, count: int) -> Callable[..., None]:
    """Turn the progress of one thing out of ``count``, the last argument that it is told, into that of all."""
    return lambda *told: progress((number + told[-1]) / count)


# ---- comparing ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        passed: True when every element is within its bound, and their norm within the norm's.
        max_abs_error: largest ``|result - reference|``; NaN or infinite where just one of them is.
        max_error_over_bound: largest ratio of error and bound; at most 1 when passed.
        normwise: ``|result - reference| / |reference|`` in the Euclidean norm over all finite elements.
        normwise_over_bound: ``|result - reference|`` over the largest norm allowed; at most 1 when passed.
        worst_index: where error over bound is largest; None when there are no elements or the shapes differ.
        worst_value: the result there.
        worst_reference: the reference there.
        reason: why it failed, in one line; empty when passed.
        profiles: for each axis, the largest ratio of error and bound at each place along it, for pictures; empty where
            there is nothing to compare, and no part of :func:`dispatcher.check.verifying.comparison_dict`.
    """

    passed: bool
    max_abs_error: float
    max_error_over_bound: float
    normwise: float
    normwise_over_bound: float
    worst_index: tuple[int, ...] | None = None
    worst_value: float = math.nan
    worst_reference: float = math.nan
    reason: str = ""
    profiles: tuple[Array, ...] = field(default=(), repr=False)

    def __eq__(self, other: object) -> bool:
        """Whether all figures are the same, where NaN is the same as NaN: a copy is equal."""
        return isinstance(other, Comparison) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def severity(self) -> float:
        """The larger of the two ratios of error and bound, by which results can be sorted; NaN counts as infinite."""
        ratios = (self.max_error_over_bound, self.normwise_over_bound)
        return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def refusal(reason: str) -> Comparison:
    """A failed comparison without figures: there was nothing that could be compared."""
    return Comparison(False, math.inf, math.inf, math.inf, math.inf, reason=reason)


def normwise_share(elements: int) -> float:
    """The part of the norm of the bounds that the norm of the errors may reach.

    One error may reach its bound, which lies some four standard deviations out; of many independent errors, the
    root of the mean square is about one standard deviation: a quarter.

    Args:
        elements: how many there are.
    """
    return 0.25 * (1.0 + 3.0 / math.sqrt(max(1, elements)))


def _worse(one: float, other: float) -> bool:
    """Is ``one`` worse than ``other``? NaN is worse than anything."""
    return not math.isnan(other) and (math.isnan(one) or one > other)


def _sum_of_squares(values: Array) -> float:
    """Of all elements. Not by np.vdot, which starts threads for arrays that are too small for it."""
    flat = values.reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def largest_along(values: Array) -> list[Array]:
    """For each axis, the largest of ``values`` at each place along it; NaN where there is one."""
    found: list[Array] = []
    while values.ndim:  # the last axis goes, so that each pass is shorter than the one before it
        found.insert(0, values.max(axis=tuple(range(values.ndim - 1))))
        values = values.max(axis=-1)
    return found


class _Tally:
    """Adds up a comparison part by part."""

    def __init__(self) -> None:
        self.max_abs_error = self.max_ratio = 0.0
        self.error_squares = self.reference_squares = 0.0
        self.bound_squares = self.rounding_squares = 0.0
        self.elements = self.beyond = self.odd_infinities = 0
        self.false_nans = self.missing_nans = 0
        self.worst_index: tuple[int, ...] | None = None
        self.worst_value = self.worst_reference = self.worst_bound = math.nan
        self.parts: list[
            tuple[int, list[Array]]
        ] = []  # first item of each part, and the largest ratios along each axis

    def add(self, result: np.ndarray, reference: Array, bound: Array, offset: int) -> None:
        """Take in batch items ``offset`` and on; all arrays have the same shape."""
        if result.size == 0:
            return
        value = result.astype(np.float64)
        known, known_bound = reference, bound  # without what is not finite
        with np.errstate(all="ignore"):
            error = np.abs(value - reference)
            if not np.isfinite(error).all():
                overflow = np.abs(reference) + bound >= float(limits_of(result.dtype).max)
                same = (value == reference) | (np.isnan(value) & np.isnan(reference))
                same |= np.isinf(value) & overflow & (np.sign(value) == np.sign(reference))
                error[same] = 0.0
                odd_nans = np.isnan(value) != np.isnan(reference)
                self.false_nans += int((odd_nans & np.isnan(value)).sum())
                self.missing_nans += int((odd_nans & np.isnan(reference)).sum())
                self.odd_infinities += int((np.isinf(error) & ~odd_nans).sum())
                finite = np.isfinite(reference)
                known, known_bound = np.where(finite, reference, 0.0), np.where(finite, bound, 0.0)
            ratio = np.divide(error, bound)
            ratio[error == 0.0] = 0.0
            self.error_squares += _sum_of_squares(error)
            self.reference_squares += _sum_of_squares(known)
            # The rounding of the result itself may be all that a bound consists of, and the same everywhere.
            rounding = np.minimum(known_bound, result_rounding(known, result.dtype))
            self.rounding_squares += _sum_of_squares(rounding)
            computed = known_bound - rounding
            self.bound_squares += _sum_of_squares(computed)
        self.elements += error.size
        self.beyond += int((~(ratio <= 1.0)).sum())
        self.parts.append((offset, largest_along(ratio)))
        largest = float(error.max())
        if _worse(largest, self.max_abs_error):
            self.max_abs_error = largest
        worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
        index = (int(worst[0]) + offset, *(int(place) for place in worst[1:]))
        here, before = float(ratio[worst]), self.max_ratio
        # Of equals the first counts, in whatever order the parts come.
        tie = self.worst_index is not None and not _worse(before, here) and index < self.worst_index
        if self.worst_index is None or _worse(here, before) or tie:
            self.max_ratio, self.worst_index = here, index
            self.worst_value, self.worst_reference = float(value[worst]), float(reference[worst])
            self.worst_bound = float(bound[worst])

    def finish(self, axes: Sequence[int] | None = None) -> Comparison:
        """The comparison of all that was taken in; of the arrays' axes, the result has ``axes``."""
        if axes is not None and self.worst_index is not None:
            self.worst_index = tuple(self.worst_index[axis] for axis in axes)
        error = math.sqrt(self.error_squares)
        share = normwise_share(self.elements)
        allowed = share * math.sqrt(self.bound_squares) + math.sqrt(self.rounding_squares)
        normwise_ratio, normwise = (
            0.0 if error == 0.0 else error / norm if norm > 0.0 else math.inf
            for norm in (allowed, math.sqrt(self.reference_squares))
        )
        if math.isnan(self.max_abs_error):
            normwise = normwise_ratio = math.nan
        within = normwise_ratio <= 1.0 or self.elements == 0
        reason = ""
        if self.beyond:
            reason = (
                f"{self.beyond} of {self.elements} elements are wrong; the worst, at {self.worst_index}, is "
                f"{self.worst_value:.9g}, expected {self.worst_reference:.9g} within {self.worst_bound:.3g}"
            )
            if self.false_nans:
                reason += f"; {self.false_nans} are NaN where the reference is a number"
            if self.missing_nans:
                reason += f"; {self.missing_nans} are numbers where the reference is NaN"
            if self.odd_infinities:
                reason += f"; {self.odd_infinities} are infinite where the reference is not, or otherwise"
        elif not within:
            reason = (
                f"every element is within its bound, but all together are off by {normwise:.3g} of the "
                f"reference's norm, {normwise_ratio:.3g} of what is allowed; the worst, at {self.worst_index}, "
                f"is {self.worst_value:.9g}, expected {self.worst_reference:.9g}"
            )
        passed, worst = (self.beyond == 0 and within, (self.worst_index, self.worst_value, self.worst_reference))
        profiles = self._profiles()
        kept = profiles if axes is None or not profiles else tuple(profiles[axis] for axis in axes)
        return Comparison(passed, self.max_abs_error, self.max_ratio, normwise, normwise_ratio, *worst, reason, kept)

    def _profiles(self) -> tuple[Array, ...]:
        """Those of all parts: the first axis is in parts, and the others are common to them."""
        if not self.parts:
            return ()
        first, *others = zip(*(along for _, along in sorted(self.parts, key=lambda part: part[0])), strict=True)
        return (np.concatenate(first), *(np.maximum.reduce(each) for each in others))


def _misfit(result: Any, shape: tuple[int, ...], dtype: str | None) -> str:
    """Why ``result`` cannot be compared at all; empty when it can."""
    if not isinstance(result, np.ndarray):
        return f"the result is a {type(result).__name__}; expected a NumPy array"
    if result.shape != shape:
        return f"the result has shape {result.shape}; the reference has shape {shape}"
    if result.dtype.name not in DTYPES or (dtype is not None and result.dtype != dtype):
        return f"the result has dtype {result.dtype}; expected {dtype or 'a floating-point dtype'}"
    return ""


def compare(result: np.ndarray, reference: Array, bound: Array | float, *, dtype: str | None = None) -> Comparison:
    """Compare a result with the reference, element by element. Nothing is broadcast.

    NaN matches NaN only and an infinity the same infinity, except that a result may be infinite where the
    reference is, within its bound, beyond the largest number of the result's dtype.

    Args:
        result: what is checked.
        reference: the truth, float64, of the same shape.
        bound: largest error allowed; an array of the same shape, or one number for all.
        dtype: what the result's dtype has to be; None for any floating-point dtype.

    Returns:
        What was found. Wrong shapes and dtypes are failures, not exceptions; two empty arrays agree.
    """
    misfit = _misfit(result, reference.shape, dtype)
    if misfit:
        return refusal(misfit)
    tally = _Tally()
    bounds = np.full(reference.shape, float(bound)) if isinstance(bound, int | float) else bound
    if bounds.shape != reference.shape:
        return refusal(f"the bound has shape {bounds.shape}; the reference has shape {reference.shape}")
    tally.add(result, reference.astype(np.float64), bounds, 0)
    return tally.finish()


def result_rounding(reference: Array, dtype: np.dtype[Any] | str) -> Array:
    """The largest error of rounding each element once to ``dtype``; that of an infinite one is not finite."""
    final = limits_of(dtype)
    rounding: Array = np.abs(reference) * float(final.eps / 2)
    rounding += float(final.smallest_subnormal)
    return rounding


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A new array in which every element is NaN, to be passed as ``output``: what is not written shows.

    Args:
        shape: of the array.
        dtype: one of :data:`dispatcher.problem.operator.DTYPES`.
    """
    return np.full(shape, np.nan, dtype)


# ---- with the reference ------------------------------------------------------------------------------------
def _each_part(
    operator: Operator, tensors: Tensors, progress: Progress | None, take: Callable[[slice, Array, Array], None]
) -> None:
    """Call ``take`` with parts of the result: slice of its batch axis, reference, and bound on all errors.

    Calls may come from several threads.
    """

    def finish(part: slice, reference: Array, bound: Array) -> None:
        bound += result_rounding(reference, operator.dtype)
        bound *= operator.problem.tolerance
        take(part, reference, bound)

    registry.error_bounds().bounded_parts(operator, tensors, progress, finish)


def bounded_reference(operator: Operator, tensors: Tensors, progress: Progress | None = None) -> tuple[Array, Array]:
    """The reference and the largest error that a correct result may have, element by element.

    Args:
        operator: what to compute.
        tensors: every input tensor by name.
        progress: told the fraction done, from time to time.

    Returns:
        Two float64 arrays of ``operator.output_shape``.
    """
    reference, bound = np.empty(operator.output_shape), np.empty(operator.output_shape)
    whole, whole_bound = operator.with_all_axes(reference), operator.with_all_axes(bound)

    def take(part: slice, values: Array, bounds: Array) -> None:
        whole[part], whole_bound[part] = values, bounds

    _each_part(operator, tensors, progress, take)
    return reference, bound


def verify_result(
    operator: Operator, tensors: Tensors, result: np.ndarray, progress: Progress | None = None
) -> Comparison:
    """Compare a result with the reference, a few batch items at a time.

    Args:
        operator: what was computed.
        tensors: every input tensor by name.
        result: what was got; it must have the operator's output shape and dtype.
        progress: told the fraction done, from time to time.
    """
    return verify_results(operator, tensors, [result], progress)[0]


def verify_results(
    operator: Operator,
    tensors: Tensors,
    results: Sequence[np.ndarray],
    progress: Progress | None = None,
    *,
    slacks: Sequence[float] | None = None,
) -> list[Comparison]:
    """Compare several results of one operator with the reference, which is computed once.

    Args:
        operator: what was computed.
        tensors: every input tensor by name.
        results: what was got, for example on several devices.
        progress: told the fraction done, from time to time.
        slacks: for each result, a factor on its error bound; 1 where it is left out.
    """
    misfits = [_misfit(result, operator.output_shape, operator.dtype) for result in results]
    tallies = [_Tally() for _ in results]
    factors = [1.0] * len(results) if slacks is None else slacks
    lock = threading.Lock()

    def take(part: slice, values: Array, bounds: Array) -> None:
        with lock:
            for tally, result, misfit, factor in zip(tallies, results, misfits, factors, strict=True):
                if not misfit:
                    tally.add(
                        operator.with_all_axes(result)[part],
                        values,
                        bounds if factor == 1.0 else factor * bounds,
                        part.start,
                    )

    if not all(misfits):
        _each_part(operator, tensors, progress, take)
    return [
        refusal(misfit) if misfit else tally.finish(operator.axes)
        for misfit, tally in zip(misfits, tallies, strict=True)
    ]
