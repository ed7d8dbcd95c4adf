"""Bound steps: what a pipeline is made of once every size is known.

Every value in a pipeline has five axes: batch, channel, depth, height, width (``N C D H W``); a reduction
keeps its axis with extent 1, and so does a problem of rank 1 or 2 with the spatial axes that it lacks. A problem file
names operations of the vocabulary
(:data:`dispatcher.ops.vocabulary.VOCABULARY`); binding one to sizes gives one or several of the frozen classes
below. Backends realise the classes; what a :class:`Pointwise`, :class:`Pool` or :class:`Reduce` computes is in its
``form``, as C text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import InputError
from dispatcher.ops.forms import PointwiseForm, ReductionForm
from dispatcher.ops.geometry import ConvGeometry, contraction_view

Shape = tuple[int, int, int, int, int]
#: Names of the spatial axes by rank, the last of which are always the last ones of a value.
SPATIAL_NAMES: dict[int, tuple[str, ...]] = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
RANKS = tuple(SPATIAL_NAMES)


def axis_names(rank: int) -> dict[str, tuple[int, ...]]:
    """The names of axes in problems with ``rank`` spatial axes, and the axes of a value that each stands for."""
    spatial = SPATIAL_NAMES[rank]
    single = {name: (5 - rank + place,) for place, name in enumerate(spatial)}
    return {"batch": (0,), "channel": (1,), **single, "spatial": tuple(range(5 - rank, 5))}


#: Those of three spatial axes.
AXES = axis_names(3)


def five_axes(shape: Sequence[int], axes: Sequence[int]) -> Shape:
    """``shape``, whose last extents are those of the last ones out of ``axes``, with ones on all other axes.

    Raises:
        InputError: it has more extents than there are axes.
    """
    if len(shape) > len(axes):
        raise InputError(f"it has shape {tuple(shape)}; expected {len(axes)} axes at most")
    result = [1, 1, 1, 1, 1]
    for axis, extent in zip(axes[len(axes) - len(shape) :], shape, strict=True):
        result[axis] = extent
    return (result[0], result[1], result[2], result[3], result[4])


# ---- operands: what a step combines its input with ---------------------------------------------------------
@dataclass(frozen=True)
class ScalarOperand:
    """A number, either written in the file or the value of a ``double`` parameter."""

    value: float


@dataclass(frozen=True)
class TensorOperand:
    """A tensor parameter. ``shape`` is its shape, with ones on those of five axes that it lacks."""

    name: str
    shape: Shape

    @property
    def per_channel(self) -> bool:
        """True when it varies along the channel axis at most."""
        return all(extent == 1 for axis, extent in enumerate(self.shape) if axis != 1)


@dataclass(frozen=True)
class ValueOperand:
    """The result of an earlier step: an index into the operator's values (see :class:`Step`)."""

    value: int
    shape: Shape


Operand = ScalarOperand | TensorOperand | ValueOperand


# ---- bound steps -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One bound step. Value ``0`` is the pipeline's input tensor; step ``i`` makes value ``i + 1``.

    Attributes:
        op: the step's name in the problem file.
        source: index of the value it reads.
        input_shape: shape of that value, ``(N, C, D, H, W)``.
        shape: shape of the value it makes.
    """

    op: str
    source: int
    input_shape: Shape
    shape: Shape

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Everything it reads besides its source."""
        return ()


@dataclass(frozen=True)
class Convolution(Step):
    """A convolution, transposed or ordinary, as a windowed contraction; optional bias ``(OC,)``.

    Attributes:
        geometry: of the contraction.
        weight: the caller's tensor: ``(IC, OC/groups, KD, KH, KW)``, or that of an ordinary convolution.
        bias: one term a channel, or None.
        transposed: False for an ordinary convolution, whose weight is ``(OC, IC/groups, KD, KH, KW)``.
    """

    geometry: ConvGeometry
    weight: TensorOperand
    bias: TensorOperand | None
    transposed: bool = True

    def contraction_weight(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The caller's weight tensor, or indices of it, in the contraction's order; a view where possible."""
        weight = weight.reshape(self.weight.shape)
        return weight if self.transposed else contraction_view(weight, self.geometry.groups)

    def caller_order(self, order: NDArray[Any]) -> NDArray[Any]:
        """Places in the contraction's weights as places in the caller's tensor; negative ones stay as they are."""
        if self.transposed:
            return order
        places = self.contraction_weight(np.arange(math.prod(self.weight.shape), dtype=order.dtype)).ravel()
        return np.where(order < 0, order, places[order])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Pointwise(Step):
    """``out = form(in, *arguments)``, element by element; arguments broadcast to the input's shape."""

    form: PointwiseForm
    arguments: tuple[Operand, ...]

    @property
    def function(self) -> str:
        """Name of the form."""
        return self.form.name

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.arguments


@dataclass(frozen=True)
class Normalize(Step):
    """``(in - mean) / sqrt(variance + eps)`` over ``axes``, then times ``weight`` plus ``bias``.

    The variance is the biased one.

    With ``groups > 1`` the channel axis is split in that many equal parts, each normalised alone.
    """

    axes: tuple[int, ...]
    groups: int
    eps: float
    weight: TensorOperand | None
    bias: TensorOperand | None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in (self.weight, self.bias) if operand is not None)


@dataclass(frozen=True)
class Softmax(Step):
    """Softmax over ``axes`` taken together, with the maximum subtracted."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Pool(Step):
    """A reduction of windows along depth, height, width.

    Place ``o`` of an axis takes in inputs ``o*stride - padding[0] + k*dilation`` for ``0 <= k < window``, as far as
    there are any: a maximum knows no others, a mean divides by all places that lie in the padded input, or where
    ``count_padding`` is False, by those that lie in the input itself; or by ``divisor``.

    An adaptive one shares out ``I`` inputs among ``O`` outputs instead, which need not come out even: place ``o`` takes
    in those from ``floor(o*I/O)`` up to, without, ``ceil((o+1)*I/O)``.

    Attributes:
        form: what is made of a window.
        window: extents; the largest ones of an adaptive pool.
        stride: of the windows; ``window`` where they neither overlap nor leave gaps.
        padding: places before and after the input that windows may reach into.
        dilation: from one tap of a window to the next.
        count_padding: whether a mean counts padding as zeros.
        divisor: what a mean divides by instead, or None.
        adaptive: see above; the fields but ``form`` and ``window`` mean nothing then.
    """

    form: ReductionForm
    window: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[tuple[int, int], ...] = ((0, 0),) * 3
    dilation: tuple[int, int, int] = (1, 1, 1)
    count_padding: bool = True
    divisor: int | None = None
    adaptive: bool = False

    @property
    def plain(self) -> bool:
        """Whether windows share the input out: they lie side by side, each a block that is averaged as a whole."""
        inside = all(
            count * size <= extent
            for count, size, extent in zip(self.shape[2:], self.window, self.input_shape[2:], strict=True)
        )
        unpadded = inside and not any(itertools.chain(*self.padding)) and self.divisor is None
        return unpadded and not self.adaptive and self.stride == self.window and self.dilation == (1, 1, 1)

    @property
    def function(self) -> str:
        """Name of the form: ``max``, ``mean``."""
        return self.form.name


@dataclass(frozen=True)
class Reduce(Step):
    """A reduction over ``axes``, which are kept with extent 1."""

    form: ReductionForm
    axes: tuple[int, ...]

    @property
    def function(self) -> str:
        """Name of the form."""
        return self.form.name
