"""Trying a device out: the child process that a device's self-test runs; see :mod:`dispatcher.device.selftest`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from dispatcher import registry
from dispatcher.check.comparison import poisoned, verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.device.childprocess import Report
from dispatcher.device.selftest import SelfTest
from dispatcher.errors import DeviceError, DeviceMemoryError, first_line
from dispatcher.interface import CALIBRATION, Backend, Calibrated, Device
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem

PROBLEM = "conv-transpose3d-layernorm-gelu-scaling"
#: Half a GFLOP: enough to tell devices apart, little enough for the slowest.
SIZES = {"batch_size": 2, "depth": 4, "height": 16, "width": 16, "scaling_factor": 0.5}
#: The speed is the median of the calls that fit into spells of this time. Pauses in between let a short
#: disturbance pass.
SPELL_S, SPELLS, PAUSE_S = 0.07, 3, 0.1
#: Slower devices are simulators, on which the measurement takes minutes; and the seconds that it may take.
CALIBRATED_GFLOPS, CALIBRATION_S = 2.0, 8


def child(report: Report, module: str, *arguments: str) -> None:
    """What the child process does: list a backend's devices or test one.

    It reports that it begins, and then a :class:`SelfTest`; where the backend measures what it chooses by, that this
    begins, and what it found.
    """
    report("begins")
    backend = registry.load(module)
    if arguments[0] == "list":
        backend.probe()
        found = SelfTest("ok")
    else:
        found = _test(backend, int(arguments[1]), arguments[2])
    report(asdict(found))
    if found.gflops is not None and isinstance(backend, Calibrated):
        report("measures")
        if found.gflops < CALIBRATED_GFLOPS:
            report({CALIBRATION: f"what kernels are chosen by is not measured below {CALIBRATED_GFLOPS:g} GFLOP/s"})
            return
        with _alarm(CALIBRATION_S):
            report(dict(backend.calibrate(find_again(backend, int(arguments[1]), arguments[2]))))


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """End this process where the body takes longer; no driver can put that off."""
    if not hasattr(signal, "alarm"):  # POSIX only
        yield
        return
    before = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(before)


def find_again(backend: Backend, index: int, name: str) -> Device:
    """The device that another process has seen, usable or not.

    Raises:
        DeviceError: this process sees another one in its place, or none.
    """
    found = backend.probe()
    matches = [device for device in found if device.name == name]
    if not matches:
        seen = next((device.name for device in found if device.index == index), "nothing")
        raise DeviceError(f"could not be run: it found {seen} in the place of {name}")
    return next((device for device in matches if device.index == index), matches[0])


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
    except (MemoryError, DeviceMemoryError, OSError) as error:  # others may have taken the memory, or the disk
        return SelfTest("error", f"could not be run: {first_line(error)}")
    except Exception as error:
        return SelfTest("failed", f"failed: {first_line(error)}")


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
