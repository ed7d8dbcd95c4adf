"""The geometry of a 3-D convolution as a windowed contraction: one frozen value from which everything is derived.

A windowed contraction makes each output from a window of inputs: over the output's phases, over the taps of a phase,
and over the input channels. Its weights have one order, ``(IC, OC/groups, KD, KH, KW)`` with the taps of a transposed
convolution. An ordinary convolution is one, with a view of the user's weights (:func:`contraction_view`); its stride is
the contraction's ``step``, from one output's window to the next one's.

Notation, per spatial axis: input extent ``I``, kernel ``K``, stride ``S``, padding ``P``, output padding
``A``, dilation ``L``. Input voxel ``i`` and tap ``k`` meet at output position ``o = i*S - P + k*L``, hence

    O = (I - 1)*S - 2*P + L*(K - 1) + A + 1.

Outputs with the same residue ``r = o mod S`` form a *phase*. Writing ``o = S*m + r``, tap ``k`` takes part in
phase ``r`` exactly when ``S`` divides ``r + P - k*L``, and it then reads input ``i = m + (r + P - k*L)/S``. A
phase is therefore a dense little convolution over ``m`` with constant offsets: no zeros are inserted.
(Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016, section 4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import GeometryError

#: The largest stride and kernel on an axis. It has a phase for each residue modulo its stride and a tap for
#: each element of its kernel, and there are tables of both.
MAX_PHASES = MAX_TAPS = 1 << 16


@dataclass(frozen=True)
class Tap:
    """Kernel position ``index`` reads input ``m + offset`` in its phase."""

    index: int
    offset: int


@dataclass(frozen=True)
class AxisPhase:
    """Outputs ``o = stride*m + residue`` for ``0 <= m < count``; ``taps`` are ordered by offset."""

    residue: int
    count: int
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class AxisGeometry:
    """One spatial axis of a transposed convolution; see :meth:`ordinary` for the other kind.

    Attributes:
        step: inputs from the window of one output to that of the next; above 1 in ordinary convolutions alone, whose
            stride it is. Output ``o`` and tap ``k`` meet at input ``i``, ``i*stride = o*step + padding - k*dilation``.
        strided: the axis whose :attr:`unstrided` it is; None for any other.

    Raises:
        GeometryError: an extent is out of range or the output extent is not positive.
    """

    name: str
    input: int
    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1
    step: int = 1
    strided: AxisGeometry | None = None

    def __post_init__(self) -> None:
        self._check(("input", 1), ("kernel", 1), ("stride", 1), ("dilation", 1), ("padding", 0), ("output_padding", 0))
        if self.output_padding >= max(self.stride, self.dilation):
            raise GeometryError(
                f"output_padding on axis {self.name} is {self.output_padding}; it must be smaller than "
                f"the stride ({self.stride}) or the dilation ({self.dilation})"
            )
        if self.output < 1:
            raise GeometryError(
                f"the output size on axis {self.name} is {self.output}; it must be 1 or more "
                f"(input {self.input}, kernel {self.kernel}, stride {self.stride}, padding {self.padding}, "
                f"output_padding {self.output_padding}, dilation {self.dilation})"
            )

    def _check(self, *least: tuple[str, int]) -> None:
        """Check that fields are no smaller than that, and that stride and kernel are not too large."""
        for field, limit in least:
            value = getattr(self, field)
            if value < limit:
                raise GeometryError(f"{field} on axis {self.name} is {value}; it must be {limit} or more")
        for field, most in (("stride", MAX_PHASES), ("kernel", MAX_TAPS)):
            value = getattr(self, field)
            if value > most:
                raise GeometryError(f"{field} on axis {self.name} is {value}; it must be {most} or less")

    @staticmethod
    def ordinary(
        name: str, extent: int, kernel: int, stride: int = 1, padding: tuple[int, int] = (0, 0), dilation: int = 1
    ) -> AxisGeometry:
        """The axis of an ordinary convolution, whose tap ``k`` reads input ``o*stride - padding[0] + k*dilation``.

        With its taps in reverse order it is the axis of a transposed convolution of stride 1 that makes every
        ``stride``-th output only, with padding ``dilation*(kernel - 1) - padding[0]``, which may be negative.

        Args:
            name: of the axis.
            extent: of the input.
            kernel: taps.
            stride: inputs from one window to the next.
            padding: zeros before and after the input.
            dilation: inputs from one tap to the next.

        Raises:
            GeometryError: an extent is out of range or the output extent is not positive.
        """
        before, after = padding
        return _OrdinaryAxis(
            name, extent, kernel, 1, dilation * (kernel - 1) - before, after - before, dilation, step=stride
        )

    @property
    def ordinary_padding(self) -> tuple[int, int]:
        """Zeros before and after the input of the ordinary convolution that this axis is; see :meth:`ordinary`."""
        before = self.dilation * (self.kernel - 1) - self.padding
        return before, before + self.output_padding

    @property
    def input_phases(self) -> int:
        """Residues modulo ``step`` of the inputs of a window, its first one's being 0."""
        return min(self.step, self.kernel)

    @property
    def phase_lead(self) -> int:
        """Input ``i`` of phase ``r`` of :attr:`unstrided` is input ``i*step + r - phase_lead`` here."""
        return self.ordinary_padding[0] % self.step

    @cached_property
    def unstrided(self) -> AxisGeometry:
        """The axis of step 1 along which the phases of the input, as channels, give the same outputs.

        Tap ``q*step + r`` of an ordinary convolution is tap ``q`` of phase ``r``; a phase with fewer taps ends with
        zeros. An axis of step 1, of dilated taps, or of which a window reads nothing but padding, stays what it is.
        """
        taps, lead = -(-self.kernel // self.step), self.ordinary_padding[0] // self.step
        extent = min(-(-(self.input + self.phase_lead) // self.step), self.output + taps - 1 - lead)
        if self.step == 1 or self.dilation > 1 or extent < 1:
            return self
        padding = lead, self.output + taps - 1 - lead - extent
        return replace(AxisGeometry.ordinary(self.name, extent, taps, padding=padding), strided=self)

    @property
    def output(self) -> int:
        """Output extent."""
        reach = (self.input - 1) * self.stride + self.dilation * (self.kernel - 1)
        return (reach - 2 * self.padding + self.output_padding) // self.step + 1

    @cached_property
    def phases(self) -> tuple[AxisPhase, ...]:
        """The ``stride`` phases, by residue. A phase may have no taps (a hole) or no outputs."""
        return tuple(
            AxisPhase(residue, max(0, -(-(self.output - residue) // self.stride)), self._taps.get(residue, ()))
            for residue in range(self.stride)
        )

    @cached_property
    def _taps(self) -> dict[int, tuple[Tap, ...]]:
        """The taps of each phase that has any, by residue, ordered by offset."""
        taps: dict[int, list[Tap]] = {}
        for k in reversed(range(self.kernel)):  # the offset falls as the position grows
            offset, residue = divmod(k * self.dilation - self.padding, self.stride)
            taps.setdefault(residue, []).append(Tap(k, -offset))
        return {residue: tuple(found) for residue, found in taps.items()}

    @property
    def most_taps(self) -> int:
        """Taps of the phase that has most of them."""
        return max(map(len, self._taps.values()))

    @cached_property
    def positions(self) -> int:
        """Number of values of ``m`` that the longest phase has: ``ceil(O / S)``."""
        return -(-self.output // self.stride)

    @cached_property
    def offset_range(self) -> tuple[int, int]:
        """Smallest and largest tap offset over all phases."""
        offsets = [tap.offset for taps in self._taps.values() for tap in taps]
        return min(offsets), max(offsets)


class _OrdinaryAxis(AxisGeometry):
    """An axis that :meth:`AxisGeometry.ordinary` makes; its messages speak of the ordinary convolution."""

    def __post_init__(self) -> None:
        before, after = self.ordinary_padding
        facts = f"kernel {self.kernel}, stride {self.step}, padding {before} and {after}, dilation {self.dilation}"
        for field, value in (("stride", self.step), ("padding", min(before, after))):
            least = 1 if field == "stride" else 0
            if value < least:
                raise GeometryError(f"{field} on axis {self.name} is {value}; it must be {least} or more")
        self._check(("input", 1), ("kernel", 1), ("dilation", 1))
        if self.output < 1:
            raise GeometryError(
                f"the output size on axis {self.name} is {self.output}; it must be 1 or more "
                f"(input {self.input}, {facts})"
            )


def contraction_view(weight: NDArray[Any], groups: int) -> NDArray[Any]:
    """An ordinary convolution's weights in a contraction's order, without copying.

    Args:
        weight: ``(OC, IC/groups, KD, KH, KW)``; of any dtype, so that an array of indices gives an order.
        groups: independent channel groups.

    Returns:
        ``(IC, OC/groups, KD, KH, KW)``, the taps reversed.
    """
    out_channels, in_group, *taps = weight.shape
    split = weight.reshape(groups, out_channels // groups, in_group, *taps)
    view = split.swapaxes(1, 2)[..., ::-1, ::-1, ::-1]
    ordered: NDArray[Any] = view.reshape(groups * in_group, out_channels // groups, *taps)
    return ordered


def unstrided_weight(weight: NDArray[Any], geometry: ConvGeometry) -> NDArray[Any]:
    """The weights, as :func:`contraction_view` has them, of a convolution's :attr:`ConvGeometry.unstrided`."""
    sizes: list[int] = []
    missing, phases = [], []
    for axis in geometry.unstrided.axes:
        strided = axis.strided or axis
        sizes += axis.kernel, strided.step
        missing.append((axis.kernel * strided.step - strided.kernel, 0))
        phases.append(slice(strided.step - strided.input_phases, None))
    # Taps are in reverse order, and so are the phases within them at first.
    split = np.pad(weight, [(0, 0), (0, 0), *missing]).reshape(*weight.shape[:2], *sizes)
    cut = split.transpose(0, 3, 5, 7, 1, 2, 4, 6)[:, phases[0], phases[1], phases[2]][:, ::-1, ::-1, ::-1]
    ordered: NDArray[Any] = cut.reshape(-1, *cut.shape[4:])
    return ordered


@dataclass(frozen=True)
class ConvGeometry:
    """A whole convolution.

    Input ``(N, IC, ID, IH, IW)``, weight ``(IC, OC/groups, KD, KH, KW)``, output ``(N, OC, OD, OH, OW)``.

    Raises:
        GeometryError: a channel count does not divide by ``groups``, or a count is out of range.
    """

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    depth: AxisGeometry
    height: AxisGeometry
    width: AxisGeometry

    def __post_init__(self) -> None:
        if self.batch < 0:
            raise GeometryError(f"the batch size is {self.batch}; it must be 0 or more")
        for name in ("groups", "in_channels", "out_channels"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise GeometryError(f"{name} is {getattr(self, name)}; it must be divisible by groups ({self.groups})")

    @property
    def axes(self) -> tuple[AxisGeometry, AxisGeometry, AxisGeometry]:
        """Depth, height, width."""
        return (self.depth, self.height, self.width)

    @property
    def input_shape(self) -> tuple[int, int, int, int, int]:
        """``(N, IC, ID, IH, IW)``."""
        return (self.batch, self.in_channels, self.depth.input, self.height.input, self.width.input)

    @property
    def weight_shape(self) -> tuple[int, int, int, int, int]:
        """``(IC, OC/groups, KD, KH, KW)``."""
        return (
            self.in_channels,
            self.out_channels // self.groups,
            self.depth.kernel,
            self.height.kernel,
            self.width.kernel,
        )

    @property
    def output_shape(self) -> tuple[int, int, int, int, int]:
        """``(N, OC, OD, OH, OW)``."""
        return (self.batch, self.out_channels, self.depth.output, self.height.output, self.width.output)

    @property
    def skips(self) -> bool:
        """Whether the windows of neighbouring outputs lie more than one input apart on some axis."""
        return any(axis.step > 1 for axis in self.axes)

    @cached_property
    def unstrided(self) -> ConvGeometry:
        """The convolution over phases of the input as channels, ``[channel][phase]`` by depth, height and width.

        Along an axis that cannot be seen that way ``step`` stays.
        """
        axes = [axis.unstrided for axis in self.axes]
        phases = math.prod(axis.strided.input_phases for axis in axes if axis.strided is not None)
        return ConvGeometry(self.batch, phases * self.in_channels, self.out_channels, self.groups, *axes)

    @property
    def kernel_volume(self) -> int:
        """Taps per channel pair: ``KD*KH*KW``."""
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def flops(self) -> int:
        """Floating-point operations, one multiply and one add a product: each input voxel meets every tap once; of an
        ordinary convolution, each output voxel does."""
        if isinstance(self.depth, _OrdinaryAxis):
            return 2 * math.prod(self.output_shape) * (self.in_channels // self.groups) * self.kernel_volume
        return 2 * math.prod(self.input_shape) * (self.out_channels // self.groups) * self.kernel_volume

    @property
    def longest_sum(self) -> int:
        """The most products that any output voxel adds up (the GEMM's K of the largest phase)."""
        return self.in_channels // self.groups * math.prod(axis.most_taps for axis in self.axes)
