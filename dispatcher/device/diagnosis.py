"""What keeps devices from working, and what would fix it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher import registry
from dispatcher.device import selftest
from dispatcher.device.childprocess import no_python
from dispatcher.device.filecache import REMEDY, cache_root, nothing_kept
from dispatcher.device.machine import available_bytes
from dispatcher.device.selection import ENVIRONMENT, describe, devices
from dispatcher.interface import CALIBRATION, Device, Finding, device_dict
from dispatcher.problem.messages import counted
from dispatcher.problem.shown import Shown

LITTLE_MEMORY = 2 << 30


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """What :func:`doctor` found.

    Attributes:
        findings: everything that was looked at, with a verdict each.
        devices: every device of every backend.
        working: the devices, beside the reference, that passed their self-test, or that are usable where
            self-tests are switched off.
    """

    findings: tuple[Finding, ...]
    devices: tuple[Device, ...]
    working: tuple[Device, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers, ready for JSON."""
        return {
            "working": [device.id for device in self.working],
            "findings": [dict(vars(finding)) for finding in self.findings],
            "devices": [device_dict(device) for device in self.devices],
        }

    def _headline(self) -> str:
        names = ", ".join(device.id for device in self.working) or "none"
        return f"{names} work{'' if len(self.working) > 1 else 's'}, of {counted(len(self.devices), 'device')}"

    def _facts(self) -> Mapping[str, object]:
        wrong = [each for each in self.findings if each.verdict != "ok"]
        remedies = [f"{each.subject}: {each.remedy}" for each in wrong if each.remedy]
        return {"findings": [f"{each.subject}: {each.detail}" for each in wrong], "remedies": remedies}


def doctor(*, retest: bool = False) -> Diagnosis:
    """Look at this machine: what there is, what works, and what would fix the rest.

    Args:
        retest: try every device out again, whatever is known from earlier.

    Raises:
        InputError: the environment variable that configures self-tests makes no sense.
    """
    found = devices(retest=retest)  # first: looking for them finds out which runtimes are best left out
    findings = [*_package(), *_host()]
    for name, module in registry.BACKENDS.items():
        findings += _backend(name, module)
    findings += [_device(device) for device in found]
    working = tuple(device for device in found if device.kind != "reference" and device.available)
    if not working:
        detail = "no accelerated device works; everything runs on NumPy"
        findings.append(Finding("devices", "acceleration", "problem", detail, "fix one of the problems above"))
    return Diagnosis(tuple(findings), tuple(found), working)


def _package() -> Iterator[Finding]:
    from dispatcher import __version__

    yield Finding("package", "kernel-dispatcher", "ok", __version__)
    yield Finding("package", "Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Finding("package", "NumPy", "ok", np.__version__)
    if selftest.time_limit_s() is None:
        detail = f"are switched off: {selftest.VARIABLE} is {os.environ[selftest.VARIABLE]!r}"
        yield Finding("package", "self-tests", "note", detail, f"unset {selftest.VARIABLE}")
    elif refusal := no_python():
        yield Finding("package", "self-tests", "note", f"are left out: {refusal}")
    for each in registry.registered():
        detail = f"registers the backend {each.name!r}, {each.target}"
        if each.refusal:
            remedy = f"python -m pip uninstall {each.distribution.split()[0]}"
            yield Finding("package", each.distribution, "problem", f"{detail}: {each.refusal}", remedy)
        else:
            yield Finding("package", each.distribution, "ok", detail)
    named = os.environ.get(ENVIRONMENT)
    if named:
        yield Finding("package", ENVIRONMENT, "note", f"is {named!r}: used where no device is named")


def _host() -> Iterator[Finding]:
    try:
        folder = cache_root()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield Finding("host", "cache folder", "ok", str(folder))
    except OSError as error:
        yield Finding("host", "cache folder", "problem", nothing_kept(error), REMEDY)
    available = available_bytes()
    if available is None:
        yield Finding("host", "memory", "note", "this system does not say how much is available")
    elif available < LITTLE_MEMORY:
        yield Finding("host", "memory", "note", f"only {available / 2**30:.1f} GiB are available", "end other programs")
    else:
        yield Finding("host", "memory", "ok", f"{available / 2**30:.1f} GiB are available")


def _backend(name: str, target: str) -> list[Finding]:
    """What a backend's module ``diagnosis`` finds, where it has one."""
    module = target.partition(":")[0]
    # Those of others were imported where that is safe, and need not be packages.
    if registry.origin(name) is not None and not hasattr(sys.modules.get(module), "__path__"):
        return []
    try:
        if importlib.util.find_spec(f"{module}.diagnosis") is None:
            return []
        return list(importlib.import_module(f"{module}.diagnosis").diagnose())
    except Exception as error:  # a broken installation may raise anything
        return [Finding(name, module, "problem", f"it cannot be examined: {describe(error)}")]


def _device(device: Device) -> Finding:
    subject = device.id if device.available else f"{device.id} {device.name}"
    tested = device.facts.get("self_test")
    if device.kind == "reference":
        return Finding("devices", subject, "ok", device.name)
    if not device.available:
        return Finding("devices", subject, "problem" if tested else "note", device.reason or "not available")
    speed = selftest.speed(device)
    measured = f", {speed:.3g} GFLOP/s in its self-test" if speed else ""
    measured += f"; {device.facts[CALIBRATION]}" if CALIBRATION in device.facts else ""
    return Finding("devices", subject, "ok", f"{device.name}{measured}")
