"""What the CUDA backend measures of a device, and how it empties the device's cache."""

from __future__ import annotations

import pytest

from dispatcher.backends.cuda import BACKEND, roofline
from dispatcher.backends.cuda.backend import _opened
from dispatcher.interface import Measurable, Timings
from tests.cuda_support import SIMULATED, compiled, device, operator
from tests.strategies import tensors_of


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_device_s_limits_are_measured(dtype: str) -> None:
    chosen = device()
    assert isinstance(BACKEND, Measurable)
    if SIMULATED:  # short runs are enough to see that the kernels run
        found = roofline.Microbenchmarks(*_opened(chosen), dtype, run_s=1e-9, copy_bytes=1 << 16)
    else:
        found = roofline.Microbenchmarks(*_opened(chosen), dtype)
    assert 0 < found.peak_gflops() < 1e6
    assert 0 < found.copy_gbytes_per_s() < 1e5
    assert found.dtype == dtype
    assert "CUDA events" in found.method


def test_the_cache_of_a_device_is_emptied() -> None:
    BACKEND.flush_caches(device())


def test_a_call_s_times_are_on_the_device_s_clock() -> None:
    op = operator("conv-transpose3d-max-max-sum")
    timings = Timings()
    compiled(op)(tensors_of(op), None, timings)
    assert timings.clock == "device"
    assert not timings.shared_memory
    assert timings.kernel_s > 0
