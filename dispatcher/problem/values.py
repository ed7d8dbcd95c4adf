"""Values that a caller gives where a number is wanted, Python's and NumPy's alike: one rule for each kind of number."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from dispatcher.errors import InputError
from dispatcher.problem import torchtensors
from dispatcher.problem.expressions import MAX_VALUE
from dispatcher.problem.messages import brief

#: What Python or NumPy calls a number, and nobody means as one.
NOT_NUMBERS = (bool, np.timedelta64)


def unwrapped(value: Any, name: str = "a size or scalar") -> Any:
    """``value`` with Python's numbers, truth values and texts in place of NumPy's, and of its arrays without axes; a
    list, a tuple or an array with one axis (as a list) likewise. Tensors of PyTorch are treated as arrays are."""
    if torchtensors.is_tensor(value):
        return torchtensors.number(name, value)
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item() if value.dtype.kind in "biufU" else value
    if isinstance(value, tuple):
        return tuple(unwrapped(part, name) for part in value)
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return [unwrapped(part, name) for part in value]
    return value


def whole_value(name: str, value: Any, least: int, most: int, wanted: str) -> int:
    """A whole number from ``least`` to ``most``; a bool is none.

    Args:
        name: what the caller calls it.
        value: what was given.
        least: the smallest one that will do.
        most: the largest.
        wanted: for the message: what is expected.

    Raises:
        InputError: it is anything else.
    """
    given = unwrapped(value, name)
    try:
        number = least - 1 if isinstance(given, bool) else operator.index(given)
    except Exception:  # whatever the object's own conversion raises: it is no number
        number = least - 1
    if not least <= number <= most:
        raise InputError(f"{name} is {brief(given)}; expected {wanted}")
    return number


def real_value(
    name: str, value: Any, wanted: str = "a number", fits: Callable[[float], bool] = lambda number: True
) -> float:
    """A real number, infinite or not; neither bool nor NaN is one. The arguments are those of :func:`whole_value`.

    Raises:
        InputError: it is anything else, or ``fits`` refuses it.
    """
    given = unwrapped(value, name)
    number = math.nan
    try:
        if not isinstance(given, NOT_NUMBERS) and isinstance(given, numbers.Real):
            number = float(given)
            if math.isinf(number) and given != number:
                raise OverflowError
    except OverflowError:
        number, wanted = math.nan, f"{wanted} that fits a double"
    except Exception:  # whatever the object's own conversion raises: it is no number
        number = math.nan
    if math.isnan(number) or not fits(number):
        raise InputError(f"{name} is {brief(given)}; expected {wanted}")
    return number


def size_value(name: str, value: Any) -> int:
    """A size: a whole number from 0 to 2**63 - 1.

    Raises:
        InputError: it is anything else.
    """
    return whole_value(name, value, 0, MAX_VALUE, "a whole number from 0 to 2**63 - 1")


def count_value(name: str, value: Any, least: int) -> int:
    """A whole number of ``least`` or more that fits 64 bits.

    Raises:
        InputError: it is anything else.
    """
    return whole_value(name, value, least, MAX_VALUE, f"a whole number of {least} or more, below 2**63")


def seed_value(name: str, value: Any) -> int:
    """A seed: a whole number from 0 to 2**64 - 1.

    Raises:
        InputError: it is anything else.
    """
    return whole_value(name, value, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1")


def seconds_value(name: str, value: Any, most: float = math.inf) -> float:
    """A finite number above 0, up to ``most``.

    Raises:
        InputError: it is anything else.
    """
    bound = "" if most == math.inf else f" and up to {most:.0f}"
    wanted = f"a number of seconds above 0{bound}"
    return real_value(name, value, wanted, lambda seconds: 0 < seconds <= most and seconds < math.inf)
