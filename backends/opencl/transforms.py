"""Winograd transforms F(m, n) along one axis: the one place that knows the coefficients.

For a phase with taps g[0..n-1] at consecutive input offsets, m neighbouring outputs

    y[j] = sum over k of x[j + k] * g[k],  j = 0 .. m - 1

follow from p = m + n - 1 products instead of m * n:

    y = A^T ((G g) * (B^T x)),  A^T of m x p, G of p x n, B^T of p x p numbers.

These are the transpose of Toom and Cook's product of polynomials with m and n coefficients, which evaluates both at
p - 1 points and "at infinity", where the leading coefficient is left. (Winograd, "Arithmetic complexity of
computations", 1980; Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations, product

from dispatcher.ops.geometry import AxisGeometry

Row = tuple[Fraction, ...]

#: Points at which polynomials are evaluated, by p. Up to p = 4 sums of inputs have no more than two terms; above,
#: these round least among all choices from 0, 1, 2, 3, 4, their inverses, 2/3, 3/4 and the inverses of these, of either
#: sign, by the variance of random inputs and taps: F(3, 3), F(2, 4) and F(2, 5) as much as a direct sum.
POINTS: dict[int, tuple[int | Fraction, ...]] = {
    2: (0,),
    3: (0, 1),
    4: (0, 1, -1),
    5: (Fraction(1, 3), Fraction(-1, 3), Fraction(4, 3), Fraction(-4, 3)),
    6: (0, Fraction(2, 3), Fraction(-2, 3), Fraction(3, 2), Fraction(-3, 2)),
}
#: The most products p of a transform. With more, errors come close to what ``dispatcher verify`` allows.
MOST_PRODUCTS = max(POINTS)
#: Most taps of a phase that has transforms.
MOST_TAPS = 5
#: Most outputs of a transform. F(4, 3) would save a tenth of F(3, 3)'s products, and round half as much again.
MOST_OUTPUTS = 3


def most_outputs(taps: int) -> int:
    """The largest m for which there is an F(m, ``taps``); 1 where a direct sum is all there is."""
    return min(MOST_OUTPUTS, MOST_PRODUCTS + 1 - taps) if taps <= MOST_TAPS else 1


@dataclass(frozen=True)
class Transform:
    """F(m, n): the rows of three matrices.

    Attributes:
        inputs: B^T, ``(p, p)``: each product's sum of inputs.
        taps: G, ``(p, n)``: each product's sum of taps.
        outputs: A^T, ``(m, p)``: each output's sum of products.
    """

    inputs: tuple[Row, ...]
    taps: tuple[Row, ...]
    outputs: tuple[Row, ...]


def _unit(size: int) -> tuple[Row, ...]:
    return tuple(tuple(Fraction(int(i == j)) for j in range(size)) for i in range(size))


def _from_roots(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the product of ``x - root``, constant first."""
    polynomial = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *polynomial], [root * c for c in polynomial] + [Fraction(0)]
        polynomial = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return polynomial


@cache
def transform(outputs: int, taps: int) -> Transform:
    """F(``outputs``, ``taps``) for 1 to :data:`MOST_TAPS` taps, or any number of them where there is one output.

    Row i of B^T has the coefficients of the product of all x - point but that of point i, up to sign, so that the
    factors that make it an identity are all in G. With one tap or one output nothing is saved: the products are
    the outputs', without sums, or the taps', added up.
    """
    products = outputs + taps - 1
    if taps == 1:
        return Transform(_unit(products), ((Fraction(1),),) * products, _unit(products))
    if outputs == 1:
        return Transform(_unit(products), _unit(products), ((Fraction(1),) * products,))
    points = [Fraction(point) for point in POINTS[products]]
    inputs: list[Row] = []
    factors: list[Row] = []
    for point in points:
        others = [other for other in points if other != point]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        sign = 1 if scale > 0 else -1
        inputs.append((*(sign * c for c in _from_roots(others)), Fraction(0)))
        factors.append(tuple(point**k / abs(scale) for k in range(taps)))
    inputs.append(tuple(_from_roots(points)))
    factors.append((*(Fraction(0),) * (taps - 1), Fraction(1)))
    rows = tuple((*(point**j for point in points), Fraction(int(j == outputs - 1))) for j in range(outputs))
    return Transform(tuple(inputs), tuple(factors), rows)


