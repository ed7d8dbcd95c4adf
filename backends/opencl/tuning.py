"""Which options are worth measuring for an operator on a CPU device, and filing the winner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dispatcher.backends.opencl import lines, tuned
from dispatcher.backends.opencl.channels import suits
from dispatcher.backends.opencl.groups import Group, LineRules
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.target import Facts
from dispatcher.backends.opencl.tiles import Fold
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.plan.groups import split
from dispatcher.problem.operator import Operator
from dispatcher.timing.winners import measured_with

#: Boxes to measure for each algorithm and register tile: those with the least estimated work.
BOXES = 3
#: Winograd transforms to measure: those with the least estimated work.
TRANSFORMS = 4


def _convolutions(operator: Operator) -> Iterator[tuple[ConvGeometry, Fold | None]]:
    """Geometry and fold of each convolution as the CPU kernels run it."""
    for group in split(operator, lambda first: Group(operator, first, LineRules())):
        if group.convolution is not None:
            yield group.convolution.geometry, None if group.fold is None else group.fold[0]


def _real(operator: Operator) -> np.dtype[np.floating]:
    return np.dtype(np.float64 if operator.dtype == "float64" else np.float32)


def candidates(runtime: OpenClRuntime, operator: Operator) -> list[dict[str, str]]:
    """Options to measure: the untuned default, then algorithms, Winograd's transforms, register tiles, boxes.

    Tiles are ranked for the operator's first convolution. Empty where nothing can be tuned.
    """
    facts, real = runtime.facts, _real(operator)
    convolutions = list(_convolutions(operator))
    if not facts.cpu or not convolutions:
        return []
    geometry, fold = convolutions[0]
    found = [Options(tuned="ignore").given()]

    def measure(fixed: Options, register_tiles: tuple[tuple[int, int], ...]) -> None:
        for c, w in register_tiles:
            options = replace(fixed, tile=f"{c}x{w}")
            ranked = lines.ranked(geometry, fold, facts, real, options, transformed=fixed.algorithm == "winograd")
            for _, tile in ranked[:BOXES]:
                box, line = f"{tile.box_d}x{tile.box_h}", "flat" if tile.flat else "rows"
                found.append(replace(options, box=box, line=line).given())

    device = facts.device_class
    measure(Options("direct"), device.register_tiles)
    if suits(geometry, facts.lanes(real)):
        options = Options("direct", line="channels")
        _, tile = lines.ranked(geometry, fold, facts, real, options, transformed=False)[0]
        size, box = f"{tile.thread_c}x{tile.thread_w}", f"{tile.box_d}x{tile.box_h}"
        found.append(replace(options, tile=size, box=box).given())
    for options in transforms(geometry, fold, facts, real):
        measure(options, device.winograd_tiles[:2])
    return found


def transforms(geometry: ConvGeometry, fold: Fold | None, facts: Facts, real: np.dtype[np.floating]) -> list[Options]:
    """Winograd's transforms whose estimated work is least, at most :data:`TRANSFORMS`; none where there can be none."""
    if lines.no_transform(geometry) is not None:
        return []
    ranked = lines.ranked(geometry, fold, facts, real, Options("winograd"), transformed=True)
    names = ("planes", "rows", "columns")
    outputs = list(dict.fromkeys(tile.outputs for _, tile in ranked))[:TRANSFORMS]
    return [Options("winograd", **dict(zip(names, map(str, each), strict=True))) for each in outputs]


def remember(runtime: OpenClRuntime, operator: Operator, options: Options, gain: float) -> bool:
    """File ``options`` for every convolution of ``operator``; whether that could be done."""
    about = measured_with(operator, runtime.device.name.strip())
    return tuned.remember(runtime.identity, _convolutions(operator), _real(operator).name, options, gain, about)
