"""Fixtures that every test may use.

``backend_device`` runs a test once on every device of every backend. A backend that this machine lacks is a
skip that says why; where the environment variable ``DISPATCHER_TEST_REQUIRE`` (such as ``opencl,cuda``) names
it, it is a failure.

With ``DISPATCHER_CUDA_SIM=1`` the CUDA simulator stands in for the driver, so that CUDA devices are among them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dispatcher import registry
from dispatcher.device import machine
from dispatcher.device.selection import ENVIRONMENT, backend_devices
from dispatcher.interface import Backend, Device
from tests import cudasim

if cudasim.requested():  # before anything imports PyCUDA
    with contextlib.suppress(cudasim.RealDriverError):  # then the tests run on the real device
        cudasim.activate()

REQUIRED = {name for name in os.environ.get("DISPATCHER_TEST_REQUIRE", "").lower().split(",") if name}

if "torch" in REQUIRED:  # else its tests skip without it
    import ml_dtypes  # noqa: F401
    import torch  # noqa: F401

_serial = itertools.count()

Install = Callable[..., None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``backend_device`` its values: every device, and one that stands for each backend without any."""
    if "backend_device" in metafunc.fixturenames:
        found = [device for name in registry.BACKENDS for device in backend_devices(name)]
        ids = [device.id.replace(":", "") for device in found]
        metafunc.parametrize("backend_device", found, indirect=True, ids=ids)


@pytest.fixture
def backend_device(request: pytest.FixtureRequest) -> Device:
    """A usable device; the test is skipped, or fails where the backend is required, when it is not usable."""
    device: Device = request.param
    if not device.available:
        message = f"{device.backend}: {device.reason}"
        if device.backend in REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    return device


@pytest.fixture(autouse=True)
def _no_device_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are refused on a busy machine; tests that run in several processes make it one."""
    monkeypatch.setattr(machine.LoadMeter, "foreign_cores", lambda self: 0.0)
    monkeypatch.setattr(machine, "WATCH_S", 0.0)


@pytest.fixture
def install_backends(monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that replaces the table of backends: ``install_backends(fake, other, keep=("numpy",))``."""

    def install(*backends: Backend, keep: tuple[str, ...] = ("numpy",)) -> None:
        table = {}
        for backend in backends:
            # Probes are remembered by module name, so each installation gets one of its own.
            module = types.ModuleType(f"installed_backend_{next(_serial)}")
            module.BACKEND = backend  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
            table[backend.name] = module.__name__
        table.update({name: registry.BACKENDS[name] for name in keep})
        monkeypatch.setattr(registry, "BACKENDS", table)

    return install


@pytest.fixture
def install_distributions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """A function that lets this process find the distributions in a folder, with the backends that they register."""

    def install(folder: Path) -> None:
        monkeypatch.syspath_prepend(folder)
        registry.registered.cache_clear()
        monkeypatch.setattr(registry, "BACKENDS", registry.Table())

    yield install
    registry.registered.cache_clear()


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20)


@pytest.fixture
def opencl() -> Device:
    """The first usable OpenCL device; the test is skipped, or fails where OpenCL is required, without one."""
    found = backend_devices("opencl")
    usable = next((device for device in found if device.available), None)
    if usable is None:
        message = f"opencl: {found[0].reason if found else 'no device'}"
        (pytest.fail if "opencl" in REQUIRED else pytest.skip)(message)
    return usable
