"""Winograd transforms F(2, n) along one axis, and the weights packed for them.

The one place that knows the coefficients.

For a phase with taps g[0..n-1] at consecutive input offsets, two neighbouring outputs

    y[j] = sum over k of x[j + k] * g[k],  j = 0, 1

follow from n + 1 products z[p] = (x[a_p] + s_p * x[b_p]) * (sum over k of G[p][k] * g[k]) by additions alone:
y[0] sums all components but the last, y[1] all but the first, those from the third on negated.
(Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray, "Fast algorithms for convolutional
neural networks", 2016.)
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np

from backends.opencl.tiles import LineLayout
from dispatcher.geometry import AxisGeometry, AxisPhase

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Component:
    """One product: the input sum ``x[a] + sign * x[b]`` and the factors of the taps."""

    a: int
    b: int
    sign: int
    taps: tuple[Fraction, ...]


def _component(a: int, b: int, sign: int, *taps: int | Fraction) -> Component:
    return Component(a, b, sign, tuple(Fraction(tap) for tap in taps))


#: Components of F(2, n), by n.
TRANSFORMS: dict[int, tuple[Component, ...]] = {
    1: (_component(0, 0, 0, 1), _component(1, 1, 0, 1)),
    2: (_component(0, 1, -1, 1, 0), _component(1, 1, 0, 1, 1), _component(1, 2, -1, 0, 1)),
    3: (
        _component(0, 2, -1, 1, 0, 0),
        _component(1, 2, 1, HALF, HALF, HALF),
        _component(2, 1, -1, HALF, -HALF, HALF),
        _component(1, 3, -1, 0, 0, 1),
    ),
}


def phase_reason(phase: AxisPhase) -> str | None:
    """None when F(2, n) covers the phase, else why not."""
    if len(phase.taps) not in TRANSFORMS:
        return f"a phase has {len(phase.taps)} taps; transforms exist for 1 to 3"
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


def winograd_starts(layout: LineLayout) -> list[int]:
    """Where the weights of each (rd, rh) start in what :func:`pack_winograd_weights` returns."""
    g = layout.geometry
    taps_w = sum(len(phase.taps) for phase in g.width.phases)
    sizes = [
        (len(d.taps) + 1) * (len(h.taps) + 1) * taps_w * layout.weights_per_tap
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

    def components(phase: AxisPhase, values: np.ndarray, axis: int) -> np.ndarray:
        picked = np.take(values, [tap.index for tap in phase.taps], axis=axis)
        factors = np.array([[float(f) for f in part.taps] for part in TRANSFORMS[len(phase.taps)]])
        return np.moveaxis(np.tensordot(factors, picked, axes=(1, axis)), 0, axis)

    parts: list[np.ndarray] = []
    for phase_d in g.depth.phases:
        along_depth = components(phase_d, padded, 4)
        for phase_h in g.height.phases:
            both = components(phase_h, along_depth, 5)
            for part in range(both.shape[4]):
                for phase_w in g.width.phases:
                    picked = np.take(both[:, :, :, :, part], [tap.index for tap in phase_w.taps], axis=5)
                    # from [group][ic][tile][c][component][tap] to [group][tile][component][tap][ic][c]
                    ordered = picked.transpose(0, 2, 4, 5, 1, 3).astype(weight.dtype)
                    parts.append(ordered.ravel())
    return np.concatenate(parts)
