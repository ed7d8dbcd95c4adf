"""The kernels that measure OpenCL devices: they copy all they claim to, in the form for CPUs and in that for GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED

from dispatcher.device.selection import backend_devices


@pytest.fixture(scope="module")
def runtime() -> Any:
    """The first usable OpenCL device, opened."""
    device = next((found for found in backend_devices("opencl") if found.available), None)
    if device is None:
        (pytest.fail if "opencl" in REQUIRED else pytest.skip)("opencl: no usable device")
    from dispatcher.backends.opencl.runtime import OpenClRuntime, find_devices

    found = find_devices()[device.index]
    return OpenClRuntime(found.platform, found.device)


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_is_copied(runtime: Any, monkeypatch: pytest.MonkeyPatch, cpu: bool, dtype: str) -> None:
    import pyopencl as cl

    from dispatcher.backends.opencl.roofline import Microbenchmarks

    if dtype == "float64" and runtime.facts.vec_double == 0:
        pytest.skip("the device has no double precision")
    monkeypatch.setattr(runtime, "facts", dataclasses.replace(runtime.facts, cpu=cpu), raising=False)
    buffers: list[Any] = []
    make = runtime.buffer
    monkeypatch.setattr(runtime, "buffer", lambda nbytes: buffers.append(make(nbytes)) or buffers[-1])
    found = Microbenchmarks(runtime, dtype)
    assert 0 < found.gflops_now() < 1e6
    assert 0 < found.copy_gbytes_per_s(8 << 20) < 1e5
    _, source, target = buffers
    assert source.size == target.size > 7 << 20
    result = np.zeros(target.size // np.dtype(dtype).itemsize, dtype)
    with cl.CommandQueue(runtime.context) as queue:
        cl.enqueue_copy(queue, result, target, is_blocking=True)
    assert (result == 1).all()


def test_a_cache_of_the_device_s_own_is_overwritten(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.opencl.roofline import flush

    sizes: list[int] = []
    make = runtime.buffer
    monkeypatch.setattr(runtime, "buffer", lambda nbytes: sizes.append(nbytes) or make(nbytes))
    flush(runtime)
    assert sizes == [2 * max(1 << 20, runtime.device.global_mem_cache_size)]
