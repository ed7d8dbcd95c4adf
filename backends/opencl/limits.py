"""What a device allows a work-group."""

from __future__ import annotations

import pyopencl as cl

from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.target import Limits

#: Work-items that run in step on a device that does not say: a multiple of every common width.
DEFAULT_MULTIPLE = 64


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
