"""Random input tensors, the same bytes on every machine.

Each tensor has a generator of its own, made from the seed and the tensor's name, so that it depends neither
on the other tensors nor on the order in which they are made. Only the raw bits come from NumPy (whose bit
generators never change their output); the rest is a handful of operations that IEEE arithmetic defines
exactly.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import InputError
from dispatcher.operator import Operator
from dispatcher.steps import ConvTranspose3d, Normalize, Pointwise, Pool, TensorOperand

Role = Literal["data", "weight", "factor", "term"]

#: What the elements look like, by kind.
KINDS: dict[str, str] = {
    "signed": "both signs, bell-shaped; the convolution's output has a standard deviation of about 1",
    "integers": "integers from -3 to 3, so that sums are exact in float32",
    "uniform": "uniform in [0, 1): for timing, since it hides many faults",
    "large_mean": "like signed, on top of a mean that is large compared with the spread",
    "constant": "every element of a tensor is the same",
    "one_nan": "like signed, with one NaN in the middle of the pipeline's input",
    "one_inf": "like signed, with one plus infinity in the middle of the pipeline's input",
    "denormal": "like signed, with the pipeline's input below the smallest normal number",
}

_BLOCK = 1 << 16  # elements made at once


def check_seed(seed: Any) -> int:
    """Return ``seed`` as an int.

    Raises:
        InputError: it is not an integer, or not in ``0 <= seed < 2**64``.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**64:
        raise InputError(f"seed is {seed!r}; expected an integer from 0 to 2**64 - 1")
    return int(seed)


@dataclass(frozen=True)
class _Use:
    """What a tensor is used for, and the factor that brings bell-shaped numbers to the right spread."""

    role: Role
    spread: float


def _uses(operator: Operator) -> dict[str, _Use]:
    """How the pipeline uses each tensor; where it uses one in several ways, the first counts."""
    uses = {operator.source: _Use("data", 1.0)}
    deviations = [1.0]  # roughly, of each value of the pipeline
    for step in operator.steps:
        deviation = deviations[step.source]
        match step:
            case ConvTranspose3d():
                geometry = step.geometry
                strides = math.prod(axis.stride for axis in geometry.axes)
                in_group = geometry.in_channels // geometry.groups
                products = max(in_group, in_group * geometry.kernel_volume / strides)  # a voxel, on average
                uses.setdefault(step.weight.name, _Use("weight", 1.0 / (deviation * math.sqrt(products))))
                if step.bias is not None:
                    uses.setdefault(step.bias.name, _Use("term", 0.5))
                deviation = 1.0
            case Normalize():
                if step.weight is not None:
                    uses.setdefault(step.weight.name, _Use("factor", 1.0))
                if step.bias is not None:
                    uses.setdefault(step.bias.name, _Use("term", 0.5))
                deviation = 1.0
            case Pointwise():
                role: Role = "factor" if step.function == "scale" else "term"
                for operand in step.arguments:
                    if isinstance(operand, TensorOperand):
                        uses.setdefault(operand.name, _Use(role, 1.0 if role == "factor" else 0.5))
            case Pool(function="avg"):
                deviation /= math.sqrt(math.prod(step.window))
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


def _signed(fields: Fields, use: _Use, dtype: np.dtype[Any]) -> NDArray[Any]:
    bell = _bell(fields, dtype)
    if use.role == "factor":
        bell += np.copysign(dtype.type(0.5), bell)  # a factor near zero would hide what it multiplies
    bell *= dtype.type(use.spread)
    return bell


def _integers(fields: Fields, use: _Use, dtype: np.dtype[Any]) -> NDArray[Any]:
    integers = (fields[:, 0] % 7).astype(dtype)
    integers -= dtype.type(3)
    return integers


def _uniform(fields: Fields, use: _Use, dtype: np.dtype[Any]) -> NDArray[Any]:
    # 24 bits, so that float32 holds them exactly and never rounds up to 1.
    uniform = ((fields[:, 0].astype(np.int32) << 8) + (fields[:, 1] >> 8)).astype(dtype)
    uniform *= dtype.type(2.0**-24)
    return uniform


def _large_mean(fields: Fields, use: _Use, dtype: np.dtype[Any]) -> NDArray[Any]:
    if use.role not in ("data", "weight"):
        return _signed(fields, use, dtype)
    bell = _bell(fields, dtype)
    if use.role == "data":
        bell += dtype.type(1000)
    else:  # nearly equal weights, so that the mean is common to all channels
        bell *= dtype.type(1 / 16)
        bell += dtype.type(1)
        bell *= dtype.type(use.spread)
    return bell


def _constant(fields: Fields, use: _Use, dtype: np.dtype[Any]) -> NDArray[Any]:
    # A power of two, so that sums are exact however they are taken.
    return np.full(len(fields), 2.0 ** round(math.log2(use.spread)), dtype)


_MAKERS: dict[str, Callable[[Fields, _Use, np.dtype[Any]], NDArray[Any]]] = {
    "signed": _signed,
    "integers": _integers,
    "uniform": _uniform,
    "large_mean": _large_mean,
    "constant": _constant,
    "one_nan": _signed,
    "one_inf": _signed,
    "denormal": _signed,
}


def random_tensors(operator: Operator, seed: int, *, kind: str = "signed") -> dict[str, np.ndarray]:
    """Make every input tensor of ``operator``.

    Args:
        operator: gives names, shapes, dtype, and what each tensor is used for.
        seed: ``0 <= seed < 2**64``.
        kind: one of :data:`KINDS`.

    Returns:
        C-contiguous arrays of the operator's dtype by name, in the order of the problem's parameters.

    Raises:
        InputError: ``seed`` or ``kind`` is not as it should be.
    """
    seed = check_seed(seed)
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    uses = _uses(operator)
    tensors = {
        name: _tensor(shape, np.dtype(operator.dtype), uses.get(name, _Use("term", 0.5)), seed, name, kind)
        for name, shape in operator.tensor_shapes.items()
    }
    data = tensors[operator.source]
    if kind in ("one_nan", "one_inf") and data.size:
        data.reshape(-1)[data.size // 2] = np.nan if kind == "one_nan" else np.inf
    return tensors


def _tensor(
    shape: tuple[int, ...], dtype: np.dtype[Any], use: _Use, seed: int, name: str, kind: str
) -> np.ndarray:
    """One tensor of ``shape``; float16 is rounded from float32."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))
    working = np.dtype(np.float32) if dtype == np.float16 else dtype
    make = _MAKERS[kind]
    result = np.empty(shape, dtype)
    flat = result.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        count = min(_BLOCK, flat.size - start)
        fields = generator.random_raw(count).astype("<u8", copy=False).view("<u2").reshape(count, 4)
        flat[start : start + count] = make(fields, use, working)
    if kind == "denormal" and use.role == "data":
        flat *= dtype.type(np.finfo(dtype).tiny / 8)
    return result
