"""The reference together with an error bound for every element.

The reference walks through the pipeline in float64. Beside each value goes a bound on the error that a
correct implementation in the operator's arithmetic may make there: a forward error bound in the style of a
running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 3.3).
A sum of ``n`` terms is granted ``4*sqrt(n)`` units of roundoff instead of the worst case ``n``, and errors of
different terms are taken to be independent. Rounding errors behave like that (Higham and Mary, "A new approach
to probabilistic rounding error analysis", SIAM Journal on Scientific Computing 41, 2019), and the worst case
would let wrong results pass. The price: data made so that hundreds of large terms cancel in a row can exceed
the bound honestly; a problem file may then set a ``tolerance``. docs/verification.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from dispatcher.backends.numpy_ref import steps as reference
from dispatcher.backends.numpy_ref.backend import Meter, chunks, for_each_chunk, output_chunk, walk
from dispatcher.backends.numpy_ref.steps import Array, Progress
from dispatcher.interface import Tensors
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax, Step
from dispatcher.problem.operator import Operator


@dataclass(frozen=True)
class Bounded:
    """A value of the pipeline and, in the same shape, the largest error a correct implementation makes.

    Attributes:
        common: an error on top, which all elements have alike: a norm's deviations from the mean do not have it.
    """

    value: Array
    error: Array
    common: float = 0.0

    @property
    def whole(self) -> Bounded:
        """The same with all of it in ``error``."""
        return Bounded(self.value, self.error + self.common) if self.common else self


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that an implementation has to use, or a better one.

    Attributes:
        roundoff: unit roundoff of every operation.
        product: relative error granted to each product of a convolution on top of that.
        tiny: smallest normal number; smaller ones may be flushed to zero.
        squares: dtype in which the sums of a convolution's squared terms are taken.
    """

    roundoff: float
    product: float
    tiny: float
    squares: type[np.floating[Any]]

    def sum_of(self, terms: float) -> float:
        """Error of a sum, relative to the sum of its terms' magnitudes."""
        return min(terms, 4.0 * math.sqrt(terms)) * self.roundoff


def arithmetic_of(operator: Operator) -> Arithmetic:
    """The arithmetic that ``operator`` asks for: float16 is computed in float32 and rounded at the end."""
    if operator.dtype == "float64":
        # Twice the unit roundoff, since the reference itself has errors of this size.
        return Arithmetic(2.0**-52, 0.0, float(np.finfo(np.float64).tiny), np.float64)
    # TF32 has 10 explicit bits: 2**-11 for each of the two factors.
    # TF32: both factors are rounded to 2^-11. Float32 on tensor cores: three TF32 products leave out the product of the
    # small parts, up to 2^-22, and cut those parts, up to 2^-23 each; they seldom meet.
    product = 2.0**-10 if operator.precision == "tf32" else 2.0**-23
    return Arithmetic(2.0**-24, product, float(np.finfo(np.float32).tiny), np.float32)


def _together(errors: Array, axes: tuple[int, ...]) -> Array:
    """Error of a sum of terms that have independent errors."""
    independent = 2.0 * np.sqrt(np.square(errors).sum(axis=axes, keepdims=True))
    smaller: Array = np.minimum(errors.sum(axis=axes, keepdims=True), independent)
    return smaller


def _extent(array: Array, axes: tuple[int, ...]) -> int:
    return math.prod(array.shape[axis] for axis in axes)


def _magnitude(array: Array) -> float:
    """A power of two near the largest finite magnitude."""
    largest = float(np.max(array, where=np.isfinite(array), initial=0.0))
    return math.ldexp(1.0, math.frexp(largest)[1])


def _smallest(array: Array) -> float:
    """The smallest magnitude other than zero; 1 when there is none."""
    return float(np.min(array, where=array > 0.0, initial=np.inf)) if np.any(array > 0.0) else 1.0


