"""What a call does and why: the geometry, the work, the device chosen and the launches it makes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dispatcher.device.selection import Choice, skipped_list
from dispatcher.interface import Device, PlannedLaunch, device_dict
from dispatcher.ops.geometry import AxisGeometry
from dispatcher.ops.steps import Convolution
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator, operator_dict

MAX_STRIDE = 10_000  # phases are not listed for larger ones; there are stride**3 of them

#: What of an axis a report has.
_AXIS_KEYS = ("name", "input", "kernel", "stride", "padding", "output_padding", "dilation", "output")


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
class ConvolutionPlan:
    """The geometry of one convolution.

    Attributes:
        input_shape: ``(N, IC, ID, IH, IW)``.
        weight_shape: of the caller's tensor, ``(IC, OC/groups, KD, KH, KW)``; of an ordinary convolution
            ``(OC, IC/groups, KD, KH, KW)``.
        output_shape: ``(N, OC, OD, OH, OW)``.
        axes: depth, height, width.
        padding: along each of them, as the caller gives it.
        groups: independent groups of channels.
        flops: floating-point operations.
        phase_groups: its phases; empty ones are left out, and all of them when a stride is above
            :data:`MAX_STRIDE`.
    """

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    axes: tuple[AxisGeometry, AxisGeometry, AxisGeometry]
    padding: tuple[int, ...]
    groups: int
    flops: int
    phase_groups: tuple[PhaseGroup, ...]


@dataclass(frozen=True)
class Explanation:
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


def explain_choice(operator: Operator, choice: Choice) -> Explanation:
    """The explanation of ``operator`` on the device that was chosen for it."""
    launches = () if choice.executable is None else tuple(choice.executable.launches)
    plans = tuple(_convolution_plan(step) for step in operator.convolutions)
    return Explanation(operator, choice.device, choice.skipped, plans, launches)


def _convolution_plan(step: Convolution) -> ConvolutionPlan:
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
    shapes = geometry.input_shape, step.weight.shape, geometry.output_shape
    padding = tuple(axis.padding if step.transposed else axis.around for axis in geometry.axes)
    return ConvolutionPlan(*shapes, geometry.axes, padding, geometry.groups, geometry.flops, phase_groups)


def _convolution_dict(plan: ConvolutionPlan) -> dict[str, Any]:
    return {
        **picked(plan, "input_shape", "weight_shape", "output_shape", "groups", "flops"),
        "axes": [
            {**picked(axis, *_AXIS_KEYS), "padding": padding}
            for axis, padding in zip(plan.axes, plan.padding, strict=True)
        ],
        "phase_groups": [picked(group, *vars(group)) for group in plan.phase_groups],
    }
