"""What a call does and why: the geometry, the work, the device chosen and the launches it makes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dispatcher.device.selection import Choice, skipped_list
from dispatcher.interface import Device, PlannedLaunch, device_dict
from dispatcher.ops.geometry import AxisGeometry
from dispatcher.ops.steps import Convolution
from dispatcher.problem.messages import counted, picked
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.problem.shown import Drawn

MAX_STRIDE = 10_000  # phases are not listed for larger ones; there are stride**3 of them


@dataclass(frozen=True)
class PhaseGroup:
    """Phases of a convolution that have the same size, as matrix products over all groups of channels.

    Attributes:
        phases: how many there are.
        taps: kernel positions that take part, ``(depth, height, width)``.
        gemm_m: output voxels of one phase, the whole batch together.
        gemm_n: output channels of a group.
        gemm_k: products that one output adds up: input channels of a group times taps.
    """

    phases: int
    taps: tuple[int, int, int]
    gemm_m: int
    gemm_n: int
    gemm_k: int


@dataclass(frozen=True)
class AxisPlan:
    """One spatial axis of a convolution in the terms of the caller.

    Attributes:
        name: of the axis.
        input: extent of the input, as ``kernel`` and ``output`` are of the others.
        padding: a number, or zeros before and after the input where these differ.
    """

    name: str
    input: int
    kernel: int
    stride: int
    padding: int | tuple[int, int]
    output_padding: int
    dilation: int
    output: int


@dataclass(frozen=True)
class ConvolutionPlan:
    """The geometry of one convolution.

    Attributes:
        input_shape: ``(N, IC, ID, IH, IW)``.
        weight_shape: of the caller's tensor, ``(IC, OC/groups, KD, KH, KW)``; of an ordinary convolution
            ``(OC, IC/groups, KD, KH, KW)``.
        output_shape: ``(N, OC, OD, OH, OW)``.
        axes: the spatial ones, such as depth, height, width.
        groups: independent groups of channels.
        flops: floating-point operations.
        phase_groups: its phases; empty ones are left out, and all of them when a stride is above
            :data:`MAX_STRIDE`.
    """

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    axes: tuple[AxisPlan, ...]
    groups: int
    flops: int
    phase_groups: tuple[PhaseGroup, ...]


@dataclass(frozen=True, repr=False)
class Explanation(Drawn):
    """Made by :func:`dispatcher.explain` and by ``CompiledOperator.explain``.

    Attributes:
        operator: what is computed.
        device: the device that was chosen.
        skipped: (device or backend, reason) of each one that was preferred and passed over.
        convolutions: the geometry of each convolution, in order.
        launches: what one call launches, in order; empty for an empty batch.
    """

    operator: Operator
    device: Device
    skipped: tuple[tuple[str, str], ...]
    convolutions: tuple[ConvolutionPlan, ...]
    launches: tuple[PlannedLaunch, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers, ready for JSON."""
        return {
            **operator_dict(self.operator),
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "convolutions": [_convolution_dict(plan) for plan in self.convolutions],
            "launches": [picked(launch, *vars(launch)) for launch in self.launches],
        }

    def _headline(self) -> str:
        return f"{self.operator.problem.name} on {self.device.id}: {counted(len(self.launches), 'launch')}"

    def _facts(self) -> Mapping[str, object]:
        return {
            "device": self.device.name,
            "skipped": [f"{label}: {reason}" for label, reason in self.skipped],
            "launches": [f"{each.name} ({each.algorithm}): {', '.join(each.steps)}" for each in self.launches],
            "operations": self.operator.flops,
            "ideal bytes": self.operator.ideal_bytes,
        }


def explain_choice(operator: Operator, choice: Choice) -> Explanation:
    """The explanation of ``operator`` on the device that was chosen for it."""
    launches = () if choice.executable is None else tuple(choice.executable.launches)
    plans = tuple(_convolution_plan(step, operator.problem.rank) for step in operator.convolutions)
    return Explanation(operator, choice.device, choice.skipped, plans, launches)


def _convolution_plan(step: Convolution, rank: int) -> ConvolutionPlan:
    geometry = step.geometry
    listed = all(axis.stride <= MAX_STRIDE for axis in geometry.axes)
    # Phases of an axis that have the same number of outputs and taps, and how many there are of each kind.
    kinds = [
        Counter((phase.count, len(phase.taps)) for phase in axis.phases if phase.count) if listed else {}
        for axis in geometry.axes
    ]
    groups: Counter[tuple[tuple[int, int, int], int]] = Counter()
    for (d, n_d), (h, n_h), (w, n_w) in itertools.product(*(kind.items() for kind in kinds)):
        groups[(d[1], h[1], w[1]), geometry.batch * d[0] * h[0] * w[0]] += n_d * n_h * n_w
    in_group, out_group = geometry.in_channels // geometry.groups, geometry.out_channels // geometry.groups
    phase_groups = tuple(
        PhaseGroup(phases, taps, gemm_m, out_group, in_group * math.prod(taps))
        for (taps, gemm_m), phases in sorted(groups.items(), reverse=True)
    )
    visible = (0, 1, *range(5 - rank, 5))
    input_shape, weight_shape, output_shape = (
        tuple(shape[axis] for axis in visible)
        for shape in (geometry.input_shape, step.weight.shape, geometry.output_shape)
    )
    axes = tuple(_axis_plan(axis, step.transposed) for axis in geometry.axes[3 - rank :])
    return ConvolutionPlan(input_shape, weight_shape, output_shape, axes, geometry.groups, geometry.flops, phase_groups)


def _axis_plan(axis: AxisGeometry, transposed: bool) -> AxisPlan:
    facts = axis.name, axis.input, axis.kernel
    if transposed:
        return AxisPlan(*facts, axis.stride, axis.padding, axis.output_padding, axis.dilation, axis.output)
    before, after = axis.ordinary_padding
    padding = before if before == after else (before, after)
    return AxisPlan(*facts, axis.step, padding, 0, axis.dilation, axis.output)


def _convolution_dict(plan: ConvolutionPlan) -> dict[str, Any]:
    return {
        **picked(plan, "input_shape", "weight_shape", "output_shape", "groups", "flops"),
        "axes": [vars(axis) for axis in plan.axes],
        "phase_groups": [picked(group, *vars(group)) for group in plan.phase_groups],
    }
