"""Random input tensors, the same bytes on every machine.

Each tensor has a generator of its own, made from the seed and the tensor's name, so that it depends neither
on the other tensors nor on the order in which they are made. Only the raw bits come from NumPy (whose bit
generators never change their output); the rest is a handful of operations that IEEE arithmetic defines
exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import InputError
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, ScalarOperand, Softmax, TensorOperand
from dispatcher.problem.arrays import with_own_error_state
from dispatcher.problem.operator import Operator, limits_of
from dispatcher.problem.values import seed_value

Role = Literal["data", "weight", "factor", "term"]


# ---- the sets and where they are meaningful ----------------------------------------------------------------
def _has_exponentials(operator: Operator) -> bool:
    """Is there an exponential of a value whose size the inputs decide, that is, before any normalisation?"""
    for step in operator.steps:
        match step:
            case Normalize():
                return False
            case Softmax():
                return True
            case Pointwise() if step.form.exponential:
                return True
            case Reduce() if step.form.shifted:
                return True
    return False


def _divides(operator: Operator) -> bool:
    """Does a step divide by a statistic of its input?"""
    return any(
        isinstance(step, Normalize | Softmax) or (isinstance(step, Reduce) and step.form.shifted)
        for step in operator.steps
    )


def _takes_maxima(operator: Operator) -> bool:
    return any(isinstance(step, Pool | Reduce) and step.form.monoid.errors == "selects" for step in operator.steps)


def _activates_a_sum(operator: Operator) -> bool:
    """Is there an activation behind a sum or a minimum along axes, which lies far to one side of zero?"""
    summed = False
    for step in operator.steps:
        summed |= isinstance(step, Reduce) and step.function in ("sum", "min")
        if summed and isinstance(step, Pointwise) and not step.arguments:
            return True
    return False


def _saturates(operator: Operator) -> bool:
    """Does a step make one constant of all large values?"""
    return any(
        isinstance(step, Softmax) or (isinstance(step, Pointwise) and step.form.saturates) for step in operator.steps
    )


def _keeps_spikes(operator: Operator) -> bool:
    """Is there a convolution, and no product that a few large elements would overflow?"""
    products = (isinstance(step, Reduce) and step.form.monoid.errors == "multiplies" for step in operator.steps)
    return bool(operator.convolutions) and not any(products)


def _exact(operator: Operator) -> bool:
    """Are all sums and means of small integers exact, in whatever order they are taken?"""
    for step in operator.steps:
        match step:
            case Convolution():
                continue
            case Pool() | Reduce() if step.form.integral:
                continue
            case Pool() if step.form.plain:
                count = math.prod(step.window)
                if count & (count - 1):  # a mean over a power of two is exact
                    return False
            case Pointwise() if step.form.integral:
                scalars = [x.value for x in step.arguments if isinstance(x, ScalarOperand)]
                if any(math.isfinite(scalar) and scalar != round(scalar) for scalar in scalars):
                    return False
            case _:
                return False
    return True


@dataclass(frozen=True)
class InputSet:
    """One way to fill the input tensors.

    Attributes:
        looks: what the elements look like.
        reason: which faults it shows.
        where: the pipelines on which it shows something, in words.
        meaningful: the same as a function of the operator.
    """

    looks: str
    reason: str
    where: str = "everywhere"
    meaningful: Callable[[Operator], bool] = lambda operator: True


#: Every set by name.
INPUT_SETS: dict[str, InputSet] = {
    "signed": InputSet(
        "both signs, bell-shaped; the convolution's output has a standard deviation of about 1",
        "no two outputs are alike, a clamp to [0, 1] is active at both ends, rows have a real variance",
    ),
    "graded": InputSet(
        "like signed, but the pipeline's input halves with each step along the spatial axes, twelve times",
        "errors that are small beside the largest output but not beside their own (fixed point, FFT)",
    ),
    "large_mean": InputSet(
        "like signed, on top of a mean that is large compared with the spread",
        "cancellation, such as a variance as E[x^2] - E[x]^2; sums whose terms all have one sign",
        "no clamp and no softmax, which make a constant of it",
        lambda operator: not _saturates(operator),
    ),
    "large": InputSet(
        "like signed, with weights 256 times as large",
        "exponentials that overflow, such as a softmax that does not subtract the maximum",
        "an exponential with no normalisation before it",
        _has_exponentials,
    ),
    "small": InputSet(
        "like signed, with weights and terms 256 times as small",
        "a wrong eps: it is of the size of the variance here",
        "a normalisation",
        lambda operator: any(isinstance(step, Normalize) for step in operator.steps),
    ),
    "negative": InputSet(
        "positive data and negative weights and terms, so that the convolution's output is negative",
        "maxima that start from zero, or from padding with zeros",
        "a maximum",
        _takes_maxima,
    ),
    "positive": InputSet(
        "positive data and weights, so that the convolution's output is positive",
        "what an activation makes zero of where values are far below zero, which hides all that comes before it",
        "an activation behind a sum or a minimum along axes",
        _activates_a_sum,
    ),
    "constant": InputSet(
        "every element of a tensor is the same",
        "a division by a variance of zero; equal terms, whose roundings add up",
        "a normalisation, softmax or log-sum-exp",
        _divides,
    ),
    "integers": InputSet(
        "integers from -3 to 3, so that sums are exact in float32",
        "wrong indices, apart from any rounding: a direct sum has an error of 0, a fault one of 1 or more",
        "a pipeline that is exact on integers",
        _exact,
    ),
    "spikes": InputSet(
        "like signed, with one in 2048 elements of the pipeline's input, and one in its middle, 2^40 (float16: 2^12)",
        "rounding of large elements that leaks into outputs which do not read them (transforms, a common scale)",
        "a convolution, and no product of all elements",
        _keeps_spikes,
    ),
    "gaps": InputSet(
        "like signed, with two of every four rows along height zero, and one output channel's first taps there",
        "the same, beside sums that have no terms other than zero",
        "a convolution",
        lambda operator: bool(operator.convolutions),
    ),
    "denormal": InputSet(
        "like signed, with the pipeline's input below the smallest normal number",
        "quotients of numbers that were flushed to zero; kept and flushed numbers are both right",
    ),
    "one_nan": InputSet(
        "like signed, with one NaN at a random place in the middle half of the pipeline's input",
        "NaN that is dropped (fmax, fmin, clamp) or that spreads to outputs it does not reach",
    ),
    "one_inf": InputSet(
        "like signed, with one plus infinity at a random place in the middle half of the pipeline's input",
        "infinities that become NaN or large numbers, or that spread (transforms, masks that multiply by 0)",
    ),
    "uniform": InputSet(
        "uniform in [0, 1)",
        "nothing: it hides many faults (a clamp to [0, 1] saturates) and is for timing only",
        "nowhere",
        lambda operator: False,
    ),
}


#: The sets that stand for all where no more can be afforded.
TELLING_SETS = ("signed", "positive")


def meaningful_sets(operator: Operator) -> tuple[str, ...]:
    """The names of the sets that show something about ``operator``, in the order of :data:`INPUT_SETS`."""
    return tuple(name for name, inputs in INPUT_SETS.items() if inputs.meaningful(operator))


# ---- making them -------------------------------------------------------------------------------------------
_BLOCK = 1 << 16  # elements made at once
_SPIKE = 2.0**40  # its square, added up, is far from the largest float32
_HALF_SPIKE = 2.0**12  # of float16
_GRADES = 12  # powers of two in a graded input; with more, float16 would lose its bits


@dataclass(frozen=True)
class _Use:
    """What a tensor is used for, and the factor that brings bell-shaped numbers to the right spread."""

    role: Role
    spread: float
    out_axis: int = 1  # of weights: the output channels


def _uses(operator: Operator) -> dict[str, _Use]:
    """How the pipeline uses each tensor; where it uses one in several ways, the first counts."""
    uses = {operator.source: _Use("data", 1.0)}
    deviations = [1.0]  # roughly, of each value of the pipeline
    for step in operator.steps:
        deviation = deviations[step.source]
        match step:
            case Convolution():
                geometry = step.geometry
                strides = math.prod(axis.stride for axis in geometry.axes)
                in_group = geometry.in_channels // geometry.groups
                products = max(in_group, in_group * geometry.kernel_volume / strides)  # a voxel, on average
                spread = 1.0 / (deviation * math.sqrt(products))
                uses.setdefault(step.weight.name, _Use("weight", spread, int(step.transposed)))
            case Normalize() if step.weight is not None:
                uses.setdefault(step.weight.name, _Use("factor", 1.0))
            case Pointwise():
                spread = 1.0 if step.form.role == "factor" else 0.5
                for operand in step.arguments:
                    if isinstance(operand, TensorOperand):
                        uses.setdefault(operand.name, _Use(step.form.role, spread))
            case Pool(function="mean"):
                deviation /= math.sqrt(math.prod(step.window))
        if isinstance(step, Convolution | Normalize):
            deviation = 1.0
            if step.bias is not None:
                uses.setdefault(step.bias.name, _Use("term", 0.5))
        deviations.append(deviation)
    return uses


Fields = NDArray[np.uint16]  # (n, 4) random 16-bit fields, four for each element


def _bell(fields: Fields, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers with mean 0, standard deviation 1 and both signs.

    The sum of four uniform numbers is close to normal, and bounded by 3.5.
    """
    total = fields[:, 0].astype(np.int32)
    for column in range(1, 4):
        total += fields[:, column]
    total -= 2 * 65535
    bell = total.astype(dtype)
    bell *= dtype.type(math.sqrt(3.0) / 65536.0)
    return bell


