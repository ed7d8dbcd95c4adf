"""What a device allows a work-group, and the powers of two that work-groups are cut by."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from dispatcher.backends.opencl.runtime import OpenClRuntime

#: Work-items that run in step on a device that does not say: a multiple of every common width.
DEFAULT_MULTIPLE = 64


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


def limits_of(runtime: OpenClRuntime) -> Limits:
    """The limits of a device."""
    device = runtime.device
    multiple = 0
    for name in (
        "preferred_work_group_size_multiple",  # OpenCL 3.0
        "warp_size_nv",
        "wavefront_width_amd",
    ):
        try:
            multiple = multiple or int(getattr(device, name))
        except (cl.Error, AttributeError):
            continue  # this device does not know the question
    return Limits(
        work_items=min(device.max_work_group_size, device.max_work_item_sizes[0]),
        local_memory=device.local_mem_size,
        multiple=multiple or DEFAULT_MULTIPLE,
        compute_units=device.max_compute_units,
    )


def power_above(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def power_below(value: int) -> int:
    """The largest power of two that is not above ``value``, 1 or more."""
    return 1 << (value.bit_length() - 1)
