"""What the CUDA tests share: a CUDA device, real or simulated, and a fresh view of it.

With ``DISPATCHER_CUDA_SIM=1`` the simulator stands in for the driver. Where there is no device, tests skip
with the probe's reason, or fail if the environment variable ``DISPATCHER_TEST_REQUIRE`` names ``cuda``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import cudasim

SIMULATED = cudasim.requested()
if SIMULATED:
    try:
        cudasim.activate()
    except cudasim.RealDriverError:
        SIMULATED = False

from dispatcher.backends.cuda import BACKEND, driver, tiles, toolkit  # noqa: E402
from dispatcher.backends.cuda.executable import CudaExecutable  # noqa: E402
from dispatcher.backends.cuda.tiles import HaloTask, HaloTile  # noqa: E402
from dispatcher.check.comparison import verify_result  # noqa: E402
from dispatcher.interface import Device  # noqa: E402
from dispatcher.problem.arguments import bind_arguments, sort_arguments  # noqa: E402
from dispatcher.problem.loader import load_problem  # noqa: E402
from dispatcher.problem.operator import Operator  # noqa: E402
from tests.strategies import REQUIRED  # noqa: E402

simulator_only = pytest.mark.skipif(not SIMULATED, reason="needs the CUDA simulator (DISPATCHER_CUDA_SIM=1)")


def device(index: int = 0) -> Device:
    """A usable device; skips the test, or fails it where CUDA is required."""
    found = BACKEND.probe()
    chosen = found[min(index, len(found) - 1)]
    if not chosen.available:
        (pytest.fail if "cuda" in REQUIRED else pytest.skip)(f"cuda: {chosen.reason}")
    return chosen


@contextmanager
def machine(**settings: Any) -> Iterator[None]:
    """Another simulated machine; see :func:`tests.cudasim.emulate`. Devices that were opened are set aside
    meanwhile."""
    before = dict(driver._contexts)
    driver._contexts.clear()
    try:
        with cudasim.emulate(**settings):
            try:
                yield
            finally:
                for context in driver._contexts.values():
                    context.close()
    finally:
        driver._contexts.clear()
        driver._contexts.update(before)


def operator(name: str, case: str = "sample", precision: str = "fp32", dtype: str = "float32") -> Operator:
    """A bundled problem bound to a case."""
    problem = load_problem(name)
    return bind_arguments(problem, sort_arguments(problem, {}), case=case, dtype=dtype, precision=precision)


def compiled(op: Operator, index: int = 0, **options: Any) -> CudaExecutable:
    """``op`` compiled for device ``index``."""
    chosen = device(index)
    assert BACKEND.supports(op, chosen) is None
    return BACKEND.compile(op, chosen, options)


def only_tiles(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[HaloTask, HaloTile], Any]) -> list[HaloTile]:
    """Let the tensor-core kernel have those tiles only for which ``wanted``, a mask, is true; returns what it was
    offered."""
    every, offered = tiles.halo_tiles, []

    def some(task: HaloTask) -> HaloTile:
        found = every(task)
        offered.append(found.pick(np.broadcast_to(wanted(task, found), found.voxels.shape)))
        return offered[-1]

    monkeypatch.setattr(tiles, "halo_tiles", some)
    return offered


def poisoned(op: Operator) -> np.ndarray:
    """An output that holds NaN where nothing is written."""
    return np.full(op.output_shape, np.nan, op.dtype)


def check(op: Operator, tensors: Mapping[str, np.ndarray], index: int = 0, **options: Any) -> np.ndarray:
    """Run and compare with the reference's error bound."""
    result: np.ndarray = compiled(op, index, **options)(tensors, poisoned(op))
    comparison = verify_result(op, tensors, result)
    assert comparison.passed, comparison.reason or comparison
    return result


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, *changes: tuple[str, str]) -> None:
    """Use kernels in whose ``file`` the first occurrence of each old text became the new one; ``folder`` is to hold
    them."""
    shutil.copytree(toolkit.KERNELS, folder)
    text = (folder / file).read_text()
    for old, new in changes:
        assert old in text, f"{file} no longer has the text that is to be changed: {old}"
        text = text.replace(old, new, 1)
    (folder / file).write_text(text)
    monkeypatch.setattr(toolkit, "KERNELS", folder)


class Foreign:
    """An array that is not ours: memory of its own, ``offset`` bytes into an allocation of ``size`` more, and
    ``__cuda_array_interface__``."""

    def __init__(
        self, index: int, shape: tuple[int, ...], dtype: Any, strides: Any, size: int, offset: int = 0
    ) -> None:
        self.context = driver.context(index)
        self.shape, self.dtype, self.strides = shape, np.dtype(dtype), strides
        with self.context.active():
            self.block = self.context.driver.mem_alloc(size + offset)
        self.address = int(self.block) + offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False),
            "strides": self.strides, "version": 3,
        }  # fmt: skip

    def free(self) -> None:
        """Give the memory back."""
        with self.context.active():
            self.block.free()


class OnDevice(Foreign):
    """A copy of an array on the device."""

    def __init__(self, array: np.ndarray, index: int = 0, *, offset: int = 0, strides: Any = None) -> None:
        packed = np.ascontiguousarray(array)
        super().__init__(index, array.shape, array.dtype, strides, packed.nbytes + 16, offset)
        with self.context.active():
            self.context.driver.memcpy_htod(self.address, packed)

    def get(self) -> np.ndarray:
        """A copy on the host."""
        result = np.empty(self.shape, self.dtype)
        with self.context.active():
            self.context.driver.memcpy_dtoh(result, self.address)
        return result
