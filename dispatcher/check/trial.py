"""Trying a device out: the child process that a device's self-test runs; see :mod:`dispatcher.device.selftest`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from dispatcher import registry
from dispatcher.check.comparison import poisoned, verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.device.childprocess import Report
from dispatcher.device.selftest import FAILED, SelfTest
from dispatcher.errors import DeviceError, first_line
from dispatcher.interface import Backend, Device
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem

PROBLEM = "conv-transpose3d-layernorm-gelu-scaling"
#: Half a GFLOP: enough to tell devices apart, little enough for the slowest.
SIZES = {"batch_size": 2, "depth": 4, "height": 16, "width": 16, "scaling_factor": 0.5}
#: The speed is the median of the calls that fit into spells of this time. Pauses in between let a short
#: disturbance pass.
SPELL_S, SPELLS, PAUSE_S = 0.07, 3, 0.1


def child(report: Report, module: str, *arguments: str) -> None:
    """What the child process does: list a backend's devices or test one, and report a :class:`SelfTest`."""
    backend = registry.load(module)
    if arguments[0] == "list":
        backend.probe()
        found = SelfTest("ok")
    else:
        found = _test(backend, int(arguments[1]), arguments[2])
    report(asdict(found))


def find_again(backend: Backend, index: int, name: str) -> Device:
    """The device that another process has seen, usable or not.

    Raises:
        DeviceError: this process sees another one in its place, or none.
    """
    found: Mapping[int, Device] = {device.index: device for device in backend.probe()}
    device = found.get(index)
    if device is None or device.name != name:
        seen = "nothing" if device is None else device.name
        raise DeviceError(f"could not be run: it found {seen} in the place of {name}")
    return device


def _test(backend: Backend, index: int, name: str) -> SelfTest:
    """Run the test's operator on a device of ``backend``."""
    try:
        device = find_again(backend, index, name)
    except DeviceError as error:
        return SelfTest("error", str(error))
    if not device.available:
        return SelfTest("closed", f"could not open it: {device.reason}")
    try:
        return _measure(backend, device)
    except DeviceError as error:
        return SelfTest("closed", f"could not open it: {first_line(error)}")
    except Exception as error:
        return SelfTest("error", f"{FAILED}: {first_line(error)}")


def _measure(backend: Backend, device: Device) -> SelfTest:
    problem = load_problem(PROBLEM)
    operator = bind_arguments(problem, sort_arguments(problem, SIZES), case="kernelbench")
    reason = backend.supports(operator, device)
    if reason is not None:
        return SelfTest("unsupported", f"was left out: {reason}")
    tensors = random_tensors(operator, 0)
    executable = backend.compile(operator, device, {})
    result = poisoned(operator.output_shape, operator.dtype)
    for array in tensors.values():
        array.flags.writeable = False
    executable(tensors, result)
    comparison = verify_result(operator, tensors, result)
    if not comparison.passed:
        return SelfTest("wrong", f"gave a wrong result: {comparison.reason}")
    speeds = []
    for spell in range(SPELLS):
        time.sleep(PAUSE_S if spell else 0.0)
        begin = time.perf_counter()
        while time.perf_counter() - begin < SPELL_S:
            start = time.perf_counter()
            executable(tensors, result)
            speeds.append(operator.flops / max(time.perf_counter() - start, 1e-9) / 1e9)
    low, median, high = np.quantile(speeds, [0.25, 0.5, 0.75]).tolist()
    return SelfTest("ok", "", median, (low, high))