@cache
def growth(outputs: int, taps: int) -> float:
    """How many times the rounding error of a direct sum that of F(``outputs``, ``taps``) may be.

    The root of the error's variance where all that an output reads, of many channels, lies at one position, the one
    where it grows most, beside the same of a direct sum: the taps and the roundings of sums and products are random.
    """
    matrices = transform(outputs, taps)
    variances = [sum(float(f) ** 2 for f in row) for row in matrices.taps]
    return math.sqrt(
        max(
            sum(float(a * b) ** 2 * v for a, b, v in zip(row, column, variances, strict=True))
            for row, column in product(matrices.outputs, zip(*matrices.inputs, strict=True))
        )
    )


@dataclass(frozen=True)
class Sum:
    """One step of a product of a matrix and a vector.

    Attributes:
        name: of the result: ``y0``, ``y1``, ... for the product's rows, ``s0``, ... for what several of them share.
        terms: names of what is added up, ``x0``, ... for the vector's elements, each with its factor.
    """

    name: str
    terms: tuple[tuple[str, Fraction], ...]


def sums_of(rows: Sequence[Row]) -> list[Sum]:
    """The product of a matrix and a vector, in steps that share what they can.

    Points of either sign give columns, and rows, that are equal up to signs: what has the same sign and what has the
    other one are added up once for both.
    """
    steps: list[Sum] = []

    def shared(*terms: tuple[str, Fraction]) -> str:
        if len(terms) == 1 and terms[0][1] == 1:
            return terms[0][0]
        steps.append(Sum(f"s{len(steps)}", terms))
        return steps[-1].name

    one = Fraction(1)
    left = [{f"x{k}": factor for k, factor in enumerate(row) if factor} for row in rows]
    for a, b in combinations([f"x{k}" for k in range(len(rows[0]))], 2):
        users = [row for row in left if a in row or b in row]
        signs = {row[a] == row[b] for row in users if a in row and b in row and abs(row[a]) == abs(row[b])}
        if len(users) <= len(signs) or any(abs(row.get(a, 0)) != abs(row.get(b, 0)) for row in users):
            continue
        names = {same: shared((a, one), (b, one if same else -one)) for same in sorted(signs, reverse=True)}
        for row in users:
            factor, other = row.pop(a), row.pop(b)
            row[names[factor == other]] = factor
    done: dict[int, Sum] = {}
    for i, j in combinations(range(len(left)), 2):
        first, second = left[i], left[j]
        if (
            {i, j} & set(done)
            or len(first) < 3
            or {k: abs(f) for k, f in first.items()} != {k: abs(f) for k, f in second.items()}
        ):
            continue
        parts = [[(k, f) for k, f in first.items() if (f == second[k]) is same] for same in (True, False)]
        if all(parts):
            even, odd = (shared(*part) for part in parts)
            done[i] = Sum(f"y{i}", ((even, one), (odd, one)))
            done[j] = Sum(f"y{j}", ((even, one), (odd, -one)))
    return steps + [done.get(i, Sum(f"y{i}", tuple(row.items()))) for i, row in enumerate(left)]


@cache
def terms(outputs: int, taps: int) -> tuple[int, int]:
    """How many terms the sums of F(``outputs``, ``taps``) have: those of inputs, and those of products."""
    matrices = transform(outputs, taps)
    inputs, products = (sum(len(each.terms) for each in sums_of(m)) for m in (matrices.inputs, matrices.outputs))
    return inputs, products


def axis_growth(axis: AxisGeometry, outputs: int) -> float:
    """:func:`growth` of the axis's phase where it is largest."""
    return max(growth(outputs, len(phase.taps)) for phase in axis.phases if phase.taps)


def axis_reason(axis: AxisGeometry) -> str | None:
    """None when every phase of the axis has a transform, else why not."""
    if axis.strided is not None and axis.kernel == 2 and axis.strided.kernel < 2 * axis.strided.step:
        return f"{axis.name}: most phases of the input have one tap"
    for phase in axis.phases:
        if not 1 <= len(phase.taps) <= MOST_TAPS:
            return f"{axis.name}: a phase has {len(phase.taps)} taps; transforms exist for 1 to {MOST_TAPS}"
        first = phase.taps[0].offset
        if any(tap.offset != first + i for i, tap in enumerate(phase.taps)):
            return f"{axis.name}: a phase's taps are not neighbours"
    return None
