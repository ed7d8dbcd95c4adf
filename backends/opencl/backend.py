"""The OpenCL backend: probing, what it supports, compilation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dispatcher.backends.opencl.caches import VARIABLE, cache_folder, import_pyopencl, unusable
from dispatcher.backends.opencl.classes import RATES
from dispatcher.backends.opencl.icd import USER_VARIABLES, remedy, unsafe_setting
from dispatcher.backends.opencl.options import ALGORITHMS, Options
from dispatcher.errors import DeviceError, InputError, first_line
from dispatcher.interface import Device, Executable, ExportRequest, LoadedKernel, Roofline
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax, Step
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import UserKernel

__all__ = ["ALGORITHMS", "OpenClBackend"]


class OpenClBackend:
    """See :class:`dispatcher.interface.Backend`. PyOpenCL is imported by the first probe."""

    name = "opencl"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Sequence[Any] = ()
        self._runtimes: dict[int, Any] = {}

    def probe(self) -> Sequence[Device]:
        try:
            import_pyopencl()
            from dispatcher.backends.opencl.runtime import find_devices
        except Exception as error:
            return [self._missing(f"PyOpenCL cannot be imported: {first_line(error)}; {remedy()}")]
        if refusal := unsafe_setting():
            return [self._missing(refusal)]
        try:
            found = find_devices()
        except Exception as error:
            advice = remedy(variables=(*USER_VARIABLES, "LD_LIBRARY_PATH"))
            return [self._missing(f"no OpenCL platform: {first_line(error)}; {advice}")]
        if not found:
            return [self._missing(f"OpenCL platforms were found, but none has a device{_why_none()}")]
        self._found = found
        return [
            Device(self.name, index, each.name, cast(Any, each.kind), facts=each.details)
            for index, each in enumerate(found)
        ]

    def owns(self, device: Device, array: Any) -> bool:
        """Whether ``array``, one of PyOpenCL, is in a context of ``device``."""
        return self._runtime(device).device in array.context.devices

    def footprint(self) -> str:
        """What looking for devices loads: it is tried in another process whenever this changes."""
        from dispatcher.backends.opencl.icd import footprint

        return footprint()

    def leave_out_deadly(self, survives: Callable[[], bool]) -> bool:
        """Leave out the runtimes that kill a process which looks for their devices."""
        from dispatcher.backends.opencl.icd import leave_out_deadly

        return leave_out_deadly(survives)

    def supports(self, operator: Operator, device: Device) -> str | None:
        if operator.precision != "fp32":
            return f"precision {operator.precision} exists on CUDA tensor cores only"
        if operator.dtype == "float64" and self._runtime(device).facts.vec_double == 0:
            return "the device has no double precision (cl_khr_fp64)"
        return next((reason for step in operator.steps if (reason := _no_form(step))), None)

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> Executable:
        from dispatcher.backends.opencl.executable import OpenClExecutable

        parsed = Options.parse(options)
        runtime = self._runtime(device)
        if parsed.algorithm == "auto" and not runtime.facts.cpu:
            parsed = replace(parsed, algorithm="tiled")
        return OpenClExecutable(runtime, operator, parsed)

    def export(self, request: ExportRequest) -> tuple[dict[str, Any], list[str], bytes]:
        """See :class:`dispatcher.interface.Exporter`, and :func:`exporting.export`."""
        from dispatcher.backends.opencl.exporting import export

        for operator in request.cases.values():
            reason = next((reason for step in operator.steps if (reason := _no_form(step))), None)
            if reason is not None:
                raise InputError(f"{request.problem.name} cannot be exported: {reason}")
        return export(request)

    def load_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> LoadedKernel:
        """Build a user's own kernel; see :class:`dispatcher.interface.KernelHost`."""
        runtime = self._runtime(device)
        from dispatcher.backends.opencl.userkernel import load_kernel

        return load_kernel(runtime, kernel, device, scratch)

    def check_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> str:
        """Build a user's own kernel where there is a device that is not to be used; OpenCL has no other compiler."""
        if device.kind == "unknown":
            raise DeviceError("OpenCL has no compiler but a device's own")
        self.load_kernel(kernel, device, scratch)
        return f"on {device.name}"

    def candidates(self, operator: Operator, device: Device) -> Sequence[Mapping[str, Any]]:
        """Options worth measuring for ``operator``; see :func:`dispatcher.timing.tuning.tune`."""
        from dispatcher.backends.opencl.tuning import candidates

        return candidates(self._runtime(device), operator)

    def remember(self, operator: Operator, device: Device, options: Mapping[str, Any], gain: float) -> bool:
        """Use ``options`` for the convolutions of ``operator`` on this device from now on."""
        from dispatcher.backends.opencl.tuning import remember

        return remember(self._runtime(device), operator, Options.parse(options), gain)

    def roofline(self, device: Device, dtype: str) -> Roofline:
        """Multiply-adds and copies by two kernels; float16 operators are computed in float32."""
        from dispatcher.backends.opencl.roofline import Microbenchmarks

        found = Microbenchmarks(self._runtime(device), "float64" if dtype == "float64" else "float32")
        return Roofline(found.peak_gflops(), found.copy_gbytes_per_s(), found.dtype, found.method)

    def calibrate(self, device: Device) -> Mapping[str, str | int | float]:
        """The rates of a CPU device's register tiles."""
        runtime = self._runtime(device)
        if not runtime.facts.cpu:
            return {}
        from dispatcher.backends.opencl.probe import tile_facts

        return tile_facts(runtime)

    def flush_caches(self, device: Device) -> None:
        """Write more device memory than its cache holds, unless the device works in the host's."""
        from dispatcher.backends.opencl.roofline import flush

        runtime = self._runtime(device)
        if not runtime.facts.unified:
            flush(runtime)

    def _runtime(self, device: Device) -> Any:
        """The opened device; opened when it is first needed."""
        from dispatcher.backends.opencl.runtime import OpenClRuntime

        with self._lock:
            if device.index not in self._runtimes:
                if not self._found:
                    self.probe()
                if device.index >= len(self._found):
                    raise DeviceError(f"{device.id} is not available; `dispatcher devices` lists what is")
                found = self._found[device.index]
                try:
                    rates = str(device.facts.get(RATES, ""))
                    self._runtimes[device.index] = OpenClRuntime(found.platform, found.device, rates)
                except Exception as error:
                    raise DeviceError(f"{device.id} ({device.name}) cannot be opened: {first_line(error)}") from error
            return self._runtimes[device.index]

    def _missing(self, reason: str) -> Device:
        return Device(self.name, 0, "no OpenCL device", "unknown", False, reason)


def _no_form(step: Step) -> str | None:
    """None when this backend has kernels for ``step``, else why not."""
    if not isinstance(step, Convolution | Pointwise | Normalize | Softmax | Pool | Reduce):
        return f"backend opencl has no kernel for {step.op} ({type(step).__name__})"
    if isinstance(step, Pool) and step.form.shifted:
        return f"backend opencl has no pooling for {step.op}, whose maximum is subtracted first"
    return None


def _why_none() -> str:
    """PoCL's usual reason for having no device, where it is one here."""
    reason = unusable(cache_folder())
    return "" if reason is None else f": PoCL has none when {reason}; set {VARIABLE} to a folder that can be"
