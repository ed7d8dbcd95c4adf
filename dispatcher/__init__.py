"""Run fused operators of one to three dimensions, described once in a YAML file, on CUDA, OpenCL or NumPy.

``run`` calls a problem once, ``compile`` prepares it for many calls, ``devices`` and ``problems`` list what
there is, ``explain`` says what a call does, ``verify`` compares devices with the reference, ``verify_kernel`` a kernel
of your own, ``benchmark`` times devices, ``tune_problem`` finds the fastest options on a device, and ``doctor`` says
what keeps devices from working.

Importing this package loads neither a GPU library nor NumPy: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an alias of the same name exports it
    from dispatcher.call.compiled import CompiledOperator as CompiledOperator
    from dispatcher.call.compiled import compile as compile
    from dispatcher.call.compiled import explain as explain
    from dispatcher.call.compiled import run as run
    from dispatcher.call.explanation import Explanation as Explanation
    from dispatcher.check.judging import Judgement as Judgement
    from dispatcher.check.judging import verify_kernel as verify_kernel
    from dispatcher.check.verifying import Verification as Verification
    from dispatcher.check.verifying import verify as verify
    from dispatcher.device.diagnosis import Diagnosis as Diagnosis
    from dispatcher.device.diagnosis import doctor as doctor
    from dispatcher.device.selection import FallbackWarning as FallbackWarning
    from dispatcher.device.selection import devices as devices
    from dispatcher.errors import BuildError as BuildError
    from dispatcher.errors import DeviceError as DeviceError
    from dispatcher.errors import DeviceMemoryError as DeviceMemoryError
    from dispatcher.errors import DispatcherError as DispatcherError
    from dispatcher.errors import DtypeError as DtypeError
    from dispatcher.errors import GeometryError as GeometryError
    from dispatcher.errors import InputError as InputError
    from dispatcher.errors import KernelError as KernelError
    from dispatcher.errors import ProblemFileError as ProblemFileError
    from dispatcher.errors import UnsupportedError as UnsupportedError
    from dispatcher.errors import VerificationError as VerificationError
    from dispatcher.interface import Device as Device
    from dispatcher.problem.loader import load_problem as load_problem
    from dispatcher.problem.loader import problem_names as problems  # noqa: F401
    from dispatcher.problem.model import Problem as Problem
    from dispatcher.problem.operator import Operator as Operator
    from dispatcher.timing.racing import benchmark as benchmark
    from dispatcher.timing.results import Benchmark as Benchmark
    from dispatcher.timing.tuning import TuneResult as TuneResult
    from dispatcher.timing.tuning import tune_problem as tune_problem

__version__ = "0.1.0"

#: Public name to the module that holds it; ``problems`` has another name there.
_HOMES = {
    "timing.racing": ("benchmark",),
    "timing.results": ("Benchmark",),
    "call.compiled": ("CompiledOperator", "compile", "explain", "run"),
    "device.diagnosis": ("Diagnosis", "doctor"),
    "errors": (
        *("BuildError", "DeviceError", "DeviceMemoryError", "DispatcherError", "DtypeError"),
        *("GeometryError", "InputError", "KernelError", "ProblemFileError"),
        *("UnsupportedError", "VerificationError"),
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

__all__ = [*_LAZY, "__version__"]  # noqa: PLE0604 (texts, all of them)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    value = getattr(module, "problem_names" if name == "problems" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
