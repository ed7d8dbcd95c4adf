"""What launches are planned by: plain facts of a device and what it allows a work-group, without the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.backends.opencl.classes import DeviceClass, device_class


@dataclass(frozen=True)
class Facts:
    """What kernels are chosen by. Memory is in bytes.

    Attributes:
        vec: native vector width of float; 1 where the device says so (GPUs).
        vec_double: native vector width of double; 0 without double support.
        cache: bytes of scratch that a worker should stay under, so that it lives in its core's cache.
        global_memory: bytes of memory; ``largest_buffer`` the most that one buffer may take.
        unified: the device works on the host's memory, so that buffers over it need no copies.
        any_pointer: kernels may be given host pointers as they are (fine-grained system SVM).
        rates: measured rates of register tiles, as :func:`~dispatcher.backends.opencl.classes.rates_text` has them.
    """

    cpu: bool
    compute_units: int
    vec: int
    vec_double: int
    cache: int
    global_memory: int
    largest_buffer: int
    unified: bool
    any_pointer: bool
    rates: str = ""

    @property
    def device_class(self) -> DeviceClass:
        """The class of a CPU device, with what was measured."""
        return device_class(self.vec, self.rates)

    def lanes(self, real: np.dtype[Any]) -> int:
        """Lanes of a vector of ``real``."""
        return max(1, self.vec_double if real == np.float64 else self.vec)


@dataclass(frozen=True)
class Limits:
    """What work-groups are chosen by.

    Attributes:
        work_items: most work-items of a one-dimensional work-group.
        local_memory: bytes of local memory that a work-group may take.
        multiple: work-items that run in step; a work-group is best a multiple of it.
        compute_units: work-groups that run at once, at least.
    """

    work_items: int
    local_memory: int
    multiple: int
    compute_units: int


@dataclass(frozen=True)
class Target:
    """A device as the lowering sees it.

    Attributes:
        facts: of the device.
        limits: of its work-groups.
        identity: what results that hold for this device and its driver are filed under.
    """

    facts: Facts
    limits: Limits
    identity: str


def power_above(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def power_below(value: int) -> int:
    """The largest power of two that is not above ``value``, 1 or more."""
    return 1 << (value.bit_length() - 1)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