def _elements(kind: str, fields: Fields, use: _Use, dtype: np.dtype[Any]) -> Any:
    """The elements of a set, an array; :func:`_finish` multiplies those of some by powers of two."""
    number = dtype.type
    match kind, use.role:
        case "integers", _:
            return (fields[:, 0] % 7).astype(dtype) - number(3)
        case "uniform", _:  # 24 bits, so that float32 holds them exactly and never rounds up to 1
            bits = (fields[:, 0].astype(np.int32) << 8) + (fields[:, 1] >> 8)
            return bits.astype(dtype) * number(2.0**-24)
        case "constant", _:  # a power of two, so that sums are exact however they are taken
            return np.full(len(fields), 2.0 ** round(math.log2(use.spread)), dtype)
        case "large_mean", "data":
            return _bell(fields, dtype) + number(1000)
        case "large_mean", "weight":  # nearly equal weights, so that the mean is common to all channels
            return (_bell(fields, dtype) * number(1 / 128) + number(1)) * number(use.spread)
        case (("negative" | "positive"), ("data" | "weight" | "term")):
            spread = number(use.spread if kind == "positive" or use.role == "data" else -use.spread)
            return (np.abs(_bell(fields, dtype)) + number(0.25)) * spread
        case "spikes", "data":
            bell = _bell(fields, dtype)
            return np.where(fields[:, 3] % 2048 == 0, np.copysign(number(_HALF_SPIKE), bell), bell)
    bell = _bell(fields, dtype)
    if use.role == "factor":
        bell += np.copysign(number(0.5), bell)  # a factor near zero would hide what it multiplies
    return bell * number(use.spread)


