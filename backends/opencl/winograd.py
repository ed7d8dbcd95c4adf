"""Winograd transforms F(m, n) along one axis, and the weights packed for them.

The one place that knows the coefficients.

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
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate

import numpy as np

from dispatcher.backends.opencl.tiles import LineLayout
from dispatcher.ops.geometry import AxisGeometry, AxisPhase, ConvGeometry

Row = tuple[Fraction, ...]

HALF = Fraction(1, 2)
#: Points at which polynomials are evaluated, by p. Up to p = 4 sums of inputs have no more than two terms; above,
#: these round least among all choices from 0, 1, 2 and 1/2 of either sign, as much as a direct sum.
POINTS: dict[int, tuple[int | Fraction, ...]] = {2: (0,), 3: (0, 1), 4: (0, 1, -1), 5: (0, -1, HALF, 2)}
#: Most taps of a phase that has transforms.
MOST_TAPS = 3


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


def _from_roots(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the product of ``x - root``, constant first."""
    polynomial = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *polynomial], [root * c for c in polynomial] + [Fraction(0)]
        polynomial = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return polynomial


@cache
def transform(outputs: int, taps: int) -> Transform:
    """F(``outputs``, ``taps``) for 1 to :data:`MOST_TAPS` taps.

    Row i of B^T has the coefficients of the product of all x - point but that of point i, up to sign, so that the
    factors that make it an identity are all in G. F(m, 1) is the product itself, without sums.
    """
    products = outputs + taps - 1
    if taps == 1:
        unit = tuple(tuple(Fraction(int(i == j)) for j in range(products)) for i in range(products))
        return Transform(unit, ((Fraction(1),),) * products, unit)
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


@dataclass(frozen=True)
class Sum:
    """The input sum ``x[a] + sign * x[b]``; ``sign`` is 0 where there is only one."""

    a: int
    b: int
    sign: int


def pair_sums(taps: int) -> tuple[Sum, ...]:
    """The input sums of F(2, ``taps``), none of which has more than two terms."""
    sums = []
    for row in transform(2, taps).inputs:
        a = row.index(Fraction(1))
        others = [(k, int(c)) for k, c in enumerate(row) if c != 0 and k != a]
        assert len(others) < 2 and all(abs(sign) == 1 for _, sign in others)
        sums.append(Sum(a, *others[0]) if others else Sum(a, a, 0))
    return tuple(sums)


def phase_reason(phase: AxisPhase) -> str | None:
    """None when F(m, n) covers the phase, else why not."""
    if not 1 <= len(phase.taps) <= MOST_TAPS:
        return f"a phase has {len(phase.taps)} taps; transforms exist for 1 to {MOST_TAPS}"
    first = phase.taps[0].offset
    if any(tap.offset != first + i for i, tap in enumerate(phase.taps)):
        return "a phase's taps are not neighbours"
    return None


def axis_reason(axis: AxisGeometry) -> str | None:
    """None when every phase of the axis has a transform, else why not."""
    for phase in axis.phases:
        reason = phase_reason(phase)
        if reason is not None:
            return f"{axis.name}: {reason}"
    return None


def even_weights(weight: np.ndarray, geometry: ConvGeometry) -> bool:
    """Whether the taps of each output channel that transforms mix weigh as much as one another, and their channels.

    An output may read its tile through one tap alone, at a border or beside zeros, and its error comes from all taps of
    its tile. So the magnitudes of each tap's ``N`` input channels have to add up to ``sqrt(N)/4`` times the largest
    weight, and no more than an eighth of them may vanish beside it, lest the channels that hold the data be those. The
    kernel sees to the data (winograd_range.cl).

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``, finite.
        geometry: of the convolution.
    """
    mixed = tuple(axis for axis, along in ((3, geometry.depth), (4, geometry.height)) if along.most_taps > 1)
    channels = geometry.in_channels // geometry.groups
    sizes = np.abs(weight, dtype=np.float64).reshape(geometry.groups, channels, *weight.shape[1:])
    largest = sizes.max(axis=(1, *mixed), keepdims=True)[:, 0]
    even = (sizes.sum(axis=1) >= math.sqrt(channels) / 4.0 * largest).all()
    vanishing = (sizes <= 2.0**-12 * largest[:, np.newaxis]).sum(axis=1)
    return not mixed or bool(even and vanishing.max() <= channels // 8)


def winograd_starts(layout: LineLayout) -> list[int]:
    """Where the weights of each (rd, rh) start in what :func:`pack_winograd_weights` returns."""
    g = layout.geometry
    taps_w = sum(len(phase.taps) for phase in g.width.phases)
    sizes = [
        (len(d.taps) + 1) * (len(h.taps) + layout.tile.rows - 1) * taps_w * layout.weights_per_tap
        for d in g.depth.phases
        for h in g.height.phases
    ]
    return [0, *accumulate(sizes[:-1])]


def pack_winograd_weights(weight: np.ndarray, layout: LineLayout) -> np.ndarray:
    """Transformed weights in the order in which the kernel streams them.

    Args:
        weight: ``(IC, OC/groups, KD, KH, KW)``.

    Returns:
        One-dimensional weights: for each (rd, rh, depth component, rw)
        ``[group][channel tile][height component][KW taps][IC/groups][thread_c]``.
    """
    g, c = layout.geometry, layout.tile.thread_c
    group_ic, group_oc = g.in_channels // g.groups, g.out_channels // g.groups
    tiles = -(-group_oc // c)
    padded = np.zeros((g.groups, group_ic, tiles * c, *weight.shape[2:]), np.float64)
    padded[:, :, :group_oc] = weight.reshape(g.groups, group_ic, group_oc, *weight.shape[2:])
    padded = padded.reshape(g.groups, group_ic, tiles, c, *weight.shape[2:])

    def components(phase: AxisPhase, outputs: int, values: np.ndarray, axis: int) -> np.ndarray:
        picked = np.take(values, [tap.index for tap in phase.taps], axis=axis)
        factors = np.array(transform(outputs, len(phase.taps)).taps, np.float64)
        return np.moveaxis(np.tensordot(factors, picked, axes=(1, axis)), 0, axis)

    parts: list[np.ndarray] = []
    for phase_d in g.depth.phases:
        along_depth = components(phase_d, 2, padded, 4)
        for phase_h in g.height.phases:
            both = components(phase_h, layout.tile.rows, along_depth, 5)
            for part in range(both.shape[4]):
                for phase_w in g.width.phases:
                    picked = np.take(both[:, :, :, :, part], [tap.index for tap in phase_w.taps], axis=5)
                    # from [group][ic][tile][c][component][tap] to [group][tile][component][tap][ic][c]
                    ordered = picked.transpose(0, 2, 4, 5, 1, 3).astype(weight.dtype)
                    parts.append(ordered.ravel())
    return np.concatenate(parts)
