"""Run fused 3-D operators, described once in a YAML file, on CUDA, OpenCL or NumPy.

``run`` calls a problem once, ``compile`` prepares it for many calls, ``devices`` and ``problems`` list what
there is, ``explain`` says what a call does, ``verify`` compares devices with the reference, ``verify_kernel`` a kernel
of your own, ``benchmark`` times devices, ``tune_problem`` finds the fastest options on a device, and ``doctor`` says
what keeps devices from working.

Importing this package loads neither a GPU library nor NumPy: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatcher.call.compiled import CompiledOperator, compile, explain, run
    from dispatcher.call.explanation import Explanation
    from dispatcher.check.judging import Judgement, verify_kernel
    from dispatcher.check.verifying import Verification, verify
    from dispatcher.device.diagnosis import Diagnosis, doctor
    from dispatcher.device.selection import FallbackWarning, devices
    from dispatcher.errors import (
        BuildError,
        DeviceError,
        DeviceMemoryError,
        DispatcherError,
        DtypeError,
        GeometryError,
        InputError,
        KernelError,
        ProblemFileError,
        VerificationError,
    )
    from dispatcher.interface import Device
    from dispatcher.problem.loader import load_problem
    from dispatcher.problem.loader import problem_names as problems
    from dispatcher.problem.model import Problem
    from dispatcher.problem.operator import Operator
    from dispatcher.timing.racing import benchmark
    from dispatcher.timing.results import Benchmark
    from dispatcher.timing.tuning import TuneResult, tune_problem

__version__ = "0.1.0"

__all__ = [
    "Benchmark",
    "BuildError",
    "CompiledOperator",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "Diagnosis",
    "DispatcherError",
    "DtypeError",
    "Explanation",
    "FallbackWarning",
    "GeometryError",
    "InputError",
    "Judgement",
    "KernelError",
    "Operator",
    "Problem",
    "ProblemFileError",
    "TuneResult",
    "Verification",
    "VerificationError",
    "__version__",
    "benchmark",
    "compile",
    "devices",
    "doctor",
    "explain",
    "load_problem",
    "problems",
    "run",
    "tune_problem",
    "verify",
    "verify_kernel",
]

#: Public name to the module that holds it; ``problems`` has another name there.
_HOMES = {
    "timing.racing": ("benchmark",),
    "timing.results": ("Benchmark",),
    "call.compiled": ("CompiledOperator", "compile", "explain", "run"),
    "device.diagnosis": ("Diagnosis", "doctor"),
    "errors": (
        "BuildError",
        "DeviceError",
        "DeviceMemoryError",
        "DispatcherError",
        "DtypeError",
        "GeometryError",
        "InputError",
        "KernelError",
        "ProblemFileError",
        "VerificationError",
    ),
    "call.explanation": ("Explanation",),
    "interface": ("Device",),
    "check.judging": ("Judgement", "verify_kernel"),
    "problem.loader": ("load_problem", "problems"),
    "problem.operator": ("Operator",),
    "problem.model": ("Problem",),
    "device.selection": ("FallbackWarning", "devices"),
    "timing.tuning": ("TuneResult", "tune_problem"),
    "check.verifying": ("Verification", "verify"),
}
_LAZY = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    value = getattr(module, "problem_names" if name == "problems" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