@with_own_error_state
def random_tensors(operator: Operator, seed: int, *, kind: str = "signed") -> dict[str, np.ndarray]:
    """Make every input tensor of ``operator``.

    Args:
        operator: gives names, shapes, dtype, and what each tensor is used for.
        seed: ``0 <= seed < 2**64``.
        kind: one of :data:`INPUT_SETS`.

    Returns:
        C-contiguous arrays of the operator's dtype by name, in the order of the problem's parameters.

    Raises:
        InputError: ``seed`` or ``kind`` is not as it should be.
    """
    seed = seed_value("seed", seed)
    if kind not in INPUT_SETS:
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(INPUT_SETS)}")
    uses = _uses(operator)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in operator.tensor_shapes.items():
        use = uses.get(name, _Use("term", 0.5))
        tensors[name] = _tensor(shape, np.dtype(operator.dtype), use, seed, name, kind)
        _finish(tensors[name], use, kind, operator.problem.rank)
    data = tensors[operator.source]
    spike = _HALF_SPIKE if data.dtype == np.float16 else _SPIKE
    odd = {"one_nan": np.nan, "one_inf": np.inf, "spikes": spike}.get(kind)
    if odd is not None and data.size:
        data[_middle_place(data.shape, seed)] = odd
    return tensors


def varied(tensors: Mapping[str, np.ndarray], steps: Iterable[tuple[str, int]]) -> dict[str, np.ndarray]:
    """Other tensors of the same kind, at the cost of a few copies.

    Args:
        tensors: by name.
        steps: of what is done to each tensor, one after another: ``new`` shifts its elements round and multiplies all
            by one factor, so that no value stays; ``near`` makes a few elements change places, so that sums stay. With
            each goes the seed of what is random about it, from 0 to 2**64 - 1.

    Returns:
        C-contiguous arrays of the same shapes and dtypes; without steps, the same ones.
    """
    result = dict(tensors)
    for (way, seed), name in itertools.product(steps, tensors):
        array = result[name]
        generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))
        if way == "new":
            shift, fraction = (int(raw) for raw in generator.random_raw(2))
            result[name] = np.roll(array, shift % array.size)
            with np.errstate(all="ignore"):
                result[name] *= array.dtype.type(0.5 + math.ldexp(fraction, -65))
        else:
            count = 2 * min(4 * len(array), array.size // 256)
            places = np.unique(generator.random_raw(count) % array.size)
            result[name] = array.copy()
            result[name].flat[places] = np.roll(array.flat[places], 1)
    return result


def _tensor(shape: tuple[int, ...], dtype: np.dtype[Any], use: _Use, seed: int, name: str, kind: str) -> np.ndarray:
    """One tensor of ``shape``; 16-bit floats are rounded from float32."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))
    working = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    result = np.empty(shape, dtype)
    flat = result.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        count = min(_BLOCK, flat.size - start)
        fields = generator.random_raw(count).astype("<u8", copy=False).view("<u2").reshape(count, 4)
        flat[start : start + count] = _elements(kind, fields, use, working)
    return result


def _finish(tensor: np.ndarray, use: _Use, kind: str, rank: int) -> None:
    """Multiply a signed tensor, in place, by the powers of two that its set asks for; its last ``rank`` axes are
    spatial."""
    dtype = tensor.dtype.type
    height = -min(rank, 2)  # the axis, or the only one there is
    match kind, use.role:
        case "denormal", "data":
            tensor *= dtype(limits_of(tensor.dtype).tiny / 8)
        case "graded", "data":
            places = sum(np.ogrid[tuple(slice(extent) for extent in tensor.shape[-rank:])])
            tensor *= np.ldexp(dtype(1), -(places % _GRADES))
        case "spikes", "data" if tensor.dtype != np.float16:
            tensor[np.abs(tensor) == _HALF_SPIKE] *= dtype(_SPIKE / _HALF_SPIKE)
        case "gaps", "data":
            row = np.arange(tensor.shape[height]).reshape(-1, *[1] * (-height - 1))
            tensor *= (row % 4 < 2).astype(dtype)
        case "gaps", "weight" if tensor.ndim == rank + 2 and tensor.shape[height] > 1:
            first: list[slice | int] = [slice(None)] * tensor.ndim
            first[use.out_axis], first[height] = 0, 0
            tensor[tuple(first)] = 0
        case "large", "weight":
            tensor *= dtype(256)
        case "small", ("weight" | "term"):
            tensor *= dtype(1 / 256)


def _middle_place(shape: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """A random place in the middle half of each axis, which no pool in floor mode leaves out."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(b"the odd element")))
    return tuple(extent // 4 + int(generator.random_raw()) % max(1, extent // 2) for extent in shape)