class _Rules:
    """How each step passes on errors and which ones it adds. ``y`` is the step's exact value."""

    def __init__(self, arithmetic: Arithmetic, advance: Progress) -> None:
        self.arithmetic = arithmetic
        self.advance = advance
        self.table: dict[type[Step], Callable[..., Array]] = {
            Convolution: self.convolution,
            Pointwise: self.pointwise,
            Normalize: self.normalize,
            Softmax: self.softmax,
            Pool: self.pool,
            Reduce: self.reduce,
        }

    def load(self, array: Array) -> Bounded:
        """An input tensor is exact, but its subnormal numbers may be flushed to zero."""
        error = np.where(np.abs(array) < self.arithmetic.tiny, np.abs(array), 0.0)
        return Bounded(array, error if error.any() else np.broadcast_to(0.0, array.shape))

    def number(self, value: float) -> Bounded:
        """A number is rounded once; an infinite one is exact."""
        error = abs(value) * self.arithmetic.roundoff if math.isfinite(value) else 0.0
        return Bounded(np.float64(value), np.float64(error))

    def compute(self, step: Step, x: Bounded, operands: Sequence[Bounded | float]) -> Bounded:
        """One step of the pipeline with its error."""
        bounded = [operand.whole if isinstance(operand, Bounded) else self.number(operand) for operand in operands]
        common = 0.0
        if isinstance(step, Pointwise) and step.function in ("add", "subtract") and bounded[0].value.ndim == 0:
            # The number is rounded once, for all elements.
            common = x.common + float(bounded[0].error)
            x, bounded = Bounded(x.value, x.error), [Bounded(bounded[0].value, np.float64(0.0))]
        elif not isinstance(step, Normalize):
            x = x.whole
        y = reference.apply(step, x.value, [operand.value for operand in bounded], self.advance)
        error = self.table[type(step)](step, x, y, *bounded)
        # An infinite or undefined value has no error: it is met exactly or not at all.
        return Bounded(y, np.where(np.isfinite(y), error + self.arithmetic.tiny, 0.0), common)

    def convolution(self, step: Convolution, x: Bounded, y: Array, weight: Bounded, *bias: Bounded) -> Array:
        """The rounding of products and partial sums, and the input's errors times the weights."""
        terms = step.geometry.longest_sum + len(bias)
        # Winograd transforms round a sum once more before and after, on the axes where a phase has several taps: a
        # fifth more, of the output's own terms. What an implementation lets leak from others is not granted.
        transformed = any(axis.most_taps > 1 for axis in step.geometry.axes)
        unit = (1.2 if transformed else 1.0) * self.arithmetic.sum_of(terms) + 2.0 * self.arithmetic.product
        # Partial sums of terms in no particular order are of the size of sqrt(y^2 + sum of squared terms).
        # Independent errors of the terms add up in the same way, so that one convolution gives both.
        squares = self.squares(step, np.square(x.value) + np.square(2.0 / unit * x.error), weight.value)
        for term in bias:
            squares += np.square(term.value)
        # What is infinite or undefined has no error.
        squares[~np.isfinite(squares)] = 0.0
        y_squared = np.square(y)
        squares = np.maximum(squares, y_squared / terms)
        error: Array = unit * np.sqrt(y_squared + squares)
        # The more the terms resemble each other, the more do their rounding errors; for equal terms, this is
        # half of the worst case.
        alike = np.divide(y_squared, squares, out=np.zeros_like(y), where=squares > 0.0)
        error += self.arithmetic.roundoff / 2.0 * alike * np.abs(y)
        if weight.error.any():
            error += 2.0 * np.sqrt(self.squares(step, np.square(x.value), weight.error))
        for term in bias:
            error += term.error
        return error

    def squares(self, step: Convolution, x_squared: Array, weight: Array) -> Array:
        """The convolution of two squared arrays, accurate to a few digits."""
        scale_x, scale_w = _magnitude(x_squared), _magnitude(np.abs(weight))
        dtype = self.arithmetic.squares
        # Single precision is enough, unless small values would vanish beside the largest.
        if _smallest(x_squared) / scale_x * (_smallest(np.abs(weight)) / scale_w) ** 2 < np.finfo(np.float32).tiny:
            dtype = np.float64
        scaled = reference.convolution(
            step, (x_squared / scale_x).astype(dtype), np.square(weight / scale_w).astype(dtype), advance=self.advance
        )
        result: Array = scaled.astype(np.float64)
        result *= scale_x
        result *= scale_w**2
        return result

    def pointwise(self, step: Pointwise, x: Bounded, y: Array, *arguments: Bounded) -> Array:
        """A few roundings, and what the function makes of its arguments' errors at their ends."""
        form, unit = step.form, self.arithmetic.roundoff
        error: Array = 4.0 * unit * np.abs(y)
        if step.function in ("add", "subtract"):  # rounding a sum changes it by no more than its smaller term
            error = np.minimum(error, np.minimum(*(np.abs(term.value) + term.error for term in (x, *arguments))))
        if form.rounding is not None:
            error += unit * form.rounding(x.value)
        if form.slope is not None:
            return error + form.slope * sum((argument.error for argument in arguments), x.error)
        if form.name == "scale":  # exactly, also where errors are smaller than float64 resolves
            (by,) = arguments
            return error + np.abs(by.value) * x.error + (np.abs(x.value) + x.error) * by.error
        function = reference.POINTWISE[form.name]
        apart: Array = np.zeros_like(y)
        # An argument without an error has one end.
        ends = [(1.0, -1.0) if argument.error.any() else (0.0,) for argument in (x, *arguments)]
        for signs in product(*ends):
            corner = [a.value + sign * a.error for sign, a in zip(signs, (x, *arguments), strict=True)]
            apart = np.fmax(apart, np.where(np.isnan(corner_y := function(*corner)), np.inf, np.abs(corner_y - y)))
        if form.pole:
            pole = x if form.pole == "x" else arguments[0]
            apart = np.where((np.abs(pole.value) <= pole.error) & (pole.error > 0.0), np.inf, apart)
        return error + apart

    def normalize(self, step: Normalize, x: Bounded, y: Array, *affine: Bounded) -> Array:
        """Errors of the mean, the variance and the quotient, for a variance taken in two passes.

        The sum that the mean comes from is one of deviations from some value among those averaged, so that it is exact
        where they are equal. The mean may be rounded once, but not to what is beyond all of them.
        """
        unit = self.arithmetic.roundoff
        parts, axes = reference.split_groups(step, x.value)
        errors, _ = reference.split_groups(step, x.error)
        count = _extent(parts, axes)
        centred = reference.centred(parts, axes)
        variance = np.square(centred).mean(axis=axes, keepdims=True)

        mean_error = _together(errors, axes) / count
        apart = np.abs(centred)
        mean_error = mean_error + self.arithmetic.sum_of(count) * apart.mean(axis=axes, keepdims=True)
        rounding = 3.0 * unit * np.abs(parts.mean(axis=axes, keepdims=True))
        mean_error += np.minimum(rounding, apart.max(axis=axes, keepdims=True, initial=0.0))
        centred_error = errors + mean_error + unit * apart
        # The mean's error enters the variance by its square only.
        variance_error = 2.0 * _together(apart * errors, axes) / count
        variance_error += np.square(centred_error).mean(axis=axes, keepdims=True)
        variance_error += (self.arithmetic.sum_of(count) + 4.0 * unit) * (variance + step.eps)
        relative = np.minimum(variance_error / (variance + step.eps), 0.99)
        stretch = 1.0 / np.sqrt(1.0 - relative)

        deviation = np.sqrt(variance + step.eps)
        quotient = apart / deviation
        error = centred_error / deviation * stretch + quotient * (stretch - 1.0 + 4.0 * unit)
        # No element is further than sqrt(count) deviations from the mean.
        error = np.minimum(error, 2.0 * math.sqrt(count)).reshape(y.shape)
        quotient = quotient.reshape(y.shape)
        given = iter(affine)
        if step.weight is not None:
            weight = next(given)
            error = error * np.abs(weight.value) + quotient * (weight.error + 2.0 * unit * np.abs(weight.value))
        if step.bias is not None:
            bias = next(given)
            error = error + bias.error + 2.0 * unit * np.abs(bias.value)
        bounded: Array = error + 2.0 * unit * np.abs(y)
        return bounded

    def softmax(self, step: Softmax, x: Bounded, y: Array) -> Array:
        """Relative errors of the exponentials and of their sum."""
        unit = self.arithmetic.roundoff
        # An element at minus infinity is an exact zero, however deep it lies.
        depth = np.where(y > 0.0, x.value.max(axis=step.axes, keepdims=True) - x.value, 0.0)
        exponential = x.error + unit * (depth + 4.0)  # relative, since exp turns sums into products
        total = _together(y * x.error, step.axes) + (y * unit * (depth + 4.0)).sum(step.axes, keepdims=True)
        total = total + self.arithmetic.sum_of(_extent(y, step.axes))
        error: Array = np.where(y > 0.0, y * np.expm1(exponential + total), 0.0)
        return np.minimum(error, 1.0)

    def pool(self, step: Pool, x: Bounded, y: Array) -> Array:
        """Of a maximum, the largest error in its window; of a mean, its terms' errors and the rounding."""
        if step.form.monoid.errors == "selects":
            return reference.windows(step, x.error, np.maximum, 0.0)
        count = math.prod(step.window)

        def total(values: Array) -> Array:
            return reference.windows(step, values, np.add, 0.0)

        error = np.minimum(total(x.error), 2.0 * np.sqrt(total(np.square(x.error))))
        error += (self.arithmetic.sum_of(count) + 2.0 * self.arithmetic.roundoff) * total(np.abs(x.value))
        mean: Array = error / reference.counts(step)
        return mean

    def reduce(self, step: Reduce, x: Bounded, y: Array) -> Array:
        """As for pools, of what each value contributes; of log-sum-exp, the error of the sum relative to the sum."""
        form, unit = step.form, self.arithmetic.roundoff
        count = _extent(x.value, step.axes)
        error: Array
        if form.monoid.errors == "selects":
            error = x.error.max(axis=step.axes, keepdims=True, initial=0.0)
            return error
        rounding = self.arithmetic.sum_of(count) + 2.0 * unit
        if form.monoid.errors == "multiplies":
            sizes = np.abs(x.value)
            error = (sizes + x.error).prod(step.axes, keepdims=True) - sizes.prod(step.axes, keepdims=True)
            return np.abs(error) + rounding * np.abs(y)
        if form.shifted:
            share = np.exp(x.value - y)
            depth = x.value.max(axis=step.axes, keepdims=True, initial=-np.inf) - x.value
            error = _together(np.where(share > 0.0, share * (x.error + unit * (depth + 4.0)), 0.0), step.axes)
            error += self.arithmetic.sum_of(count) + 4.0 * unit * (1.0 + np.abs(y))
            return error
        whole = reference.REDUCTIONS[form.name]
        if form.finish not in ("t", "t * share"):  # of terms with one sign: all errors one way
            ends = [np.abs(whole(x.value + sign * x.error, step.axes) - y) for sign in (1.0, -1.0)]
            return np.maximum(*ends) + (rounding + 4.0 * unit) * np.abs(y)
        # Over no axes, a reduction gives what each value contributes.
        terms = whole(x.value, ())
        errors = x.error
        if form.lift != "x":
            ends = [np.abs(whole(x.value + sign * x.error, ()) - terms) for sign in (1.0, -1.0)]
            errors = np.maximum(*ends) + 4.0 * unit * np.abs(terms)
        error = _together(errors, step.axes)
        error += rounding * np.abs(terms).sum(axis=step.axes, keepdims=True)
        return error if form.finish == "t" else error / count


def bounded_parts(
    operator: Operator, tensors: Tensors, progress: Progress | None, take: Callable[[slice, Array, Array], None]
) -> None:
    """Compute the reference and its error bounds, a few batch items at a time.

    Args:
        operator: what to compute.
        tensors: every input tensor by name.
        progress: told the fraction done, from time to time.
        take: called with each part of the result, perhaps by several threads: the slice of its batch axis, the
            reference, and the bound on the errors of computing it, without the rounding of the result. It may change
            both arrays.
    """
    meter = Meter(progress, 2 * len(chunks(operator)) * len(operator.convolutions))
    rules = _Rules(arithmetic_of(operator), meter)

    def work(chunk: slice) -> None:
        exact = walk(operator, tensors, chunk, rules.load, rules.compute).whole
        take(output_chunk(operator, chunk), np.ascontiguousarray(exact.value), np.ascontiguousarray(exact.error))

    for_each_chunk(operator, work)
    if progress is not None:
        progress(1.0)
